"""Workloads of a relay with little to do: how soon it starts, and what it costs meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from django.db import transaction

from django_outbox import emit_event
from tests.benchmarks.harness import Bench, Line, RelayProcess, absolute, compared, load, progress, raw_connect
from tests.benchmarks.reference import Listening, NarrowTable

PER_SECOND = 50


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def latency(bench: Bench) -> Iterator[Line]:
    """
    Emit 50 events a second to an idle relay, and as many rows with NOTIFY to a psycopg listener, by turns.

    Both clocks run from the moment the commit has returned, to the start of the handler
    or the arrival of the notification.
    """
    count = bench.size(20 * PER_SECOND, least=100)
    spread: dict[str, list[tuple[float, float]]] = {"ours": [], "reference": []}
    with raw_connect() as session, NarrowTable(session) as narrow, raw_connect() as listener:
        for _ in bench.each_round("latency"):
            load(0)
            listening = Listening(listener)
            committed: dict[str, dict[int, int]] = {"ours": {}, "reference": {}}
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
                    _sleep_until(began + (number + 0.5) / PER_SECOND)
                    with session.transaction():
                        narrow.insert([{"number": number}])
                    _note(committed["reference"], number)
                    session.execute("SELECT pg_notify('bench', %s)", [str(number)])
                _until(lambda: relay.look().counts.get("done", 0) >= count)
                started = dict(relay.stop().starts)
            session.execute("SELECT pg_notify('bench', 'end')")
            listening.join()
            for kind, reached in (("ours", started), ("reference", listening.arrivals)):
                waits = [(reached[number] - moment) / 1e3 for number, moment in committed[kind].items()]
                spread[kind].append((_percentile(waits, 0.5), _percentile(waits, 0.99)))
    for place, (name, most) in enumerate((("p50", 2.0), ("p99", 4.0))):
        ours, theirs = ([each[place] for each in spread[kind]] for kind in ("ours", "reference"))
        yield compared(f"latency: {name}, commit to handler", ours, theirs, unit="us", at_most=most)


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
    load(0)
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
