"""
What every queue and both databases promise about a row: who may claim it, who may write it, how it ends.

One connection; what needs several stands in ``tests/concurrency``. Rows are put into
a state by SQL or by letting the engine's clock run, never by waiting.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from django_outbox import Event, Reject, RetryLater, emit_event, on_event
from django_outbox import lease as engine
from django_outbox.errors import ERROR_TEXT_LIMIT
from django_outbox.events import EVENTS, EventRun, announcement
from django_outbox.models import OutboxEvent
from django_outbox.retry import Schedule
from django_outbox.testing import drain, travel

pytestmark = pytest.mark.django_db

USING = "default"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
SCHEDULE = Schedule(max_attempts=3, base=10, cap=1_000, replay_every=3_600, replay_for=None)
ONE_TRY = Schedule(max_attempts=1, base=10, cap=1_000, replay_every=3_600, replay_for=None)
NO_REPLAY = Schedule(max_attempts=1, base=10, cap=1_000, replay_every=None, replay_for=None)


def insert(
    count: int = 1,
    *,
    handlers: Sequence[str] = ("one",),
    payload: str = "{}",
    delay: float | None = None,
    quiet: bool = False,
    **values: Any,
) -> list[UUID]:
    """Insert events owed to these handlers, in order; ``values`` are columns to overwrite then."""
    rows = [
        engine.NewRow(
            id=engine.new_id(),
            type="thing.done",
            payload=payload,
            deliveries=json.dumps(dict.fromkeys(handlers)),
            delay=delay,
            quiet=quiet,
        )
        for _ in range(count)
    ]
    with transaction.atomic():
        ids = engine.insert_events(rows, using=USING)
    if values:
        OutboxEvent.objects.filter(id__in=ids).update(**values)
    return ids


def claimer(holder: str = "relay-1") -> engine.Claimer:
    return engine.Claimer(EVENTS, holder=holder, using=USING)


def claim(limit: int = 100, *, holder: str = "relay-1", lease_seconds: float = 60) -> list[engine.Lease]:
    return claimer(holder).claim(limit, lease_seconds=lease_seconds)


def claim_one(*, holder: str = "relay-1", lease_seconds: float = 60) -> engine.Lease:
    (lease,) = claim(holder=holder, lease_seconds=lease_seconds)
    return lease


def stored(id_: UUID) -> OutboxEvent:
    return OutboxEvent.objects.get(id=id_)


def settle(
    *settled: engine.Settled, schedule: Schedule = SCHEDULE, announce: bool = False, again: bool = False
) -> dict[UUID, str]:
    written = engine.settle(
        settled, schedule=schedule, using=USING, announce=announcement if announce else None, again=again
    )
    return {lease.id: status for lease, status in written.items()}


def done(lease: engine.Lease, *handlers: str) -> engine.Settled:
    return engine.Settled(lease, engine.Done(), delivered=dict.fromkeys(handlers, "2026-01-01T00:00:00.000Z"))


def failed(lease: engine.Lease, error: str = "one: it broke", delay: float | None = None) -> engine.Settled:
    failures = {"one": {"error": error, "at": "2026-01-01T00:00:00.000Z"}}
    return engine.Settled(lease, engine.Retry(delay), failures=failures, error=error)


def announcements() -> list[OutboxEvent]:
    return list(OutboxEvent.objects.filter(type="outbox.event.dead").order_by("id"))


def seconds_from_now(moment: datetime | None) -> float:
    """Return how far off a moment is, by the database's clock."""
    assert moment is not None
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')", [])
            now = datetime.fromisoformat(cursor.fetchone()[0]).replace(tzinfo=UTC)
        else:
            cursor.execute("SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS')")
            now = datetime.fromisoformat(cursor.fetchone()[0]).replace(tzinfo=UTC)
    return (moment - now).total_seconds()


# --- claim -----------------------------------------------------------------------------------------------------------


def test_pending_rows_are_claimed_in_the_order_of_their_creation() -> None:
    ids = insert(5)
    assert [lease.id for lease in claim(3)] == ids[:3]
    assert [lease.id for lease in claim(3)] == ids[3:]
    assert claim(3) == []


def test_a_claim_counts_an_attempt_and_raises_the_fence_and_names_the_holder() -> None:
    (id_,) = insert()
    lease = claim_one(lease_seconds=60)
    row = stored(id_)
    assert (row.attempts, row.fence, row.leased_by, row.status) == (1, 1, "relay-1", "pending")
    assert (lease.attempts, lease.fence, lease.holder, lease.status) == (1, 1, "relay-1", "pending")
    assert 55 < seconds_from_now(row.lease_until) <= 60
    assert not lease.suspect
    assert not lease.was_dead
    assert lease.current()


def test_the_local_deadline_never_outlasts_the_lease_in_the_database() -> None:
    (id_,) = insert()
    lease = claim_one(lease_seconds=60)
    left_here = lease.deadline - time.monotonic()
    # 1 ms is what SQLite's clock resolves.
    assert left_here <= seconds_from_now(stored(id_).lease_until) + 0.002 + (
        time.monotonic() - lease.deadline + left_here
    )


def test_a_row_under_a_live_lease_is_not_claimed_and_one_whose_lease_is_over_is() -> None:
    (id_,) = insert()
    first = claim_one(holder="relay-1")
    with travel(seconds=59):
        assert claim(holder="relay-2") == []
    with travel(seconds=61):
        second = claim_one(holder="relay-2")
    assert (second.id, second.fence, second.attempts, second.suspect) == (id_, first.fence + 1, 2, True)


