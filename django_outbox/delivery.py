"""
The seam between the relay and the queues: what a queue must offer to be served.

A queue is a `Work`. Each of its leased rows becomes a `Run`, which the relay takes
through its steps: it asks for the next one, runs it in a thread under a time limit,
reports how it ended, and settles the row when nothing is left. An event has a step
per handler; an email, a webhook delivery and a task have one, and share `SingleRun`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol
from uuid import UUID

from django.db import connections, transaction

from django_outbox import lease as engine
from django_outbox.conf import QueueSettings
from django_outbox.errors import Reject, RetryLater, clean_error

__all__ = [
    "INTERRUPTED",
    "MAX_STARTS_MARKED",
    "WORKER_LOST",
    "Cause",
    "LeaseLost",
    "Result",
    "Run",
    "SingleRun",
    "Step",
    "Work",
    "attempt",
    "current_cause",
]

logger = logging.getLogger("django_outbox.delivery")

MAX_STARTS_MARKED: Final = 2
"""Marks at which a step is not started again: with the unmarked first start, three starts in all."""
WORKER_LOST: Final = f"worker lost: its process died {MAX_STARTS_MARKED + 1} times while this ran"
INTERRUPTED: Final = "interrupted: the relay was stopped while this ran"


class LeaseLost(Exception):
    """The row belongs to another by now; whatever was about to be written is rolled back."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one step ended. No error: it succeeded."""

    error: str = ""
    """Cleaned by whoever makes the result; see `errors.clean_error`."""
    rejected: bool = False
    delay: float | None = None
    """The least wait that was asked for, in seconds."""
    outcome: engine.Outcome | None = None
    """Of a single step: what becomes of the row, where the fields above do not say it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of a single step: the queue's own columns to write with the outcome."""

    @property
    def ok(self) -> bool:
        """Whether the delivery was made."""
        return not self.error


SUCCESS: Final = Result()
"""What a step that returned nothing came to; one object for all of them, made once."""


# --- the cause of what is written meanwhile --------------------------------------------------------------------------


class Cause(NamedTuple):
    """The row whose delivery runs in this context: what an emit or an enqueue inherits from it."""

    event_id: UUID | None = None
    request_id: str = ""
    organization_id: str = ""
    quiet: bool = False
    """Deaths of what a quiet row causes are not announced, so that no announcement causes another."""


current_cause: ContextVar[Cause | None] = ContextVar("django_outbox_cause", default=None)


# --- runs ------------------------------------------------------------------------------------------------------------


class Step(Protocol):
    """One call that may take long, fail, hang, or kill its process."""

    @property
    def name(self) -> str:
        """Its name within the row, the same in every process."""

    @property
    def timeout(self) -> float | None:
        """Its time limit in seconds; ``None``: the queue's."""

    @property
    def is_async(self) -> bool:
        """Whether it ends by itself at its time limit."""


class Run(Protocol):
    """One leased row on its way. Several threads may share it, so that a stuck step does not hold up the others."""

    lease: engine.Lease
    lost: bool
    """Set by the relay, too: the row is another's, so no step of it may start."""
    delivered: dict[str, str]
    """Deliveries made so far, which a renewal carries along."""

    @property
    def complete(self) -> bool:
        """Whether no step is running or left to run."""

    def step(self, name: str) -> Step | None:
        """Return the step of a name, if this process has the code for it."""

    def next_step(self) -> Step | None:
        """Take the next step to run, or ``None`` when none may start (any more). May write to the database first."""

    def invoke(self, step: Any, *, timeout: float, savepoint: bool = False) -> Result:
        """Run a step in this thread and return how it ended; nothing it raises gets out."""

    def finish(self, step: Any, result: Result) -> None:
        """Record how a step ended. The second report about one start is ignored."""

    def start_again(self, step: Any) -> bool:
        """After the process of a started step died: count that, and return whether it may be started again."""

    def interrupt(self) -> None:
        """Start no further step, and count those that still run as failed attempts."""

    def settled(self) -> engine.Settled:
        """Return how the row ended, once `complete`."""


