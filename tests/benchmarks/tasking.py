"""Workloads of the task queue, beside django-tasks-db on the same database: drain, enqueue, and a deferred flood."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from django.db import connection, transaction
from django_tasks_db.management.commands.db_worker import Worker
from django_tasks_db.models import DBTaskResult

from django_outbox.models import OutboxTask
from django_outbox.tasks import Call, enqueue_many
from tests.benchmarks.harness import Bench, Line, RelayProcess, checkpoint, compared
from tests.benchmarks.tasks import PAYLOAD, nothing, order, reference_nothing, reference_order

TASKS_TABLE = OutboxTask._meta.db_table
REFERENCE_TABLE = DBTaskResult._meta.db_table


def _empty() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TASKS_TABLE}, {REFERENCE_TABLE}")
    checkpoint()


def _analyze(table: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {table}")


def _load(count: int) -> None:
    for first in range(0, count, 1_000):
        enqueue_many([Call(nothing, [number]) for number in range(first, min(first + 1_000, count))])
    _analyze(TASKS_TABLE)


def _drain_ours(count: int) -> float:
    """Return the tasks a second of one relay process with its defaults."""
    with RelayProcess(mode="drain") as relay:
        relay.go()
        figures = relay.end()
    if figures.counts.get("done", 0) != count:
        raise RuntimeError(f"{count} tasks were enqueued, and these done: {figures.counts}")
    return count / figures.seconds


def _drain_reference(count: int) -> float:
    """Return the tasks a second of django-tasks-db's worker, which is started already."""
    for number in range(count):
        reference_nothing.enqueue(number)
    _analyze(REFERENCE_TABLE)
    worker = Worker(
        queue_names=["*"],
        interval=0,
        batch=True,
        backend_name="reference",
        startup_delay=False,
        max_tasks=None,
        worker_id="bench",
        excluded_queue_names=[],
    )
    began = time.perf_counter()
    worker.run()
    seconds = time.perf_counter() - began
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {REFERENCE_TABLE} WHERE status = 'SUCCESSFUL'")
        if (done := cursor.fetchone()[0]) != count:
            raise RuntimeError(f"{count} tasks were enqueued on the reference, and {done} done")
    return count / seconds


def tasks(bench: Bench) -> Iterator[Line]:
    """Drain no-op tasks with one process, ours and the reference's by turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in bench.each_round("tasks"):
        _empty()
        count = bench.size(30_000, least=1_000)
        _load(count)
        ours.append(_drain_ours(count))
        theirs.append(_drain_reference(bench.size(2_000, least=200)))
    _empty()
    yield compared("tasks: drain; reference django-tasks-db", ours, theirs, unit="tasks/s", at_least=10)


def _transact(enqueue: Callable[[], Any] | None) -> float:
    began = time.perf_counter()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO bench_order (customer, total) VALUES (%s, %s)", ["Ada", "12.50"])
        if enqueue is not None:
            enqueue()
    return time.perf_counter() - began


def task_enqueue(bench: Bench) -> Iterator[Line]:
    """Time what a task adds to a transaction, ours and the reference's by turns, NOTIFY included."""
    kinds: dict[str, Callable[[], Any] | None] = {
        "none": None,
        "ours": lambda: order.enqueue(1, about=PAYLOAD),
        "theirs": lambda: reference_order.enqueue(1, about=PAYLOAD),
    }
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS bench_order")
        cursor.execute("CREATE TABLE bench_order (id bigserial PRIMARY KEY, customer text, total numeric)")
    added: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in bench.each_round("task_enqueue"):
        _empty()
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(bench.size(1_000, least=50)):
            for kind, call in kinds.items():
                taken[kind].append(_transact(call))
        for kind, times in taken.items():
            added[kind].append((median(times) - median(taken["none"])) * 1e6)
    _empty()
    yield compared(
        "task_enqueue: time a task adds; reference django-tasks-db",
        added["ours"],
        added["theirs"],
        unit="us",
        at_most=1.0,
    )


_FLOOD = f"""
    INSERT INTO {TASKS_TABLE} (id, task_path, priority, payload, errors, worker_ids, created_at, status, due_at,
        not_before)
    SELECT
        (lpad(to_hex(1700000000000 + n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid,
        'tests.benchmarks.tasks.nothing', 100, '{{"args": [1], "kwargs": {{}}}}', '[]', '[]', clock_timestamp(),
        'waiting', later, later
    FROM generate_series(1, %s) AS n,
        LATERAL (SELECT clock_timestamp() + interval '1 day' * (n %% 30 + 1) AS later) AS t
"""


def task_deferred(bench: Bench) -> Iterator[Line]:
    """Drain beside a hundred thousand deferred tasks of the highest priority, and without them."""
    alone: list[float] = []
    flooded: list[float] = []
    for _ in bench.each_round("task_deferred"):
        count = bench.size(30_000, least=1_000)
        _empty()
        _load(count)
        alone.append(_drain_ours(count))
        _empty()
        with connection.cursor() as cursor:
            cursor.execute(_FLOOD, [bench.size(100_000)])
        _load(count)
        flooded.append(_drain_ours(count))
    _empty()
    yield compared(
        f"task_deferred: beside {bench.size(100_000):,} deferred tasks; reference none",
        flooded,
        alone,
        unit="tasks/s",
        at_least=0.8,
    )
