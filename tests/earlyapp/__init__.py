"""An app that loads before django_outbox and imports from it at once."""

from django_outbox import emit_event

__all__ = ["emit_event"]
