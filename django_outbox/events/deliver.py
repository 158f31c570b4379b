"""Deliver: take one leased event through the handlers it is owed to."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Final
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError, connections, transaction

from django_outbox import lease as engine
from django_outbox.conf import QueueSettings, get_settings
from django_outbox.delivery import INTERRUPTED, MAX_STARTS_MARKED, WORKER_LOST, Cause, LeaseLost, Result, Work, attempt
from django_outbox.errors import ERROR_TEXT_LIMIT, clean_error
from django_outbox.events.registry import Event, Handler, registry

logger = logging.getLogger("django_outbox.events")

EVENTS: Final = engine.Queue(
    name="events",
    model_name="OutboxEvent",
    content=(
        "type",
        "payload",
        "occurred_at",
        "aggregate_type",
        "aggregate_id",
        "organization_id",
        "request_id",
        "causation_id",
        "headers",
        "deliveries",
        "failures",
    ),
    bulk="payload",
    kind="type",
    handlers=True,
    announcement="outbox.event.dead",
)


TELL_EVERY_SECONDS: Final = 60.0
_told: dict[str, float] = {}
"""When a missing handler was last spoken of, by its name."""


def _tell_of_missing(name: str, lease: engine.Lease) -> None:
    """Log that an event waits for a handler; the many that wait for the same one share a line a minute."""
    now = time.monotonic()
    if now - _told.get(name, -TELL_EVERY_SECONDS) >= TELL_EVERY_SECONDS:
        _told[name] = now
        logger.warning("no handler of this name here, its events wait handler=%s event=%s", name, lease.id)


class EventRun:
    """
    One leased event on its way through the handlers it is owed to.

    A step is a handler; see `delivery.Run` for who calls what. A handler that is stuck
    does not keep the others of its event waiting.
    """

    __slots__ = (
        "_cause",
        "_delays",
        "_deliveries",
        "_errors",
        "_failures",
        "_failures_changed",
        "_lock",
        "_parked",
        "_queue",
        "_running",
        "_shared",
        "careful",
        "delivered",
        "expired",
        "interrupted",
        "lease",
        "lost",
        "type",
        "using",
    )

    def __init__(self, lease: engine.Lease, *, using: str) -> None:
        content = lease.content
        self.lease = lease
        self.using = using
        self.type: str = content["type"]
        self.careful = lease.suspect or lease.lost_leases > 0
        self.lost = False
        self.expired = False
        self.interrupted = False
        # Rows of one type mostly bear one and the same text here.
        self._deliveries: dict[str, str | None] = _parsed(content["deliveries"])
        self._failures: dict[str, dict[str, Any]] = _json_object(content["failures"])
        self._failures_changed = False
        self.delivered: dict[str, str] = {}
        self._delays: list[float] = []
        self._errors: dict[str, str] = {}
        self._parked: list[str] = []
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._cause = Cause(lease.id, content["request_id"], content["organization_id"], lease.quiet)
        self._shared = {
            "id": lease.id,
            "type": self.type,
            # To the millisecond that is promised: SQLite's arithmetic is off by some microseconds,
            # enough to put midnight on the day before.
            "occurred_at": datetime.fromtimestamp(round(content["occurred_at"], 3), UTC),
            "aggregate_type": content["aggregate_type"],
            "aggregate_id": content["aggregate_id"],
            "organization_id": content["organization_id"],
            "request_id": content["request_id"],
            "causation_id": _uuid(content["causation_id"]),
            "attempt": lease.attempts,
        }
        """What all handlers of the event are given alike."""
        # Rows of one type mostly bear one text and no failures: their plan is made once.
        plan = None if self._failures else _common_plan(registry.version, self.type, content["deliveries"])
        self._queue = self._plan() if plan is None else list(plan)

    # What is owed, and to whom.

    def _plan(self) -> list[Handler]:
        wanted: dict[str, Handler] = {}
        for name in self._owed():
            if self._failures.get(name, {}).keys() & {"rejected", "lost"}:
                continue
            handler = registry.resolve(self.type, name)
            if handler is None:
                self._parked.append(name)
            elif when := next(filter(None, (self._deliveries.get(each) for each in handler.names)), None):
                # Delivered under another of its names, before a rename or its rollback.
                self.delivered[name] = when
            else:
                wanted[handler.name] = handler
        if len(wanted) < 2:
            return list(wanted.values())
        order = {handler.name: place for place, handler in enumerate(registry.for_type(self.type))}
        return sorted(wanted.values(), key=lambda handler: order[handler.name])

    def _owed(self) -> list[str]:
        return [
            name
            for name, when in self._deliveries.items()
            if when is None and name not in self.delivered and not self._failures.get(name, {}).get("discarded")
        ]

    def step(self, name: str) -> Handler | None:
        """Return the handler of a name, if this process has it."""
        return registry.resolve(self.type, name)

    def next_step(self) -> Handler | None:
        """Take the next handler to run, or ``None`` when none may start (any more)."""
        with self._lock:
            while self._queue and not self._over():
                if not self.lease.current():
                    # By our own clock; whether the row is another's by now, the settle finds out.
                    self.expired = True
                    return None
                handler = self._queue[0]
                # It stays in the queue while its mark cannot be written, so that the caller may ask again.
                startable = not self.careful or self._mark(handler)
                self._queue.pop(0)
                if startable:
                    self._running.add(handler.name)
                    return handler
            return None

    @property
    def complete(self) -> bool:
        """Whether no handler is running or left to run."""
        with self._lock:
            return not self._running and (not self._queue or self._over())

    def _over(self) -> bool:
        return self.lost or self.expired or self.interrupted

    def _mark(self, handler: Handler) -> bool:
        """
        Count this start on the row before it happens; return whether it may happen.

        A handler that kills its process leaves the mark behind, and at two marks it is
        not started again: it dies alone, its neighbours are never blamed.
        """
        key = self._key(handler)
        entry = dict(self._failures.get(key, {}))
        marks = int(entry.get("marks", 0))
        if marks >= MAX_STARTS_MARKED:
            self.blame(handler)
            return False
        marked = self._failures | {key: {"error": ""} | entry | {"marks": marks + 1, "at": self.lease.clock.text()}}
        worst = max(int(each.get("marks", 0)) for each in marked.values())
        if not engine.record(self.lease, using=self.using, failures=marked, lost_leases=worst):
            self.lost = True
            return False
        self._failures = marked
        return True

    def blame(self, handler: Handler) -> None:
        """Record that a handler killed its process too often."""
        key = self._key(handler)
        self._failures[key] = {"error": WORKER_LOST, "at": self.lease.clock.text(), "lost": True}
        self._failures_changed = True
        self._errors[key] = WORKER_LOST

    def start_again(self, handler: Handler) -> bool:
        """
        After the child process of a started handler died: mark it once more, or blame it and close its delivery.

        Returns whether it may be started again.
        """
        with self._lock:
            if not self.lost and self.lease.current() and self._mark(handler):
                return True
            self._running.discard(handler.name)
            return False

    def _key(self, handler: Handler) -> str:
        """Return the name under which this delivery is owed."""
        return next((name for name in handler.names if name in self._deliveries), handler.name)

    # Running one handler.

    def event_for(self, handler: Handler) -> Event:
        """Return the event as this handler receives it, with a payload of its own."""
        content = self.lease.content
        event = Event.__new__(Event)
        # Not by its constructor: that of a frozen class takes five times as long.
        vars(event).update(
            self._shared,
            payload=_decode(content["payload"])[0],
            headers=_json_object(content["headers"]),
            handler=handler.name,
            idempotency_key=f"{handler.oldest_name}:{self.lease.text}",
        )
        return event

    def invoke(self, handler: Handler, *, timeout: float, savepoint: bool = False) -> Result:
        """
        Run one handler in this thread and return how it ended; nothing it raises gets out.

        ``timeout`` bounds a coroutine; a plain function is bounded by who runs the
        thread. ``savepoint`` puts a savepoint around it, when a transaction is open.
        """
        try:
            return attempt(
                partial(self._call, handler, timeout),
                cause=self._cause,
                using=self.using,
                savepoint=savepoint,
                name=handler.name,
                lease=self.lease,
            )
        except LeaseLost:
            self.lost = True
            return Result("the lease was lost while the handler ran; its work was rolled back")

    def _call(self, handler: Handler, timeout: float) -> None:
        event = self.event_for(handler)
        if handler.is_async:
            async_to_sync(_bounded)(handler, event, timeout)
        elif not handler.atomic:
            _require_finished(handler.function(event))
        else:
            with transaction.atomic(using=self.using):
                _require_finished(handler.function(event))
                # Last, so that no lock on the event is held while the handler runs.
                if not engine.record(self.lease, using=self.using, delivered=self._times(handler)):
                    raise LeaseLost

    def _times(self, handler: Handler) -> dict[str, str]:
        """Return the delivery's time under every name of the handler, so that a rename repeats nothing."""
        return dict.fromkeys(handler.names, self.lease.clock.text())

    # Reporting.

    def finish(self, handler: Handler, result: Result) -> None:
        """Record how a handler ended. The second report about one start is ignored."""
        with self._lock:
            if handler.name not in self._running:
                return
            self._running.remove(handler.name)
            if result.ok:
                now = self.lease.clock.text()
                for name in handler.names:
                    self.delivered[name] = now
                if not self._failures and not self.careful:
                    return  # nearly every one
            key = self._key(handler)
            before = self._failures.get(key, {})
            if result.ok:
                if "marks" in before:
                    self._failures[key] = {name: value for name, value in before.items() if name != "marks"}
                    if not self._failures[key].get("error"):
                        del self._failures[key]
                    self._failures_changed = True
            else:
                self._failures[key] = {"error": result.error, "at": self.lease.clock.text()} | (
                    {"rejected": True} if result.rejected else {}
                )
                self._failures_changed = True
                self._errors[key] = result.error
                if result.delay is not None:
                    self._delays.append(result.delay)
            if self.careful and not self.lost:
                worst = max([0, *(int(each.get("marks", 0)) for each in self._failures.values())])
                try:
                    self.lost = not engine.record(
                        self.lease,
                        using=self.using,
                        delivered=self.delivered,
                        failures=self._failures,
                        lost_leases=worst,
                    )
                except (DatabaseError, InterfaceError) as error:
                    # The settle carries the same. What succeeded must not run again for want of this.
                    logger.warning("delivery not recorded yet event=%s error=%s", self.lease.id, clean_error(error))
                    connections[self.using].close_if_unusable_or_obsolete()

    def interrupt(self) -> None:
        """Start no further handler, and count those that still run as failed attempts."""
        with self._lock:
            self.interrupted = True
            running = list(self._running)
        for name in running:
            if (handler := registry.resolve(self.type, name)) is not None:
                self.finish(handler, Result(INTERRUPTED))

    def settled(self) -> engine.Settled:
        """Return how the event ended, once `complete`."""
        with self._lock:
            if not self._failures and self._deliveries.keys() <= self.delivered.keys():
                return engine.Settled(self.lease, _DONE, self.delivered)
            if self.expired and self._queue and not self._errors:
                # Nothing failed, but the lease ended too soon: what was made is kept, the attempt given back.
                return engine.Settled(self.lease, engine.Released(), self.delivered)
            left = self._owed()
            if not left and not self._failures:
                return engine.Settled(self.lease, _DONE, self.delivered)
            parked = [name for name in left if name in self._parked]
            final = [name for name in left if self._failures.get(name, {}).keys() & {"rejected", "lost"}]
            retry = [name for name in left if name not in parked and name not in final]
            for name in parked:
                known = self._failures.get(name, {})
                if "parked_at" not in known:
                    text = f"no relay that had this event knows the handler {name!r}"
                    self._failures[name] = {"error": text, "at": self.lease.clock.text()}
                    self._failures[name]["parked_at"] = self.lease.clock.text()
                    self._failures_changed = True
                    _tell_of_missing(name, self.lease)
            for name in list(self._failures):
                entry = self._failures[name]
                past = {"marks"} if name in parked else {"marks", "parked_at"}
                if entry.keys() & past:
                    self._failures[name] = {key: value for key, value in entry.items() if key not in past}
                    self._failures_changed = True
            outcome: engine.Outcome
            if not left:
                outcome = _DONE
            elif retry:
                outcome = engine.Retry(max(self._delays, default=None))
            elif parked:
                outcome = engine.Park(spent=self._parked_for(parked) >= get_settings().park_for_seconds)
            elif any(self._failures[name].get("lost") for name in final):
                outcome = engine.Dead()
            else:
                outcome = engine.Fail()
            reasons = self._errors or {name: self._failures[name]["error"] for name in left if name in self._failures}
            return engine.Settled(
                lease=self.lease,
                outcome=outcome,
                delivered=dict(self.delivered),
                failures=dict(self._failures) if self._failures_changed else None,
                error=_joined(reasons) if left else "",
            )

    def _parked_for(self, names: Sequence[str]) -> float:
        """Return the seconds for which the longest-parked of these has waited."""
        now = self.lease.clock.now()
        return max(now - datetime.fromisoformat(self._failures[name]["parked_at"]).timestamp() for name in names)


