"""The pages of the email queue: who gets what, what servers said, and what the message looks like."""

# The signatures are Django's.

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_outbox.admin.queue import QueueAdmin, again, both, held, in_words, lease_facts
from django_outbox.lease import RETRYABLE
from django_outbox.mail import EMAILS
from django_outbox.mail.preview import preview
from django_outbox.models import OutboxEmail, Status

logger = logging.getLogger("django_outbox.admin")


def advice_for(email: OutboxEmail) -> str:
    """Return what happens next to an email, and what to press."""
    if held(email):
        return "A relay is working on it right now. Neither button changes it meanwhile."
    doubt = " An attempt that failed may have reached its recipients: a retry could send it twice."
    maybe = doubt if email.maybe_sent and email.status != Status.DONE else ""
    if email.wiped and email.status != Status.DONE:
        return "What it said was removed, as it was sensitive. It cannot be sent again; queue a new one."
    if email.status == Status.DEAD:
        return f"Its schedule is spent. {again(email)} Once the cause is gone, press Retry to try at once.{maybe}"
    if email.status == Status.WAITING:
        return f"{again(email)} Retry makes it due now, with a new schedule.{maybe}"
    if email.status == Status.FAILED:
        known = "expired" if email.failure_kind == "expired" else "refused" if email.failure_kind else "discarded"
        return f"{_FAILED[known]}{maybe}"
    return _ADVICE[email.status]


_FAILED: Final = {
    "expired": "It was not sent before its time was over. A retry fails the same; queue a new one if it is wanted.",
    "refused": "It was refused for good, and is not tried again by itself. Retry once that has changed.",
    "discarded": "It was discarded. It is not sent, unless somebody retries it.",
}
_ADVICE: Final[Mapping[str, str]] = {
    Status.PENDING: "It is due; the next free relay takes it. If it stays, its backend rests: see the relay's log.",
    Status.DONE: "The backend took it. Recipients that were refused for now get a message of their own.",
}


@admin.register(OutboxEmail)
class OutboxEmailAdmin(QueueAdmin):
    """Look at emails, retry and discard them."""

    queue = EMAILS
    born = "queued"
    search_help = "an email's id, a recipient's address, a Message-ID or an idempotency key."
    search_help_text = "An email's id, its first recipient, its Message-ID or its idempotency key."
    change_form_template = "admin/django_outbox/outboxemail/change_form.html"

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any] | None:
        """Find by recipient, Message-ID, the provider's id or idempotency key, each through its index."""
        if "\x00" in term:
            return rows.none()
        message_id = term if term.startswith("<") else f"<{term}>"
        provider = Q(provider_message_id=term) & ~Q(provider_message_id="")
        return rows.filter(Q(recipient=term) | Q(message_id=message_id) | Q(idempotency_key=term) | provider)

    @admin.display(description="email")
    def summary(self, row: OutboxEmail) -> SafeString:
        """Show the subject and the first recipient."""
        return format_html(
            '{} <span class="outbox-about">{}</span>', row.subject or self._no_subject(row), row.recipient
        )

    @staticmethod
    def _no_subject(row: OutboxEmail) -> str:
        return "(sensitive)" if row.sensitive else "(no subject)"

    def heading(self, row: OutboxEmail) -> str:
        """Return the subject."""
        return row.subject or self._no_subject(row)

    def about(self, row: OutboxEmail) -> str:
        """Return the first recipient."""
        return row.recipient

    def advice(self, row: OutboxEmail) -> str:
        """Return what happens next, and what to press."""
        return advice_for(row)

    def retryable(self, row: OutboxEmail) -> bool:
        """Return whether it can be sent again."""
        return row.status in RETRYABLE and not row.wiped

    def has_read_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may read what emails say."""
        return self.may(request, "read")

    def detail(self, request: HttpRequest, row: OutboxEmail) -> dict[str, Any]:
        """Return what it says, to those who may read it, and what servers said of its recipients."""
        may_read = self.has_read_permission(request)
        shown = preview(row.pk, using=self.using) if may_read and not row.sensitive and not row.wiped else None
        if shown is not None:
            logger.info("email read user=%s id=%s", request.user.pk, row.pk)
        hidden = ""
        if row.wiped:
            hidden = "It was sensitive, and was removed once the email was final."
        elif row.sensitive:
            hidden = "It is sensitive, and shown to nobody."
        elif not may_read:
            hidden = "You may not read what emails say."
        elif shown is None:
            hidden = "It is gone."
        return {"preview": shown, "hidden": hidden, "refused": list(row.refused.items())}

    def facts(self, row: OutboxEmail) -> list[tuple[str, Any]]:
        """Return what is known beside what it says."""
        expires = row.expires_at
        return [
            *(("queued" if name == "created" else name, value) for name, value in lease_facts(row)),
            ("lane", row.get_priority_display()),
            ("delivered with", row.backend_alias),
            ("expires", format_html("{} ({})", both(expires), in_words(expires)) if expires else ""),
            ("failure", " ".join(filter(None, (row.failure_kind, row.last_code)))),
            ("may have been sent before", "yes" if row.maybe_sent else ""),
            ("Message-ID", row.message_id),
            ("provider's id", row.provider_message_id),
            ("idempotency key", row.idempotency_key or ""),
            ("organization", row.organization_id),
            ("request", row.request_id),
            ("caused by", str(row.causation_id or "")),
        ]
