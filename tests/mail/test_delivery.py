"""Emails on their way, against servers that refuse, break, hang and recover."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.core import mail
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend
from django.db import transaction

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.mail import EMAILS, EmailWork, enqueue_email
from django_outbox.models import OutboxEmail, OutboxEmailContent, OutboxEvent
from django_outbox.testing import drain, travel
from tests.mail.conftest import message, point_to
from tests.mail.servers import RealServer, Script, ScriptedServer, Talk, scripted_server

pytestmark = pytest.mark.django_db

Start = Callable[[Script], ScriptedServer]


def queue(*numbers: int, **options: Any) -> list[UUID]:
    return [enqueue_email(message(number), **options)[0] for number in numbers]


def rows() -> dict[str, OutboxEmail]:
    """Return the emails by the local part of their first recipient."""
    return {email.recipient.partition("@")[0]: email for email in OutboxEmail.objects.order_by("created_at", "id")}


def statuses() -> dict[str, str]:
    return {name: email.status for name, email in rows().items()}


def to(line: str, user: str) -> bool:
    return line.upper().startswith("RCPT") and user in line


def recipients(server: ScriptedServer | RealServer) -> list[list[str]]:
    return [[address.partition("@")[0] for address in each.recipients] for each in server.received]


def resume(work: EmailWork) -> None:
    """End the pauses, as time would."""
    for known in work.backends._known.values():
        known.until = 0


# --- the ordinary way


def test_an_email_is_sent_once_with_its_message_id(smtp: RealServer) -> None:
    (id_,) = queue(1)
    assert drain() == {"done": 1}
    assert drain() == {}
    (received,) = smtp.received
    email = OutboxEmail.objects.get(pk=id_)
    assert received.recipients == ["user1@example.com"]
    assert f"Message-ID: {email.message_id}".encode() in received.content
    assert (email.status, email.attempts, email.failure_kind, email.refused) == ("done", 1, "", {})
    assert email.finished_at is not None


def test_one_connection_carries_a_chunk(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: None)
    queue(*range(20))
    assert drain() == {"done": 20}
    assert server.sessions == 1
    assert len(server.received) == 20


def test_a_connection_is_opened_anew_after_a_hundred_messages(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.mail.transport.MOST_MESSAGES", 3)
    server = scripted(lambda session, verb, line: None)
    queue(*range(7))
    assert drain() == {"done": 7}
    assert server.sessions == 3


def test_lanes_go_out_in_order(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: None)
    queue(1, priority="bulk")
    queue(2)
    queue(3, priority="urgent")
    drain()
    assert recipients(server) == [["user3"], ["user2"], ["user1"]]


def test_smtp_over_tls_is_watched_as_well() -> None:
    import smtplib

    from django_outbox.mail.transport import _Watch, _watched_smtp

    watched = _watched_smtp(smtplib.SMTP_SSL)
    assert watched.__mro__[1:4] == (_Watch, smtplib.SMTP_SSL, smtplib.SMTP)
    assert _watched_smtp(smtplib.SMTP) is _Watch


def test_a_delayed_email_waits(smtp: RealServer) -> None:
    queue(1, delay=timedelta(hours=1))
    assert drain() == {}
    with travel(hours=1.1):
        assert drain() == {"done": 1}


def test_while_djangos_test_outbox_exists_everything_goes_there(settings: Any) -> None:
    settings.OUTBOX = {"EMAIL": {"BACKEND": "no.such.Backend"}}
    queue(1)
    assert drain() == {"done": 1}
    (sent,) = mail.outbox
    assert sent.subject == "Number 1"
    assert "Message-ID" in sent.extra_headers


# --- what servers refuse


def test_scenario_68_a_refused_recipient_keeps_nobody_else_from_it(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: "550 5.1.1 no such user" if to(line, "user2@") else None)
    enqueue_email(message(to=[f"user{number}@example.com" for number in (1, 2, 3, 4)]))
    assert drain() == {"done": 1}
    with travel(days=1):
        drain()
    assert recipients(server) == [["user1", "user3", "user4"]]
    (email,) = OutboxEmail.objects.all()
    assert email.refused == {"user2@example.com": "550 5.1.1 no such user"}
    assert email.last_code == "550"


def test_recipients_refused_for_now_get_the_same_message_later(scripted: Start) -> None:
    busy = {"user3", "user4"}
    server = scripted(
        lambda session, verb, line: "452 4.5.3 too many recipients" if any(to(line, f"{u}@") for u in busy) else None
    )
    made = message(to=["user1@example.com", "user2@example.com", "user3@example.com"], cc=["user4@example.com"])
    made.attach("a.bin", b"attached", "application/octet-stream")
    id_, _ = enqueue_email(made, priority="urgent", sensitive=True)
    assert drain() == {"done": 1}
    assert drain() == {}
    first = OutboxEmail.objects.get(pk=id_)
    assert set(first.refused) == {"user3@example.com", "user4@example.com"}
    follow_up = OutboxEmail.objects.get(causation_id=id_)
    assert (follow_up.status, follow_up.priority, follow_up.message_id) == ("waiting", 0, first.message_id)
    busy.clear()
    with travel(hours=1):
        assert drain() == {"done": 1}
    assert recipients(server) == [["user1", "user2"], ["user3", "user4"]]
    once, again = (each.content for each in server.received)
    for header in (b"To: user1@example.com, user2@example.com", b"Cc: user4@example.com", first.message_id.encode()):
        assert header in once
        assert header in again
    assert b"YXR0YWNoZWQ=" in again
    assert not OutboxEmailContent.objects.exists()


def test_an_email_whose_recipients_are_all_refused_for_good_fails_alone(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: "550 5.1.1 no such user" if to(line, "user2@") else None)
    queue(1, 2, 3)
    assert drain() == {"done": 2, "failed": 1}
    assert recipients(server) == [["user1"], ["user3"]]
    assert server.sessions == 1
    failed = rows()["user2"]
    assert (failed.status, failed.failure_kind, failed.last_code) == ("failed", "rejected", "550")
    assert "550 5.1.1 no such user" in failed.last_error
    with travel(days=2):
        assert drain() == {}


@pytest.mark.parametrize(
    ("verb", "reply", "status", "kind"),
    [
        ("MAIL", "550 5.7.1 not you", "failed", "rejected"),
        ("MAIL", "552 5.3.4 message size exceeds fixed limit", "failed", "rejected"),
        ("MAIL", "451 4.3.0 later", "waiting", "temporary"),
        ("RCPT", "451 4.3.0 later", "waiting", "temporary"),
        ("DATA", "554 5.6.0 no", "failed", "rejected"),
        ("DATA", "451 4.3.0 later", "waiting", "temporary"),
        ("BODY", "554 5.6.0 spam", "failed", "rejected"),
        ("BODY", "452 4.3.1 full", "waiting", "temporary"),
    ],
)
def test_one_refused_message_leaves_the_connection_to_the_next(
    scripted: Start, verb: str, reply: str, status: str, kind: str
) -> None:
    server = scripted(lambda session, said, line: reply if said == verb and session.messages == 2 else None)
    queue(1, 2, 3)
    drain()
    assert statuses() == {"user1": "done", "user2": status, "user3": "done"}
    assert server.sessions == 1
    email = rows()["user2"]
    assert (email.failure_kind, email.last_code, email.attempts) == (kind, reply[:3], 1)
    assert not email.maybe_sent


@contextmanager
def pipelined(settings: Any, script: Script) -> Iterator[ScriptedServer]:
    """Deliver to a server that gets a message's commands at once."""
    with scripted_server(script, pipelining=True) as server:
        point_to(settings, server.port)
        yield server


