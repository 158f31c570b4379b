"""Several relay processes under one command: started, watched, started again, stopped together."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final

from django_outbox.conf import get_settings
from django_outbox.metrics import Address, serving
from django_outbox.relay.loop import EXIT_FAILED, EXIT_RECYCLE, Mode, Relay

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

logger = logging.getLogger("django_outbox.relay")

STAGGER_SECONDS: Final = 0.2
BACKOFF_BASE_SECONDS: Final = 0.5
BACKOFF_CAP_SECONDS: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A process that lived so long is not one that cannot start: its successor starts with the shortest pause."""
GIVE_UP_AFTER: Final = 10
"""Deaths in a row after which a process that was to end by itself is not started again."""
REPORT_SECONDS: Final = 60.0
STOP_SLACK_SECONDS: Final = 10.0
TICK_SECONDS: Final = 1.0
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class _Place:
    """One of the relay processes: who it is now, or when the next one starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start_at: float | None = 0.0
        self.process: SpawnProcess | None = None
        self.pipe: Connection | None = None
        self.started = 0.0
        self.deaths = 0
        self.counts: Counter[str] = Counter()
        self.asked = False

    @property
    def over(self) -> bool:
        return self.process is None and self.start_at is None


class Supervisor:
    """
    Runs so many relays for one database, each in a spawned process of its own.

    A relay that dies is started again: after a pause that doubles from 0.5 s to 30 s and
    is short again once one has lived for a minute, or at once if it asked for that (exit
    code 75). What it had in hand is another relay's when its lease is over. SIGTERM and
    SIGINT stop all of them. A relay whose supervisor is gone stops by itself.
    """

    def __init__(
        self,
        *,
        processes: int,
        using: str,
        queues: Sequence[str] | None = None,
        threads: int | None,
        mode: Mode,
        metrics: Address | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """What the relays of all places did, as far as they could still tell."""
        self._options = {"using": using, "queues": queues, "threads": threads, "mode": mode}
        self._metrics = metrics
        self._mode = mode
        self._places = [_Place(number) for number in range(1, processes + 1)]
        self._grace_seconds = get_settings().shutdown_grace_seconds + STOP_SLACK_SECONDS
        # Spawned, never forked: a fork would share this process's sockets and locks.
        self._context = multiprocessing.get_context("spawn")
        self._stopping = False
        self._kill_at: float | None = None
        self._next_start = 0.0
        self._next_report = 0.0
        self._exit_code = 0

    def run(self) -> int:
        """
        Run until a signal stops it, or until every relay has done what the mode asks for; return the exit code.

        To be called in the main thread, which gets the signals. The code is 0 after a stop,
        whatever the relays were doing.
        """
        # It lifts a block of signals when it starts, so it starts before `_quietly` sets one.
        resource_tracker.ensure_running()
        self._next_report = time.monotonic() + REPORT_SECONDS
        try:
            with _waking(self._stop) as woken:
                self._turn(time.monotonic())
                while not all(place.over for place in self._places):
                    self._wait(woken)
                    self._turn(time.monotonic())
        finally:
            # Nobody is left after a stop; after a failure of ours the interpreter waits for them.
            for place in self._places:
                if place.process is not None:
                    place.process.terminate()
        return 0 if self._stopping else self._exit_code

    def _stop(self) -> None:
        self._stopping = True

    def _turn(self, now: float) -> None:
        """Do for each place what is due."""
        if self._stopping and self._kill_at is None:
            self._kill_at = now + self._grace_seconds
            for place in self._places:
                place.start_at = None
                if place.process is not None:
                    place.process.terminate()
        kill = self._kill_at is not None and now >= self._kill_at
        if kill:
            self._kill_at = math.inf
        report = now >= self._next_report
        if report:
            self._next_report = now + REPORT_SECONDS
        for place in self._places:
            if place.process is None:
                if place.start_at is not None and now >= max(place.start_at, self._next_start):
                    self._next_start = now + STAGGER_SECONDS
                    self._start(place)
            elif place.process.exitcode is not None:
                self._bury(place, place.process, now)
            elif kill:
                logger.error("relay did not stop and is killed process=%d pid=%s", place.number, place.process.pid)
                place.process.kill()
            elif report:
                self._ask(place)

    def _start(self, place: _Place) -> None:
        place.pipe, far_end = self._context.Pipe()
        process = self._context.Process(
            target=_relay_main,
            args=(far_end, self._options, self._metrics_of(place)),
            name=f"relay-{place.number}",
        )
        place.started = time.monotonic()
        place.counts, place.asked = Counter(), False
        try:
            with _quietly():
                process.start()
        except OSError as error:
            # No memory or no process to be had: as good as dead at birth.
            logger.error("relay could not be started process=%d error=%s", place.number, error)
            place.pipe.close()
            self._again(place, place.started)
        else:
            place.process, place.start_at = process, None
            logger.info("relay started process=%d pid=%s", place.number, process.pid)
        finally:
            far_end.close()

    def _metrics_of(self, place: _Place) -> Address | None:
        """Return where a place's relay serves its metrics: each at a port of its own."""
        if self._metrics is None:
            return None
        address, port = self._metrics
        return address, port + place.number - 1

    def _bury(self, place: _Place, process: SpawnProcess, now: float) -> None:
        """Take leave of a process that has ended, and plan the next one."""
        while (pipe := place.pipe) is not None and pipe.poll():
            self._listen(place, pipe)
        if pipe is not None:
            pipe.close()
        code, pid, place.process = process.exitcode or 0, process.pid, None
        process.close()
        if self._stopping or (code == 0 and self._mode != "serve"):
            logger.info("relay ended process=%d pid=%s", place.number, pid)
            return
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        logger.warning("relay ended unasked process=%d pid=%s by=%r", place.number, pid, how)
        if code == EXIT_RECYCLE:
            place.start_at = now
        else:
            self._again(place, now)

    def _again(self, place: _Place, now: float) -> None:
        """Plan the next start of a place whose process died."""
        if now - place.started >= HEALTHY_SECONDS:
            place.deaths = 0
        place.deaths += 1
        if self._mode != "serve" and place.deaths >= GIVE_UP_AFTER:
            logger.error("relay died too often and is given up process=%d deaths=%d", place.number, place.deaths)
            place.start_at, self._exit_code = None, EXIT_FAILED
            return
        pause = min(BACKOFF_BASE_SECONDS * 2 ** min(place.deaths - 1, 16), BACKOFF_CAP_SECONDS)
        place.start_at = now + pause * random.uniform(1.0, 1.25)  # noqa: S311  spread, not secrecy

    def _ask(self, place: _Place) -> None:
        """Ask a relay what it does; its answer becomes a line of the log."""
        if place.pipe is None:
            return
        if place.asked:
            logger.warning("relay does not answer process=%d seconds=%g", place.number, REPORT_SECONDS)
            return
        with suppress(OSError):
            place.pipe.send(None)
            place.asked = True

    def _listen(self, place: _Place, pipe: Connection) -> None:
        """Take what a relay tells: the counts of all it did, and how many rows it has in hand."""
        try:
            counts, held = pipe.recv()
        except (EOFError, OSError):
            pipe.close()
            place.pipe = None
            return
        new, place.counts = counts - place.counts, counts
        self.counts += new
        if place.asked:
            place.asked = False
            logger.info(
                "relay at work process=%d seconds=%g done=%d failed=%d in_flight=%d",
                place.number,
                REPORT_SECONDS,
                new["done"],
                new["waiting"] + new["dead"] + new["failed"],
                held,
            )

    def _wait(self, woken: socket.socket) -> None:
        """Sleep until a signal, a report or the next thing to do."""
        now = time.monotonic()
        starts = [max(place.start_at, self._next_start) for place in self._places if place.start_at is not None]
        until = min([*starts, now + TICK_SECONDS])
        speaking = {place.pipe: place for place in self._places if place.process is not None and place.pipe is not None}
        ready = pipes.wait([woken, *speaking], max(until - now, 0.0))
        for pipe, place in speaking.items():
            if pipe in ready:
                self._listen(place, pipe)
        with suppress(BlockingIOError):
            woken.recv(4096)


