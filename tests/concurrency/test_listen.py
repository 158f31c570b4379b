"""
What can happen to wake-ups: half-open sockets, ended sessions, a full notification queue, large payloads.

The relay is a process of its own. Its LISTEN connection goes by way of a proxy which is
told to fall silent; its other connections do not, so deliveries show whether it polls.
``hasty`` makes it look after the LISTEN connection every half second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import Heard, StartRelay, emit, eventually
from tests.concurrency.proxy import Proxy
from tests.concurrency.stage import Stage
from tests.conftest import RawConnect
from tests.testapp.models import Note

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

HASTY = ("-m", "tests.concurrency.hasty")
LISTENER = "django_outbox listen"


def listeners() -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s", [LISTENER]
        )
        return [pid for (pid,) in cursor.fetchall()]


def delivered_within(stage: Stage, name: str) -> float:
    """Emit an event of this name and return the seconds until its last handler has ended."""
    began = time.monotonic()
    emit({}, names=name)
    stage.wait_for(f"end gamma {name}")
    return time.monotonic() - began


def test_a_half_open_or_ended_listen_connection_is_noticed_and_replaced(
    start_relay: StartRelay, stage: Stage, proxy: Proxy, raw_connect: RawConnect
) -> None:
    """Scenario 6, the half-open socket, and scenario 71, the ended session: the next poll meanwhile, then as before."""
    poll = 2
    relay = Heard(start_relay(command=HASTY, LISTEN_DSN=proxy.dsn, POLL_SECONDS=poll))
    eventually(listeners, seconds=20)
    assert delivered_within(stage, "a") < 1

    proxy.freeze()
    assert delivered_within(stage, "b") < poll + 1
    relay.wait_for("not listening, polling instead")
    # Said once, however often it cannot connect.
    tried = proxy.accepted
    eventually(lambda: proxy.accepted > tried)
    assert relay.said.count("not listening") == 1
    proxy.thaw()
    relay.wait_for("listening again")
    # Twice, so that a poll that happens to be due does not stand in for the wake-up.
    assert max(delivered_within(stage, "c"), delivered_within(stage, "d")) < 1

    before = eventually(listeners)
    raw_connect().execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s::int[]) AS pid", [before])
    emit({}, {}, {}, names="efg")
    for name in "efg":
        stage.wait_for(f"end gamma {name}", seconds=poll + 1)
    eventually(lambda: set(listeners()) - set(before), seconds=5)
    assert max(delivered_within(stage, "h"), delivered_within(stage, "i")) < 1
    assert relay.stop() == 0, relay.said
    assert relay.said.count("not listening") == 2
    assert set(stage.counts().values()) == {1}


@pytest.fixture
def full_queue(raw_connect: RawConnect) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Fill the server's notification queue behind a foreign session that listens and sits in a transaction."""
    session = raw_connect()
    if session.info.server_version < 170_000:
        pytest.skip("needs PostgreSQL 17, the first whose notification queue can be made small")
    ((pages,),) = session.execute("SELECT setting::int FROM pg_settings WHERE name = 'max_notify_queue_pages'")
    if pages > 1_000:
        pytest.skip(f"needs a server with a small notification queue; this one has {pages} pages")
    session.execute("LISTEN foreign_channel")
    session.execute("BEGIN")
    session.execute("SELECT 1")
    writer = raw_connect()
    with pytest.raises(Exception, match="too many notifications"):
        for _ in range(pages * 2):
            writer.execute("SELECT pg_notify('foreign_channel', repeat('x', 7900))")
    yield session
    session.execute("ROLLBACK")
    # Other tests want wake-ups, and the server drops what was read when it is asked for this.
    eventually(lambda: writer.execute("SELECT pg_notification_queue_usage() = 0").fetchone() == (True,))


def test_a_full_notification_queue_costs_the_hint_and_nothing_else(
    full_queue: psycopg.Connection[tuple[Any, ...]],
    start_relay: StartRelay,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """
    Scenario 8: commits succeed, the wake-up that failed is logged and not raised, the relay polls.

    When the foreign session ends its transaction, the relay's own looking after its
    connection brings the wake-ups back.
    """
    relay = Heard(start_relay(command=HASTY, POLL_SECONDS=2))
    relay.wait_for("the server's notification queue fills up")
    with caplog.at_level(logging.WARNING):
        for name in "abc":
            with transaction.atomic():
                Note.objects.create(text=name)
                emit({}, names=name)
            stage.wait_for(f"end gamma {name}")
    assert caplog.text.count("wake-up not sent") == 3
    assert Note.objects.count() == 3
    eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 3)
    full_queue.execute("ROLLBACK")
    full_queue.execute("SELECT 1")

    def woken() -> bool:
        caplog.clear()
        emit({}, names="d")
        return "wake-up not sent" not in caplog.text

    eventually(woken, seconds=5)
    assert relay.stop() == 0, relay.said
    assert "Traceback" not in relay.said


def test_payloads_larger_than_a_notification_are_committed_and_delivered(start_relay: StartRelay, stage: Stage) -> None:
    """Scenario 7: 3,900 emoji, and 200 kB; what is notified bears none of it (test_wake_hook.py)."""
    relay = Heard(start_relay())
    emit({}, names="a")
    stage.wait_for("end gamma a", seconds=20)
    with transaction.atomic():
        Note.objects.create(text="a business row")
        emit({"text": "😀" * 3_900}, {"text": "x" * 200_000}, names="bc")
    for name in "bc":
        stage.wait_for(f"end gamma {name}", seconds=5)
    assert relay.stop() == 0, relay.said
    assert Note.objects.count() == 1
