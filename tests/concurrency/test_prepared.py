"""
Prepared statements, and what may become of them between two uses.

A pooler in transaction mode gives a client another session now and then: one on which its
names are missing, or on which another process prepared the same. Both are made here with
the client's own session.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_outbox import lease as engine
from django_outbox.events import EVENTS
from django_outbox.lease import prepared
from django_outbox.models import OutboxEvent
from django_outbox.retry import Schedule
from tests.conftest import RawConnect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres]

USING = "default"
SCHEDULE = Schedule(max_attempts=3, base=0, cap=0, replay_every=None, replay_for=None)
TABLE = OutboxEvent._meta.db_table


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    prepared._losses.clear()
    connection.close()
    yield
    prepared._losses.clear()
    connection.close()


def insert(count: int = 1) -> list[UUID]:
    rows = [
        engine.NewRow(id=engine.new_id(), type="thing.done", payload="{}", deliveries='{"one": null}')
        for _ in range(count)
    ]
    with transaction.atomic():
        return engine.insert_events(rows, using=USING)


def one_round(claimer: engine.Claimer) -> list[str]:
    """Insert a row, claim it, ask for the next and settle it; return the words its statements began with."""
    (id_,) = insert()
    with CaptureQueriesContext(connection) as queries:
        (lease,) = claimer.claim(500, lease_seconds=60)
        assert lease.id == id_
        assert engine.next_due_seconds(EVENTS, using=USING) == pytest.approx(60, abs=5)
        settled = engine.Settled(lease, engine.Done(), delivered={"one": "2026-01-01T00:00:00.000Z"})
        assert engine.settle([settled], schedule=SCHEDULE, using=USING) == {settled.lease: "done"}
    return [query["sql"].split()[0] for query in queries.captured_queries]


def new_claimer() -> engine.Claimer:
    return engine.Claimer(EVENTS, holder="relay-1", using=USING)


def test_a_statement_is_prepared_at_its_second_use() -> None:
    claimer = new_claimer()
    assert one_round(claimer) == ["WITH", "SELECT", "WITH"]
    # Pending and waiting take turns, so the next claim is another statement.
    assert one_round(claimer) == ["WITH", "PREPARE", "EXECUTE", "PREPARE", "EXECUTE"]
    assert one_round(claimer) == ["PREPARE", "EXECUTE", "EXECUTE", "EXECUTE"]
    assert one_round(claimer) == ["PREPARE", "EXECUTE", "EXECUTE", "EXECUTE"]
    assert one_round(claimer) == ["EXECUTE"] * 3


def test_a_statement_is_planned_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    claimer = new_claimer()
    for _ in range(4):
        one_round(claimer)
    monkeypatch.setattr(prepared, "PLAN_SECONDS", 0.0)
    assert one_round(claimer) == ["DEALLOCATE", "WITH", "DEALLOCATE", "SELECT", "DEALLOCATE", "WITH"]


def test_nothing_is_prepared_inside_a_transaction() -> None:
    claimer = new_claimer()
    with transaction.atomic():
        for _ in range(4):
            assert not {"PREPARE", "EXECUTE"} & set(one_round(claimer))


def test_statements_that_are_missing_are_sent_as_text_and_soon_no_more_are_prepared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scenario 11."""
    claimer = new_claimer()
    with caplog.at_level(logging.INFO):
        for _ in range(12):
            one_round(claimer)
            with connection.cursor() as cursor:
                cursor.execute("DEALLOCATE ALL")
    assert one_round(claimer) == ["WITH", "SELECT", "WITH"]
    assert caplog.text.count("sessions change between statements") == 1
    assert OutboxEvent.objects.filter(status="done").count() == 13


def test_a_statement_that_another_process_prepared_on_this_session_is_ours_too() -> None:
    claimer = new_claimer()
    for _ in range(4):
        one_round(claimer)
    prepared._uses.clear()
    for _ in range(4):
        one_round(claimer)
    assert one_round(claimer) == ["EXECUTE"] * 3
    assert not prepared._losses


@contextmanager
def _altered(session: Any) -> Iterator[None]:
    session.execute(f"ALTER TABLE {TABLE} ALTER COLUMN aggregate_id TYPE text")
    try:
        yield
    finally:
        session.execute(f"ALTER TABLE {TABLE} ALTER COLUMN aggregate_id TYPE varchar(255)")


def test_a_migration_under_a_running_relay_does_not_break_its_statements(raw_connect: RawConnect) -> None:
    """Scenario 63: a column is added, another changes its type."""
    claimer = new_claimer()
    session = raw_connect()
    for _ in range(4):
        one_round(claimer)
    session.execute(f"ALTER TABLE {TABLE} ADD COLUMN extra text")
    try:
        assert one_round(claimer) == ["EXECUTE"] * 3
    finally:
        session.execute(f"ALTER TABLE {TABLE} DROP COLUMN extra")
    with _altered(session):
        for _ in range(5):
            one_round(claimer)
    for _ in range(5):
        one_round(claimer)
    assert not prepared._losses


@pytest.mark.parametrize("limit", [50, 500])
def test_a_plan_for_any_parameters_reads_no_whole_table(raw_connect: RawConnect, limit: int) -> None:
    """20,000 rows pending, and the planner knows it; the claims come after one another, as a relay's do."""
    session = raw_connect()
    insert(20_000)
    session.execute(f"VACUUM ANALYZE {TABLE}")
    claimer = new_claimer()
    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        for _ in range(16):
            claimer.more = False  # else it would not use what is prepared
            assert len(claimer.claim(limit, lease_seconds=60)) == limit
    for sql, params in statements[-2:]:
        assert sql.startswith("EXECUTE")
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
            explained = cursor.fetchone()[0]
        assert "Seq Scan" not in json.dumps(explained), explained
