"""
What a failed send means: whose fault it was, and whether to try again. Pure.

Transient is the rule, permanent an allow-list: a message that is never tried again
must have been refused in words that mean just that. What is wrong with the connection,
the login or the configuration is nobody's fault: it charges no message, and pauses the
backend instead.

Anymail's errors are told by name, so that nothing here needs it installed.
"""

from __future__ import annotations

import re
import smtplib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

__all__ = ["Blame", "Stage", "Verdict", "judge", "refusal_text", "timed_out"]


class Stage(Enum):
    """How far a message had come when its send failed."""

    OPEN = "open"
    """Connecting, greeting, logging in: no message was spoken of yet."""
    BUILD = "build"
    """It was being built, or nobody knows better."""
    MAIL = "mail"
    RCPT = "rcpt"
    DATA = "data"
    BODY = "body"
    """The server may have it: everything was sent, or part of it."""


class Blame(Enum):
    """Whom a failure charges."""

    MESSAGE = "message"
    """It is refused for good."""
    ATTEMPT = "attempt"
    """It failed this time."""
    CONNECTION = "connection"
    """The connection broke before anything was sent: once more on a new one, then nobody is charged."""
    BACKEND = "backend"
    """Nobody can send through this backend now: nobody is charged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a message whose send failed."""

    blame: Blame
    kind: str
    """For the row's ``failure_kind``."""
    code: str = ""
    pause: bool = False
    """Whether the backend rests for a while, whatever becomes of the message."""
    delay: float | None = None
    """Least wait that the server asked for, in seconds."""
    maybe_sent: bool = False
    refused: Mapping[str, str] | None = None


# Replies that speak of the session, whatever command they answer.
_LOGIN_CODES: Final = frozenset({530, 534, 535, 538, 454})
_ENHANCED: Final = re.compile(r"\b([245]\.\d{1,3}\.\d{1,3})\b")
_RATE: Final = re.compile(r"\brate\b|ratelimit|too many|throttl", re.IGNORECASE)
_QUOTA: Final = re.compile(r"\bquota\b|\blimit", re.IGNORECASE)
# A mailbox that is full and a message that is too large have limits, too, but not those of the sender.
_OTHER_LIMITS: Final = re.compile(r"\bsize\b|mailbox|too (?:large|big)|greylist|graylist", re.IGNORECASE)
_PERMANENT_ANYMAIL: Final = frozenset(
    {"AnymailUnsupportedFeature", "AnymailSerializationError", "AnymailInvalidAddress", "AnymailRecipientsRefused"}
)
LONGEST_DELAY_SECONDS: Final = 86_400.0


def judge(error: BaseException, stage: Stage, *, now: datetime | None = None) -> Verdict:
    """Return what a failed send means. ``now`` is for a Retry-After that names a date."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, (ImproperlyConfigured, ImportError)):
        return Verdict(blame=Blame.BACKEND, kind="configuration", pause=True)
    if "AnymailError" in names:
        return _judge_anymail(error, names, now or datetime.now(UTC))
    replies = _replies(error)
    if replies:
        return _judge_replies(error, replies, stage)
    if isinstance(error, OSError):
        return _judge_connection(error, stage)
    if stage is Stage.BUILD and isinstance(error, (ValueError, TypeError, LookupError)):
        return Verdict(blame=Blame.MESSAGE, kind="unbuildable")
    return Verdict(blame=Blame.ATTEMPT, kind="error")


def timed_out(error: BaseException | None) -> bool:
    """Return whether a time-out is behind an error; smtplib wraps its own."""
    for _ in range(5):
        if error is None:
            return False
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal_text(reply: tuple[int, bytes | str]) -> str:
    """Return a server's reply as text: ``550 5.1.1 no such user``."""
    code, text = reply
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return f"{code} {' '.join(words.split())}"[:500]


