"""The one setting, its validator and its cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
from django.test import override_settings

from django_outbox.conf import OutboxSettings, QueueSettings, get_settings, problems
from django_outbox.errors import InvalidSettings
from django_outbox.retry import Schedule


def ids(raw: object) -> list[str]:
    return [problem.id for problem in problems(raw)]


def test_an_empty_setting_is_right_and_means_the_defaults() -> None:
    assert problems({}) == []
    with override_settings(OUTBOX={}):
        assert get_settings() == OutboxSettings()


def test_the_defaults_of_the_events_queue() -> None:
    assert QueueSettings().schedule == Schedule(
        max_attempts=8, base=5.0, cap=3_600.0, replay_every=21_600.0, replay_for=None
    )
    assert QueueSettings().lease_seconds == 60.0


def test_a_given_value_takes_the_place_of_its_default_alone() -> None:
    with override_settings(OUTBOX={"POLL_SECONDS": 5, "EVENTS": {"LEASE_SECONDS": 10, "REPLAY_EVERY_SECONDS": None}}):
        settings = get_settings()
    assert settings.poll_seconds == 5
    assert settings.events == QueueSettings(lease_seconds=10, replay_every_seconds=None)
    assert settings.stuck_seconds == OutboxSettings().stuck_seconds


def test_the_cache_follows_the_setting() -> None:
    before = get_settings()
    with override_settings(OUTBOX={"EVENTS": {"CONCURRENCY": 3}}):
        assert get_settings().events.concurrency == 3
        assert get_settings() is get_settings()
    assert get_settings() == before


@pytest.mark.parametrize(
    ("raw", "path", "hint"),
    [
        ({"POLL_SECOND": 1}, 'OUTBOX["POLL_SECOND"]', 'Did you mean "POLL_SECONDS"?'),
        ({"poll_seconds": 1}, 'OUTBOX["poll_seconds"]', 'Did you mean "POLL_SECONDS"?'),
        ({"EVENTS": {"LEASE": 1}}, 'OUTBOX["EVENTS"]["LEASE"]', 'Did you mean "LEASE_SECONDS"?'),
        ({"MAX_ATTEMPTS": 1}, 'OUTBOX["MAX_ATTEMPTS"]', 'It belongs to a queue: OUTBOX["EVENTS"]["MAX_ATTEMPTS"].'),
        ({"XYZ": 1}, 'OUTBOX["XYZ"]', "Known keys: DATABASE, REQUIRE_TRANSACTION, "),
        ({7: 1}, 'OUTBOX["7"]', "Known keys: "),
    ],
)
def test_an_unknown_key_is_named_and_what_to_write_instead(raw: dict[Any, Any], path: str, hint: str) -> None:
    [problem] = problems(raw)
    assert problem.id == "E001"
    assert problem.message.startswith(path)
    assert problem.hint.startswith(hint)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        "OUTBOX",
        {"EVENTS": None},
        {"EVENTS": 5},
        {"DATABASE": 1},
        {"DATABASE": None},
        {"REQUIRE_TRANSACTION": 1},
        {"REQUIRE_TRANSACTION": "yes"},
        {"MAX_PAYLOAD_BYTES": 1024.0},
        {"MAX_PAYLOAD_BYTES": True},
        {"POLL_SECONDS": "30"},
        {"POLL_SECONDS": True},
        {"POLL_SECONDS": None},
        {"LISTEN_DSN": 5},
        {"HANDLERS_MODULE": None},
        {"EVENTS": {"MAX_ATTEMPTS": "8"}},
        {"EVENTS": {"MAX_ATTEMPTS": False}},
        {"EVENTS": {"LEASE_SECONDS": None}},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(raw: object) -> None:
    assert ids(raw) == ["E002"]


@pytest.mark.parametrize(
    "raw",
    [
        {"DATABASE": ""},
        {"LISTEN_DSN": ""},
        {"HANDLERS_MODULE": ""},
        {"HANDLERS_MODULE": "outbox-handlers"},
        {"HANDLERS_MODULE": "outbox..handlers"},
        {"MAX_PAYLOAD_BYTES": 0},
        {"POLL_SECONDS": 0},
        {"POLL_SECONDS": -1},
        {"POLL_SECONDS": math.nan},
        {"POLL_SECONDS": math.inf},
        {"EVENTS": {"MAX_ATTEMPTS": 0}},
        {"EVENTS": {"CONCURRENCY": 10**9}},
        {"EVENTS": {"LEASE_SECONDS": 0}},
    ],
)
def test_a_value_out_of_range_is_refused(raw: object) -> None:
    assert ids(raw) == ["E003"]


@pytest.mark.parametrize(
    "raw",
    [
        {"LISTEN_DSN": None},
        {"LISTEN_DSN": "host=db"},
        {"HANDLERS_MODULE": "events.handlers"},
        {"PARK_FOR_SECONDS": 0},
        {"EVENTS": {"REPLAY_EVERY_SECONDS": None, "REPLAY_FOR_SECONDS": 60}},
        {"EVENTS": {"RETENTION_SECONDS": None}},
        {"EVENTS": {"RETRY_BASE_SECONDS": 0}},
        {"EVENTS": {"TIMEOUT_SECONDS": 0.5}},
    ],
)
def test_a_value_at_the_edge_is_accepted(raw: object) -> None:
    assert ids(raw) == []


def test_an_alias_that_does_not_exist_is_refused_with_those_that_do() -> None:
    [problem] = problems({"DATABASE": "read-replica"})
    assert problem.id == "E004"
    assert problem.hint == "Use one of: default, orders."


def test_a_cap_below_the_base_is_refused() -> None:
    assert ids({"EVENTS": {"RETRY_BASE_SECONDS": 60, "RETRY_CAP_SECONDS": 59}}) == ["E005"]


def test_a_replay_window_that_closes_before_the_first_replay_is_refused() -> None:
    assert ids({"EVENTS": {"REPLAY_FOR_SECONDS": 21_600}}) == ["E006"]
    # A replay may come up to a quarter late, for jitter, and must still fall inside.
    assert ids({"EVENTS": {"REPLAY_FOR_SECONDS": 27_000}}) == ["E006"]
    assert ids({"EVENTS": {"REPLAY_FOR_SECONDS": 27_001}}) == []


def test_every_problem_is_reported_at_once() -> None:
    assert ids({"NOPE": 1, "POLL_SECONDS": "x", "EVENTS": {"NOPE": 1, "CONCURRENCY": 0}}) == [
        "E001",
        "E002",
        "E001",
        "E003",
    ]


def test_the_runtime_refuses_what_the_checks_refuse() -> None:
    with (
        override_settings(OUTBOX={"EVENTS": {"LEASE": 5}}),
        pytest.raises(InvalidSettings, match=r'OUTBOX\["EVENTS"\]\["LEASE"\] is not a setting. Did you mean'),
    ):
        get_settings()


@pytest.mark.parametrize(
    ("value", "id_", "words"),
    [
        ({"ALLOW_NETWORKS": "10.0.0.0/8"}, "E002", "a list of networks, not str"),
        ({"ALLOW_NETWORKS": ["10.0.0.1/8"]}, "E003", '["ALLOW_NETWORKS"][0] is not a network'),
        ({"DENY_NETWORKS": ["example.com"]}, "E003", '["DENY_NETWORKS"][0] is not a network'),
        ({"ALLOW_PORTS": [443, "80"]}, "E002", '["ALLOW_PORTS"][1] must be a whole number'),
        ({"ALLOW_PORTS": [0]}, "E003", "it must lie between 1 and 65,535"),
        ({"PERMANENT_STATUSES": [500]}, "E003", "it must lie between 400 and 499"),
        ({"SECRET_KEYS": [b"x"]}, "E002", '["SECRET_KEYS"][0] must be a string, not bytes'),
        ({"SECRET_KEYS": [""]}, "E003", '["SECRET_KEYS"][0] is empty'),
        ({"ALLOW_HTTP": 1}, "E002", "must be True or False"),
    ],
)
def test_the_items_of_a_list_are_checked_one_by_one(value: dict[str, Any], id_: str, words: str) -> None:
    (problem,) = problems({"WEBHOOKS": value})
    assert problem.id == id_
    assert words in problem.message


def test_the_defaults_of_the_webhook_queue() -> None:
    with override_settings(OUTBOX={"WEBHOOKS": {"ALLOW_PORTS": [443], "SECRET_KEYS": ["a", "b"]}}):
        settings = get_settings().webhooks
    assert settings.schedule == Schedule(max_attempts=4, base=30, cap=3_600, replay_every=21_600, replay_for=604_800)
    assert (settings.lease_seconds, settings.timeout_seconds, settings.allow_http) == (330, 30, False)
    assert (settings.allow_ports, settings.secret_keys) == ((443,), ("a", "b"))
    hash(settings)
