"""The relay's loop: claim what is due, hand it out, sleep until there may be more, and wind down."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.conf import OutboxSettings, get_settings
from django_outbox.relay.connections import DATABASE_TROUBLE, DatabaseHealth, close_connections
from django_outbox.relay.deadlines import bound_statements
from django_outbox.relay.flights import Flight, Flights
from django_outbox.relay.isolator import Isolator
from django_outbox.relay.keeper import Keeper
from django_outbox.relay.lane import Lane
from django_outbox.relay.queues import chosen

logger = logging.getLogger("django_outbox.relay")

Mode = Literal["serve", "drain", "once"]

EXIT_FAILED: Final = 1
"""Exit code of a relay that failed in a way it does not know."""

EXIT_RECYCLE: Final = 75
"""Exit code of a relay with too many stuck threads, for a supervisor to start another (EX_TEMPFAIL)."""

EMPTY_FLOOR_SECONDS: Final = 0.05
ASK_AFTER_SECONDS: Final = wake.NOTIFY_WINDOW_SECONDS + 0.003
"""
How long after a claim that brought all there was a queue is asked when its next row falls due.

By then the window has passed in which a process that notified does not do so again, so
the question finds what was committed in it.
"""
FAILED_FLOOR_SECONDS: Final = 2.0
SPARING_FLOOR_SECONDS: Final = 1.0
SETTLE_UP_SECONDS: Final = 5.0
PURGE_EVERY_SECONDS: Final = 60.0
PURGE_IDLE_SECONDS: Final = 300.0
"""The same after a purge that found nothing: a relay with nothing to do asks the database little."""
PURGE_AGAIN_SECONDS: Final = 1.0
"""The same after one that its limit ended: a table must not grow because rows end faster than they are deleted."""
PURGE_LIMIT: Final = 2_000


class Relay:
    """
    One relay process's worth of delivery, for one database and the given queues (by default all).

    `run` returns when `stop` was called (from any thread or signal handler), or when
    the mode's work is done: ``once`` claims one time, ``drain`` goes on until nothing is
    due. ``progress`` is called a few times a second with the counts so far.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        queues: Sequence[str] | None = None,
        threads: int | None = None,
        mode: Mode = "serve",
        progress: Callable[[Counter[str]], None] | None = None,
    ) -> None:
        self.settings: OutboxSettings = get_settings()
        self.using = using or self.settings.database
        self.mode = mode
        self.holder = engine.holder_name()
        self.watcher: wake.Watcher | None = None
        self._progress = progress
        self._signal = wake.Signal()
        self._stopping = False
        self._exit_code = 0
        self._recovering = False
        self.health = DatabaseHealth(self.using)
        self.flights = Flights(using=self.using, health=self.health, landed=self._landed)
        self.flights.lanes = self.lanes = [
            Lane(work, holder=self.holder, threads=threads, flights=self.flights, health=self.health)
            for work in chosen(queues)
        ]
        self._keeper = Keeper(
            self.flights,
            health=self.health,
            stuck_seconds=self.settings.stuck_seconds,
            slept=self._recover,
            overloaded=self._recycle,
        )
        self._isolator = Isolator(self.flights, stopping=lambda: self._stopping)
        self._isolating: threading.Thread | None = None

    @property
    def counts(self) -> Counter[str]:
        """Rows by what became of them: the status written, ``lost`` or ``released``."""
        return self.flights.counts

    def stop(self) -> None:
        """Ask the relay to stop; safe to call from a signal handler."""
        self._stopping = True
        self._signal.set()

    def held(self) -> int:
        """Return how many rows this process owns; zero when nothing is in its hands."""
        return self.flights.held()

    def run(self) -> int:
        """Deliver until the mode's work is done or `stop` is called; return the process's exit code."""
        helpers = [
            self._thread("settle", self.flights.settle_until_ended),
            self._thread("renew", self._keeper.renew_until_ended),
            self._thread("limits", self._keeper.watch_until_ended),
        ]
        for lane in self.lanes:
            lane.start(stopping=lambda: self._stopping)
        self.watcher = wake.watch(self.using, self._wake, dsn=self.settings.listen_dsn)
        if self.mode == "serve":
            self.watcher.start()
        bound_statements()
        try:
            self._claim_loop()
            self._wind_down()
        finally:
            self.watcher.stop()
            self._keeper.end()
            self.flights.end()
            self._isolator.end()
            for lane in self.lanes:
                lane.end()
            for helper in helpers:
                helper.join(timeout=10)
            close_connections()
        self._report()
        return self._exit_code

    def _thread(self, name: str, loop: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._vital, args=(loop,), name=f"outbox-{name}", daemon=True)
        thread.start()
        return thread

    def _vital(self, loop: Callable[[], None]) -> None:
        """Run a thread without which the relay must not go on: its end by an error is the relay's."""
        bound_statements()
        try:
            loop()
        except BaseException:
            logger.critical("the relay ends, a thread of it failed thread=%s", threading.current_thread().name)
            self._exit_code = EXIT_FAILED
            self.stop()
            raise
        finally:
            close_connections()

    def _recycle(self) -> None:
        """End this process for another to be started: too many of its threads are stuck."""
        if self._exit_code != EXIT_RECYCLE:
            stuck = sum(len(lane.stuck) for lane in self.lanes)
            logger.error("too many stuck threads, the relay ends to be started anew stuck_threads=%d", stuck)
            self._exit_code = EXIT_RECYCLE
        self.stop()

    # --- what wakes the loop

    def _wake(self, queue: str | None) -> None:
        """Look at a queue soon, or at all of them."""
        for lane in self.lanes:
            if queue is None or queue == lane.work.queue.name:
                lane.woken = True
        self._signal.set()

    def _landed(self, lane: Lane, *, due: bool) -> None:
        if due:
            # It may fall due, or the event that announces its death is.
            self._wake(lane.work.queue.name)
            self._wake("events")
        elif lane.work.look_when_landed:
            lane.freed = True
            self._signal.set()
        elif lane.hungry and lane.wants_more():
            lane.woken = True
            self._signal.set()
        elif self.mode == "drain" and not self.held():
            self._signal.set()

    def _recover(self) -> None:
        """Note that this relay was away: its leases may have run out while it still works on the rows."""
        self._recovering = True
        # A look that failed has used up its wake-up, and what woke us may be committed long since.
        for lane in self.lanes:
            lane.woken, lane.due_at = True, 0.0

    # --- claiming

    def _claim_loop(self) -> None:
        # Relays that start at one moment need not purge at one moment.
        purge_at = time.monotonic() + PURGE_EVERY_SECONDS * random.uniform(1, 2)  # noqa: S311
        while not self._stopping:
            # Before the looks, never after: what commits while one runs wakes us again.
            self._signal.clear()
            idle = not self.held()
            claimed = 0
            try:
                if self._recovering:
                    self._come_back()
                for lane in self.lanes:
                    if self._look_due(lane) or (idle and self.mode != "serve" and not self._stopping):
                        claimed += self._look(lane)
                        self.health.works()
                has_time = self.mode == "serve" and not any(lane.hungry for lane in self.lanes)
                if has_time and time.monotonic() >= purge_at:
                    # Set before: one that the database refuses must not be all that the relay does.
                    purge_at = time.monotonic() + PURGE_EVERY_SECONDS
                    purge_at = self._purge() + time.monotonic()
            except DATABASE_TROUBLE as error:
                self.health.failed("claim", error)
                self._recover()
                self._pause(FAILED_FLOOR_SECONDS)
                continue
            if self.mode == "once" or (
                self.mode == "drain" and idle and not claimed and not any(lane.hungry for lane in self.lanes)
            ):
                return
            next_look = min(self._next_look(lane) for lane in self.lanes)
            self._sleep(min(next_look, purge_at) if has_time else next_look)

    def _look_due(self, lane: Lane) -> bool:
        if self._stopping:
            return False
        now = time.monotonic()
        return now >= lane.look_at or lane.freed or (lane.woken and now >= lane.floor_at)

    def _next_look(self, lane: Lane) -> float:
        if lane.freed:
            return 0.0
        if lane.woken:
            return min(lane.look_at, lane.floor_at)
        return lane.look_at

    def _look(self, lane: Lane) -> int:
        """Claim what is due in a queue and hand it out; return how many rows came, and note when to look again."""
        woken, lane.woken = lane.woken, False
        freed, lane.freed = lane.freed, False
        if lane.ask_only and not woken and not freed:
            self._ask(lane)
            return 0
        asked = min(lane.room(), lane.claim_limit())
        claimed = 0
        if asked > 0:
            fresh = woken and self.mode == "serve" and lane.only_new_is_due(time.monotonic())
            with self.flights.claiming:
                leases, lane.hungry = self._claim(lane, asked, fresh=fresh)
                claimed = self._take(lane, leases)
        else:
            lane.hungry = True
        now = time.monotonic()
        if lane.hungry:
            # As much came as was asked for: there is more, and either room for it or rows to wait for.
            lane.look_at = now if lane.wants_more() else now + self.settings.poll_seconds
        elif self.mode == "serve" and lane.work.asks_database:
            # The rows start first: the question costs this thread and the server as much as a claim of one row.
            lane.ask_only, lane.look_at = True, now + ASK_AFTER_SECONDS
        else:
            self._ask(lane)
            if woken:
                lane.look_at = min(lane.look_at, now + ASK_AFTER_SECONDS)
        # One wake-up for nothing is ordinary: its row was claimed with the one before it.
        # A second in a row may be one of many, and they are answered all at once. Of rows that
        # land there are not many.
        lane.empty = 0 if claimed or freed or asked <= 0 else lane.empty + 1
        lane.floor_at = now + EMPTY_FLOOR_SECONDS if lane.empty > 1 else 0.0
        if lane.empty > 1:
            lane.look_at = max(lane.look_at, lane.floor_at)
        return claimed

    def _ask(self, lane: Lane) -> None:
        """Note when a queue's next row falls due; without one in sight, when to ask again."""
        now, poll = time.monotonic(), self.settings.poll_seconds
        lane.fresh_since = 0.0
        due = lane.work.next_due_seconds(using=self.using)
        if due is not None and now < lane.spare_until:
            due = max(due, SPARING_FLOOR_SECONDS)
        in_sight = due is not None and due <= poll
        # A drain ends with a look that claims nothing, so a question is not enough for one.
        lane.ask_only = self.mode == "serve" and lane.work.asks_database and not in_sight
        lane.look_at = lane.due_at = now + (due if due is not None and in_sight else poll)

    def _claim(self, lane: Lane, limit: int, *, fresh: bool) -> tuple[list[engine.Lease], bool]:
        """Claim up to so many rows, scope by scope; return them, and whether there may be more."""
        leases = lane.claimer.claim_scopes(
            lane.work.scopes(limit, using=self.using),
            limit,
            lease_seconds=lane.settings.lease_seconds,
            spare_expired=time.monotonic() < lane.spare_until,
            fresh=fresh,
        )
        return leases, lane.claimer.more

    def _take(self, lane: Lane, leases: Sequence[engine.Lease]) -> int:
        """Put claimed rows in flight and hand them to the threads; return how many were claimed."""
        if not leases:
            return 0
        fresh = self.flights.take(lane, leases)
        lane.work.claimed([flight.lease for flight in fresh])
        self._keeper.note_claimed()
        plain: list[Flight] = []
        for flight in fresh:
            if flight.lease.lost_leases:
                self._isolate(flight)
            else:
                plain.append(flight)
        lane.offer(plain)
        return len(leases)

    def _isolate(self, flight: Flight) -> None:
        if self._isolating is None:
            self._isolating = self._thread("isolate", self._isolator.run)
        self._isolator.put(flight)

    def _come_back(self) -> None:
        """
        After this relay's own outage: first settle and renew what it holds, and spare what others hold.

        They were away as well, most likely, and their rows are as little lost as ours. A
        third of a lease is the time in which a living relay renews.
        """
        now = time.monotonic()
        for lane in self.lanes:
            lane.spare_until = now + lane.settings.lease_seconds / 3
        self._keeper.renew(everything=True)
        until = time.monotonic() + SETTLE_UP_SECONDS
        with self.flights.landed:
            while not self._stopping and not self.flights.settled_up() and time.monotonic() < until:
                self.flights.landed.wait(0.1)
        self._recovering = False

    def _purge(self) -> float:
        """Delete old rows of all queues, a bounded number of each; return the seconds until the next time."""
        wait = PURGE_IDLE_SECONDS
        for lane in self.lanes:
            if gone := lane.work.purge(using=self.using, limit=PURGE_LIMIT):
                logger.info("old rows removed queue=%s rows=%d", lane.work.queue.name, gone)
                wait = min(wait, PURGE_AGAIN_SECONDS if gone >= PURGE_LIMIT else PURGE_EVERY_SECONDS)
        return wait

    # --- sleeping

    def _sleep(self, until: float) -> None:
        """Wait for a wake-up, at most until a moment, reporting progress meanwhile."""
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

    # --- winding down

    def _wind_down(self) -> None:
        """Finish what is in flight: in full, or after a stop within the grace time."""
        landed = self.flights.landed
        if not self._stopping:
            with landed:
                while self.held() and not self._stopping:
                    landed.wait(0.25)
                    self._report()
        if not self._stopping:
            return
        for lane in self.lanes:
            self._give_back(lane, lane.withdraw(lambda _: True))
        isolated = self._isolator.withdraw()
        for lane in self.lanes:
            self._give_back(lane, [flight for flight in isolated if flight.lane is lane])
        until = time.monotonic() + self.settings.shutdown_grace_seconds
        with landed:
            while self.held() and (left := until - time.monotonic()) > 0:
                landed.wait(min(left, 0.25))
        left_over = self.flights.all()
        for flight in left_over:
            if flight.run is not None:
                flight.run.interrupt()
                self.flights.close(flight)
        with landed:
            landed.wait_for(lambda: not self.held(), 5)
        if left_over:
            logger.warning("stopped with handlers at work, counted as failed attempts rows=%d", len(left_over))

    def _give_back(self, lane: Lane, flights: Sequence[Flight]) -> None:
        if flights:
            self.flights.release(flights)
            # Other relays sleep as long as these rows were leased.
            with suppress(*DATABASE_TROUBLE):
                wake.notify(self.using, queue=lane.work.queue.name)
