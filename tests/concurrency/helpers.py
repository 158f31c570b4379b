"""How the tests of this directory meet several threads, processes and sessions, with a deadline on every wait."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID

from django.db import connection, connections, transaction

from django_outbox import NewEvent, emit_events
from django_outbox.relay import Mode, Relay
from tests.concurrency.field import acts

DEADLINE_SECONDS = 10.0
START_SECONDS = 30.0
"""For what includes the start of several interpreters."""
_STARTED = re.compile(r"relay started process=(\d+) pid=(\d+)")

Script = dict[str, Any]
StartRelay = Callable[..., "subprocess.Popen[str]"]


def emit(*scripts: Script, names: Iterable[str] = "abcdefghij", **options: Any) -> list[UUID]:
    """Emit one event for the field's handlers for each script, named a, b, c, …"""
    with transaction.atomic():
        return emit_events(
            [
                NewEvent(acts.TYPE, {"name": name, **script}, **options)
                for name, script in zip(names, scripts, strict=False)
            ]
        )


def ended(process: subprocess.Popen[str], *, seconds: float = 20) -> tuple[int, str]:
    """Wait for a process, and return its exit code and what it said."""
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def eventually(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    """Return the condition's first true value; for what another process or session does and nobody reports."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds:g} s"
        threading.Event().wait(0.02)
    return value


class Heard:
    """What a process and those that it started have printed so far; it reads as they print."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.write(line)  # pytest shows it when the test fails
            with self._changed:
                self.said += line
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, *, count: int = 1) -> None:
        """Wait until so many places match."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(re.findall(pattern, self.said)) >= count, START_SECONDS), (
                f"{pattern!r} not {count} times in:\n{self.said}"
            )

    def end(self) -> int:
        """Wait until the last process of the tree has ended; return the supervisor's exit code."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._over, START_SECONDS), self.said
        return self.process.wait(START_SECONDS)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.end()

    @property
    def pids(self) -> list[int]:
        return [int(pid) for _, pid in _STARTED.findall(self.said)]


class Worker(threading.Thread):
    """A thread with a database connection of its own; `result` waits for it and raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  raised in the test's own thread
            self._error = error
        finally:
            connections.close_all()

    def result(self, *, seconds: float = DEADLINE_SECONDS) -> Any:
        self.join(seconds)
        assert not self.is_alive(), f"the thread did not end within {seconds:g} s"
        if self._error is not None:
            raise self._error
        return self._value


def together(*functions: Callable[[], Any], seconds: float = 30.0) -> list[Any]:
    """Run the functions in threads that start at one moment, and return what they returned."""
    barrier = threading.Barrier(len(functions))

    def started(function: Callable[[], Any]) -> Any:
        connection.ensure_connection()
        barrier.wait(DEADLINE_SECONDS)
        return function()

    workers = [Worker(partial(started, function)) for function in functions]
    return [worker.result(seconds=seconds) for worker in workers]


class RunningRelay:
    """A relay in a thread of this process."""

    def __init__(self, *, mode: Mode = "serve", threads: int = 4) -> None:
        self.relay = Relay(threads=threads, mode=mode)
        self._worker = Worker(self.relay.run)

    def wait_for(self, *, seconds: float = DEADLINE_SECONDS, **counts: int) -> None:
        """Wait until so many rows were settled with these statuses (or released, or lost)."""
        wanted = Counter(counts)
        with self.relay.flights.landed:
            reached = self.relay.flights.landed.wait_for(
                lambda: all(self.relay.counts[name] >= count for name, count in wanted.items()), seconds
            )
        assert reached, f"wanted {dict(wanted)}, have {dict(self.relay.counts)}"

    def wait_until_idle(self, *, seconds: float = DEADLINE_SECONDS) -> None:
        with self.relay.flights.landed:
            assert self.relay.flights.landed.wait_for(lambda: not self.relay.held(), seconds), (
                f"holds {self.relay.held()}"
            )

    def end(self, *, seconds: float = DEADLINE_SECONDS) -> int:
        """Wait for the end of its run, and return its exit code."""
        code: int = self._worker.result(seconds=seconds)
        return code

    def stop(self, *, seconds: float = DEADLINE_SECONDS) -> int:
        self.relay.stop()
        return self.end(seconds=seconds)


@contextmanager
def running_relay(*, threads: int = 4) -> Iterator[RunningRelay]:
    """Run a relay during the block; it must end well, with nothing in its hands."""
    running = RunningRelay(threads=threads)
    try:
        yield running
    finally:
        code = running.stop(seconds=20)
    assert code == 0
    assert running.relay.held() == 0
