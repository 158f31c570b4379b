"""
A relay whose database goes away, turns read-only, refuses it, falls silent or changes under it.

The relay is a process of its own, and what it says is read as it comes; the fault is made
while a handler waits for the test at a known place, and ends when the relay has said that
it saw it. Nothing here may cost a delivery that was made, or an attempt for what was not
the handler's fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_outbox.models import OutboxEvent
from tests import server
from tests.concurrency.helpers import Heard, StartRelay, emit, eventually
from tests.concurrency.proxy import Proxy
from tests.concurrency.stage import Stage
from tests.conftest import RawConnect
from tests.testapp.models import Effect

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

TABLE = OutboxEvent._meta.db_table


def rows() -> dict[str, tuple[str, int]]:
    """Return status and attempts by the name of the event."""
    return {event.payload["name"]: (event.status, event.attempts) for event in OutboxEvent.objects.all()}


def all_done(*names: str) -> bool:
    return all(rows()[name][0] == "done" for name in names)


def end_sessions(session: psycopg.Connection[Any]) -> None:
    """End every session of the relay, and wait until they have ended."""
    session.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name IN ('outbox relay', 'django_outbox listen')"
    )


def test_a_handler_that_ends_while_the_server_is_away_is_settled_later_and_not_run_again(
    start_relay: StartRelay, stage: Stage
) -> None:
    if server.running is None:
        pytest.skip("this run's server was started by somebody else, who may not want it stopped")
    emit({"alpha": [["hold", "x"]]}, {}, names="ab")
    relay = Heard(start_relay("--threads", "1"))
    stage.wait_for("hold x", seconds=20)
    connection.close()
    server.running.stop("fast")
    try:
        stage.release("x")
        stage.wait_for("end gamma a")
        relay.wait_for("database trouble")
    finally:
        server.running.start()
    eventually(lambda: all_done("a", "b"))
    emit({}, names="c")
    stage.wait_for("end gamma c")
    eventually(lambda: all_done("c"))
    assert relay.stop() == 0, relay.said
    assert rows() == {"a": ("done", 1), "b": ("done", 1), "c": ("done", 1)}
    assert set(stage.counts().values()) == {1}
    assert "the row is another relay's" not in relay.said
    assert "listening again" in relay.said


@contextmanager
def read_only(session: psycopg.Connection[Any]) -> Iterator[None]:
    """Have new sessions on the test's database read only, and end those there are, at the beginning and at the end."""
    name = connection.settings_dict["NAME"]
    session.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    try:
        end_sessions(session)
        yield
    finally:
        session.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")


def test_a_database_that_is_read_only_for_a_while_costs_nothing_but_time(
    start_relay: StartRelay, stage: Stage, raw_connect: RawConnect
) -> None:
    """Scenario 9. Sessions of the time in between stay read-only, as behind a failover that goes back."""
    session = raw_connect()
    emit({"alpha": [["hold", "x"]]}, {"alpha": [["hold", "y"], ["write", "1"]]}, names="ab")
    relay = Heard(start_relay("--threads", "2"))
    stage.wait_for("hold x", seconds=20)
    stage.wait_for("hold y")
    with read_only(session):
        stage.release("x")
        stage.wait_for("end gamma a")
        relay.wait_for("database trouble")
        # It can write nothing now, and its thread keeps the session.
        stage.release("y")
        stage.wait_for("end gamma b")
        emit({}, names="c")
    stage.wait_for("end gamma c")
    eventually(lambda: all_done("a", "b", "c"))
    emit({"alpha": [["write", "2"]]}, {"alpha": [["write", "2"]]}, names="de")
    eventually(lambda: all_done("d", "e"))
    assert relay.stop() == 0, relay.said
    # The handler that could not write failed by itself and was tried again, on a session that can.
    assert rows() == {"a": ("done", 1), "b": ("done", 2), "c": ("done", 1), "d": ("done", 1), "e": ("done", 1)}
    assert Effect.objects.count() == 3
    assert stage.counts("end") == dict.fromkeys((f"{n} {e}" for n in ("alpha", "beta", "gamma") for e in "abcde"), 1)


@pytest.mark.parametrize("age", [0, None])
def test_sessions_that_were_ended_while_the_relay_was_idle_cost_no_attempt(
    start_relay: StartRelay, stage: Stage, raw_connect: RawConnect, age: int | None
) -> None:
    """Scenario 10, for both kinds of ``CONN_MAX_AGE``."""
    write = {"alpha": [["write", "1"]]}
    emit(write, write, names="ab")
    relay = Heard(start_relay("--threads", "2", environment={"FIELD_DATABASE": json.dumps({"CONN_MAX_AGE": age})}))
    for name in "ab":
        stage.wait_for(f"end gamma {name}", seconds=20)
    eventually(lambda: all_done("a", "b"))
    end_sessions(raw_connect())
    emit(*[write] * 5, names="cdefg")
    for name in "cdefg":
        stage.wait_for(f"end gamma {name}")
    eventually(lambda: all_done(*"cdefg"))
    assert relay.stop() == 0, relay.said
    # A session that was used within the last second is taken to be there without asking.
    assert sum(attempts - 1 for _, attempts in rows().values()) <= 1, rows()
    assert Effect.objects.count() == 7


