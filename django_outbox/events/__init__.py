"""
The event queue: emit events, register handlers, deliver the one to the other.

Nothing here imports models when it is imported, so that an app which loads before
this one can emit from its own ``models.py``.
"""

from __future__ import annotations

from django_outbox.events.deliver import EVENTS, EventRun, EventWork, announcement
from django_outbox.events.emit import NewEvent, captures, emit_event, emit_events
from django_outbox.events.registry import (
    RESERVED_PREFIXES,
    Event,
    Handler,
    Registry,
    check_type,
    discover_handlers,
    on_event,
    registry,
)
from django_outbox.payload import encode_json

__all__ = [
    "EVENTS",
    "RESERVED_PREFIXES",
    "Event",
    "EventRun",
    "EventWork",
    "Handler",
    "NewEvent",
    "Registry",
    "announcement",
    "captures",
    "check_type",
    "discover_handlers",
    "emit_event",
    "emit_events",
    "encode_json",
    "on_event",
    "registry",
]