def test_finished_rows_and_rows_due_later_are_not_claimed() -> None:
    insert(status="done", finished_at=LONG_AGO)
    insert(status="failed", finished_at=LONG_AGO)
    insert(status="waiting", due_at=FAR_AHEAD)
    insert(status="dead", due_at=FAR_AHEAD, dead_at=LONG_AGO)
    insert(status="dead", due_at=None, dead_at=LONG_AGO)
    assert claim() == []


def test_waiting_rows_are_claimed_by_due_time() -> None:
    late = insert(status="waiting", due_at=LONG_AGO + timedelta(days=1))
    early = insert(status="waiting", due_at=LONG_AGO)
    assert [lease.id for lease in claim()] == early + late


def test_pending_and_waiting_take_turns_at_filling_a_claim_and_the_other_fills_up() -> None:
    pending = insert(20)
    waiting = insert(20, status="waiting", due_at=LONG_AGO)
    turns = claimer()
    first, second = turns.claim(8, lease_seconds=60), turns.claim(8, lease_seconds=60)
    assert Counter(lease.status for lease in first) == {"pending": 8}
    assert Counter(lease.status for lease in second) == {"waiting": 8}
    rest = turns.claim(20, lease_seconds=60)
    assert Counter(lease.status for lease in rest) == {"pending": 12, "waiting": 8}
    claimed = [lease.id for lease in first + second + rest]
    assert Counter(claimed) == Counter(pending[:20] + waiting[:16])


