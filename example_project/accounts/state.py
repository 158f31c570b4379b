"""What the front page shows: the newest rows of every table, as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django.contrib.auth.models import User
from django.db.models import Q
from django.urls import NoReverseMatch, reverse

from django_outbox.models import AuditEntry, Notification, OutboxEmail, OutboxEvent, OutboxTask, WebhookDelivery
from example_project.accounts import tokens
from example_project.accounts.models import Switch, Token
from example_project.receiver import views as receiver
from example_project.receiver.models import ReceivedWebhook

SHOWN: Final = 8
SWITCHES: Final = (tokens.SWITCH, receiver.SWITCH)
_OURS: Final = Q(type__startswith="outbox.") | Q(type__startswith="webhook.") | Q(type__startswith="email.")


def state() -> dict[str, Any]:
    """Return everything that the page shows."""
    failing = set(Switch.objects.filter(failing=True).values_list("name", flat=True))
    events = OutboxEvent.objects.exclude(_OURS).order_by("-id")[:SHOWN]
    announced = OutboxEvent.objects.filter(_OURS).order_by("-id")[:SHOWN]
    received = set(ReceivedWebhook.objects.order_by("-id").values_list("webhook_id", flat=True)[:100])
    names = {str(pk): name for pk, name in User.objects.order_by("-pk").values_list("pk", "username")[:500]}
    return {
        "switches": {name: name in failing for name in SWITCHES},
        "events": [_event(row) for row in events],
        "announced": [_event(row) for row in announced],
        "mails": [
            {"what": _mail(row), "whom": row.recipient, "status": row.status, "url": _admin(row)}
            for row in OutboxEmail.objects.order_by("-id")[:SHOWN]
        ],
        "webhooks": [
            {
                "what": row.event_type,
                "status": row.status,
                "note": "received" if str(row.event_id) in received else row.last_error,
                "url": _admin(row),
            }
            for row in WebhookDelivery.objects.order_by("-id")[:SHOWN]
        ],
        "notifications": [
            {"what": row.title, "whom": names.get(row.recipient, row.recipient), "url": _admin(row)}
            for row in Notification.objects.order_by("-id")[:SHOWN]
        ],
        "audit": [
            {"what": f"{row.position}. {row.type}", "note": row.hash[:12], "url": _admin(row)}
            for row in AuditEntry.objects.order_by("-position").defer("content")[:SHOWN]
        ],
        "tasks": [
            {"what": row.task_path.rpartition(".")[2], "status": row.status, "url": _admin(row)}
            for row in OutboxTask.objects.order_by("-id")[:SHOWN]
        ],
        "users": [
            {"name": user.username, "tokens": Token.objects.filter(user=user, revoked=False).count()}
            for user in User.objects.filter(is_staff=False).order_by("-pk")[:SHOWN]
        ],
    }


def _event(row: OutboxEvent) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "what": row.type,
        "whom": row.payload.get("username", "") if isinstance(row.payload, dict) else "",
        "status": row.status,
        "attempts": row.attempts,
        "due": _clock(row.due_at),
        "error": row.last_error,
        "url": _admin(row),
        "handlers": [
            {
                "name": name,
                "delivered": _clock(when),
                "error": row.failures.get(name, {}).get("error", "") if when is None else "",
            }
            for name, when in row.deliveries.items()
        ],
    }


def _mail(row: OutboxEmail) -> str:
    """Return the subject; of a sensitive mail no copy is kept, so it is named for the handler that queued it."""
    return row.subject or (row.idempotency_key or "sensitive").partition(":")[0]


def _clock(moment: datetime | str | None) -> str:
    """Return the time of day in UTC, to the second."""
    if moment is None:
        return ""
    return (moment.isoformat() if isinstance(moment, datetime) else moment)[11:19]


def _admin(row: Any) -> str:
    """Return where the admin shows a row, if it does."""
    try:
        return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])
    except NoReverseMatch:
        return ""
