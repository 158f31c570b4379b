"""
The event queue: emit events, register handlers, deliver the one to the other.

Nothing here imports models when it is imported, so that an app which loads before
this one can emit from its own ``models.py``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache, partial
from typing import Any, Final, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.conf import settings as django_settings
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, InterfaceError, connections, transaction
from django.utils import timezone
from django.utils.functional import LazyObject, Promise
from django.utils.module_loading import autodiscover_modules

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.conf import get_settings
from django_outbox.errors import (
    DuplicateHandler,
    InvalidEventType,
    InvalidHandlerName,
    InvalidPayload,
    NotInTransaction,
    Reject,
    RetryLater,
    clean_error,
)

__all__ = [
    "EVENTS",
    "RESERVED_PREFIXES",
    "Event",
    "EventRun",
    "Handler",
    "NewEvent",
    "Registry",
    "announcement",
    "discover_handlers",
    "emit_event",
    "emit_events",
    "on_event",
    "registry",
]

logger = logging.getLogger("django_outbox.events")

Function = TypeVar("Function", bound=Callable[..., Any])

EVENTS: Final = engine.Queue(
    name="events",
    model_name="OutboxEvent",
    content=(
        "type",
        "payload",
        "occurred_at",
        "aggregate_type",
        "aggregate_id",
        "organization_id",
        "request_id",
        "causation_id",
        "headers",
        "deliveries",
        "failures",
    ),
    bulk="payload",
    handlers=True,
    announcement="outbox.event.dead",
)

RESERVED_PREFIXES: Final = ("outbox.", "email.", "webhook.", "task.")
MAX_STARTS_MARKED: Final = 2
"""Marks at which a handler is not started again: with the unmarked first start, three starts in all."""

_TYPE: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_PATTERN: Final = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*(\.\*)?")
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TYPE_LENGTH: Final = 128
_NAME_LENGTH: Final = 64


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True)
class NewEvent:
    """One event for `emit_events`; the fields are the arguments of `emit_event`."""

    type: str
    payload: Any = None
    aggregate_type: str = field(default="", kw_only=True)
    aggregate_id: str = field(default="", kw_only=True)
    organization_id: str = field(default="", kw_only=True)
    request_id: str = field(default="", kw_only=True)
    headers: Mapping[str, Any] | None = field(default=None, kw_only=True)
    occurred_at: datetime | None = field(default=None, kw_only=True)
    delay: float | timedelta | None = field(default=None, kw_only=True)
    event_id: UUID | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Cause:
    """The event whose handler runs in this context: what an emit inherits from it."""

    event_id: UUID
    request_id: str
    organization_id: str
    quiet: bool


_cause: ContextVar[_Cause | None] = ContextVar("django_outbox_cause", default=None)

captures: list[list[NewEvent]] = []
"""Lists that every emit in this process also appends to; see `django_outbox.testing.capture_events`."""


# --- emit ------------------------------------------------------------------------------------------------------------


def emit_event(
    type: str,  # noqa: A002
    payload: Any = None,
    *,
    aggregate_type: str = "",
    aggregate_id: str = "",
    organization_id: str = "",
    request_id: str = "",
    headers: Mapping[str, Any] | None = None,
    occurred_at: datetime | None = None,
    delay: float | timedelta | None = None,
    event_id: UUID | None = None,
    using: str | None = None,
) -> UUID:
    """
    Write one event in the caller's transaction and return its id, a UUIDv7.

    The event exists if and only if the transaction on ``using`` (by default
    ``OUTBOX["DATABASE"]``) commits, and is then delivered to every handler that is
    registered for its type now, at least once each. ``delay`` (seconds or a
    ``timedelta``) holds the delivery back. A given ``event_id`` that exists already
    writes nothing.

    Bad input is refused before any SQL runs, so the transaction stays usable.

    :raises NotInTransaction: outside ``atomic()``, unless ``REQUIRE_TRANSACTION`` is off.
    :raises InvalidEventType: for a malformed or reserved type.
    :raises InvalidPayload: naming the JSON path or the argument.
    :raises SynchronousOnlyOperation: in a running event loop.
    """
    event = NewEvent(
        type,
        payload,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        organization_id=organization_id,
        request_id=request_id,
        headers=headers,
        occurred_at=occurred_at,
        delay=delay,
        event_id=event_id,
    )
    return emit_events((event,), using=using)[0]


def emit_events(events: Iterable[NewEvent], *, using: str | None = None) -> list[UUID]:
    """
    Write many events in one statement, and return their ids in order; else as `emit_event`.

    All are checked before any is written: a bad one writes none.
    """
    _refuse_event_loop()
    settings = get_settings()
    alias = using or settings.database
    connection = connections[alias]
    blocks = [block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False)]
    if not blocks and settings.require_transaction:
        raise NotInTransaction(
            f"emit_event() writes in the caller's transaction, and none is open on {alias!r}. Put the call, with the"
            f' rows it belongs to, inside `with transaction.atomic(using="{alias}")`, or set'
            ' OUTBOX["REQUIRE_TRANSACTION"] = False to let it open one of its own.'
        )
    batch = list(events)
    for event in batch:
        if not isinstance(event, NewEvent):
            raise InvalidPayload(f"emit_events() takes NewEvent objects, not {type(event).__name__}.")
    given = sum(event.event_id is not None for event in batch)
    fresh = iter(engine.new_ids(len(batch) - given))
    rows = [_row(event, fresh, settings.max_payload_bytes) for event in batch]
    if not rows:
        return []
    if connection.in_atomic_block:
        _insert(rows, alias)
    else:
        # No savepoint: with autocommit off, SQLite would take its release for the commit.
        with transaction.atomic(using=alias, savepoint=False):
            _insert(rows, alias)
    for capture in captures:
        capture.extend(batch)
    return [row.id for row in rows]


def _insert(rows: Sequence[engine.NewRow], alias: str) -> None:
    if any(row.given_id for row in rows):
        # Two transactions that write the same ids wait for one another; in one order they cannot deadlock.
        rows = sorted(rows, key=lambda row: row.id)
    engine.insert_events(rows, using=alias)
    if any(row.deliveries != "{}" for row in rows):
        wake.notify_on_commit(alias)


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            "emit_event() writes to the database and cannot run in an event loop. Put the whole atomic() block into a"
            " function and call it through asgiref.sync.sync_to_async."
        )


def _row(event: NewEvent, fresh: Iterator[UUID], limit: int) -> engine.NewRow:
    check_type(event.type)
    if event.event_id is not None and not isinstance(event.event_id, UUID):
        raise InvalidPayload(f"event_id must be a uuid.UUID, not {type(event.event_id).__name__}.")
    cause = _cause.get()
    return engine.NewRow(
        id=next(fresh) if event.event_id is None else event.event_id,
        given_id=event.event_id is not None,
        type=str.__str__(event.type),
        payload="{}" if event.payload is None else encode_json(event.payload, what="payload", limit=limit),
        headers="{}" if event.headers is None else _encode_headers(event.headers, limit),
        deliveries=registry.deliveries(event.type),
        occurred_at=_moment(event.occurred_at),
        aggregate_type=_text("aggregate_type", event.aggregate_type, 128),
        aggregate_id=_text("aggregate_id", event.aggregate_id, 255),
        organization_id=_text("organization_id", event.organization_id, 255)
        or (cause.organization_id if cause else ""),
        request_id=_text("request_id", event.request_id, 255) or (cause.request_id if cause else ""),
        causation_id=cause.event_id if cause else None,
        quiet=cause.quiet if cause else False,
        delay=_delay(event.delay),
    )


def check_type(type_: object) -> None:
    """Raise `InvalidEventType` unless an event of this type may be emitted by a project."""
    if not isinstance(type_, str) or len(type_) > _TYPE_LENGTH or not _TYPE.fullmatch(type_):
        raise InvalidEventType(
            f"{_shown(type_)} is not an event type. Write dotted lower-case words in the past tense, such as"
            f' "user.created": letters a-z, digits, "_" and "-", at least one dot, at most {_TYPE_LENGTH} characters.'
        )
    if type_.startswith(RESERVED_PREFIXES):
        raise InvalidEventType(
            f"{type_!r} begins with a prefix that is reserved for the framework's own announcements"
            f" ({', '.join(RESERVED_PREFIXES)}). Choose another first word."
        )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits to print
        text = f"({type(value).__name__})"
    return text if len(text) <= 160 else text[:157] + "..."


def _text(name: str, value: object, length: int) -> str:
    if not isinstance(value, str) or isinstance(value, LazyObject):
        raise InvalidPayload(f"{name} must be a str, not {type(value).__name__}; write {name}=str(...).")
    if not value:
        return ""
    if len(value) > length:
        raise InvalidPayload(f"{name} is {len(value)} characters long; at most {length} fit.")
    if problem := _unstorable(value):
        raise InvalidPayload(f"{name} holds {problem}, which PostgreSQL cannot store.")
    return str.__str__(value)


def _moment(value: object) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidPayload(f"occurred_at must be a datetime, not {type(value).__name__}.")
    if timezone.is_naive(value):
        # As Django's own fields and forms do: a naive time is one of the project's zone.
        value = value.replace(tzinfo=ZoneInfo(django_settings.TIME_ZONE or "UTC"))
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        moment = None
    # The first and the last year are no time in some zone: neither drivers nor floats read them back.
    if moment is None or not 1 < moment.year < 9999:
        raise InvalidPayload(f"occurred_at is {value}; it must lie in the years 2 to 9998.")
    return moment


def _delay(value: object) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidPayload(f"delay must be seconds or a timedelta, not {type(value).__name__}.")
    if not 0 <= seconds <= 3_653 * 86_400:  # also refuses NaN
        raise InvalidPayload(f"delay is {_shown(seconds)} seconds; it must lie between 0 and ten years.")
    return float(seconds) or None


# --- JSON ------------------------------------------------------------------------------------------------------------

_MAX_DEPTH: Final = 100
_MAX_INTEGER: Final = 10**4_300
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")
_encoder: Final = DjangoJSONEncoder()


def encode_json(value: Any, *, what: str, limit: int) -> str:
    """
    Return a value as JSON text that PostgreSQL and SQLite store alike.

    Dates, decimals, UUIDs and lazy strings become text as Django's encoder writes
    them, lazy strings in the active language.

    :raises InvalidPayload: naming the path of the first part that is not JSON, or the size.
    """
    text = json.dumps(_plain(value, (), what), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise InvalidPayload(
            f'The {what} is {size} bytes as JSON; OUTBOX["MAX_PAYLOAD_BYTES"] is {limit}. Store the data in a table or'
            " a file and emit its key."
        )
    return text


def _encode_headers(headers: object, limit: int) -> str:
    if not isinstance(headers, Mapping):
        raise InvalidPayload(f"headers must be a dict, not {type(headers).__name__}.")
    return encode_json(dict(headers), what="headers", limit=limit)


def _plain(value: Any, path: tuple[str | int, ...], what: str) -> Any:  # noqa: C901, PLR0911, PLR0912  one per type
    """Return the value in plain JSON types; raise `InvalidPayload` with the path of what is none."""
    # By the true type: a SimpleLazyObject passes for what it wraps, and is none of it.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        if problem := _unstorable(value):
            raise InvalidPayload(f"{_at(what, path)} holds {problem}, which PostgreSQL cannot store.")
        return str.__str__(value)
    if issubclass(kind, int):
        if value.bit_length() > 14_000 and abs(value) >= _MAX_INTEGER:
            raise InvalidPayload(f"{_at(what, path)} is an integer of more than 4,300 digits.")
        return int(value)
    if issubclass(kind, float):
        if not math.isfinite(value):
            raise InvalidPayload(f"{_at(what, path)} is {value}, which is not JSON.")
        return float(value)
    if len(path) >= _MAX_DEPTH and issubclass(kind, (dict, list, tuple)):
        raise InvalidPayload(f"{_at(what, path[:4])} is nested deeper than {_MAX_DEPTH} levels, or contains itself.")
    if issubclass(kind, dict):
        plain = {}
        for key, item in value.items():
            if not issubclass(type(key), str):
                raise InvalidPayload(
                    f"{_at(what, path)} has the key {_shown(key)}, a {type(key).__name__}; JSON keys are strings."
                )
            if problem := _unstorable(key):
                raise InvalidPayload(
                    f"{_at(what, path)} has a key that holds {problem}, which PostgreSQL cannot store."
                )
            plain[str.__str__(key)] = _plain(item, (*path, key), what)
        return plain
    if issubclass(kind, (list, tuple)):
        return [_plain(item, (*path, index), what) for index, item in enumerate(value)]
    if isinstance(value, Promise):
        return _plain(str(value), path, what)
    try:
        encoded = _encoder.default(value)
    except (TypeError, ValueError) as error:
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise InvalidPayload(
            f"{_at(what, path)} is a {type(value).__name__}, which is not JSON{reason}. Convert it first."
        ) from None
    return _plain(encoded, path, what)


def _unstorable(text: str) -> str:
    if "\x00" in text:
        return "a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "a lone surrogate"
    return ""


def _at(what: str, path: Sequence[str | int]) -> str:
    steps = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" if _IDENTIFIER.fullmatch(step) else f"[{_shown(step)}]"
        for step in path
    )
    return f"The {what} at ${steps}"


# --- handlers --------------------------------------------------------------------------------------------------------


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

    @property
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
                f"{_shown(each)} is not a handler name. Write it in kebab-case, such as"
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
                f"{_shown(pattern)}, which handler {name!r} wants, is not an event type. Write"
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
    from django_outbox.conf import problems  # noqa: PLC0415

    return not problems(getattr(django_settings, "OUTBOX", {}))


# --- deliver ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """How one handler ended. No error: it succeeded."""

    error: str = ""
    rejected: bool = False
    delay: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the delivery was made."""
        return not self.error


