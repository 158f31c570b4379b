"""
What a handler does to its thread and its connection ends with it.

One handler thread, so that the next handler runs where the last one left its traces;
events are claimed in the order of their emission.
"""

from __future__ import annotations

import contextvars
import decimal
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.utils import timezone, translation

from django_outbox import Event, emit_event, on_event
from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import RunningRelay, running_relay
from tests.testapp.models import Effect, Note

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def outbox(settings: Any, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    settings.OUTBOX = {
        "POLL_SECONDS": 60,
        "EVENTS": {"MAX_ATTEMPTS": 1, "REPLAY_EVERY_SECONDS": None, "CONCURRENCY": 1},
    }
    with caplog.at_level(logging.CRITICAL, logger="django_outbox.events"):
        yield


@pytest.fixture
def findings() -> list[Any]:
    """What the handlers saw."""
    return []


def emit(*types: str) -> None:
    with transaction.atomic():
        for type_ in types:
            emit_event(type_)


def check_state(findings: list[Any], note: Callable[[], Any]) -> None:
    """Register a handler for ``thing.checked`` that appends what ``note`` returns."""
    on_event("thing.checked", name="check")(lambda event: findings.append(note()))


def play(*types: str) -> dict[str, OutboxEvent]:
    """Deliver one event of each type in one thread, and return them by type."""
    emit(*types)
    running = RunningRelay(mode="drain", threads=1)
    assert running.end() == 0
    rows = {row.type: row for row in OutboxEvent.objects.exclude(type="outbox.event.dead")}
    assert len(rows) == len(set(types))
    return rows


def test_handlers_that_break_their_transaction_cost_nobody_else_anything() -> None:
    """Scenario 15: A swallows an IntegrityError and queries on, B leaves autocommit off, then five normal events."""
    Effect.objects.create(key="taken", handler="x")
    seen = Counter[str]()

    @on_event("thing.broken", name="a")
    def a(event: Event) -> None:
        with transaction.atomic():
            # Not in a block of its own, so what fails is the whole transaction.
            try:
                Effect.objects.create(key="taken", handler="a")
            except IntegrityError:
                seen["swallowed"] += 1
            Effect.objects.count()
            Note.objects.create(text="after all")

    @on_event("thing.left-open", name="b")
    def b(event: Event) -> None:
        connection.set_autocommit(False)
        Note.objects.create(text="uncommitted")

    @on_event("thing.normal", name="normal")
    def normal(event: Event) -> None:
        assert connection.get_autocommit()
        assert not connection.in_atomic_block
        with transaction.atomic():
            Effect.objects.create(key=str(event.id), handler="normal")

    emit("thing.broken", "thing.left-open", *["thing.normal"] * 5)
    with running_relay(threads=1) as running:
        running.wait_for(dead=2, done=5)
    broken, left_open = (OutboxEvent.objects.get(type=name) for name in ("thing.broken", "thing.left-open"))
    assert "TransactionManagementError" in broken.last_error
    assert "autocommit" in left_open.last_error
    assert seen == {"swallowed": 1}
    assert Effect.objects.filter(handler="normal").count() == 5
    assert not Note.objects.exists()


def _leave_autocommit_off() -> None:
    transaction.set_autocommit(False)
    Note.objects.create(text="x")


def _enter_atomic_and_stay() -> None:
    transaction.atomic().__enter__()
    Note.objects.create(text="x")


def _begin_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
    Note.objects.create(text="x")


def _enter_atomic_twice() -> None:
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()
    Note.objects.create(text="x")


leftovers = pytest.mark.parametrize(
    "leave", [_leave_autocommit_off, _enter_atomic_and_stay, _begin_by_hand, _enter_atomic_twice]
)


@leftovers
@pytest.mark.parametrize("raises", [False, True])
def test_open_work_is_rolled_back_and_never_counts_as_delivered(
    leave: Callable[[], None], raises: bool, findings: list[Any]
) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        leave()
        if raises:
            raise LookupError("its own error")

    check_state(
        findings,
        lambda: (
            Note.objects.count(),
            connection.get_autocommit(),
            connection.in_atomic_block,
            Note.objects.create(text="y").text,
        ),
    )
    rows = play("thing.messy", "thing.checked")
    assert rows["thing.messy"].status == "dead"
    assert ("its own error" if raises else "rolled back") in rows["thing.messy"].last_error
    assert rows["thing.messy"].deliveries == {"messy": None}
    assert findings == [(0, True, False, "y")]
    assert [note.text for note in Note.objects.all()] == ["y"]


def test_a_broken_connection_of_another_alias_is_tidied_too(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        transaction.atomic(using="orders").__enter__()
        with connections["orders"].cursor() as cursor:
            cursor.execute("SELECT 1")

    check_state(findings, lambda: connections["orders"].in_atomic_block)
    rows = play("thing.messy", "thing.checked")
    assert "'orders'" in rows["thing.messy"].last_error
    assert findings == [False]


def test_a_closed_connection_is_opened_anew(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        connection.ensure_connection()
        connection.connection.close()  # behind Django's back

    check_state(findings, Note.objects.count)
    rows = play("thing.messy", "thing.checked")
    assert rows["thing.messy"].status == "done"
    assert findings == [0]


@pytest.mark.postgres
@pytest.mark.parametrize(
    "statement",
    [
        "SET statement_timeout = '1234ms'",
        "  set session statement_timeout to 1234",
        "-- a comment first\nSET statement_timeout = 1234",
        "/* and one */ SET statement_timeout = 1234",
        "SELECT set_config('statement_timeout', '1234', false)",
        "SELECT 1; SET statement_timeout = 1234",
    ],
)
def test_a_session_setting_ends_with_its_handler(statement: str, findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    check_state(findings, lambda: _scalar("SHOW statement_timeout"))
    play("thing.messy", "thing.checked")
    assert findings == ["0"]


@pytest.mark.postgres
def test_a_session_setting_made_through_composed_sql_ends_too(findings: list[Any]) -> None:
    from psycopg import sql

    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier("elsewhere")))

    check_state(findings, lambda: _scalar("SHOW search_path"))
    play("thing.messy", "thing.checked")
    assert findings == ['"$user", public']


@pytest.mark.postgres
def test_a_session_lock_ends_with_its_handler(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        _scalar("SELECT pg_advisory_lock(4711)")

    check_state(findings, lambda: _scalar("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
    play("thing.messy", "thing.checked")
    assert findings == [0]


@pytest.mark.postgres
def test_a_setting_of_a_transaction_ends_with_it_and_keeps_the_connection(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        with transaction.atomic():
            findings.append(_scalar("SELECT pg_backend_pid()"))

    check_state(findings, lambda: _scalar("SELECT pg_backend_pid()"))
    play("thing.messy", "thing.checked")
    assert findings[0] == findings[1]


@pytest.mark.postgres
def test_an_emit_does_not_cost_a_handler_its_connection(findings: list[Any]) -> None:
    """The wake-up after commit sets a parameter of its own transaction, which ends with it."""

    @on_event("thing.checked", name="check")
    def check(event: Event) -> None:
        with transaction.atomic():
            findings.append(_scalar("SELECT pg_backend_pid()"))
            emit_event("thing.followed")

    on_event("thing.followed", name="follow")(lambda event: None)
    emit(*["thing.checked"] * 3)
    assert RunningRelay(mode="drain", threads=1).end() == 0
    assert len(findings) == 3
    assert len(set(findings)) == 1


@pytest.mark.sqlite
def test_a_pragma_ends_with_its_handler(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA foreign_keys = OFF")

    check_state(findings, lambda: _scalar("PRAGMA foreign_keys"))
    play("thing.messy", "thing.checked")
    assert findings == [1]


def _scalar(statement: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def test_a_language_and_a_time_zone_end_with_their_handler(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        translation.activate("de")
        timezone.activate(ZoneInfo("Asia/Kolkata"))

    check_state(findings, lambda: (translation.get_language(), timezone.get_current_timezone_name()))
    play("thing.messy", "thing.checked")
    assert findings == [("en-us", "UTC")]


def test_the_second_handler_of_one_event_is_clean_too(findings: list[Any]) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    @on_event("thing.messy", name="messy")
    def messy(event: Event) -> None:
        variable.set("set")
        translation.activate("de")
        decimal.getcontext().prec = 3
        event.payload["changed"] = True
        event.headers["changed"] = True

    @on_event("thing.messy", name="next")
    def following(event: Event) -> None:
        findings.append(
            (variable.get(), translation.get_language(), decimal.getcontext().prec, event.payload, event.headers)
        )

    play("thing.messy")
    assert findings == [("unset", "en-us", 28, {}, {})]


async def _activate() -> None:
    translation.activate("fr")


def test_an_async_handler_leaves_nothing_behind_either(findings: list[Any]) -> None:
    @on_event("thing.messy", name="messy")
    async def messy(event: Event) -> None:
        await _activate()
        await Note.objects.acreate(text="x")

    check_state(findings, lambda: (translation.get_language(), connection.in_atomic_block, Note.objects.count()))
    rows = play("thing.messy", "thing.checked")
    assert rows["thing.messy"].status == "done"
    assert findings == [("en-us", False, 1)]


def test_the_query_log_is_cleared_after_every_handler(findings: list[Any], settings: Any) -> None:
    """Scenario 28: DEBUG keeps every statement of a thread, and a relay's threads live long."""
    settings.DEBUG = True

    @on_event("thing.checked", name="check")
    def check(event: Event) -> None:
        for _ in range(5):
            Note.objects.count()
        findings.append(len(connection.queries_log))

    emit(*["thing.checked"] * 10)
    with running_relay(threads=1) as running:
        running.wait_for(done=10)
        # The relay's own threads keep no log either.
        running.wait_until_idle()
    assert findings == [5] * 10


def test_an_emit_in_a_handler_inherits_and_the_next_handler_does_not() -> None:
    @on_event("thing.first", name="first")
    def first(event: Event) -> None:
        with transaction.atomic():
            emit_event("thing.followed")

    @on_event("thing.second", name="second")
    def second(event: Event) -> None:
        with transaction.atomic():
            emit_event("thing.followed-too")

    with transaction.atomic():
        cause = emit_event("thing.first", request_id="r-1", organization_id="o-1")
        other = emit_event("thing.second")
    with running_relay(threads=1) as running:
        running.wait_for(done=2)
    followed = OutboxEvent.objects.get(type="thing.followed")
    assert (followed.causation_id, followed.request_id, followed.organization_id) == (cause, "r-1", "o-1")
    followed = OutboxEvent.objects.get(type="thing.followed-too")
    assert (followed.causation_id, followed.request_id, followed.organization_id) == (other, "", "")


@contextmanager
def _counting_connections() -> Iterator[list[Any]]:
    from django.db.backends.signals import connection_created

    made: list[Any] = []

    def note(connection: Any, **_: Any) -> None:
        made.append(connection.alias)

    connection_created.connect(note)
    try:
        yield made
    finally:
        connection_created.disconnect(note)


def test_handler_threads_keep_their_connection_between_rows(settings: Any) -> None:
    """``CONN_MAX_AGE`` is 0 here, and a connection for each row would be the price of it."""
    on_event("thing.checked", name="check")(lambda event: Note.objects.count())
    emit(*["thing.checked"] * 20)
    with _counting_connections() as made, running_relay(threads=1) as running:
        running.wait_for(done=20)
    assert len(made) <= 6


@pytest.mark.postgres
def test_a_connection_that_the_server_ended_between_rows_costs_no_attempt(
    findings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 10: every session but the test's own is ended while the relay is idle."""
    from django_outbox.relay import connections as handler_connections

    monkeypatch.setattr(handler_connections, "CONNECTION_TRUST_SECONDS", 0.0)
    check_state(findings, Note.objects.count)
    with running_relay(threads=2) as running:
        emit(*["thing.checked"] * 4)
        running.wait_for(done=4)
        running.wait_until_idle()
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        emit(*["thing.checked"] * 5)
        running.wait_for(done=9, seconds=15)
    assert len(findings) == 9
    assert set(OutboxEvent.objects.values_list("status", "attempts")) == {("done", 1)}


def test_a_database_error_of_the_handler_is_the_handlers() -> None:
    @on_event("thing.broken", name="broken")
    def broken(event: Event) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    rows = play("thing.broken")
    assert "no_such_table" in rows["thing.broken"].last_error
    assert rows["thing.broken"].status == "dead"
