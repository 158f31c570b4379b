"""Relays behind PgBouncer: few server connections, handed out by the transaction."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection

from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import Heard, StartRelay, emit, eventually
from tests.concurrency.pooler import pgbouncer
from tests.concurrency.stage import Stage
from tests.concurrency.test_listen import delivered_within, listeners

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

DEAF = "LISTEN is not heard here, polling instead"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that another account can be given; those of `tmp_path` lie in one that is for one's own eyes."""
    with tempfile.TemporaryDirectory(prefix="outbox-pooler-") as path:
        yield Path(path)


def test_behind_a_transaction_pooler_relays_deliver_and_poll_or_listen_directly(
    start_relay: StartRelay, stage: Stage, directory: Path, pg_dsn: str
) -> None:
    """Scenario 11: two relays, one without and one with an address of the server itself for LISTEN."""
    names = [f"row-{number}" for number in range(200)]
    actors = [f"{handler} {name}" for handler in ("alpha", "beta", "gamma") for name in names]
    with pgbouncer(connection.settings_dict, directory, mode="transaction") as url:
        environment = {"TEST_DATABASE_URL": url}
        polling = Heard(start_relay("--threads", "4", POLL_SECONDS=1, environment=environment))
        polling.wait_for(DEAF)
        assert delivered_within(stage, "a") < 2

        listening = Heard(start_relay("--threads", "4", LISTEN_DSN=pg_dsn, environment=environment))
        eventually(listeners, seconds=20)
        emit(*[{"alpha": [["write", "1"]]}] * 200, names=names)
        eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 201, seconds=30)
        assert set(OutboxEvent.objects.values_list("status", "attempts")) == {("done", 1)}
        ends = stage.counts("end")
        assert {actor: ends[actor] for actor in actors} == dict.fromkeys(actors, 1)

        # Alone, the one that listens is woken at once: its poll is 30 s.
        assert polling.stop() == 0, polling.said
        assert delivered_within(stage, "b") < 1
        assert listening.stop() == 0, listening.said
    assert polling.said.count(DEAF) == 1
    assert "LISTEN_DSN" in polling.said
    assert DEAF not in listening.said
    for relay in (polling, listening):
        assert not re.search('prepared statement "|Traceback|ERROR', relay.said), relay.said
        # Which of them got how many of the 200 is not said: one claim may take them all.
        assert int((re.search(r"Relay ended: (\d+) done", relay.said) or [0, 0])[1]) >= 1, relay.said


def test_behind_a_session_pooler_wake_ups_are_heard(start_relay: StartRelay, stage: Stage, directory: Path) -> None:
    with pgbouncer(connection.settings_dict, directory, mode="session") as url:
        relay = Heard(start_relay("--threads", "1", environment={"TEST_DATABASE_URL": url}))
        emit({}, names="a")
        stage.wait_for("end gamma a", seconds=20)
        eventually(listeners)
        # Twice: the first may be found by the look that follows the beginning of LISTEN.
        assert delivered_within(stage, "b") < 3
        assert delivered_within(stage, "c") < 1
        assert relay.stop() == 0, relay.said
    assert DEAF not in relay.said
