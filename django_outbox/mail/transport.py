"""
The delivering backend of one thread: opened once, watched while it sends, opened anew when it broke.

Django's SMTP backend says neither which recipients were refused nor how far a message
had come when its connection broke. A subclass of its connection, put in when the backend
is made, notes both, and holds a message to one deadline over all replies.
"""

from __future__ import annotations

import base64
import smtplib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend
from django.core.mail.backends.smtp import EmailBackend as SMTPBackend
from django.utils.module_loading import import_string

from django_outbox.conf import EmailSettings
from django_outbox.mail import compat
from django_outbox.mail.backend import EmailBackend, queue_mailers
from django_outbox.mail.verdicts import Stage, refusal_text

__all__ = ["SendFailed", "Sent", "Transport", "delivering_backend", "sends_mime"]

MOST_MESSAGES: Final = 100
"""Messages after which a connection is opened anew."""
MOST_AHEAD: Final = 50
"""Recipients up to which a message's commands are sent at once: the sockets' buffers hold them and their replies."""
_QUIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that was sent."""

    count: int
    """What the backend said; 0 where it sent nothing."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Recipients that were refused while others were not, with the server's reply."""
    provider_message_id: str = ""


class SendFailed(Exception):
    """A send that failed, with the stage it had reached; the error is its cause."""

    def __init__(self, error: Exception, stage: Stage) -> None:
        super().__init__(str(error))
        self.error = error
        self.stage = stage


def delivering_backend(alias: str, settings: EmailSettings) -> BaseEmailBackend:
    """
    Return a new backend for what is queued under ``backend_alias``.

    While Django's test ``mail.outbox`` exists, everything goes there.

    :raises ImproperlyConfigured: when nothing delivers, or the queue itself would.
    """
    if hasattr(mail, "outbox"):
        from django.core.mail.backends.locmem import EmailBackend as LocmemBackend  # noqa: PLC0415  tests only

        backend: BaseEmailBackend = LocmemBackend()
        backend.alias = alias  # type: ignore[attr-defined]
        return backend
    path, mailer = delivery_target(alias, settings)
    backend = compat.construct(path, alias=mailer)
    if isinstance(backend, EmailBackend):
        raise ImproperlyConfigured(NO_BACKEND)
    return backend


NO_BACKEND: Final = (
    "Nothing delivers the queued mail: the delivering backend is the queue's own. Name another one in"
    ' OUTBOX["EMAIL"]["BACKEND"], or with MAILERS in the OPTIONS of the queue\'s alias: {"deliver_with": "<alias>"}.'
)


def delivery_target(alias: str, settings: EmailSettings) -> tuple[str | None, str]:
    """Return what delivers for a ``backend_alias``: a dotted path, or ``None`` and an alias in ``MAILERS``."""
    if compat.mailers() is not None:
        # Rows that were queued before MAILERS bear the alias that has become the queue's own.
        return None, queue_mailers().get(alias) or alias
    return settings.backend or compat.default_backend_path(), alias


def sends_mime(alias: str, settings: EmailSettings) -> bool:
    """Return whether the backend sends MIME; Anymail's talk to APIs that make a Message-ID of their own."""
    path, mailer = delivery_target(alias, settings)
    if path is None:
        path = str((compat.mailers() or {}).get(mailer, {}).get("BACKEND", ""))
    return not _is_anymail(path)


@lru_cache(maxsize=64)
def _is_anymail(path: str) -> bool:
    try:
        cls = import_string(path)
    except ImportError:
        return False  # whoever makes the backend says so
    return any(each.__module__.startswith("anymail.") for each in getattr(cls, "__mro__", ()))