class EventWork(Work):
    """The events queue."""

    queue = EVENTS

    def settings(self) -> QueueSettings:
        """Return ``OUTBOX["EVENTS"]``."""
        return get_settings().events

    def start(self, lease: engine.Lease, *, using: str) -> EventRun:
        """Return the run of an event."""
        return EventRun(lease, using=using)

    def announce(self, settled: engine.Settled, status: str) -> engine.NewRow:
        """Return the event that says that an event is dead or failed."""
        return announcement(settled, status)


_decode: Final = json.JSONDecoder().raw_decode
_DONE: Final = engine.Done()


@lru_cache(maxsize=1_024)
def _common_plan(
    version: int,  # noqa: ARG001  part of the cache's key
    type_: str,
    deliveries: str,
) -> tuple[Handler, ...] | None:
    """
    Return the handlers of an event that is owed to all of them, in order; ``None`` where it is not that simple.

    ``version`` is the registry's: its handlers decide, too.
    """
    owed = _parsed(deliveries)
    wanted = {handler.name for name in owed if (handler := registry.resolve(type_, name)) is not None}
    if len(wanted) < len(owed) or any(when is not None for when in owed.values()):
        return None
    return tuple(handler for handler in registry.for_type(type_) if handler.name in wanted)


@lru_cache(maxsize=1_024)
def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object that must not be changed."""
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _json_object(text: str) -> dict[str, Any]:
    """Return a JSON object of one's own; nearly always the empty one."""
    return {} if text == "{}" else json.loads(text)


