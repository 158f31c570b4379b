"""The tasks of the benchmarks, each declared for both backends."""

from __future__ import annotations

from typing import Any

from tests.tasks.api import task_with


@task_with(backend="default")
def nothing(number: int) -> None:
    """Do nothing, on the outbox."""


@task_with(backend="reference")
def reference_nothing(number: int) -> None:
    """Do nothing, on the reference."""


PAYLOAD: dict[str, Any] = {"order_id": 4711, "customer": "Ada", "total": "12.50"}


@task_with(backend="default")
def order(number: int, about: dict[str, Any]) -> None:
    """Take arguments as a web shop's would, on the outbox."""


@task_with(backend="reference")
def reference_order(number: int, about: dict[str, Any]) -> None:
    """Take the same on the reference."""
