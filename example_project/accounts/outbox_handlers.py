"""
What follows when a user was created or changed the password. django_outbox finds this module by its name.

Each handler may be run again for the same event: when its process dies after the work
and before the record of it, or when its own failure is retried. Each says why that does
no harm. Three more handlers, and the one that alerts operators, are built in; the
settings switch them on.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.core.mail import EmailMessage

from django_outbox import Event, on_event
from django_outbox.mail import enqueue_email
from django_outbox.notifications import NewNotification, notifies
from example_project.accounts import tokens
from example_project.accounts.confirmation import confirmation_link


@on_event("user.created", name="welcome-email", atomic=True)
def queue_welcome_email(event: Event) -> None:
    """
    Queue one welcome mail, with a link that confirms the address.

    The mail is a row of the email queue, so ``atomic=True`` queues it exactly once, and
    the idempotency key would do so by itself. The relay then sends it, and tries again for
    as long as the mail server is down. Once the link has expired, a mail that is still
    waiting is not sent any more. What it says is removed when it is sent: nobody finds a
    working link in the database.
    """
    link, expires_at = confirmation_link(event.payload["user_id"])
    message = EmailMessage(
        subject="Welcome",
        body=f"Hello {event.payload['username']},\n\nplease confirm your address: {link}\n",
        to=[event.payload["email"]],
    )
    enqueue_email(
        message, idempotency_key=event.idempotency_key, priority="urgent", expires_at=expires_at, sensitive=True
    )


@on_event("user.password_changed", name="security-email")
def send_security_email(event: Event) -> None:
    """
    Queue one mail that says that the password was changed.

    The idempotency key is unique among queued mails: run again, this finds the row of the
    first run and writes nothing.
    """
    message = EmailMessage(
        subject="Your password was changed",
        body=f"Hello {event.payload['username']},\n\nif this was not you, write to us at once.\n",
        to=[event.payload["email"]],
    )
    enqueue_email(message, idempotency_key=event.idempotency_key, priority="urgent")


@on_event("user.password_changed", name="revoke-tokens", timeout=10)
def revoke_tokens(event: Event) -> None:
    """
    Have the token service log the user out everywhere.

    The service makes repeats harmless: what is revoked stays revoked, and the request
    carries the idempotency key, which is the same at every redelivery. When the service
    is down this raises, and only this handler is run again.
    """
    tokens.revoke_all(user_id=event.payload["user_id"], idempotency_key=event.idempotency_key, attempt=event.attempt)


@notifies("user.created", "user.password_changed")
def tell_the_user(event: Event) -> Iterator[NewNotification]:
    """Say what the user is told in the application. One user is told once about one event."""
    title = "Welcome aboard" if event.type == "user.created" else "Your password was changed"
    yield NewNotification(str(event.payload["user_id"]), title)