def _require_finished(returned: object) -> None:
    """Raise when a plain function returned work that nobody will do, as one that wraps an async function does."""
    if returned is not None and inspect.iscoroutine(returned):
        returned.close()
        raise TypeError(
            "the handler returned a coroutine, which would never run; write `async def`, or mark its wrapper with"
            " asgiref.sync.markcoroutinefunction"
        )


async def _bounded(handler: Handler, event: Event, timeout: float) -> None:  # noqa: ASYNC109  raised in our words
    try:
        async with asyncio.timeout(timeout) as limit:
            await handler.function(event)
    except TimeoutError:
        # The handler's own TimeoutError is the handler's own failure.
        if not limit.expired():
            raise
        raise TimeoutError(f"the handler took longer than its {timeout:g} s") from None


def _joined(reasons: Mapping[str, str]) -> str:
    """
    Return the errors of several handlers as one.

    Each was cleaned when it was made; cleaned again, what follows revoke-tokens: would pass for a token.
    """
    text = "; ".join(f"{name}: {error}" for name, error in reasons.items())
    return text if len(text) <= ERROR_TEXT_LIMIT else f"{text[: ERROR_TEXT_LIMIT - 1]}…"


def _uuid(value: Any) -> UUID | None:
    return value if value is None or isinstance(value, UUID) else UUID(value)


def announcement(settled: engine.Settled, status: str) -> engine.NewRow:
    """Return the event that says that an event is dead or failed. Its own death is not announced."""
    lease = settled.lease
    failures = settled.failures if settled.failures is not None else json.loads(lease.content["failures"])
    payload = {
        "queue": lease.queue.name,
        "id": str(lease.id),
        "type": lease.content["type"],
        "status": status,
        "attempts": lease.attempts,
        "error": settled.error,
        "handlers": {name: entry.get("error", "") for name, entry in failures.items() if isinstance(entry, dict)},
        "aggregate_type": lease.content["aggregate_type"],
        "aggregate_id": lease.content["aggregate_id"],
    }
    return engine.NewRow(
        id=engine.new_id(),
        type=lease.queue.announcement,
        payload=json.dumps(payload, ensure_ascii=False),
        deliveries=registry.deliveries(lease.queue.announcement),
        organization_id=lease.content["organization_id"],
        request_id=lease.content["request_id"],
        causation_id=lease.id,
        quiet=True,
    )
