"""
Turns: which endpoint is served next, and with how many requests at a time.

Endpoints take turns in the order of their ids. What this process has under way at each
is counted from the claim to the settle, so a slow one fills its own places and no
others'. Pauses and breakers stand in the endpoint's row, where all relays see them; the
rest is this process's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django_outbox import lease as engine
from django_outbox.conf import WEBHOOK_LEASE_MARGIN_SECONDS, WebhookSettings
from django_outbox.webhooks import store
from django_outbox.webhooks.guard import LOOKUP_SECONDS, lookups_left

__all__ = ["Turns", "endpoint_of"]

STALLED_SECONDS: Final = 2.0
"""A request that takes longer makes its endpoint slow for the time being."""
GATHER_SECONDS: Final = 0.01
"""Looks for a few free threads are no nearer to one another."""
SEEN_SECONDS: Final = 5.0
"""Age up to which what a claim saw of an endpoint is tried first."""
HOLD_SECONDS: Final = 5.0
LONGEST_HOLD_SECONDS: Final = 300.0

_PAGE: Final = 64
_FIRST: Final = UUID(int=0)


def endpoint_of(lease: engine.Lease) -> UUID:
    """Return the endpoint of a delivery."""
    value = lease.content["endpoint_id"]
    return value if isinstance(value, UUID) else UUID(value)


@dataclass(slots=True)
class _Load:
    """What this process has under way at one endpoint."""

    started: dict[UUID, float] = field(default_factory=dict)
    slow: bool = False
    """It was slow when the last of them was claimed."""
    suspect: bool = False
    """It was slow, or had never answered."""

    def stalled(self, now: float) -> bool:
        return any(now - moment > STALLED_SECONDS for moment in self.started.values())


@dataclass(slots=True)
class _Choice:
    """An endpoint whose turn it is, as the look saw it."""

    slow: bool
    suspect: bool
    moment: float
    target: store.Target | None


_NO_CHOICE: Final = _Choice(slow=False, suspect=False, moment=0.0, target=None)


@dataclass(slots=True)
class _Room:
    """How many requests more may start at endpoints that may hold their threads for long."""

    slow: int
    """Slow ones get at most half of the threads."""
    suspect: int
    """With those that have never answered, three quarters; the rest is for those that do."""


class Turns:
    """The turns of one process; called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[UUID, _Load] = {}
        self._chosen: dict[UUID, _Choice] = {}
        self._probing: dict[UUID, str] = {}
        """Until when the probes that were taken last, and of which no row was claimed yet, are ours."""
        self._probes: set[UUID] = set()
        self._seen: dict[UUID, tuple[float, store.Target]] = {}
        self._holds: dict[UUID, tuple[float, float]] = {}
        self._last = _FIRST
        self._few = True
        """Whether all endpoints with deliveries to come may stand on one page; it is then read from its beginning."""
        self._looked_at = 0.0
        self._next_at: float | None = None

    def scopes(
        self, room: int, settings: WebhookSettings, *, threads: int, using: str
    ) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield the endpoints whose turn it is, from the one after the last served, and for how many rows each."""
        now = time.monotonic()
        self._next_at = None
        if room < threads // 2 and now - self._looked_at < GATHER_SECONDS:
            # Rows land one by one. A look for each would cost more than what it finds.
            self._note_next(GATHER_SECONDS)
            return
        self._looked_at = now
        if not lookups_left():
            # All look-ups hang; a delivery that starts now would only wait for one.
            self._note_next(1.0)
            return
        self._give_probes_back(using)
        left = self._begin(now, threads)
        for turn in self._round(using):
            wait = max(turn.due_seconds, turn.wait_seconds, self._hold_left(turn.endpoint_id))
            if wait > 0:
                self._note_next(wait)
            elif (free := self._free(turn, settings, left)) > 0:
                if turn.half_open and not self._take_probe(turn.endpoint_id, settings, using):
                    self._note_next(1.0)
                    continue
                self._last = turn.endpoint_id
                # Nothing comes of it while its rows are locked, and nobody tells when they no longer are.
                self._note_next(store.HELD_SECONDS)
                yield {"endpoint_id": turn.endpoint_id}, free
            # Else one of its rows has to land first, which wakes the claim loop.

    def _begin(self, now: float, threads: int) -> _Room:
        with self._lock:
            self._chosen.clear()
            slow = suspect = 0
            for load in self._loads.values():
                stalled = load.stalled(now)
                slow += len(load.started) if load.slow or stalled else 0
                suspect += len(load.started) if load.suspect or stalled else 0
        return _Room(max(1, threads // 2) - slow, max(1, threads * 3 // 4) - suspect)

    def _round(self, using: str) -> Iterator[store.Turn]:
        """Go once through all endpoints with deliveries to come, from the one after the last served."""
        start = after = self._last
        if self._few:
            found, more = store.turns(_FIRST, limit=_PAGE, using=using)
            self._few = more is None
            if self._few:
                yield from sorted(found, key=lambda turn: turn.endpoint_id <= start)
                return
        wrapped = start == _FIRST
        seen = 0
        while True:
            found, more = store.turns(after, limit=_PAGE, using=using)
            seen += len(found)
            for turn in found:
                if after < start and turn.endpoint_id > start:
                    break
                yield turn
            else:
                if more is not None:
                    after = more
                    continue
                if not wrapped:
                    wrapped, after = True, _FIRST
                    continue
            self._few = seen < _PAGE
            return

    def _free(self, turn: store.Turn, settings: WebhookSettings, left: _Room) -> int:
        """Return how many more of an endpoint's rows may start, and take their places."""
        with self._lock:
            load = self._loads.get(turn.endpoint_id)
            stalled = load is not None and load.stalled(time.monotonic())
            under_way = len(load.started) if load is not None else 0
        slow = turn.slow or stalled
        suspect = slow or not turn.proven
        # One that is slow, or has to prove itself, gets a single one.
        free = (1 if suspect or turn.half_open else settings.endpoint_concurrency) - under_way
        if slow:
            free = min(free, left.slow)
        if suspect:
            free = min(free, left.suspect)
        if free > 0:
            left.slow -= free if slow else 0
            left.suspect -= free if suspect else 0
            with self._lock:
                self._chosen[turn.endpoint_id] = _Choice(slow, suspect, time.monotonic(), turn.target)
        return free

    def _take_probe(self, endpoint_id: UUID, settings: WebhookSettings, using: str) -> bool:
        until = store.take_probe(endpoint_id, seconds=_probe_seconds(settings), using=using)
        if until is not None:
            with self._lock:
                self._probing[endpoint_id] = until
        return until is not None

    def _give_probes_back(self, using: str) -> None:
        """Give back what was taken for rows that were then locked, or not claimed for others' big bodies."""
        while self._probing:
            store.give_probe_back(*self._probing.popitem(), using=using)

    def _note_next(self, seconds: float) -> None:
        moment = time.monotonic() + seconds
        self._next_at = moment if self._next_at is None else min(self._next_at, moment)

    def next_seconds(self) -> float | None:
        """Return the seconds until an endpoint that was passed over may be served, as the last round saw it."""
        return None if self._next_at is None else max(0.0, self._next_at - time.monotonic())

    def claimed(self, leases: Sequence[engine.Lease]) -> None:
        """Count rows under way, and note which of them are probes."""
        now = time.monotonic()
        if leases:
            # A claim that is full of big bodies brings nothing from the last that were chosen: they come next.
            self._last = endpoint_of(leases[-1])
        with self._lock:
            for lease in leases:
                endpoint_id = endpoint_of(lease)
                load = self._loads.setdefault(endpoint_id, _Load())
                load.started[lease.id] = now
                choice = self._chosen.get(endpoint_id, _NO_CHOICE)
                load.slow, load.suspect = choice.slow, choice.suspect
                if choice.target is not None:
                    # Now and not when it was chosen: what lands between takes it away.
                    self._seen[endpoint_id] = (choice.moment, choice.target)
                if endpoint_id in self._probing:
                    del self._probing[endpoint_id]
                    self._probes.add(lease.id)

    def landed(self, leases: Sequence[engine.Lease]) -> None:
        """Count them no longer."""
        with self._lock:
            for lease in leases:
                endpoint_id = endpoint_of(lease)
                load = self._loads.get(endpoint_id)
                if load is not None:
                    load.started.pop(lease.id, None)
                    if not load.started:
                        del self._loads[endpoint_id]
                        self._seen.pop(endpoint_id, None)
                self._probes.discard(lease.id)

    def is_probe(self, lease: engine.Lease) -> bool:
        """Return whether it is the one delivery that a half-open breaker lets through."""
        with self._lock:
            return lease.id in self._probes

    def seen(self, endpoint_id: UUID) -> store.Target | None:
        """Return what the last claim saw of an endpoint, if that was a moment ago."""
        with self._lock:
            moment, target = self._seen.get(endpoint_id, (float("-inf"), None))
        return target if time.monotonic() - moment < SEEN_SECONDS else None

    # --- names that cannot be looked up

    def on_hold(self, endpoint_id: UUID) -> bool:
        """Return whether the endpoint's name could not be looked up a moment ago."""
        return self._hold_left(endpoint_id) > 0

    def _hold_left(self, endpoint_id: UUID) -> float:
        with self._lock:
            until, _ = self._holds.get(endpoint_id, (0.0, 0.0))
        return max(0.0, until - time.monotonic()) if until else 0.0

    def not_found(self, endpoint_id: UUID) -> None:
        """Hold the endpoint's other deliveries for a while, longer each time."""
        now = time.monotonic()
        with self._lock:
            until, seconds = self._holds.get(endpoint_id, (0.0, 0.0))
            if until <= now:
                seconds = min(2 * seconds or HOLD_SECONDS, LONGEST_HOLD_SECONDS)
                self._holds[endpoint_id] = (now + seconds, seconds)

    def found(self, endpoint_id: UUID) -> None:
        """Forget that its name could not be looked up."""
        if endpoint_id in self._holds:
            with self._lock:
                self._holds.pop(endpoint_id, None)

    def forget_holds(self) -> None:
        """Forget that any name could not be looked up; for tests that move the clock."""
        with self._lock:
            self._holds.clear()


def _probe_seconds(settings: WebhookSettings) -> float:
    """Return for how long the request that a half-open breaker lets through keeps out the others."""
    return LOOKUP_SECONDS + settings.timeout_seconds + WEBHOOK_LEASE_MARGIN_SECONDS
