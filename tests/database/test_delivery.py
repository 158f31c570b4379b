"""Delivering an event: who is owed it, what one handler's end means for the others, and how the row ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from django_outbox import Event, NotInTransaction, Reject, RetryLater, emit_event, on_event
from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.events import EVENTS, EventRun, announcement, registry
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain, travel
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db

USING = "default"
DAY = 86_400


@pytest.fixture(autouse=True)
def _empty_registry() -> None:
    registry.replace(())


class Calls(list[Event]):
    """A handler that remembers what it received and ends as it is told: ``None`` succeeds, an error is raised."""

    def __init__(self, *ends: BaseException | None) -> None:
        super().__init__()
        self.ends = list(ends)

    def __call__(self, event: Event) -> None:
        self.append(event)
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0] if self.ends else None
        if end is not None:
            raise end


def listen(name: str, *ends: BaseException | None, type_: str = "thing.done", **options: Any) -> Calls:
    calls = Calls(*ends)
    on_event(type_, name=name, **options)(calls)
    return calls


def emit(type_: str = "thing.done", payload: Any = None, **arguments: Any) -> UUID:
    with transaction.atomic():
        return emit_event(type_, payload, **arguments)


def stored(id_: UUID) -> OutboxEvent:
    return OutboxEvent.objects.get(id=id_)


def owed(id_: UUID) -> list[str]:
    return sorted(name for name, when in stored(id_).deliveries.items() if when is None)


def announcements() -> list[OutboxEvent]:
    return list(OutboxEvent.objects.filter(type="outbox.event.dead").order_by("id"))


def claim_one() -> engine.Lease:
    (lease,) = engine.Claimer(EVENTS, holder=engine.holder_name(), using=USING).claim(1, lease_seconds=60)
    return lease


def settle(run: EventRun) -> dict[engine.Lease, str]:
    return engine.settle([run.settled()], schedule=get_settings().events.schedule, using=USING, announce=announcement)


@contextmanager
def without_code() -> Iterator[None]:
    """Be a relay with none of the handlers."""
    before = registry.handlers()
    registry.replace(())
    yield
    registry.replace(before)


def die_holding() -> None:
    """Claim the one due row and never settle it, as a relay does whose process dies; its lease is over then."""
    claim_one()
    OutboxEvent.objects.update(lease_until=datetime(2020, 1, 1, tzinfo=UTC))


# --- who is owed an event --------------------------------------------------------------------------------------------


def test_the_handlers_at_emit_are_the_ones_owed_and_a_later_one_never_wakes() -> None:
    first = listen("first", RuntimeError("no"), None)
    id_ = emit()
    late = listen("late")
    assert drain() == {"waiting": 1}
    with travel(minutes=1):
        assert drain() == {"done": 1}
    assert (len(first), len(late)) == (2, 0)
    assert sorted(stored(id_).deliveries) == ["first"]
    emit()
    assert drain() == {"done": 1}
    assert len(late) == 1


def test_an_event_nobody_handled_at_emit_stays_done() -> None:
    id_ = emit()
    late = listen("late")
    assert drain() == {}
    assert (stored(id_).status, late) == ("done", [])


def test_handlers_run_in_the_order_of_registration_whatever_the_order_in_the_row() -> None:
    order: list[str] = []
    for name in ("zebra", "apple", "mango"):
        on_event("thing.done", name=name)(lambda event: order.append(event.handler))
    emit()
    assert drain() == {"done": 1}
    assert order == ["zebra", "apple", "mango"]


def test_each_handler_gets_a_payload_of_its_own() -> None:
    seen: list[Any] = []

    def spoil(event: Event) -> None:
        seen.append((list(event.payload["items"]), dict(event.headers)))
        event.payload["items"].append(event.handler)
        event.headers.clear()

    on_event("thing.done", name="first")(spoil)
    on_event("thing.done", name="second")(spoil)
    emit(payload={"items": []}, headers={"a": 1})
    assert drain() == {"done": 1}
    assert seen == [([], {"a": 1})] * 2


def test_an_event_cannot_be_changed() -> None:
    calls = listen("one")
    emit()
    drain()
    with pytest.raises(AttributeError):
        calls[0].type = "other"  # type: ignore[misc]


# --- one that fails --------------------------------------------------------------------------------------------------


def test_only_what_failed_is_run_again() -> None:
    """Scenario 16: the text message and the audit log go once, the CRM is called until it answers."""
    sms = listen("sms")
    audit = listen("audit-log")
    crm = listen("crm", OSError("503"), OSError("503"), None)
    never = listen("never", RuntimeError("for ever"))
    id_ = emit()
    assert drain() == {"waiting": 1}
    assert owed(id_) == ["crm", "never"]
    for hours in range(1, 4):
        with travel(hours=hours):
            drain()
    assert owed(id_) == ["never"]
    assert (len(sms), len(audit), len(crm)) == (1, 1, 3)
    assert len(never) == 4
    assert [event.attempt for event in crm] == [1, 2, 3]
    assert len({event.idempotency_key for event in crm}) == 1


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(1), asyncio.CancelledError(), RecursionError()])
def test_one_that_raises_never_stops_the_others(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    before, bad, after = listen("before"), listen("bad", error), listen("after")
    id_ = emit(payload={"card": "4111"})
    with caplog.at_level(logging.ERROR, logger="django_outbox"):
        assert drain() == {"waiting": 1}
    assert (len(before), len(bad), len(after)) == (1, 1, 1)
    assert owed(id_) == ["bad"]
    row = stored(id_)
    assert row.failures["bad"]["error"].startswith(type(error).__name__)
    assert row.last_error.startswith(f"bad: {type(error).__name__}")
    assert [record.getMessage() for record in caplog.records] == [f"handler failed queue=events handler=bad id={id_}"]


def test_an_interrupt_from_the_keyboard_goes_through() -> None:
    listen("one", KeyboardInterrupt())
    emit()
    with pytest.raises(KeyboardInterrupt):
        drain()


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ud800", "x" * 2_000_000, "password=hunter2", "'; DROP TABLE x; -- %s", ""]
)
def test_any_error_text_can_be_stored(text: str) -> None:
    """Scenario 23, through a handler."""
    listen("one", ValueError(text))
    id_ = emit()
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert (row.attempts, row.status) == (1, "waiting")
    assert len(row.failures["one"]["error"]) <= 2_000
    assert "hunter2" not in row.last_error


def test_an_error_that_cannot_be_printed_is_a_failure_like_any_other() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    listen("one", Broken())
    other = listen("other")
    id_ = emit()
    logging.disable()
    try:
        assert drain() == {"waiting": 1}
    finally:
        logging.disable(logging.NOTSET)
    assert len(other) == 1
    assert "Broken" in stored(id_).last_error


def test_what_a_failing_handler_wrote_in_its_savepoint_is_gone() -> None:
    def write_and_fail(event: Event) -> None:
        Effect.objects.create(key="twice", handler="one")
        Effect.objects.create(key="twice", handler="one")

    on_event("thing.done", name="one")(write_and_fail)
    other = listen("other")
    id_ = emit()
    assert drain() == {"waiting": 1}
    assert "IntegrityError" in stored(id_).failures["one"]["error"]
    assert not Effect.objects.exists()
    assert len(other) == 1


def test_a_handler_that_swallows_its_database_error_cannot_break_its_neighbours() -> None:
    """Scenario 15, as far as one connection can show it."""

    def swallow(event: Event) -> None:
        with transaction.atomic():
            try:
                Effect.objects.create(key="a", handler="one")
                Effect.objects.create(key="a", handler="one")
            except IntegrityError:
                pass
            Effect.objects.count()

    on_event("thing.done", name="one")(swallow)
    other = listen("other")
    id_ = emit()
    drain()
    assert len(other) == 1
    assert stored(id_).deliveries["other"] is not None


def test_retry_later_is_a_failed_attempt_and_its_delay_a_floor() -> None:
    calls = listen("one", RetryLater("busy", delay=timedelta(hours=2)), None)
    id_ = emit()
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert (row.attempts, row.last_error) == (1, "one: RetryLater: busy")
    assert row.due_at is not None
    assert 7_200 <= (row.due_at - row.created_at).total_seconds() < 7_200 * 1.26
    with travel(hours=1, minutes=59):
        assert drain() == {}
    with travel(hours=3):
        assert drain() == {"done": 1}
    assert [event.attempt for event in calls] == [1, 2]


def test_the_longest_delay_that_a_handler_asks_for_counts_for_the_row() -> None:
    listen("one", RetryLater("busy", delay=10))
    listen("two", RetryLater("busy", delay=10_000))
    listen("three", RuntimeError("x"))
    id_ = emit()
    drain()
    row = stored(id_)
    assert row.due_at is not None
    assert (row.due_at - row.created_at).total_seconds() >= 10_000


@pytest.mark.parametrize("delay", [-1, 0, float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_delay_that_is_no_span_of_time_does_not_break_the_settle(delay: float) -> None:
    listen("one", RetryLater("busy", delay=delay))
    id_ = emit()
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert row.due_at is not None
    assert row.due_at > row.created_at + timedelta(seconds=4)


def test_a_rejected_delivery_fails_the_event_and_is_not_tried_again() -> None:
    calls = listen("one", Reject("no such customer"))
    id_ = emit()
    assert drain() == {"failed": 1}
    row = stored(id_)
    assert (row.status, row.due_at, row.last_error) == ("failed", None, "one: Reject: no such customer")
    assert row.failures["one"]["rejected"] is True
    with travel(days=30):
        assert drain() == {}
    assert len(calls) == 1


def test_a_rejection_waits_for_what_can_still_succeed_and_is_not_run_beside_it() -> None:
    rejecting = listen("rejecting", Reject("no"))
    failing = listen("failing", RuntimeError("x"), None)
    fine = listen("fine")
    id_ = emit()
    assert drain() == {"waiting": 1}
    with travel(hours=1):
        assert drain() == {"failed": 1}
    assert (len(rejecting), len(failing), len(fine)) == (1, 2, 1)
    assert owed(id_) == ["rejecting"]
    assert stored(id_).last_error == "rejecting: Reject: no"


def test_a_retry_by_an_operator_clears_the_rejection() -> None:
    calls = listen("one", Reject("no"), None)
    id_ = emit()
    drain()
    assert engine.retry(EVENTS, using=USING, ids=[id_]).changed == 1
    assert drain() == {"done": 1}
    assert [event.attempt for event in calls] == [1, 1]


def test_a_discarded_delivery_is_not_owed_also_after_a_retry() -> None:
    bad = listen("bad", RuntimeError("x"))
    good = listen("good", RuntimeError("x"), None)
    id_ = emit()
    drain()
    assert engine.discard(EVENTS, using=USING, ids=[id_], handler="bad").changed == 1
    assert stored(id_).status == "waiting"
    assert engine.retry(EVENTS, using=USING, ids=[id_]).changed == 1
    assert drain() == {"done": 1}
    assert (len(bad), len(good)) == (1, 2)
    assert owed(id_) == ["bad"]


def test_discarding_the_last_owed_delivery_is_the_end_and_nothing_is_announced() -> None:
    listen("one", RuntimeError("x"))
    id_ = emit()
    drain()
    engine.discard(EVENTS, using=USING, ids=[id_], handler="one")
    assert stored(id_).status == "done"
    assert announcements() == []


# --- handlers of every kind ------------------------------------------------------------------------------------------


def test_an_async_handler_is_run_to_its_end() -> None:
    seen: list[Any] = []

    @on_event("thing.done", name="one")
    async def handler(event: Event) -> None:
        await asyncio.sleep(0)
        seen.append(event.payload)
        await sync_to_async(Effect.objects.create)(key=event.idempotency_key, handler=event.handler)

    id_ = emit(payload={"a": 1})
    assert drain() == {"done": 1}
    assert seen == [{"a": 1}]
    assert Effect.objects.get().key == f"one:{id_}"


def test_an_async_handler_past_its_time_is_cancelled_and_counts_as_failed() -> None:
    ended: list[str] = []

    @on_event("thing.done", name="one", timeout=0.05)
    async def handler(event: Event) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    other = listen("other")
    id_ = emit()
    assert drain() == {"waiting": 1}
    assert ended == ["cancelled"]
    assert stored(id_).failures["one"]["error"] == "TimeoutError: the handler took longer than its 0.05 s"
    assert len(other) == 1


def test_an_async_handlers_own_timeout_is_told_as_its_own() -> None:
    @on_event("thing.done", name="one")
    async def handler(event: Event) -> None:
        raise TimeoutError("the shop did not answer")

    id_ = emit()
    drain()
    assert stored(id_).failures["one"]["error"] == "TimeoutError: the shop did not answer"


def test_an_object_with_an_async_call_is_run_to_its_end() -> None:
    class Handler:
        def __init__(self) -> None:
            self.seen: list[Event] = []

        async def __call__(self, event: Event) -> None:
            await asyncio.sleep(0)
            self.seen.append(event)

    handler = Handler()
    on_event("thing.done", name="one")(handler)
    emit()
    assert drain() == {"done": 1}
    assert len(handler.seen) == 1


@pytest.mark.parametrize("atomic", [False, True])
def test_a_plain_function_that_returns_a_coroutine_has_not_delivered_anything(atomic: bool) -> None:
    async def work(event: Event) -> None:
        """Do nothing."""

    on_event("thing.done", name="one", atomic=atomic)(lambda event: work(event))  # noqa: PLW0108  the fault itself
    id_ = emit()
    assert drain() == {"waiting": 1}
    assert "returned a coroutine" in stored(id_).failures["one"]["error"]


def test_what_a_handler_returns_means_nothing() -> None:
    on_event("thing.done", name="one")(lambda event: RuntimeError("returned, not raised"))
    on_event("thing.done", name="two")(lambda event: False)
    emit()
    assert drain() == {"done": 1}


# --- atomic=True -----------------------------------------------------------------------------------------------------


def write_effect(event: Event) -> None:
    Effect.objects.create(key=event.idempotency_key, handler=event.handler)


@pytest.mark.django_db(transaction=True)
def test_an_atomic_handler_commits_with_the_record_of_its_delivery() -> None:
    on_event("thing.done", name="one", atomic=True)(write_effect)
    id_ = emit()
    run = EventRun(claim_one(), using=USING)
    handler = run.next_step()
    assert handler is not None
    assert run.invoke(handler, timeout=5).ok
    # The relay dies here: never settled.
    assert Effect.objects.count() == 1
    assert owed(id_) == []
    assert stored(id_).status == "pending"
    OutboxEvent.objects.update(lease_until=datetime(2020, 1, 1, tzinfo=UTC))
    assert drain() == {"done": 1}
    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_an_atomic_handler_whose_row_another_took_over_leaves_nothing() -> None:
    def slow(event: Event) -> None:
        write_effect(event)
        with transaction.atomic():
            emit_event("thing.followed")
        # Meanwhile another relay finds the lease over and claims the row.
        OutboxEvent.objects.filter(id=event.id).update(fence=7, leased_by="relay-2")

    on_event("thing.done", name="one", atomic=True)(slow)
    id_ = emit()
    run = EventRun(claim_one(), using=USING)
    handler = run.next_step()
    assert handler is not None
    result = run.invoke(handler, timeout=5)
    assert "lease was lost" in result.error
    assert run.lost
    assert not Effect.objects.exists()
    assert OutboxEvent.objects.count() == 1
    assert owed(id_) == ["one"]


@pytest.mark.django_db(transaction=True)
def test_the_lock_on_the_event_is_taken_only_after_an_atomic_handler() -> None:
    statements: list[str] = []

    def watch(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append(sql)
        return execute(sql, params, many, context)

    def handle(event: Event) -> None:
        with connection.execute_wrapper(watch):
            write_effect(event)

    on_event("thing.done", name="one", atomic=True)(handle)
    emit()
    assert drain() == {"done": 1}
    assert not any("django_outbox_event" in sql for sql in statements)


@pytest.mark.parametrize("end", [RuntimeError("x"), RetryLater("x"), Reject("x")])
def test_an_atomic_handler_that_raises_leaves_nothing(end: Exception) -> None:
    def handle(event: Event) -> None:
        write_effect(event)
        emit_event("thing.followed")
        raise end

    on_event("thing.done", name="one", atomic=True)(handle)
    id_ = emit()
    drain()
    assert not Effect.objects.exists()
    assert owed(id_) == ["one"]
    assert OutboxEvent.objects.filter(type="thing.followed").count() == 0


def test_an_atomic_handler_that_swallows_a_database_error_is_not_recorded_as_delivered() -> None:
    def handle(event: Event) -> None:
        try:
            with transaction.atomic(savepoint=False):
                Effect.objects.create(key="a", handler="one")
                Effect.objects.create(key="a", handler="one")
        except IntegrityError:
            pass

    on_event("thing.done", name="one", atomic=True)(handle)
    id_ = emit()
    assert drain() == {"waiting": 1}
    assert owed(id_) == ["one"]
    assert not Effect.objects.exists()


def test_follow_up_events_of_an_attempt_that_failed_never_existed() -> None:
    """Scenario 20."""
    followed = listen("follower", type_="follow.up")
    attempts: list[int] = []

    def handle(event: Event) -> None:
        attempts.append(event.attempt)
        with transaction.atomic():
            write_effect(event)
            emit_event("follow.up", {"n": 1})
            emit_event("follow.up", {"n": 2})
            if len(attempts) == 1:
                raise RuntimeError

    on_event("thing.done", name="one")(handle)
    emit()
    assert drain() == {"waiting": 1}
    assert OutboxEvent.objects.filter(type="follow.up").count() == 0
    with travel(minutes=1):
        assert drain() == {"done": 3}
    assert [event.payload["n"] for event in followed] == [1, 2]
    assert Effect.objects.count() == 1
    assert not OutboxEvent.objects.exclude(status="done", leased_by="").exists()


# --- what an emit inherits -------------------------------------------------------------------------------------------


def test_an_emit_in_a_handler_names_its_cause_and_inherits_its_context() -> None:
    def handle(event: Event) -> None:
        with transaction.atomic():
            emit_event("follow.plain")
            emit_event("follow.own", request_id="own", organization_id="other")

    on_event("thing.done", name="one")(handle)
    id_ = emit(request_id="r-1", organization_id="acme", aggregate_id="7", headers={"trace": "t"})
    drain()
    plain = OutboxEvent.objects.get(type="follow.plain")
    own = OutboxEvent.objects.get(type="follow.own")
    assert (plain.causation_id, plain.request_id, plain.organization_id) == (id_, "r-1", "acme")
    assert (plain.aggregate_id, plain.headers, plain.quiet) == ("", {}, False)
    assert (own.causation_id, own.request_id, own.organization_id) == (id_, "own", "other")


def test_each_event_of_a_chain_names_the_one_before_it() -> None:
    causes: list[UUID | None] = []

    def handle(event: Event) -> None:
        causes.append(event.causation_id)
        if len(causes) < 4:
            with transaction.atomic():
                emit_event("thing.done")

    on_event("thing.done", name="one")(handle)
    id_ = emit(request_id="r-1")
    assert drain() == {"done": 4}
    ids = list(OutboxEvent.objects.order_by("id").values_list("id", flat=True))
    assert ids[0] == id_
    assert causes == [None, *ids[:3]]
    assert set(OutboxEvent.objects.values_list("request_id", flat=True)) == {"r-1"}


def test_an_emit_through_an_async_handler_names_its_cause_too() -> None:
    @sync_to_async
    def work() -> None:
        with transaction.atomic():
            emit_event("follow.up")

    @on_event("thing.done", name="one")
    async def handler(event: Event) -> None:
        await work()

    id_ = emit(request_id="r-1")
    assert drain() == {"done": 1}
    row = OutboxEvent.objects.get(type="follow.up")
    assert (row.causation_id, row.request_id) == (id_, "r-1")


@pytest.mark.parametrize("end", [None, RuntimeError("x"), Reject("x")])
def test_after_a_handler_nothing_is_inherited_any_more(end: Exception | None) -> None:
    listen("one", end)
    emit(request_id="r-1")
    drain()
    row = stored(emit("other.thing"))
    assert (row.causation_id, row.request_id) == (None, "")


def test_work_that_a_handler_hands_to_another_context_is_not_its_own() -> None:
    outside = contextvars.copy_context()
    on_event("thing.done", name="one")(lambda event: outside.run(emit, "follow.up"))
    emit(request_id="r-1")
    drain()
    assert OutboxEvent.objects.get(type="follow.up").causation_id is None


def test_a_handler_without_a_transaction_of_its_own_cannot_emit() -> None:
    """The savepoint of ``drain()`` does not count, since a relay would open none."""
    seen: list[BaseException] = []

    def handle(event: Event) -> None:
        try:
            emit_event("follow.up")
        except NotInTransaction as error:
            seen.append(error)

    on_event("thing.done", name="one")(handle)
    emit()
    assert drain() == {"done": 1}
    assert len(seen) == 1


def test_a_handler_may_ask_for_a_durable_transaction() -> None:
    def handle(event: Event) -> None:
        with transaction.atomic(durable=True):
            emit_event("follow.up")

    on_event("thing.done", name="one")(handle)
    emit()
    assert drain() == {"done": 1}


# --- death, replay, announcements ------------------------------------------------------------------------------------

ONE_TRY = {"EVENTS": {"MAX_ATTEMPTS": 1}}


@override_settings(OUTBOX={"EVENTS": {"MAX_ATTEMPTS": 3, "RETRY_BASE_SECONDS": 1}})
def test_after_the_last_attempt_a_row_is_dead_and_told_of_once() -> None:
    calls = listen("one", RuntimeError("password=hunter2"))
    told = listen("operator", type_="outbox.event.dead")
    id_ = emit(aggregate_type="order", aggregate_id="7", organization_id="acme", request_id="r-1")
    assert drain() == {"waiting": 1}
    with travel(minutes=1):
        assert drain() == {"waiting": 1}
    with travel(minutes=2):
        assert drain() == {"dead": 1, "done": 1}
    row = stored(id_)
    assert (row.status, row.attempts, len(calls)) == ("dead", 3, 3)
    assert row.dead_at is not None
    (event,) = told
    assert (event.type, event.causation_id) == ("outbox.event.dead", id_)
    assert (event.organization_id, event.request_id) == ("acme", "r-1")
    assert event.payload["id"] == str(id_)
    assert (event.payload["queue"], event.payload["type"], event.payload["status"]) == ("events", "thing.done", "dead")
    assert (event.payload["aggregate_type"], event.payload["aggregate_id"]) == ("order", "7")
    assert list(event.payload["handlers"]) == ["one"]
    assert "hunter2" not in str(event.payload)
    # It stays dead on the slow cadence, and nobody is told again.
    died = row.dead_at
    for hours in (9, 18, 27):
        with travel(hours=hours):
            assert drain() == {"dead": 1}
    row = stored(id_)
    assert (row.status, row.dead_at, row.attempts) == ("dead", died, 6)
    assert len(told) == 1


@override_settings(OUTBOX=ONE_TRY)
def test_a_dead_row_is_replayed_and_may_recover() -> None:
    calls = listen("one", RuntimeError("x"), None)
    fine = listen("fine")
    id_ = emit()
    assert drain() == {"dead": 1}
    with travel(hours=5, minutes=59):
        assert drain() == {}
    with travel(hours=8):
        assert drain() == {"done": 1}
    assert (len(calls), len(fine)) == (2, 1)
    assert stored(id_).status == "done"


@override_settings(OUTBOX={"EVENTS": {"MAX_ATTEMPTS": 1, "REPLAY_FOR_SECONDS": 12 * 3_600}})
def test_a_dead_row_older_than_the_window_waits_for_a_person() -> None:
    calls = listen("one", RuntimeError("x"))
    id_ = emit()
    assert drain() == {"dead": 1}
    with travel(hours=8):
        assert drain() == {"dead": 1}
    assert stored(id_).due_at is None
    with travel(days=300):
        assert drain() == {}
    assert len(calls) == 2


@override_settings(OUTBOX={"EVENTS": {"MAX_ATTEMPTS": 1, "REPLAY_EVERY_SECONDS": None}})
def test_without_replay_a_dead_row_waits_for_a_person() -> None:
    calls = listen("one", RuntimeError("x"), None)
    id_ = emit()
    assert drain() == {"dead": 1}
    assert stored(id_).due_at is None
    assert engine.retry(EVENTS, using=USING, ids=[id_]).changed == 1
    assert stored(id_).dead_at is None
    assert drain() == {"done": 1}
    assert [event.attempt for event in calls] == [1, 1]


def test_a_refused_event_is_told_of_as_failed() -> None:
    told = listen("operator", type_="outbox.*")
    listen("one", Reject("no"))
    emit()
    assert drain() == {"failed": 1, "done": 1}
    assert [event.payload["status"] for event in told] == ["failed"]
    assert told[0].payload["handlers"] == {"one": "Reject: no"}


@override_settings(OUTBOX=ONE_TRY)
def test_the_death_of_an_announcement_and_of_what_it_caused_is_not_announced() -> None:
    def alert(event: Event) -> None:
        with transaction.atomic():
            emit_event("alert.raised")
        raise RuntimeError("the pager is down as well")

    listen("one", RuntimeError("x"))
    listen("alerted", RuntimeError("x"), type_="alert.raised")
    on_event("outbox.event.dead", name="operator")(alert)

    def forward(event: Event) -> None:
        with transaction.atomic():
            emit_event("alert.raised")

    on_event("outbox.event.dead", name="forwarder")(forward)
    emit()
    drain()
    quiet = {row.type: row.quiet for row in OutboxEvent.objects.all()}
    assert quiet == {"thing.done": False, "outbox.event.dead": True, "alert.raised": True}
    assert set(OutboxEvent.objects.values_list("status", flat=True)) == {"dead"}
    assert len(announcements()) == 1


@override_settings(OUTBOX={"EVENTS": {"MAX_ATTEMPTS": 1}, "MAX_PAYLOAD_BYTES": 64})
def test_an_announcement_ignores_the_payload_limit() -> None:
    for number in range(40):
        listen(f"handler-{number}", RuntimeError("x" * 5_000))
    emit()
    assert drain() == {"dead": 1}
    (row,) = announcements()
    assert len(row.payload["handlers"]) == 40


# --- parked ----------------------------------------------------------------------------------------------------------


def test_an_event_owed_to_code_that_is_not_here_is_parked_and_nothing_is_charged() -> None:
    known = listen("known")
    missing = listen("missing")
    id_ = emit()
    handlers = registry.handlers()
    registry.replace(handlers[:1])
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert (row.attempts, len(known), owed(id_)) == (0, 1, ["missing"])
    assert row.due_at is not None
    assert 9 <= (row.due_at - row.created_at).total_seconds() < 14
    assert "missing" in row.last_error
    assert "parked_at" in row.failures["missing"]
    with travel(hours=1):
        assert drain() == {"waiting": 1}
    registry.replace(handlers)
    with travel(hours=2):
        assert drain() == {"done": 1}
    assert (len(known), [event.attempt for event in missing]) == (1, [1])
    assert announcements() == []
    assert "parked_at" not in stored(id_).failures.get("missing", {})


def test_the_wait_of_a_parked_row_grows_with_its_age_up_to_ten_minutes() -> None:
    listen("missing")
    id_ = emit()
    waits = []
    with without_code():
        for seconds in (0, 1_000, 40_000):
            with travel(seconds=seconds):
                drain()
            row = stored(id_)
            assert row.due_at is not None
            waits.append((row.due_at - row.created_at).total_seconds() - seconds)
    assert 9 <= waits[0] < 14
    assert 99 <= waits[1] < 127
    assert 599 <= waits[2] < 752


def test_after_its_time_a_parked_row_is_dead_announced_and_still_delivered_to_code_that_comes() -> None:
    missing = listen("missing")
    told = listen("operator", type_="outbox.event.dead")
    id_ = emit()
    handlers = registry.handlers()
    registry.replace(handlers[1:])
    assert drain() == {"waiting": 1}
    with travel(hours=23):
        assert drain() == {"waiting": 1}
    with travel(hours=25):
        assert drain() == {"dead": 1, "done": 1}
    assert "missing" in told[0].payload["handlers"]
    assert stored(id_).attempts == 0
    registry.replace(handlers)
    with travel(hours=34):
        assert drain() == {"done": 1}
    assert (len(missing), len(told)) == (1, 1)


@override_settings(OUTBOX={"PARK_FOR_SECONDS": 0})
def test_with_no_time_to_park_an_unknown_handler_is_dead_at_once() -> None:
    listen("missing")
    id_ = emit()
    with without_code():
        assert drain() == {"dead": 1}
    assert stored(id_).dead_at is not None
    assert len(announcements()) == 1


def test_a_failure_beside_a_parked_handler_follows_the_retry_rules() -> None:
    listen("missing")
    failing = listen("failing", RuntimeError("x"), None)
    id_ = emit()
    registry.replace(registry.handlers()[1:])
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert row.attempts == 1
    assert "parked_at" in row.failures["missing"]
    with travel(minutes=5):
        assert drain() == {"waiting": 1}
    assert (stored(id_).attempts, len(failing), owed(id_)) == (1, 2, ["missing"])


def test_a_rejection_beside_a_parked_handler_stays_parked_then_fails() -> None:
    missing = listen("missing")
    rejecting = listen("rejecting", Reject("no"))
    id_ = emit()
    handlers = registry.handlers()
    registry.replace(handlers[1:])
    assert drain() == {"waiting": 1}
    registry.replace(handlers)
    with travel(hours=1):
        assert drain() == {"failed": 1}
    assert (len(missing), len(rejecting), owed(id_)) == (1, 1, ["rejecting"])


def test_a_handler_that_no_longer_wants_the_type_is_parked() -> None:
    listen("one")
    emit()
    registry.replace(())
    listen("one", type_="other.thing")
    assert drain() == {"waiting": 1}


def test_discarding_a_parked_delivery_closes_it() -> None:
    listen("known")
    listen("missing")
    id_ = emit()
    registry.replace(registry.handlers()[:1])
    drain()
    assert engine.discard(EVENTS, using=USING, handler="missing").changed == 1
    assert stored(id_).status == "done"


def test_a_parked_delivery_can_be_renamed() -> None:
    listen("old")
    id_ = emit()
    registry.replace(())
    renamed = listen("new")
    drain()
    assert engine.rename_handler(EVENTS, "old", "new", using=USING).changed == 1
    assert drain() == {"done": 1}
    assert [event.idempotency_key for event in renamed] == [f"new:{id_}"]


def test_a_handler_that_was_parked_and_then_killed_its_relay_can_be_parked_again() -> None:
    """A rollback of the relay's code between two starts: the row bears both marks and a time of parking."""
    listen("one")
    id_ = emit()
    with without_code():
        assert drain() == {"waiting": 1}
    with travel(hours=1):
        die_holding()
        run = EventRun(claim_one(), using=USING)
        assert run.next_step() is not None  # marked before it starts; its process dies here too
        assert stored(id_).failures["one"]["marks"] == 1
        OutboxEvent.objects.update(lease_until=datetime(2020, 1, 1, tzinfo=UTC))
        with without_code():
            assert drain() == {"waiting": 1}
    assert "parked_at" in stored(id_).failures["one"]
    with travel(hours=3):
        assert drain() == {"done": 1}