class LeaseLost(Exception):
    """The row belongs to another by now; whatever was about to be written is rolled back."""


class EventRun:
    """
    One leased event on its way through the handlers it is owed to.

    The caller pulls handlers with `next_handler`, runs each with `invoke` and reports
    with `finish`; threads may share a run, so that a stuck handler does not keep the
    others of its event waiting. When `complete`, `settled` says how the event ended.
    """

    def __init__(self, lease: engine.Lease, *, using: str, in_child: bool = False) -> None:
        content = lease.content
        self.lease = lease
        self.using = using
        self.type: str = content["type"]
        self.careful = lease.suspect or lease.lost_leases > 0 or in_child
        self.lost = False
        self.interrupted = False
        # Rows of one type mostly bear one and the same text here.
        self._deliveries: dict[str, str | None] = dict(_parsed(content["deliveries"]))
        self._failures: dict[str, dict[str, Any]] = _json_object(content["failures"])
        self._failures_changed = False
        self.delivered: dict[str, str] = {}
        self._delays: list[float] = []
        self._errors: dict[str, str] = {}
        self._parked: list[str] = []
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._queue = self._plan()

    # What is owed, and to whom.

    def _plan(self) -> list[Handler]:
        wanted: dict[str, Handler] = {}
        for name in self._owed():
            if self._failures.get(name, {}).keys() & {"rejected", "lost"}:
                continue
            handler = registry.resolve(self.type, name)
            if handler is None:
                self._parked.append(name)
            elif when := next(filter(None, (self._deliveries.get(each) for each in handler.names)), None):
                # Delivered under another of its names, before a rename or its rollback.
                self.delivered[name] = when
            else:
                wanted[handler.name] = handler
        if len(wanted) < 2:
            return list(wanted.values())
        order = {handler.name: place for place, handler in enumerate(registry.for_type(self.type))}
        return sorted(wanted.values(), key=lambda handler: order[handler.name])

    def _owed(self) -> list[str]:
        return [
            name
            for name, when in self._deliveries.items()
            if when is None and name not in self.delivered and not self._failures.get(name, {}).get("discarded")
        ]

    def next_handler(self) -> Handler | None:
        """Take the next handler to run, or ``None`` when none may start (any more)."""
        with self._lock:
            while self._queue:
                if self.lost or self.interrupted:
                    return None
                if not self.lease.current():
                    self.lost = True
                    return None
                handler = self._queue[0]
                # It stays in the queue while its mark cannot be written, so that the caller may ask again.
                startable = not self.careful or self._mark(handler)
                self._queue.pop(0)
                if startable:
                    self._running.add(handler.name)
                    return handler
            return None

    @property
    def complete(self) -> bool:
        """Whether no handler is running or left to run."""
        with self._lock:
            return not self._running and (not self._queue or self.lost or self.interrupted)

    @property
    def started(self) -> bool:
        """Whether any handler of it runs or ran."""
        return bool(self._running or self.delivered or self._errors)

    def _mark(self, handler: Handler) -> bool:
        """
        Count this start on the row before it happens; return whether it may happen.

        A handler that kills its process leaves the mark behind, and at two marks it is
        not started again: it dies alone, its neighbours are never blamed.
        """
        key = self._key(handler)
        entry = dict(self._failures.get(key, {}))
        marks = int(entry.get("marks", 0))
        if marks >= MAX_STARTS_MARKED:
            self.blame(handler)
            return False
        marked = self._failures | {key: {"error": ""} | entry | {"marks": marks + 1, "at": self.lease.clock.text()}}
        worst = max(int(each.get("marks", 0)) for each in marked.values())
        if not engine.record(self.lease, using=self.using, failures=marked, lost_leases=worst):
            self.lost = True
            return False
        self._failures = marked
        return True

    def blame(self, handler: Handler) -> None:
        """Record that a handler killed its process too often."""
        key = self._key(handler)
        text = f"worker lost: its process died {MAX_STARTS_MARKED + 1} times while this handler ran"
        self._failures[key] = {"error": text, "at": self.lease.clock.text(), "lost": True}
        self._failures_changed = True
        self._errors[key] = text

    def start_again(self, handler: Handler) -> bool:
        """
        After the child process of a started handler died: mark it once more, or blame it and close its delivery.

        Returns whether it may be started again.
        """
        with self._lock:
            if not self.lost and self.lease.current() and self._mark(handler):
                return True
            self._running.discard(handler.name)
            return False

    def _key(self, handler: Handler) -> str:
        """Return the name under which this delivery is owed."""
        return next((name for name in handler.names if name in self._deliveries), handler.name)

    # Running one handler.

    def event_for(self, handler: Handler) -> Event:
        """Return the event as this handler receives it, with a payload of its own."""
        content = self.lease.content
        return Event(
            id=self.lease.id,
            type=self.type,
            payload=json.loads(content["payload"]),
            # To the millisecond that is promised: SQLite's arithmetic is off by some microseconds,
            # enough to put midnight on the day before.
            occurred_at=datetime.fromtimestamp(round(content["occurred_at"], 3), UTC),
            aggregate_type=content["aggregate_type"],
            aggregate_id=content["aggregate_id"],
            organization_id=content["organization_id"],
            request_id=content["request_id"],
            causation_id=_uuid(content["causation_id"]),
            headers=_json_object(content["headers"]),
            handler=handler.name,
            attempt=self.lease.attempts,
            idempotency_key=f"{handler.oldest_name}:{self.lease.id}",
        )

    def invoke(self, handler: Handler, *, timeout: float, savepoint: bool = False) -> Result:
        """
        Run one handler in this thread and return how it ended; nothing it raises gets out.

        ``timeout`` bounds a coroutine; a plain function is bounded by who runs the
        thread. ``savepoint`` puts a savepoint around it, when a transaction is open.
        """
        cause = _Cause(
            self.lease.id, self.lease.content["request_id"], self.lease.content["organization_id"], self.lease.quiet
        )
        token = _cause.set(cause)
        try:
            call = partial(self._call, handler, timeout)
            if savepoint and connections[self.using].in_atomic_block:
                block: Any = transaction.atomic(using=self.using)
                # To Django's durable check and to ours this is the test's transaction, not the handler's.
                block._from_testcase = True
                with block:
                    call()
            else:
                call()
        except RetryLater as error:
            logger.info("handler asks for a retry handler=%s event=%s", handler.name, self.lease.id)
            return Result(clean_error(error), delay=error.delay)
        except Reject as error:
            logger.warning("handler rejects the event handler=%s event=%s", handler.name, self.lease.id)
            return Result(clean_error(error), rejected=True)
        except LeaseLost:
            self.lost = True
            return Result("the lease was lost while the handler ran; its work was rolled back")
        except BaseException as error:
            # Time-outs of gevent, SystemExit and their like are no Exceptions, and end a handler all the same.
            if isinstance(error, KeyboardInterrupt):
                raise
            logger.exception("handler failed handler=%s event=%s type=%s", handler.name, self.lease.id, self.type)
            return Result(clean_error(error))
        finally:
            _cause.reset(token)
        return Result()

    def _call(self, handler: Handler, timeout: float) -> None:
        event = self.event_for(handler)
        if handler.is_async:
            async_to_sync(_bounded)(handler, event, timeout)
        elif not handler.atomic:
            _require_finished(handler.function(event))
        else:
            with transaction.atomic(using=self.using):
                _require_finished(handler.function(event))
                # Last, so that no lock on the event is held while the handler runs.
                if not engine.record(self.lease, using=self.using, delivered=self._times(handler)):
                    raise LeaseLost

    def _times(self, handler: Handler) -> dict[str, str]:
        """Return the delivery's time under every name of the handler, so that a rename repeats nothing."""
        return dict.fromkeys(handler.names, self.lease.clock.text())

    # Reporting.

    def finish(self, handler: Handler, result: Result) -> None:
        """Record how a handler ended. The second report about one start is ignored."""
        with self._lock:
            if handler.name not in self._running:
                return
            self._running.discard(handler.name)
            key = self._key(handler)
            before = self._failures.get(key, {})
            if result.ok:
                self.delivered |= self._times(handler)
                if "marks" in before:
                    self._failures[key] = {name: value for name, value in before.items() if name != "marks"}
                    if not self._failures[key].get("error"):
                        del self._failures[key]
                    self._failures_changed = True
            else:
                self._failures[key] = {"error": result.error, "at": self.lease.clock.text()} | (
                    {"rejected": True} if result.rejected else {}
                )
                self._failures_changed = True
                self._errors[key] = result.error
                if result.delay is not None:
                    self._delays.append(result.delay)
            if self.careful and not self.lost:
                worst = max([0, *(int(each.get("marks", 0)) for each in self._failures.values())])
                try:
                    self.lost = not engine.record(
                        self.lease,
                        using=self.using,
                        delivered=self.delivered,
                        failures=self._failures,
                        lost_leases=worst,
                    )
                except (DatabaseError, InterfaceError) as error:
                    # The settle carries the same. What succeeded must not run again for want of this.
                    logger.warning("delivery not recorded yet event=%s error=%s", self.lease.id, clean_error(error))
                    connections[self.using].close_if_unusable_or_obsolete()

    def interrupt(self) -> None:
        """Start no further handler, and count those that still run as failed attempts."""
        with self._lock:
            self.interrupted = True
            running = list(self._running)
        for name in running:
            if (handler := registry.resolve(self.type, name)) is not None:
                self.finish(handler, Result("interrupted: the relay was stopped while this handler ran"))

    def settled(self) -> engine.Settled:
        """Return how the event ended, once `complete`."""
        with self._lock:
            left = self._owed()
            if not left and not self._failures:
                return engine.Settled(self.lease, _DONE, self.delivered)
            parked = [name for name in left if name in self._parked]
            final = [name for name in left if self._failures.get(name, {}).keys() & {"rejected", "lost"}]
            retry = [name for name in left if name not in parked and name not in final]
            for name in parked:
                known = self._failures.get(name, {})
                if "parked_at" not in known:
                    text = f"no relay that had this event knows the handler {name!r}"
                    self._failures[name] = {"error": text, "at": self.lease.clock.text()}
                    self._failures[name]["parked_at"] = self.lease.clock.text()
                    self._failures_changed = True
            for name in list(self._failures):
                entry = self._failures[name]
                past = {"marks"} if name in parked else {"marks", "parked_at"}
                if entry.keys() & past:
                    self._failures[name] = {key: value for key, value in entry.items() if key not in past}
                    self._failures_changed = True
            outcome: engine.Outcome
            if not left:
                outcome = _DONE
            elif retry:
                outcome = engine.Retry(max(self._delays, default=None))
            elif parked:
                outcome = engine.Park(spent=self._parked_for(parked) >= get_settings().park_for_seconds)
            elif any(self._failures[name].get("lost") for name in final):
                outcome = engine.Lost()
            else:
                outcome = engine.Fail()
            reasons = self._errors or {name: self._failures[name]["error"] for name in left if name in self._failures}
            return engine.Settled(
                lease=self.lease,
                outcome=outcome,
                delivered=dict(self.delivered),
                failures=dict(self._failures) if self._failures_changed else None,
                error=clean_error("; ".join(f"{name}: {text}" for name, text in reasons.items())) if left else "",
            )

    def _parked_for(self, names: Sequence[str]) -> float:
        """Return the seconds for which the longest-parked of these has waited."""
        now = self.lease.clock.now()
        return max(now - datetime.fromisoformat(self._failures[name]["parked_at"]).timestamp() for name in names)