class Transport:
    """A backend for the messages of one thread and ``backend_alias``."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._backend: BaseEmailBackend | None = None
        self._open = False
        self._sent = 0

    def send(self, message: EmailMessage, *, settings: EmailSettings, seconds: float) -> Sent:
        """
        Send one message within so many seconds, connecting first where that is needed.

        :raises SendFailed: for whatever goes wrong but what ends the process.
        """
        _limits.deadline = time.monotonic() + seconds
        try:
            return self._send(message, settings)
        except SendFailed as failure:
            # Others than SMTP do not say what is left of a connection after an error.
            if failure.stage is Stage.OPEN or not self._usable() or not isinstance(self._backend, SMTPBackend):
                self.drop()
            raise
        except BaseException:
            self.drop()
            raise
        finally:
            _limits.deadline = None

    def _send(self, message: EmailMessage, settings: EmailSettings) -> Sent:
        if self._open and (not self._usable() or self._sent >= MOST_MESSAGES):
            self.close()
        try:
            backend = self._opened(settings)
        except Exception as error:
            raise SendFailed(error, Stage.OPEN) from error
        connection = _watched_connection(backend)
        if connection is not None:
            connection.begin()
        try:
            # Third-party backends answer None as well.
            count: Any = backend.send_messages([message])
        except Exception as error:
            if (provider_id := _provider_id(message)) is not None:
                # Somebody's receiver failed after the provider had accepted it.
                return Sent(1, provider_message_id=provider_id)
            raise SendFailed(error, Stage.BUILD if connection is None else connection.stage) from error
        self._sent += 1
        refused = {} if connection is None else connection.refused
        return Sent(1 if count is None else int(count), refused, _provider_id(message) or "")

    def _opened(self, settings: EmailSettings) -> BaseEmailBackend:
        if self._backend is None:
            backend = delivering_backend(self.alias, settings)
            if getattr(backend, "timeout", 0) is None:
                setattr(backend, "timeout", settings.reply_timeout_seconds)  # noqa: B010  not every backend has one
            if isinstance(backend, SMTPBackend):
                cls: Any = type(backend)
                backend.__class__ = _watched_backend(cls)
            self._backend = backend
        if not self._open:
            self._backend.open()
            self._open, self._sent = True, 0
        return self._backend

    def _usable(self) -> bool:
        """Return whether the connection is still there; smtplib takes the socket away when it is not."""
        if not isinstance(self._backend, SMTPBackend):
            return self._backend is not None
        return getattr(self._backend.connection, "sock", None) is not None

    def close(self) -> None:
        """Say goodbye, if there is somebody to say it to."""
        if not self._usable():
            self.drop()
            return
        before, _limits.deadline = _limits.deadline, time.monotonic() + _QUIT_SECONDS
        try:
            if self._open and self._backend is not None:
                self._backend.close()
        except Exception:  # noqa: BLE001  what was sent is sent
            self.drop()
        finally:
            _limits.deadline = before
        self._open = False

    def drop(self) -> None:
        """Forget the connection without a word: it broke, or nobody knows in what state it is."""
        backend, self._backend, self._open = self._backend, None, False
        if isinstance(backend, SMTPBackend):
            for name in ("connection", "_partial_connection"):
                connection = getattr(backend, name, None)
                setattr(backend, name, None)
                if connection is not None:
                    _close_socket(connection)
        elif backend is not None:
            with suppress(Exception):  # it is given up
                backend.close()

    def scrub(self, text: str) -> str:
        """Return a text without the backend's password, plain or as it stands in an authentication."""
        user = str(getattr(self._backend, "username", None) or "")
        password = str(getattr(self._backend, "password", None) or "")
        return scrubbed(text, user, password)


def scrubbed(text: str, user: str, password: str) -> str:
    """Return a text without a password, plain or in the forms that SMTP's authentication gives it."""
    if not password:
        return text
    forms = [password, *(base64.b64encode(each.encode()).decode() for each in (password, f"\0{user}\0{password}"))]
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "[hidden]")
    return text


def _close_socket(connection: smtplib.SMTP) -> None:
    with suppress(OSError):
        smtplib.SMTP.close(connection)


def _provider_id(message: EmailMessage) -> str | None:
    """Return the id that Anymail got from the provider, if it did."""
    found = getattr(getattr(message, "anymail_status", None), "message_id", None)
    if not found:
        return None
    return str(min(map(str, found)) if isinstance(found, (set, frozenset)) else found)[:255]


# --- the watch over SMTP ---------------------------------------------------------------------------------------------


class _Limits(threading.local):
    deadline: float | None = None
    """When the message at hand, with its connecting, must be over."""


_limits: Final = _Limits()


