"""What the handlers of ``user.created`` leave behind."""

from __future__ import annotations

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


class SentMail(models.Model):
    """One mail that was, or is about to be, handed to the mail server."""

    idempotency_key = models.CharField(max_length=128, unique=True)
    recipient = models.EmailField()
    sent_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.recipient}: {self.sent_at or 'not sent yet'}"


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
