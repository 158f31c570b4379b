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


class ConfirmedEmail(models.Model):
    """That somebody with access to the mailbox opened the link in the welcome mail."""

    user = models.OneToOneField(User, on_delete=models.CASCADE)
    confirmed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.user}: {self.confirmed_at}"
