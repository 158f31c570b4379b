"""The failure schedule, with numbers alone."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from django_outbox.retry import LONGEST_DELAY_SECONDS, Schedule, backoff_seconds, park_seconds

SCHEDULE = Schedule(max_attempts=8, base=5.0, cap=3_600.0, replay_every=21_600.0, replay_for=86_400.0)


def no_jitter() -> float:
    return 0.0


def full_jitter() -> float:
    return 1.0


def test_the_wait_doubles_from_the_base_up_to_the_cap() -> None:
    waits = [backoff_seconds(attempts, base=5.0, cap=100.0, rand=no_jitter) for attempts in range(1, 8)]
    assert waits == [5, 10, 20, 40, 80, 100, 100]


def test_jitter_stretches_a_wait_by_at_most_a_quarter() -> None:
    assert backoff_seconds(2, base=5.0, cap=100.0, rand=full_jitter) == pytest.approx(12.5)


@pytest.mark.parametrize("attempts", [150, 1_023, 1_025, 10_000, 2**31 - 1])
def test_a_great_many_attempts_wait_as_long_as_the_cap_says(attempts: int) -> None:
    """Scenario 13."""
    assert backoff_seconds(attempts, base=5.0, cap=3_600.0, rand=no_jitter) == 3_600.0


def test_a_row_with_attempts_left_is_retried_however_many_it_had() -> None:
    """Scenario 13: 150 attempts spent of 200."""
    schedule = Schedule(max_attempts=200, base=5.0, cap=3_600.0, replay_every=None, replay_for=None)
    assert schedule.after_failure(150, dead=False, age=0.0, rand=no_jitter) == (False, 3_600.0)


def test_a_base_of_zero_retries_at_once() -> None:
    assert backoff_seconds(150, base=0.0, cap=3_600.0) == 0.0


def test_a_crowd_that_failed_in_one_second_does_not_come_back_in_one() -> None:
    """Scenario 14."""
    rand = random.Random(14).random
    waits = [backoff_seconds(5, base=5.0, cap=3_600.0, rand=rand) for _ in range(500)]
    assert min(waits) >= 80.0
    assert max(waits) - min(waits) >= 0.2 * 80.0
    assert max(Counter(math.floor(wait) for wait in waits).values()) <= 50


def test_a_crowd_that_was_told_one_time_to_come_back_is_spread_too() -> None:
    """Scenario 14, for a requested delay."""
    rand = random.Random(14).random
    waits = [backoff_seconds(1, base=5.0, cap=3_600.0, requested=120.0, rand=rand) for _ in range(500)]
    assert min(waits) >= 120.0
    assert max(Counter(math.floor(wait) for wait in waits).values()) <= 50


def test_jitter_is_there_unless_replaced() -> None:
    assert len({backoff_seconds(1, base=5.0, cap=10.0) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, 5.0), (0.0, 5.0), (-60.0, 5.0), (3.0, 5.0), (60.0, 60.0), (7_200.0, 7_200.0)],
)
def test_a_requested_delay_is_a_floor_and_not_capped(requested: float | None, expected: float) -> None:
    assert backoff_seconds(1, base=5.0, cap=3_600.0, requested=requested, rand=no_jitter) == expected


@pytest.mark.parametrize("requested", [math.inf, 1e300])
def test_a_requested_delay_that_no_database_can_add_is_cut(requested: float) -> None:
    assert backoff_seconds(1, base=5.0, cap=10.0, requested=requested, rand=no_jitter) == LONGEST_DELAY_SECONDS


def test_a_requested_delay_that_is_no_number_is_ignored() -> None:
    assert backoff_seconds(1, base=5.0, cap=10.0, requested=math.nan, rand=no_jitter) == 5.0


def test_the_last_attempt_makes_a_row_dead_and_due_for_replay() -> None:
    assert SCHEDULE.after_failure(7, dead=False, age=0.0, rand=no_jitter) == (False, 320.0)
    assert SCHEDULE.after_failure(8, dead=False, age=0.0, rand=no_jitter) == (True, 21_600.0)


def test_a_dead_row_stays_dead_whatever_its_attempts() -> None:
    assert SCHEDULE.after_failure(1, dead=True, age=0.0, rand=no_jitter) == (True, 21_600.0)


def test_a_dead_row_is_replayed_only_while_it_is_young_enough() -> None:
    assert SCHEDULE.replay_delay(age=86_400.0 - 21_600.0, rand=no_jitter) == 21_600.0
    assert SCHEDULE.replay_delay(age=86_400.0 - 21_599.0, rand=no_jitter) is None


def test_a_dead_row_is_replayed_for_ever_without_a_window() -> None:
    schedule = Schedule(max_attempts=8, base=5.0, cap=3_600.0, replay_every=60.0, replay_for=None)
    assert schedule.replay_delay(age=1e9, rand=no_jitter) == 60.0


def test_a_dead_row_waits_for_a_person_without_a_cadence() -> None:
    schedule = Schedule(max_attempts=8, base=5.0, cap=3_600.0, replay_every=None, replay_for=None)
    assert schedule.after_failure(8, dead=False, age=0.0) == (True, None)


def test_a_requested_delay_is_a_floor_for_a_replay_too() -> None:
    assert SCHEDULE.replay_delay(age=0.0, requested=30_000.0, rand=no_jitter) == 30_000.0
    assert SCHEDULE.replay_delay(age=0.0, requested=90_000.0, rand=no_jitter) is None


@pytest.mark.parametrize(("age", "expected"), [(0.0, 10.0), (-5.0, 10.0), (600.0, 60.0), (86_400.0, 600.0)])
def test_a_parked_row_waits_a_tenth_of_its_age_within_bounds(age: float, expected: float) -> None:
    assert park_seconds(age, rand=no_jitter) == expected
    assert expected <= park_seconds(age) <= 1.25 * expected
