"""Workloads of a relay with little to do: how soon it starts, and what it costs meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from django.apps import apps
from django.db import connection, transaction

from django_outbox import emit_event
from tests.benchmarks.harness import Bench, Line, RelayProcess, absolute, compared, load, progress, raw_connect
from tests.benchmarks.reference import Claiming, Listening, NarrowTable

PER_SECOND = 50


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def latency(bench: Bench) -> Iterator[Line]:
    """
    Emit 50 events a second to an idle relay, and as many rows with NOTIFY to psycopg, by turns.

    One psycopg listener only hears; the other also claims the row, which is the least that
    a queue in the database can do before a handler starts. All clocks run from the moment
    the commit has returned, to the start of the handler, the arrival of the notification,
    or that of the claimed row.
    """
    count = bench.size(20 * PER_SECOND, least=100)
    kinds = ("ours", "heard", "claimed")
    spread: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with (
        raw_connect() as session,
        NarrowTable(session) as narrow,
        raw_connect() as hears,
        raw_connect() as wakes,
        raw_connect() as claims,
    ):
        for _ in bench.each_round("latency"):
            load(0)
            listeners = {"heard": Listening(hears), "claimed": Claiming(wakes, claims)}
            committed: dict[str, dict[int, int]] = {kind: {} for kind in kinds}
            with RelayProcess(mode="serve") as relay:
                relay.go()
                _until(lambda: relay.look().statements >= 3)  # it listens, and found nothing
                began = time.monotonic()
                for number in range(count):
                    _sleep_until(began + number / PER_SECOND)
                    with transaction.atomic():
                        # The first hook to run: before the one that notifies.
                        transaction.on_commit(partial(_note, committed["ours"], number))
                        emit_event("bench.timed", {"number": number})
                    for place, (kind, listener) in enumerate(listeners.items(), 1):
                        _sleep_until(began + (number + place / len(kinds)) / PER_SECOND)
                        with session.transaction():
                            narrow.insert([{"number": number}])
                        _note(committed[kind], number)
                        session.execute("SELECT pg_notify(%s, %s)", [listener.channel, str(number)])
                _until(lambda: relay.look().counts.get("done", 0) >= count)
                started = dict(relay.stop().starts)
            for listener in listeners.values():
                session.execute("SELECT pg_notify(%s, 'end')", [listener.channel])
                listener.join()
            reached = {"ours": started} | {kind: listener.arrivals for kind, listener in listeners.items()}
            for kind in kinds:
                waits = [(reached[kind][number] - moment) / 1e3 for number, moment in committed[kind].items()]
                spread[kind].append((_percentile(waits, 0.5), _percentile(waits, 0.99)))
    for place, (name, most) in enumerate((("p50", 2.0), ("p99", 4.0))):
        ours, heard, claimed = ([each[place] for each in spread[kind]] for kind in kinds)
        yield compared(f"latency: {name}, commit to handler; reference NOTIFY", ours, heard, unit="us", at_most=most)
        yield compared(f"latency: {name}; reference NOTIFY and a claim", ours, claimed, unit="us")


def _note(moments: dict[int, int], number: int) -> None:
    moments[number] = time.monotonic_ns()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the relay did not get there within 30 s")
        time.sleep(0.02)


def idle(bench: Bench) -> Iterator[Line]:
    """Count the statements and the CPU time of a relay that has nothing to do, for a minute."""
    seconds = max(10.0, 60.0 * bench.scale)
    # What other workloads have left in other queues would be looked at again and again.
    with connection.cursor() as cursor:
        tables = (
            cursor.db.ops.quote_name(model._meta.db_table)
            for model in apps.get_app_config("django_outbox").get_models()
        )
        cursor.execute(f"TRUNCATE {', '.join(tables)}")
    with RelayProcess(mode="serve") as relay:
        relay.go()
        time.sleep(3)
        before = relay.look()
        progress(f"idle: {seconds:g} s")
        time.sleep(seconds)
        after = relay.look()
        relay.stop()
    lasted = after.seconds - before.seconds
    statements = (after.statements - before.statements) / lasted
    share = (after.cpu_seconds - before.cpu_seconds) / lasted * 100
    yield absolute("idle: statements a second", statements, shown="{:.2f}", target="<= 0.3", reached=statements <= 0.3)
    yield absolute("idle: share of a core", share, shown="{:.2f} %", target="<= 1 %", reached=share <= 1)
