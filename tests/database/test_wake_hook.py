"""The commit hook that wakes the relays: once per transaction, never in the way of the commit."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_outbox import NewEvent, emit_event, emit_events, on_event, wake
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain
from tests.conftest import RawConnect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every transaction notify, however soon it comes after another."""
    monkeypatch.setattr(wake, "NOTIFY_WINDOW_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _handler() -> None:
    on_event("thing.*", name="listener")(lambda event: None)


def _of_alias(on_wake: Callable[[str], None], alias: str, queue: str | None) -> None:
    assert queue == "events"
    on_wake(alias)


@contextmanager
def relays(on_wake: Callable[[str], None]) -> Iterator[None]:
    """Watch both aliases from this process, as a relay does."""
    watchers = [wake.Watcher(alias, partial(_of_alias, on_wake, alias)) for alias in ("default", "orders")]
    for watcher in watchers:
        watcher.start()
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.stop()


@pytest.fixture
def woken() -> Iterator[list[str]]:
    """Return the aliases whose relays were woken, in order."""
    calls: list[str] = []
    with relays(calls.append):
        yield calls


@contextmanager
def rolled_back(using: str = "default") -> Iterator[None]:
    """Run the block in a savepoint and roll it back."""
    with pytest.raises(LookupError), transaction.atomic(using=using):
        yield
        raise LookupError


def test_many_events_wake_once_and_only_after_the_commit(woken: list[str]) -> None:
    with transaction.atomic():
        for _ in range(5):
            emit_event("thing.done")
        emit_events([NewEvent("thing.done")] * 5)
        with transaction.atomic():
            emit_event("thing.done")
        assert woken == []
    assert woken == ["default"]


def test_each_transaction_wakes_for_itself(woken: list[str]) -> None:
    for _ in range(3):
        with transaction.atomic():
            emit_event("thing.done")
    assert woken == ["default"] * 3


def test_events_that_nobody_handles_wake_nobody(woken: list[str]) -> None:
    with transaction.atomic():
        emit_event("nobody.listens")
    assert woken == []


def test_a_delayed_event_wakes_since_it_may_be_the_next_one_due(woken: list[str]) -> None:
    with transaction.atomic():
        emit_event("thing.done", delay=60)
    assert woken == ["default"]


def test_a_rolled_back_savepoint_after_the_event_leaves_its_hook(woken: list[str]) -> None:
    with transaction.atomic():
        emit_event("thing.kept")
        with rolled_back():
            emit_event("thing.gone")
    assert woken == ["default"]


def test_a_rolled_back_savepoint_before_the_event_does_not_take_its_hook(woken: list[str]) -> None:
    with transaction.atomic():
        with rolled_back():
            emit_event("thing.gone")
        emit_event("thing.kept")
    assert woken == ["default"]


def test_a_savepoint_in_a_rolled_back_one_does_not_take_the_hook_of_a_sibling(woken: list[str]) -> None:
    """The first registration goes with its savepoint; the second stood in another."""
    with transaction.atomic():
        with rolled_back():
            with transaction.atomic():
                emit_event("thing.gone")
            emit_event("thing.gone")
        with transaction.atomic(), transaction.atomic():
            emit_event("thing.kept")
    assert woken == ["default"]


def test_a_released_savepoint_in_a_rolled_back_one_does_not_take_the_hook_of_what_stays(woken: list[str]) -> None:
    with transaction.atomic():
        with transaction.atomic():
            emit_event("thing.kept")
        with rolled_back():
            with transaction.atomic():
                emit_event("thing.gone")
    assert woken == ["default"]


def test_a_registration_that_survives_in_a_released_savepoint_is_not_relied_on_by_its_parent(woken: list[str]) -> None:
    """The inner one is released, then the middle one is rolled back, and with it what the inner one registered."""
    with transaction.atomic():
        with rolled_back():
            with transaction.atomic():
                emit_event("thing.gone")
        with rolled_back():
            emit_event("thing.gone")
        with transaction.atomic(savepoint=False):
            emit_event("thing.kept")
        with rolled_back():
            emit_event("thing.gone")
    assert woken == ["default"]


def test_a_rollback_to_a_savepoint_by_hand_does_not_take_the_hook_of_what_stays(woken: list[str]) -> None:
    with transaction.atomic():
        with transaction.atomic():
            savepoint = connection.savepoint()
            assert savepoint is not None
            emit_event("thing.gone")
            connection.savepoint_rollback(savepoint)
            emit_event("thing.kept")
    assert woken == ["default"]
    assert OutboxEvent.objects.get().type == "thing.kept"


def test_when_everything_is_rolled_back_nobody_is_woken(woken: list[str]) -> None:
    with transaction.atomic(), rolled_back():
        emit_event("thing.gone")
    with rolled_back():
        emit_event("thing.gone")
    assert woken == []
    with transaction.atomic():
        emit_event("thing.kept")
    assert woken == ["default"]


def test_an_emit_in_a_commit_hook_after_ours_wakes_again(woken: list[str]) -> None:
    def follow() -> None:
        with transaction.atomic():
            emit_event("thing.followed")

    with transaction.atomic():
        emit_event("thing.done")
        transaction.on_commit(follow)
    assert woken == ["default", "default"]


@pytest.mark.django_db(databases=["default", "orders"], transaction=True)
def test_each_alias_has_a_hook_of_its_own(woken: list[str]) -> None:
    with transaction.atomic(), transaction.atomic(using="orders"):
        emit_event("thing.done")
        emit_event("thing.done", using="orders")
        emit_event("thing.done")
    assert woken == ["orders", "default"]


def test_a_hook_of_the_application_that_raises_before_ours_costs_only_the_hint(woken: list[str]) -> None:
    """Scenario 65."""

    def broken() -> None:
        raise RuntimeError("the application's own hook")

    with pytest.raises(RuntimeError, match="own hook"), transaction.atomic():
        transaction.on_commit(broken)
        emit_event("thing.done")
    assert woken == []
    # The poll, which drain() stands for, finds the event; the next transaction wakes as ever.
    assert drain() == {"done": 1}
    with transaction.atomic():
        emit_event("thing.done")
    assert woken == ["default"]


def test_our_hook_never_raises_into_the_caller_and_hooks_after_it_run(caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 65, the other way about."""

    def fail(alias: str) -> None:
        raise OSError("no wake today")

    ran: list[str] = []
    with relays(fail), caplog.at_level(logging.ERROR), transaction.atomic():
        emit_event("thing.done")
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["after"]
    assert "no wake today" in caplog.text
    assert drain() == {"done": 1}


@pytest.mark.postgres
def test_a_database_that_refuses_the_wake_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("NOTIFY"):
            raise DatabaseError("the notification queue is full")
        return execute(sql, params, many, context)

    ran: list[str] = []
    with caplog.at_level(logging.WARNING), connection.execute_wrapper(refuse), transaction.atomic():
        emit_event("thing.done")
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["after"]
    assert [record.name for record in caplog.records] == ["django_outbox.wake"]
    assert "wake-up not sent" in caplog.text


@pytest.mark.postgres
def test_a_connection_that_died_at_the_commit_hook_does_not_raise_into_the_caller(
    raw_connect: RawConnect, caplog: pytest.LogCaptureFixture
) -> None:
    def kill() -> None:
        assert connection.connection is not None
        pid = connection.connection.info.backend_pid
        session = raw_connect()
        session.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    try:
        with caplog.at_level(logging.WARNING), transaction.atomic():
            transaction.on_commit(kill)
            emit_event("thing.done")
    finally:
        connection.close()
    assert OutboxEvent.objects.count() == 1
    assert "wake-up not sent" in caplog.text


@pytest.mark.postgres
def test_the_notification_is_a_statement_of_its_own_without_a_payload(raw_connect: RawConnect) -> None:
    """Scenario 7, the size of what is sent."""
    listener = raw_connect()
    listener.execute("LISTEN django_outbox_events")
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        emit_event("thing.done", {"text": "😀" * 3_900})
        emit_event("thing.done", {"text": "x" * 200_000})
    (notice,) = list(listener.notifies(timeout=10, stop_after=1))
    assert (notice.channel, notice.payload) == ("django_outbox_events", "")
    statements = [query["sql"] for query in queries]
    assert statements[-1] == "NOTIFY django_outbox_events"
    assert sum("NOTIFY" in sql for sql in statements) == 1
    assert statements[-2].upper().startswith("COMMIT")
    with connection.cursor() as cursor:
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("on",)


@pytest.mark.postgres
def test_transactions_in_quick_succession_share_a_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is made long, so that it cannot be over; another queue has one of its own."""
    monkeypatch.setattr(wake, "NOTIFY_WINDOW_SECONDS", 60.0)
    monkeypatch.setattr(wake, "_notified_at", {})
    with CaptureQueriesContext(connection) as queries:
        for _ in range(20):
            with transaction.atomic():
                emit_event("thing.done")
        wake.notify("default", queue="email")
    sent = [query["sql"] for query in queries if "NOTIFY" in query["sql"]]
    assert sent == ["NOTIFY django_outbox_events", "NOTIFY django_outbox_email"]


@pytest.mark.sqlite
def test_on_sqlite_no_statement_follows_the_commit() -> None:
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        emit_event("thing.done")
    assert queries[-1]["sql"] == "COMMIT"


def test_many_savepoints_with_an_event_each_register_once_each_and_wake_once(woken: list[str]) -> None:
    """As in an import that opens a savepoint for every row."""
    with transaction.atomic():
        for _ in range(50):
            with transaction.atomic():
                emit_event("thing.done")
                emit_event("thing.done")
        assert len(connection.run_on_commit) <= 50
    assert woken == ["default"]


def test_the_cost_of_a_registration_does_not_grow_with_the_hooks_before_it() -> None:
    """Ten thousand savepoints: looking through the list at each would take a minute."""
    began = time.process_time()
    with pytest.raises(LookupError), transaction.atomic():
        for number in range(10_000):
            # What a savepoint does to Django's bookkeeping, without the statements.
            connection.savepoint_ids.append(f"s{number}")
            wake.notify_on_commit("default")
            connection.savepoint_ids.pop()
        assert len(connection.run_on_commit) == 10_000
        raise LookupError
    assert time.process_time() - began < 5


def test_hooks_of_the_application_in_between_change_nothing(woken: list[str]) -> None:
    ran: list[int] = []
    with transaction.atomic():
        for number in range(20):
            transaction.on_commit(partial(ran.append, number))
            emit_event("thing.done")
            with rolled_back():
                emit_event("thing.gone")
        assert len(connection.run_on_commit) == 21
    assert (woken, ran) == (["default"], list(range(20)))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_nested_and_rolled_back_events_that_stay_wake_once(seed: int, woken: list[str]) -> None:
    """Random trees of savepoints, emits and rollbacks, against the rule itself: stored means woken."""
    chance = random.Random(seed)

    def grow(depth: int) -> None:
        for _ in range(chance.randint(0, 3)):
            step = chance.random()
            if step < 0.45 or depth > 4:
                emit_event("thing.done")
            else:
                with transaction.atomic(savepoint=chance.random() < 0.9):
                    grow(depth + 1)
                    transaction.set_rollback(connection.needs_rollback or chance.random() < 0.4)

    try:
        with transaction.atomic():
            grow(0)
            emitted = OutboxEvent.objects.count()
            transaction.set_rollback(chance.random() < 0.1)
    except transaction.TransactionManagementError:
        emitted = 0
    stored = OutboxEvent.objects.count()
    assert woken == ["default"] * bool(stored)
    assert stored in {0, emitted}
