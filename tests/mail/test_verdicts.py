"""The classification of failed sends, row by row."""

from __future__ import annotations

import smtplib
import socket
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest
import requests
from anymail.exceptions import (
    AnymailCancelSend,
    AnymailInvalidAddress,
    AnymailRecipientsRefused,
    AnymailRequestsAPIError,
    AnymailSerializationError,
    AnymailUnsupportedFeature,
)
from django.core.exceptions import ImproperlyConfigured

from django_outbox.mail.verdicts import Blame, Stage, judge

MESSAGE, ATTEMPT, CONNECTION, BACKEND = Blame.MESSAGE, Blame.ATTEMPT, Blame.CONNECTION, Blame.BACKEND
NOW = datetime(2026, 11, 30, 10, tzinfo=UTC)


def silence() -> smtplib.SMTPServerDisconnected:
    """Return what smtplib makes of a reply that does not come."""
    try:
        try:
            raise TimeoutError("timed out")
        except OSError as error:
            raise smtplib.SMTPServerDisconnected(f"Connection unexpectedly closed: {error}")  # noqa: B904
    except smtplib.SMTPServerDisconnected as error:
        return error


def refused(*replies: tuple[int, bytes]) -> smtplib.SMTPRecipientsRefused:
    return smtplib.SMTPRecipientsRefused({f"u{n}@example.com": reply for n, reply in enumerate(replies)})


DROP = smtplib.SMTPServerDisconnected("Connection unexpectedly closed")
NO_USER, BUSY, CLOSING = (550, b"5.1.1 no such user"), (452, b"4.3.1 later"), (421, b"4.3.2 closing")


