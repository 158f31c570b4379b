"""The handlers of this process: what they receive, and who is registered for which event type under which names."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final, TypeVar
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django.conf import settings as django_settings
from django.utils.module_loading import autodiscover_modules

from django_outbox.conf import get_settings, problems
from django_outbox.errors import DuplicateHandler, InvalidEventType, InvalidHandlerName
from django_outbox.payload import shown

Function = TypeVar("Function", bound=Callable[..., Any])

RESERVED_PREFIXES: Final = ("outbox.", "email.", "webhook.", "task.")

_TYPE: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_PATTERN: Final = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*(\.\*)?")
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TYPE_LENGTH: Final = 128
_NAME_LENGTH: Final = 64


@dataclass(frozen=True, kw_only=True)
class Event:
    """
    What a handler receives. The payload is this handler's own copy.

    ``occurred_at`` is aware, in UTC. ``attempt`` is 1 at the first try.
    ``idempotency_key`` is the same at every redelivery of this event to this handler,
    also after the handler was renamed.
    """

    id: UUID
    type: str
    payload: Any
    occurred_at: datetime
    aggregate_type: str
    aggregate_id: str
    organization_id: str
    request_id: str
    causation_id: UUID | None
    headers: dict[str, Any]
    handler: str
    attempt: int
    idempotency_key: str


def check_type(type_: object) -> None:
    """Raise `InvalidEventType` unless an event of this type may be emitted by a project."""
    if not isinstance(type_, str) or len(type_) > _TYPE_LENGTH or not _TYPE.fullmatch(type_):
        raise InvalidEventType(
            f"{shown(type_)} is not an event type. Write dotted lower-case words in the past tense, such as"
            f' "user.created": letters a-z, digits, "_" and "-", at least one dot, at most {_TYPE_LENGTH} characters.'
        )
    if type_.startswith(RESERVED_PREFIXES):
        raise InvalidEventType(
            f"{type_!r} begins with a prefix that is reserved for the framework's own announcements"
            f" ({', '.join(RESERVED_PREFIXES)}). Choose another first word."
        )


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A registered function: what it handles, under which names, and how it is run."""

    name: str
    patterns: tuple[str, ...]
    function: Callable[[Event], Any]
    timeout: float | None
    atomic: bool
    aliases: tuple[str, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name under which its deliveries may stand."""
        return (self.name, *self.aliases)

    @cached_property
    def oldest_name(self) -> str:
        """The name in its idempotency keys."""
        return self.aliases[0] if self.aliases else self.name

    @cached_property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        function: Any = self.function
        return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    @property
    def source(self) -> str:
        """Where the function is defined."""
        function = inspect.unwrap(self.function)
        return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"

    def handles(self, type_: str) -> bool:
        """Return whether an event of this type is delivered to it."""
        return any(_matches(pattern, type_) for pattern in self.patterns)


def _matches(pattern: str, type_: str) -> bool:
    if pattern == "*":
        return not type_.startswith(RESERVED_PREFIXES)
    if pattern.endswith(".*"):
        return type_.startswith(pattern[:-1])
    return pattern == type_


def _overlap(left: str, right: str) -> bool:
    """Return whether some event type could match both patterns."""
    if "*" in {left, right}:
        other = right if left == "*" else left
        return other == "*" or not other.startswith(RESERVED_PREFIXES)
    if left.endswith(".*") and right.endswith(".*"):
        return left[:-1].startswith(right[:-1]) or right[:-1].startswith(left[:-1])
    return _matches(left, right) or _matches(right, left)


class Registry:
    """The handlers of this process, in registration order."""

    def __init__(self) -> None:
        self._handlers: tuple[Handler, ...] = ()
        self.version = 0
        """Changes with every registration."""
        self._lock = threading.Lock()
        self._deliveries: dict[str, str] = {}
        self._resolved: dict[tuple[str, str], Handler | None] = {}

    def handlers(self) -> tuple[Handler, ...]:
        """Return every handler."""
        return self._handlers

    def for_type(self, type_: str) -> tuple[Handler, ...]:
        """Return the handlers of an event type."""
        return tuple(handler for handler in self._handlers if handler.handles(type_))

    def deliveries(self, type_: str) -> str:
        """Return the ``deliveries`` of a new event of this type, as JSON text: every name, each owed."""
        text = self._deliveries.get(type_)
        if text is None:
            text = json.dumps({handler.name: None for handler in self.for_type(type_)}, separators=(",", ":"))
            # Types come from code, but nothing stops a caller from making them up at run time.
            if len(self._deliveries) < 10_000:
                self._deliveries[type_] = text
        return text

    def resolve(self, type_: str, name: str) -> Handler | None:
        """Return the handler that a delivery of this name is owed to, by its name or an alias."""
        key = (type_, name)
        if key not in self._resolved:
            if len(self._resolved) >= 10_000:
                self._resolved.clear()
            self._resolved[key] = next(
                (handler for handler in self._handlers if name in handler.names and handler.handles(type_)), None
            )
        return self._resolved[key]

    def add(self, handler: Handler) -> None:
        """
        Add a handler; the same function registered again replaces itself.

        :raises DuplicateHandler: another function has one of its names for some type in common.
        """
        with self._lock:
            kept: list[Handler] = []
            place: int | None = None
            for other in self._handlers:
                if not self._clash(handler, other):
                    kept.append(other)
                elif self._same(handler, other):
                    place = len(kept) if place is None else place
                else:
                    shared = sorted(set(handler.names) & set(other.names))
                    raise DuplicateHandler(
                        f"The handler name {shared[0]!r} is taken: {other.source} has it for"
                        f" {', '.join(other.patterns)}, and {handler.source} wants it for"
                        f" {', '.join(handler.patterns)}. Some event type could match both; give one another name."
                    )
            kept.insert(len(kept) if place is None else place, handler)
            self.replace(kept)

    def replace(self, handlers: Iterable[Handler]) -> None:
        """Make these the handlers, all at once."""
        self._handlers = tuple(handlers)
        self.version += 1
        self._deliveries = {}
        self._resolved = {}

    @staticmethod
    def _clash(left: Handler, right: Handler) -> bool:
        return bool(set(left.names) & set(right.names)) and any(
            _overlap(a, b) for a in left.patterns for b in right.patterns
        )

    @staticmethod
    def _same(left: Handler, right: Handler) -> bool:
        # Two lambdas of one scope have one qualified name and are not the same function.
        return left.function is right.function or (left.source == right.source and "<lambda>" not in left.source)


registry: Final = Registry()


def on_event(
    *types: str, name: str, timeout: float | timedelta | None = None, atomic: bool = False, aliases: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """
    Register a function, sync or async, for event types under a persisted name.

    Every event of a type, emitted while the function is registered, is delivered to it
    at least once. ``"user.*"`` is a prefix, ``"*"`` every type but the framework's own
    announcements. The name stands in the database: to change it, keep the former ones
    in ``aliases``, oldest first. ``timeout`` is in seconds. ``atomic=True`` runs the
    function in a transaction that also records its delivery, so its effects on the
    event's database happen exactly once; keep such a function short.

    The function is returned unchanged.

    :raises InvalidHandlerName: for a name or alias that is not kebab-case.
    :raises InvalidEventType: for a malformed type, or none.
    :raises DuplicateHandler: when another function has the name for an overlapping type.
    """
    given: tuple[object, ...] = types
    names: tuple[object, ...] = (name, *((aliases,) if isinstance(aliases, str) else aliases))
    for each in names:
        if not isinstance(each, str) or len(each) > _NAME_LENGTH or not _NAME.fullmatch(each):
            raise InvalidHandlerName(
                f"{shown(each)} is not a handler name. Write it in kebab-case, such as"
                f' {_kebab(each)!r}: a-z, digits and single "-", at most {_NAME_LENGTH} characters.'
            )
    if len(set(names)) != len(names):
        raise InvalidHandlerName(f"The handler {name!r} names itself, or one name twice, in aliases.")
    if not given or any(not isinstance(pattern, str) for pattern in given):
        raise InvalidEventType(
            f'on_event() of handler {name!r} needs event types, such as @on_event("user.created", ...).'
        )
    # Plain text from here on: a member of a str enum prints as something else than its value.
    name, *former = (str.__str__(each) for each in names if isinstance(each, str))
    patterns = tuple(dict.fromkeys(str.__str__(pattern) for pattern in types))
    for pattern in patterns:
        valid = _PATTERN.fullmatch(pattern) and (pattern.endswith("*") or _TYPE.fullmatch(pattern))
        if not valid or len(pattern) > _TYPE_LENGTH:
            raise InvalidEventType(
                f"{shown(pattern)}, which handler {name!r} wants, is not an event type. Write"
                ' "user.created" for one type, "user.*" for a prefix or "*" for all.'
            )
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and not 0 < seconds <= 86_400:
        raise ValueError(f"The timeout of handler {name!r} is {seconds} s; it must lie between 0 and one day.")

    def register(function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"Handler {name!r} is a {type(function).__name__}, not a function.")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"Handler {name!r} is a generator, so calling it runs nothing. Remove its yield.")
        handler = Handler(
            name=name, patterns=patterns, function=function, timeout=seconds, atomic=atomic, aliases=tuple(former)
        )
        if atomic and handler.is_async:
            raise TypeError(
                f"Handler {name!r} is async and atomic=True; Django's transactions are synchronous. Make it a plain"
                " function."
            )
        registry.add(handler)
        return function

    return register


def _kebab(name: object) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name if isinstance(name, str) else "")
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "audit-log"


def discover_handlers() -> None:
    """Import the module named by ``HANDLERS_MODULE`` in every installed app that has one."""
    # A project whose OUTBOX is wrong must still start far enough to be told so by its checks.
    if not _settings_are_usable():
        return
    autodiscover_modules(get_settings().handlers_module)


def _settings_are_usable() -> bool:

    return not problems(getattr(django_settings, "OUTBOX", {}))
