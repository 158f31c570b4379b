"""What the workloads share: the databases, the relay processes, the rounds and the lines of the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import psycopg
from django.core.management import call_command
from django.db import connections, transaction

from django_outbox import NewEvent, emit_events
from django_outbox.models import OutboxEvent

ROOT = Path(__file__).parent.parent.parent
TABLE = OutboxEvent._meta.db_table
PROCESS_LIMIT_SECONDS = 300.0
"""A relay process that is not done by then is killed, and the run fails."""


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: our figure, the reference's, their ratio and what it should be."""

    workload: str
    ours: str
    reference: str = "-"
    ratio: float | None = None
    target: str = "-"
    reached: bool | None = None


def compared(
    workload: str,
    ours: Sequence[float],
    reference: Sequence[float],
    *,
    unit: str,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Line:
    """Return the line of figures taken in the same rounds: medians, and the median of the rounds' ratios."""
    ratio = median(mine / theirs for mine, theirs in zip(ours, reference, strict=True))
    reached = None if at_least is None and at_most is None else True
    target = "-"
    if at_least is not None:
        target, reached = f">= {at_least:g} x", ratio >= at_least
    elif at_most is not None:
        target, reached = f"<= {at_most:g} x", ratio <= at_most
    return Line(
        workload=workload,
        ours=f"{median(ours):,.0f} {unit}",
        reference=f"{median(reference):,.0f} {unit}",
        ratio=ratio,
        target=target,
        reached=reached,
    )


def absolute(workload: str, figure: float, *, shown: str, target: str, reached: bool) -> Line:
    """Return the line of a figure that has no reference beside it."""
    return Line(workload=workload, ours=shown.format(figure), target=target, reached=reached)


@dataclass(kw_only=True)
class Bench:
    """How much of everything, and for how long."""

    rounds: int
    scale: float
    limit_seconds: float
    notes: list[str] = field(default_factory=list)

    def size(self, full: int, *, least: int = 1) -> int:
        """Return a number of events, or of whatever, at this run's scale."""
        return max(least, round(full * self.scale))

    def each_round(self, workload: str) -> Iterator[int]:
        """Yield the numbers of the rounds, fewer when the workload's time is up."""
        began = time.monotonic()
        for number in range(self.rounds):
            if number and time.monotonic() - began > self.limit_seconds:
                self.notes.append(f"{workload}: {number} of {self.rounds} rounds in {self.limit_seconds:g} s")
                return
            progress(f"{workload}: round {number + 1} of {self.rounds}")
            yield number


def progress(text: str) -> None:
    """Say on a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


# --- databases ------------------------------------------------------------------------------------------------------


@contextmanager
def databases() -> Iterator[None]:
    """Make the databases anew; drop those on the server at the end."""
    names = [connections[alias].settings_dict["NAME"] for alias in ("default", "grown")]

    def drop(admin: psycopg.Connection[Any]) -> None:
        for name in names:
            admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    with psycopg.connect(os.environ["BENCH_DATABASE_URL"], autocommit=True) as admin:
        drop(admin)
        for name in names:
            admin.execute(f'CREATE DATABASE "{name}"')
        try:
            for alias in ("default", "grown", "sqlite"):
                call_command("migrate", database=alias, verbosity=0, skip_checks=True)
            yield
        finally:
            connections.close_all()
            drop(admin)


def raw_connect(alias: str = "default") -> psycopg.Connection[tuple[Any, ...]]:
    """Return a session in autocommit that Django does not know."""
    return psycopg.connect(
        os.environ["BENCH_DATABASE_URL"], dbname=connections[alias].settings_dict["NAME"], autocommit=True
    )


def checkpoint(alias: str = "default") -> None:
    """Write out what earlier workloads left, so that it is not written during the next measurement."""
    if connections[alias].vendor != "postgresql":
        return
    with suppress(psycopg.errors.InsufficientPrivilege), raw_connect(alias) as session:
        session.execute("CHECKPOINT")


def load(count: int, *, type_: str = "bench.one", database: str = "default", empty: bool = True) -> None:
    """Emit so many events, by default into an emptied table, and have its statistics taken."""
    connection = connections[database]
    postgres = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        if empty:
            cursor.execute(f"{'TRUNCATE' if postgres else 'DELETE FROM'} {TABLE}")
    checkpoint(database)
    for first in range(0, count, 1_000):
        batch = [
            NewEvent(type_, {"number": number, "customer": "Ada"}) for number in range(first, min(first + 1_000, count))
        ]
        with transaction.atomic(using=database):
            emit_events(batch, using=database)
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {TABLE}" if postgres else "ANALYZE")


# --- relay processes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a relay process says of itself."""

    seconds: float
    counts: dict[str, int]
    statements: int
    cpu_seconds: float
    peak_mb: float
    starts: list[tuple[int, int]] = field(default_factory=list)


class RelayProcess:
    """A relay process that waits, fully started, for `go`; see ``runner.py``."""

    def __init__(self, *, mode: str, database: str = "default", threads: int | None = None) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.runner", "--mode", mode, "--database", database]
        if threads is not None:
            command += ["--threads", str(threads)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._watchdog = threading.Timer(PROCESS_LIMIT_SECONDS, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()

    def go(self) -> None:
        """Start the relay."""
        self._say("go")

    def look(self) -> Figures:
        """Return the figures so far."""
        self._say("look")
        return Figures(**self._read())

    def stop(self) -> Figures:
        """Stop the relay and return its last figures."""
        self._say("stop")
        return self.end()

    def end(self) -> Figures:
        """Wait until the relay is done and return its last figures."""
        return Figures(**self._read())

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a relay process ended before its work was done, exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