@pytest.mark.parametrize(
    ("error", "stage", "blame", "kind"),
    [
        # Before any message: nobody's fault.
        (socket.gaierror(-2, "Name or service not known"), Stage.OPEN, BACKEND, "connection"),
        (ConnectionRefusedError(111, "refused"), Stage.OPEN, BACKEND, "connection"),
        (TimeoutError("timed out"), Stage.OPEN, BACKEND, "connection"),
        (ssl.SSLError(1, "handshake"), Stage.OPEN, BACKEND, "connection"),
        (smtplib.SMTPConnectError(554, b"no"), Stage.OPEN, BACKEND, "connection"),
        (smtplib.SMTPConnectError(421, b"4.7.0 try later"), Stage.OPEN, BACKEND, "connection"),
        (smtplib.SMTPHeloError(500, b"what"), Stage.OPEN, BACKEND, "connection"),
        (smtplib.SMTPNotSupportedError("STARTTLS extension not supported"), Stage.OPEN, BACKEND, "connection"),
        (smtplib.SMTPAuthenticationError(535, b"5.7.8 bad"), Stage.OPEN, BACKEND, "login"),
        (DROP, Stage.OPEN, BACKEND, "connection"),
        # A server that takes the connection and is mute costs the message that waited for it an attempt.
        (silence(), Stage.OPEN, ATTEMPT, "timeout"),
        # The login, whatever it answers.
        (smtplib.SMTPSenderRefused(530, b"5.7.0 authentication required", "a"), Stage.MAIL, BACKEND, "login"),
        (smtplib.SMTPDataError(535, b"no"), Stage.BODY, BACKEND, "login"),
        (refused((454, b"4.7.0 temporary"), NO_USER), Stage.RCPT, BACKEND, "login"),
        (ImproperlyConfigured("no"), Stage.OPEN, BACKEND, "configuration"),
        (ImportError("no"), Stage.BUILD, BACKEND, "configuration"),
        # A broken connection.
        (DROP, Stage.MAIL, CONNECTION, "connection"),
        (DROP, Stage.RCPT, CONNECTION, "connection"),
        (DROP, Stage.DATA, CONNECTION, "connection"),
        (ConnectionResetError(104, "reset"), Stage.RCPT, CONNECTION, "connection"),
        (smtplib.SMTPSenderRefused(421, b"4.3.2 closing", "a"), Stage.MAIL, CONNECTION, "connection"),
        (refused(CLOSING), Stage.RCPT, CONNECTION, "connection"),
        (refused(NO_USER, CLOSING), Stage.RCPT, CONNECTION, "connection"),
        (smtplib.SMTPDataError(421, b"closing"), Stage.BODY, ATTEMPT, "connection"),
        (silence(), Stage.RCPT, ATTEMPT, "timeout"),
        # After the body nobody knows.
        (DROP, Stage.BODY, ATTEMPT, "connection"),
        (silence(), Stage.BODY, ATTEMPT, "timeout"),
        # Rates and quotas.
        (smtplib.SMTPSenderRefused(450, b"4.7.1 slow down", "a"), Stage.MAIL, ATTEMPT, "rate"),
        (refused((451, b"Rate limit exceeded")), Stage.RCPT, ATTEMPT, "rate"),
        (smtplib.SMTPSenderRefused(421, b"4.7.0 too many connections", "a"), Stage.MAIL, ATTEMPT, "rate"),
        (smtplib.SMTPDataError(550, b"5.4.5 daily sending quota exceeded"), Stage.BODY, ATTEMPT, "rate"),
        (smtplib.SMTPDataError(554, b"5.7.0 your message limit is reached"), Stage.BODY, ATTEMPT, "rate"),
        (refused((450, b"4.7.1 Greylisted, try again")), Stage.RCPT, ATTEMPT, "temporary"),
        # Refused now.
        (smtplib.SMTPSenderRefused(451, b"4.3.0 error", "a"), Stage.MAIL, ATTEMPT, "temporary"),
        (smtplib.SMTPDataError(452, b"4.3.1 full"), Stage.BODY, ATTEMPT, "temporary"),
        (refused(BUSY, BUSY), Stage.RCPT, ATTEMPT, "temporary"),
        (refused(NO_USER, BUSY), Stage.RCPT, ATTEMPT, "temporary"),
        (smtplib.SMTPDataError(-1, b""), Stage.DATA, ATTEMPT, "temporary"),
        (smtplib.SMTPSenderRefused(503, b"bad sequence", "a"), Stage.MAIL, ATTEMPT, "temporary"),
        # Refused for good.
        (smtplib.SMTPSenderRefused(550, b"5.7.1 not you", "a"), Stage.MAIL, MESSAGE, "rejected"),
        (
            smtplib.SMTPSenderRefused(552, b"5.3.4 message size exceeds fixed limit", "a"),
            Stage.MAIL,
            MESSAGE,
            "rejected",
        ),
        (smtplib.SMTPDataError(554, b"5.6.0 spam"), Stage.BODY, MESSAGE, "rejected"),
        (refused(NO_USER, NO_USER), Stage.RCPT, MESSAGE, "rejected"),
        (refused((552, b"5.2.2 mailbox over quota")), Stage.RCPT, MESSAGE, "rejected"),
        (smtplib.SMTPNotSupportedError("SMTPUTF8"), Stage.MAIL, ATTEMPT, "unsupported"),
        # Building, and what nobody knows.
        (ValueError("newline"), Stage.BUILD, MESSAGE, "unbuildable"),
        (TypeError("no"), Stage.BUILD, MESSAGE, "unbuildable"),
        (UnicodeEncodeError("ascii", "ä", 0, 1, "no"), Stage.BUILD, MESSAGE, "unbuildable"),
        (RuntimeError("boom"), Stage.BUILD, ATTEMPT, "error"),
        (RuntimeError("boom"), Stage.OPEN, ATTEMPT, "error"),
        (OSError(28, "no space left"), Stage.BUILD, ATTEMPT, "error"),
        (ConnectionResetError(104, "reset"), Stage.BUILD, ATTEMPT, "connection"),
    ],
    ids=lambda value: getattr(value, "name", None) or f"{value!r}"[:60],
)
def test_a_failed_send_charges(error: Exception, stage: Stage, blame: Blame, kind: str) -> None:
    verdict = judge(error, stage)
    assert (verdict.blame, verdict.kind) == (blame, kind)


