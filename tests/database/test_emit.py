"""Emitting: the event stands or falls with the transaction it was written in."""

from __future__ import annotations

import asyncio
import enum
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_outbox import (
    Event,
    InvalidEventType,
    InvalidPayload,
    NewEvent,
    NotInTransaction,
    emit_event,
    emit_events,
    on_event,
    wake,
)
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain, travel
from tests.testapp.models import Effect, Note

pytestmark = pytest.mark.django_db


@pytest.fixture
def heard() -> list[Event]:
    """Return what the one handler of ``thing.*`` received."""
    received: list[Event] = []
    on_event("thing.*", name="listener")(received.append)
    return received


@pytest.fixture
def woken() -> Iterator[list[str]]:
    """Return the aliases whose relays, were they in this process, were woken."""
    calls: list[str] = []
    watchers = [
        wake.Watcher(alias, partial(lambda alias, queue: calls.append(alias), alias)) for alias in ("default", "orders")
    ]
    for watcher in watchers:
        watcher.start()
    yield calls
    for watcher in watchers:
        watcher.stop()


def types() -> list[str]:
    return list(OutboxEvent.objects.order_by("created_at", "id").values_list("type", flat=True))


def test_handlers_are_discovered_in_the_modules_of_installed_apps() -> None:
    with transaction.atomic():
        id_ = emit_event("testapp.discovered")
    assert drain() == {"done": 1}
    assert Effect.objects.get().key == f"discovered:{id_}"


# --- the transaction -------------------------------------------------------------------------------------------------


def test_an_event_bears_what_it_was_given(heard: list[Event]) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    with transaction.atomic():
        id_ = emit_event(
            "thing.done",
            {"a": [1, {"b": None}]},
            aggregate_type="order",
            aggregate_id="7",
            organization_id="acme",
            request_id="r-1",
            headers={"trace": "t"},
            occurred_at=moment,
        )
    row = OutboxEvent.objects.get()
    assert (row.id, id_.version, row.status, row.attempts, row.fence) == (id_, 7, "pending", 0, 0)
    assert (row.type, row.payload, row.headers) == ("thing.done", {"a": [1, {"b": None}]}, {"trace": "t"})
    assert (row.aggregate_type, row.aggregate_id, row.organization_id, row.request_id) == ("order", "7", "acme", "r-1")
    assert (row.causation_id, row.quiet, row.deliveries, row.failures) == (None, False, {"listener": None}, {})
    assert (row.occurred_at, row.not_before, row.due_at, row.leased_by) == (moment, None, None, "")
    assert drain() == {"done": 1}
    (event,) = heard
    assert (event.id, event.type, event.payload, event.headers) == (id_, row.type, row.payload, row.headers)
    assert event.occurred_at == moment
    assert event.occurred_at.utcoffset() == timedelta(0)
    assert (event.aggregate_type, event.aggregate_id, event.organization_id, event.request_id) == (
        "order", "7", "acme", "r-1",
    )  # fmt: skip
    assert (event.causation_id, event.handler, event.attempt) == (None, "listener", 1)
    assert event.idempotency_key == f"listener:{id_}"


def test_an_event_that_nobody_handles_is_done_at_once() -> None:
    with transaction.atomic():
        emit_event("nobody.listened", delay=60)
    row = OutboxEvent.objects.get()
    assert (row.status, row.deliveries, row.due_at) == ("done", {}, None)
    assert row.finished_at is not None
    assert drain() == {}


def test_a_rolled_back_savepoint_takes_its_events_and_no_others(heard: list[Event]) -> None:
    """Scenario 18, the inner block."""
    with transaction.atomic():
        emit_event("thing.a")
        with pytest.raises(RuntimeError), transaction.atomic():
            emit_event("thing.b")
            raise RuntimeError
        emit_event("thing.c")
    assert types() == ["thing.a", "thing.c"]
    assert drain() == {"done": 2}
    assert [event.type for event in heard] == ["thing.a", "thing.c"]


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_transaction_leaves_nothing_and_wakes_nobody(heard: list[Event], woken: list[str]) -> None:
    """Scenario 18, the outer block."""
    with pytest.raises(RuntimeError), transaction.atomic():
        emit_event("thing.a")
        with transaction.atomic():
            emit_event("thing.b")
        raise RuntimeError
    assert (types(), woken, drain()) == ([], [], {})
    with transaction.atomic():
        emit_event("thing.c")
    assert (types(), woken) == (["thing.c"], ["default"])


