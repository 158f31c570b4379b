"""Django's Tasks API, from wherever this version has it; tests of the API use these names."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or find_spec("django.tasks"):
    from django.tasks import TaskResultStatus, default_task_backend, task_backends
    from django.tasks import task as _task
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    from django_tasks import TaskResultStatus, default_task_backend, task_backends
    from django_tasks import task as _task
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django_tasks.signals import task_enqueued, task_finished, task_started

__all__ = [
    "InvalidTask",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "default_task_backend",
    "task",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
    "task_with",
]


def task(function: Callable[..., Any]) -> Any:
    """Declare a task; untyped, because the stubs know Django's own options of ``using`` alone."""
    return _task(function)


def task_with(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a task with options of the decorator."""
    decorate: Any = _task
    decorator: Callable[[Callable[..., Any]], Any] = decorate(**options)
    return decorator