def test_dead_rows_get_at_most_a_quarter_of_a_claim() -> None:
    insert(20)
    insert(20, status="waiting", due_at=LONG_AGO)
    insert(20, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    turns = claimer()
    for expected in ({"pending": 6, "dead": 2}, {"waiting": 6, "dead": 2}):
        assert Counter(lease.status for lease in turns.claim(8, lease_seconds=60)) == expected


def test_dead_rows_get_one_single_row_claim_in_four() -> None:
    insert(20)
    insert(20, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    turns = claimer()
    statuses = [turns.claim(1, lease_seconds=60)[0].status for _ in range(8)]
    assert Counter(statuses) == {"pending": 6, "dead": 2}
    assert {statuses[3], statuses[7]} == {"dead"}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_small_claim_of_dead_rows_alone_never_comes_back_empty(limit: int) -> None:
    insert(8, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    turns = claimer()
    # An empty claim tells a relay that nothing is due, and it would go to sleep, or end its drain.
    assert all(turns.claim(limit, lease_seconds=60) for _ in range(8))


def test_a_claimer_says_when_its_quotas_and_not_the_table_ended_a_claim() -> None:
    insert(3, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    turns = claimer()

    def more() -> bool:
        return turns.more

    assert len(turns.claim(8, lease_seconds=60)) == 2
    assert more()
    assert len(turns.claim(8, lease_seconds=60)) == 1
    assert not more()
    insert(3, payload=json.dumps({"text": "x" * 1_000}))
    assert len(turns.claim(8, lease_seconds=60, max_bytes=1_500)) == 2
    assert more()
    assert len(turns.claim(8, lease_seconds=60)) == 1
    assert not more()
    insert(3)
    assert len(turns.claim(3, lease_seconds=60)) == 3
    assert more()
    assert turns.claim(3, lease_seconds=60) == []
    assert not more()


def test_a_fresh_claim_takes_pending_rows_in_order_and_nothing_else() -> None:
    ids = insert(3)
    insert(1, status="waiting", due_at=LONG_AGO)
    insert(1, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    (held,) = insert(1)
    OutboxEvent.objects.filter(id=held).update(leased_by="relay-2", lease_until=FAR_AHEAD)
    this = claimer()
    leases = this.claim(500, lease_seconds=60, fresh=True)
    assert [lease.id for lease in leases] == ids
    assert not this.more
    assert {(lease.attempts, lease.fence, lease.holder, lease.suspect) for lease in leases} == {
        (1, 1, "relay-1", False)
    }
    assert this.claim(500, lease_seconds=60, fresh=True) == []
    assert {lease.status for lease in this.claim(500, lease_seconds=60)} == {"waiting", "dead"}


def test_a_fresh_claim_is_short_and_says_that_there_may_be_more() -> None:
    ids = insert(25)
    this = claimer()
    assert [lease.id for lease in this.claim(500, lease_seconds=60, fresh=True)] == ids[:20]
    assert this.more
    assert len(this.claim(3, lease_seconds=60, fresh=True)) == 3
    assert this.more
    assert len(this.claim(500, lease_seconds=60, fresh=True)) == 2
    assert not this.more


def test_a_fresh_claim_spares_what_ran_out_if_asked_to() -> None:
    insert(1, leased_by="relay-2", lease_until=LONG_AGO)
    assert claimer().claim(500, lease_seconds=60, fresh=True, spare_expired=True) == []
    (lease,) = claimer().claim(500, lease_seconds=60, fresh=True)
    assert lease.suspect


def test_a_dead_row_reports_its_death_and_stays_dead_while_it_is_worked() -> None:
    (id_,) = insert(status="dead", due_at=LONG_AGO, dead_at=LONG_AGO, attempts=8)
    lease = claim_one()
    assert (lease.status, lease.was_dead, lease.attempts) == ("dead", True, 9)
    assert (stored(id_).status, stored(id_).due_at) == ("dead", LONG_AGO)


def test_a_claim_is_bounded_by_bytes_but_takes_one_row_always() -> None:
    big = json.dumps({"text": "x" * 50_000})
    insert(4, payload=big)
    turns = claimer()
    assert len(turns.claim(10, lease_seconds=60, max_bytes=60_000)) == 2
    assert len(turns.claim(10, lease_seconds=60, max_bytes=1)) == 1
    assert len(turns.claim(10, lease_seconds=60)) == 1


def test_a_well_compressed_payload_counts_at_its_full_size() -> None:
    insert(6, payload=json.dumps({"text": "x" * 200_000}))
    assert len(claim(10, lease_seconds=60)) == 6
    insert(6, payload=json.dumps({"text": "x" * 200_000}))
    assert len(claimer("relay-2").claim(10, lease_seconds=60, max_bytes=250_000)) == 2


def test_the_age_of_a_delayed_row_counts_from_the_time_that_was_asked_for() -> None:
    insert(delay=3_600)
    assert claim() == []
    with travel(seconds=3_600 + 30):
        assert claim_one().age == pytest.approx(30, abs=5)


def test_content_comes_as_it_was_stored() -> None:
    payload = {"text": "Zürich 🦀", "big": 10**40, "nested": [1, {"a": None}]}
    insert(payload=json.dumps(payload))
    content = claim_one().content
    assert json.loads(content["payload"]) == payload
    assert json.loads(content["deliveries"]) == {"one": None}
    assert abs(seconds_from_now(datetime.fromtimestamp(content["occurred_at"], UTC))) < 5


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_leases_and_due_times_do_not_depend_on_the_projects_time_zone(use_tz: bool, zone: str) -> None:
    """Scenario 25: the database's clock alone, in UTC."""
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        (id_,) = insert()
        lease = claim_one()
        assert 55 < seconds_from_now(stored(id_).lease_until) <= 60
        assert claim() == []
        assert lease.age == pytest.approx(0, abs=5)
        assert abs(lease.clock.now() - time.time()) < 5
        settle(failed(lease))
        assert 9 < seconds_from_now(stored(id_).due_at) < 13
        assert engine.next_due_seconds(EVENTS, using=USING) == pytest.approx(11, abs=2.5)
        assert claim() == []
        with travel(seconds=14):
            assert len(claim()) == 1
        OutboxEvent.objects.all().delete()


@pytest.mark.parametrize("hours", [-10, 10])
def test_the_processs_own_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Scenario 25: a replica whose clock is wrong takes nothing that is another's."""
    (held,) = insert()
    (late,) = insert(delay=60)
    claim_one(holder="relay-1")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3_600)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + hours * 3_600) * 1e9))
    assert claim(holder="relay-2") == []
    (fresh,) = insert()
    lease = claim_one(holder="relay-2")
    assert lease.id == fresh
    assert 55 < seconds_from_now(stored(fresh).lease_until) <= 60
    settle(failed(lease))
    assert 9 < seconds_from_now(stored(fresh).due_at) < 13
    assert 55 < seconds_from_now(stored(late).due_at) <= 60
    assert (stored(held).leased_by, stored(held).fence) == ("relay-1", 1)


def test_travel_moves_the_engines_clock_and_comes_back() -> None:
    insert(2, delay=3_600)
    with travel(hours=2):
        with travel(hours=-1.5):
            assert claim() == []
        assert len(claim(1)) == 1
    assert claim() == []


# --- the fence -------------------------------------------------------------------------------------------------------


def _settle(lease: engine.Lease) -> bool:
    return bool(settle(done(lease, "one")))


def _renew(lease: engine.Lease) -> bool:
    return not engine.renew({lease: {"one": "2026-01-01T00:00:00.000Z"}}, using=USING)


def _record(lease: engine.Lease) -> bool:
    return engine.record(lease, using=USING, delivered={"one": "2026-01-01T00:00:00.000Z"})


def _release(lease: engine.Lease) -> bool:
    return bool(engine.release([lease], using=USING))


Write = Callable[[engine.Lease], bool]
every_write = pytest.mark.parametrize("write", [_settle, _renew, _record, _release])


def _snapshot(id_: UUID) -> dict[str, Any]:
    return dict(OutboxEvent.objects.filter(id=id_).values().get())


@every_write
def test_the_holder_of_the_current_fence_may_write(write: Write) -> None:
    insert()
    assert write(claim_one())


@every_write
def test_the_holder_may_write_after_its_lease_ran_out_while_nobody_else_claimed(write: Write) -> None:
    insert()
    lease = claim_one()
    with travel(hours=1):
        assert write(lease)


@every_write
def test_a_stale_fence_cannot_write(write: Write) -> None:
    (id_,) = insert()
    stale = claim_one(holder="relay-1")
    with travel(seconds=61):
        claim_one(holder="relay-1")  # the same holder, so that the fence alone decides
        before = _snapshot(id_)
        assert not write(stale)
    assert _snapshot(id_) == before


@every_write
def test_another_holder_cannot_write_with_the_right_fence(write: Write) -> None:
    """A claim committed asynchronously may be lost in a crash, and its fence given to the next holder."""
    (id_,) = insert()
    lease = claim_one(holder="relay-1")
    OutboxEvent.objects.filter(id=id_).update(leased_by="relay-2")
    before = _snapshot(id_)
    assert not write(lease)
    assert _snapshot(id_) == before


@every_write
@pytest.mark.parametrize("status", ["done", "failed"])
def test_nobody_writes_to_a_finished_row(write: Write, status: str) -> None:
    (id_,) = insert()
    lease = claim_one()
    OutboxEvent.objects.filter(id=id_).update(
        status=status, leased_by="", lease_until=None, due_at=None, finished_at=LONG_AGO
    )
    before = _snapshot(id_)
    assert not write(lease)
    assert _snapshot(id_) == before


@every_write
def test_nobody_writes_to_a_row_that_was_deleted(write: Write) -> None:
    (id_,) = insert()
    lease = claim_one()
    OutboxEvent.objects.filter(id=id_).delete()
    assert not write(lease)


@every_write
def test_an_operators_retry_takes_a_row_from_a_relay_that_overslept(write: Write) -> None:
    (id_,) = insert(status="waiting", due_at=LONG_AGO)
    lease = claim_one()
    assert engine.retry(EVENTS, using=USING, ids=[id_]) == engine.Report(leased=1)
    with travel(seconds=61):
        assert engine.retry(EVENTS, using=USING, ids=[id_]) == engine.Report(changed=1)
        before = _snapshot(id_)
        assert not write(lease)
    assert _snapshot(id_) == before
    assert (stored(id_).attempts, stored(id_).fence, stored(id_).leased_by) == (0, 1, "")


@every_write
def test_a_write_does_not_touch_other_rows(write: Write) -> None:
    mine, other = insert(2)
    lease = claim(1)[0]
    assert lease.id == mine
    claim_one(holder="relay-2")
    before = _snapshot(other)
    assert write(lease)
    assert _snapshot(other) == before


# --- renew, record, release ------------------------------------------------------------------------------------------


def test_renewing_extends_the_lease_from_now_and_names_the_rows_that_are_lost() -> None:
    ids = insert(3)
    leases = claim(lease_seconds=100)
    OutboxEvent.objects.filter(id=ids[1]).update(leased_by="relay-2")
    OutboxEvent.objects.update(lease_until=LONG_AGO)
    for lease in leases:
        lease.deadline = deadline = time.monotonic() + 1
    lost = engine.renew({lease: {} for lease in leases}, using=USING)
    assert [lease.id for lease in lost] == [ids[1]]
    assert leases[1].deadline <= deadline
    for kept in (leases[0], leases[2]):
        assert 95 < kept.deadline - time.monotonic() <= 100
        assert 95 < seconds_from_now(stored(kept.id).lease_until) <= 100
        assert (stored(kept.id).attempts, stored(kept.id).fence) == (1, 1)


def test_renewing_carries_the_deliveries_made_so_far() -> None:
    first, second = insert(2, handlers=("one", "two"))
    a, b = claim()
    engine.renew({a: {"one": "2026-01-01T00:00:00.000Z"}, b: {}}, using=USING)
    assert stored(first).deliveries == {"one": "2026-01-01T00:00:00.000Z", "two": None}
    assert stored(second).deliveries == {"one": None, "two": None}


def test_deliveries_merge_on_the_server() -> None:
    (id_,) = insert(handlers=("one", "two", "three"))
    lease = claim_one()
    assert engine.record(lease, using=USING, delivered={"one": "2026-01-01T00:00:00.000Z"})
    assert engine.record(lease, using=USING, delivered={"two": "2026-01-02T00:00:00.000Z"})
    settle(failed(lease))
    row = stored(id_)
    assert row.deliveries == {"one": "2026-01-01T00:00:00.000Z", "two": "2026-01-02T00:00:00.000Z", "three": None}
    assert row.failures["one"]["error"] == "one: it broke"


def test_a_release_gives_the_attempt_back_and_leaves_status_and_due_time() -> None:
    ids = [*insert(), *insert(status="waiting", due_at=LONG_AGO, attempts=2)]
    leases = claim()
    assert [lease.attempts for lease in leases] == [1, 3]
    assert engine.release(leases, using=USING) == 2
    rows = [stored(id_) for id_ in ids]
    assert [(row.status, row.attempts, row.due_at) for row in rows] == [("pending", 0, None), ("waiting", 2, LONG_AGO)]
    assert [(row.fence, row.lease_until) for row in rows] == [(1, None), (1, None)]
    assert [lease.fence for lease in claim(holder="relay-2")] == [2, 2]


def test_a_row_that_was_released_unstarted_is_under_no_suspicion() -> None:
    insert()
    engine.release([claim_one()], using=USING)
    assert not claim_one(holder="relay-2").suspect


def test_a_suspect_row_that_was_released_unstarted_stays_a_suspect() -> None:
    """Otherwise it gets an unmarked start after every release, and kills more processes than three."""
    insert()
    claim_one()
    with travel(seconds=61):
        lease = claim_one(holder="relay-2")
        assert lease.suspect
        engine.release([lease], using=USING)
        assert claim_one(holder="relay-3").suspect


def test_empty_batches_need_no_database() -> None:
    assert engine.renew({}, using=USING) == []
    assert engine.release([], using=USING) == 0
    assert engine.settle([], schedule=SCHEDULE, using=USING) == {}


# --- settle ----------------------------------------------------------------------------------------------------------


def test_a_done_row_is_finished_and_free() -> None:
    (id_,) = insert()
    assert settle(done(claim_one(), "one")) == {id_: "done"}
    row = stored(id_)
    assert (row.status, row.leased_by, row.lease_until, row.due_at, row.last_error) == ("done", "", None, None, "")
    assert abs(seconds_from_now(row.finished_at)) < 5
    assert row.deliveries == {"one": "2026-01-01T00:00:00.000Z"}


def test_a_failure_waits_for_its_time_and_is_dead_after_the_last_attempt() -> None:
    (id_,) = insert()
    for attempt, low, high in ((1, 10, 12.5), (2, 20, 25)):
        assert settle(failed(claim_one())) == {id_: "waiting"}
        row = stored(id_)
        assert row.attempts == attempt
        assert low - 1 < seconds_from_now(row.due_at) < high + 1
        OutboxEvent.objects.filter(id=id_).update(due_at=LONG_AGO)
    assert settle(failed(claim_one())) == {id_: "dead"}
    row = stored(id_)
    assert abs(seconds_from_now(row.dead_at)) < 5
    assert row.finished_at is None
    assert 3_600 - 1 < seconds_from_now(row.due_at) < 3_600 * 1.25 + 1


def test_a_replayed_dead_row_that_fails_again_keeps_the_time_of_its_death() -> None:
    (id_,) = insert(status="dead", due_at=LONG_AGO, dead_at=LONG_AGO, attempts=3)
    assert settle(failed(claim_one()), announce=True) == {id_: "dead"}
    row = stored(id_)
    assert (row.dead_at, row.attempts) == (LONG_AGO, 4)
    assert seconds_from_now(row.due_at) > 3_500
    assert announcements() == []


def test_a_dead_row_without_replay_waits_for_a_person() -> None:
    (id_,) = insert()
    settle(failed(claim_one()), schedule=NO_REPLAY)
    assert (stored(id_).status, stored(id_).due_at) == ("dead", None)


def test_a_requested_delay_is_a_floor() -> None:
    (id_,) = insert()
    settle(failed(claim_one(), delay=500))
    assert 499 < seconds_from_now(stored(id_).due_at) < 626


def test_an_absurd_requested_delay_is_cut_and_settles() -> None:
    (id_,) = insert()
    assert settle(failed(claim_one(), delay=1e300)) == {id_: "waiting"}
    assert seconds_from_now(stored(id_).due_at) > 86_400 * 365 * 99


def test_attempt_150_waits_for_the_cap_and_does_not_overflow() -> None:
    """Scenario 13."""
    (id_,) = insert(attempts=149)
    schedule = Schedule(max_attempts=200, base=5, cap=3_600, replay_every=None, replay_for=None)
    assert settle(failed(claim_one()), schedule=schedule) == {id_: "waiting"}
    assert 3_599 < seconds_from_now(stored(id_).due_at) < 4_501


def test_parking_charges_nothing_and_waits_a_tenth_of_the_age() -> None:
    (id_,) = insert(attempts=1)
    with travel(hours=1):
        assert settle(engine.Settled(claim_one(), engine.Park(spent=False), error="two: nobody knows it")) == {
            id_: "waiting"
        }
    row = stored(id_)
    assert row.attempts == 1
    assert 3_600 + 359 < seconds_from_now(row.due_at) < 3_600 + 451


def test_parking_beyond_its_time_is_death() -> None:
    (id_,) = insert()
    assert settle(engine.Settled(claim_one(), engine.Park(spent=True), error="x"), announce=True) == {id_: "dead"}
    assert len(announcements()) == 1


def test_a_refused_delivery_is_failed_for_good() -> None:
    (id_,) = insert(status="waiting", due_at=LONG_AGO)
    assert settle(engine.Settled(claim_one(), engine.Fail(), error="one: no"), announce=True) == {id_: "failed"}
    row = stored(id_)
    assert (row.due_at, row.leased_by, row.last_error) == (None, "", "one: no")
    assert row.finished_at is not None
    assert announcements()[0].payload["status"] == "failed"


def test_a_lost_worker_ends_in_death_without_replay() -> None:
    (id_,) = insert(lost_leases=2)
    assert settle(engine.Settled(claim_one(), engine.Dead(), error="one: worker lost"), announce=True) == {id_: "dead"}
    row = stored(id_)
    assert (row.due_at, row.lost_leases) == (None, 0)
    assert row.dead_at is not None
    assert len(announcements()) == 1


def test_a_settle_clears_the_marks() -> None:
    (id_,) = insert(lost_leases=1)
    settle(failed(claim_one()))
    assert stored(id_).lost_leases == 0


def test_a_batch_with_lost_rows_settles_the_rest() -> None:
    ids = insert(4)
    leases = claim()
    OutboxEvent.objects.filter(id=ids[0]).update(leased_by="relay-2", fence=9)
    OutboxEvent.objects.filter(id=ids[2]).delete()
    written = settle(done(leases[0], "one"), failed(leases[1]), done(leases[2], "one"), done(leases[3], "one"))
    assert written == {ids[1]: "waiting", ids[3]: "done"}
    assert stored(ids[0]).leased_by == "relay-2"


def test_a_settle_whose_reply_was_lost_counts_as_written_when_it_is_tried_again() -> None:
    ids = insert(3)
    leases = claim()
    batch = [done(leases[0], "one"), failed(leases[1]), failed(leases[2])]
    first = settle(*batch, schedule=ONE_TRY, announce=True)
    assert first == {ids[0]: "done", ids[1]: "dead", ids[2]: "dead"}
    before = [_snapshot(id_) for id_ in ids]
    assert settle(*batch, schedule=ONE_TRY, announce=True, again=True) == first
    assert [_snapshot(id_) for id_ in ids] == before
    assert len(announcements()) == 2
    assert settle(*batch, schedule=ONE_TRY) == {}


def test_a_settle_tried_again_does_not_take_the_successors_outcome_for_its_own() -> None:
    (id_,) = insert()
    stale = claim_one()
    with travel(seconds=61):
        settle(done(claim_one(holder="relay-2"), "one"))
    assert settle(done(stale, "one"), again=True) == {}
    assert stored(id_).fence == 2


# --- a batch that the database refuses -------------------------------------------------------------------------------


@contextmanager
def refusing(error: str) -> Iterator[None]:
    """Have the database refuse rows with this ``last_error``, as a constraint of the project's own might."""
    table = OutboxEvent._meta.db_table
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                f"CREATE TRIGGER refuse_row BEFORE UPDATE ON {table} WHEN NEW.last_error = '{error}'"
                " BEGIN SELECT RAISE(ABORT, 'refused by a test'); END"
            )
        else:
            cursor.execute(f"ALTER TABLE {table} ADD CONSTRAINT refuse_row CHECK (last_error <> '{error}')")
    yield
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("DROP TRIGGER refuse_row")
        else:
            cursor.execute(f"ALTER TABLE {table} DROP CONSTRAINT refuse_row")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_refused_batch_is_split_down_to_the_bad_row(size: int, caplog: pytest.LogCaptureFixture) -> None:
    ids = insert(size)
    leases = claim()
    bad = size // 2
    batch = [failed(lease, "poison" if index == bad else "it broke") for index, lease in enumerate(leases)]
    with refusing("poison"), caplog.at_level(logging.CRITICAL):
        written = settle(*batch, schedule=ONE_TRY, announce=True)
    assert written == dict.fromkeys(ids, "dead")
    errors = [stored(id_).last_error for id_ in ids]
    assert errors.pop(bad) == engine.REFUSED_TEXT
    assert errors == ["it broke"] * (size - 1)
    assert stored(ids[bad]).failures == {}
    assert len(announcements()) == size
    assert all(not row.leased_by for row in OutboxEvent.objects.all())


