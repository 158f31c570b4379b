"""
A transactional outbox for Django: events, written with your rows, delivered to named handlers.

Importing this package imports neither models nor settings, so an app may
import it in its ``__init__.py`` or ``models.py`` wherever it stands in
``INSTALLED_APPS``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from django_outbox.errors import (
        DuplicateHandler,
        InvalidEmail,
        InvalidEventType,
        InvalidHandlerName,
        InvalidPayload,
        InvalidSettings,
        InvalidSignature,
        NotInTransaction,
        OutboxError,
        Reject,
        RetryLater,
        UnsafeURL,
    )
    from django_outbox.events import Event, NewEvent, emit_event, emit_events, on_event

__all__ = [
    "DuplicateHandler",
    "Event",
    "InvalidEmail",
    "InvalidEventType",
    "InvalidHandlerName",
    "InvalidPayload",
    "InvalidSettings",
    "InvalidSignature",
    "NewEvent",
    "NotInTransaction",
    "OutboxError",
    "Reject",
    "RetryLater",
    "UnsafeURL",
    "emit_event",
    "emit_events",
    "on_event",
]

_EVENTS = frozenset({"Event", "NewEvent", "emit_event", "emit_events", "on_event"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("django_outbox.events" if name in _EVENTS else "django_outbox.errors"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