@pytest.mark.django_db(transaction=True)
def test_emitting_in_autocommit_is_refused_before_any_sql_and_names_the_alias() -> None:
    """Scenario 19: never a silent nothing."""
    connection.ensure_connection()
    with CaptureQueriesContext(connection) as queries, pytest.raises(NotInTransaction, match="'default'") as caught:
        emit_event("thing.done")
    assert 'transaction.atomic(using="default")' in str(caught.value)
    assert 'OUTBOX["REQUIRE_TRANSACTION"] = False' in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert len(queries) == 0
    with pytest.raises(NotInTransaction):
        emit_events([])


def test_the_transaction_of_a_test_case_does_not_count() -> None:
    assert connection.in_atomic_block
    with pytest.raises(NotInTransaction):
        emit_event("thing.done")


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX={"REQUIRE_TRANSACTION": False})
def test_without_the_requirement_it_commits_in_a_transaction_of_its_own(heard: list[Event]) -> None:
    """Scenario 19, the other setting."""
    emit_event("thing.done")
    assert not connection.in_atomic_block
    assert drain() == {"done": 1}
    assert len(heard) == 1
    with pytest.raises(RuntimeError), transaction.atomic():
        emit_event("thing.rolled-back")
        raise RuntimeError
    assert types() == ["thing.done"]