def test_commands_are_sent_at_once_where_the_server_takes_them_so(settings: Any, no_test_outbox: None) -> None:
    """A server that answers nothing before it has read DATA would wait for ever for a client that goes step by step."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        point_to(settings, listener.getsockname()[1])
        got: list[bytes] = []

        def serve() -> None:
            client, _ = listener.accept()
            with client, client.makefile("rb") as stream:
                client.settimeout(20)
                client.sendall(b"220 hello\r\n")
                stream.readline()
                client.sendall(b"250-hello\r\n250-SIZE 1000000\r\n250 PIPELINING\r\n")
                got.extend(stream.readline() for _ in range(4))
                client.sendall(b"250 ok\r\n250 ok\r\n250 ok\r\n354 go on\r\n")
                while stream.readline() != b".\r\n":
                    pass
                client.sendall(b"250 kept\r\n")
                stream.readline()

        thread = threading.Thread(target=serve)
        thread.start()
        enqueue_email(message(to=["a@example.com", "b@example.com"]))
        assert drain() == {"done": 1}
        thread.join(10)
    assert [re.sub(rb"size=\d+", b"size=N", line) for line in got] == [
        b"mail FROM:<shop@example.com> size=N\r\n",
        b"rcpt TO:<a@example.com>\r\n",
        b"rcpt TO:<b@example.com>\r\n",
        b"data\r\n",
    ]


def test_many_recipients_are_given_one_by_one(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.mail.transport.MOST_AHEAD", 2)
    server = scripted(lambda session, verb, line: None)
    enqueue_email(message(to=[f"user{number}@example.com" for number in range(3)]))
    assert drain() == {"done": 1}
    assert recipients(server) == [["user0", "user1", "user2"]]


@pytest.mark.parametrize("refused", ["MAIL", "RCPT"])
def test_a_server_that_would_take_a_refused_message_all_the_same_gets_none(
    settings: Any, no_test_outbox: None, refused: str
) -> None:
    """RFC 2920, 3.1: DATA may be answered with 354 although every recipient was refused."""

    def script(talk: Talk, verb: str, line: str) -> str | None:
        if verb == refused and talk.messages == 2:
            return "550 5.1.1 not this one"
        return "354 go on" if verb == "DATA" else None

    with pipelined(settings, script) as server:
        queue(1, 2, 3)
        assert drain() == {"done": 2, "failed": 1}
    assert recipients(server) == [["user1"], ["user3"]]
    assert statuses() == {"user1": "done", "user2": "failed", "user3": "done"}
    assert rows()["user2"].last_code == "550"
    assert server.sessions == 2


@pytest.mark.parametrize("verb_refused", ["MAIL", "RCPT", "DATA"])
def test_replies_to_what_follows_a_refused_command_are_not_taken_for_others(
    settings: Any, no_test_outbox: None, verb_refused: str
) -> None:
    def script(talk: Talk, verb: str, line: str) -> str | None:
        return "550 5.7.1 not this one" if verb == verb_refused and talk.messages == 2 else None

    with pipelined(settings, script) as server:
        queue(1, 2, 3)
        assert drain() == {"done": 2, "failed": 1}
    assert recipients(server) == [["user1"], ["user3"]]
    assert "550 5.7.1" in rows()["user2"].last_error
    assert server.sessions == 1


def test_a_session_that_ends_amid_the_replies_is_not_used_again(settings: Any, no_test_outbox: None) -> None:
    def script(talk: Talk, verb: str, line: str) -> str | None:
        return "421 4.3.2 going down" if to(line, "user2@") and talk.number == 1 else None

    with pipelined(settings, script) as server:
        enqueue_email(message(1))
        enqueue_email(message(2, to=["user2@example.com", "user9@example.com"]))
        assert drain() == {"done": 2}
    assert recipients(server) == [["user1"], ["user2", "user9"]]
    assert server.sessions == 2


def test_a_transient_failure_follows_the_schedule_until_the_email_is_dead(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: "451 4.3.0 later" if verb == "RCPT" else None)
    (id_,) = queue(1)
    ages = [0, 100, 400, 900]
    for number, age in enumerate(ages, 1):
        with travel(seconds=age):
            drain(queues=["email"])
        email = OutboxEmail.objects.get(pk=id_)
        assert (email.attempts, email.status) == (number, "waiting" if number < 4 else "dead")
    assert email.due_at is not None
    assert email.due_at - email.created_at > timedelta(hours=6)
    (event,) = OutboxEvent.objects.all()
    assert event.type == "email.delivery.exhausted"
    assert event.payload["recipient"] == "user1@example.com"
    assert event.payload["kind"] == "temporary"
    assert event.quiet
    # Replayed while it is younger than a day, and not announced again.
    with travel(hours=10):
        assert drain() == {"dead": 1}
    with travel(hours=30):
        assert drain() == {"dead": 1}
    assert OutboxEmail.objects.get(pk=id_).due_at is None
    assert OutboxEvent.objects.count() == 1
    assert sum(line.upper().startswith("RCPT") for line in server.commands) == 6


def test_the_message_id_is_the_same_at_every_attempt(scripted: Start) -> None:
    replies = iter(["451 4.3.0 later", "451 4.3.0 later"])
    server = scripted(lambda session, verb, line: next(replies, None) if verb == "BODY" else None)
    (id_,) = queue(1)
    for minutes in (0, 5, 30):
        with travel(minutes=minutes):
            drain()
    (received,) = server.received
    assert OutboxEmail.objects.get(pk=id_).message_id.encode() in received.content


# --- connections that break


@pytest.mark.parametrize("verb", ["MAIL", "RCPT", "DATA"])
@pytest.mark.parametrize("reply", ["drop", "421 4.3.2 closing"])
def test_a_connection_that_breaks_before_the_body_costs_nobody_an_attempt(
    scripted: Start, verb: str, reply: str
) -> None:
    server = scripted(
        lambda session, said, line: reply if said == verb and session.number == 1 and session.messages == 2 else None
    )
    queue(1, 2, 3, 4)
    assert drain() == {"done": 4}
    assert recipients(server) == [["user1"], ["user2"], ["user3"], ["user4"]]
    assert {email.attempts for email in rows().values()} == {1}
    assert server.sessions == 2


def test_a_connection_that_breaks_after_the_body_may_have_sent_the_message(scripted: Start) -> None:
    server = scripted(
        lambda session, said, line: "drop" if said == "BODY" and session.number == 1 and session.messages == 2 else None
    )
    queue(1, 2, 3)
    assert drain() == {"done": 2, "waiting": 1}
    email = rows()["user2"]
    assert (email.maybe_sent, email.failure_kind, email.attempts) == (True, "connection", 1)
    assert recipients(server) == [["user1"], ["user3"]]
    with travel(minutes=5):
        assert drain() == {"done": 1}
    assert rows()["user2"].maybe_sent


def test_a_refusal_after_which_the_connection_breaks_hurts_no_other(scripted: Start) -> None:
    """The right error is raised, and only the next message finds the socket gone."""
    server = scripted(
        lambda session, said, line: (
            {"RCPT": "550 5.1.1 no such user", "RSET": "drop"}.get(said)
            if session.number == 1 and session.messages == 1
            else None
        )
    )
    queue(1, 2, 3)
    assert drain() == {"done": 2, "failed": 1}
    assert statuses()["user1"] == "failed"
    assert {email.attempts for email in rows().values()} == {1}
    assert server.sessions == 2


def test_a_server_that_closes_idle_connections_costs_nobody_an_attempt(scripted: Start) -> None:
    server = scripted(lambda session, said, line: "drop" if said == "MAIL" and session.messages == 2 else None)
    queue(1, 2, 3)
    assert drain() == {"done": 3}
    assert server.sessions == 3
    assert {email.attempts for email in rows().values()} == {1}


def test_a_message_that_breaks_every_connection_stops_nobody(scripted: Start, work: EmailWork) -> None:
    scripted(lambda session, said, line: "drop" if to(line, "user1@") else None)
    queue(1, 2, 3)
    assert drain() == {"waiting": 1, "released": 2}
    email = rows()["user1"]
    assert (email.attempts, email.status) == (0, "waiting")
    assert "Connection unexpectedly closed" in email.last_error
    assert work.backends.paused_seconds("default") > 4
    resume(work)
    assert drain() == {"done": 2}
    # It does not go on so for ever: from the age at which nothing is replayed any more it is charged.
    for hours in (25, 26, 27, 28):
        resume(work)
        with travel(hours=hours):
            drain(queues=["email"])
    assert statuses()["user1"] == "dead"


# --- nobody's fault


@pytest.mark.parametrize(
    ("verb", "reply"),
    [
        ("CONNECT", "554 5.3.2 not now"),
        ("CONNECT", "421 4.3.2 too busy"),
        ("CONNECT", "drop"),
        ("MAIL", "530 5.7.0 authentication required"),
        ("RCPT", "454 4.7.0 temporary authentication failure"),
    ],
)
def test_what_nobody_could_send_through_charges_nobody_and_pauses_the_backend(
    scripted: Start, work: EmailWork, verb: str, reply: str
) -> None:
    broken = [True]
    scripted(lambda session, said, line: reply if said == verb and broken[0] else None)
    queue(1, 2, 3)
    assert drain() == {"released": 3}
    assert {(email.status, email.attempts) for email in rows().values()} == {("pending", 0)}
    assert 4 < work.backends.paused_seconds("default") <= 5
    assert drain() == {}
    broken[0] = False
    resume(work)
    assert drain() == {"done": 3}


def test_a_server_that_is_down_charges_nobody(settings: Any, no_test_outbox: None, work: EmailWork) -> None:
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 9
    settings.OUTBOX = {"EMAIL": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend"}}
    queue(1, 2)
    assert drain() == {"released": 2}
    assert {(email.status, email.attempts) for email in rows().values()} == {("pending", 0)}


@pytest.mark.parametrize("missing", ["STARTTLS", "AUTH", "password"])
def test_a_login_that_fails_charges_nobody_and_hides_the_password(
    scripted: Start, settings: Any, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    def script(session: Talk, verb: str, line: str) -> str | None:
        if missing == "password" and verb == "EHLO":
            return "250-mail.test\r\n250 AUTH PLAIN LOGIN"
        if verb == "AUTH":
            return f"535 5.7.8 not accepted: {line}"
        return None

    scripted(script)
    settings.EMAIL_USE_TLS = missing == "STARTTLS"
    settings.EMAIL_HOST_USER, settings.EMAIL_HOST_PASSWORD = "shop", "open sesame"
    queue(1, 2)
    assert drain() == {"released": 2}
    assert {(email.status, email.attempts) for email in rows().values()} == {("pending", 0)}
    assert "backend paused alias=default" in caplog.text
    # AUTH PLAIN sends the password as base64 of \0user\0password.
    for secret in ("open sesame", "AHNob3AAb3BlbiBzZXNhbWU=", "b3BlbiBzZXNhbWU="):
        assert secret not in caplog.text
        assert not OutboxEmail.objects.filter(last_error__contains=secret).exists()


def test_pauses_double_until_a_success(work: EmailWork) -> None:
    backends = work.backends
    seen = []
    for _ in range(9):
        backends.pause("a", reason="test")
        backends.pause("a", reason="another thread met the same")
        seen.append(round(backends.paused_seconds("a")))
        backends._known["a"].until = 0
    assert seen == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    # A success that was under way when the pause began does not end it, one after it does.
    backends.pause("a", reason="test")
    backends.sent("a")
    assert round(backends.paused_seconds("a")) == 300
    backends._known["a"].until = 0
    backends.sent("a")
    backends.pause("a", reason="test")
    assert round(backends.paused_seconds("a")) == 5
    assert backends.paused_seconds("b") == 0


def test_a_paused_backend_is_not_claimed_and_says_when_to_look_again(work: EmailWork) -> None:
    queue(1)
    assert list(work.scopes(10, using="default")) == [({"priority": 1, "backend_alias": "default"}, 10)]
    assert work.next_due_seconds(using="default") == 0
    work.backends.pause("default", reason="test")
    assert list(work.scopes(10, using="default")) == []
    due = work.next_due_seconds(using="default")
    assert due is not None
    assert 4 < due <= 5


def test_a_backend_that_refuses_everything_loses_no_backlog(
    scripted: Start, work: EmailWork, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(lambda session, verb, line: "550 5.7.1 relaying denied" if verb == "RCPT" else None)
    queue(*range(10))
    drain(queues=["email"])
    counts = sorted(statuses().values())
    assert counts.count("failed") == 4
    assert counts.count("waiting") == 1  # held, not charged
    assert counts.count("pending") == 5  # released
    assert {email.attempts for email in rows().values() if email.status != "failed"} == {0}
    assert "backend refuses everything" in caplog.text
    assert work.backends.paused_seconds("default") > 4


def test_a_success_between_refusals_says_that_they_are_about_their_recipients(scripted: Start) -> None:
    scripted(lambda session, verb, line: None if "user4" in line or verb != "RCPT" else "550 5.1.1 no such user")
    queue(*range(9))
    drain(queues=["email"])
    assert sorted(statuses().values()) == ["done"] + ["failed"] * 8


def test_a_rate_limit_charges_one_and_pauses_for_the_rest(scripted: Start, work: EmailWork) -> None:
    scripted(lambda session, verb, line: "450 4.7.1 sending too fast" if verb == "MAIL" else None)
    queue(1, 2, 3)
    assert drain() == {"waiting": 1, "released": 2}
    assert rows()["user1"].failure_kind == "rate"


# --- silence and slowness


def test_scenario_35_a_silent_server_is_given_up_and_counted(scripted: Start, settings: Any, work: EmailWork) -> None:
    scripted(lambda session, verb, line: "silence" if verb == "CONNECT" else None)
    settings.OUTBOX["EMAIL"] |= {"REPLY_TIMEOUT_SECONDS": 0.2}
    settings.OUTBOX = {**settings.OUTBOX}
    queue(1, 2, 3)
    assert drain() == {"waiting": 1, "released": 2}
    email = rows()["user1"]
    assert (email.attempts, email.failure_kind) == (1, "timeout")
    assert work.backends.paused_seconds("default") > 4


def test_a_backends_own_time_out_is_kept(scripted: Start, settings: Any) -> None:
    scripted(lambda session, verb, line: "silence" if verb == "RCPT" and session.number == 1 else None)
    settings.EMAIL_TIMEOUT = 0.2
    queue(1, 2)
    assert drain() == {"waiting": 1, "done": 1}
    assert (rows()["user1"].attempts, rows()["user1"].failure_kind) == (1, "timeout")


def test_slow_replies_add_up_to_one_limit(scripted: Start, settings: Any) -> None:
    """Each reply comes within the backend's time-out, which is for each of them."""
    scripted(lambda session, verb, line: "slow 0.15 250 ok" if verb in {"MAIL", "RCPT"} else None)
    settings.OUTBOX = {"EMAIL": {**settings.OUTBOX["EMAIL"], "TIMEOUT_SECONDS": 0.2, "LEASE_SECONDS": 20}}
    queue(1)
    drain()
    email = rows()["user1"]
    assert (email.status, email.failure_kind) == ("waiting", "timeout")


