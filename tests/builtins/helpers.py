"""What the tests of the built-in handlers share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django_outbox import Event
from django_outbox.lease import new_id


def event_of(**given: Any) -> Event:
    """Return an event as a handler receives it."""
    fields: dict[str, Any] = {
        "id": new_id(),
        "type": "order.paid",
        "payload": {},
        "occurred_at": datetime(2026, 1, 1, tzinfo=UTC),
        "aggregate_type": "",
        "aggregate_id": "",
        "organization_id": "",
        "request_id": "",
        "causation_id": None,
        "headers": {},
        "handler": "a-handler",
        "attempt": 1,
    }
    fields |= given
    return Event(**{"idempotency_key": f"{fields['handler']}:{fields['id']}", **fields})
