"""
Notifications: what users are told about events, once each.

The project says in a resolver who is told what; the built-in handler
``notification-fanout`` calls it and writes the rows.

    @notifies("order.paid")
    def tell_the_buyer(event: Event) -> Iterator[NewNotification]:
        yield NewNotification(str(event.payload["user_id"]), "Your order is paid")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from django.apps import apps
from django.db import connections, transaction
from django.utils.functional import Promise

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.errors import InvalidEventType, InvalidPayload, clean_text
from django_outbox.events import Event, encode_json
from django_outbox.lease.vendors import dialect_of

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_outbox.models import Notification

__all__ = [
    "NewNotification",
    "count_unread",
    "fan_out",
    "for_recipient",
    "mark_all_read",
    "mark_read",
    "mark_unread",
    "notifies",
    "patterns",
    "purge",
]

_BATCH: Final = 500
_LENGTHS: Final = {"recipient": 255, "title": 255, "body": 10_000, "url": 2_048, "dedup_key": 255}
_DATA_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True)
class NewNotification:
    """
    What one recipient is to be told.

    ``recipient`` is a text, such as ``str(user.pk)``. One recipient gets one notification
    per ``dedup_key``, by default ``event:<id>``: give another to tell one recipient two
    things about one event, or one thing about several (``"quota:2026-05"``).
    """

    recipient: str
    title: str
    body: str = ""
    url: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    dedup_key: str = ""


Resolver = Callable[[Event], Iterable[NewNotification]]
Function = TypeVar("Function", bound=Resolver)


@dataclass(slots=True)
class _Resolvers:
    entries: dict[str, tuple[tuple[str, ...], Resolver]] = field(default_factory=dict)
    """By where the function is defined, so that a module imported anew replaces its own."""
    changed: Callable[[], None] = lambda: None
    """Called after each registration; the handler follows the patterns. Set by ``handlers``."""


resolvers: Final = _Resolvers()


def notifies(*types: str) -> Callable[[Function], Function]:
    """
    Register a function that says who is told about events of these types, and in what words.

    Types are written as in `on_event`: ``"order.paid"``, ``"order.*"`` or ``"*"``. The
    function gets the event and returns or yields `NewNotification` objects; it may be
    called again for one event, and may then name others: whoever was told stays told.
    Put it into the module of your handlers. It is returned unchanged.

    :raises InvalidEventType: for no type; a malformed one is refused when the handler is registered.
    """
    if not types or any(not isinstance(each, str) for each in types):
        raise InvalidEventType('notifies() needs event types, such as @notifies("order.paid").')

    def register(function: Function) -> Function:
        resolvers.entries[f"{function.__module__}.{function.__qualname__}"] = (types, function)
        resolvers.changed()
        return function

    return register


def patterns() -> tuple[str, ...]:
    """Return the event types that some resolver is registered for."""
    return tuple(dict.fromkeys(type_ for types, _ in resolvers.entries.values() for type_ in types))


def _matches(pattern: str, type_: str) -> bool:
    # Announcements need not be left out: the handler of "*" does not get them.
    return pattern in {"*", type_} or (pattern.endswith(".*") and type_.startswith(pattern[:-1]))


def fan_out(event: Event, *, using: str | None = None) -> int:
    """
    Write the notifications of an event, and return how many are new.

    Called again it writes nothing twice. Many recipients are written in batches, each a
    transaction of its own unless one is open: a process that dies between two leaves the
    rest to the redelivery.

    :raises InvalidPayload: for a text that is too long or cannot be stored, or data that is not JSON.
    """
    alias = using or get_settings().database
    told = (
        new
        for types, resolve in tuple(resolvers.entries.values())
        if any(_matches(each, event.type) for each in types)
        for new in resolve(event)
    )
    return sum(_insert(batch, event, alias) for batch in iter(lambda: list(islice(told, _BATCH)), []))


def _insert(batch: list[NewNotification], event: Event, using: str) -> int:
    # In one order, so that two relays with one event cannot wait for one another.
    rows = {(row["recipient"], row["dedup_key"]): row for row in reversed([_row(new, event) for new in batch])}
    connection = connections[using]
    dialect = dialect_of(connection)
    model = apps.get_model("django_outbox", "Notification")
    table = connection.ops.quote_name(model._meta.db_table)
    names = ", ".join(_COLUMNS)
    values = ", ".join(f"o.{name}" for name in _COLUMNS)
    documents = [rows[key] for key in sorted(rows)]
    # The unique index on recipient and key decides; a row in a transaction under way is waited for.
    sql = f"""
        INSERT INTO {table} ({names}, created_at)
        SELECT {values}, {dialect.clock} FROM {dialect.records(_COLUMNS)}
        WHERE true ON CONFLICT (recipient, dedup_key) DO NOTHING RETURNING id"""
    document = json.dumps([{name: dialect.json_value(value) for name, value in row.items()} for row in documents])
    with transaction.atomic(using=using), connection.cursor() as cursor:
        cursor.execute(sql, [document])
        return len(cursor.fetchall())


_COLUMNS: Final = {
    "id": "uuid",
    "recipient": "text",
    "dedup_key": "text",
    "title": "text",
    "body": "text",
    "url": "text",
    "data": "jsonb",
    "event_id": "uuid",
    "event_type": "text",
    "organization_id": "text",
}


def _row(new: NewNotification, event: Event) -> dict[str, Any]:
    if not isinstance(new, NewNotification):
        raise InvalidPayload(f"A resolver returns NewNotification objects, not {type(new).__name__}.")
    texts = {name: _text(name, getattr(new, name), length) for name, length in _LENGTHS.items()}
    if not texts["recipient"] or not texts["title"]:
        raise InvalidPayload("A notification needs a recipient and a title.")
    if not isinstance(new.data, Mapping):
        raise InvalidPayload(f"data of a notification must be a dict, not {type(new.data).__name__}.")
    return {
        "id": engine.new_id(),
        **texts,
        "dedup_key": texts["dedup_key"] or f"event:{event.id}",
        "data": json.loads(encode_json(dict(new.data), what="data of a notification", limit=_DATA_BYTES)),
        "event_id": event.id,
        "event_type": event.type,
        "organization_id": event.organization_id,
    }


def _text(name: str, value: Any, length: int) -> str:
    if not isinstance(value, str | Promise):
        raise InvalidPayload(f"{name} of a notification must be a str, not {type(value).__name__}; write str(...).")
    text = str(value)
    if len(text) > length:
        raise InvalidPayload(f"{name} of a notification is {len(text)} characters long; at most {length} fit.")
    if clean_text(text) != text:
        raise InvalidPayload(f"{name} of a notification holds a character that PostgreSQL cannot store.")
    return text


# --- reading ---------------------------------------------------------------------------------------------------------


def for_recipient(recipient: str, *, using: str | None = None) -> QuerySet[Notification]:
    """Return a recipient's notifications, newest first; filter by ``read_at__isnull=True`` for the unread ones."""
    rows: QuerySet[Notification] = (
        apps.get_model("django_outbox", "Notification")
        .objects.using(using or get_settings().database)
        .filter(recipient=str(recipient))
        .order_by("-id")
    )
    return rows


