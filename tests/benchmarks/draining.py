"""Workloads of the relay under load: how fast it empties a table, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from django.db import connections

from tests.benchmarks.harness import (
    TABLE,
    Bench,
    Figures,
    Line,
    RelayProcess,
    absolute,
    compared,
    load,
    progress,
    raw_connect,
)
from tests.benchmarks.reference import NarrowTable


@dataclass(frozen=True)
class _Drained:
    rate: float
    statements_per_event: float
    cpu_us_per_event: float
    peak_mb: float


def _drain(
    count: int,
    *,
    type_: str = "bench.one",
    database: str = "default",
    processes: int = 1,
    threads: int | None = None,
    empty: bool = True,
) -> _Drained:
    """Emit so many events, and let relays that are started already empty the table."""
    load(count, type_=type_, database=database, empty=empty)
    with ExitStack() as stack:
        relays = [
            stack.enter_context(RelayProcess(mode="drain", database=database, threads=threads))
            for _ in range(processes)
        ]
        for relay in relays:
            relay.go()
        figures: list[Figures] = [relay.end() for relay in relays]
    done = sum(each.counts.get("done", 0) for each in figures)
    if done != count:
        raise RuntimeError(f"{count} events were emitted and {done} delivered: {[each.counts for each in figures]}")
    return _Drained(
        rate=count / max(each.seconds for each in figures),
        statements_per_event=sum(each.statements for each in figures) / count,
        cpu_us_per_event=sum(each.cpu_seconds for each in figures) / count * 1e6,
        peak_mb=max(each.peak_mb for each in figures),
    )


def drain(bench: Bench) -> Iterator[Line]:
    """Drain with one process and one no-op handler, and the narrow table by hand."""
    count = bench.size(50_000, least=1_000)
    ours: list[_Drained] = []
    reference: list[float] = []
    with raw_connect() as session, NarrowTable(session) as narrow:
        for _ in bench.each_round("drain"):
            ours.append(_drain(count))
            narrow.fill(count)
            reference.append(count / narrow.drain())
    yield compared("drain", [each.rate for each in ours], reference, unit="events/s", at_least=0.4)
    statements = median(each.statements_per_event for each in ours)
    yield absolute(
        "drain: statements per event", statements, shown="{:.4f}", target="<= 0.03", reached=statements <= 0.03
    )
    peak = max(each.peak_mb for each in ours)
    yield absolute("drain: peak memory", peak, shown="{:.0f} MB", target="<= 90 MB", reached=peak <= 90)
    yield Line(
        workload="drain: CPU per event, start of the process included",
        ours=f"{median(each.cpu_us_per_event for each in ours):.0f} us",
    )


def processes(bench: Bench) -> Iterator[Line]:
    """Drain with two processes, and with one."""
    count = bench.size(50_000, least=1_000)
    one: list[float] = []
    two: list[float] = []
    for _ in bench.each_round("processes"):
        one.append(_drain(count).rate)
        two.append(_drain(count, processes=2).rate)
    yield compared("processes: two; reference one", two, one, unit="events/s", at_least=1.3)


def sqlite(bench: Bench) -> Iterator[Line]:
    """Drain a SQLite file."""
    count = bench.size(50_000, least=1_000)
    rate = median(_drain(count, database="sqlite").rate for _ in bench.each_round("sqlite"))
    yield absolute("sqlite: drain", rate, shown="{:,.0f} events/s", target=">= 5,000/s", reached=rate >= 5_000)


def fanout(bench: Bench) -> Iterator[Line]:
    """Drain events of three no-op handlers each, and of one."""
    count = bench.size(50_000, least=1_000)
    one: list[float] = []
    three: list[float] = []
    for _ in bench.each_round("fanout"):
        one.append(_drain(count).rate)
        three.append(_drain(count, type_="bench.three").rate)
    yield compared("fanout: three handlers; reference one", three, one, unit="events/s", at_least=0.75)


def audit(bench: Bench) -> Iterator[Line]:
    """Drain events that are entered in the audit log, one process."""
    count = bench.size(20_000, least=1_000)
    rate = median(_drain(count, type_="bench.audit").rate for _ in bench.each_round("audit"))
    yield absolute("audit: entries", rate, shown="{:,.0f} entries/s", target=">= 1,500/s", reached=rate >= 1_500)


def io(bench: Bench) -> Iterator[Line]:
    """Drain events whose handler waits 10 ms, with 50 threads: 5,000 a second at the very best."""
    count = bench.size(25_000, least=1_000)
    rates = [_drain(count, type_="bench.sleep", threads=50).rate for _ in bench.each_round("io")]
    yield compared("io: 10 ms a handler, 50 threads", rates, [5_000.0] * len(rates), unit="events/s", at_least=0.9)


_GROW = f"""
    INSERT INTO {TABLE} (id, type, payload, deliveries, headers, failures, occurred_at, created_at,
        aggregate_type, aggregate_id, organization_id, request_id, status, attempts, due_at, dead_at, finished_at,
        last_error)
    SELECT
        (lpad(to_hex(1700000000000 + n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid,
        'bench.one', jsonb_build_object('number', n, 'customer', 'Ada'),
        CASE kind WHEN 'done' THEN '{{"first": "2026-01-01T00:00:00.000Z"}}'::jsonb
            WHEN 'parked' THEN '{{"first": "2026-01-01T00:00:00.000Z", "gone": null}}' ELSE '{{"first": null}}' END,
        '{{}}',
        CASE kind WHEN 'done' THEN '{{}}'::jsonb
            WHEN 'parked' THEN '{{"gone": {{"error": "no such handler", "parked_at": "2026-01-01T00:00:00.000Z"}}}}'
            ELSE '{{"first": {{"error": "ValueError: no", "at": "2026-01-01T00:00:00.000Z"}}}}' END,
        moment, moment, '', '', '', '',
        CASE kind WHEN 'parked' THEN 'waiting' ELSE kind END,
        CASE kind WHEN 'dead' THEN 8 ELSE 1 END,
        CASE WHEN kind <> 'done' THEN clock_timestamp() + interval '6 hours' + n * interval '1 millisecond' END,
        CASE kind WHEN 'dead' THEN moment END,
        CASE kind WHEN 'done' THEN moment END,
        CASE kind WHEN 'done' THEN '' ELSE 'ValueError: no' END
    FROM generate_series(%s, %s) AS n,
        LATERAL (
            SELECT %s AS kind, clock_timestamp() - interval '2 days' + n * interval '10 milliseconds' AS moment
        ) AS k
"""


def growth(bench: Bench) -> Iterator[Line]:
    """Drain beside finished, dead, delayed and parked rows by the hundred thousand, and without them."""
    count = bench.size(50_000, least=1_000)
    others = {"done": bench.size(1_000_000), **dict.fromkeys(("dead", "waiting", "parked"), bench.size(100_000))}
    progress("growth: loading")
    with connections["grown"].cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLE}")
        first = 1
        for kind, number in others.items():
            cursor.execute(_GROW, [first, first + number - 1, kind])
            first += number
        cursor.execute(f"VACUUM (ANALYZE) {TABLE}")
    empty: list[float] = []
    grown: list[float] = []
    for _ in bench.each_round("growth"):
        empty.append(_drain(count).rate)
        grown.append(_drain(count, database="grown", empty=False).rate)
    yield compared(
        f"growth: beside {sum(others.values()):,} rows; reference none", grown, empty, unit="events/s", at_least=0.92
    )


def memory(bench: Bench) -> Iterator[Line]:
    """Feed one relay a million events, and see whether its peak still grows after the first fifth."""
    total = bench.size(1_000_000, least=25_000)
    chunk = total // 20
    deadline = time.monotonic() + bench.limit_seconds
    peaks: list[float] = []
    fed = 0
    load(0)
    with RelayProcess(mode="serve") as relay:
        relay.go()
        while fed < total and time.monotonic() < deadline:
            progress(f"memory: {fed:,} of {total:,} events")
            load(chunk, empty=False)
            fed += chunk
            while (figures := relay.look()).counts.get("done", 0) < fed:
                time.sleep(0.05)
            peaks.append(figures.peak_mb)
            # The table must not grow without end either; nothing is in flight now.
            load(0)
        relay.stop()
    if fed < total:
        bench.notes.append(f"memory: {fed:,} of {total:,} events in {bench.limit_seconds:g} s")
    early = peaks[max(0, len(peaks) // 5 - 1)]
    growth_mb = peaks[-1] - early
    yield Line(
        workload=f"memory: peak after {fed:,} events; reference after a fifth",
        ours=f"{peaks[-1]:.1f} MB",
        reference=f"{early:.1f} MB",
        ratio=peaks[-1] / early,
        target="flat (+2 MB)",
        reached=growth_mb <= 2,
    )