@override_settings(OUTBOX={"REQUIRE_TRANSACTION": False})
def test_without_the_requirement_it_works_in_the_transaction_of_a_test_case() -> None:
    emit_event("thing.done")
    assert types() == ["thing.done"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("required", [True, False])
def test_with_autocommit_off_the_callers_own_commit_decides(required: bool) -> None:
    """Django knows no atomic block there, so the strict setting refuses; the other joins what is open."""
    transaction.set_autocommit(False)
    try:
        with override_settings(OUTBOX={"REQUIRE_TRANSACTION": required}):
            if required:
                with pytest.raises(NotInTransaction):
                    emit_event("thing.done")
            else:
                emit_event("thing.done")
                transaction.rollback()
                assert types() == []
                emit_event("thing.done")
                transaction.commit()
        with transaction.atomic():
            emit_event("thing.in-atomic")
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert types() == [*([] if required else ["thing.done"]), "thing.in-atomic"]


@pytest.mark.django_db(transaction=True)
def test_it_works_in_a_durable_block() -> None:
    with transaction.atomic(durable=True):
        emit_event("thing.done")
    assert types() == ["thing.done"]


@pytest.mark.django_db(transaction=True)
def test_a_commit_hook_stands_outside_the_transaction_and_may_open_one() -> None:
    failures: list[BaseException] = []

    def careless() -> None:
        try:
            emit_event("thing.careless")
        except NotInTransaction as error:
            failures.append(error)

    def careful() -> None:
        with transaction.atomic():
            emit_event("thing.careful")

    with transaction.atomic():
        transaction.on_commit(careless)
        transaction.on_commit(careful)
        emit_event("thing.done")
    assert types() == ["thing.done", "thing.careful"]
    assert len(failures) == 1


def test_a_transaction_that_is_already_broken_says_so_and_stays_broken() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            emit_event("thing.done")
        raise RuntimeError
    assert types() == []


@pytest.mark.django_db(databases=["default", "orders"], transaction=True)
def test_an_event_follows_the_transaction_of_its_alias(heard: list[Event], woken: list[str]) -> None:
    """Scenario 21."""
    with transaction.atomic(using="orders"):
        Note.objects.using("orders").create(text="kept")
        emit_event("thing.kept", using="orders")
        assert woken == []
    assert woken == ["orders"]
    with pytest.raises(RuntimeError), transaction.atomic(using="orders"):
        Note.objects.using("orders").create(text="dropped")
        emit_event("thing.dropped", using="orders")
        raise RuntimeError
    with pytest.raises(NotInTransaction, match="'orders'"), transaction.atomic():
        emit_event("thing.elsewhere", using="orders")
    assert woken == ["orders"]
    assert list(OutboxEvent.objects.using("orders").values_list("type", flat=True)) == ["thing.kept"]
    assert list(Note.objects.using("orders").values_list("text", flat=True)) == ["kept"]
    assert types() == []
    assert drain() == {}
    assert drain(using="orders") == {"done": 1}
    assert [event.type for event in heard] == ["thing.kept"]


@pytest.mark.django_db(databases=["default", "orders"])
@override_settings(OUTBOX={"DATABASE": "orders"})
def test_the_setting_names_the_alias_when_the_call_does_not() -> None:
    with pytest.raises(NotInTransaction, match="'orders'"), transaction.atomic():
        emit_event("thing.done")
    with transaction.atomic(using="orders"):
        emit_event("thing.done")
    assert types() == []
    assert OutboxEvent.objects.using("orders").count() == 1


# --- the event loop --------------------------------------------------------------------------------------------------


def test_in_an_event_loop_it_is_refused_and_the_text_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJANGO_ALLOW_ASYNC_UNSAFE", raising=False)

    async def view() -> None:
        emit_event("thing.done")

    async def bulk() -> None:
        emit_events([])

    for coroutine in (view, bulk):
        with pytest.raises(SynchronousOnlyOperation, match="sync_to_async"):
            asyncio.run(coroutine())
    assert "DJANGO_ALLOW_ASYNC_UNSAFE" not in os.environ


@pytest.mark.django_db(transaction=True)
def test_through_sync_to_async_it_works_in_an_event_loop() -> None:
    @sync_to_async
    def work() -> UUID:
        try:
            with transaction.atomic():
                return emit_event("thing.done")
        finally:
            connection.close()

    async def view() -> UUID:
        return await work()

    id_ = asyncio.run(view())
    assert OutboxEvent.objects.get().id == id_


# --- many at once ----------------------------------------------------------------------------------------------------


def test_many_events_are_one_statement_and_keep_their_order(heard: list[Event]) -> None:
    def generate() -> Iterator[NewEvent]:
        for number in range(300):
            yield NewEvent("thing.counted", {"n": number}, aggregate_id=str(number))

    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        ids = emit_events(generate())
    assert len(queries) == 1
    assert ids == sorted(ids)
    assert len(set(ids)) == 300
    assert drain() == {"done": 300}
    assert [event.payload["n"] for event in heard] == list(range(300))
    assert [event.id for event in heard] == ids


def test_an_empty_batch_writes_nothing() -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        assert emit_events(iter(())) == []
    assert len(queries) == 0


def test_events_of_one_batch_may_differ_in_everything(heard: list[Event]) -> None:
    cause = uuid4()
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    with transaction.atomic():
        ids = emit_events(
            [
                NewEvent("thing.plain"),
                NewEvent(
                    "thing.full", {"a": "b"}, aggregate_type="t", aggregate_id="i", organization_id="o",
                    request_id="r", headers={"h": 1}, occurred_at=moment, delay=60, event_id=cause,
                ),
                NewEvent("nobody.listens", [None, True, 1.5, "x"]),
            ]
        )  # fmt: skip
    plain, full, unheard = (OutboxEvent.objects.get(id=id_) for id_ in ids)
    assert (plain.status, plain.payload, plain.headers, plain.aggregate_type) == ("pending", {}, {}, "")
    assert (full.id, full.status, full.payload, full.headers) == (cause, "waiting", {"a": "b"}, {"h": 1})
    assert (full.aggregate_type, full.aggregate_id, full.organization_id, full.request_id) == ("t", "i", "o", "r")
    assert full.occurred_at == moment
    assert (unheard.status, unheard.payload, unheard.deliveries) == ("done", [None, True, 1.5, "x"], {})
    assert drain() == {"done": 1}


def test_one_bad_event_writes_none_of_its_batch() -> None:
    for bad, error in (
        (NewEvent("thing.done", {"a": b""}), InvalidPayload),
        (NewEvent("Thing"), InvalidEventType),
        ("thing.done", InvalidPayload),
        (("thing.done", {}), InvalidPayload),
        (None, InvalidPayload),
    ):
        with transaction.atomic(), CaptureQueriesContext(connection) as queries, pytest.raises(error):
            emit_events([NewEvent("thing.done"), bad])  # type: ignore[list-item]
        assert len(queries) == 0
    assert types() == []


def test_a_generator_that_raises_writes_nothing_and_leaves_the_transaction_usable() -> None:
    def generate() -> Iterator[NewEvent]:
        yield NewEvent("thing.done")
        raise LookupError

    with transaction.atomic():
        with pytest.raises(LookupError):
            emit_events(generate())
        emit_event("thing.after")
    assert types() == ["thing.after"]


def test_a_generator_may_emit_itself() -> None:
    def generate() -> Iterator[NewEvent]:
        emit_event("thing.inner")
        yield NewEvent("thing.outer")

    with transaction.atomic():
        emit_events(generate())
    assert types() == ["thing.inner", "thing.outer"]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_a_given_id_that_exists_writes_nothing_and_the_first_one_stays(heard: list[Event]) -> None:
    id_ = uuid4()
    with transaction.atomic():
        assert emit_event("thing.first", {"n": 1}, event_id=id_) == id_
        assert emit_event("thing.second", {"n": 2}, event_id=id_) == id_
    with transaction.atomic():
        assert emit_event("thing.third", event_id=id_) == id_
        emit_event("thing.other")
    assert drain() == {"done": 2}
    assert [(event.type, event.payload) for event in heard] == [("thing.first", {"n": 1}), ("thing.other", {})]
    with transaction.atomic():
        emit_event("thing.fourth", event_id=id_)
    assert drain() == {}


def test_one_id_twice_in_a_batch_is_written_once_beside_generated_ones(heard: list[Event]) -> None:
    id_ = uuid4()
    with transaction.atomic():
        ids = emit_events(
            [
                NewEvent("thing.a", event_id=id_),
                NewEvent("thing.b"),
                NewEvent("thing.c", event_id=id_),
                NewEvent("thing.d", delay=1),
            ]
        )
    assert ids[0] == ids[2] == id_
    assert len(set(ids)) == 3
    assert ids[1] < ids[3]
    assert set(OutboxEvent.objects.values_list("id", flat=True)) == set(ids)


def test_given_ids_are_written_in_one_order_so_that_two_batches_cannot_deadlock() -> None:
    first, second = sorted((uuid4(), uuid4()))
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        ids = emit_events([NewEvent("thing.b", event_id=second), NewEvent("thing.a", event_id=first)])
    assert ids == [second, first]
    sql = queries[0]["sql"].replace("-", "")
    assert sql.index(first.hex) < sql.index(second.hex)


@pytest.mark.parametrize("event_id", ["0191b5d6-8b7e-7cc2-8000-000000000000", 7, b"x" * 16, ""])
def test_a_given_id_must_be_a_uuid(event_id: Any) -> None:
    with transaction.atomic(), pytest.raises(InvalidPayload, match=r"event_id must be a uuid\.UUID"):
        emit_event("thing.done", event_id=event_id)


@pytest.mark.parametrize("event_id", [UUID(int=0), UUID(int=2**128 - 1), uuid4()])
def test_any_uuid_can_be_given(event_id: UUID, heard: list[Event]) -> None:
    with transaction.atomic():
        emit_event("thing.done", event_id=event_id)
    assert drain() == {"done": 1}
    assert heard[0].idempotency_key == f"listener:{event_id}"


# --- types -----------------------------------------------------------------------------------------------------------


class Kind(str, enum.Enum):  # noqa: UP042  the older form, which prints as Kind.DONE
    DONE = "thing.done"
    LOST = "thing.lost"


def test_a_member_of_a_string_enum_is_its_value_alone_and_in_a_batch(heard: list[Event]) -> None:
    with transaction.atomic():
        emit_event(Kind.DONE, aggregate_type=Kind.DONE)
        emit_events([NewEvent(Kind.DONE, request_id=Kind.DONE), NewEvent(Kind.LOST, request_id=Kind.LOST)])
    assert types() == ["thing.done", "thing.done", "thing.lost"]
    assert drain() == {"done": 3}
    assert [event.request_id for event in heard] == ["", "thing.done", "thing.lost"]


@pytest.mark.parametrize("type_", ["created", "outbox.event.dead", "Thing.done", "thing.done\x00", None, 7])
def test_a_bad_type_is_refused_before_any_sql(type_: Any) -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries, pytest.raises(InvalidEventType):
        emit_event(type_)
    assert len(queries) == 0


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [None, 0, 0.0, -0.0, timedelta(0)])
def test_no_delay_is_due_now(delay: float | timedelta | None, heard: list[Event]) -> None:
    with transaction.atomic():
        emit_event("thing.done", delay=delay)
    row = OutboxEvent.objects.get()
    assert (row.status, row.due_at, row.not_before) == ("pending", None, None)
    assert drain() == {"done": 1}


