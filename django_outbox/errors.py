"""
Every error that django_outbox raises, and the one place that cleans error texts.

Each class also inherits the built-in that fits it, so that code which does not
know this package can still catch what it expects.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from django.core.exceptions import ImproperlyConfigured

__all__ = [
    "DuplicateHandler",
    "InvalidEmail",
    "InvalidEventType",
    "InvalidHandlerName",
    "InvalidPayload",
    "InvalidSettings",
    "InvalidSignature",
    "NotInTransaction",
    "OutboxError",
    "Reject",
    "RetryLater",
    "UnsafeURL",
    "clean_error",
    "clean_text",
]


class OutboxError(Exception):
    """Base of every error in this package."""


class NotInTransaction(OutboxError, RuntimeError):
    """``emit_event`` was called outside ``transaction.atomic()``."""


class InvalidPayload(OutboxError, TypeError):
    """A payload, header or text column cannot be stored the same way on every database."""


class InvalidEmail(InvalidPayload, ValueError):
    """A message cannot be stored exactly, or could never be sent."""


class InvalidEventType(OutboxError, ValueError):
    """An event type or type pattern is malformed or reserved."""


class InvalidHandlerName(OutboxError, ValueError):
    """A handler name is not kebab-case, or too long."""


class DuplicateHandler(OutboxError, ValueError):
    """Two handlers of one name could both match some event type."""


class InvalidSettings(OutboxError, ImproperlyConfigured):
    """The ``OUTBOX`` setting is wrong; the text names the key."""


class UnsafeURL(OutboxError, ValueError):
    """
    A URL is refused by the SSRF guard; the text says why.

    ``code`` is ``invalid_target`` for a URL that is refused as it stands, and
    ``non_public`` for one that leads to an address which may not be reached.
    """

    def __init__(self, reason: str, *, code: str = "invalid_target") -> None:
        super().__init__(reason)
        self.code = code


class InvalidSignature(OutboxError):
    """A webhook's signature does not verify."""


class RetryLater(OutboxError):
    """
    Raise in a handler: this attempt failed, try again not before ``delay``.

    ``delay`` is a number of seconds or a ``timedelta``; without one the queue's
    own schedule decides. A delay never brings an attempt forward.
    """

    def __init__(self, reason: str = "", delay: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        # float() so that a wrong type fails in the handler, not in the relay.
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else None if delay is None else float(delay)


class Reject(OutboxError):
    """Raise in a handler: this delivery can never succeed, so do not try it again."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


ERROR_TEXT_LIMIT: Final = 2_000
"""Characters of error text that a row keeps."""

_MASK: Final = "[hidden]"
_KEEP_AND_MASK: Final = r"\g<keep>" + _MASK
# A value in quotes, also one whose closing quote was cut off.
_QUOTED: Final = r"""b?"[^"]*(?:"|$)|b?'[^']*(?:'|$)"""
_SECRETS: Final = (
    # user:password@ in a URL or DSN; up to the last @, since passwords may contain one.
    (re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{1,20}://)[^\s/?#]{1,512}@", re.IGNORECASE), _KEEP_AND_MASK + "@"),
    # Headers, as text or in the form of a dict. Schemes differ, so an unquoted value is hidden to the end of its line.
    (
        re.compile(
            r"(?P<keep>\b(?:(?:proxy-)?authorization|(?:set-)?cookie)['\"]?\s*[:=]\s*)(?:" + _QUOTED + r"|[^\r\n]+)",
            re.IGNORECASE,
        ),
        _KEEP_AND_MASK,
    ),
    (re.compile(r"(?P<keep>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), _KEEP_AND_MASK),
    # password=x, "api_key": "x", token: x
    (
        re.compile(
            r"(?P<keep>\b[\w-]{0,40}(?:passwor[dt]|passwd|passphrase|pwd|secret|token|(?:api|access|private)[_-]?key)"
            r"[\w-]{0,40}['\"]?\s*[:=]\s*)(?:" + _QUOTED + r"|[^\s'\",;&)}]+)",
            re.IGNORECASE,
        ),
        _KEEP_AND_MASK,
    ),
    # Standard Webhooks signing secrets
    (re.compile(r"\bwhsec_[\w+/=-]+"), _MASK),
)


def clean_text(text: str) -> str:
    """
    Return the text with what a database cannot store made visible.

    NUL and lone surrogates become U+FFFD; everything else stays.
    """
    if "\x00" in text:
        text = text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    if text.isascii():
        return text
    # UTF-16 joins a pair of surrogates to the character that they stand for.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clean_error(error: BaseException | str, *, limit: int = ERROR_TEXT_LIMIT) -> str:
    """
    Return the text of an error fit for a row, a page and a log.

    It is storable on every database, at most ``limit`` characters long, and
    credentials in forms that libraries print (URLs, DSNs, headers,
    ``key=value``) are masked. An exception without a text gives its class name.
    """
    if isinstance(error, BaseException):
        try:
            text = str(error)
        except Exception:  # noqa: BLE001  a broken __str__ must not break the settle
            text = "(its text cannot be read)"
        # The name is not part of what is searched: TokenExpiredError: 503 is no token.
        name = type(error).__name__
        prefix = f"{name}: " if text else name
    else:
        prefix, text = "", error
    # Cut before the patterns run, so that a huge text costs no time, and between
    # words, since half a credential is not recognised. Cut again after, because a
    # mask may be longer than what it hides.
    if len(text) > limit * 4:
        head = text[: limit * 4]
        words = head.rsplit(maxsplit=1)[0]
        text = (words if len(words) > limit else head) + "…"
    text = clean_text(text)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    text = prefix + text
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text
