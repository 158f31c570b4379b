"""Rows in flight: what this process owns from claim to settle, and the one way out for each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from django_outbox import lease as engine
from django_outbox.delivery import Run
from django_outbox.errors import clean_error
from django_outbox.relay.connections import DATABASE_TROUBLE, DatabaseHealth

if TYPE_CHECKING:
    from django_outbox.relay.lane import Lane

logger = logging.getLogger("django_outbox.relay")

SETTLE_LIMIT: Final = 500
SETTLE_GATHER_SECONDS: Final = 0.01
AWAITED_GATHER_SECONDS: Final = 0.005
"""The same where threads stand still meanwhile."""
RETRY_MIN_SECONDS: Final = 0.05
RETRY_MAX_SECONDS: Final = 2.0


class Flight:
    """A row that this process owns."""

    __slots__ = ("_open", "elapsed", "fence", "lane", "lease", "run", "tried")

    def __init__(self, lane: Lane, lease: engine.Lease) -> None:
        self.lane = lane
        self.lease = lease
        self.fence = lease.fence
        """That of the claim by which it came; see `Flights.take`."""
        self.run: Run | None = None
        self.elapsed = 0.0
        self.tried = False
        """Whether a settle of it failed, which may have been written although its reply was lost."""
        self._open = [None]

    def close(self) -> bool:
        """Return whether this is the first call; of several threads one gets that answer."""
        # Taking the last item out is atomic, and all threads asking for one lock at every row
        # would cost a tenth of the relay's speed.
        try:
            self._open.pop()
        except IndexError:
            return False
        return True

    @property
    def closed(self) -> bool:
        """Whether its outcome is on its way."""
        return not self._open


_Outcome = tuple[Flight, engine.Settled]


class Landed(Protocol):
    """Called when rows of a queue have left; ``due``: something may be due because of that."""

    def __call__(self, lane: Lane, *, due: bool) -> None:
        """Note it."""


class Flights:
    """
    The rows in flight of all queues, and their settler.

    Every row that is taken leaves by exactly one of these: settled with its outcome
    (`close`, `charge`), given back (`release`), or let go because it is another's (`drop`).
    """

    def __init__(self, *, using: str, health: DatabaseHealth, landed: Landed) -> None:
        self.using = using
        self.lanes: Sequence[Lane] = ()
        self.landed = threading.Condition()
        """Notified whenever rows leave."""
        self.claiming = threading.Lock()
        """Held over a claim until its rows are in flight, and over writes that a fence must not change under."""
        self._health = health
        self._when_landed = landed
        self._outcomes: queue.SimpleQueue[_Outcome | None] = queue.SimpleQueue()
        self._owed: dict[Lane, list[_Outcome]] = {}
        """What could not be written yet."""
        self._ending = False

    def held(self) -> int:
        """Return how many rows this process owns; zero when nothing is in its hands."""
        return sum(len(lane.flights) for lane in self.lanes)

    @property
    def counts(self) -> Counter[str]:
        """Rows by what became of them, of all queues."""
        total: Counter[str] = Counter()
        for lane in self.lanes:
            total += lane.counts
        return total

    def all(self) -> list[Flight]:
        """Return the rows in flight now."""
        with self.landed:
            return [flight for lane in self.lanes for flight in lane.flights.values()]

    def take(self, lane: Lane, leases: Iterable[engine.Lease]) -> list[Flight]:
        """Put claimed rows in flight; return those that were not already."""
        fresh = []
        with self.landed:
            for lease in leases:
                known = lane.flights.get(lease.id.int)
                if known is None:
                    flight = lane.flights[lease.id.int] = Flight(lane, lease)
                    fresh.append(flight)
                else:
                    # Our own lease ran out while the row is still in our hands. The run in
                    # progress goes on under the new fence; a second one must not start. Or its
                    # outcome is written and it has only to land, which gives the row back.
                    known.lease.fence, known.lease.deadline = lease.fence, lease.deadline
        return fresh

    def thread_freed(self, lane: Lane) -> None:
        """Note that a queue has a free thread, though no row of it has landed."""
        self._when_landed(lane, due=False)

    # --- the ways out

    def close(self, flight: Flight) -> None:
        """Have a row settled once its run is complete; the first caller does. Waits for no database."""
        run = flight.run
        if run is None or not run.complete or not flight.close():
            return
        if run.lost:
            self.drop(flight)
            return
        self._outcomes.put((flight, run.settled()))

    def charge(self, flight: Flight, error: Exception) -> None:
        """Settle a row as failed for what went wrong around its handlers: a stored row that cannot be read, say."""
        if flight.close():
            self._outcomes.put((flight, engine.Settled(flight.lease, engine.Retry(), error=clean_error(error))))

    def drop(self, flight: Flight) -> None:
        """Let go of a row that is another's, without a word to the database."""
        logger.warning(
            "lease lost, the row is another relay's now queue=%s id=%s", flight.lane.work.queue.name, flight.lease.id
        )
        self._land([flight], ["lost"], {flight.lease: flight.fence})

    def release(self, flights: Sequence[Flight]) -> None:
        """Give back rows of one queue that were not started, their attempt with them."""
        for start in range(0, len(flights), SETTLE_LIMIT):
            chunk = flights[start : start + SETTLE_LIMIT]
            leases = [flight.lease for flight in chunk]
            # No claim comes between: it would take the rows for still in flight.
            with self.claiming:
                self._land(chunk, ["released"] * self._released(leases), {lease: lease.fence for lease in leases})

    def _released(self, leases: Sequence[engine.Lease]) -> int:
        """Give back rows; return how many were given back."""
        try:
            return engine.release(leases, using=self.using)
        except DATABASE_TROUBLE as error:
            # Their leases run out by themselves.
            self._health.failed("release", error)
            return 0

    def _land(self, flights: Sequence[Flight], became: Iterable[str], fences: Mapping[engine.Lease, int]) -> None:
        """
        Let go of rows that are settled, given back or another's; ``fences``: under which they were.

        A claim of ours may have come between that and this, and have taken a row for still in
        flight: nobody works on it under its new fence, so it is given back.
        """
        lane = flights[0].lane
        with self.landed:
            lane.counts.update(became)
            for flight in flights:
                if lane.flights.get(flight.lease.id.int) is flight:
                    del lane.flights[flight.lease.id.int]
            claimed_anew = [flight.lease for flight in flights if flight.lease.fence != fences[flight.lease]]
            self.landed.notify_all()
        lane.work.landed([flight.lease for flight in flights])
        if claimed_anew:
            # Whatever it was at its earlier claim, this holder has done it no harm.
            self._released([replace(lease, suspect=False) for lease in claimed_anew])
        self._when_landed(lane, due=bool(claimed_anew))

    # --- the settler's thread

    def settle_until_ended(self) -> None:
        """Write outcomes in batches until `end`; what cannot be written is tried again until the guard refuses it."""
        wait = 0.0
        while not self._ending or not self._outcomes.empty():
            self._gather(wait if self._owed else None)
            tried = [self._settle_lane(lane) for lane in list(self._owed)]
            if all(tried):
                wait = 0.0
            elif self._ending:
                return
            else:
                wait = min(max(wait * 2, RETRY_MIN_SECONDS), RETRY_MAX_SECONDS)

    def end(self) -> None:
        """End the settler once what is there was tried."""
        self._ending = True
        self._outcomes.put(None)

    def settled_up(self) -> bool:
        """Return whether no outcome waits to be written."""
        return not self._owed and self._outcomes.empty()

    def _gather(self, timeout: float | None) -> None:
        """Wait for outcomes; what gathered while the last batch was written is the next batch."""
        items: list[_Outcome | None] = []
        with suppress(queue.Empty):
            items.append(self._outcomes.get(block=timeout != 0, timeout=timeout))
            self._wait_for_more(len(items))
            while len(items) < SETTLE_LIMIT:
                items.append(self._outcomes.get_nowait())
        for item in items:
            if item is not None:
                self._owed.setdefault(item[0].lane, []).append(item)

    def _wait_for_more(self, count: int) -> None:
        """Wait a moment if more are about to end: a statement for many costs little more than for one."""
        at_work = [lane for lane in self.lanes if lane.ready]
        if not at_work:
            return
        enough, longest, pause = SETTLE_LIMIT, SETTLE_GATHER_SECONDS, SETTLE_GATHER_SECONDS
        if awaited := [lane.threads for lane in at_work if lane.work.one_at_a_time]:
            # Where every thread waits for its outcome, no more come than there are threads.
            enough, longest, pause = min(awaited), AWAITED_GATHER_SECONDS, AWAITED_GATHER_SECONDS / 5
        until = time.monotonic() + longest
        while count + self._outcomes.qsize() < enough and time.monotonic() < until:
            time.sleep(pause)

    def _settle_lane(self, lane: Lane) -> bool:
        """Write what is owed of one queue, as far as one statement goes; return whether that went well."""
        owed = self._owed[lane]
        batch, rest = owed[:SETTLE_LIMIT], owed[SETTLE_LIMIT:]
        left, well = self._write(lane, batch)
        if left or rest:
            # Those that somebody keeps locked stand behind the others.
            self._owed[lane] = rest + left
        else:
            del self._owed[lane]
        return well

    def _write(self, lane: Lane, batch: Sequence[_Outcome]) -> tuple[list[_Outcome], bool]:
        """
        Write outcomes and land their rows; return those to write anew, and whether the database did what it should.

        The work is done; only the record of it is missing. Trying again costs nothing, and
        the guard refuses what is another's by then.
        """
        work = lane.work
        released = [item for item in batch if isinstance(item[1].outcome, engine.Released)]
        ended = [item for item in batch if not isinstance(item[1].outcome, engine.Released)]
        fences = {settled.lease: settled.lease.fence for _, settled in ended}
        try:
            for _, settled in released:
                if settled.delivered:
                    with self.claiming:
                        engine.record(settled.lease, using=self.using, delivered=settled.delivered)
            written = engine.settle(
                [settled for _, settled in ended],
                schedule=work.settings().schedule,
                using=self.using,
                announce=work.announce,
                along=work.along_on(self.using, [settled for _, settled in ended]),
                again=any(flight.tried for flight, _ in ended),
            )
        except DATABASE_TROUBLE as error:
            self._health.failed("settle", error)
            for flight, _ in ended:
                flight.tried = True
            return list(batch), False
        self._health.works()
        self.release([flight for flight, _ in released])
        left = {lease for lease in fences if written.get(lease) == engine.LOCKED}
        well = not left
        left |= self.reclaimed({lease for lease in fences if lease not in written}, fences)
        anew = [item for item in ended if item[1].lease in left]
        ended = [item for item in ended if item[1].lease not in left]
        became = [written.get(settled.lease, "lost") for _, settled in ended]
        for status, (_, settled) in zip(became, ended, strict=True):
            if status == "lost":
                logger.warning(
                    "outcome not written, the row is another relay's queue=%s id=%s", work.queue.name, settled.lease.id
                )
        if ended:
            lane.note_speed(ended)
            self._land([flight for flight, _ in ended], became, fences)
        if any(status not in {"done", "lost"} for status in became):
            # It may fall due, or its announcement is, before the claim loop would look again.
            self._when_landed(lane, due=True)
        return anew, well

    def reclaimed(self, lost: Collection[engine.Lease], fences: Mapping[engine.Lease, int]) -> set[engine.Lease]:
        """Return the rows, of those that a write did not reach, which this relay's own claim gave a new fence."""
        if not lost:
            return set()
        # A claim that is under way may have them, and hands the fence over before it lets go.
        with self.claiming:
            return {lease for lease in lost if lease.fence != fences[lease]}
