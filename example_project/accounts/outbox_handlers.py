"""
What happens after a user was created. django_outbox finds this module by its name.

Every handler below may be run again for the same event: when its process dies
after the work and before the record of it, or when its own failure is retried.
Each one shows another way to live with that.
"""

from __future__ import annotations

from django.core.mail import EmailMessage
from django.utils import timezone

from django_outbox import Event, on_event
from example_project.accounts import crm
from example_project.accounts.models import AuditRecord, SentMail


@on_event("user.created", name="audit-log", atomic=True)
def write_audit_record(event: Event) -> None:
    """
    Write one line to the audit log. Its effect happens exactly once.

    ``atomic=True`` commits this row and the record of the delivery in one
    transaction, so there is no moment at which only one of them exists. It
    works for rows in the event's own database, and for nothing else.
    """
    AuditRecord.objects.create(
        event_id=event.id,
        action=event.type,
        subject=f"{event.aggregate_type} {event.aggregate_id}",
        occurred_at=event.occurred_at,
    )


@on_event("user.created", name="welcome-email", timeout=20)
def send_welcome_email(event: Event) -> None:
    """
    Send one welcome mail, and a second one only if the process dies at the wrong moment.

    The row keeps a redelivery from sending again what was sent. It cannot
    close the gap between the mail server's "accepted" and our own commit: a
    process killed right there sends twice. To write ``sent_at`` first would
    turn the rare second mail into a rare missing one. The ``Message-ID`` stays
    the same, so a mailbox that removes duplicates will remove this one.
    """
    mail, _ = SentMail.objects.get_or_create(
        idempotency_key=event.idempotency_key, defaults={"recipient": event.payload["email"]}
    )
    if mail.sent_at is not None:
        return
    EmailMessage(
        subject="Welcome",
        body=f"Hello {event.payload['username']},\n\nyour account is ready.\n",
        to=[mail.recipient],
        headers={"Message-ID": f"<welcome.{event.id}@example.com>"},
    ).send()
    mail.sent_at = timezone.now()
    mail.save(update_fields=["sent_at"])


@on_event("user.created", name="crm-sync")
def copy_to_crm(event: Event) -> None:
    """
    Tell the CRM about the user. The CRM makes repeats harmless.

    The request is an upsert and carries the idempotency key, which is the same
    at every redelivery: sent twice, it changes nothing the second time. When
    the CRM is down this raises, and only this handler is run again.
    """
    crm.upsert_contact(
        email=event.payload["email"],
        name=event.payload["username"],
        idempotency_key=event.idempotency_key,
        attempt=event.attempt,
    )
