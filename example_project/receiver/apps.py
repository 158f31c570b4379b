"""The receiver app."""

from __future__ import annotations

from django.apps import AppConfig


class ReceiverConfig(AppConfig):
    """Receives webhooks."""

    name = "example_project.receiver"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Receiver of webhooks"
