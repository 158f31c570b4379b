"""Handlers whose side effects are counted: plain ones, a slow one, a coroutine, one that fails first, an atomic one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, Final

from django_outbox import Event, RetryLater, on_event
from tests.chaos.models import Effect

TYPE: Final = "order.placed"
HANDLERS: Final = ("plain", "slow", "coroutine", "flaky", "atomic")


def _effect(event: Event) -> dict[str, Any]:
    number = event.payload["number"]
    return {"event": event.id, "handler": event.handler, "number": number, "pid": os.getpid(), "at": time.time()}


@on_event(TYPE, name="plain")
def plain(event: Event) -> None:
    """Write and commit at once, as a call to another service would be: what is done is done."""
    Effect.objects.create(**_effect(event))


@on_event(TYPE, name="slow")
def slow(event: Event) -> None:
    """Take some time before the effect and after it, to be killed there."""
    threading.Event().wait(event.payload["seconds"])
    Effect.objects.create(**_effect(event))
    threading.Event().wait(event.payload["seconds"])


@on_event(TYPE, name="coroutine")
async def coroutine(event: Event) -> None:
    """Do the same in an event loop."""
    await asyncio.sleep(event.payload["seconds"] / 4)
    await Effect.objects.acreate(**_effect(event))


@on_event(TYPE, name="flaky")
def flaky(event: Event) -> None:
    """Fail the first time, for one event in ten."""
    if event.payload["fails"] and event.attempt == 1:
        raise RetryLater("not at the first attempt", delay=0.1)
    Effect.objects.create(**_effect(event))


@on_event(TYPE, name="atomic", atomic=True)
def atomic(event: Event) -> None:
    """Write in the transaction that records the delivery: exactly once, whatever happens."""
    Effect.objects.create(**_effect(event))