def test_silence_after_the_body_may_have_sent_the_message(scripted: Start, settings: Any) -> None:
    scripted(lambda session, verb, line: "silence" if verb == "BODY" and session.number == 1 else None)
    settings.EMAIL_TIMEOUT = 0.2
    queue(1, 2)
    assert drain() == {"waiting": 1, "done": 1}
    assert rows()["user1"].maybe_sent


# --- expiry, leases, broken rows


def test_an_expired_email_is_never_sent(smtp: RealServer) -> None:
    expires_at = datetime.now(UTC) + timedelta(minutes=10)
    (id_,) = queue(1, expires_at=expires_at)
    with travel(minutes=11):
        assert drain(queues=["email"]) == {"failed": 1}
    email = OutboxEmail.objects.get(pk=id_)
    assert (email.status, email.failure_kind) == ("failed", "expired")
    assert smtp.received == []
    assert OutboxEvent.objects.get().payload["kind"] == "expired"


def test_expiry_wins_over_the_replay_window(scripted: Start) -> None:
    server = scripted(lambda session, verb, line: "451 4.3.0 later" if verb == "RCPT" else None)
    queue(1, expires_at=datetime.now(UTC) + timedelta(hours=5))
    for seconds in (0, 100, 400, 900):
        with travel(seconds=seconds):
            drain(queues=["email"])
    assert statuses() == {"user1": "dead"}
    server.commands.clear()
    with travel(hours=10):
        drain(queues=["email"])
    assert (rows()["user1"].status, rows()["user1"].failure_kind) == ("failed", "expired")
    assert server.commands == []


