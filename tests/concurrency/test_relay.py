"""
The relay in a thread of this process: order, time limits, leases, stops.

Interleavings are forced by the handlers themselves: they tell by an event that they
have begun and wait for another before they end, so the test decides what happens in
between. Where the test must know what the relay did, it waits for the relay's counts.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.db import connection, connections, transaction
from psycopg.conninfo import make_conninfo

from django_outbox import Event, NewEvent, Reject, emit_event, emit_events, on_event, wake
from django_outbox import lease as engine
from django_outbox.events import EVENTS
from django_outbox.models import OutboxEvent
from django_outbox.relay import Relay
from django_outbox.testing import isolated_handlers
from tests.concurrency.helpers import (
    DEADLINE_SECONDS,
    RunningRelay,
    Worker,
    eventually,
    running_relay,
    together,
)
from tests.conftest import RawConnect
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

TYPE = "thing.happened"
TABLE = OutboxEvent._meta.db_table
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def outbox(settings: Any) -> Callable[..., None]:
    """Settings under which nothing happens by the clock within a test; a test changes what it is about."""

    def configure(*, events: dict[str, Any] | None = None, **top: Any) -> None:
        queue = {"RETRY_BASE_SECONDS": 0, "RETRY_CAP_SECONDS": 0, "LEASE_SECONDS": 60, "TIMEOUT_SECONDS": 30}
        settings.OUTBOX = {"POLL_SECONDS": 60, "SHUTDOWN_GRACE_SECONDS": 10, **top, "EVENTS": queue | (events or {})}

    configure()
    return configure


def emit(count: int = 1, payload: Any = None, **options: Any) -> list[UUID]:
    with transaction.atomic():
        return emit_events([NewEvent(TYPE, payload, **options) for _ in range(count)])


def stored(id_: UUID) -> OutboxEvent:
    return OutboxEvent.objects.get(id=id_)


def statuses() -> Counter[str]:
    return Counter(OutboxEvent.objects.values_list("status", flat=True))


class Held:
    """A place in a handler where it waits for the test."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.inside = 0

    def pass_through(self) -> None:
        self.inside += 1
        self.entered.release()
        assert self.go.wait(30), "the test never let the handler go"

    def wait_for_entry(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_SECONDS), "the handler did not start"


@pytest.fixture
def held() -> Iterator[Held]:
    place = Held()
    yield place
    place.go.set()