# --- renames ---------------------------------------------------------------------------------------------------------


def rename(old: str, new: str, *, aliases: tuple[str, ...]) -> Calls:
    registry.replace(handler for handler in registry.handlers() if handler.name != old)
    return listen(new, aliases=aliases)


def test_a_delivery_owed_under_a_former_name_is_made_once_under_every_name() -> None:
    listen("old")
    id_ = emit()
    calls = rename("old", "new", aliases=("older", "old"))
    assert drain() == {"done": 1}
    (event,) = calls
    assert (event.handler, event.idempotency_key) == ("new", f"older:{id_}")
    row = stored(id_)
    assert set(row.deliveries) == {"old", "older", "new"}
    assert owed(id_) == []


def test_the_idempotency_key_survives_a_rename_between_two_attempts() -> None:
    first = listen("old", RuntimeError("x"))
    id_ = emit()
    drain()
    second = rename("old", "new", aliases=("old",))
    with travel(hours=1):
        assert drain() == {"done": 1}
    assert first[0].idempotency_key == second[0].idempotency_key == f"old:{id_}"


def test_after_the_rollback_of_a_rename_nothing_delivered_is_repeated() -> None:
    other = listen("other", RuntimeError("x"), RuntimeError("x"), None)
    old = listen("old")
    id_ = emit()
    new = rename("old", "new", aliases=("old",))
    assert drain() == {"waiting": 1}
    assert len(new) == 1
    back = rename("new", "old", aliases=())
    with travel(hours=1):
        assert drain() == {"waiting": 1}
    again = rename("old", "new", aliases=("old",))
    with travel(hours=2):
        assert drain() == {"done": 1}
    assert (len(other), len(old), len(new), len(back), len(again)) == (3, 0, 1, 0, 0)
    assert owed(id_) == []