_DONE: Final = engine.Done()


@lru_cache(maxsize=1_024)
def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object that must not be changed."""
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _json_object(text: str) -> dict[str, Any]:
    """Return a JSON object of one's own; nearly always the empty one."""
    return {} if text == "{}" else json.loads(text)


def _require_finished(returned: object) -> None:
    """Raise when a plain function returned work that nobody will do, as one that wraps an async function does."""
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError(
            "the handler returned a coroutine, which would never run; write `async def`, or mark its wrapper with"
            " asgiref.sync.markcoroutinefunction"
        )


async def _bounded(handler: Handler, event: Event, timeout: float) -> None:  # noqa: ASYNC109  raised in our words
    try:
        async with asyncio.timeout(timeout) as limit:
            await handler.function(event)
    except TimeoutError:
        # The handler's own TimeoutError is the handler's own failure.
        if not limit.expired():
            raise
        raise TimeoutError(f"the handler took longer than its {timeout:g} s") from None


def _uuid(value: Any) -> UUID | None:
    return value if value is None or isinstance(value, UUID) else UUID(value)


def announcement(settled: engine.Settled, status: str) -> engine.NewRow:
    """Return the event that says that an event is dead or failed. Its own death is not announced."""
    lease = settled.lease
    failures = settled.failures if settled.failures is not None else json.loads(lease.content["failures"])
    payload = {
        "queue": lease.queue.name,
        "id": str(lease.id),
        "type": lease.content["type"],
        "status": status,
        "attempts": lease.attempts,
        "error": settled.error,
        "handlers": {name: entry.get("error", "") for name, entry in failures.items() if isinstance(entry, dict)},
        "aggregate_type": lease.content["aggregate_type"],
        "aggregate_id": lease.content["aggregate_id"],
    }
    return engine.NewRow(
        id=engine.new_id(),
        type=lease.queue.announcement,
        payload=json.dumps(payload, ensure_ascii=False),
        deliveries=registry.deliveries(lease.queue.announcement),
        organization_id=lease.content["organization_id"],
        request_id=lease.content["request_id"],
        causation_id=lease.id,
        quiet=True,
    )