class Calls:
    """What handlers did, in order."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self.made: list[Any] = []

    def add(self, call: Any) -> None:
        with self._lock:
            self.made.append(call)
            self._lock.notify_all()

    def wait_for(self, count: int, *, seconds: float = DEADLINE_SECONDS) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.made) >= count, seconds), self.made

    def counts(self) -> Counter[Any]:
        return Counter(self.made)


@pytest.fixture
def calls() -> Calls:
    return Calls()


# --- what makes it deliver -------------------------------------------------------------------------------------------


def test_what_lay_there_before_the_start_is_delivered_at_once(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    ids = emit(30)
    with running_relay() as running:
        running.wait_for(done=30)
    assert calls.counts() == Counter(ids)
    assert statuses() == {"done": 30}


def test_an_emit_wakes_a_relay_that_would_sleep_for_a_minute(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    with running_relay() as running:
        for number in range(1, 4):
            began = time.monotonic()
            emit()
            running.wait_for(done=number)
            assert time.monotonic() - began < 1


def test_a_rolled_back_emit_is_never_delivered(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.payload))
    with running_relay() as running:
        with transaction.atomic():
            emit_event(TYPE, "lost")
            transaction.set_rollback(True)
        emit(payload="kept")
        running.wait_for(done=1)
    assert calls.made == ["kept"]


def test_the_poll_alone_suffices(calls: Calls, outbox: Callable[..., None]) -> None:
    """The watcher is stopped, so that nothing but the clock wakes the relay."""
    outbox(POLL_SECONDS=0.2)
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    with running_relay() as running:
        eventually(lambda: running.relay.watcher).stop()
        emit(3)
        running.wait_for(done=3)


def test_a_commit_hook_that_raises_before_ours_costs_a_poll_at_most(calls: Calls, outbox: Callable[..., None]) -> None:
    """Scenario 65: one hook that raises stops all hooks after it."""
    outbox(POLL_SECONDS=0.3)
    on_event(TYPE, name="one")(lambda event: calls.add(event.payload))

    def broken() -> None:
        raise LookupError("the application's own hook")

    with running_relay() as running:
        eventually(lambda: running.relay.watcher).stop()
        with pytest.raises(LookupError), transaction.atomic():
            transaction.on_commit(broken)
            emit_event(TYPE, "before")
        running.wait_for(done=1)
        with pytest.raises(LookupError), transaction.atomic():
            emit_event(TYPE, "after")
            transaction.on_commit(broken)
        running.wait_for(done=2)
    assert calls.made == ["before", "after"]


def test_a_delayed_event_is_delivered_at_its_time_and_not_at_the_poll(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(time.monotonic()))
    with running_relay() as running:
        began = time.monotonic()
        emit(delay=0.6)
        running.wait_for(done=1)
    assert 0.59 <= calls.made[0] - began < 2


def test_a_retry_is_made_at_its_time_and_not_at_the_poll(calls: Calls, outbox: Callable[..., None]) -> None:
    outbox(events={"RETRY_BASE_SECONDS": 0.4, "RETRY_CAP_SECONDS": 10})

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(time.monotonic())
        if event.attempt == 1:
            raise ValueError

    emit()
    with running_relay() as running:
        running.wait_for(done=1)
    assert 0.4 <= calls.made[1] - calls.made[0] < 2


def test_a_retry_is_made_at_its_time_while_one_wake_up_follows_another(calls: Calls) -> None:
    """Claims that follow a wake-up take new rows alone, nobody tells of this one, and the poll is a minute off."""
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    enough = threading.Event()

    def keep_waking() -> None:
        while not enough.wait(0.001):
            wake.notify("default")

    with running_relay() as running:
        emit()
        running.wait_for(done=1)
        eventually(lambda: running.relay.lanes[0].due_at > time.monotonic())  # it asked, and knows of nothing
        waking = Worker(keep_waking)
        try:
            (retry,) = emit(delay=3_600)
            due_at = datetime.now(UTC) + timedelta(seconds=0.5)
            OutboxEvent.objects.filter(id=retry).update(status="waiting", due_at=due_at)
            calls.wait_for(2)
        finally:
            enough.set()
            waking.result()


def test_a_backlog_is_claimed_in_large_pieces_while_its_rows_land_one_by_one(calls: Calls) -> None:
    """Fifty threads free a place a hundred times a moment; a claim for each would cost more than the handlers."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.id)
        time.sleep(0.005)

    with running_relay(threads=50) as running:
        claimer = running.relay.lanes[0].claimer
        assert claimer.queue is EVENTS
        claim, sizes = claimer.claim, []

        def noted(*args: Any, **options: Any) -> list[engine.Lease]:
            leases = claim(*args, **options)
            sizes.append(len(leases))
            return leases

        claimer.claim = noted  # type: ignore[method-assign]
        emit(3_000)
        running.wait_for(done=3_000, seconds=60)
    assert set(calls.counts().values()) == {1}
    assert len([size for size in sizes if size]) <= 50, sizes


