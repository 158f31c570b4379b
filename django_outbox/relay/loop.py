"""The relay's loop and threads."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from django_outbox import events, wake
from django_outbox import lease as engine
from django_outbox.conf import OutboxSettings, get_settings
from django_outbox.errors import clean_error
from django_outbox.relay.child import COROUTINE_GRACE_SECONDS, Child
from django_outbox.relay.connections import (
    close_connections,
    look_after_connections,
    tidy_connections,
    trust_connections_briefly,
)

logger = logging.getLogger("django_outbox.relay")

Mode = Literal["serve", "drain", "once"]

EXIT_FAILED: Final = 1
"""Exit code of a relay that failed in a way it does not know."""

EXIT_RECYCLE: Final = 75
"""Exit code of a relay with too many stuck threads, for a supervisor to start another (EX_TEMPFAIL)."""

CLAIM_LIMIT: Final = 500
IN_FLIGHT_LIMIT: Final = 1_500
SETTLE_LIMIT: Final = 500
SETTLE_GATHER_SECONDS: Final = 0.005
LOCKED_AGAIN_SECONDS: Final = 0.25
"""An outcome whose row somebody else has locked is tried again with the next ones, or after this long."""
PREFETCH_SECONDS: Final = 0.5
"""Rows are claimed ahead for about this long, by the measured time of a row."""
EMPTY_FLOOR_SECONDS: Final = 0.05
FAILED_FLOOR_SECONDS: Final = 2.0
TICK_SECONDS: Final = 0.1
PURGE_EVERY_SECONDS: Final = 60.0
PURGE_LIMIT: Final = 2_000
DATABASE_TROUBLE: Final = (DatabaseError, InterfaceError)


class _Flight:
    """A row that this process owns, from claim to settle."""

    __slots__ = ("closed", "elapsed", "lease", "run")

    def __init__(self, lease: engine.Lease) -> None:
        self.lease = lease
        self.run: events.EventRun | None = None
        self.closed = False
        self.elapsed = 0.0


class _Slot:
    """What one handler thread is doing, as the keeper sees it."""

    __slots__ = ("abandoned", "deadline", "flight", "handler", "lock", "started")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flight: _Flight | None = None
        self.handler: events.Handler | None = None
        self.started = 0.0
        self.deadline = 0.0
        self.abandoned = False

    def begin(self, flight: _Flight, handler: events.Handler, limit: float) -> None:
        with self.lock:
            self.flight, self.handler = flight, handler
            self.started = time.monotonic()
            self.deadline = self.started + limit

    def end(self) -> bool:
        """Return whether the thread is still the relay's."""
        with self.lock:
            self.flight = self.handler = None
            return not self.abandoned


