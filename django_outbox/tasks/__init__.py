"""
The task queue: a durable backend for Django's Tasks API.

``TASKS = {"default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend"}}``. Importing
this never fails; making the backend where there is no Tasks API (Django 5.2 without
the package ``django-tasks``) raises ``ImproperlyConfigured``. Nothing here imports models
when it is imported, so tasks may be declared in any app, wherever it stands.
"""

from __future__ import annotations

from django_outbox.tasks.backend import Call, OutboxTaskBackend, Task, enqueue_many
from django_outbox.tasks.compat import AVAILABLE as API_AVAILABLE
from django_outbox.tasks.compat import MISSING as API_MISSING
from django_outbox.tasks.deliver import TaskRun, TaskWork
from django_outbox.tasks.store import TASKS

__all__ = [
    "API_AVAILABLE",
    "API_MISSING",
    "TASKS",
    "Call",
    "OutboxTaskBackend",
    "Task",
    "TaskRun",
    "TaskWork",
    "enqueue_many",
]