def test_a_refused_batch_is_split_inside_a_transaction_too(caplog: pytest.LogCaptureFixture) -> None:
    ids = insert(3)
    leases = claim()
    with refusing("poison"), caplog.at_level(logging.CRITICAL):
        written = settle(done(leases[0], "one"), failed(leases[1], "poison"), done(leases[2], "one"))
    assert written == {ids[0]: "done", ids[1]: "waiting", ids[2]: "done"}
    assert stored(ids[1]).last_error == engine.REFUSED_TEXT


@contextmanager
def frozen(id_: UUID, raising: str) -> Iterator[None]:
    """Have the database refuse every change of a row's status, whatever else is written."""
    table = OutboxEvent._meta.db_table
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                f"CREATE TRIGGER frozen BEFORE UPDATE ON {table} WHEN NEW.id = '{id_.hex}' AND NEW.status <> OLD.status"
                " BEGIN SELECT RAISE(ABORT, 'frozen by a test'); END"
            )
        else:
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
                f" $$ BEGIN RAISE EXCEPTION 'frozen by a test' {raising}; END $$"
            )
            cursor.execute(
                f"CREATE TRIGGER frozen BEFORE UPDATE ON {table} FOR EACH ROW"
                f" WHEN (NEW.id = '{id_}' AND NEW.status <> OLD.status) EXECUTE FUNCTION refuse()"
            )
    yield
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("DROP TRIGGER frozen")
        else:
            cursor.execute(f"DROP TRIGGER frozen ON {table}")
            cursor.execute("DROP FUNCTION refuse()")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("raising", ["", "USING ERRCODE = 'check_violation'"], ids=["raise", "check"])