@pytest.mark.parametrize(
    ("error", "stage", "pause"),
    [
        (ConnectionRefusedError(111, "refused"), Stage.OPEN, True),
        (silence(), Stage.OPEN, True),
        (ImproperlyConfigured("no"), Stage.OPEN, True),
        (smtplib.SMTPSenderRefused(450, b"4.7.1 slow down", "a"), Stage.MAIL, True),
        (smtplib.SMTPDataError(550, b"5.4.5 quota"), Stage.BODY, True),
        (silence(), Stage.RCPT, False),
        (refused(BUSY), Stage.RCPT, False),
        (refused(NO_USER), Stage.RCPT, False),
        (RuntimeError("boom"), Stage.BUILD, False),
    ],
    ids=lambda value: getattr(value, "name", None) or f"{value!r}"[:60],
)
def test_a_failure_that_others_would_meet_pauses_the_backend(error: Exception, stage: Stage, pause: bool) -> None:
    assert judge(error, stage).pause is pause


@pytest.mark.parametrize(("stage", "maybe"), [(Stage.BODY, True), (Stage.RCPT, False), (Stage.MAIL, False)])
def test_only_after_the_body_a_message_may_have_been_sent(stage: Stage, maybe: bool) -> None:
    assert judge(DROP, stage).maybe_sent is maybe


def test_refused_recipients_are_told_with_what_was_said() -> None:
    verdict = judge(refused(NO_USER, BUSY), Stage.RCPT)
    assert verdict.refused == {"u0@example.com": "550 5.1.1 no such user", "u1@example.com": "452 4.3.1 later"}
    assert verdict.code == "550"


# --- Anymail


def api(status: int | None, text: str = "{}", headers: dict[str, str] | None = None) -> AnymailRequestsAPIError:
    if status is None:
        return AnymailRequestsAPIError("no answer")
    response = requests.Response()
    response.status_code, response._content, response.reason = status, text.encode(), "reason"
    response.headers.update(headers or {})
    return AnymailRequestsAPIError("refused", response=response)


def caused(error: AnymailRequestsAPIError, cause: Exception) -> AnymailRequestsAPIError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "blame", "kind", "maybe_sent"),
    [
        (AnymailUnsupportedFeature("no"), MESSAGE, "rejected", False),
        (AnymailSerializationError("no"), MESSAGE, "rejected", False),
        (AnymailInvalidAddress("no"), MESSAGE, "rejected", False),
        (AnymailRecipientsRefused(), MESSAGE, "rejected", False),
        (AnymailCancelSend("no"), MESSAGE, "cancelled", False),
        *((api(status), MESSAGE, "rejected", False) for status in (400, 413, 422)),
        *((api(status), BACKEND, "login", False) for status in (401, 402, 403)),
        (api(429), BACKEND, "rate", False),
        *((api(status), ATTEMPT, "temporary", False) for status in (404, 408, 409, 425, 500, 503)),
        (api(409, '{"message": "same key with a different payload"}'), MESSAGE, "rejected", False),
        (api(200, "not JSON"), ATTEMPT, "temporary", True),
        (caused(api(None), requests.ConnectTimeout()), ATTEMPT, "connection", False),
        (caused(api(None), requests.ReadTimeout()), ATTEMPT, "connection", True),
        (caused(api(None), requests.ConnectionError()), ATTEMPT, "connection", True),
    ],
    ids=lambda value: f"{value!r}-{getattr(value, 'status_code', '')}-{getattr(value, '__cause__', '')!r}",
)
def test_anymails_errors(error: Any, blame: Blame, kind: str, maybe_sent: bool) -> None:
    verdict = judge(error, Stage.BUILD)
    assert (verdict.blame, verdict.kind, verdict.maybe_sent) == (blame, kind, maybe_sent)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120.0), ("Mon, 30 Nov 2026 10:01:00 GMT", 60.0), ("soon", None), ("999999999", 86_400.0), ("nan", None)],
)
def test_a_retry_after_is_heard(value: str, seconds: float | None) -> None:
    verdict = judge(api(429, headers={"Retry-After": value}), Stage.BUILD, now=NOW)
    assert verdict.delay == seconds
    assert verdict.pause