class Relay:
    """
    One relay process's worth of delivery, for one database.

    `run` returns when `stop` was called (from any thread or signal handler), or when
    the mode's work is done: ``once`` claims one time, ``drain`` goes on until nothing is
    due. ``progress`` is called a few times a second with the counts so far.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        threads: int | None = None,
        mode: Mode = "serve",
        progress: Callable[[Counter[str]], None] | None = None,
    ) -> None:
        self.settings: OutboxSettings = get_settings()
        self.queue = events.EVENTS
        self.queue_settings = self.settings.events
        self.using = using or self.settings.database
        self.threads = threads or self.queue_settings.concurrency
        self.mode = mode
        self.holder = engine.holder_name()
        self.counts: Counter[str] = Counter()
        self.watcher: wake.Watcher | None = None
        self._progress = progress
        self._claimer = engine.Claimer(self.queue, holder=self.holder, using=self.using)
        self._signal = wake.Signal()
        self._stopping = False
        self._exit_code = 0
        self._flights: dict[UUID, _Flight] = {}
        self._flights_lock = threading.Lock()
        self._landed = threading.Condition(self._flights_lock)
        self._claiming = threading.Lock()
        self._ready: deque[_Flight] = deque()
        self._work: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._stuck: list[_Slot] = []
        self._outcomes: queue.SimpleQueue[tuple[_Flight, engine.Settled] | None] = queue.SimpleQueue()
        self._locked: list[tuple[_Flight, engine.Settled]] = []
        """Outcomes of rows that somebody else has locked; the settler's own."""
        self._isolated: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._isolator: threading.Thread | None = None
        self._child: Child | None = None
        self._keeper_wake = threading.Event()
        self._closing = False
        self._row_seconds = 0.05
        self._hungry = False
        self._database_down = False

    # --- the caller's thread

    def stop(self) -> None:
        """Ask the relay to stop; safe to call from a signal handler."""
        self._stopping = True
        self._signal.set()

    def held(self) -> int:
        """Return how many rows this process owns; zero when nothing is in its hands."""
        return len(self._flights)

    def run(self) -> int:
        """Deliver until the mode's work is done or `stop` is called; return the process's exit code."""
        helpers = [
            threading.Thread(target=self._vital, args=(self._settle_loop,), name="outbox-settle", daemon=True),
            threading.Thread(target=self._vital, args=(self._keep_loop,), name="outbox-keep", daemon=True),
        ]
        for helper in helpers:
            helper.start()
        for _ in range(self.threads):
            self._add_thread()
        self.watcher = wake.watch(self.using, self._signal.set, dsn=self.settings.listen_dsn)
        if self.mode == "serve":
            self.watcher.start()
        try:
            self._claim_loop()
            self._wind_down()
        finally:
            self._closing = True
            self.watcher.stop()
            self._keeper_wake.set()
            self._outcomes.put(None)
            self._isolated.put(None)
            if (child := self._child) is not None:
                child.kill()
            for _ in range(len(self._slots)):
                self._work.put(None)
            for helper in helpers:
                helper.join(timeout=10)
            close_connections()
        self._report()
        return self._exit_code

    def _vital(self, loop: Callable[[], None]) -> None:
        """Run a thread without which the relay must not go on: its end by an error is the relay's."""
        try:
            loop()
        except BaseException:
            logger.critical("the relay ends, a thread of it failed thread=%s", threading.current_thread().name)
            self._exit_code = EXIT_FAILED
            self._closing = True
            self.stop()
            raise
        finally:
            close_connections()

    def _claim_loop(self) -> None:
        purged = time.monotonic()
        empty = 0
        while not self._stopping:
            # Before the claim, never after: what commits while the claim runs wakes us again.
            self._signal.clear()
            asked = min(self._room(), CLAIM_LIMIT)
            try:
                with self._claiming:
                    claimed = self._take(self._claim(asked)) if asked > 0 else 0
                if self.mode == "once":
                    return
                self._hungry = asked <= 0 or self._claimer.more
                if not self._hungry and claimed == 0 and self.mode == "drain" and self.held() == 0:
                    return
                pause = self.settings.poll_seconds
                if not self._hungry:
                    if self.mode == "serve" and time.monotonic() - purged > PURGE_EVERY_SECONDS:
                        purged = time.monotonic()
                        self._purge()
                    due = engine.next_due_seconds(self.queue, using=self.using)
                    pause = pause if due is None else min(due, pause)
            except DATABASE_TROUBLE as error:
                self._database_failed("claim", error)
                self._pause(FAILED_FLOOR_SECONDS)
                continue
            self._database_works()
            if self._hungry and self._room() > 0:
                # As much came as was asked for: there is more, and room for it.
                continue
            # One wake-up for nothing is ordinary: its event was claimed with the one before it.
            # A second in a row may be one of many, and they are answered all at once.
            empty = empty + 1 if claimed == 0 and asked > 0 else 0
            if empty > 1:
                self._pause(EMPTY_FLOOR_SECONDS)
            self._sleep(pause)

    def _sleep(self, seconds: float) -> None:
        """Wait for a wake-up, at most so long, reporting progress meanwhile."""
        until = time.monotonic() + seconds
        while not self._stopping:
            left = until - time.monotonic()
            if left <= 0 or self._signal.wait(min(left, 0.25) if self._progress else left):
                break
            self._report()
        self._report()

    def _pause(self, seconds: float) -> None:
        """Wait so long whatever wakes us, but a stop."""
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.counts)

    def _room(self) -> int:
        """Return how many rows to claim so that the threads are busy for `PREFETCH_SECONDS`, and no more."""
        rows = int(self.threads * PREFETCH_SECONDS / max(self._row_seconds, 1e-6))
        # Rows that wait for a stuck handler or for the child process take no thread.
        busy = self.held() - len(self._stuck) - self._isolated.qsize()
        return min(max(rows, self.threads), IN_FLIGHT_LIMIT) - busy

    def _claim(self, limit: int) -> list[engine.Lease]:
        return self._claimer.claim(limit, lease_seconds=self.queue_settings.lease_seconds)

    def _take(self, leases: Sequence[engine.Lease]) -> int:
        """Put claimed rows in flight and hand them to the threads; return how many were claimed."""
        fresh = 0
        for lease in leases:
            with self._flights_lock:
                known = self._flights.get(lease.id)
                if known is None:
                    flight = self._flights[lease.id] = _Flight(lease)
                else:
                    # Our own lease ran out while the row is still in our hands. The run in
                    # progress goes on under the new fence; a second one must not start.
                    known.lease.fence, known.lease.deadline = lease.fence, lease.deadline
                    continue
            if lease.lost_leases:
                self._isolate(flight)
            else:
                self._ready.append(flight)
                fresh += 1
        # One token wakes one thread, which then works until nothing is ready. More tokens than
        # threads would only be picked up for nothing.
        for _ in range(min(fresh, self.threads - self._work.qsize())):
            self._work.put(None)
        if leases:
            self._keeper_wake.set()
        return len(leases)

    def _purge(self) -> None:
        if self.queue_settings.retention_seconds is None:
            return
        gone = engine.purge(
            self.queue,
            using=self.using,
            older_than_seconds=self.queue_settings.retention_seconds,
            limit=PURGE_LIMIT,
        )
        if gone:
            logger.info("old rows removed queue=%s rows=%d", self.queue.name, gone)

    def _wind_down(self) -> None:
        """Finish what is in flight: in full, or after a stop within the grace time."""
        if not self._stopping:
            with self._landed:
                while self._flights and not self._stopping:
                    self._landed.wait(0.25)
                    self._report()
        if not self._stopping:
            return
        unstarted = self._withdraw(lambda _: True)
        with suppress(queue.Empty):
            while (isolated := self._isolated.get_nowait()) is not None:
                unstarted.append(isolated)
        if unstarted:
            self._release(unstarted)
            # Other relays sleep as long as these rows were leased.
            wake.notify(self.using)
        until = time.monotonic() + self.settings.shutdown_grace_seconds
        with self._landed:
            while self._flights and (left := until - time.monotonic()) > 0:
                self._landed.wait(min(left, 0.25))
            left_over = list(self._flights.values())
        for flight in left_over:
            run = flight.run
            if run is not None:
                run.interrupt()
                self._close(flight)
        with self._landed:
            deadline = time.monotonic() + 5
            while self._flights and time.monotonic() < deadline:
                self._landed.wait(0.1)
        if left_over:
            logger.warning("stopped with handlers at work, counted as failed attempts rows=%d", len(left_over))

    # --- rows in and out of flight

    def _withdraw(self, wanted: Callable[[_Flight], bool]) -> list[_Flight]:
        """Take rows back that no thread has started."""
        withdrawn = []
        for flight in list(self._ready):
            if wanted(flight):
                # Removing is atomic: either a thread took it first, or no thread can.
                try:
                    self._ready.remove(flight)
                except ValueError:
                    continue
                withdrawn.append(flight)
        return withdrawn

    def _release(self, flights: Sequence[_Flight]) -> None:
        for start in range(0, len(flights), CLAIM_LIMIT):
            chunk = flights[start : start + CLAIM_LIMIT]
            try:
                self.counts["released"] += engine.release([flight.lease for flight in chunk], using=self.using)
            except DATABASE_TROUBLE as error:
                # Their leases run out by themselves.
                self._database_failed("release", error)
            self._land(chunk)

    def _land(self, flights: Sequence[_Flight]) -> None:
        with self._landed:
            for flight in flights:
                if self._flights.get(flight.lease.id) is flight:
                    del self._flights[flight.lease.id]
            self._landed.notify_all()
        if self._hungry or (self.mode == "drain" and not self._flights):
            self._signal.set()

    def _close(self, flight: _Flight) -> None:
        """Send a row to the settler once all its handlers have ended; the first caller does."""
        run = flight.run
        if run is None or not run.complete:
            return
        with self._flights_lock:
            if flight.closed:
                return
            flight.closed = True
        if run.lost:
            self._drop(flight)
        else:
            self._outcomes.put((flight, run.settled()))

    def _drop(self, flight: _Flight) -> None:
        """Let go of a row whose lease is lost, without a word to the database."""
        self.counts["lost"] += 1
        logger.warning("lease lost, the row is another relay's now queue=%s id=%s", self.queue.name, flight.lease.id)
        self._land([flight])

    # --- handler threads

    def _add_thread(self, flight: _Flight | None = None) -> None:
        slot = _Slot()
        self._slots.append(slot)
        name = f"outbox-handler-{len(self._slots)}"
        threading.Thread(target=self._work_loop, args=(slot, flight), name=name, daemon=True).start()

    def _work_loop(self, slot: _Slot, flight: _Flight | None) -> None:
        look_after_connections()
        try:
            while not self._closing:
                if flight is None:
                    try:
                        flight = self._ready.popleft()
                    except IndexError:
                        self._work.get()
                        continue
                    if self._stopping:
                        # The relay may stop for the want of fit threads: this one starts nothing more.
                        self._release([flight])
                        return
                if not self._try_to_deliver(slot, flight):
                    return
                flight = None
        finally:
            close_connections()

    def _try_to_deliver(self, slot: _Slot, flight: _Flight) -> bool:
        """Deliver; what goes wrong outside the handlers costs this row an attempt and nobody else anything."""
        try:
            return self._deliver(slot, flight)
        except DATABASE_TROUBLE as error:
            # A mark could not be written, so nothing may be started or reported: the lease runs out.
            self._database_failed("record", error)
            self._drop(flight)
        except Exception as error:
            logger.exception("row cannot be delivered queue=%s id=%s", self.queue.name, flight.lease.id)
            self._charge(flight, error)
        return slot.end()

    def _charge(self, flight: _Flight, error: Exception) -> None:
        """Charge a row with what went wrong around its handlers: a stored row that cannot be read, say."""
        with self._flights_lock:
            if flight.closed:
                return
            flight.closed = True
        self._outcomes.put((flight, engine.Settled(flight.lease, engine.Retry(), error=clean_error(error))))

    def _next_handler(self, run: events.EventRun) -> events.Handler | None:
        """Take a run's next handler; where a mark comes first, wait for the database while the lease lasts."""
        wait = 0.05
        while True:
            try:
                return run.next_handler()
            except DATABASE_TROUBLE as error:
                self._database_failed("mark", error)
                time.sleep(wait)
                wait = min(wait * 2, FAILED_FLOOR_SECONDS)

    def _deliver(self, slot: _Slot, flight: _Flight) -> bool:
        """Run a row's handlers in this thread; return whether the thread is still the relay's."""
        began = time.perf_counter()
        run = flight.run
        if run is None:
            run = flight.run = events.EventRun(flight.lease, using=self.using)
        while (handler := self._next_handler(run)) is not None:
            limit = handler.timeout or self.queue_settings.timeout_seconds
            # A coroutine is cancelled in time; the thread is given up only if that does not help.
            slot.begin(flight, handler, limit + (COROUTINE_GRACE_SECONDS if handler.is_async else 0.0))
            trust_connections_briefly()
            # A context of its own, so that a language, a time zone or any other context
            # variable that the handler sets ends with it.
            result = contextvars.copy_context().run(run.invoke, handler, timeout=limit)
            left_behind = tidy_connections()
            if left_behind and result.ok:
                result = events.Result(left_behind)
            ours = slot.end()
            run.finish(handler, result)
            if not ours:
                self._close(flight)
                return False
        flight.elapsed += time.perf_counter() - began
        self._close(flight)
        return True

    # --- the settler

    def _settle_loop(self) -> None:
        ending = False
        while not ending:
            # What gathered while the last batch was written is the next batch.
            try:
                waiting = [self._outcomes.get(timeout=LOCKED_AGAIN_SECONDS if self._locked else None)]
            except queue.Empty:
                waiting = []
            if self._ready:
                # More are about to end: a statement for many costs little more than for one.
                time.sleep(SETTLE_GATHER_SECONDS)
            with suppress(queue.Empty):
                while len(waiting) < SETTLE_LIMIT:
                    waiting.append(self._outcomes.get_nowait())
            ending = None in waiting
            batch, self._locked = [*self._locked, *(item for item in waiting if item is not None)], []
            if batch:
                self._settle(batch)

    def _settle(self, batch: Sequence[tuple[_Flight, engine.Settled]]) -> None:
        wait, again = 0.05, False
        outcomes = [settled for _, settled in batch]
        while True:
            fences = {settled.lease: settled.lease.fence for settled in outcomes}
            try:
                written = engine.settle(
                    outcomes,
                    schedule=self.queue_settings.schedule,
                    using=self.using,
                    announce=events.announcement,
                    again=again,
                )
                break
            except DATABASE_TROUBLE as error:
                # The work is done; only the record of it is missing. Trying again costs
                # nothing, and the guard refuses what is another's by then.
                self._database_failed("settle", error)
                if self._closing:
                    return
                time.sleep(wait)
                wait, again = min(wait * 2, FAILED_FLOOR_SECONDS), True
        self._database_works()
        if locked := [item for item in batch if written.get(item[1].lease.id) == engine.LOCKED]:
            self._locked += locked
            batch = [item for item in batch if written.get(item[1].lease.id) != engine.LOCKED]
            if not batch:
                return
        lost = {lease for lease in fences if lease.id not in written}
        if reclaimed := self._reclaimed(lost, fences):
            self._settle([item for item in batch if item[1].lease in reclaimed])
            batch = [item for item in batch if item[1].lease not in reclaimed]
            if not batch:
                return
        for _, settled in batch:
            status = written.get(settled.lease.id, "lost")
            self.counts[status] += 1
            if status == "lost":
                logger.warning(
                    "outcome not written, the row is another relay's queue=%s id=%s", self.queue.name, settled.lease.id
                )
        mean = sum(flight.elapsed for flight, _ in batch) / len(batch)
        self._row_seconds += (mean - self._row_seconds) * min(1.0, len(batch) / 50)
        self._land([flight for flight, _ in batch])
        if any(status != "done" for status in written.values()):
            # It may fall due, or its announcement is, before the claim loop would look again.
            self._signal.set()

    def _reclaimed(self, lost: Collection[engine.Lease], fences: Mapping[engine.Lease, int]) -> set[engine.Lease]:
        """Return the rows, of those that a write did not reach, which this relay's own claim gave a new fence."""
        if not lost:
            return set()
        # A claim that is under way may have them, and hands the fence over before it lets go.
        with self._claiming:
            return {lease for lease in lost if lease.fence != fences[lease]}

    # --- the keeper

    def _keep_loop(self) -> None:
        lease_seconds = self.queue_settings.lease_seconds
        check_every = min(1.0, lease_seconds / 12)
        checked = time.monotonic()
        while not self._closing:
            if self._flights:
                self._keeper_wake.wait(TICK_SECONDS)
            else:
                self._keeper_wake.wait()
            self._keeper_wake.clear()
            self._watch_limits()
            if time.monotonic() - checked >= check_every:
                checked = time.monotonic()
                self._renew(lease_seconds)

    def _watch_limits(self) -> None:
        now = time.monotonic()
        for slot in list(self._slots):
            if slot.flight is not None and now >= slot.deadline:
                self._abandon(slot)
        for slot in list(self._stuck):
            flight, handler = slot.flight, slot.handler
            if flight is None or handler is None:
                self._stuck.remove(slot)  # it came back
            elif now >= slot.deadline + self.settings.stuck_seconds and flight.run is not None:
                text = (
                    f"the handler took longer than its {slot.deadline - slot.started:g} s"
                    f" and did not return within {self.settings.stuck_seconds:g} s more"
                )
                flight.run.finish(handler, events.Result(text))
                self._close(flight)

    def _abandon(self, slot: _Slot) -> None:
        """Give up the thread of a handler past its limit: its row waits for it, everything else goes on."""
        with slot.lock:
            flight, handler = slot.flight, slot.handler
            if flight is None or handler is None or time.monotonic() < slot.deadline:
                return
            slot.abandoned = True
        self._slots.remove(slot)
        self._stuck.append(slot)
        logger.warning(
            "handler past its time limit handler=%s event=%s limit_seconds=%g stuck_threads=%d",
            handler.name,
            flight.lease.id,
            slot.deadline - slot.started,
            len(self._stuck),
        )
        # The event's other handlers go on in the thread that takes this one's place.
        self._add_thread(flight)
        if len(self._stuck) > self.threads:
            logger.error("too many stuck threads, the relay ends to be started anew stuck_threads=%d", len(self._stuck))
            self._exit_code = EXIT_RECYCLE
            self.stop()

    def _renew(self, lease_seconds: float) -> None:
        now = time.monotonic()
        with self._flights_lock:
            aging = [flight for flight in self._flights.values() if flight.lease.deadline - now < lease_seconds * 2 / 3]
        started = {flight.lease: dict(flight.run.delivered) for flight in aging if flight.run is not None}
        flights = {flight.lease: flight for flight in aging}
        try:
            if started:
                fences = {lease: lease.fence for lease in started}
                lost = engine.renew(started, using=self.using)
                for lease in set(lost) - self._reclaimed(lost, fences):
                    run = flights[lease].run
                    if run is not None:
                        run.lost = True
            late = self._withdraw(lambda flight: flight.lease.deadline - now < lease_seconds / 3)
            if late:
                self._release(late)
        except DATABASE_TROUBLE as error:
            self._database_failed("renew", error)

    # --- rows that killed a process before

    def _isolate(self, flight: _Flight) -> None:
        try:
            flight.run = events.EventRun(flight.lease, using=self.using)
        except Exception as error:
            logger.exception("row cannot be delivered queue=%s id=%s", self.queue.name, flight.lease.id)
            self._charge(flight, error)
            return
        self._isolated.put(flight)
        if self._isolator is None:
            self._isolator = threading.Thread(
                target=self._vital, args=(self._isolate_loop,), name="outbox-isolate", daemon=True
            )
            self._isolator.start()

    def _isolate_loop(self) -> None:
        while (flight := self._isolated.get()) is not None:
            if self._stopping:
                self._release([flight])
                continue
            try:
                self._deliver_in_child(flight)
            except DATABASE_TROUBLE as error:
                self._database_failed("record", error)
                self._drop(flight)
            except Exception as error:
                logger.exception("row cannot be delivered queue=%s id=%s", self.queue.name, flight.lease.id)
                self._charge(flight, error)
            else:
                self._close(flight)

    def _deliver_in_child(self, flight: _Flight) -> None:
        """Run a row's handlers in a process of its own, whose death is only the handler's."""
        run = flight.run or events.EventRun(flight.lease, using=self.using)
        child: Child | None = None
        try:
            while (handler := self._next_handler(run)) is not None:
                limit = handler.timeout or self.queue_settings.timeout_seconds
                while True:
                    child = self._child = child or Child(self.using)
                    result = child.run(run.lease, handler.name, limit)
                    if result is None and self._stopping:
                        # Whoever stops this process may have ended that one too; it is not the handler's fault.
                        result = events.Result("interrupted: the relay was stopped while this handler ran")
                    if result is not None:
                        run.finish(handler, result)
                        break
                    child.end()
                    child = None
                    if not run.start_again(handler):
                        break
        finally:
            if child is not None:
                child.end()

    # --- the database's state, told once

    def _database_failed(self, step: str, error: Exception) -> None:
        with suppress(Exception):
            connections[self.using].close()
        if not self._database_down:
            self._database_down = True
            logger.error("database trouble step=%s database=%s error=%s", step, self.using, clean_error(error))

    def _database_works(self) -> None:
        if self._database_down:
            self._database_down = False
            logger.warning("database works again database=%s", self.using)