def test_a_row_that_cannot_be_settled_at_all_holds_up_nobody(raising: str, caplog: pytest.LogCaptureFixture) -> None:
    ids = insert(5)
    leases = claim()
    with frozen(ids[2], raising), caplog.at_level(logging.CRITICAL):
        written = settle(*[done(lease, "one") for lease in leases])
    assert written == {id_: "done" for id_ in ids if id_ != ids[2]}
    row = stored(ids[2])
    assert (row.status, row.leased_by, row.attempts) == ("pending", "relay-1", 1)
    assert "row cannot be settled" in caplog.text


# --- announcements ---------------------------------------------------------------------------------------------------


def test_the_first_death_is_announced_and_only_it() -> None:
    (id_,) = insert()
    settle(failed(claim_one(), "one: it broke"), schedule=ONE_TRY, announce=True)
    (spoken,) = announcements()
    assert spoken.payload["id"] == str(id_)
    assert spoken.payload["queue"] == "events"
    assert spoken.payload["error"] == "one: it broke"
    assert spoken.payload["handlers"] == {"one": "one: it broke"}
    assert spoken.quiet
    assert spoken.causation_id == id_
    OutboxEvent.objects.filter(id=id_).update(due_at=LONG_AGO)
    with travel(seconds=61):
        settle(*[failed(lease) for lease in claim() if lease.id == id_], schedule=ONE_TRY, announce=True)
    assert len(announcements()) == 1