def test_an_email_that_expires_while_it_waits_for_its_turn_is_not_sent(smtp: RealServer, work: EmailWork) -> None:
    queue(1, expires_at=datetime.now(UTC) + timedelta(seconds=30))
    claimer = engine.Claimer(EMAILS, holder="me", using="default")
    (lease,) = claimer.claim(1, lease_seconds=120)
    run = work.start(lease, using="default")
    step = run.next_step()
    assert step is not None
    lease.clock = engine.Clock(lease.clock.epoch + 60, lease.clock.monotonic)
    result = run.invoke(step, timeout=30)
    assert result.columns["failure_kind"] == "expired"
    assert smtp.received == []


def test_a_lease_that_runs_low_starts_no_message(smtp: RealServer, work: EmailWork) -> None:
    queue(1)
    claimer = engine.Claimer(EMAILS, holder="me", using="default")
    (lease,) = claimer.claim(1, lease_seconds=120)
    lease.deadline -= 80
    run = work.start(lease, using="default")
    assert run.next_step() is None
    assert isinstance(run.settled().outcome, engine.Released)


def test_a_row_that_cannot_be_built_fails_alone(smtp: RealServer) -> None:
    ids = queue(1, 2, 3, 4)
    OutboxEmailContent.objects.filter(pk=ids[1]).update(document='{"v": 99}')
    OutboxEmailContent.objects.filter(pk=ids[2]).update(document="not JSON")
    OutboxEmailContent.objects.filter(pk=ids[3]).delete()
    drain(queues=["email"])
    assert statuses() == {"user1": "done", "user2": "failed", "user3": "failed", "user4": "failed"}
    assert [rows()[name].failure_kind for name in ("user2", "user3", "user4")] == [
        "unbuildable",
        "unbuildable",
        "wiped",
    ]


