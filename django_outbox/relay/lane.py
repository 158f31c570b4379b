"""One queue in a relay: what is claimed for it, and the threads that work it."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from django_outbox import lease as engine
from django_outbox.conf import QueueSettings
from django_outbox.delivery import Result, Run, Step, Work
from django_outbox.relay.connections import (
    DATABASE_TROUBLE,
    DatabaseHealth,
    close_connections,
    look_after_connections,
    tidy_connections,
    trust_connections_briefly,
)
from django_outbox.relay.deadlines import bounded_statements
from django_outbox.relay.flights import RETRY_MAX_SECONDS, RETRY_MIN_SECONDS, Flight, Flights
from django_outbox.relay.isolator import COROUTINE_GRACE_SECONDS

logger = logging.getLogger("django_outbox.relay")

CLAIM_SECONDS: Final = 0.025
"""
Rows are claimed by the hundred, and by five hundred where the threads work those off in this time.

Rows are made of an answer in one go, and no thread whose handler has waited for something can
go on meanwhile: with handlers that wait 10 ms in 50 threads, small claims make 3 % more events
a second.
"""
IN_FLIGHT_LIMIT: Final = 1_500
CLOGGED_SECONDS: Final = 1.0
FRESH_FOR_SECONDS: Final = 0.25
"""How long new rows alone are claimed while one wake-up follows another: whatever else is due waits no longer."""
_T = TypeVar("_T")


class Slot:
    """What one handler thread is doing, as the watch over the time limits sees it."""

    __slots__ = ("abandoned", "deadline", "flight", "lock", "started", "step")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flight: Flight | None = None
        self.step: Step | None = None
        self.started = 0.0
        self.deadline = 0.0
        self.abandoned = False

    def begin(self, flight: Flight, step: Step, limit: float) -> None:
        """Note that a step starts, with its time limit in seconds."""
        with self.lock:
            self.flight, self.step = flight, step
            self.started = time.monotonic()
            self.deadline = self.started + limit

    def end(self) -> bool:
        """Note that it ended; return whether the thread is still the relay's."""
        with self.lock:
            self.flight = self.step = None
            return not self.abandoned


