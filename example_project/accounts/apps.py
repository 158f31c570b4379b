"""The accounts app."""

from __future__ import annotations

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Users, and the handlers of ``user.created``."""

    name = "example_project.accounts"
    default_auto_field = "django.db.models.BigAutoField"
