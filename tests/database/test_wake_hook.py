"""The commit hook that wakes the relays: once per transaction, never in the way of the commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_outbox import NewEvent, emit_event, emit_events, on_event, wake
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain
from tests.conftest import RawConnect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _handler() -> None:
    on_event("thing.*", name="listener")(lambda event: None)


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the aliases whose relays were woken, in order."""
    calls: list[str] = []
    monkeypatch.setattr("django_outbox.wake.notify", calls.append)
    return calls


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
            savepoint = transaction.savepoint()
            emit_event("thing.gone")
            transaction.savepoint_rollback(savepoint)
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


def test_our_hook_never_raises_into_the_caller_and_hooks_after_it_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 65, the other way about."""

    def fail(alias: str) -> None:
        raise OSError("no wake today")

    monkeypatch.setattr("django_outbox.wake.notify", fail)
    ran: list[str] = []
    with caplog.at_level(logging.ERROR), transaction.atomic():
        emit_event("thing.done")
        transaction.on_commit(lambda: ran.append("after"))
    assert ran == ["after"]
    assert drain() == {"done": 1}


def test_a_database_that_refuses_the_wake_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL is asked to wake anybody")

    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "pg_notify" in sql:
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
    listener.execute(f"LISTEN {wake.CHANNEL}")
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        emit_event("thing.done", {"text": "😀" * 3_900})
        emit_event("thing.done", {"text": "x" * 200_000})
    (notice,) = list(listener.notifies(timeout=10, stop_after=1))
    assert (notice.channel, notice.payload) == (wake.CHANNEL, "")
    statements = [query["sql"] for query in queries]
    assert "pg_notify" in statements[-1]
    assert sum("pg_notify" in sql for sql in statements) == 1
    assert statements[-2].upper().startswith("COMMIT")
    with connection.cursor() as cursor:
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("on",)


@pytest.mark.sqlite
def test_on_sqlite_no_statement_follows_the_commit() -> None:
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        emit_event("thing.done")
    assert queries[-1]["sql"] == "COMMIT"


@pytest.mark.django_db(databases=["default", "orders"], transaction=True)
def test_a_relay_in_this_process_is_woken_for_its_own_alias() -> None:
    here: list[str] = []
    watchers = [wake.Watcher(alias, lambda alias=alias: here.append(alias)) for alias in ("default", "orders")]  # type: ignore[misc]
    for watcher in watchers:
        watcher.start()
    try:
        with transaction.atomic():
            emit_event("thing.done")
        with transaction.atomic(using="orders"):
            emit_event("thing.done", using="orders")
    finally:
        for watcher in watchers:
            watcher.stop()
    with transaction.atomic():
        emit_event("thing.done")
    assert here == ["default", "orders"]


def test_a_transaction_of_many_savepoints_keeps_its_hooks_in_bounds(woken: list[str]) -> None:
    """One savepoint for each row of an import, each with an event."""
    with transaction.atomic():
        for _ in range(50):
            with transaction.atomic():
                emit_event("thing.done")
                emit_event("thing.done")
        assert len(connections["default"].run_on_commit) <= 50
    assert woken == ["default"]