@pytest.mark.parametrize("delay", [90, 90.0, timedelta(seconds=90)])
def test_a_delay_holds_the_delivery_back(delay: float | timedelta, heard: list[Event]) -> None:
    with transaction.atomic():
        emit_event("thing.done", delay=delay)
    row = OutboxEvent.objects.get()
    assert row.status == "waiting"
    assert row.due_at is not None
    assert row.not_before is not None
    assert abs((row.due_at - row.not_before).total_seconds()) < 0.1
    assert abs((row.due_at - row.created_at).total_seconds() - 90) < 0.1
    assert drain() == {}
    with travel(seconds=89):
        assert drain() == {}
    with travel(seconds=91):
        assert drain() == {"done": 1}


@pytest.mark.parametrize("delay", [1e-9, 1e-5, 0.001, timedelta(microseconds=1), 3_653 * 86_400, 1.5e8 + 0.1])
def test_the_shortest_and_the_longest_delays_can_be_stored(delay: float | timedelta, heard: list[Event]) -> None:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
    with transaction.atomic():
        emit_event("thing.done", delay=delay)
    row = OutboxEvent.objects.get()
    assert row.due_at is not None
    assert abs((row.due_at - row.created_at).total_seconds() - seconds) < 0.1
    with travel(seconds=seconds + 1):
        assert drain() == {"done": 1}


