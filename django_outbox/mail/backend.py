"""Queue mail: Django's backend, and the function behind it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend
from django.db import transaction
from django.utils import timezone

from django_outbox.conf import get_settings
from django_outbox.delivery import current_cause
from django_outbox.errors import InvalidEmail, clean_error
from django_outbox.mail import compat
from django_outbox.mail.codec import Stored, encode
from django_outbox.mail.store import insert_emails

__all__ = ["PRIORITIES", "EmailBackend", "delivering", "enqueue_email", "queue_mailers"]

logger = logging.getLogger("django_outbox.mail")

PRIORITIES: Final = {"urgent": 0, "normal": 1, "bulk": 2}
OPTIONS: Final = ("idempotency_key", "priority", "delay", "expires_at", "sensitive")

delivering: ContextVar[str] = ContextVar("django_outbox_email_delivering", default="")
"""The Message-ID of the email that is being handed to its backend in this context."""


def enqueue_email(
    message: EmailMessage,
    *,
    idempotency_key: str = "",
    priority: str = "normal",
    delay: float | timedelta | None = None,
    expires_at: datetime | None = None,
    sensitive: bool = False,
    using: str | None = None,
) -> tuple[UUID, bool]:
    """
    Queue a message in the caller's transaction; return the id of its row, and whether it is new.

    It is sent if and only if the transaction on ``using`` (by default
    ``OUTBOX["DATABASE"]``) commits; outside ``atomic()`` it commits by itself. With an
    ``idempotency_key`` that a row holds already nothing is queued, and that row's id is
    returned. ``priority`` is urgent, normal or bulk. ``delay`` (seconds or a
    ``timedelta``) holds it back; once ``expires_at`` has passed it is not sent any more.
    What a ``sensitive`` message says is removed once it is sent or given up.

    Options in ``message.outbox`` count where none is given here.

    :raises InvalidEmail: for a message that cannot be stored exactly or never be sent,
        before any SQL runs.
    :raises ValueError: Django's own, for a header that holds a line break.
    """
    given = {
        "idempotency_key": idempotency_key,
        "priority": priority,
        "delay": delay,
        "expires_at": expires_at,
        "sensitive": sensitive,
    }
    explicit = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    return _enqueue([(message, explicit)], backend_alias=_alias_for_direct_calls(), using=using)[0]


_DEFAULTS: Final[Mapping[str, Any]] = {
    "idempotency_key": "",
    "priority": "normal",
    "delay": None,
    "expires_at": None,
    "sensitive": False,
}


class EmailBackend(BaseEmailBackend):
    """
    Django's backend that queues: ``EMAIL_BACKEND = "django_outbox.mail.EmailBackend"``.

    On Django 6.1 with ``MAILERS`` it is the backend of an alias, whose ``OPTIONS`` say
    ``{"deliver_with": "<alias>"}``. Options of `enqueue_email` may stand in
    ``message.outbox``, a dict. What the queue refuses, it refuses here; with
    ``fail_silently`` it is logged and left out, and the caller's transaction stays usable.
    """

    def __init__(
        self,
        fail_silently: bool = False,  # noqa: FBT001, FBT002  Django's signature
        *,
        alias: str | None = None,
        deliver_with: str | None = None,
        username: str | None = None,
        password: str | None = None,
        **options: Any,
    ) -> None:
        compat.init_base(self, alias=alias, options=options)
        if username or password:
            raise ImproperlyConfigured(
                "The email queue keeps no credentials. Give them to the backend that delivers, not to send_mail()."
            )
        self.fail_silently = fail_silently
        self.deliver_with = deliver_with

    def send_messages(self, email_messages: Iterable[EmailMessage]) -> int:
        """Queue messages in the caller's transaction, all or none; return how many are new."""
        messages = list(email_messages)
        if not messages:
            return 0
        alias = self.deliver_with or DIRECT
        if not self.fail_silently:
            results = _enqueue([(message, {}) for message in messages], backend_alias=alias, using=None)
            return sum(created for _, created in results)
        count = 0
        for message in messages:
            try:
                # A savepoint, so that what fails silently leaves the caller's transaction as it was.
                with transaction.atomic(using=get_settings().database):
                    ((_, created),) = _enqueue([(message, {})], backend_alias=alias, using=None)
            except Exception as error:  # noqa: BLE001  that is what fail_silently asks for
                logger.warning("email not queued, silently error=%s", clean_error(error))
            else:
                count += created
        return count


DIRECT: Final = "default"
"""``backend_alias`` of what is delivered with ``OUTBOX["EMAIL"]["BACKEND"]`` or ``EMAIL_BACKEND``."""


