"""Helpers for the tests of projects that emit events; all of them work inside a plain ``TestCase``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from django_outbox import events, notifications
from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.delivery import Work
from django_outbox.models import OutboxEvent
from django_outbox.relay.queues import WORK

__all__ = ["assert_emitted", "capture_events", "drain", "isolated_handlers", "travel"]

_QUEUES: Final = ("events", "email", "tasks")
_CLAIM_LIMIT: Final = 100
_ROW_LIMIT: Final = 100_000
_SHOWN: Final = 20


def drain(*, queues: Sequence[str] = _QUEUES, using: str | None = None) -> Counter[str]:
    """
    Deliver everything that is due now, in this thread and connection, and return the counts per outcome.

    The keys are the statuses in which the rows ended (``done``, ``waiting`` for a retry
    or a relay that knows the handler, ``dead``, ``failed``), ``released`` for rows that
    were given back unstarted, and ``lost`` for rows that another relay took over. What
    handlers emit is delivered too; webhooks are only sent when named. Inside a
    transaction, such as a ``TestCase``'s, each handler runs under a savepoint. The time
    limit of a plain function is not enforced here, since nothing can stop it in its own
    thread.

    :raises ValueError: for a queue that does not exist.
    :raises RuntimeError: after 100,000 rows, which only an endless chain of emits reaches.
    """
    if unknown := set(queues) - {*WORK, *_QUEUES}:
        raise ValueError(f"There is no queue {min(unknown)!r}. Queues: {', '.join(WORK)}.")
    alias = using or get_settings().database
    holder = engine.holder_name()
    counts: Counter[str] = Counter()
    served = [
        (work, engine.Claimer(work.queue, holder=holder, using=alias)) for name, work in WORK.items() if name in queues
    ]
    try:
        while sum(_drain_some(work, claimer, alias, counts) for work, claimer in served):
            if counts.total() >= _ROW_LIMIT:
                raise RuntimeError(f"drain() delivered {_ROW_LIMIT} rows, more are due; a handler emits without end.")
    finally:
        for work, _ in served:
            work.rest()
    return counts


def _drain_some(work: Work, claimer: engine.Claimer, alias: str, counts: Counter[str]) -> int:
    """Claim once in each scope of a queue, and deliver that; return how many rows there were."""
    settings = work.settings()
    seconds = settings.lease_seconds
    total = 0
    for scope, most in work.scopes(_CLAIM_LIMIT, using=alias):
        leases = claimer.claim(min(most, _CLAIM_LIMIT), lease_seconds=seconds, scope=scope)
        total += len(leases)
        work.claimed(leases)
        for lease in leases:
            run = work.start(lease, using=alias)
            while step := run.next_step():
                limit = step.timeout or settings.timeout_seconds
                run.finish(step, run.invoke(step, timeout=limit, savepoint=True))
                # In one thread a slow handler must not cost its neighbours their leases.
                if time.monotonic() > leases[-1].deadline - seconds * 2 / 3:
                    engine.renew({each: {} for each in leases}, using=alias)
            settled = run.settled()
            counts[_end(work, settled, alias)] += 1
            work.landed([lease])
    return total


def _end(work: Work, settled: engine.Settled, alias: str) -> str:
    """Settle or release a row; return the status written, ``released`` or ``lost``."""
    if isinstance(settled.outcome, engine.Released):
        return "released" if engine.release([settled.lease], using=alias) else "lost"
    while True:
        written = engine.settle(
            [settled],
            schedule=work.settings().schedule,
            using=alias,
            announce=work.announce,
            along=work.along_on(alias),
        )
        if (status := written.get(settled.lease, "lost")) != engine.LOCKED:
            return status
        time.sleep(0.05)  # another session's transaction has the row


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
    """
    Restore the registered handlers when the block ends; inside it they may be added or replaced freely.

    So are the resolvers of notifications.
    """
    before = events.registry.handlers()
    resolvers = dict(notifications.resolvers.entries)
    try:
        yield events.registry
    finally:
        events.registry.replace(before)
        notifications.resolvers.entries = resolvers
