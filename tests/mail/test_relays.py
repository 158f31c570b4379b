"""
Relays of their own processes, and the mail that they send.

The servers run in the test: what a relay sent is what a server has received. Where a
relay must be met in the midst of its work, the server holds back a reply until the test
has done what it wants.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from django_outbox.mail import enqueue_email
from django_outbox.models import OutboxEmail
from tests.conftest import StartPython
from tests.mail.conftest import message
from tests.mail.servers import Talk, real_server, scripted_server, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

StartRelay = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_relay(start_python: StartPython) -> StartRelay:
    def start(port: int, *arguments: str, **email: Any) -> subprocess.Popen[str]:
        return start_python(
            "-W",
            "ignore",
            "-m",
            "django",
            "run_outbox",
            *arguments,
            DJANGO_SETTINGS_MODULE="tests.mail.relay_settings",
            MAIL_PORT=str(port),
            MAIL_OUTBOX=json.dumps(email),
        )

    return start


def done() -> int:
    return OutboxEmail.objects.filter(status="done").count()


@pytest.mark.postgres
def test_scenario_34_four_relays_send_fifty_mails_once_each(start_relay: StartRelay) -> None:
    with real_server() as server:
        for number in range(50):
            enqueue_email(message(number))
        relays = [start_relay(server.port, "--drain", "--queue", "email") for _ in range(4)]
        for relay in relays:
            output, _ = relay.communicate(timeout=60)
            assert relay.returncode == 0, output
        assert done() == 50
        sent = Counter(recipient for each in server.received for recipient in each.recipients)
        assert len(sent) == 50
        assert set(sent.values()) == {1}


@pytest.mark.postgres
def test_scenario_34_a_killed_relay_repeats_at_most_the_mail_in_its_hands(start_relay: StartRelay) -> None:
    """The server has taken the body, and holds back its reply: the relay dies not knowing that it was sent."""
    reached, go_on = threading.Event(), threading.Event()

    def script(talk: Talk, verb: str, line: str) -> str | None:
        if verb == "BODY" and talk.number == 1 and talk.messages == 3:
            reached.set()
            go_on.wait(30)
        return None

    with scripted_server(script) as server:
        for number in range(8):
            enqueue_email(message(number))
        first = start_relay(server.port, "--threads", "1", LEASE_SECONDS=20, TIMEOUT_SECONDS=2)
        assert reached.wait(30)
        first.kill()
        first.wait(30)
        go_on.set()
        OutboxEmail.objects.exclude(leased_by="").update(lease_until="2020-01-01T00:00:00Z")
        second = start_relay(server.port, "--drain")
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 0, output
        assert done() == 8
        sent = Counter(recipient for each in server.received for recipient in each.recipients)
        assert len(sent) == 8
        assert sum(sent.values()) <= 9
        ids = {recipient: set[bytes]() for recipient in sent}
        for each in server.received:
            header = next(line for line in each.content.split(b"\r\n") if line.startswith(b"Message-ID"))
            ids[each.recipients[0]].add(header)
        assert all(len(found) == 1 for found in ids.values())


def test_scenario_35_a_mute_server_keeps_neither_events_nor_the_stop_waiting(start_relay: StartRelay) -> None:
    from django.db import transaction

    from django_outbox import emit_event
    from django_outbox.models import OutboxEvent

    with scripted_server(lambda talk, verb, line: "silence") as server:
        for number in range(3):
            enqueue_email(message(number))
        relay = start_relay(server.port, REPLY_TIMEOUT_SECONDS=1.0)
        wait_for(lambda: server.sessions > 0)
        with transaction.atomic():
            for number in range(10):
                emit_event("testapp.discovered", {"number": number})
        wait_for(lambda: OutboxEmail.objects.filter(failure_kind="timeout").exists())
        wait_for(lambda: OutboxEvent.objects.filter(status="done").count() == 10)
        assert OutboxEmail.objects.filter(failure_kind="timeout", attempts__gte=1).exists()
        relay.send_signal(signal.SIGTERM)
        relay.communicate(timeout=30)
        assert relay.returncode == 0


def test_a_commit_wakes_the_relay_for_mail(start_relay: StartRelay) -> None:
    with real_server() as server:
        relay = start_relay(server.port)
        wait_for(lambda: relay.stdout is not None and "email" in relay.stdout.readline())
        enqueue_email(message())
        wait_for(lambda: done() == 1, 10)
        relay.send_signal(signal.SIGTERM)
        output, _ = relay.communicate(timeout=30)
        assert relay.returncode == 0, output