def attempt(
    call: Callable[[], Result | None], *, cause: Cause, using: str, savepoint: bool, name: str, lease: engine.Lease
) -> Result:
    """
    Call, and return how it ended: what it returned, or what it raised as a result.

    `RetryLater` and `Reject` are answers, `LeaseLost` gets out, everything else is a
    failure and logged with its traceback. With ``savepoint`` there is one around the
    call when a transaction is open, as in a test.
    """
    token = current_cause.set(cause)
    try:
        if savepoint and connections[using].in_atomic_block:
            block: Any = transaction.atomic(using=using)
            # To Django's durable check and to ours this is the test's transaction, not the handler's.
            block._from_testcase = True
            with block:
                result = call()
        else:
            result = call()
    except RetryLater as error:
        logger.info("handler asks for a retry queue=%s handler=%s id=%s", lease.queue.name, name, lease.id)
        return Result(clean_error(error), delay=error.delay)
    except Reject as error:
        logger.warning("handler rejects the row queue=%s handler=%s id=%s", lease.queue.name, name, lease.id)
        return Result(clean_error(error), rejected=True)
    except LeaseLost:
        raise
    except BaseException as error:
        # Time-outs of gevent, SystemExit and their like are no Exceptions, and end a handler all the same.
        # In a test, what is none ends the test: pytest.fail() and pytest.skip() are made so.
        if isinstance(error, KeyboardInterrupt) or (savepoint and not isinstance(error, _ENDS_A_STEP)):
            raise
        logger.exception("handler failed queue=%s handler=%s id=%s", lease.queue.name, name, lease.id)
        return Result(clean_error(error))
    finally:
        current_cause.reset(token)
    return result or SUCCESS


_ENDS_A_STEP: Final = (Exception, SystemExit, asyncio.CancelledError)


class SingleRun(ABC):
    """
    A leased row with one step, which is the run itself; a subclass says in `perform` what is done.

    A row whose last holder never settled it is marked right before it starts again. It
    then runs in a child process, and with two marks it is not started any more.
    """

    name: str
    timeout: float | None = None
    is_async: bool = False

    def __init__(self, lease: engine.Lease, *, using: str, name: str) -> None:
        self.lease = lease
        self.using = using
        self.name = name
        self.lost = False
        self.delivered: dict[str, str] = {}
        self._marks = lease.lost_leases
        self._begun = self._running = self._ended = False
        self._result: Result | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def perform(self, *, timeout: float) -> Result:
        """Do it; what this raises is a failed attempt. Nothing of the engine is open meanwhile."""

    def refused(self) -> Result | None:
        """Return how the row ends without being started, if it does: paused, expired, unknown here."""
        return None

    @property
    def cause(self) -> Cause:
        """What an emit or an enqueue inherits that happens meanwhile."""
        return Cause(quiet=self.lease.quiet)

    # The rest is what the relay calls.

    @property
    def complete(self) -> bool:
        """Whether the step is over, or will not start."""
        with self._lock:
            return not self._running and (self._begun or self._ended or self.lost)

    def step(self, name: str) -> SingleRun | None:
        """Return itself, by its name."""
        return self if name == self.name else None

    def next_step(self) -> SingleRun | None:
        """Take the step; only the first call gets it, and only while the lease runs."""
        with self._lock:
            if self._over():
                return None
            if not self.lease.current():
                self._ended = True  # without a result: what was not begun is released
                return None
        # Not under the lock: it may wait for the database, and a stop must not wait for that.
        refused = self.refused()
        with self._lock:
            if self._over():
                return None
            if refused is not None:
                self._result, self._ended = refused, True
                return None
            if (self.lease.suspect or self._marks) and not self._mark():
                self._ended = True
                return None
            self._begun = self._running = True
            return self

    def _over(self) -> bool:
        return self._begun or self._ended or self.lost

    def _mark(self) -> bool:
        """Count this start on the row before it happens; return whether it may happen."""
        if self._marks >= MAX_STARTS_MARKED:
            self._result = Result(WORKER_LOST, outcome=engine.Dead())
            return False
        if not engine.record(self.lease, using=self.using, lost_leases=self._marks + 1):
            self.lost = True
            return False
        self._marks += 1
        return True

    def invoke(self, step: SingleRun, *, timeout: float, savepoint: bool = False) -> Result:
        """Perform it in this thread."""
        try:
            return attempt(
                lambda: step.perform(timeout=timeout),
                cause=self.cause,
                using=self.using,
                savepoint=savepoint,
                name=self.name,
                lease=self.lease,
            )
        except LeaseLost:
            self.lost = True
            return Result("the lease was lost while this ran; its work was rolled back")

    def finish(self, step: SingleRun, result: Result) -> None:  # noqa: ARG002  there is but one
        """Record how it ended; a second report is ignored."""
        with self._lock:
            if self._running:
                self._running = False
                self._result = result

    def start_again(self, step: SingleRun) -> bool:  # noqa: ARG002  there is but one
        """Mark it once more, if it may be started once more."""
        with self._lock:
            if not self.lost and self.lease.current() and self._mark():
                return True
            self._running = False
            return False

    def interrupt(self) -> None:
        """Start nothing, and count what runs as a failed attempt."""
        with self._lock:
            self._ended = True
            if self._running:
                self._running = False
                self._result = Result(INTERRUPTED)

    def settled(self) -> engine.Settled:
        """Return how the row ended; one that was not begun is released."""
        result = self._result
        if result is None:
            return engine.Settled(self.lease, engine.Released())
        outcome = result.outcome
        if outcome is None:
            outcome = engine.Done() if result.ok else engine.Fail() if result.rejected else engine.Retry(result.delay)
        return engine.Settled(self.lease, outcome, error=result.error, columns=result.columns)


