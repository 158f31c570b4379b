"""
Where Django's Tasks API is: in Django from 6.0 on, in the package ``django-tasks`` before.

Nothing else in the package asks for the version. Without either, the names below exist
and the API is absent: a relay still knows its queue, and whoever makes the backend is
told what to install.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured

__all__ = [
    "AVAILABLE",
    "BaseTask",
    "BaseTaskBackend",
    "InvalidTask",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]

_IN_DJANGO: Final = find_spec("django.tasks") is not None

AVAILABLE: Final = _IN_DJANGO or find_spec("django_tasks") is not None
"""Whether there is a Tasks API at all."""

MISSING: Final = (
    "Django's Tasks API comes with Django 6.0. On Django 5.2 it is the package django-tasks: install"
    ' "django-transactional-outbox[tasks]".'
)

if TYPE_CHECKING or _IN_DJANGO:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task as BaseTask
    from django.tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
elif AVAILABLE:
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task as BaseTask
    from django_tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
else:

    class BaseTaskBackend:
        """Says what is missing when it is made."""

        def __init__(self, alias: str, params: dict[str, Any]) -> None:  # noqa: ARG002  as where there is one
            raise ImproperlyConfigured(MISSING)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class BaseTask:
        """Stands for the class that is missing."""

    InvalidTask = TaskResultDoesNotExist = ImproperlyConfigured
    TaskContext = TaskError = TaskResult = TaskResultStatus = task_backends = None
    task_enqueued = task_finished = task_started = None
