"""Helpers for the tests of projects that emit events; all of them work inside a plain ``TestCase``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from django_outbox import events
from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.models import OutboxEvent

__all__ = ["assert_emitted", "capture_events", "drain", "isolated_handlers", "travel"]

_QUEUES: Final = ("events",)
_ROW_LIMIT: Final = 100_000
_SHOWN: Final = 20


def drain(*, queues: Sequence[str] = _QUEUES, using: str | None = None) -> Counter[str]:
    """
    Deliver everything that is due now, in this thread and connection, and return the counts per outcome.

    The keys are the statuses in which the rows ended (``done``, ``waiting`` for a retry
    or a relay that knows the handler, ``dead``, ``failed``), and ``lost`` for rows that
    another relay took over. What handlers emit is delivered too. Inside a transaction,
    such as a ``TestCase``'s, each handler runs under a savepoint. The time limit of a
    plain function is not enforced here, since nothing can stop it in its own thread.

    :raises ValueError: for a queue that does not exist.
    :raises RuntimeError: after 100,000 rows, which only an endless chain of emits reaches.
    """
    if unknown := set(queues) - set(_QUEUES):
        raise ValueError(f"There is no queue {min(unknown)!r}. Queues: {', '.join(_QUEUES)}.")
    settings = get_settings()
    alias = using or settings.database
    counts: Counter[str] = Counter()
    if not queues:
        return counts
    claimer = engine.Claimer(events.EVENTS, holder=engine.holder_name(), using=alias)
    seconds = settings.events.lease_seconds
    while leases := claimer.claim(100, lease_seconds=seconds):
        for lease in leases:
            run = events.EventRun(lease, using=alias)
            while handler := run.next_handler():
                limit = handler.timeout or settings.events.timeout_seconds
                run.finish(handler, run.invoke(handler, timeout=limit, savepoint=True))
                # In one thread a slow handler must not cost its neighbours their leases.
                if time.monotonic() > leases[-1].deadline - seconds * 2 / 3:
                    engine.renew({each: {} for each in leases}, using=alias)
            settled = run.settled()
            while True:
                written = engine.settle(
                    [settled], schedule=settings.events.schedule, using=alias, announce=events.announcement
                )
                if (status := written.get(lease.id, "lost")) != engine.LOCKED:
                    break
                time.sleep(0.05)  # another session's transaction has the row
            counts[status] += 1
        if counts.total() >= _ROW_LIMIT:
            raise RuntimeError(f"drain() delivered {_ROW_LIMIT} rows and more are due; a handler emits without end.")
    return counts


@contextmanager
def travel(*, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> Iterator[None]:
    """
    Move the engine's clock forward (or back) inside the block, for this process.

    Due times, leases, ages and retention follow it; Django's ``timezone.now()`` does not.
    """
    with engine.shift_clock(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()):
        yield


@contextmanager
def capture_events() -> Iterator[list[events.NewEvent]]:
    """
    Record what is emitted in the block, in order; the events are written all the same.

    An event whose savepoint is rolled back later stays in the list; to ask what is
    stored, use `assert_emitted`.
    """
    captured: list[events.NewEvent] = []
    events.captures.append(captured)
    try:
        yield captured
    finally:
        # By identity: two empty lists are equal.
        events.captures[:] = [each for each in events.captures if each is not captured]


def assert_emitted(event_type: str, /, *, using: str | None = None, **payload: Any) -> OutboxEvent:
    """
    Assert that an event of this type is stored, and return the newest one that matches.

    Keyword arguments are keys of the payload with the values they must have, compared
    as JSON: a UUID or a date matches the text that was stored for it.
    """
    expected = json.loads(events.encode_json(payload, what="expectation", limit=2**26))
    rows = OutboxEvent.objects.using(using or get_settings().database).order_by("-id")
    of_type = list(rows.filter(type=event_type)[:1_000])
    for row in of_type:
        if not expected or (
            isinstance(row.payload, dict)
            and all(key in row.payload and row.payload[key] == value for key, value in expected.items())
        ):
            return row
    if of_type:
        stored = "\n".join(f"  {row.payload!r:.300}" for row in of_type[:_SHOWN])
        raise AssertionError(f"{event_type!r} was emitted, but not with {expected!r}. Stored, newest first:\n{stored}")
    types = sorted(set(rows.values_list("type", flat=True)[:1_000]))
    raise AssertionError(f"{event_type!r} was not emitted. Emitted types: {', '.join(types[:_SHOWN]) or 'none'}.")


@contextmanager
def isolated_handlers() -> Iterator[events.Registry]:
    """Restore the registered handlers when the block ends; inside it they may be added or replaced freely."""
    before = events.registry.handlers()
    try:
        yield events.registry
    finally:
        events.registry.replace(before)