@contextmanager
def _waking(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """Call `stop` at SIGTERM and SIGINT; what is yielded becomes readable at these and when a child ends."""
    handlers: dict[signal.Signals, Callable[..., None]] = dict.fromkeys(STOP_SIGNALS, lambda *_: stop())
    if sys.platform != "win32":
        handlers[signal.SIGCHLD] = lambda *_: None
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.settimeout(0)
        writer.settimeout(0)
        # The interpreter writes there itself: a handler that only sets a flag would not end a wait.
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd_before)


@contextmanager
def _quietly() -> Iterator[None]:
    """Have a process that is started meanwhile get no signal to stop before it can answer one."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ensure_logging(*, prefix: str = "") -> None:
    """Log to standard error where the project's logging says nothing about this package."""
    if not logging.getLogger("django_outbox").hasHandlers():
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {prefix}%(levelname)s %(name)s %(message)s")


# --- in the relay's process


def tune_collector() -> None:
    """Make a process that is a relay's alone collect garbage less often."""
    # What start-up made stays for the process's life, and rows come by the hundred: looking
    # through all of it every few rows would cost a seventh of the relay's time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _relay_main(pipe: Connection, options: dict[str, Any], metrics: Address | None) -> None:
    relay: Relay | None = None
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        if relay is not None:
            relay.stop()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    import django  # noqa: PLC0415

    django.setup()
    ensure_logging(prefix="%(processName)s ")
    relay = Relay(**options)
    if stopping:
        return
    telling = threading.Lock()
    threading.Thread(target=_answer, args=(relay, pipe, telling), name="outbox-answer", daemon=True).start()
    tune_collector()
    with serving(relay, metrics):
        code = relay.run()
    with telling, suppress(OSError):
        pipe.send((Counter(relay.counts), relay.held()))
    sys.exit(code)


def _answer(relay: Relay, pipe: Connection, telling: threading.Lock) -> None:
    """Answer the supervisor's questions; at its end, stop."""
    try:
        while True:
            pipe.recv()
            with telling:
                pipe.send((Counter(relay.counts), relay.held()))
    except (EOFError, OSError):
        logger.warning("the supervisor is gone, so the relay stops")
        relay.stop()