def test_a_retry_is_no_death_and_is_not_announced() -> None:
    insert()
    settle(failed(claim_one()), announce=True)
    assert announcements() == []


def test_a_settle_that_did_not_write_announces_nothing() -> None:
    (id_,) = insert()
    stale = claim_one()
    with travel(seconds=61):
        claim_one(holder="relay-2")
    assert settle(failed(stale), schedule=ONE_TRY, announce=True) == {}
    assert announcements() == []
    assert stored(id_).leased_by == "relay-2"


def test_a_quiet_row_dies_quietly() -> None:
    insert(quiet=True)
    settle(failed(claim_one()), schedule=ONE_TRY, announce=True)
    assert announcements() == []


def test_a_death_after_an_operators_retry_is_announced_again() -> None:
    (id_,) = insert()
    settle(failed(claim_one()), schedule=ONE_TRY, announce=True)
    engine.retry(EVENTS, using=USING, ids=[id_])
    leases = [lease for lease in claim() if lease.id == id_]
    settle(*[failed(lease) for lease in leases], schedule=ONE_TRY, announce=True)
    assert len(announcements()) == 2


@pytest.mark.django_db(transaction=True)
def test_an_announcement_is_committed_with_the_death_or_not_at_all() -> None:
    (id_,) = insert()
    lease = claim_one()

    def announce(settled: engine.Settled, status: str) -> engine.NewRow:
        # The settle wrote already; in this connection, and in no other, the row is dead.
        assert stored(settled.lease.id).status == "dead"
        assert connection.in_atomic_block
        raise OperationalError("the connection was lost")

    with pytest.raises(OperationalError):
        engine.settle([failed(lease)], schedule=ONE_TRY, using=USING, announce=announce)
    assert stored(id_).status == "pending"
    assert announcements() == []
    assert settle(failed(lease), schedule=ONE_TRY, announce=True, again=True) == {id_: "dead"}
    assert len(announcements()) == 1