def test_a_claim_of_new_rows_that_left_some_is_followed_by_a_whole_one_whoever_wakes_it(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    with running_relay() as running:
        lane = running.relay.lanes[0]
        emit()
        running.wait_for(done=1)
        eventually(lambda: lane.due_at > time.monotonic())  # it asked, and knows of nothing
        claim, made = lane.claimer.claim, []

        def noted(*args: Any, fresh: bool = False, **options: Any) -> list[engine.Lease]:
            running.relay._wake("events")
            leases = claim(*args, fresh=fresh, **options)
            made.append((fresh, lane.claimer.more))
            return leases

        lane.claimer.claim = noted  # type: ignore[method-assign]
        emit(200)
        running.wait_for(done=201)
    assert (True, True) in made
    assert not [one for one, next_ in pairwise(made) if one[1] and next_[0]], made


def test_what_a_handler_emits_is_delivered_at_once() -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        with transaction.atomic():
            emit_event("thing.followed")

    on_event("thing.followed", name="two")(lambda event: None)
    with running_relay() as running:
        emit(5)
        running.wait_for(done=10)


def test_dead_rows_that_are_due_are_replayed_without_waiting_for_the_poll(calls: Calls) -> None:
    """They get a quarter of a claim, so no claim of theirs ever comes back full."""
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    ids = emit(30)
    OutboxEvent.objects.update(status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    with running_relay(threads=1) as running:
        running.wait_for(done=30)
    assert calls.counts() == Counter(ids)


def test_a_backlog_of_big_payloads_is_delivered_without_waiting_for_the_poll(calls: Calls) -> None:
    """A claim is bounded by bytes, so no claim of theirs ever comes back full."""
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    for _ in range(6):
        emit(8, payload="\N{SNOWMAN}" + "x" * 260_000)
    with running_relay() as running:
        running.wait_for(done=48)


def test_events_side_by_side_up_to_the_threads() -> None:
    """Four handlers meet at a barrier that only four at a time get past."""
    barrier = threading.Barrier(4)
    on_event(TYPE, name="one")(lambda event: barrier.wait(DEADLINE_SECONDS))
    emit(8)
    with running_relay(threads=4) as running:
        running.wait_for(done=8)


def test_handlers_of_one_event_run_one_after_the_other_in_registration_order(calls: Calls) -> None:
    for name in ("zulu", "alpha", "mike"):
        on_event(TYPE, name=name)(lambda event: calls.add((event.id, event.handler)))
    ids = emit(10)
    with running_relay() as running:
        running.wait_for(done=10)
    for id_ in ids:
        assert [name for each, name in calls.made if each == id_] == ["zulu", "alpha", "mike"]


def test_two_relays_share_the_work_and_deliver_each_event_once(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    with running_relay(threads=2) as first, running_relay(threads=2) as second:
        ids = [id_ for _ in range(10) for id_ in emit(10)]
        calls.wait_for(100)
        first.wait_until_idle()
        second.wait_until_idle()
        assert first.relay.counts["done"] + second.relay.counts["done"] == 100
    assert calls.counts() == Counter(ids)
    assert statuses() == {"done": 100}


@pytest.mark.sqlite
def test_four_threads_emit_on_one_sqlite_file_while_a_relay_works(calls: Calls) -> None:
    """Scenario 30."""
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))

    def emitter() -> list[UUID]:
        ids = []
        for number in range(50):
            with transaction.atomic():
                Effect.objects.create(key=f"{threading.get_ident()}-{number}", handler="x")
                ids.append(emit_event(TYPE, {"number": number}))
        return ids

    with running_relay() as running:
        emitted = together(emitter, emitter, emitter, emitter)
        running.wait_for(done=200)
    assert calls.counts() == Counter(id_ for ids in emitted for id_ in ids)
    assert statuses() == {"done": 200}


# --- failures --------------------------------------------------------------------------------------------------------


def test_only_what_failed_is_tried_again_and_never_beside_the_first_run(
    calls: Calls, outbox: Callable[..., None]
) -> None:
    """
    Scenario 16: ``sms`` takes long, ``crm`` fails twice, ``never`` fails for ever.

    Retries are due at once, and every start and end is noted, so that an overlap shows.
    """
    outbox(events={"MAX_ATTEMPTS": 4})
    running_now = Counter[str]()

    def handler(name: str, fails: Callable[[int], bool], seconds: float = 0.0) -> None:
        @on_event(TYPE, name=name)
        def handle(event: Event) -> None:
            running_now[name] += 1
            assert running_now[name] == 1, f"two runs of {name} at once"
            calls.add(name)
            if seconds:
                threading.Event().wait(seconds)  # the provider's answer
            running_now[name] -= 1
            if fails(event.attempt):
                raise ValueError(name)

    handler("sms", lambda attempt: False, seconds=1.2)
    handler("audit-log", lambda attempt: False)
    handler("crm", lambda attempt: attempt < 3)
    handler("never", lambda attempt: True)
    (id_,) = emit()
    with running_relay() as running:
        running.wait_for(dead=1)
    assert calls.counts() == {"sms": 1, "audit-log": 1, "crm": 3, "never": 4}
    row = stored(id_)
    assert {name for name, when in row.deliveries.items() if when} == {"sms", "audit-log", "crm"}
    assert row.last_error == "never: ValueError: never"


def test_an_error_that_no_database_can_store_costs_one_attempt_like_any_other(calls: Calls) -> None:
    """Scenario 23, through the relay."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.attempt)
        if event.attempt < 3:
            raise ValueError("a\x00b \ud800" + "x" * 2_000_000)

    (id_,) = emit()
    with running_relay() as running:
        running.wait_for(waiting=2, done=1)
    assert calls.made == [1, 2, 3]
    assert stored(id_).attempts == 3


def test_a_row_that_is_claimed_again_before_it_has_landed_is_not_left_lying(calls: Calls) -> None:
    """Its outcome is written and it is due at once; a claim at that very moment finds it still in flight."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.attempt)
        if event.attempt == 1:
            raise ValueError("once")

    with running_relay() as running:
        lane = running.relay.lanes[0]
        claim, note_speed = lane.claimer.claim, lane.note_speed
        written, claimed = threading.Event(), threading.Event()

        def noted(*args: Any, **options: Any) -> list[engine.Lease]:
            leases = claim(*args, **options)
            if written.is_set() and leases:
                claimed.set()
            return leases

        def held_up(ended: Any) -> None:
            if not written.is_set():
                written.set()
                lane.due_at = 0.0
                running.relay._wake("events")
                assert claimed.wait(DEADLINE_SECONDS)
                with running.relay.flights.claiming:
                    pass  # what was claimed is taken by now
            note_speed(ended)

        lane.claimer.claim, lane.note_speed = noted, held_up  # type: ignore[method-assign]
        (id_,) = emit()
        running.wait_for(waiting=1, done=1)
    assert calls.made == [1, 2]
    assert stored(id_).attempts == 2


def test_a_lost_row_that_comes_back_while_its_old_run_lasts_is_not_left_lying(held: Held, calls: Calls) -> None:
    """Another relay took it and gave it back; what still runs under the lost lease counts for nothing."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.attempt)
        held.pass_through()

    (id_,) = emit()
    row = OutboxEvent.objects.filter(id=id_)
    with running_relay() as running:
        relay, lane = running.relay, running.relay.lanes[0]
        held.wait_for_entry()
        row.update(fence=2, leased_by="other")
        relay._keeper.renew(everything=True)
        row.update(leased_by="", lease_until=None)
        lane.due_at = 0.0
        relay._wake("events")
        eventually(lambda: row.get().leased_by == relay.holder)
        with relay.flights.claiming:
            pass  # what was claimed is taken by now
        held.go.set()
        running.wait_for(lost=1, done=1)
    assert calls.made == [1, 2]
    assert stored(id_).attempts == 2


def test_a_queue_that_nothing_comes_to_costs_no_threads(calls: Calls) -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add("one")

    emit()
    with running_relay(threads=3) as running:
        running.wait_for(done=1)
        names = Counter(thread.name.rpartition("-")[0] for thread in threading.enumerate())
    assert names["outbox-events"] == 3
    assert not names.keys() & {"outbox-email", "outbox-webhooks", "outbox-tasks"}


def test_a_relay_deletes_old_rows_by_the_way(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And again soon while there are more than it deletes at once, though nothing else wakes it."""
    monkeypatch.setattr("django_outbox.relay.loop.PURGE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("django_outbox.relay.loop.PURGE_LIMIT", 2)
    on_event(TYPE, name="one")(lambda event: calls.add("one"))
    old, young = emit(5), emit()
    OutboxEvent.objects.filter(id__in=old).update(status="done", finished_at=LONG_AGO)
    with caplog.at_level(logging.INFO, "django_outbox.relay"), running_relay() as running:
        running.wait_for(done=1)
        eventually(lambda: not OutboxEvent.objects.filter(id__in=old).exists())
    assert stored(young[0]).status == "done"
    assert caplog.text.count("old rows removed queue=events rows=2") == 2


def test_a_rejected_delivery_is_not_tried_again(calls: Calls) -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add("one")
        raise Reject("no such user")

    on_event(TYPE, name="two")(lambda event: calls.add("two"))
    (id_,) = emit()
    with running_relay() as running:
        running.wait_for(failed=1)
    assert calls.made == ["one", "two"]
    assert stored(id_).failures["one"]["rejected"] is True


class NotAnException(BaseException):
    """Such as gevent's time-out."""


@pytest.mark.parametrize("error", [SystemExit(1), NotAnException(), GeneratorExit()], ids=repr)
def test_a_handler_cannot_take_its_thread_with_it(error: BaseException, calls: Calls) -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        if event.attempt == 1:
            raise error
        calls.add(event.id)

    ids = emit(4)
    with running_relay(threads=1) as running:
        running.wait_for(waiting=4, done=4)
    assert calls.counts() == Counter(ids)


@pytest.mark.parametrize("lost_leases", [0, 1])
def test_a_row_that_cannot_be_read_costs_itself_an_attempt_and_nobody_else_anything(
    calls: Calls, outbox: Callable[..., None], lost_leases: int, caplog: pytest.LogCaptureFixture
) -> None:
    outbox(events={"MAX_ATTEMPTS": 1, "REPLAY_EVERY_SECONDS": None})
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    (bad,) = emit()
    OutboxEvent.objects.update(failures={"one": "text, where an object belongs"}, lost_leases=lost_leases)
    good = emit(3)
    with caplog.at_level(logging.CRITICAL), running_relay(threads=1) as running:
        running.wait_for(dead=1, done=3)
    assert calls.counts() == Counter(good)
    assert stored(bad).status == "dead"


# --- time limits -----------------------------------------------------------------------------------------------------


def test_a_stuck_handler_stops_neither_its_event_nor_the_relay_and_its_late_return_counts(
    calls: Calls, held: Held
) -> None:
    @on_event(TYPE, name="stuck", timeout=0.2)
    def stuck(event: Event) -> None:
        if event.payload == "stick":
            held.pass_through()
        calls.add("stuck")

    on_event(TYPE, name="other")(lambda event: calls.add("other"))
    (id_,) = emit(payload="stick")
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        # The event's own second handler, although the one thread is stuck.
        calls.wait_for(1)
        assert calls.made == ["other"]
        emit(3)
        running.wait_for(done=3)
        # It is owned and nobody retries it while the stuck run works.
        assert running.relay.held() == 1
        row = stored(id_)
        assert (row.status, row.attempts) == ("pending", 1)
        held.go.set()
        running.wait_for(done=4)
    assert held.inside == 1
    row = stored(id_)
    assert (row.status, row.attempts, row.failures) == ("done", 1, {})
    assert all(row.deliveries.values())


def test_a_stuck_handler_keeps_its_row_under_renewed_leases(held: Held, outbox: Callable[..., None]) -> None:
    """The lease is a second long, and a second relay stands by to take the row."""
    outbox(POLL_SECONDS=0.1, events={"LEASE_SECONDS": 1})
    on_event(TYPE, name="stuck", timeout=0.2)(lambda event: held.pass_through())
    (id_,) = emit()
    with running_relay(threads=1) as first:
        held.wait_for_entry()
        with running_relay(threads=1) as second:
            fence, lease_until = stored(id_).fence, stored(id_).lease_until
            assert lease_until is not None
            eventually(lambda: stored(id_).lease_until > lease_until and _lease_age(id_) > 1.5)
            assert stored(id_).fence == fence
            held.go.set()
            first.wait_for(done=1)
            assert second.relay.counts.total() == 0
    assert held.inside == 1


def _lease_age(id_: UUID) -> float:
    return float((datetime.now(UTC) - stored(id_).created_at).total_seconds())


def test_a_handler_stuck_for_too_long_is_a_failed_attempt(
    held: Held, outbox: Callable[..., None], calls: Calls
) -> None:
    outbox(STUCK_SECONDS=0.3)

    @on_event(TYPE, name="stuck", timeout=0.2)
    def stuck(event: Event) -> None:
        if event.attempt == 1:
            held.pass_through()
        calls.add(event.attempt)

    (id_,) = emit()
    with running_relay(threads=1) as running:
        running.wait_for(waiting=1)
        row = stored(id_)
        assert "longer than its 0.2 s" in row.failures["stuck"]["error"] or row.status == "done"
        running.wait_for(done=1)
        assert calls.made == [2]
        # What it reports after that is too late for everything.
        held.go.set()
        calls.wait_for(2)
    assert stored(id_).status == "done"
    assert stored(id_).attempts == 2


def test_too_many_stuck_threads_end_the_process_to_be_started_anew(held: Held, outbox: Callable[..., None]) -> None:
    outbox(SHUTDOWN_GRACE_SECONDS=0.2)
    on_event(TYPE, name="stuck", timeout=0.1)(lambda event: held.pass_through())
    emit(6)
    running = RunningRelay(threads=2)
    assert running.end() == 75
    assert running.relay.held() == 0
    rows = list(OutboxEvent.objects.all())
    assert all(row.lease_until is None for row in rows)
    assert sum(row.attempts for row in rows) == held.inside


def test_an_async_handler_is_cancelled_at_its_limit(calls: Calls) -> None:
    @on_event(TYPE, name="slow", timeout=0.2)
    async def slow(event: Event) -> None:
        if event.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                calls.add("cancelled")
        calls.add("made")

    (id_,) = emit()
    with running_relay(threads=1) as running:
        running.wait_for(waiting=1, done=1)
        assert not running.relay.lanes[0].stuck
    assert calls.made == ["cancelled", "made"]
    assert stored(id_).attempts == 2


def test_an_async_handler_that_does_not_yield_is_stuck_like_a_plain_one(held: Held) -> None:
    @on_event(TYPE, name="slow", timeout=0.2)
    async def slow(event: Event) -> None:
        held.pass_through()  # blocks its event loop

    on_event("thing.else", name="other")(lambda event: None)
    emit()
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        with transaction.atomic():
            emit_event("thing.else")
        running.wait_for(done=1)
        held.go.set()
        running.wait_until_idle()


def test_a_handlers_own_time_out_error_is_its_own(outbox: Callable[..., None]) -> None:
    outbox(events={"MAX_ATTEMPTS": 1, "REPLAY_EVERY_SECONDS": None})

    @on_event(TYPE, name="slow")
    async def slow(event: Event) -> None:
        raise TimeoutError("the server did not answer")

    (id_,) = emit()
    with running_relay() as running:
        running.wait_for(dead=1)
    assert stored(id_).last_error == "slow: TimeoutError: the server did not answer"


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_handler_that_outruns_its_lease_is_renewed_and_its_failures_are_counted(
    calls: Calls, outbox: Callable[..., None]
) -> None:
    """Scenario 61: the handler works longer than a lease and raises; a second relay stands by."""
    outbox(POLL_SECONDS=0.1, events={"LEASE_SECONDS": 1, "MAX_ATTEMPTS": 3, "REPLAY_EVERY_SECONDS": None})

    @on_event(TYPE, name="slow")
    def slow(event: Event) -> None:
        calls.add(event.attempt)
        threading.Event().wait(1.3)
        raise ValueError("after all that")

    (id_,) = emit()
    with running_relay(threads=1) as first, running_relay(threads=1) as second:
        eventually(lambda: stored(id_).status == "dead")
        first.wait_until_idle()
        second.wait_until_idle()
        assert first.relay.counts["lost"] + second.relay.counts["lost"] == 0
    assert calls.made == [1, 2, 3]
    assert stored(id_).attempts == 3


def _steal(id_: UUID) -> None:
    """Take a row as another relay would whose claim came after this one's lease."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET fence = fence + 1, attempts = attempts + 1, leased_by = 'other',"
            " lease_until = '2100-01-01 00:00:00' WHERE id = %s",
            [id_ if connection.vendor == "postgresql" else id_.hex],
        )


def test_after_a_lost_lease_no_further_handler_starts_and_nothing_is_written(
    held: Held, calls: Calls, outbox: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The row is stolen while its first handler runs, and the test waits until a renewal has found out."""
    outbox(events={"LEASE_SECONDS": 1})

    @on_event(TYPE, name="first")
    def first(event: Event) -> None:
        held.pass_through()

    on_event(TYPE, name="second")(lambda event: calls.add("second"))
    (id_,) = emit()
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        (flight,) = running.relay.flights.all()
        _steal(id_)
        eventually(lambda: flight.run is not None and flight.run.lost)
        held.go.set()
        running.wait_for(lost=1)
    row = stored(id_)
    assert calls.made == []
    assert (row.leased_by, row.fence, row.attempts, row.status) == ("other", 2, 2, "pending")
    assert row.deliveries == {"first": None, "second": None}
    assert "lease lost" in caplog.text


def test_a_settle_that_comes_too_late_writes_nothing(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """The row is stolen while its only handler runs, long before the next renewal."""
    on_event(TYPE, name="one")(lambda event: held.pass_through())
    (id_,) = emit()
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        _steal(id_)
        held.go.set()
        running.wait_for(lost=1)
    assert (stored(id_).leased_by, stored(id_).status) == ("other", "pending")


def test_an_atomic_handler_whose_lease_is_lost_takes_its_effects_back(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """As above; the handler has written before the row is stolen. On SQLite it writes after, as the lock is one."""

    @on_event(TYPE, name="one", atomic=True)
    def one(event: Event) -> None:
        if connection.vendor == "postgresql":
            Effect.objects.create(key="mine", handler=event.handler)
        held.pass_through()
        if connection.vendor == "sqlite":
            Effect.objects.create(key="mine", handler=event.handler)

    (id_,) = emit()
    if connection.vendor == "sqlite":
        pytest.skip("an IMMEDIATE transaction of the handler keeps everybody else from writing")
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        _steal(id_)
        held.go.set()
        running.wait_for(lost=1)
    assert not Effect.objects.exists()
    assert stored(id_).deliveries == {"one": None}


def test_unstarted_rows_are_released_before_their_lease_is_over(held: Held, outbox: Callable[..., None]) -> None:
    """One thread, held; the rows behind it go back to whoever has time for them."""
    outbox(POLL_SECONDS=60, events={"LEASE_SECONDS": 1})
    on_event(TYPE, name="one")(lambda event: held.pass_through() if event.payload == "first" else None)
    (first,) = emit(payload="first")
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        rest = emit(4)
        running.wait_for(released=4)
        with running_relay(threads=1) as second:
            second.wait_for(done=4)
        held.go.set()
        running.wait_for(done=1)
    assert [stored(id_).attempts for id_ in (first, *rest)] == [1] * 5


def test_the_settle_alone_is_tried_again_when_it_fails(
    held: Held, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """
    Scenario 62: a session of the test's own holds a lock when the settle comes, which waits 0.2 s for it at most.

    The lock is let go once the relay has said that its settle failed.
    """
    options = connections.settings["default"].setdefault("OPTIONS", {})
    if connection.vendor == "sqlite":
        monkeypatch.setitem(options, "timeout", 0.2)
    else:
        monkeypatch.setitem(options, "options", "-c lock_timeout=200ms")

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.id)
        held.pass_through()

    (id_,) = emit()
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        with _writes_locked():
            held.go.set()
            eventually(lambda: "database trouble" in caplog.text)
        running.wait_for(done=1)
    assert calls.made == [id_]
    assert (stored(id_).status, stored(id_).attempts) == ("done", 1)


@pytest.mark.postgres
def test_a_row_that_somebody_else_has_locked_is_settled_later_and_its_neighbours_at_once(
    calls: Calls, held: Held, raw_connect: RawConnect
) -> None:
    """A session of the test's own locks the row while its handler runs, and lets go once the others are done."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.id)
        if event.id == first:
            held.pass_through()

    (first,) = emit()
    session = raw_connect()
    with running_relay(threads=2) as running:
        held.wait_for_entry()
        with session.transaction():
            session.execute(f"SELECT 1 FROM {TABLE} WHERE id = %s FOR UPDATE", [first])
            held.go.set()
            emit(3)
            running.wait_for(done=3)
            assert stored(first).status == "pending"
        running.wait_for(done=4)
    assert set(calls.counts().values()) == {1}
    assert stored(first).attempts == 1


@contextmanager
def _writes_locked() -> Iterator[None]:
    values = connection.settings_dict
    if connection.vendor == "sqlite":
        writer = sqlite3.connect(values["NAME"], isolation_level=None)
        try:
            writer.execute("BEGIN IMMEDIATE")
            yield
            writer.execute("ROLLBACK")
        finally:
            writer.close()
        return
    dsn = make_conninfo(
        dbname=values["NAME"],
        host=values["HOST"] or None,
        port=values["PORT"] or None,
        user=values["USER"] or None,
        password=values["PASSWORD"] or None,
    )
    with psycopg.connect(dsn) as session:
        session.execute(f"LOCK TABLE {TABLE} IN SHARE MODE")
        yield


def test_a_suspect_whose_record_fails_is_not_run_again(
    held: Held, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 62 again, for a row whose last holder died: its deliveries are written one by one."""
    options = connections.settings["default"].setdefault("OPTIONS", {})
    if connection.vendor == "sqlite":
        monkeypatch.setitem(options, "timeout", 0.2)
    else:
        monkeypatch.setitem(options, "options", "-c lock_timeout=200ms")

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add("one")
        held.pass_through()

    on_event(TYPE, name="two")(lambda event: calls.add("two"))
    (id_,) = emit()
    OutboxEvent.objects.update(leased_by="gone", lease_until=LONG_AGO)
    with running_relay(threads=1) as running:
        held.wait_for_entry()
        with _writes_locked():
            held.go.set()
            eventually(lambda: "database trouble step=" in caplog.text)
        running.wait_for(done=1)
    assert calls.counts()["one"] == 1
    assert (stored(id_).status, stored(id_).failures, stored(id_).lost_leases) == ("done", {}, 0)


# --- stop ------------------------------------------------------------------------------------------------------------


def test_a_stop_lets_handlers_finish_and_gives_back_what_was_not_started(held: Held) -> None:
    on_event(TYPE, name="one")(lambda event: held.pass_through())
    ids = emit(5)
    running = RunningRelay(threads=1)
    held.wait_for_entry()
    running.relay.stop()
    running.wait_for(released=4)
    assert [stored(id_).attempts for id_ in ids] == [1, 0, 0, 0, 0]
    assert [stored(id_).lease_until is None for id_ in ids] == [False, True, True, True, True]
    held.go.set()
    assert running.end() == 0
    assert running.relay.held() == 0
    assert statuses() == {"done": 1, "pending": 4}
    with running_relay() as successor:
        successor.wait_for(done=4)
    assert [stored(id_).attempts for id_ in ids] == [1] * 5


def test_what_a_stopping_relay_gives_back_wakes_the_others(held: Held, calls: Calls) -> None:
    """The other relay is asleep for as long as the rows were leased."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        if event.payload == "first":
            held.pass_through()
        calls.add(event.payload)

    emit(payload="first")
    first = RunningRelay(threads=1)
    held.wait_for_entry()
    emit(4, payload="rest")
    eventually(lambda: first.relay.held() == 5)
    with running_relay(threads=1) as second:
        eventually(lambda: second.relay.watcher)
        first.relay.stop()
        second.wait_for(done=4, seconds=3)
        held.go.set()
        assert first.end() == 0
    assert calls.counts() == {"first": 1, "rest": 4}


def test_a_handler_that_outlasts_the_grace_time_is_a_failed_attempt(
    held: Held, calls: Calls, outbox: Callable[..., None]
) -> None:
    outbox(SHUTDOWN_GRACE_SECONDS=0.2)
    on_event(TYPE, name="first")(lambda event: calls.add("first"))
    on_event(TYPE, name="second")(lambda event: held.pass_through())
    on_event(TYPE, name="third")(lambda event: calls.add("third"))
    (id_,) = emit()
    running = RunningRelay(threads=1)
    held.wait_for_entry()
    assert running.stop() == 0
    assert running.relay.held() == 0
    row = stored(id_)
    assert (row.status, row.attempts, row.lease_until) == ("waiting", 1, None)
    assert row.deliveries["first"] is not None
    assert row.deliveries["second"] is row.deliveries["third"] is None
    assert row.failures["second"]["error"].startswith("interrupted")
    assert calls.made == ["first"]


def test_an_idle_relay_stops_at_once() -> None:
    running = RunningRelay()
    eventually(lambda: running.relay.watcher)
    began = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - began < 2


def test_a_drain_ends_when_nothing_is_due_now(calls: Calls) -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.payload)
        if event.payload == "chain":
            emit(2, payload="link")

    emit(3, payload="chain")
    emit(delay=3_600)
    running = RunningRelay(mode="drain")
    assert running.end() == 0
    assert calls.counts() == {"chain": 3, "link": 6}
    assert statuses() == {"done": 9, "waiting": 1}


def test_a_drain_of_slow_rows_with_one_thread_ends_with_the_dead_ones_replayed_too(calls: Calls) -> None:
    """Rows that take long are claimed one by one, and the dead get only some of such claims."""

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.id)

    emit(6)
    OutboxEvent.objects.update(status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    relay = Relay(threads=1, mode="drain")
    relay.lanes[0].row_seconds = 5.0
    assert Worker(relay.run).result() == 0
    assert statuses() == {"done": 6}


def test_once_is_one_claim(calls: Calls) -> None:
    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.payload)
        emit(payload="link")

    emit(2, payload="first")
    running = RunningRelay(mode="once")
    assert running.end() == 0
    assert calls.counts() == {"first": 2}
    assert statuses() == {"done": 2, "pending": 2}


def test_two_drains_at_once_deliver_each_event_once(calls: Calls) -> None:
    on_event(TYPE, name="one")(lambda event: calls.add(event.id))
    ids = emit(60)
    first, second = RunningRelay(mode="drain"), RunningRelay(mode="drain")
    assert (first.end(), second.end()) == (0, 0)
    assert calls.counts() == Counter(ids)
    assert statuses() == {"done": 60}


def test_a_drain_with_nothing_to_do_ends() -> None:
    assert RunningRelay(mode="drain").end() == 0
    assert RunningRelay(mode="once").end() == 0


def test_parked_rows_charge_nothing_and_are_delivered_by_a_relay_that_has_the_code(
    calls: Calls, outbox: Callable[..., None]
) -> None:
    with isolated_handlers():
        on_event(TYPE, name="known")(lambda event: calls.add("known"))
        on_event(TYPE, name="newer")(lambda event: calls.add("newer"))
        (id_,) = emit()
    on_event(TYPE, name="known")(lambda event: calls.add("known"))
    with running_relay() as running:
        running.wait_for(waiting=1)
    row = stored(id_)
    assert (row.status, row.attempts) == ("waiting", 0)
    assert "parked_at" in row.failures["newer"]
    assert calls.made == ["known"]
    on_event(TYPE, name="newer")(lambda event: calls.add("newer"))
    OutboxEvent.objects.update(due_at=LONG_AGO)
    with running_relay() as running:
        running.wait_for(done=1)
    assert calls.made == ["known", "newer"]
    assert stored(id_).failures == {} or "parked_at" not in stored(id_).failures["newer"]


def test_a_claim_of_the_relays_own_hands_its_fence_to_the_run_in_progress(
    held: Held, calls: Calls, outbox: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The relay's own lease runs out behind its back, and its next claim brings the row that it still works on.

    The handler is let go between that claim and the hand-over of the new fence, and the
    hand-over waits until the outcome is on its way with the old one.
    """
    outbox(POLL_SECONDS=0.1)

    @on_event(TYPE, name="one")
    def one(event: Event) -> None:
        calls.add(event.id)
        held.pass_through()

    (id_,) = emit()
    with running_relay(threads=2) as running:
        held.wait_for_entry()
        relay = running.relay
        (flight,) = relay.flights.all()
        take = relay._take

        def late_take(lane: Any, leases: Any) -> int:
            if leases:
                held.go.set()
                eventually(lambda: flight.closed and relay.flights._outcomes.empty())
                threading.Event().wait(0.2)  # for the settle to have come and gone
            return take(lane, leases)

        monkeypatch.setattr(relay, "_take", late_take)
        OutboxEvent.objects.update(lease_until=LONG_AGO)
        running.wait_for(done=1)
        running.wait_until_idle()
        assert relay.counts["lost"] == 0
    assert calls.made == [id_]
    row = stored(id_)
    assert (row.status, row.fence, row.failures) == ("done", 2, {})
    assert engine.backlog(EVENTS, using="default").leased == 0
