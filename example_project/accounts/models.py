"""What the example keeps, and what stands for systems elsewhere."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import models


class Switch(models.Model):
    """Whether something fails now, for you to watch what follows."""

    name = models.CharField(max_length=32, primary_key=True)
    failing = models.BooleanField(default=False)

    class Meta:
        verbose_name_plural = "switches"

    def __str__(self) -> str:
        return f"{self.name}: {'fails' if self.failing else 'works'}"

    @classmethod
    def fails(cls, name: str) -> bool:
        """Return whether it fails now."""
        return cls.objects.filter(name=name, failing=True).exists()


class Token(models.Model):
    """A login of a user's on some device, kept by the pretend token service."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)
    device = models.CharField(max_length=32)
    revoked = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"{self.user} on {self.device}{' (revoked)' if self.revoked else ''}"


class TokenRequest(models.Model):
    """One request that reached the pretend token service, accepted or refused."""

    idempotency_key = models.CharField(max_length=128, db_index=True)
    attempt = models.PositiveIntegerField()
    accepted = models.BooleanField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.idempotency_key} #{self.attempt}: {'accepted' if self.accepted else 'refused'}"


class ReceiverSecret(models.Model):
    """The secret that a webhook endpoint's owner was shown, kept by the built-in receiver."""

    endpoint_id = models.UUIDField(primary_key=True)
    secret = models.CharField(max_length=128)

    def __str__(self) -> str:
        return str(self.endpoint_id)


class ReceivedWebhook(models.Model):
    """A webhook that reached the built-in receiver, once: a repeat has the same id."""

    webhook_id = models.CharField(max_length=64, unique=True)
    type = models.CharField(max_length=128)
    times = models.PositiveIntegerField(default=1)
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.type} {self.webhook_id}"