def test_an_event_emitted_under_the_new_name_and_delivered_there_stays_delivered_after_the_rollback() -> None:
    listen("other", RuntimeError("x"), None)
    new = listen("new", aliases=("old",))
    id_ = emit()
    assert drain() == {"waiting": 1}
    old = rename("new", "old", aliases=())
    with travel(hours=1):
        assert drain() == {"done": 1}
    assert (len(new), len(old), owed(id_)) == (1, 0, [])


def test_an_event_owed_under_two_names_of_one_handler_is_delivered_once() -> None:
    listen("old")
    id_ = emit()
    calls = rename("old", "new", aliases=("old",))
    OutboxEvent.objects.filter(id=id_).update(deliveries={"old": None, "new": None})
    assert drain() == {"done": 1}
    assert (len(calls), owed(id_)) == (1, [])


def test_a_rejection_under_the_former_name_holds_under_the_new_one() -> None:
    listen("old", Reject("no"))
    listen("other", RuntimeError("x"), None)
    id_ = emit()
    assert drain() == {"waiting": 1}
    calls = rename("old", "new", aliases=("old",))
    with travel(hours=1):
        assert drain() == {"failed": 1}
    assert (calls, owed(id_)) == ([], ["old"])


@pytest.mark.django_db(transaction=True)
def test_an_atomic_delivery_is_recorded_under_every_name_at_once() -> None:
    on_event("thing.done", name="new", atomic=True, aliases=("old",))(write_effect)
    id_ = emit()
    run = EventRun(claim_one(), using=USING)
    handler = run.next_step()
    assert handler is not None
    assert run.invoke(handler, timeout=5).ok
    assert sorted(stored(id_).deliveries) == ["new", "old"]
    assert owed(id_) == []