def queue_mailers() -> dict[str, str]:
    """Return the aliases in ``MAILERS`` that queue, with the aliases that deliver for them."""
    found = {}
    for alias, config in (compat.mailers() or {}).items():
        if compat.is_queue(config.get("BACKEND", "")):
            found[alias] = str(config.get("OPTIONS", {}).get("deliver_with", ""))
    return found


def _alias_for_direct_calls() -> str:
    """Return what `enqueue_email` delivers with: what the queue's default mailer does, or the first one's."""
    if compat.mailers() is None:
        return DIRECT
    queues = queue_mailers()
    return queues.get(DIRECT) or next(iter(queues.values()), "") or DIRECT


def _enqueue(
    messages: Sequence[tuple[EmailMessage, Mapping[str, Any]]], *, backend_alias: str, using: str | None
) -> list[tuple[UUID, bool]]:
    settings = get_settings()
    alias = using or settings.database
    emails = []
    for message, explicit in messages:
        options = {**_options(message), **explicit}
        columns = _columns(options)
        stored = encode(message, settings.email)
        _refuse_self_delivery(stored)
        emails.append((_row(stored, columns, backend_alias), stored))
    # Everything was checked, so there is nothing a savepoint would be for.
    with transaction.atomic(using=alias, savepoint=False):
        results = insert_emails(emails, using=alias)
    for (columns, _), (id_, created) in zip(emails, results, strict=True):
        if not created:
            logger.info("email queued before id=%s idempotency_key=%s", id_, columns["idempotency_key"])
    return results


def _refuse_self_delivery(stored: Stored) -> None:
    if delivering.get() and delivering.get() == stored.message_id:
        raise ImproperlyConfigured(
            "The backend that delivers the email queue's messages hands them back to the queue. Name another one in"
            ' OUTBOX["EMAIL"]["BACKEND"], or in the deliver_with of the queue\'s mailer.'
        )


def _options(message: EmailMessage) -> dict[str, Any]:
    options = getattr(message, "outbox", None)
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidEmail(f"message.outbox must be a dict, not {type(options).__name__}.")
    if unknown := set(options) - set(OPTIONS):
        raise InvalidEmail(f"message.outbox has no option {min(map(str, unknown))!r}. Options: {', '.join(OPTIONS)}.")
    return dict(options)


def _columns(options: Mapping[str, Any]) -> dict[str, Any]:
    options = {**_DEFAULTS, **options}
    key = options["idempotency_key"]
    if not isinstance(key, str) or len(key) > 255:
        raise InvalidEmail("idempotency_key must be a str of at most 255 characters.")
    if "\x00" in key or not _encodable(key):
        raise InvalidEmail("idempotency_key holds a character that PostgreSQL cannot store.")
    if options["priority"] not in PRIORITIES:
        raise InvalidEmail(f"priority is {options['priority']!r:.80}; use one of: {', '.join(PRIORITIES)}.")
    if not isinstance(options["sensitive"], bool):
        raise InvalidEmail("sensitive must be True or False.")
    return {
        "idempotency_key": key or None,
        "priority": PRIORITIES[options["priority"]],
        "delay": _delay(options["delay"]),
        "expires_at": _moment(options["expires_at"]),
        "sensitive": options["sensitive"],
    }


def _row(stored: Stored, columns: Mapping[str, Any], backend_alias: str) -> dict[str, Any]:
    cause = current_cause.get()
    return {
        **columns,
        "backend_alias": backend_alias,
        # A subject may hold what the message is secret for, such as a code.
        "subject": "" if columns["sensitive"] else stored.subject,
        "recipient": stored.recipient,
        "message_id": stored.message_id,
        "quiet": cause.quiet if cause else False,
        "organization_id": cause.organization_id if cause else "",
        "request_id": cause.request_id if cause else "",
        "causation_id": cause.event_id if cause else None,
    }


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _delay(value: Any) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidEmail(f"delay must be seconds or a timedelta, not {type(value).__name__}.")
    if not 0 <= seconds <= 3_653 * 86_400:  # also refuses NaN
        raise InvalidEmail(f"delay is {seconds!r:.80} seconds; it must lie between 0 and ten years.")
    return float(seconds) or None


def _moment(value: Any) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidEmail(f"expires_at must be a datetime, not {type(value).__name__}.")
    if timezone.is_naive(value):
        value = value.replace(tzinfo=ZoneInfo(django_settings.TIME_ZONE or "UTC"))
    if not 1 < value.year < 9998:
        raise InvalidEmail(f"expires_at is {value}; it must lie in the years 2 to 9997.")
    moment: datetime = value
    return moment
