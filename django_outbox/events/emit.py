"""Emit: write events in the caller's transaction, and wake the relays when it commits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.conf import settings as django_settings
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.utils import timezone
from django.utils.functional import LazyObject

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.conf import get_settings
from django_outbox.delivery import current_cause
from django_outbox.errors import InvalidPayload, NotInTransaction
from django_outbox.events.registry import check_type, registry
from django_outbox.payload import encode_headers, encode_json, shown, unstorable


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


captures: list[list[NewEvent]] = []
"""Lists that every emit in this process also appends to; see `django_outbox.testing.capture_events`."""


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
    cause = current_cause.get()
    return engine.NewRow(
        id=next(fresh) if event.event_id is None else event.event_id,
        given_id=event.event_id is not None,
        type=str.__str__(event.type),
        payload="{}" if event.payload is None else encode_json(event.payload, what="payload", limit=limit),
        headers="{}" if event.headers is None else encode_headers(event.headers, limit),
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


def _text(name: str, value: object, length: int) -> str:
    if not isinstance(value, str) or isinstance(value, LazyObject):
        raise InvalidPayload(f"{name} must be a str, not {type(value).__name__}; write {name}=str(...).")
    if not value:
        return ""
    if len(value) > length:
        raise InvalidPayload(f"{name} is {len(value)} characters long; at most {length} fit.")
    if problem := unstorable(value):
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
        raise InvalidPayload(f"delay is {shown(seconds)} seconds; it must lie between 0 and ten years.")
    return float(seconds) or None
