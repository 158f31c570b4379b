"""What users do: each time the rows and the event, together or not at all."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction

from django_outbox import emit_event
from example_project.accounts.models import Token
from example_project.accounts.tasks import draw_avatar


def register(*, username: str, email: str, password: str | None = None, request_id: str = "") -> User:
    """
    Create a user and emit ``user.created``, in one transaction.

    Raises ``IntegrityError`` when the user name is taken; then there is no
    event either. Without a password the user cannot log in yet.
    """
    user = User(username=username, email=email)
    # Hashing is slow on purpose. Done before the transaction, it does not hold SQLite's one write lock.
    user.set_password(password)
    with transaction.atomic():
        user.save(force_insert=True)
        Token.objects.bulk_create([Token(user=user, device=device) for device in ("phone", "laptop")])
        emit_event(
            "user.created",
            {"user_id": user.pk, "username": user.username, "email": user.email},
            aggregate_type="user",
            aggregate_id=str(user.pk),
            request_id=request_id,
        )
        # A call of a task is a row too: it commits, or not, with the user.
        draw_avatar.enqueue(user.pk)
    return user


def change_password(user: User, password: str, *, request_id: str = "") -> None:
    """Set a user's password and emit ``user.password_changed``, in one transaction."""
    user.set_password(password)
    with transaction.atomic():
        user.save(update_fields=["password"])
        emit_event(
            "user.password_changed",
            {"user_id": user.pk, "username": user.username, "email": user.email},
            aggregate_type="user",
            aggregate_id=str(user.pk),
            request_id=request_id,
        )