class _Watch(smtplib.SMTP):
    """
    Notes how far a message comes and who is refused, and waits for no reply past the message's deadline.

    And sends what can be sent without waiting for a reply at once; see `_send_ahead`.
    """

    stage = Stage.OPEN
    _ahead = 0
    """Commands that were sent, but that smtplib has still to give."""

    def begin(self) -> None:
        """Note that a new message follows."""
        self.stage = Stage.BUILD
        self.refused: dict[str, str] = {}

    def getreply(self) -> tuple[int, bytes]:
        if _limits.deadline is not None and self.sock is not None:
            left = _limits.deadline - time.monotonic()
            own: Any = self.timeout  # an object of socket's own where none was set
            given = own if isinstance(own, (int, float)) else left
            seconds = max(0.05, min(given, left))
            if self.sock.gettimeout() != seconds:
                self.sock.settimeout(seconds)
        reply = super().getreply()
        if self.stage is Stage.DATA and reply[0] == 354:
            self.stage = Stage.BODY
        return reply

    def sendmail(
        self, from_addr: str, to_addrs: str | Sequence[str], msg: Any, *options: Any, **named: Any
    ) -> dict[str, tuple[int, bytes]]:
        self.stage = Stage.OPEN  # the greeting may still be due
        self.ehlo_or_helo_if_needed()
        if isinstance(to_addrs, list) and isinstance(msg, bytes) and not (options or named):
            self._send_ahead(from_addr, to_addrs, len(msg))
        try:
            refused = super().sendmail(from_addr, to_addrs, msg, *options, **named)
        finally:
            if self._ahead:
                self.close()  # which of the replies to come belongs to what, nobody could tell
        self.refused = {str(address): refusal_text(reply) for address, reply in refused.items()}
        return refused

    def _send_ahead(self, sender: str, recipients: Sequence[str], size: int) -> None:
        """
        Send a message's commands up to DATA with one write, where the server says that it takes them so (RFC 2920).

        smtplib then gives the same commands, which are not sent again, and reads their
        replies: two round trips for a message, instead of three and one for each recipient.
        """
        if not self.has_extn("pipelining") or len(recipients) > MOST_AHEAD:
            return
        given_size = f" size={size}" if self.has_extn("size") else ""
        lines = [
            f"mail FROM:{smtplib.quoteaddr(sender)}{given_size}",
            *(f"rcpt TO:{smtplib.quoteaddr(each)}" for each in recipients),
            "data",
        ]
        text = "\r\n".join([*lines, ""])
        # Whatever smtplib would refuse, it refuses.
        if text.isascii() and not any("\r" in line or "\n" in line for line in lines):
            self.stage = Stage.MAIL
            self._ahead = len(lines)
            self.send(text)

    def putcmd(self, cmd: str, args: str = "") -> None:
        if self._ahead:
            self._ahead -= 1
        else:
            super().putcmd(cmd, args)

    def rset(self) -> tuple[int, bytes]:
        # What was sent after a refused command is answered all the same. A server that would take
        # the text for nobody gets none: no empty message is to come of it.
        while self._ahead:
            self._ahead -= 1
            if self.getreply()[0] == 354:
                self.close()
        return super().rset()

    def close(self) -> None:
        self._ahead = 0
        super().close()

    def mail(self, *arguments: Any, **options: Any) -> tuple[int, bytes]:
        self.stage = Stage.MAIL
        return super().mail(*arguments, **options)

    def rcpt(self, *arguments: Any, **options: Any) -> tuple[int, bytes]:
        self.stage = Stage.RCPT
        return super().rcpt(*arguments, **options)

    def data(self, *arguments: Any, **options: Any) -> tuple[int, bytes]:
        self.stage = Stage.DATA
        try:
            return super().data(*arguments, **options)
        except smtplib.SMTPDataError as error:
            # smtplib ends the transaction after every refusal but this one; the next message
            # would then be one command too many.
            if error.smtp_code == 421:
                self.close()
            else:
                with suppress(smtplib.SMTPServerDisconnected):
                    self.rset()
            raise


@lru_cache(maxsize=64)
def _watched_smtp(base: type[smtplib.SMTP]) -> type[smtplib.SMTP]:
    # A subclass of both: SMTP over TLS has a connect of its own.
    return _Watch if base is smtplib.SMTP else type(f"Watched{base.__name__}", (_Watch, base), {})


@lru_cache(maxsize=64)
def _watched_backend(base: type[SMTPBackend]) -> type[SMTPBackend]:
    def connection_class(self: Any) -> type[smtplib.SMTP]:
        return _watched_smtp(getattr(super(watched, self), "connection_class"))  # noqa: B009  a property of the base

    watched = type(base.__name__, (base,), {"connection_class": property(connection_class)})
    return watched


def _watched_connection(backend: BaseEmailBackend) -> _Watch | None:
    connection = getattr(backend, "connection", None)
    return connection if isinstance(connection, _Watch) else None
