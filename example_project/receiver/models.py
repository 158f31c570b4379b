"""What a receiver keeps: the sender's secrets, and what arrived."""

from __future__ import annotations

from django.db import models


class SenderSecret(models.Model):
    """A secret that the sender showed once; two while one replaces the other. A real receiver keeps it safer."""

    value = models.CharField(max_length=128, unique=True)
    added_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"secret of {self.added_at:%Y-%m-%d %H:%M}"


class ReceivedWebhook(models.Model):
    """One event. The unique id is what makes a redelivery harmless."""

    webhook_id = models.CharField(max_length=64, unique=True)
    type = models.CharField(max_length=128)
    body = models.JSONField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.type} {self.webhook_id}"
