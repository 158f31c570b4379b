"""Every system check: what sets it off, and that the documentation lists it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections
from django.test import override_settings

from django_outbox.checks import MEANINGS, check_outbox

AddDatabase = Callable[..., None]

RIGHT_SQLITE = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": "PRAGMA journal_mode=WAL;"}
POSTGRES = "django.db.backends.postgresql"


@pytest.fixture
def add_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[AddDatabase]:
    """Return a function that adds an alias, "events", which is never connected to."""

    def add(engine: str, **options: Any) -> None:
        database = copy.deepcopy(connections.settings["default"])
        database.update(ENGINE=engine, NAME="events", OPTIONS=options)
        monkeypatch.setitem(connections.settings, "events", database)
        forget()

    def forget() -> None:
        with suppress(AttributeError):
            del connections["events"]

    yield add
    forget()


def found(**outbox: Any) -> list[CheckMessage]:
    with override_settings(OUTBOX=outbox):
        return check_outbox()


def on_events(**outbox: Any) -> list[str | None]:
    """Return the ids of what is found with the outbox on the added alias, the routers sending writes there."""
    with override_settings(DATABASE_ROUTERS=[ToEvents()]):
        return [message.id for message in found(DATABASE="events", **outbox)]


class ToEvents:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "events" if model._meta.app_label == "django_outbox" else None


class NotInEvents(ToEvents):
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return None if app_label != "django_outbox" else db != "events"


def test_this_project_is_right() -> None:
    assert found() == []


def test_the_checks_run_with_those_of_django() -> None:
    with override_settings(OUTBOX={"POLL_SECOND": 1}):
        [message] = checks.run_checks(tags=["django_outbox"])
    assert message.id == "django_outbox.E001"
    assert message.hint == 'Did you mean "POLL_SECONDS"?'


@pytest.mark.parametrize(
    ("outbox", "expected"),
    [
        ({"NOPE": 1}, "E001"),
        ({"POLL_SECONDS": "1"}, "E002"),
        ({"POLL_SECONDS": 0}, "E003"),
        ({"DATABASE": "nope"}, "E004"),
        ({"EVENTS": {"RETRY_CAP_SECONDS": 1}}, "E005"),
        ({"EVENTS": {"REPLAY_FOR_SECONDS": 1}}, "E006"),
    ],
)
def test_a_wrong_setting_is_an_error_with_a_hint(outbox: dict[str, Any], expected: str) -> None:
    [message] = found(**outbox)
    assert message.id == f"django_outbox.{expected}"
    assert message.level == checks.ERROR
    assert message.hint


def test_nothing_else_is_said_while_a_setting_is_wrong(add_database: AddDatabase) -> None:
    add_database("django.db.backends.dummy")
    assert on_events(NOPE=1) == ["django_outbox.E001"]


def test_another_database_than_the_two_is_an_error(add_database: AddDatabase) -> None:
    add_database("django.db.backends.dummy")
    assert on_events() == ["django_outbox.E010"]


def test_psycopg2_in_use_is_an_error(add_database: AddDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    add_database(POSTGRES)
    assert connections["events"].vendor == "postgresql"  # loads Django's backend, which looks at the same flag
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    assert on_events() == ["django_outbox.E011"]


def test_a_router_that_writes_elsewhere_is_an_error(add_database: AddDatabase) -> None:
    add_database("django.db.backends.sqlite3", **RIGHT_SQLITE)
    [message] = found(DATABASE="events")
    assert message.id == "django_outbox.E012"
    assert "write OutboxEvent to 'default', but the relay works on 'events'" in message.msg


def test_a_router_that_keeps_the_table_away_is_an_error(add_database: AddDatabase) -> None:
    add_database("django.db.backends.sqlite3", **RIGHT_SQLITE)
    with override_settings(DATABASE_ROUTERS=[NotInEvents()]):
        [message] = found(DATABASE="events")
    assert message.id == "django_outbox.E012"
    assert "do not allow the outbox tables to be created in 'events'" in message.msg


def test_an_old_sqlite_is_an_error(add_database: AddDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    add_database("django.db.backends.sqlite3", **RIGHT_SQLITE)
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 37, 2))
    assert on_events() == ["django_outbox.E013"]


@pytest.mark.parametrize("dsn", ["hunter2", "host=db password='hunter2", "nonsense=hunter2"])
def test_a_listen_dsn_that_cannot_be_parsed_is_an_error_that_does_not_repeat_it(
    add_database: AddDatabase, dsn: str
) -> None:
    add_database(POSTGRES)
    with override_settings(DATABASE_ROUTERS=[ToEvents()]):
        [message] = found(DATABASE="events", LISTEN_DSN=dsn)
    assert message.id == "django_outbox.E014"
    assert "hunter2" not in str(message)


@pytest.mark.parametrize("dsn", ["postgresql://app:pw@db:5432/app", "host=db dbname=app"])
def test_a_listen_dsn_of_either_form_is_right(add_database: AddDatabase, dsn: str) -> None:
    add_database(POSTGRES)
    assert on_events(LISTEN_DSN=dsn) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transaction_mode": None}, "immediate transactions"),
        ({"transaction_mode": "DEFERRED"}, "immediate transactions"),
        ({"init_command": ""}, "WAL"),
        ({"init_command": "PRAGMA journal_mode=DELETE; PRAGMA wal_autocheckpoint=1;"}, "WAL"),
        ({"timeout": 0}, "a busy time-out"),
    ],
)
def test_sqlite_without_an_option_it_needs_is_a_warning(
    add_database: AddDatabase, change: dict[str, Any], named: str
) -> None:
    add_database("django.db.backends.sqlite3", **{**RIGHT_SQLITE, **change})
    with override_settings(DATABASE_ROUTERS=[ToEvents()]):
        [message] = found(DATABASE="events")
    assert message.id == "django_outbox.W010"
    assert message.level == checks.WARNING
    assert f"lacks {named}" in message.msg


def test_sqlite_without_any_option_gets_one_warning_with_the_options_to_paste(add_database: AddDatabase) -> None:
    add_database("django.db.backends.sqlite3")
    with override_settings(DATABASE_ROUTERS=[ToEvents()]):
        [message] = found(DATABASE="events")
    assert "immediate transactions, WAL, a busy time-out" in message.msg
    assert message.hint is not None
    pasted = message.hint.partition('"OPTIONS": ')[2]
    add_database("django.db.backends.sqlite3", **eval(pasted))  # noqa: S307  our own text
    assert on_events() == []


@pytest.mark.parametrize(
    "command", ["PRAGMA journal_mode = wal", "pragma journal_mode('WAL');", "pragma JOURNAL_MODE=WAL"]
)
def test_wal_may_be_spelled_in_any_way_that_sqlite_takes(add_database: AddDatabase, command: str) -> None:
    add_database("django.db.backends.sqlite3", **{**RIGHT_SQLITE, "init_command": command})
    assert on_events() == []


@pytest.mark.parametrize(
    ("pool", "concurrency", "expected"),
    [
        (True, 8, ["django_outbox.W011"]),
        ({"min_size": 2, "max_size": 14}, 8, ["django_outbox.W011"]),
        ({"min_size": 2, "max_size": 15}, 8, []),
        ({"min_size": 15}, 8, []),
        ({"min_size": 4}, 1, ["django_outbox.W011"]),
        (False, 8, []),
    ],
)
def test_a_pool_smaller_than_the_threads_need_is_a_warning(
    add_database: AddDatabase, pool: Any, concurrency: int, expected: list[str]
) -> None:
    add_database(POSTGRES, pool=pool)
    others = {key: {"CONCURRENCY": 1} for key in ("EMAIL", "WEBHOOKS", "TASKS")}
    assert on_events(EVENTS={"CONCURRENCY": concurrency}, **others) == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (psycopg.IsolationLevel.READ_COMMITTED, []),
        (psycopg.IsolationLevel.REPEATABLE_READ, ["django_outbox.W013"]),
        (psycopg.IsolationLevel.SERIALIZABLE, ["django_outbox.W013"]),
    ],
)
def test_another_isolation_level_is_a_warning(
    add_database: AddDatabase, level: psycopg.IsolationLevel, expected: list[str]
) -> None:
    add_database(POSTGRES, isolation_level=level)
    assert on_events() == expected


def test_a_listen_dsn_on_sqlite_is_a_warning(add_database: AddDatabase) -> None:
    add_database("django.db.backends.sqlite3", **RIGHT_SQLITE)
    assert on_events(LISTEN_DSN="host=db") == ["django_outbox.W012"]


def test_there_is_a_test_for_every_check() -> None:
    tests = Path(__file__).parent.parent
    text = "".join(file.read_text() for file in tests.glob("*/test_*.py"))
    assert [name for name in MEANINGS if f'{name}"' not in text] == []


# --- webhooks


def test_a_webhook_lease_that_does_not_cover_a_request_is_an_error() -> None:
    (message,) = found(WEBHOOKS={"LEASE_SECONDS": 64, "TIMEOUT_SECONDS": 30})
    assert message.id == "django_outbox.E031"
    assert "65" in str(message.hint)
    assert found(WEBHOOKS={"LEASE_SECONDS": 65, "TIMEOUT_SECONDS": 30}) == []


def test_webhooks_without_their_extra_are_an_error_once_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(BUILTIN_HANDLERS=["webhook-fanout"]) == []
    monkeypatch.setattr("django_outbox.checks.find_spec", lambda name: None)
    assert [message.id for message in found(BUILTIN_HANDLERS=["webhook-fanout"])] == ["django_outbox.E030"]
    assert found() == []


def test_a_missing_file_of_authorities_is_an_error(tmp_path: Path) -> None:
    (message,) = found(WEBHOOKS={"CA_BUNDLE": str(tmp_path / "missing.pem")})
    assert message.id == "django_outbox.E032"


@pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0"])
def test_a_network_that_opens_everything_is_warned_of(network: str) -> None:
    (message,) = found(WEBHOOKS={"ALLOW_NETWORKS": [network]})
    assert message.id == "django_outbox.W030"
    assert found(WEBHOOKS={"ALLOW_NETWORKS": ["10.0.0.0/8"]}) == []
