"""
One relay, several queues: what they share, and what one does not cost the other.

The second queue is the tests' own, of parcels: rows of one step, as an email is. The
test decides when a step goes on, by events; an outage is a lock that refuses writes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction

from django_outbox import Event, on_event, wake
from django_outbox import lease as engine
from django_outbox.conf import QueueSettings
from django_outbox.delivery import Result, SingleRun, Work
from django_outbox.models import OutboxEvent
from django_outbox.relay import WORK
from django_outbox.testing import drain
from tests.concurrency.helpers import DEADLINE_SECONDS, RunningRelay, Worker, eventually, running_relay
from tests.concurrency.test_relay import LONG_AGO, TYPE, Calls, Held, _writes_locked, emit
from tests.conftest import RawConnect
from tests.testapp.models import PARCELS, Parcel

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["calls", "held"]

from tests.concurrency.test_relay import calls, held  # noqa: E402  fixtures


class ParcelRun(SingleRun):
    """Calls what the test gives, with the row's id."""

    def __init__(self, lease: engine.Lease, *, using: str, work: ParcelWork) -> None:
        super().__init__(lease, using=using, name="parcel")
        self.timeout = work.timeout
        self._work = work

    def refused(self) -> Result | None:
        return self._work.refuse(self.lease.id)

    def perform(self, *, timeout: float) -> Result:
        return self._work.perform(self.lease.id) or Result(columns={"receipt": "signed"})


class ParcelWork(Work):
    """A queue as the later ones are: with scopes."""

    queue = PARCELS
    timeout: float | None = None

    def __init__(self) -> None:
        self.perform: Callable[[UUID], Result | None] = lambda id_: None
        self.refuse: Callable[[UUID], Result | None] = lambda id_: None
        self.lanes: Sequence[int] = (0,)
        self.held: Counter[UUID] = Counter()
        self.rested = threading.Event()
        self.written: list[tuple[UUID, str]] = []

    def settings(self) -> QueueSettings:
        return QueueSettings(retry_base_seconds=0, retry_cap_seconds=0, concurrency=2, lease_seconds=5)

    def start(self, lease: engine.Lease, *, using: str) -> ParcelRun:
        return ParcelRun(lease, using=using, work=self)

    def scopes(self, room: int, *, using: str) -> Iterable[tuple[Mapping[str, Any], int]]:
        return [({"lane": lane}, room) for lane in self.lanes]

    def next_due_seconds(self, *, using: str) -> float | None:
        closed = [lane for lane in (0, 1, 2) if lane not in self.lanes]
        return engine.next_due_seconds(self.queue, using=using, excluding={"lane": closed})

    def claimed(self, leases: Sequence[engine.Lease]) -> None:
        self.held.update(lease.id for lease in leases)

    def landed(self, leases: Sequence[engine.Lease]) -> None:
        self.held.subtract(lease.id for lease in leases)

    def along(self, written: Sequence[tuple[engine.Settled, str]], *, using: str) -> None:
        self.written += [(settled.lease.id, status) for settled, status in written]

    def rest(self) -> None:
        self.rested.set()


@pytest.fixture
def parcels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParcelWork]:
    """Return the second queue, which relays of this process serve until the test ends."""
    work = ParcelWork()
    monkeypatch.setitem(WORK, "parcels", work)
    yield work
    assert not +work.held, "rows were claimed that never landed"


@pytest.fixture(autouse=True)
def _outbox(settings: Any) -> None:
    settings.OUTBOX = {
        "POLL_SECONDS": 60,
        "SHUTDOWN_GRACE_SECONDS": 10,
        "EVENTS": {"RETRY_BASE_SECONDS": 0, "RETRY_CAP_SECONDS": 0},
    }


def insert(count: int = 1, **values: Any) -> list[UUID]:
    rows = [Parcel(id=engine.new_id(), created_at=datetime.now(UTC), **values) for _ in range(count)]
    return [row.id for row in Parcel.objects.bulk_create(rows)]


def statuses() -> Counter[str]:
    return Counter(Parcel.objects.values_list("status", flat=True))


def test_two_queues_are_served_side_by_side(parcels: ParcelWork, calls: Calls, held: Held) -> None:
    """All threads of one queue are held, which the other does not feel; both are woken by name."""
    on_event(TYPE, name="one")(lambda event: held.pass_through())
    parcels.perform = calls.add
    emit(4)
    with running_relay(threads=2) as running:
        held.wait_for_entry()
        held.wait_for_entry()
        ids = insert(20)
        wake.notify("default", queue="parcels")
        running.wait_for(done=20)
        assert calls.counts() == Counter(ids)
        assert parcels.rested.wait(DEADLINE_SECONDS)
        held.go.set()
        running.wait_for(done=24)
    assert statuses() == {"done": 20}
    assert set(Parcel.objects.values_list("receipt", flat=True)) == {"signed"}
    assert sorted(parcels.written) == sorted((id_, "done") for id_ in ids)