@pytest.fixture
def limited_role(raw_connect: RawConnect) -> Iterator[Callable[[int], None]]:
    """Make a role that is no superuser, and return a function that limits its sessions."""
    session = raw_connect()
    session.execute("DROP ROLE IF EXISTS outbox_limited")
    session.execute("CREATE ROLE outbox_limited LOGIN PASSWORD 'limited' IN ROLE pg_read_all_data, pg_write_all_data")
    yield lambda count: (session.execute(f"ALTER ROLE outbox_limited CONNECTION LIMIT {count}"), None)[1]
    end_sessions(session)
    session.execute("DROP ROLE outbox_limited")


def test_a_relay_that_finds_no_free_connection_waits_for_one(
    start_relay: StartRelay, stage: Stage, raw_connect: RawConnect, limited_role: Callable[[int], None]
) -> None:
    values = connection.settings_dict
    url = f"postgresql://outbox_limited:limited@/postgres?host={values['HOST']}&port={values['PORT'] or 5432}"
    emit({"alpha": [["hold", "x"]]}, names="a")
    relay = Heard(start_relay("--threads", "1", POLL_SECONDS=1, environment={"TEST_DATABASE_URL": url}))
    stage.wait_for("hold x", seconds=20)
    limited_role(0)
    end_sessions(raw_connect())
    emit({}, names="b")
    stage.release("x")
    relay.wait_for("database trouble")
    limited_role(-1)
    eventually(lambda: all_done("a", "b"))
    assert relay.stop() == 0, relay.said
    assert rows() == {"a": ("done", 1), "b": ("done", 1)}
    assert set(stage.counts().values()) == {1}
    # One line for the trouble and one for its end, not one for every try.
    assert relay.said.count("database trouble") == relay.said.count("database works again") <= 3, relay.said
    assert "Traceback" not in relay.said


def test_a_column_that_is_added_under_a_running_relay_disturbs_nothing(
    start_relay: StartRelay, stage: Stage, raw_connect: RawConnect
) -> None:
    """Scenario 63, with statements prepared at their first use."""
    session = raw_connect()
    options = {"OPTIONS": {"prepare_threshold": 0, "server_side_binding": True}}
    emit({}, {"alpha": [["hold", "x"]]}, names="ab")
    relay = Heard(start_relay("--threads", "2", environment={"FIELD_DATABASE": json.dumps(options)}))
    stage.wait_for("end gamma a", seconds=20)
    stage.wait_for("hold x")
    try:
        session.execute(f"ALTER TABLE {TABLE} ADD COLUMN added_later integer NOT NULL DEFAULT 7")
        stage.release("x")
        eventually(lambda: all_done("a", "b"))
        emit({}, {}, names="cd")
        eventually(lambda: all_done("c", "d"))
        assert relay.stop() == 0, relay.said
    finally:
        session.execute(f"ALTER TABLE {TABLE} DROP COLUMN added_later")
    assert set(rows().values()) == {("done", 1)}
    assert set(stage.counts().values()) == {1}
    assert not re.search("ERROR|Traceback", relay.said), relay.said


def test_connections_that_fall_silent_are_given_up_and_cost_no_delivery(
    start_relay: StartRelay, stage: Stage, proxy: Proxy
) -> None:
    """
    All of the relay's own connections go by the proxy, LISTEN too.

    First those that there are fall silent and new ones work, as after a failover behind
    an address that moved; then all of them, as with a network that is gone for a while.
    """
    emit({"alpha": [["hold", "x"]]}, {}, names="ab")
    relay = Heard(
        start_relay(
            "--threads",
            "1",
            command=("-m", "tests.concurrency.hasty"),
            POLL_SECONDS=2,
            environment={"TEST_DATABASE_URL": proxy.url},
        )
    )
    stage.wait_for("hold x", seconds=20)
    proxy.freeze_open_ones()
    emit({}, names="c")
    stage.release("x")
    eventually(lambda: all_done("a", "b", "c"))
    relay.wait_for("no answer within 1 s, the connection is given up")
    relay.wait_for("database works again")
    relay.wait_for("listening again")

    proxy.freeze()
    relay.wait_for("no answer within 1 s, the connection is given up", count=2)
    # A claim that was held back would still be made, for nobody, if it came through now.
    proxy.cut()
    proxy.thaw()
    relay.wait_for("listening again", count=2)
    emit({}, names="d")
    eventually(lambda: all_done("d"))
    assert relay.stop() == 0, relay.said
    assert set(rows().values()) == {("done", 1)}
    assert set(stage.counts().values()) == {1}
    assert "Traceback" not in relay.said
