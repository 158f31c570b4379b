"""Models of a domain that emits when they are saved."""

from __future__ import annotations

from django.db import models, transaction

from django_outbox import Event, emit_event, on_event

__all__ = ["Account", "Event", "on_event"]


class Account(models.Model):
    """A business row whose creation is an event."""

    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def open(cls, name: str) -> Account:
        """Create the row and its event in one transaction."""
        with transaction.atomic():
            account = cls.objects.create(name=name)
            emit_event("account.opened", {"id": account.pk, "name": name})
        return account
