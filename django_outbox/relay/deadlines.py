"""A deadline for every statement of the relay's own: a server that falls silent must not keep it for ever."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from django.db import connections
from django.db.backends.signals import connection_created

logger = logging.getLogger("django_outbox.relay")

STATEMENT_SECONDS: Final = 30.0
"""The longest of the relay's statements takes a small part of this, so more is no answer at all."""
TICK_SECONDS: Final = 1.0


class _Thread(threading.local):
    bounded = False


class _Statement:
    """A statement under way, or the transaction that one belongs to."""

    __slots__ = ("connection", "deadline", "running")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + STATEMENT_SECONDS
        self.running = True


_thread = _Thread()
_lock = threading.Lock()
_under_way: dict[int, _Statement] = {}
"""By the identity of the connection; at most one for each of the relay's few threads."""
_watch: threading.Thread | None = None


def bound_statements() -> None:
    """
    Give the statements of this thread a deadline, now and on connections that it opens later.

    One that takes longer ends with Django's `OperationalError`, as if the server had
    closed the connection: its socket is shut down. Nothing else would end it: a socket
    whose other end is gone, or a pooler that hangs, sends neither an answer nor an error,
    and the system gives up unacknowledged data after a quarter of an hour at the earliest.
    """
    _thread.bounded = True
    for connection in connections.all(initialized_only=True):
        _bound(connection)
    _start_watch()


@contextmanager
def bounded_statements(using: str) -> Iterator[None]:
    """Give the relay's own statements of this thread, which runs handlers otherwise, the same deadline."""
    connection: Any = connections[using]
    if _thread.bounded or connection.vendor != "postgresql":
        yield
        return
    _start_watch()
    connection.execute_wrappers.append(_execute)
    try:
        yield
    finally:
        with suppress(ValueError):
            connection.execute_wrappers.remove(_execute)


def _start_watch() -> None:
    global _watch  # noqa: PLW0603  one for the process, whatever the number of relays
    with _lock:
        if _watch is None:
            _watch = threading.Thread(target=_watch_loop, name="outbox-deadlines", daemon=True)
            _watch.start()


def _bound(connection: Any) -> None:
    if connection.vendor == "postgresql" and _execute not in connection.execute_wrappers:
        connection.execute_wrappers.append(_execute)


def _on_connection_created(*, connection: Any, **_: Any) -> None:
    if _thread.bounded:
        _bound(connection)


connection_created.connect(_on_connection_created, dispatch_uid="django_outbox.deadlines")


def _execute(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    connection = context["connection"]
    statement = _Statement(connection)
    with _lock:
        _under_way[id(connection)] = statement
    try:
        return execute(sql, params, many, context)
    finally:
        with _lock:
            statement.running = False
            # In a transaction the entry stays, as its COMMIT may be what is never answered.
            if not connection.in_atomic_block:
                _under_way.pop(id(connection), None)


def _watch_loop() -> None:
    while True:
        time.sleep(TICK_SECONDS)
        now = time.monotonic()
        # The lock keeps a statement from ending meanwhile, and with it its socket's number from being another's.
        with _lock:
            for key, statement in list(_under_way.items()):
                if not statement.running and not statement.connection.in_atomic_block:
                    del _under_way[key]
                elif now >= statement.deadline:
                    del _under_way[key]
                    _cut(statement.connection)


def _cut(connection: Any) -> None:
    logger.error("no answer within %g s, the connection is given up database=%s", STATEMENT_SECONDS, connection.alias)
    # A second number for the socket, so that closing it here leaves the first to its owner.
    with suppress(Exception), socket.socket(fileno=os.dup(connection.connection.pgconn.socket)) as end:
        end.shutdown(socket.SHUT_RDWR)