# --- suspects, in place ----------------------------------------------------------------------------------------------


def test_a_handler_that_kills_its_process_is_started_three_times_and_its_neighbours_still_run() -> None:
    """Scenario 12, through ``drain()``, which runs suspects in place."""
    killer = listen("killer", SystemExit("a stand-in: the process is gone before any report"))
    neighbour = listen("neighbour")
    id_ = emit()
    for _ in range(3):
        # Each time a relay claims the row, starts the killer and is gone.
        run = EventRun(claim_one(), using=USING)
        handler = run.next_step()
        assert handler is not None
        assert handler.name == "killer"
        OutboxEvent.objects.update(lease_until=datetime(2020, 1, 1, tzinfo=UTC))
    assert drain() == {"dead": 1}
    row = stored(id_)
    assert (len(killer), len(neighbour), owed(id_)) == (0, 1, ["killer"])
    assert (row.due_at, row.failures["killer"]["lost"]) == (None, True)
    assert "worker lost" in row.last_error
    assert len(announcements()) == 1
    assert engine.retry(EVENTS, using=USING, ids=[id_]).changed == 1
    killer.ends = [None]
    assert drain() == {"done": 1}
    assert (len(killer), len(neighbour)) == (1, 1)


def test_a_settle_clears_the_marks() -> None:
    listen("one", RuntimeError("x"))
    id_ = emit()
    die_holding()
    assert drain() == {"waiting": 1}
    row = stored(id_)
    assert row.lost_leases == 0
    assert "marks" not in row.failures["one"]


def test_a_second_report_about_one_start_is_ignored() -> None:
    listen("one")
    emit()
    run = EventRun(claim_one(), using=USING)
    handler = run.next_step()
    assert handler is not None
    result = run.invoke(handler, timeout=5, savepoint=True)
    run.interrupt()
    run.finish(handler, result)
    assert run.complete
    assert list(settle(run).values()) == ["waiting"]


def test_an_interrupted_handler_of_a_name_that_two_share_is_recorded_under_the_right_one() -> None:
    on_event("other.thing", name="shared", aliases=("former",))(lambda event: None)
    listen("shared", aliases=("old",))
    id_ = emit()
    OutboxEvent.objects.update(deliveries={"old": None})
    run = EventRun(claim_one(), using=USING)
    assert run.next_step() is not None
    run.interrupt()
    settle(run)
    assert list(stored(id_).failures) == ["old"]