# --- queues ----------------------------------------------------------------------------------------------------------


class Work(ABC):
    """
    A queue, as the relay sees it. One object per queue and process; called from several threads.

    A subclass sets ``queue`` and gives `settings` and `start`; the rest has answers that
    suit a plain queue.
    """

    queue: ClassVar[engine.Queue]
    one_at_a_time: ClassVar[bool] = False
    """Whether a thread begins no row before the outcome of its last one is written."""
    prefetch_seconds: ClassVar[float] = 0.5
    """Rows are claimed ahead for about this long, by the measured time of a row; 0: as many as threads are free."""
    asks_database: ClassVar[bool] = True
    """Whether `next_due_seconds` looks into the table; otherwise it tells what the last look at the scopes saw."""
    look_when_landed: ClassVar[bool] = False
    """Whether a row that ends can make another claimable."""

    threads: int = 0
    """How many threads a relay of this process gives it; 0: there is no relay here."""

    @property
    def label(self) -> str:
        """What is served, in words: the queue's name, and its parts where only some are."""
        return self.queue.name

    def narrowed(self, parts: Sequence[str]) -> Work:
        """
        Return the work on some parts of the queue only.

        :raises ValueError: when it has no parts, or none of such a name.
        """
        raise ValueError(f"The queue {self.queue.name} has no parts, so {parts[0]!r} is none of them.")

    @abstractmethod
    def settings(self) -> QueueSettings:
        """Return the queue's settings in force."""

    @abstractmethod
    def start(self, lease: engine.Lease, *, using: str) -> Run:
        """Return the run of a row that was claimed."""

    def scopes(self, room: int, *, using: str) -> Iterable[tuple[Mapping[str, Any], int]]:  # noqa: ARG002
        """Return what to claim now, best first: equalities on the queue's own columns, and at most how many rows."""
        return [({}, room)]

    def next_due_seconds(self, *, using: str) -> float | None:
        """Return the seconds until something can be claimed, 0 for now, ``None`` if nothing is in sight."""
        return engine.next_due_seconds(self.queue, using=using)

    def claimed(self, leases: Sequence[engine.Lease]) -> None:  # noqa: B027  most need none of these
        """Note rows that this process holds from now on."""

    def landed(self, leases: Sequence[engine.Lease]) -> None:  # noqa: B027
        """Note rows that this process no longer holds."""

    def announce(self, settled: engine.Settled, status: str) -> engine.NewRow | None:  # noqa: ARG002
        """Return the event that speaks of a row's first death."""
        return None

    along: Callable[..., None] | None = None
    """``along(written, *, using)``: what is written in the transaction of a settle, for the rows that it wrote."""

    def goes_along(self, settled: engine.Settled) -> bool:  # noqa: ARG002
        """Return whether `along` may have something to write for an outcome; without, a settle is one statement."""
        return True

    def along_on(
        self, using: str, batch: Iterable[engine.Settled] | None = None
    ) -> Callable[[Sequence[tuple[engine.Settled, str]]], None] | None:
        """Return `along` for a database, as the engine's settle takes it, if these outcomes (or any) need it."""
        if self.along is None or (batch is not None and not any(map(self.goes_along, batch))):
            return None
        return partial(self.along, using=using)

    def rest(self) -> None:  # noqa: B027
        """Close what the calling thread keeps open between rows: it has nothing to do."""

    def purge(self, *, using: str, limit: int) -> int:
        """Delete rows past their retention; return how many went."""
        seconds = self.settings().retention_seconds
        if seconds is None:
            return 0
        return engine.purge(self.queue, using=using, older_than_seconds=seconds, limit=limit)
