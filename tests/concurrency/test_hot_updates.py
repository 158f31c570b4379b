"""
What a claim costs PostgreSQL: no index is touched, and no row is read that is not due.

Committed data, since statistics and plans are of what is committed. The updates run on
a connection that is closed afterwards: a session reports what it did when it ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.events import EVENTS
from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import Worker, eventually
from tests.conftest import RawConnect

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

USING = "default"
TABLE = OutboxEvent._meta.db_table


def insert(count: int) -> None:
    payload = json.dumps({"user_id": 1, "text": "x" * 200})
    rows = [
        engine.NewRow(id=engine.new_id(), type="thing.done", payload=payload, deliveries='{"one": null}')
        for _ in range(count)
    ]
    with transaction.atomic():
        engine.insert_events(rows, using=USING)


def updates(session: psycopg.Connection[Any]) -> tuple[int, int]:
    """Return how many rows of the table were ever updated, and how many of them as HOT updates."""
    session.execute("SELECT pg_stat_clear_snapshot()")
    found = session.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = %s::regclass", [TABLE]
    ).fetchone()
    assert found is not None
    return found[0], found[1]


def updates_of(work: Callable[[], None], session: psycopg.Connection[Any], at_least: int) -> tuple[int, int]:
    before = updates(session)
    Worker(work).result()

    def counted() -> tuple[int, int] | None:
        now = updates(session)
        return (now[0] - before[0], now[1] - before[1]) if now[0] - before[0] >= at_least else None

    result: tuple[int, int] = eventually(counted)
    return result


def test_claims_and_renewals_are_hot_updates(raw_connect: RawConnect) -> None:
    session = raw_connect()
    insert(300)

    def work() -> None:
        claimer = engine.Claimer(EVENTS, holder="relay-1", using=USING)
        for _ in range(6):
            leases = claimer.claim(50, lease_seconds=60)
            assert len(leases) == 50
            engine.renew({lease: {} for lease in leases}, using=USING)

    assert updates_of(work, session, 600) == (600, 600)


def test_a_release_and_a_mark_are_hot_updates(raw_connect: RawConnect) -> None:
    session = raw_connect()
    insert(40)

    def work() -> None:
        leases = engine.Claimer(EVENTS, holder="relay-1", using=USING).claim(50, lease_seconds=60)
        for lease in leases[:20]:
            engine.record(lease, using=USING, lost_leases=1)
        engine.release(leases, using=USING)

    assert updates_of(work, session, 100) == (100, 100)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _plan_of(work: Callable[[], object]) -> dict[str, Any]:
    """Run what sends one statement that locks, then explain that very statement, and take both back."""
    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append((sql, params))
        return execute(sql, params, many, context)

    with transaction.atomic():
        with connection.execute_wrapper(note):
            with transaction.atomic():
                assert work()
                transaction.set_rollback(True)
            (locking,) = [each for each in statements if "SKIP LOCKED" in each[0]]
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {locking[0]}", locking[1])
            explained = cursor.fetchone()[0]
        transaction.set_rollback(True)
    plan: dict[str, Any] = (explained if isinstance(explained, list) else json.loads(explained))[0]["Plan"]
    return plan


def _claim(limit: int) -> list[engine.Lease]:
    return engine.Claimer(EVENTS, holder="relay-1", using=USING).claim(limit, lease_seconds=60)


def _fill(session: psycopg.Connection[Any], *, done: int, dead: int, waiting: int) -> None:
    # Rows that earlier tests deleted would be met in the indexes.
    session.execute(f"TRUNCATE {TABLE}")
    session.execute(
        f"""
        INSERT INTO {TABLE} (id, status, type, payload, occurred_at, headers, deliveries, failures, created_at, due_at,
            finished_at, dead_at)
        SELECT gen_random_uuid(), s.status, 'thing.done', '{{}}', now(), '{{}}', '{{"one": null}}', '{{}}',
            now() - interval '1 day',
            CASE s.status WHEN 'waiting' THEN now() + interval '1 day'
                WHEN 'dead' THEN CASE WHEN n %% 2 = 0 THEN now() + interval '1 day' END END,
            CASE s.status WHEN 'done' THEN now() END, CASE s.status WHEN 'dead' THEN now() END
        FROM (VALUES ('done', %s), ('dead', %s), ('waiting', %s)) AS s(status, size), generate_series(1, s.size) AS n
        """,
        [done, dead, waiting],
    )


def test_a_claim_reads_due_rows_alone_through_the_partial_indexes(raw_connect: RawConnect) -> None:
    """Scenario 26: 50,000 done, 20,000 dead and 20,000 waiting for tomorrow; ten rows due."""
    session = raw_connect()
    _fill(session, done=50_000, dead=20_000, waiting=20_000)
    insert(10)
    for analyzed in (False, True):
        if analyzed:
            session.execute(f"VACUUM ANALYZE {TABLE}")
        plan = _plan_of(lambda: _claim(80))
        nodes = list(_nodes(plan))
        scans = [node for node in nodes if node.get("Relation Name") == TABLE]
        assert {node["Node Type"] for node in scans} <= {"Index Scan", "ModifyTable", "Bitmap Heap Scan"}
        indexes = {node["Index Name"] for node in nodes if "Index Name" in node}
        assert {"outbox_event_pending", "outbox_event_waiting", "outbox_event_replay"} <= indexes
        assert indexes - {"outbox_event_pending", "outbox_event_waiting", "outbox_event_replay"} <= {f"{TABLE}_pkey"}
        assert sum(node.get("Rows Removed by Filter", 0) * node["Actual Loops"] for node in scans) == 0
        # Ten rows, a handful of pages of each index, and the writing of ten new versions.
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 250, plan


def test_a_claim_from_a_long_backlog_looks_its_rows_up_by_their_ids(raw_connect: RawConnect) -> None:
    """
    20,000 rows pending, and the planner knows it.

    It cannot know how few of them a claim takes, and would read the whole table to join them.
    """
    session = raw_connect()
    insert(20_000)
    session.execute(f"VACUUM ANALYZE {TABLE}")
    plan = _plan_of(lambda: _claim(500))
    scans = [node for node in _nodes(plan) if node.get("Relation Name") == TABLE]
    assert {node["Node Type"] for node in scans} == {"Index Scan", "ModifyTable"}, plan
    assert (
        sum(node["Actual Rows"] * node["Actual Loops"] for node in scans if node["Node Type"] == "Index Scan") == 1_000
    )


def test_a_settle_in_a_small_table_looks_its_rows_up_by_their_ids(raw_connect: RawConnect) -> None:
    """
    3,000 rows, by whose statistics hardly any is leased, while half of them are.

    Joined as the planner likes, every leased row is compared with every outcome: 750,000
    comparisons for 500 outcomes, and 300 ms.
    """
    session = raw_connect()
    session.execute(f"TRUNCATE {TABLE}")
    insert(3_000)
    session.execute(f"VACUUM ANALYZE {TABLE}")
    leases = [lease for _ in range(3) for lease in _claim(500)]
    batch = [engine.Settled(lease, engine.Done(), {"one": "2026-01-01T00:00:00.000Z"}) for lease in leases[:500]]
    plan = _plan_of(lambda: engine.settle(batch, schedule=get_settings().events.schedule, using=USING))
    assert sum(node.get("Rows Removed by Join Filter", 0) for node in _nodes(plan)) == 0, plan
    assert sum(node.get("Rows Removed by Filter", 0) for node in _nodes(plan)) == 0, plan


def test_looking_for_the_next_due_time_reads_the_head_of_each_index(raw_connect: RawConnect) -> None:
    session = raw_connect()
    _fill(session, done=1_000, dead=5_000, waiting=5_000)
    session.execute(f"VACUUM ANALYZE {TABLE}")
    statements: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        assert engine.next_due_seconds(EVENTS, using=USING) == pytest.approx(86_400, abs=60)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements[0]}", [])
        explained = cursor.fetchone()[0]
    plan = (explained if isinstance(explained, list) else json.loads(explained))[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 40, plan