@pytest.mark.django_db(transaction=True)
def test_an_announcement_that_the_database_refuses_does_not_prevent_the_death(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = insert(2)
    leases = claim()

    def announce(settled: engine.Settled, status: str) -> engine.NewRow:
        row = announcement(settled, status)
        if settled.lease.id == ids[1]:
            return row
        return engine.NewRow(id=ids[1], type=row.type, payload=row.payload, deliveries=row.deliveries)

    with caplog.at_level(logging.CRITICAL):
        written = engine.settle([failed(lease) for lease in leases], schedule=ONE_TRY, using=USING, announce=announce)
    assert written == dict.fromkeys(leases, "dead")
    assert [row.payload["id"] for row in announcements()] == [str(ids[1])]


def test_an_announcement_goes_to_the_handlers_that_asked_for_it_and_ignores_the_payload_limit() -> None:
    heard: list[Event] = []

    @on_event("outbox.event.dead", name="alarm")
    def alarm(event: Event) -> None:
        heard.append(event)
        with transaction.atomic():
            emit_event("thing.noted", {})

    @on_event("thing.happened", name="broken")
    def broken(event: Event) -> None:
        raise ValueError("x" * 5_000)

    @on_event("thing.noted", name="also-broken")
    def also_broken(event: Event) -> None:
        raise ValueError("again")

    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 64, "EVENTS": {"MAX_ATTEMPTS": 1}}):
        with transaction.atomic():
            emit_event("thing.happened", {})
        counts = drain()
    assert counts == {"dead": 2, "done": 1}
    assert [event.type for event in heard] == ["outbox.event.dead"]
    assert len(heard[0].payload["error"]) <= ERROR_TEXT_LIMIT
    # What was written while a quiet row was handled is quiet, so its death spoke to nobody.
    assert OutboxEvent.objects.get(type="thing.noted").quiet
    assert len(announcements()) == 1


def test_an_operators_discard_is_not_announced() -> None:
    (id_,) = insert(status="dead", due_at=None, dead_at=LONG_AGO)
    assert engine.discard(EVENTS, using=USING, ids=[id_]) == engine.Report(changed=1)
    assert stored(id_).status == "failed"
    assert announcements() == []


# --- suspects --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_handlers() -> list[str]:
    """Register ``good`` and ``bad`` for one type; return the list of those that were called."""
    called: list[str] = []

    @on_event("thing.done", name="good")
    def good(event: Event) -> None:
        called.append("good")

    @on_event("thing.done", name="bad")
    def bad(event: Event) -> None:
        called.append("bad")

    return called


def _start(lease: engine.Lease) -> tuple[EventRun, list[str]]:
    """Run what may start, up to the handler ``bad``, which takes its process with it."""
    run = EventRun(lease, using=USING)
    started = []
    while (handler := run.next_step()) is not None:
        started.append(handler.name)
        if handler.name == "bad":
            break
        run.finish(handler, run.invoke(handler, timeout=5))
    return run, started


def test_a_handler_that_kills_its_process_is_started_three_times_and_then_blamed(two_handlers: list[str]) -> None:
    (id_,) = insert(handlers=("good", "bad"))
    starts = Counter[str]()
    for life in range(3):
        with travel(seconds=61 * life):
            lease = claim_one(holder=f"relay-{life}")
        assert lease.lost_leases == max(0, life - 1)
        _, started = _start(lease)
        starts.update(started)
    # Its neighbour ran unrecorded once, when nobody suspected anything, and once more, recorded.
    assert starts == {"good": 2, "bad": 3}
    row = stored(id_)
    assert (row.lost_leases, row.failures["bad"]["marks"]) == (2, 2)
    assert row.deliveries["good"] is not None
    with travel(seconds=61 * 3):
        run, started = _start(claim_one(holder="relay-3"))
    assert started == []
    assert run.complete
    settled = run.settled()
    assert settled.outcome == engine.Dead()
    settle(settled, announce=True)
    row = stored(id_)
    assert (row.status, row.due_at, row.lost_leases) == ("dead", None, 0)
    assert "worker lost" in row.last_error
    assert row.failures["bad"]["lost"] is True
    assert "marks" not in row.failures["bad"]
    assert len(announcements()) == 1


