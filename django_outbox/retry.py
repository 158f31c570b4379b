"""
The failure schedule: how long to wait, and when to give up. Pure arithmetic.

No clock and no database: ages and attempts come in, seconds and decisions go
out, so every rule here can be tested with numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["JITTER", "PARK_MAX_SECONDS", "PARK_MIN_SECONDS", "Schedule", "backoff_seconds", "park_seconds"]

JITTER: Final = 0.25
"""A delay is stretched by up to this share, so that failures of one second do not come back in one."""

PARK_MIN_SECONDS: Final = 10.0
PARK_MAX_SECONDS: Final = 600.0

LONGEST_DELAY_SECONDS: Final = 100 * 366 * 86_400.0
"""A longer delay, as a handler may ask for by mistake, is cut to this: databases cannot count to infinity."""

# 2 ** 64 seconds is longer than any cap; more doublings would only overflow.
_MAX_DOUBLINGS: Final = 64


def backoff_seconds(
    attempts: int,
    *,
    base: float,
    cap: float,
    requested: float | None = None,
    rand: Callable[[], float] = random.random,
) -> float:
    """
    Return the seconds to wait after failed attempt number ``attempts`` (1 = first).

    ``min(cap, base * 2 ** (attempts - 1))`` plus 0 to 25 % jitter. A requested
    delay is a floor and is jittered upward too, so a crowd that was told one
    time to come back does not come back in one second.
    """
    doublings = min(max(attempts - 1, 0), _MAX_DOUBLINGS)
    delay = min(cap, base * 2.0**doublings)
    return max(delay, _floor(requested)) * (1.0 + JITTER * rand())


def _floor(requested: float | None) -> float:
    # In this order of arguments a NaN is dropped by both.
    return 0.0 if requested is None else min(LONGEST_DELAY_SECONDS, max(0.0, requested))


def park_seconds(age: float, *, rand: Callable[[], float] = random.random) -> float:
    """
    Return the seconds that a row of this age waits for a relay which has the code.

    A tenth of its age, between 10 s and 10 min, jittered: a deploy that is
    minutes away is noticed soon, one that is a day away costs little.
    """
    return min(PARK_MAX_SECONDS, max(PARK_MIN_SECONDS, age / 10.0)) * (1.0 + JITTER * rand())


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """
    One queue's failure schedule; all times in seconds.

    ``replay_every`` ``None`` means that dead rows wait for a person;
    ``replay_for`` ``None`` means that they are replayed for ever. ``waits``, where given,
    stand for ``base`` and ``cap``: the wait after the first failure, the second and so on,
    the last of them after all later ones.
    """

    max_attempts: int
    base: float
    cap: float
    replay_every: float | None
    replay_for: float | None
    waits: tuple[float, ...] = ()

    def after_failure(
        self,
        attempts: int,
        *,
        dead: bool,
        age: float,
        requested: float | None = None,
        rand: Callable[[], float] = random.random,
    ) -> tuple[bool, float | None]:
        """
        Return ``(dead, delay)``: whether the row is dead, and when it is tried next.

        ``attempts`` counts the one that just failed. A row that was dead before
        stays dead on the slow cadence. A ``None`` delay is never tried again by
        itself.
        """
        if not dead and attempts < self.max_attempts:
            base, cap = self.base, self.cap
            if self.waits:
                base = cap = self.waits[min(max(attempts, 1), len(self.waits)) - 1]
            return False, backoff_seconds(attempts, base=base, cap=cap, requested=requested, rand=rand)
        return True, self.replay_delay(age=age, requested=requested, rand=rand)

    def replay_delay(
        self, *, age: float, requested: float | None = None, rand: Callable[[], float] = random.random
    ) -> float | None:
        """Return the seconds until a dead row of this age is replayed, or ``None`` for never."""
        if self.replay_every is None:
            return None
        delay = max(self.replay_every, _floor(requested)) * (1.0 + JITTER * rand())
        if self.replay_for is not None and age + delay > self.replay_for:
            return None
        return delay
