"""What the handlers of ``user.created`` leave behind."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class AuditRecord(models.Model):
    """One line of the audit log. The unique event id is what makes a second one impossible."""

    event_id = models.UUIDField(unique=True)
    action = models.CharField(max_length=128)
    subject = models.CharField(max_length=255)
    occurred_at = models.DateTimeField()
    recorded_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.action} {self.subject}"


class ConfirmedEmail(models.Model):
    """That somebody with access to the mailbox opened the link in the welcome mail."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    confirmed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.user}: {self.confirmed_at}"


class CrmContact(models.Model):
    """A contact in the pretend CRM."""

    email = models.EmailField(unique=True)
    name = models.CharField(max_length=150)

    def __str__(self) -> str:
        return self.email


class CrmRequest(models.Model):
    """One request that reached the pretend CRM, accepted or refused."""

    idempotency_key = models.CharField(max_length=128, db_index=True)
    attempt = models.PositiveIntegerField()
    accepted = models.BooleanField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.idempotency_key} #{self.attempt}: {'accepted' if self.accepted else 'refused'}"
