"""What is done for all rows in flight at once: leases renewed, time limits watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.relay.connections import DATABASE_TROUBLE, DatabaseHealth
from django_outbox.relay.flights import Flight, Flights

TICK_SECONDS: Final = 0.1


class Keeper:
    """
    Renews leases and watches time limits, each in a thread of its own: a renewal may have to wait for the database.

    ``slept`` is called when this process was stopped for so long that its leases may
    have run out; ``overloaded`` when more threads of a queue are stuck than it has.
    """

    def __init__(
        self,
        flights: Flights,
        *,
        health: DatabaseHealth,
        stuck_seconds: float,
        slept: Callable[[], None],
        overloaded: Callable[[], None],
    ) -> None:
        self._flights = flights
        self._health = health
        self._stuck_seconds = stuck_seconds
        self._slept = slept
        self._overloaded = overloaded
        self._busy = threading.Event()
        self._ended = threading.Event()
        self._shortest_lease = min(lane.settings.lease_seconds for lane in flights.lanes)

    def note_claimed(self) -> None:
        """Wake the threads: there are rows to look after."""
        self._busy.set()

    def end(self) -> None:
        """End both threads."""
        self._ended.set()
        self._busy.set()

    def watch_until_ended(self) -> None:
        """Give up steps past their time limit; touches no database."""
        while self._tick():
            for lane in self._flights.lanes:
                if lane.watch_limits(self._stuck_seconds):
                    self._overloaded()

    def renew_until_ended(self) -> None:
        """Renew what is in hand at a third of its lease; give back what has no prospect of being started soon."""
        check_every = min(0.5, self._shortest_lease / 12)
        checked = time.monotonic()
        while self._tick():
            if time.monotonic() - checked >= check_every:
                checked = time.monotonic()
                self.renew()

    def _tick(self) -> bool:
        """Let a moment pass, or all the time in which there is nothing to look after; return whether to go on."""
        if self._flights.held():
            began = time.monotonic()
            self._ended.wait(TICK_SECONDS)
            if time.monotonic() - began > max(self._shortest_lease / 3, 10 * TICK_SECONDS):
                self._slept()
        else:
            # Cleared before the look, so that a claim in between is seen or wakes us.
            self._busy.clear()
            if not self._flights.held() and not self._ended.is_set():
                self._busy.wait()
        return not self._ended.is_set()

    def renew(self, *, everything: bool = False) -> None:
        """Renew leases that are a third gone, or all; raises nothing for the database's sake."""
        now = time.monotonic()
        aging = [
            flight
            for flight in self._flights.all()
            if everything or flight.lease.deadline - now < flight.lease.seconds * 2 / 3
        ]
        runs = {flight.lease: flight.run for flight in aging if flight.run is not None}
        try:
            if runs:
                fences = {lease: lease.fence for lease in runs}
                lost = engine.renew(
                    {lease: dict(run.delivered) for lease, run in runs.items()}, using=self._flights.using
                )
                for lease in set(lost) - self._flights.reclaimed(lost, fences):
                    runs[lease].lost = True
        except DATABASE_TROUBLE as error:
            self._health.failed("renew", error)
            return
        for lane in self._flights.lanes:
            clogged = lane.is_clogged(now)
            late = lane.withdraw(
                _anything if clogged else lambda flight: flight.lease.deadline - now < flight.lease.seconds / 3
            )
            if late:
                lane.note_slow()
                self._flights.release(late)
                if clogged:
                    # Another relay may have threads to spare, and sleeps as long as these were leased.
                    wake.notify(self._flights.using, queue=lane.work.queue.name)


def _anything(_: Flight) -> bool:
    return True