def test_a_scope_that_is_left_out_waits_and_keeps_nobody_awake(parcels: ParcelWork, calls: Calls) -> None:
    parcels.perform = calls.add
    open_, closed = insert(3, lane=0), insert(2, lane=1)
    with running_relay() as running:
        running.wait_for(done=3)
        running.wait_until_idle()
        lane = running.relay.lanes[-1]
        eventually(lambda: lane.look_at > time.monotonic() + 30)
        assert calls.counts() == Counter(open_)
        parcels.lanes = (0, 1)
        wake.notify("default", queue="parcels")
        running.wait_for(done=5)
    assert calls.counts() == Counter(open_ + closed)


def test_a_drain_ends_after_what_a_handler_queued_elsewhere(parcels: ParcelWork, calls: Calls) -> None:
    """The other queue was looked at before, and nothing was due in it then."""
    parcels.perform = calls.add
    running: list[RunningRelay] = []

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        eventually(lambda: running and running[0].relay.lanes[-1].look_at)
        insert()

    emit()
    running.append(RunningRelay(mode="drain"))
    assert running[0].end() == 0
    assert len(calls.made) == 1
    assert statuses() == {"done": 1}


def test_a_refused_row_is_given_back_with_its_attempt(parcels: ParcelWork, calls: Calls) -> None:
    """What a paused backend does: the row keeps its status, its time and its attempts."""
    parcels.perform = calls.add
    (id_,) = insert()

    def refuse(given: UUID) -> Result:
        parcels.lanes = ()
        return Result(outcome=engine.Released())

    parcels.refuse = refuse
    with running_relay() as running:
        running.wait_for(released=1)
        running.wait_until_idle()
        row = Parcel.objects.get(id=id_)
        assert (row.status, row.attempts, row.leased_by, row.lease_until) == ("pending", 0, "", None)
        parcels.refuse, parcels.lanes = (lambda given: None), (0,)
        wake.notify("default", queue="parcels")
        running.wait_for(done=1)
    assert calls.made == [id_]


def test_a_stop_does_not_wait_for_a_row_that_waits_before_its_start(parcels: ParcelWork, held: Held) -> None:
    """As an email does while the last one's outcome cannot be written; it is given back, unstarted."""
    insert()
    (lease,) = engine.Claimer(PARCELS, holder="stopping", using="default").claim(1, lease_seconds=60)
    parcels.refuse = lambda id_: held.pass_through()
    run = parcels.start(lease, using="default")
    starting = Worker(run.next_step)
    held.wait_for_entry()
    Worker(run.interrupt).result(seconds=5)
    assert run.complete
    held.go.set()
    assert starting.result() is None
    assert run.settled().outcome == engine.Released()


def test_one_step_has_three_starts_when_it_costs_its_process(parcels: ParcelWork, calls: Calls) -> None:
    """Its holders are gone each time, and the last two starts are marked; a fourth there is not."""
    parcels.perform = calls.add
    (id_,) = insert()
    for marks in (None, 1, 2):
        claimer = engine.Claimer(PARCELS, holder=f"gone after {marks}", using="default")
        (lease,) = claimer.claim(1, lease_seconds=5)
        run = parcels.start(lease, using="default")
        assert run.next_step() is run  # and its process dies here
        assert Parcel.objects.get(id=id_).lost_leases == (marks or 0)
        Parcel.objects.update(lease_until=LONG_AGO)
    assert drain(queues=["parcels"]) == {"dead": 1}
    row = Parcel.objects.get(id=id_)
    assert (row.due_at, row.lost_leases, "worker lost" in row.last_error) == (None, 0, True)
    assert calls.made == []


