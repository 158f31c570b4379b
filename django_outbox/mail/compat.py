"""
What Django 5.2, 6.0 and 6.1 do differently about mail; nothing else in the package asks for the version.

5.2 builds on Python's older MIME classes (``MIMEBase``), 6.0 and later on
``email.message``. 6.1 has ``MAILERS``: backends are then named by an alias, and the
older settings raise when they are read.
"""

from __future__ import annotations

import email.message
import email.policy
import logging
from collections.abc import Mapping
from email import message_from_bytes
from email.mime.base import MIMEBase
from typing import Any, Final, cast

import django
from django.conf import settings as django_settings
from django.core import mail
from django.core.mail import EmailMessage, EmailMultiAlternatives
from django.core.mail.backends.base import BaseEmailBackend
from django.utils.module_loading import import_string

__all__ = [
    "MODERN",
    "SHAPE",
    "Instance",
    "build",
    "construct",
    "default_backend_path",
    "handler_backend",
    "init_base",
    "is_queue",
    "mailers",
    "mime_bytes",
    "mime_part",
    "new_message",
]

MODERN: Final = django.VERSION >= (6, 0)
"""Whether messages are built with Python's modern API."""
_HAS_MAILERS: Final = django.VERSION >= (6, 1)

SHAPE: Final = ("content_subtype", "encoding", *(() if MODERN else ("mixed_subtype", "alternative_subtype")))
"""Attributes of a message that change how it is built, on this version."""

Instance = email.message.Message
"""What every MIME part is, old or modern."""

_ONE_LINE: Final = ("list-unsubscribe",)
"""Headers that must not be broken into encoded words, however long: a mail reader takes the URL from them."""


def new_message(*, multi: bool, **fields: Any) -> EmailMessage:
    """Return a message; where a header needs it, one that keeps that header whole when it is built."""
    long = any(
        name.lower() in _ONE_LINE and len(name) + len(value) > 76 for name, value in fields.get("headers", {}).items()
    )
    plain, multiple = (_WholeHeaders, _WholeHeadersMulti) if MODERN and long else (EmailMessage, EmailMultiAlternatives)
    return (multiple if multi else plain)(**fields)


class _WholeMixin:
    """
    Writes a long List-Unsubscribe header in one line.

    The modern API would break it into encoded words (RFC 2047), in which no mail reader
    finds the URL. The rest of the message is folded as ever.
    """

    def message(self, **options: Any) -> Any:
        built = super().message(**options)  # type: ignore[misc]
        for name in _ONE_LINE:
            if (value := built[name]) is not None and hasattr(value, "fold"):
                value.__class__ = type(type(value).__name__, (_Whole, type(value)), {})
        return built


class _Whole:
    def fold(self, *, policy: Any) -> str:
        return cast("str", super().fold(policy=policy.clone(max_line_length=998)))  # type: ignore[misc]


class _WholeHeaders(_WholeMixin, EmailMessage):
    pass


class _WholeHeadersMulti(_WholeMixin, EmailMultiAlternatives):
    pass


def build(message: EmailMessage) -> Any:
    """Build the MIME message, which is where Django refuses bad headers and addresses."""
    return message.message()


def mime_bytes(part: Instance) -> tuple[bytes, str]:
    """Return a MIME part as bytes, and the kind by which `mime_part` makes it again."""
    kind = "part" if isinstance(part, email.message.MIMEPart) else "base" if isinstance(part, MIMEBase) else "message"
    return part.as_bytes(), kind


def mime_part(content: bytes, kind: str) -> Instance:
    """
    Return a MIME part from its bytes, of the class that Django takes for an attachment on this version.

    It writes the very bytes that it was read from.
    """
    if kind == "part" and MODERN:
        return message_from_bytes(content, policy=email.policy.default)
    parsed = message_from_bytes(content)
    if kind == "message":
        return parsed
    base = MIMEBase.__new__(MIMEBase)
    base.__dict__.update(parsed.__dict__)
    return base


# --- backends --------------------------------------------------------------------------------------------------------


def mailers() -> Mapping[str, Mapping[str, Any]] | None:
    """Return ``MAILERS``, or ``None`` where the project does not use it."""
    if not _HAS_MAILERS:
        return None
    return cast("Mapping[str, Mapping[str, Any]] | None", getattr(django_settings, "MAILERS", None))


def default_backend_path() -> str:
    """Return ``EMAIL_BACKEND``; only where `mailers` is ``None``."""
    if not _HAS_MAILERS:
        return django_settings.EMAIL_BACKEND
    # Reading it in the ordinary way warns whoever reads. The project is warned by Django, for setting it.
    assert django_settings.DEFAULT_CHARSET  # makes sure that the settings are loaded  # noqa: S101
    loaded: Any = vars(django_settings)["_wrapped"]
    return str(loaded.EMAIL_BACKEND)


def is_queue(backend: str) -> bool:
    """Return whether a dotted path names the queue's own backend, or a subclass of it."""
    from django_outbox.mail.backend import EmailBackend  # noqa: PLC0415  it needs this module

    try:
        cls = import_string(backend) if backend else None
    except ImportError:
        return False
    return isinstance(cls, type) and issubclass(cls, EmailBackend)


def handler_backend(handler: logging.Handler) -> str:
    """Return the dotted path of the backend that an ``AdminEmailHandler`` sends with."""
    found = mailers()
    if found is None:
        return getattr(handler, "email_backend", None) or default_backend_path()
    return str(found.get(getattr(handler, "using", None) or "default", {}).get("BACKEND", ""))


def construct(backend: str | None, *, alias: str) -> BaseEmailBackend:
    """Return a new backend: the one at a dotted path, or else that of the mailer ``alias``."""
    if backend is None:
        return cast("BaseEmailBackend", cast("Any", mail).mailers[alias])
    cls = import_string(backend)
    # Without MAILERS, 6.1 warns of whoever makes a backend and does not name an alias, be it none.
    if _HAS_MAILERS and issubclass(cls, BaseEmailBackend):
        try:
            return cast("BaseEmailBackend", cls(alias=None))
        except TypeError:
            pass  # an older backend, whose constructor passes nothing on
    return cast("BaseEmailBackend", cls())


def init_base(backend: BaseEmailBackend, *, alias: str | None, options: Mapping[str, Any]) -> None:
    """Call the base class's constructor: it reports unknown options on 6.1, and takes anything before."""
    if _HAS_MAILERS:
        BaseEmailBackend.__init__(backend, alias=alias, **options)
    else:
        BaseEmailBackend.__init__(backend)
