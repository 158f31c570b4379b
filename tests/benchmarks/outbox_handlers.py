"""The handlers under measurement; the event type says which of them an event goes to."""

from __future__ import annotations

import time

from django_outbox import Event, audit, on_event

starts: list[tuple[int, int]] = []
"""Number of each ``bench.timed`` event, and the monotonic nanosecond at which its handler began."""


@on_event("bench.one", "bench.three", name="first")
def first(event: Event) -> None:
    """Do nothing."""


@on_event("bench.three", name="second")
def second(event: Event) -> None:
    """Do nothing."""


@on_event("bench.three", name="third")
def third(event: Event) -> None:
    """Do nothing."""


@on_event("bench.sleep", name="sleeper")
def sleep(event: Event) -> None:
    """Wait as a handler waits for a network."""
    time.sleep(0.01)


@on_event("bench.timed", name="timer")
def note_start(event: Event) -> None:
    """Note when this began; the monotonic clock is the same in every process of a machine."""
    starts.append((event.payload["number"], time.monotonic_ns()))


@on_event("bench.audit", name="audit")
def enter(event: Event) -> None:
    """Append to the audit log, as the built-in handler does."""
    audit.append(event)