def test_a_queue_whose_outcomes_cannot_be_written_holds_up_no_other(
    parcels: ParcelWork, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """Its table lacks a column until somebody mends it; then it is settled, and nothing ran twice."""
    on_event(TYPE, name="one")(lambda event: calls.add("event"))
    parcels.perform = calls.add
    table = Parcel._meta.db_table
    with running_relay() as running:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME COLUMN receipt TO recipe")
        try:
            id_ = engine.new_id()
            columns = "id, created_at, status, attempts, fence, lost_leases, quiet, last_error, leased_by, lane, body"
            values = "%s, CURRENT_TIMESTAMP, 'pending', 0, 0, 0, %s, '', '', 0, ''"
            with connection.cursor() as cursor:
                given = id_.hex if connection.vendor == "sqlite" else id_
                cursor.execute(f"INSERT INTO {table} ({columns}) VALUES ({values})", [given, False])
            wake.notify("default", queue="parcels")
            calls.wait_for(1)
            eventually(lambda: "database trouble step=settle" in caplog.text)
            emit(5)
            running.wait_for(done=5)
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER TABLE {table} RENAME COLUMN recipe TO receipt")
        running.wait_for(done=6)
    assert calls.counts() == Counter({id_: 1, "event": 5})
    assert statuses() == {"done": 1}


def test_time_limits_are_watched_while_a_renewal_waits_for_the_database(
    calls: Calls, held: Held, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can write for longer than a handler's time limit; its thread is given up all the same."""
    settings.OUTBOX = {"EVENTS": {"LEASE_SECONDS": 3, "TIMEOUT_SECONDS": 30}}

    @on_event(TYPE, name="slow", timeout=2)
    def slow(event: Event) -> None:
        held.pass_through()

    emit()
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        with _writes_locked():
            # A third of the lease is over before the limit is, so the renewal waits by then.
            eventually(lambda: "handler past its time limit" in caplog.text)
        held.go.set()
        running.wait_for(done=1)


# --- after an outage -------------------------------------------------------------------------------------------------


def _leased_by_another() -> UUID:
    with transaction.atomic():  # a relay that runs must not have it before
        (id_,) = emit()
        OutboxEvent.objects.filter(id=id_).update(lease_until=LONG_AGO, leased_by="other", fence=1, attempts=1)
    return id_


def test_after_its_own_outage_a_relay_spares_for_a_while_what_others_hold(calls: Calls, settings: Any) -> None:
    """A lease that ran out meanwhile may be a living relay's, which was away as well."""
    settings.OUTBOX = {"EVENTS": {"LEASE_SECONDS": 3}}
    on_event(TYPE, name="one")(lambda event: calls.add((event.id, time.monotonic())))
    with running_relay() as running:
        (first,) = emit()
        running.wait_for(done=1)
        running.relay._recover()
        came_back = time.monotonic()
        expired = _leased_by_another()
        (fresh,) = emit()
        running.wait_for(done=3)
    when = dict(calls.made)
    assert set(when) == {first, expired, fresh}
    assert when[expired] - came_back >= 1.0
    assert when[fresh] < when[expired]


def test_a_claim_that_fails_is_an_outage(
    calls: Calls, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = connection.settings_dict.setdefault("OPTIONS", {})
    if connection.vendor == "sqlite":
        monkeypatch.setitem(options, "timeout", 0.2)
    else:
        monkeypatch.setitem(options, "options", "-c lock_timeout=200ms")
    settings.OUTBOX = {"EVENTS": {"LEASE_SECONDS": 6}}
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    expired = _leased_by_another()
    with _writes_locked(), running_relay() as running:
        eventually(lambda: "database trouble step=claim" in caplog.text)
        lane = running.relay.lanes[0]
        running.relay.stop()
    assert lane.spare_until == 0.0
    assert running.relay._recovering
    assert OutboxEvent.objects.get(id=expired).leased_by == "other"
    assert calls.made == []


def test_deliveries_in_memory_survive_a_lease_that_ended_while_the_database_was_away(
    calls: Calls, settings: Any, caplog: pytest.LogCaptureFixture, raw_connect: RawConnect, held: Held
) -> None:
    """
    No renewal comes through for longer than the lease; the first handler's delivery is recorded afterwards.

    The second did not start in time, so it runs then, and the first does not run again.
    """
    settings.OUTBOX = {"EVENTS": {"LEASE_SECONDS": 1}}

    @on_event(TYPE, name="first")
    def first(event: Event) -> None:
        calls.add("first")
        held.pass_through()

    on_event(TYPE, name="second")(lambda event: calls.add("second"))
    emit()
    with running_relay(threads=2) as running:
        held.wait_for_entry()
        (flight,) = running.relay.flights.all()
        with _writes_locked():
            eventually(lambda: not flight.lease.current())
            held.go.set()
            eventually(lambda: flight.closed)
        running.wait_for(done=1)
    assert calls.made == ["first", "second"]
    assert "lease lost" not in caplog.text