def _replies(error: BaseException) -> dict[str, tuple[int, str]]:
    """Return what the server said, by recipient; under an empty name if it was not about one."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return {str(address): (int(reply[0]), refusal_text(reply)) for address, reply in error.recipients.items()} or {
            "": (-1, "")
        }
    if isinstance(error, smtplib.SMTPResponseException):
        return {"": (error.smtp_code, refusal_text((error.smtp_code, error.smtp_error)))}
    return {}


def _judge_replies(error: BaseException, replies: Mapping[str, tuple[int, str]], stage: Stage) -> Verdict:
    codes = [code for code, _ in replies.values()]
    text = " ".join(words for _, words in replies.values())
    code = str(next((code for code in codes if code == 421), codes[0]))
    refused = {address: words for address, (_, words) in replies.items() if address} or None
    if (
        stage is Stage.OPEN
        or isinstance(error, (smtplib.SMTPConnectError, smtplib.SMTPHeloError, smtplib.SMTPAuthenticationError))
        or not _LOGIN_CODES.isdisjoint(codes)
    ):
        login = isinstance(error, smtplib.SMTPAuthenticationError) or not _LOGIN_CODES.isdisjoint(codes)
        return Verdict(blame=Blame.BACKEND, kind="login" if login else "connection", code=code, pause=True)
    if _is_rate(codes, text):
        return Verdict(blame=Blame.ATTEMPT, kind="rate", code=code, pause=True, refused=refused)
    if 421 in codes:
        # After the body it is an answer to this message, before it one to all of them.
        blame = Blame.ATTEMPT if stage is Stage.BODY else Blame.CONNECTION
        return Verdict(blame=blame, kind="connection", code=code)
    if all(500 <= each < 600 and each != 503 for each in codes):
        return Verdict(blame=Blame.MESSAGE, kind="rejected", code=code, refused=refused)
    return Verdict(blame=Blame.ATTEMPT, kind="temporary", code=code, refused=refused)


def _is_rate(codes: list[int], text: str) -> bool:
    if _OTHER_LIMITS.search(text):
        return False
    enhanced = _ENHANCED.findall(text)
    if all(500 <= code < 600 for code in codes):
        return "5.4.5" in enhanced or bool(
            _QUOTA.search(text) and not any(each.startswith("5.2.") for each in enhanced)
        )
    return any(each.startswith("4.7.") for each in enhanced) or bool(_RATE.search(text))


def _judge_connection(error: OSError, stage: Stage) -> Verdict:
    silent = timed_out(error)
    if stage is Stage.BUILD:
        return _judge_unwatched(error, silent=silent)
    if stage is Stage.OPEN:
        # A server that takes the connection and then says nothing costs the message that waited for it an attempt.
        mute = silent and isinstance(error, smtplib.SMTPServerDisconnected)
        blame, kind = (Blame.ATTEMPT, "timeout") if mute else (Blame.BACKEND, "connection")
        return Verdict(blame=blame, kind=kind, pause=True)
    if stage is Stage.BODY:
        return Verdict(blame=Blame.ATTEMPT, kind="timeout" if silent else "connection", maybe_sent=True)
    if silent or isinstance(error, smtplib.SMTPNotSupportedError):
        return Verdict(blame=Blame.ATTEMPT, kind="timeout" if silent else "unsupported")
    return Verdict(blame=Blame.CONNECTION, kind="connection")


def _judge_unwatched(error: OSError, *, silent: bool) -> Verdict:
    """Judge what broke in a backend that is not SMTP, which does not say how far it came."""
    network = silent or isinstance(error, (smtplib.SMTPException, ConnectionError))
    kind = "timeout" if silent else "connection" if network else "error"
    return Verdict(blame=Blame.ATTEMPT, kind=kind, maybe_sent=network)


_ANYMAIL: Final[Mapping[int, tuple[Blame, str, bool]]] = {
    # HTTP status → whom it charges, as what, and whether the backend rests
    **dict.fromkeys((400, 413, 422), (Blame.MESSAGE, "rejected", False)),
    **dict.fromkeys((401, 402, 403), (Blame.BACKEND, "login", True)),
    429: (Blame.BACKEND, "rate", True),
}


def _judge_anymail(error: Any, names: set[str], now: datetime) -> Verdict:
    if names & _PERMANENT_ANYMAIL:
        return Verdict(blame=Blame.MESSAGE, kind="rejected")
    if "AnymailCancelSend" in names:
        return Verdict(blame=Blame.MESSAGE, kind="cancelled")
    status = error.status_code
    if status is None:
        # Only a connection that never came about is sure to have carried nothing.
        causes = {type(each).__name__ for each in (error.__cause__, error.__context__) if each is not None}
        maybe_sent = "AnymailRequestsAPIError" in names and "ConnectTimeout" not in causes
        return Verdict(blame=Blame.ATTEMPT, kind="connection", maybe_sent=maybe_sent)
    blame, kind, pause = _ANYMAIL.get(status, (Blame.ATTEMPT, "temporary", False))
    if status == 409 and "different payload" in str(error).lower():
        blame, kind = Blame.MESSAGE, "rejected"
    return Verdict(
        blame=blame,
        kind=kind,
        code=str(status),
        pause=pause,
        delay=_retry_after(error, now) if status == 429 else None,
        maybe_sent=200 <= status < 300,
    )


def _retry_after(error: Any, now: datetime) -> float | None:
    value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(LONGEST_DELAY_SECONDS, max(0.0, seconds)) if seconds == seconds else None  # noqa: PLR0124  NaN
