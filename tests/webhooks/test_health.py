"""An endpoint's health, with numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.webhooks.health import LONGEST_PAUSE_SECONDS, End, Health, after, retry_after_seconds

NOW = 1_700_000_000.0
DAY = 86_400.0
THREE_DAYS = 3 * DAY
BROKEN = End(ok=False, broken=True, seconds=0.1, error="http_500")
REFUSED = End(ok=False, seconds=0.1, error="http_404")
OK = End(ok=True, seconds=0.1)


def then(health: Health, *ends: End, now: float = NOW, disable: float | None = THREE_DAYS) -> Health:
    return after(health, ends, now=now, disable_after_seconds=disable)[0]


def test_five_failures_of_the_server_in_a_row_open_the_breaker() -> None:
    four = then(Health(), *[BROKEN] * 4)
    assert (four.open_until, four.open_seconds, four.slow) == (None, 0, True)
    five = then(four, BROKEN)
    assert (five.open_until, five.open_seconds) == (NOW + 30, 30)


def test_requests_that_were_under_way_when_it_opened_do_not_open_it_further() -> None:
    health = then(Health(), *[BROKEN] * 8)
    assert (health.open_until, health.open_seconds, health.streak) == (NOW + 30, 30, 8)


def test_each_failed_probe_doubles_the_pause_up_to_a_quarter_of_an_hour() -> None:
    health, opened = then(Health(), *[BROKEN] * 5), []
    probe = End(ok=False, broken=True, probe=True)
    for _ in range(7):
        health = then(health, probe)
        opened.append(health.open_seconds)
    assert opened == [60, 120, 240, 480, 900, 900, 900]
    assert health.open_until == NOW + 900


@pytest.mark.parametrize("end", [End(ok=True, probe=True), End(ok=False, broken=False, probe=True), OK])
def test_an_answer_closes_the_breaker(end: End) -> None:
    health = then(then(Health(), *[BROKEN] * 5), end)
    assert (health.open_until, health.open_seconds, health.streak) == (None, 0, 0)


def test_a_refusal_is_not_a_failure_of_the_server() -> None:
    health = then(Health(), *[REFUSED] * 20)
    assert (health.streak, health.open_until, health.failures) == (0, None, 20)
    assert not health.slow


def test_one_success_wipes_the_record_of_failures() -> None:
    health = then(then(Health(), *[BROKEN] * 5, now=NOW - DAY), OK)
    assert (health.failures, health.exhausted, health.failing_since, health.warned_at) == (0, 0, None, None)
    assert (health.delivered_total, health.failed_total, health.last_success_at) == (1, 5, NOW)


def test_a_pause_is_kept_and_never_shortened() -> None:
    paused = then(Health(), End(ok=False, pause_seconds=600))
    assert paused.paused_until == NOW + 600
    assert then(paused, End(ok=False, pause_seconds=10)).paused_until == NOW + 600
    assert then(paused, OK).paused_until == NOW + 600
    assert then(Health(), End(ok=False, pause_seconds=10**9)).paused_until == NOW + LONGEST_PAUSE_SECONDS


def failing(*, days: float, failures: int, exhausted: int, **values: Any) -> Health:
    return Health(failing_since=NOW - days * DAY, failures=failures, exhausted=exhausted, **values)


@pytest.mark.parametrize(
    ("health", "end", "notices"),
    [
        (failing(days=3, failures=9, exhausted=2), BROKEN, ["disabled"]),
        (failing(days=2.9, failures=99, exhausted=9), BROKEN, ["failing"]),
        (failing(days=9, failures=8, exhausted=9), BROKEN, ["failing"]),
        (failing(days=9, failures=99, exhausted=1), BROKEN, ["failing"]),
        (failing(days=9, failures=99, exhausted=1), End(ok=False, exhausted=True), ["disabled"]),
        (failing(days=2, failures=5, exhausted=1, warned_at=NOW - 1), BROKEN, []),
        (failing(days=1.5, failures=4, exhausted=1), BROKEN, ["failing"]),
        (failing(days=1.4, failures=99, exhausted=9), BROKEN, []),
        (failing(days=9, failures=3, exhausted=9), BROKEN, []),
        (failing(days=9, failures=99, exhausted=0), BROKEN, []),
        (failing(days=9, failures=99, exhausted=9), OK, []),
        (failing(days=9, failures=99, exhausted=9, enabled=False, disabled_at=NOW - 5), BROKEN, []),
    ],
)
def test_an_endpoint_that_only_fails_is_warned_of_and_then_disabled(
    health: Health, end: End, notices: list[str]
) -> None:
    new, told = after(health, [end], now=NOW, disable_after_seconds=THREE_DAYS)
    assert told == notices
    if told == ["disabled"]:
        assert (new.enabled, new.disabled_at, new.disabled_reason) == (False, NOW, "failing")
    if told == ["failing"]:
        assert new.warned_at == NOW
        assert new.enabled
    assert after(health, [end], now=NOW, disable_after_seconds=None)[1] == []


def test_an_endpoint_that_says_it_is_gone_is_disabled_at_once_and_once() -> None:
    gone = End(ok=False, gone=True)
    health, told = after(Health(), [gone, gone], now=NOW, disable_after_seconds=None)
    assert told == ["disabled"]
    assert (health.enabled, health.disabled_reason) == (False, "gone")


def test_the_mean_duration_follows_slowly() -> None:
    health = then(Health(), End(ok=True, seconds=1.0))
    assert health.mean_seconds == 1.0
    assert then(health, End(ok=True, seconds=2.0)).mean_seconds == pytest.approx(1.2)
    assert then(health, *[End(ok=True, seconds=30.0)] * 3).slow


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        (" 7\t", 7),
        ("99999999", LONGEST_PAUSE_SECONDS),
        ("Tue, 14 Nov 2023 22:14:20 GMT", 60),
        ("Fri, 14 Nov 2053 22:14:20 GMT", LONGEST_PAUSE_SECONDS),
        ("Tue, 14 Nov 2023 22:13:20 GMT", None),
        ("Mon, 13 Nov 2023 22:13:20 GMT", None),
        ("0", None),
        ("-5", None),
        ("1.5", None),
        ("1e3", None),
        ("٣", None),
        ("soon", None),
        ("", None),
        ("9" * 5_000, None),
        ("Tue, 99 Nov 99999 22:13:20 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_junk_is_ignored(value: str, seconds: float | None) -> None:
    assert retry_after_seconds(value, now=NOW) == seconds
