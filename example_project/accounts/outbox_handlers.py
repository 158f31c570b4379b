"""
What happens after a user was created. django_outbox finds this module by its name.

Every handler below may be run again for the same event: when its process dies
after the work and before the record of it, or when its own failure is retried.
Each one shows another way to live with that.
"""

from __future__ import annotations

from django.core.mail import EmailMessage

from django_outbox import Event, on_event
from django_outbox.mail import enqueue_email
from example_project.accounts import crm
from example_project.accounts.confirmation import confirmation_link
from example_project.accounts.models import AuditRecord


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


@on_event("user.created", name="welcome-email", atomic=True)
def queue_welcome_email(event: Event) -> None:
    """
    Queue one welcome mail, with a link that confirms the address.

    The mail is a row of the email queue, so ``atomic=True`` queues it exactly once; the
    relay then sends it, and tries again for as long as the mail server is down. Once the
    link has expired, a mail that is still waiting is not sent any more. What it says is
    removed when it is sent: nobody finds a working link in the database.
    """
    link, expires_at = confirmation_link(event.payload["user_id"])
    enqueue_email(
        EmailMessage(
            subject="Welcome",
            body=f"Hello {event.payload['username']},\n\nplease confirm your address: {link}\n",
            to=[event.payload["email"]],
        ),
        idempotency_key=event.idempotency_key,
        priority="urgent",
        expires_at=expires_at,
        sensitive=True,
    )


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