@pytest.mark.parametrize(
    "delay",
    [-1, -1e-9, math.nan, math.inf, -math.inf, timedelta(seconds=-1), timedelta.max, 10**30,
     pytest.param(10**5_000, id="huge"), True, "60", Decimal(60), [60], datetime(2030, 1, 1, tzinfo=UTC)],
)  # fmt: skip
def test_a_delay_that_is_no_span_of_time_is_refused_before_any_sql(delay: Any) -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        with pytest.raises(InvalidPayload, match="delay"):
            emit_event("thing.done", delay=delay)
    assert len(queries) == 0


class _NoOffset(tzinfo):
    def utcoffset(self, moment: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (datetime(2026, 7, 1, tzinfo=UTC), datetime(2026, 7, 1, tzinfo=UTC)),
        (datetime(2026, 7, 1, 12, 0, 0, 7_000, tzinfo=UTC), datetime(2026, 7, 1, 12, 0, 0, 7_000, tzinfo=UTC)),
        (datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Asia/Kathmandu")), datetime(2026, 7, 1, 6, 15, tzinfo=UTC)),
        # The hour that comes twice: fold says which.
        (datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")), datetime(2025, 10, 26, 0, 30, tzinfo=UTC)),
        (
            datetime(2025, 10, 26, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime(2025, 10, 26, 1, 30, tzinfo=UTC),
        ),
        # Local mean time, with seconds in its offset.
        (datetime(1890, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), datetime(1889, 12, 31, 23, 6, 32, tzinfo=UTC)),
        (
            datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-23, minutes=-59))),
            datetime(2026, 1, 1, 23, 59, tzinfo=UTC),
        ),
        (datetime(2, 1, 1, tzinfo=UTC), datetime(2, 1, 1, tzinfo=UTC)),
        (datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_a_time_in_any_zone_is_stored_and_received_in_utc(
    given: datetime, stored: datetime, heard: list[Event]
) -> None:
    with transaction.atomic():
        emit_event("thing.done", occurred_at=given)
    assert OutboxEvent.objects.get().occurred_at == stored
    assert drain() == {"done": 1}
    # To the millisecond, so that midnight stays on its day.
    assert heard[0].occurred_at == stored


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        datetime(2026, 7, 1, 12),  # noqa: DTZ001
        datetime(2026, 7, 1, 12, tzinfo=_NoOffset()),
    ],
)
def test_a_naive_time_is_one_of_the_projects_zone(given: datetime, use_tz: bool) -> None:
    with override_settings(TIME_ZONE="Asia/Tokyo", USE_TZ=use_tz), transaction.atomic():
        emit_event("thing.done", occurred_at=given)
        assert OutboxEvent.objects.get().occurred_at == datetime(2026, 7, 1, 3, tzinfo=UTC)


def test_without_a_time_it_occurred_when_it_was_written(heard: list[Event]) -> None:
    with transaction.atomic():
        emit_event("thing.done")
    row = OutboxEvent.objects.get()
    assert abs((row.occurred_at - row.created_at).total_seconds()) < 0.1
    drain()
    assert abs(heard[0].occurred_at - row.occurred_at) < timedelta(milliseconds=1)


@pytest.mark.parametrize(
    "occurred_at",
    [
        datetime.max,  # noqa: DTZ901
        datetime.max.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
        datetime(2026, 1, 1, tzinfo=UTC).date(),
        "2026-01-01T00:00:00Z",
        1_700_000_000,
    ],
)
def test_a_time_that_no_database_can_keep_is_refused_before_any_sql(occurred_at: Any) -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        with pytest.raises(InvalidPayload, match="occurred_at"):
            emit_event("thing.done", occurred_at=occurred_at)
    assert len(queries) == 0
