"""Found by discovery. No other test uses this event type."""

from __future__ import annotations

from django_outbox import Event, on_event
from tests.testapp.models import Effect


@on_event("testapp.discovered", name="discovered")
def record(event: Event) -> None:
    """Leave a row that shows that discovery and delivery worked."""
    Effect.objects.create(key=event.idempotency_key, handler=event.handler)