# --- other backends


class Custom(Exception):
    """A backend's own error."""


class Choosy(BaseEmailBackend):
    """Raises its own error for one address, or when it is opened."""

    on_open = False
    sent: list[str] = []  # noqa: RUF012  for one test at a time

    def open(self) -> None:
        if self.on_open:
            raise Custom("cannot open: boom")

    def send_messages(self, email_messages: Any) -> int:
        for each in email_messages:
            if each.to == ["user3@example.com"]:
                raise Custom("this address: boom")
            self.sent.append(each.to[0])
        return len(email_messages)


@pytest.fixture
def choosy(settings: Any, no_test_outbox: None, monkeypatch: pytest.MonkeyPatch) -> type[Choosy]:
    settings.OUTBOX = {"EMAIL": {"BACKEND": f"{__name__}.Choosy"}}
    monkeypatch.setattr(Choosy, "sent", [])
    return Choosy


def test_scenario_31_an_unknown_error_of_a_backend_stops_nobody_else(choosy: type[Choosy]) -> None:
    queue(*range(10))
    assert drain() == {"done": 9, "waiting": 1}
    assert len(choosy.sent) == 9
    for seconds in (100, 400, 900):
        with travel(seconds=seconds):
            drain(queues=["email"])
    email = rows()["user3"]
    assert (email.status, email.attempts) == ("dead", 4)
    assert "Custom: this address: boom" in email.last_error
    assert len(choosy.sent) == 9


