"""Rows that have killed a process before: each is run in a child process, one at a time."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from django_outbox import lease as engine
from django_outbox.delivery import INTERRUPTED, Result, Run
from django_outbox.relay.connections import look_after_connections, tidy_connections
from django_outbox.relay.flights import Flight, Flights
from django_outbox.relay.queues import WORK

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from django_outbox.relay.lane import Lane

logger = logging.getLogger("django_outbox.relay")

START_SECONDS: Final = 60.0
"""How long the interpreter and the project may take to start; it is not the handler's time."""
COROUTINE_GRACE_SECONDS: Final = 1.0


class Child:
    """A spawned process that runs one step at a time."""

    def __init__(self, using: str) -> None:
        # Spawned, never forked: a fork would share this process's sockets and locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_child_main, args=(far_end, using), name="outbox-child", daemon=True)
        self._process.start()
        far_end.close()

    def run(self, lease: engine.Lease, step_name: str, limit: float) -> Result | None:
        """Run a step there and return how it ended; ``None`` when the process died of it."""
        try:
            self._pipe.send((lease, step_name, limit))
            if not self._pipe.poll(START_SECONDS):
                # The step was not started, so it is not to blame.
                self.kill()
                return Result(f"the child process did not start within {START_SECONDS:g} s")
            self._pipe.recv()
            if not self._pipe.poll(limit + COROUTINE_GRACE_SECONDS):
                self._process.kill()
                self._process.join()
                return Result(f"the handler took longer than its {limit:g} s and its process was ended")
            result: Result = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return result

    def kill(self) -> None:
        """End the process at once, from any thread."""
        self._process.kill()

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Isolator:
    """
    Takes rows that bear a mark through their steps in a child process, whose death is only the step's.

    To be run in a thread of its own, by `run`.
    """

    def __init__(self, flights: Flights, *, stopping: Callable[[], bool]) -> None:
        self._flights = flights
        self._stopping = stopping
        self._waiting: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._child: Child | None = None

    def put(self, flight: Flight) -> None:
        """Add a row; it waits for those before it."""
        try:
            flight.run = flight.lane.work.start(flight.lease, using=self._flights.using)
        except Exception as error:
            logger.exception("row cannot be delivered queue=%s id=%s", flight.lane.work.queue.name, flight.lease.id)
            self._flights.charge(flight, error)
            return
        flight.lane.isolated += 1
        self._waiting.put(flight)

    def withdraw(self) -> list[Flight]:
        """Take back the rows that were not started."""
        withdrawn = []
        with suppress(queue.Empty):
            while (flight := self._waiting.get_nowait()) is not None:
                flight.lane.isolated -= 1
                withdrawn.append(flight)
        return withdrawn

    def end(self) -> None:
        """End `run`, and the child process with what it does."""
        self._waiting.put(None)
        if (child := self._child) is not None:
            child.kill()

    def run(self) -> None:
        """Deliver one row after the other until `end`."""
        while (flight := self._waiting.get()) is not None:
            flight.lane.isolated -= 1
            if self._stopping():
                self._flights.release([flight])
                continue
            try:
                if flight.run is not None:
                    self._deliver(flight.lane, flight.run)
            except Exception as error:
                logger.exception("row cannot be delivered queue=%s id=%s", flight.lane.work.queue.name, flight.lease.id)
                self._flights.charge(flight, error)
            else:
                self._flights.close(flight)

    def _deliver(self, lane: Lane, run: Run) -> None:
        child: Child | None = None
        try:
            while (step := lane.next_step(run)) is not None:
                limit = step.timeout or lane.settings.timeout_seconds
                while True:
                    child = self._child = child or Child(self._flights.using)
                    result = child.run(run.lease, step.name, limit)
                    if result is None and self._stopping():
                        # Whoever stops this process may have ended that one too; it is not the step's fault.
                        result = Result(INTERRUPTED)
                    if result is not None:
                        run.finish(step, result)
                        break
                    child.end()
                    child = None
                    if not lane.start_again(run, step):
                        break
        finally:
            if child is not None:
                child.end()


def _child_main(pipe: Connection, using: str) -> None:
    # A Ctrl-C on the terminal, or a service manager that signals the whole group, is the parent's
    # to answer. Not SIG_IGN, which the handler's own child processes would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    import django  # noqa: PLC0415

    django.setup()
    look_after_connections()
    while True:
        try:
            lease, step_name, limit = pipe.recv()
        except EOFError:
            return
        work = WORK[lease.queue.name]
        run = work.start(lease, using=using)
        step = run.step(step_name)
        pipe.send("started")
        result = Result(f"the child process does not know the handler {step_name!r}")
        if step is not None:
            result = run.invoke(step, timeout=limit)
            work.rest()
            left_behind = tidy_connections()
            if left_behind and result.ok:
                result = Result(left_behind)
        pipe.send(result)
