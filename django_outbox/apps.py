"""Start-up: register the checks and discover the handlers of every installed app."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class DjangoOutboxConfig(AppConfig):
    """The app that users add to ``INSTALLED_APPS`` as ``"django_outbox"``."""

    name = "django_outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Make ready, once all models are loaded."""
        from django_outbox import audit, checks  # noqa: F401, PLC0415  the checks register themselves
        from django_outbox.events import discover_handlers  # noqa: PLC0415
        from django_outbox.handlers import register_builtin_handlers  # noqa: PLC0415

        discover_handlers()
        register_builtin_handlers()
        post_migrate.connect(audit.protect_after_migrate, sender=self, dispatch_uid="django_outbox.audit")
