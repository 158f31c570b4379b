"""Tasks that the tests enqueue: at module level, as Django wants them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from django_outbox import Reject, RetryLater, emit_event
from tests.tasks.api import task, task_with
from tests.testapp.models import Note

calls: list[Any] = []
"""What ran, for tests in the same process."""
gate = threading.Event()
"""Holds `hold` until it is set."""


@task
def add(a: int, b: int = 0) -> int:
    calls.append((a, b))
    return a + b


@task
def note(text: str) -> None:
    Note.objects.create(text=text)


@task
def give_back(value: Any = None) -> Any:
    return value


@task
def give_something_else() -> object:
    return object()


@task
def fail(text: str = "it broke") -> None:
    raise ValueError(text)


@task
def fail_badly() -> None:
    raise SystemExit(3)


@task
def later(seconds: float | None = None) -> None:
    raise RetryLater("not yet", delay=seconds)


@task
def refuse() -> None:
    raise Reject("never")


@task_with(takes_context=True)
def tell(context: Any, extra: str = "") -> dict[str, Any]:
    result = context.task_result
    return {
        "attempt": context.attempt,
        "id": result.id,
        "status": str(result.status),
        "workers": len(result.worker_ids),
        "extra": extra,
    }


@task_with(priority=5, queue_name="reports")
async def wait(seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return "waited"


@task
def hold(seconds: float = 30.0) -> None:
    gate.wait(seconds)


@task
def emit(number: int) -> None:
    from django.db import transaction

    with transaction.atomic():
        emit_event("thing.done", {"number": number})


@task
def enqueue_another() -> str:
    return str(add.enqueue(1).id)


@task
def kill_itself() -> None:
    os._exit(9)


@task
def sleep(seconds: float) -> None:
    time.sleep(seconds)


def not_a_task() -> None:
    """A function without the decorator."""
