"""The relay's connections: whether the database answers, and what handlers do to theirs."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import suppress
from typing import Any, Final

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.signals import connection_created

from django_outbox.errors import clean_error

logger = logging.getLogger("django_outbox.relay")

DATABASE_TROUBLE: Final = (DatabaseError, InterfaceError)
CONNECTION_MAX_AGE_SECONDS: Final = 300.0
CONNECTION_TRUST_SECONDS: Final = 1.0
TELL_EVERY_SECONDS: Final = 60.0


class _Thread(threading.local):
    """What a handler thread knows of itself."""

    def __init__(self) -> None:
        self.runs_handlers = False
        self.opened: list[Any] = []
        """The connections it opened: asking Django for all of them takes longer than a small handler."""


_thread = _Thread()

_SESSION_STATEMENT: Final = re.compile(
    # At the beginning, or after a semicolon; comments may stand before it. What `lease.prepared`
    # prepares is named for its text, and changes nothing for others.
    r"(?:^|;)(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:set\s+(?!local\b|transaction\b|constraints\b)|(?:reset|discard|listen|unlisten|prepare(?!\s+outbox_)|declare|pragma|attach"
    r"|create\s+(?:local\s+|global\s+)?temp(?:orary)?)\b)"
    # Functions that outlive their transaction.
    r"|\bset_config\s*\((?![^()]*,\s*true\s*\))|\bpg_(?:try_)?advisory_lock",
    re.IGNORECASE | re.DOTALL,
)


def _note_session_change(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:  # noqa: FBT001
    # A statement composed by psycopg is not text yet; few are, so each costs a connection.
    if not isinstance(sql, str) or _SESSION_STATEMENT.search(sql):
        context["connection"].outbox_session_changed = True
    return execute(sql, params, many, context)


def _on_connection_created(*, connection: Any, **_: Any) -> None:
    if not _thread.runs_handlers:
        return
    if connection not in _thread.opened:
        _thread.opened.append(connection)
    connection.outbox_since = time.monotonic()
    connection.outbox_session_changed = False
    connection.health_check_enabled = True
    if _note_session_change not in connection.execute_wrappers:
        connection.execute_wrappers.append(_note_session_change)


connection_created.connect(_on_connection_created, dispatch_uid="django_outbox.relay")


def look_after_connections() -> None:
    """Have the connections that this thread opens from now on looked after."""
    _thread.runs_handlers = True


def _own_connections() -> list[Any]:
    """Return this handler thread's connections that are open."""
    return [connection for connection in _thread.opened if connection.connection is not None]


def trust_connections_briefly() -> None:
    """Have connections that lay idle checked before their next statement."""
    if not _thread.opened:
        return
    now = time.monotonic()
    for connection in _own_connections():
        if now - getattr(connection, "outbox_used", 0.0) > CONNECTION_TRUST_SECONDS:
            connection.health_check_done = False


def tidy_connections() -> str:
    """
    Make this thread's connections fit for the next handler; return what the last one left behind, if anything.

    An open transaction is rolled back with its connection: its work is gone, so the
    delivery must not count as made.
    """
    problem = ""
    if not _thread.opened:
        return problem
    now = time.monotonic()
    for connection in _own_connections():
        if connection.queries_log:
            connection.queries_log.clear()
        connection.outbox_used = now
        if left := _left_behind(connection):
            problem = f"the handler left {left} on the connection {connection.alias!r}; its open work was rolled back"
            _throw_away(connection)
        elif (
            getattr(connection, "outbox_session_changed", False)
            or _is_closed(connection)
            # The session may be to blame, not the statement: one that was opened while the
            # server was read-only stays so.
            or connection.errors_occurred
            or now - getattr(connection, "outbox_since", now) > CONNECTION_MAX_AGE_SECONDS
            or connection.settings_dict["OPTIONS"].get("pool")
        ):
            connection.close()
    return problem


def _left_behind(connection: Any) -> str:
    if connection.in_atomic_block or connection.savepoint_ids:
        return "an atomic block open"
    if connection.autocommit != connection.settings_dict["AUTOCOMMIT"]:
        return "autocommit changed"
    raw = connection.connection
    if _is_closed(connection):
        return ""
    # psycopg's TransactionStatus: 0 is idle.
    opened = raw.pgconn.transaction_status != 0 if connection.vendor == "postgresql" else raw.in_transaction
    return "a transaction open" if opened else ""


def _is_closed(connection: Any) -> bool:
    """Return whether the connection was closed behind Django's back."""
    raw = connection.connection
    if connection.vendor == "postgresql":
        return bool(raw.closed)
    try:
        raw.in_transaction  # noqa: B018  sqlite3 has no other way to ask
    except connection.Database.ProgrammingError:
        return True
    return False


def _throw_away(connection: Any) -> None:
    """Drop a connection and all that Django remembers of it; the next use makes a new one."""
    with suppress(Exception):
        connection.connection.close()
    _thread.opened.remove(connection)
    with suppress(AttributeError):
        del connections[connection.alias]


def close_connections() -> None:
    """Close every connection of this thread."""
    for connection in connections.all(initialized_only=True):
        with suppress(Exception):
            connection.close()


class DatabaseHealth:
    """
    Whether the database answers, told once per change of state, and once a minute while it does not.

    An error that is not the connection's (a column that is gone, say) counts too: the
    relay tries again until somebody mends it.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.down = False
        self._told = 0.0

    def failed(self, step: str, error: Exception) -> None:
        """Note an error, and close the calling thread's connection: the next use makes a new one."""
        with suppress(Exception):
            connections[self.using].close()
        now = time.monotonic()
        if not self.down or now - self._told >= TELL_EVERY_SECONDS:
            self.down, self._told = True, now
            logger.error("database trouble step=%s database=%s error=%s", step, self.using, clean_error(error))

    def works(self) -> None:
        """Note a statement that went well."""
        if self.down:
            self.down = False
            logger.warning("database works again database=%s", self.using)
