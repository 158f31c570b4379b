"""
An endpoint's health: what its deliveries' ends make of its counters, pause, breaker and switch. Pure.

No clock and no database: the state, the ends and the time (seconds since 1970, by the
database's clock) come in, the new state and what is to be announced go out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Final, Literal

__all__ = ["End", "Health", "after", "retry_after_seconds"]

BREAKER_STREAK: Final = 5
BREAKER_FIRST_SECONDS: Final = 30
BREAKER_LONGEST_SECONDS: Final = 900

DISABLE_FAILURES: Final = 10
DISABLE_EXHAUSTED: Final = 2

LONGEST_PAUSE_SECONDS: Final = 21_600.0
SLOW_SECONDS: Final = 5.0
SLOW_STREAK: Final = 3

_MEAN_WEIGHT: Final = 0.2
_DIGITS: Final = re.compile(r"[0-9]{1,12}")

Notice = Literal["failing", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The part of an endpoint's row that deliveries write. Moments are seconds since 1970."""

    enabled: bool = True
    disabled_at: float | None = None
    disabled_reason: str = ""
    paused_until: float | None = None
    open_until: float | None = None
    open_seconds: int = 0
    streak: int = 0
    failures: int = 0
    exhausted: int = 0
    failing_since: float | None = None
    warned_at: float | None = None
    mean_seconds: float = 0.0
    delivered_total: int = 0
    failed_total: int = 0
    last_success_at: float | None = None
    last_failure_at: float | None = None
    last_error: str = ""

    @property
    def slow(self) -> bool:
        """Whether it should have no more than one request at a time."""
        return self.streak >= SLOW_STREAK or self.mean_seconds > SLOW_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one request ended, as far as the endpoint is concerned."""

    ok: bool
    broken: bool = False
    """The server failed or was not reached, or asked for quiet: what the breaker counts."""
    gone: bool = False
    """It answered that it is gone for good."""
    probe: bool = False
    """It was the one request that a half-open breaker let through."""
    exhausted: bool = False
    """The delivery spent its schedule with this."""
    seconds: float | None = None
    pause_seconds: float | None = None
    """For how long the server asked to be left alone."""
    error: str = ""


def after(
    health: Health, ends: Iterable[End], *, now: float, disable_after_seconds: float | None
) -> tuple[Health, list[Notice]]:
    """Return the health after these ends, in order, and what is to be announced."""
    notices: list[Notice] = []
    for end in ends:
        health = _success(health, end, now) if end.ok else _failure(health, end, now)
        if end.gone:
            health, told = _disabled(health, "gone", now)
            notices += told
    if not health.enabled or disable_after_seconds is None:
        return health, notices
    if _failing(health, now, disable_after_seconds, share=1.0):
        health, told = _disabled(health, "failing", now)
        return health, notices + told
    if health.warned_at is None and _failing(health, now, disable_after_seconds, share=0.5):
        return replace(health, warned_at=now), [*notices, "failing"]
    return health, notices


def _success(health: Health, end: End, now: float) -> Health:
    return replace(
        health,
        open_until=None,
        open_seconds=0,
        streak=0,
        failures=0,
        exhausted=0,
        failing_since=None,
        warned_at=None,
        mean_seconds=_mean(health, end),
        delivered_total=health.delivered_total + 1,
        last_success_at=now,
    )


def _failure(health: Health, end: End, now: float) -> Health:
    streak = health.streak + 1 if end.broken else 0
    open_until, open_seconds = health.open_until, health.open_seconds
    if not end.broken:
        # It answers, even if it refuses: that is no reason to leave it alone.
        open_until, open_seconds = None, 0
    elif open_seconds and end.probe:
        open_seconds = min(2 * open_seconds, BREAKER_LONGEST_SECONDS)
        open_until = now + open_seconds
    elif not open_seconds and streak >= BREAKER_STREAK:
        open_seconds = BREAKER_FIRST_SECONDS
        open_until = now + open_seconds
    paused = health.paused_until
    if end.pause_seconds:
        paused = max(paused or 0.0, now + min(end.pause_seconds, LONGEST_PAUSE_SECONDS))
    return replace(
        health,
        paused_until=paused,
        open_until=open_until,
        open_seconds=open_seconds,
        streak=streak,
        failures=health.failures + 1,
        exhausted=health.exhausted + end.exhausted,
        failing_since=now if health.failing_since is None else health.failing_since,
        mean_seconds=_mean(health, end),
        failed_total=health.failed_total + 1,
        last_failure_at=now,
        last_error=end.error,
    )


def _mean(health: Health, end: End) -> float:
    if end.seconds is None:
        return health.mean_seconds
    if not health.delivered_total + health.failed_total:
        return end.seconds
    return health.mean_seconds + _MEAN_WEIGHT * (end.seconds - health.mean_seconds)


def _failing(health: Health, now: float, disable_after_seconds: float, *, share: float) -> bool:
    return (
        health.failing_since is not None
        and now - health.failing_since >= disable_after_seconds * share
        and health.failures >= DISABLE_FAILURES * share
        and health.exhausted >= DISABLE_EXHAUSTED * share
    )


def _disabled(health: Health, reason: str, now: float) -> tuple[Health, list[Notice]]:
    if not health.enabled:
        return health, []
    return replace(health, enabled=False, disabled_at=now, disabled_reason=reason), ["disabled"]


def retry_after_seconds(value: str, *, now: float) -> float | None:
    """
    Return the wait that a ``Retry-After`` header asks for, at most six hours; ``None`` for junk and the past.

    RFC 9110, section 10.2.3: a number of seconds, or a date.
    """
    text = value.strip(" \t")
    if _DIGITS.fullmatch(text):
        seconds = float(text)
    elif len(text) > 64:
        return None
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, TypeError, IndexError, OverflowError, OSError):
            return None
    return min(seconds, LONGEST_PAUSE_SECONDS) if seconds > 0 else None
