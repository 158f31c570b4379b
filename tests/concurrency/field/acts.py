"""
Three handlers, each with its own script in the payload: ``{"beta": [["hold", "x"], ["raise", "no"]]}``.

Every start and every end is told to the stage, a server on loopback that the test
runs; ``hold`` waits there until the test lets it go. ``write`` leaves a row by the ORM.
"""

from __future__ import annotations

import json
import os
import signal
import socket

from django.db import connection

from django_outbox import Event, on_event
from tests.testapp.models import Effect

TYPE = "field.acted"
COUNTED = "field.counted"
NAMES = ("alpha", "beta", "gamma")


def register() -> None:
    """Register the handlers, in the order of their names, but for those that this deployment does not have."""
    for name, function in zip(NAMES, (alpha, beta, gamma), strict=True):
        if name not in os.environ.get("FIELD_WITHOUT", ""):
            on_event(TYPE, name=name)(function)
    on_event(COUNTED, name="counter")(count)


def count(event: Event) -> None:
    """Ask the database something, and tell nobody: for tests of many events."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s", [event.payload])


def alpha(event: Event) -> None:
    """Play the script of this name."""
    _play(event)


def beta(event: Event) -> None:
    """Play the script of this name."""
    _play(event)


def gamma(event: Event) -> None:
    """Play the script of this name."""
    _play(event)


def _play(event: Event) -> None:
    actor = f"{event.handler} {event.payload['name']}"
    _tell(f"start {actor}")
    for verb, argument in event.payload.get(event.handler, ()):
        match verb:
            case "hold":
                _tell(f"hold {argument}", wait=True)
            case "raise":
                raise ValueError(argument)
            case "fail-before":
                if event.attempt < argument:
                    raise ValueError(f"attempt {event.attempt} is before {argument}")
            case "write":
                Effect.objects.create(key=f"{actor} {argument}", handler=event.handler)
            case "signal":
                os.kill(os.getpid(), getattr(signal, argument))
    _tell(f"end {actor}")


def _tell(line: str, *, wait: bool = False) -> None:
    with socket.create_connection(("127.0.0.1", int(os.environ["FIELD_PORT"])), timeout=30) as stage:
        stage.sendall(json.dumps({"line": line, "wait": wait, "pid": os.getpid()}).encode() + b"\n")
        # The answer comes when the line is noted, or when the test lets the actor go.
        stage.recv(1)
