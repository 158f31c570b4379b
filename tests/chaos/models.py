"""The ledger: what the business wrote, and what the handlers did about it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models


class Order(models.Model):
    """A business row; its event bears its number as the aggregate's id."""

    number = models.CharField(max_length=40, unique=True)

    # Spelled out: the app is in the chaos run's settings alone, so mypy's plugin does not know it.
    objects: ClassVar[models.Manager[Any]] = models.Manager()

    def __str__(self) -> str:
        return self.number


class Effect(models.Model):
    """One side effect of one handler for one event. Nothing refuses a second one: the judge counts them."""

    event = models.UUIDField()
    handler = models.CharField(max_length=64)
    number = models.CharField(max_length=40)
    pid = models.IntegerField()
    at = models.FloatField()

    objects: ClassVar[models.Manager[Any]] = models.Manager()

    def __str__(self) -> str:
        return f"{self.handler}: {self.number}"
