"""A business row, a side effect, and a queue beside ours."""

from __future__ import annotations

from typing import Final

from django.db import models
from django.db.models import Q

from django_outbox import lease as engine
from django_outbox.models import Leasable, UTCDateTimeField


class Note(models.Model):
    """A business row that stands or falls with its event."""

    text = models.CharField(max_length=200)

    def __str__(self) -> str:
        return self.text


class Effect(models.Model):
    """What a handler did; a second one of the same key is refused by the database."""

    key = models.CharField(max_length=200, unique=True)
    handler = models.CharField(max_length=64)

    def __str__(self) -> str:
        return f"{self.handler}: {self.key}"


class Parcel(Leasable):
    """A row of one step, as an email or a webhook delivery is: no handlers, a lane, columns of its own."""

    lane = models.SmallIntegerField(default=0)
    carrier = models.UUIDField(null=True, blank=True)
    body = models.TextField(default="")
    receipt = models.TextField(null=True, blank=True)  # noqa: DJ001  NULL is what the tests tell apart from ""
    weight = models.IntegerField(null=True, blank=True)
    fragile = models.BooleanField(null=True, blank=True)
    sent_at = UTCDateTimeField(null=True, blank=True)
    answer = models.JSONField(null=True, blank=True)

    class Meta(Leasable.Meta):
        indexes = (
            models.Index(
                fields=["lane", "carrier", "created_at", "id"],
                name="testapp_parcel_pending",
                condition=Q(status="pending"),
            ),
            models.Index(
                fields=["lane", "carrier", "due_at", "id"], name="testapp_parcel_waiting", condition=Q(status="waiting")
            ),
            models.Index(
                fields=["lane", "carrier", "due_at", "id"],
                name="testapp_parcel_replay",
                condition=Q(status="dead", due_at__isnull=False),
            ),
        )


PARCELS: Final = engine.Queue(
    name="parcels",
    model_name="testapp.Parcel",
    content=("body", "lane"),
    bulk="body",
    handlers=False,
    announcement="outbox.parcel.dead",
    outcome_columns={
        "receipt": "text",
        "weight": "int",
        "fragile": "boolean",
        "sent_at": "timestamptz",
        "answer": "jsonb",
        "carrier": "uuid",
    },
)