class Lane:
    """
    A queue's rows on their way from the claim to its handler threads.

    The claim loop reads and writes ``hungry``, ``woken``, ``look_at`` and their like;
    rows that are `ready` are taken by whichever thread is free.
    """

    def __init__(
        self, work: Work, *, holder: str, threads: int | None, flights: Flights, health: DatabaseHealth
    ) -> None:
        self.work = work
        self.settings: QueueSettings = work.settings()
        self.threads = work.threads = threads or self.settings.concurrency
        self.claimer = engine.Claimer(work.queue, holder=holder, using=flights.using)
        self.flights: dict[int, Flight] = {}
        """By the id of the row as an integer; the hash and the comparison of a UUID are Python code."""
        self.counts: Counter[str] = Counter()
        """Rows by what became of them: the status written, ``lost`` or ``released``."""
        self.ready: deque[Flight] = deque()
        self.stuck: list[Slot] = []
        self.isolated = 0
        """Rows that wait for the child process, and take no thread."""
        # The claim loop's.
        self.hungry = False
        """Whether the last claim was ended by its limit, so that more may be due."""
        self.woken = True
        self.freed = False
        """Whether rows landed since the last look, where that can make others claimable."""
        self.look_at = 0.0
        """When to look for due rows even if nobody wakes us; a reading of the monotonic clock."""
        self.due_at = 0.0
        """Before this moment nothing but new rows falls due, as the database last said."""
        self.fresh_since = 0.0
        """When the first of the latest claims was made that took new rows only; 0: the last one took all."""
        self.floor_at = 0.0
        """Before this moment a wake-up is not answered."""
        self.empty = 0
        """Looks in a row that found nothing."""
        self.ask_only = False
        """Whether the next look needs no claim, only the next due time."""
        self.spare_until = 0.0
        """Until this moment, leases of others that ran out are left alone."""
        # The settler's.
        self.row_seconds = 0.05
        self._all = flights
        self._health = health
        self._slots: list[Slot] = []
        self._manned = False
        """Whether the handler threads were started."""
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ending = False
        self._withdrawn: Callable[[], bool] = lambda: False

    # --- the claim loop's side

    def start(self, *, stopping: Callable[[], bool]) -> None:
        """Have rows delivered as they are offered; once ``stopping``, the threads begin no other."""
        self._withdrawn = stopping

    def end(self) -> None:
        """Have the threads end once they are free."""
        self._ending = True
        for _ in range(len(self._slots)):
            self._tokens.put(None)

    def capacity(self) -> int:
        """Return how many rows to hold so that the threads are busy for the time to prefetch, and no more."""
        rows = int(self.threads * self.work.prefetch_seconds / max(self.row_seconds, 1e-6))
        return min(max(rows, self.threads), IN_FLIGHT_LIMIT)

    def room(self) -> int:
        """Return how many rows may be claimed."""
        # Rows that wait for a stuck step or for the child process take no thread.
        return self.capacity() - (len(self.flights) - len(self.stuck) - self.isolated)

    def claim_limit(self) -> int:
        """Return how many rows to claim at once, room or not."""
        soon = self.threads * CLAIM_SECONDS / max(self.row_seconds, 1e-6)
        return engine.USUAL_LIMIT if soon >= engine.USUAL_LIMIT else engine.SMALL_LIMIT

    def wants_more(self) -> bool:
        """Return whether a claim is worth its while: it gets many rows, or the threads are about to run out of them."""
        room = self.room()
        return room > 0 and (room >= min(self.capacity() // 3, self.claim_limit()) or len(self.ready) < self.threads)

    def only_new_is_due(self, now: float) -> bool:
        """Return whether a claim of new rows only will do, and count on it that one is made."""
        # Where the last claim left some, a few at a time would not keep the threads busy.
        if self.hungry or now >= self.due_at or (self.fresh_since and now - self.fresh_since > FRESH_FOR_SECONDS):
            self.fresh_since = 0.0
            return False
        self.fresh_since = self.fresh_since or now
        return True

    def offer(self, flights: Sequence[Flight]) -> None:
        """Hand rows to the threads."""
        if flights and not self._manned:
            # A queue that nothing comes to costs no threads. Before the rows are ready: without a
            # thread they would pass for rows that no thread has the time for.
            self._manned = True
            for _ in range(self.threads):
                self._add_thread()
        self.ready.extend(flights)
        # One token wakes one thread, which then works until nothing is ready. More tokens than
        # threads would only be picked up for nothing.
        for _ in range(min(len(flights), self.threads - self._tokens.qsize())):
            self._tokens.put(None)

    def withdraw(self, wanted: Callable[[Flight], bool]) -> list[Flight]:
        """Take rows back that no thread has started."""
        withdrawn = []
        for flight in list(self.ready):
            if wanted(flight):
                # Removing is atomic: either a thread took it first, or no thread can.
                try:
                    self.ready.remove(flight)
                except ValueError:
                    continue
                withdrawn.append(flight)
        return withdrawn

    def note_speed(self, ended: Sequence[tuple[Flight, Any]]) -> None:
        """Learn from rows that ended how long one takes."""
        mean = sum(flight.elapsed for flight, _ in ended) / len(ended)
        self.row_seconds += (mean - self.row_seconds) * min(1.0, len(ended) / 50)

    def is_clogged(self, now: float) -> bool:
        """Return whether rows are ready, and all threads have been at one step each for longer than rows may wait."""
        return bool(self.ready) and all(
            slot.flight is not None and now - slot.started > CLOGGED_SECONDS for slot in list(self._slots)
        )

    def note_slow(self) -> None:
        """Learn from rows that had to be given back unstarted: no more than there are threads, until rows end again."""
        self.row_seconds = max(self.row_seconds, self.work.prefetch_seconds)

    # --- the handler threads

    def _add_thread(self, flight: Flight | None = None) -> None:
        slot = Slot()
        self._slots.append(slot)
        name = f"outbox-{self.work.queue.name}-{len(self._slots)}"
        threading.Thread(target=self._work_loop, args=(slot, flight), name=name, daemon=True).start()

    def _work_loop(self, slot: Slot, flight: Flight | None) -> None:
        look_after_connections()
        try:
            while not self._ending:
                if flight is None:
                    try:
                        flight = self.ready.popleft()
                    except IndexError:
                        self.work.rest()
                        self._tokens.get()
                        continue
                    if self._withdrawn():
                        # The relay may stop for the want of fit threads: this one starts nothing more.
                        self._all.release([flight])
                        return
                if not self._try_to_deliver(slot, flight):
                    return
                flight = None
        finally:
            self.work.rest()
            close_connections()

    def _try_to_deliver(self, slot: Slot, flight: Flight) -> bool:
        """Deliver; what goes wrong outside the steps costs this row an attempt and nobody else anything."""
        try:
            return self._deliver(slot, flight)
        except Exception as error:
            logger.exception("row cannot be delivered queue=%s id=%s", self.work.queue.name, flight.lease.id)
            self._all.charge(flight, error)
        return slot.end()

    def _deliver(self, slot: Slot, flight: Flight) -> bool:
        """Run a row's steps in this thread; return whether the thread is still the relay's."""
        began = time.perf_counter()
        run = flight.run
        if run is None:
            run = flight.run = self.work.start(flight.lease, using=self._all.using)
        while (step := self.next_step(run)) is not None:
            limit = step.timeout or self.settings.timeout_seconds
            # A coroutine is cancelled in time; the thread is given up only if that does not help.
            slot.begin(flight, step, limit + (COROUTINE_GRACE_SECONDS if step.is_async else 0.0))
            trust_connections_briefly()
            # A context of its own, so that a language, a time zone or any other context
            # variable that the handler sets ends with it.
            result = contextvars.copy_context().run(run.invoke, step, timeout=limit)
            left_behind = tidy_connections()
            if left_behind and result.ok:
                result = Result(left_behind)
            ours = slot.end()
            run.finish(step, result)
            if not ours:
                self._all.close(flight)
                return False
        flight.elapsed += time.perf_counter() - began
        self._all.close(flight)
        return True

    def next_step(self, run: Run) -> Step | None:
        """Take a run's next step; where a mark comes first, wait for the database while the lease lasts."""
        if self.work.queue.handlers and not (run.lease.suspect or run.lease.lost_leases):
            return run.next_step()  # nearly every event, and it needs no database
        return self._patiently(run.next_step)

    def start_again(self, run: Run, step: Step) -> bool:
        """Mark a step once more after it killed its process, and return whether it may start; waits likewise."""
        return self._patiently(lambda: run.start_again(step))

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        wait = RETRY_MIN_SECONDS
        while True:
            try:
                with bounded_statements(self._all.using):
                    return ask()
            except DATABASE_TROUBLE as error:
                self._health.failed("mark", error)
                time.sleep(wait)
                wait = min(wait * 2, RETRY_MAX_SECONDS)

    # --- the watch over the time limits

    def watch_limits(self, stuck_seconds: float) -> bool:
        """Give up threads whose step is past its limit; return whether too many are stuck to go on."""
        now = time.monotonic()
        for slot in list(self._slots):
            if slot.flight is not None and now >= slot.deadline:
                self._abandon(slot)
        for slot in list(self.stuck):
            flight, step = slot.flight, slot.step
            if flight is None or step is None:
                self.stuck.remove(slot)  # it came back
            elif now >= slot.deadline + stuck_seconds and flight.run is not None:
                text = (
                    f"the handler took longer than its {slot.deadline - slot.started:g} s"
                    f" and did not return within {stuck_seconds:g} s more"
                )
                flight.run.finish(step, Result(text))
                self._all.close(flight)
        return len(self.stuck) > self.threads

    def _abandon(self, slot: Slot) -> None:
        """Give up the thread of a step past its limit: its row waits for it, everything else goes on."""
        with slot.lock:
            flight, step = slot.flight, slot.step
            if flight is None or step is None or time.monotonic() < slot.deadline:
                return
            slot.abandoned = True
        self._slots.remove(slot)
        self.stuck.append(slot)
        logger.warning(
            "handler past its time limit queue=%s handler=%s id=%s limit_seconds=%g stuck_threads=%d",
            self.work.queue.name,
            step.name,
            flight.lease.id,
            slot.deadline - slot.started,
            len(self.stuck),
        )
        # The row's other steps go on in the thread that takes this one's place.
        self._add_thread(flight)
        self._all.thread_freed(self)