def test_an_operators_retry_gives_a_blamed_handler_a_new_life(two_handlers: list[str]) -> None:
    (id_,) = insert(
        handlers=("good", "bad"),
        status="dead",
        dead_at=LONG_AGO,
        deliveries={"good": "2026-01-01T00:00:00.000Z", "bad": None},
        failures={"bad": {"error": "worker lost", "at": "2026-01-01T00:00:00.000Z", "lost": True}},
    )
    assert engine.retry(EVENTS, using=USING, ids=[id_]).changed == 1
    assert drain() == {"done": 1}
    assert two_handlers == ["bad"]


def test_a_mark_that_cannot_be_written_starts_nothing(two_handlers: list[str]) -> None:
    insert(handlers=("good", "bad"))
    claim_one(holder="relay-0")
    with travel(seconds=61):
        stale = claim_one()
        with travel(seconds=61):
            claim_one(holder="relay-2")
    run = EventRun(stale, using=USING)
    assert run.next_step() is None
    assert run.lost
    assert run.complete
    assert two_handlers == []


def test_a_row_is_suspect_after_another_holder_and_not_after_oneself() -> None:
    """A process that claims cannot have died of the row: only the answer to its claim, or to its release, was lost."""
    insert()
    assert not claim_one(holder="relay-0").suspect
    with travel(seconds=61):
        assert not claim_one(holder="relay-0").suspect
    with travel(seconds=122):
        assert claim_one(holder="relay-1").suspect


def test_a_suspect_that_succeeds_leaves_no_mark(two_handlers: list[str]) -> None:
    (id_,) = insert(handlers=("good", "bad"))
    claim_one()
    with travel(seconds=61):
        assert drain() == {"done": 1}
    row = stored(id_)
    assert (row.status, row.failures, row.lost_leases) == ("done", {}, 0)
    assert two_handlers == ["good", "bad"]


def test_no_handler_starts_once_the_local_deadline_is_past_and_what_was_made_is_kept(two_handlers: list[str]) -> None:
    insert(handlers=("good", "bad"))
    lease = claim_one()
    run = EventRun(lease, using=USING)
    first = run.next_step()
    assert first is not None
    lease.deadline = time.monotonic() - 1
    assert run.next_step() is None
    before = run.complete
    run.finish(first, run.invoke(first, timeout=10))
    assert (before, run.complete) == (False, True)
    settled = run.settled()
    assert settled.outcome == engine.Released()
    assert set(settled.delivered) == {"good"}
    assert two_handlers == ["good"]


# --- handlers' errors ------------------------------------------------------------------------------------------------


def test_an_error_text_that_no_database_stores_is_cleaned_and_cut() -> None:
    """Scenario 23: NUL, a lone surrogate, 2 MB."""

    @on_event("thing.happened", name="broken")
    def broken(event: Event) -> None:
        raise ValueError("a\x00b \udfff " + "long " * 400_000)

    with transaction.atomic():
        id_ = emit_event("thing.happened", {})
        other = emit_event("thing.happened", {})
    assert drain() == {"waiting": 2}
    for each in (id_, other):
        row = stored(each)
        assert (row.status, row.attempts) == ("waiting", 1)
        assert 0 < len(row.last_error) <= ERROR_TEXT_LIMIT
        assert "\x00" not in row.last_error
        assert row.failures["broken"]["error"].startswith("ValueError: a\N{REPLACEMENT CHARACTER}b")
        assert seconds_from_now(row.due_at) > 3


class _Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _NotAnException(BaseException):
    """Such as gevent's time-out."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (_Hostile(), "waiting"),
        (SystemExit(3), "waiting"),
        (RetryLater(), "waiting"),
        (RetryLater("later", delay=float("inf")), "waiting"),
        (RetryLater("nan", delay=float("nan")), "waiting"),
        (Reject(), "failed"),
        (Reject("\x00"), "failed"),
    ],
    ids=repr,
)
def test_whatever_a_handler_raises_becomes_an_outcome(error: BaseException, status: str) -> None:
    @on_event("thing.happened", name="odd")
    def odd(event: Event) -> None:
        raise error

    with transaction.atomic():
        id_ = emit_event("thing.happened", {})
    assert drain() == {status: 1}
    assert stored(id_).status == status
    assert stored(id_).last_error


@pytest.mark.parametrize("error", [_NotAnException("odd"), GeneratorExit()], ids=repr)
def test_what_is_no_exception_ends_a_test_and_only_a_delivery_in_the_relay(error: BaseException) -> None:
    @on_event("thing.happened", name="odd")
    def odd(event: Event) -> None:
        raise error

    with transaction.atomic():
        emit_event("thing.happened", {})
    with pytest.raises(type(error)):
        drain()
    with travel(minutes=2):
        (lease,) = engine.Claimer(EVENTS, holder="another", using="default").claim(1, lease_seconds=60)
    run = EventRun(lease, using="default")
    handler = run.next_step()
    assert handler is not None
    result = run.invoke(handler, timeout=30)
    assert not result.ok
    assert result.error


def test_a_row_whose_columns_were_damaged_can_still_die_and_be_announced() -> None:
    (id_,) = insert(failures={"one": "text, where an object belongs"}, status="waiting", due_at=LONG_AGO)
    assert settle(engine.Settled(claim_one(), engine.Retry(), error="x"), schedule=ONE_TRY, announce=True) == {
        id_: "dead"
    }
    assert len(announcements()) == 1


def test_ids_ascend_even_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.new_ids(3)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600 * 10**9)
    after = engine.new_ids(3)
    assert before + after == sorted(set(before + after))
    assert {id_.version for id_ in before + after} == {7}
    assert uuid4() not in after