def test_scenario_31_also_when_it_is_raised_on_open(choosy: type[Choosy], monkeypatch: pytest.MonkeyPatch) -> None:
    queue(1, 2)
    monkeypatch.setattr(Choosy, "on_open", True)
    for seconds in (0, 100, 400, 900):
        with travel(seconds=seconds):
            drain(queues=["email"])
    assert {(email.status, email.attempts) for email in rows().values()} == {("dead", 4)}
    assert all("Custom: cannot open: boom" in email.last_error for email in rows().values())


class Requeues(BaseEmailBackend):
    """Hands the messages back to the queue."""

    def send_messages(self, email_messages: Any) -> int:
        for each in email_messages:
            enqueue_email(each)
        return len(email_messages)


@pytest.mark.parametrize("backend", ["django_outbox.mail.EmailBackend", f"{__name__}.Requeues", "no.such.Backend"])
def test_a_backend_that_cannot_be_the_one_charges_nobody(
    settings: Any, no_test_outbox: None, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    settings.OUTBOX = {"EMAIL": {"BACKEND": backend}}
    queue(1, 2)
    assert drain() == {"released": 2}
    assert OutboxEmail.objects.count() == 2
    assert {(email.status, email.attempts) for email in rows().values()} == {("pending", 0)}
    assert any(record.levelno == logging.ERROR for record in caplog.records)


class Nothing(BaseEmailBackend):
    """Sends nothing, and says so."""

    def send_messages(self, email_messages: Any) -> int:
        return 0


def test_a_backend_that_sends_nothing_fails_the_email(settings: Any, no_test_outbox: None) -> None:
    settings.OUTBOX = {"EMAIL": {"BACKEND": f"{__name__}.Nothing"}}
    queue(1)
    drain(queues=["email"])
    assert (rows()["user1"].status, rows()["user1"].failure_kind) == ("failed", "cancelled")


# --- settling


def test_each_email_is_settled_before_the_next_is_sent(scripted: Start) -> None:
    seen: list[dict[str, str]] = []
    server = scripted(lambda session, verb, line: None)
    queue(1, 2, 3)
    original = EmailMessage.message

    def spying(self: EmailMessage, **options: Any) -> Any:
        seen.append(statuses())
        return original(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmailMessage, "message", spying)
        drain()
    assert [list(each.values()).count("done") for each in seen] == [0, 1, 2]
    assert len(server.received) == 3


def test_a_stale_lease_cannot_settle_an_email(smtp: RealServer, work: EmailWork) -> None:
    (id_,) = queue(1)
    claimer = engine.Claimer(EMAILS, holder="me", using="default")
    (lease,) = claimer.claim(1, lease_seconds=1)
    run = work.start(lease, using="default")
    lease.seconds = 0.1
    step = run.next_step()
    assert step is not None
    run.finish(step, run.invoke(step, timeout=30))
    with travel(minutes=5):
        (other,) = engine.Claimer(EMAILS, holder="other", using="default").claim(1, lease_seconds=120)
    written = engine.settle(
        [run.settled()], schedule=get_settings().email.schedule, using="default", along=work.along_on("default")
    )
    assert written == {}
    assert OutboxEmail.objects.get(pk=id_).fence == other.fence


def test_an_email_that_is_written_by_a_quiet_row_is_not_announced(scripted: Start) -> None:
    from django_outbox.delivery import Cause, current_cause

    scripted(lambda session, verb, line: "550 5.1.1 no such user" if verb == "RCPT" else None)
    token = current_cause.set(Cause(organization_id="acme", request_id="r1", quiet=True))
    try:
        with transaction.atomic():
            (id_,) = queue(1)
    finally:
        current_cause.reset(token)
    drain()
    email = OutboxEmail.objects.get(pk=id_)
    assert (email.status, email.quiet, email.organization_id, email.request_id) == ("failed", True, "acme", "r1")
    assert not OutboxEvent.objects.exists()


def test_a_thread_sends_nothing_more_until_its_last_message_is_recorded(smtp: RealServer, work: EmailWork) -> None:
    queue(1, 2)
    first, second = engine.Claimer(EMAILS, holder="me", using="default").claim(2, lease_seconds=120)
    run = work.start(first, using="default")
    step = run.next_step()
    assert step is not None
    run.finish(step, run.invoke(step, timeout=30))
    # Nobody records it: what follows is given back once too little is left of its lease.
    waiting = work.start(second, using="default")
    second.deadline -= 75
    assert waiting.next_step() is None
    assert isinstance(waiting.settled().outcome, engine.Released)
    # Recorded, the next one starts.
    second.deadline += 75
    work.landed([first])
    assert work.start(second, using="default").next_step() is not None


def test_a_send_that_is_cut_off_may_have_gone_out(smtp: RealServer, work: EmailWork) -> None:
    from django_outbox.delivery import Result

    queue(1, 2)
    leases = engine.Claimer(EMAILS, holder="me", using="default").claim(2, lease_seconds=120)
    interrupted, overrun = (work.start(lease, using="default") for lease in leases)
    for run in (interrupted, overrun):
        assert run.next_step() is not None
    interrupted.interrupt()
    overrun.finish(overrun, Result("took longer than its 30 s"))
    for run in (interrupted, overrun):
        settled = run.settled()
        assert isinstance(settled.outcome, engine.Retry)
        assert settled.columns == {"failure_kind": "interrupted", "maybe_sent": True}


def test_a_fault_that_only_a_child_process_met_pauses_the_backend_here_too(work: EmailWork) -> None:
    import pickle

    from django_outbox.delivery import Result

    queue(1)
    (lease,) = engine.Claimer(EMAILS, holder="me", using="default").claim(1, lease_seconds=120)
    run = work.start(lease, using="default")
    step = run.next_step()
    assert step is not None
    run.finish(step, pickle.loads(pickle.dumps(Result(outcome=engine.Released()))))  # noqa: S301  our own
    assert work.backends.paused_seconds("default") > 4


def test_the_databases_trouble_charges_no_email(smtp: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    def fails(*_: Any, **__: Any) -> None:
        raise OperationalError("server closed the connection")

    queue(1)
    with monkeypatch.context() as patch:
        patch.setattr("django_outbox.mail.store.documents", fails)
        patch.setattr("django_outbox.mail.store.load", fails)
        claimed = engine.Claimer(EMAILS, holder="me", using="default").claim(1, lease_seconds=120)
        run = EmailWork(owed_to=lambda _: "{}").start(claimed[0], using="default")
        step = run.next_step()
        assert step is not None
        run.finish(step, run.invoke(step, timeout=30))
        assert isinstance(run.settled().outcome, engine.Released)
        engine.release(claimed, using="default")
    assert drain() == {"done": 1}
    assert rows()["user1"].attempts == 1
