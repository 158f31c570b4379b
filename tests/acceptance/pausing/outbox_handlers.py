"""The handler that waits for the test; without ``PAUSE_AT`` it returns at once."""

from __future__ import annotations

import os
import socket

from django_outbox import Event, on_event


@on_event("user.password_changed", name="pause", timeout=60)
def pause(event: Event) -> None:
    """Connect to the test's listener, say which attempt this is, return when it answers."""
    if address := os.environ.get("PAUSE_AT"):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(f"{event.attempt}\n".encode())
            connection.recv(1)
