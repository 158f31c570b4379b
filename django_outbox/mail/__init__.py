"""
The email queue: Django's mail, queued in the caller's transaction and sent once each.

``EMAIL_BACKEND = "django_outbox.mail.EmailBackend"``. Nothing here imports models when it
is imported.
"""

from __future__ import annotations

from django_outbox.mail.backend import EmailBackend, enqueue_email, queue_mailers
from django_outbox.mail.deliver import EmailWork
from django_outbox.mail.store import EMAILS

__all__ = ["EMAILS", "EmailBackend", "EmailWork", "enqueue_email", "queue_mailers"]