def count_unread(recipient: str, *, limit: int = 100, using: str | None = None) -> int:
    """Return how many a recipient has not read; it stops counting at ``limit``, so a badge can say "99+"."""
    return for_recipient(recipient, using=using).filter(read_at__isnull=True)[:limit].count()


def mark_read(recipient: str, ids: Iterable[UUID], *, using: str | None = None) -> int:
    """Note that a recipient has read these, and return how many that changed; those of others stay as they are."""
    return _mark(for_recipient(recipient, using=using).filter(pk__in=list(ids)), read=True)


def mark_unread(recipient: str, ids: Iterable[UUID], *, using: str | None = None) -> int:
    """Take that back, and return how many that changed."""
    return _mark(for_recipient(recipient, using=using).filter(pk__in=list(ids)), read=False)


def mark_all_read(recipient: str, *, using: str | None = None) -> int:
    """Note that a recipient has read everything that there is now, and return how many that changed."""
    return _mark(for_recipient(recipient, using=using), read=True)


def _mark(rows: QuerySet[Notification], *, read: bool) -> int:
    alias = rows.db
    # The first time of reading stays: what was read is not read again.
    return rows.filter(read_at__isnull=read).update(read_at=engine.database_now(alias) if read else None)


def purge(*, read_before_seconds: float, limit: int = 1_000, using: str | None = None) -> int:
    """Delete at most so many notifications that were read longer ago than that, oldest first; return how many went."""
    alias = using or get_settings().database
    rows = apps.get_model("django_outbox", "Notification").objects.using(alias)
    with transaction.atomic(using=alias):
        before = engine.database_now(alias) - timedelta(seconds=read_before_seconds)
        old = rows.filter(read_at__lt=before).order_by("read_at", "pk")
        gone, _ = rows.filter(pk__in=list(old.values_list("pk", flat=True)[:limit])).delete()
    return gone
