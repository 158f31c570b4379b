"""A business row and a side effect."""

from __future__ import annotations

from django.db import models


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
