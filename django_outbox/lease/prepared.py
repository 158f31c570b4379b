"""
Statements that PostgreSQL parses and plans once per connection.

Django's cursors send every statement as text, and of the time that a claim of one row
takes, parsing and planning are more than half. `fetch` sends ``PREPARE`` once and then
``EXECUTE``, both as plain text through Django's cursor, so that nothing depends on the
driver's own prepared statements, which Django turns off for the sake of poolers.

A name is a digest of the statement's text, so behind a pooler that gives a session to
several clients, nobody can run anything but the statement meant under it. Where sessions
change under way a name is missing now and then; after `GIVE_UP_AFTER` such losses
the process sends plain text.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from django.db import DatabaseError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_outbox.lease")

PER_CONNECTION: Final = 64
"""Statements prepared on one connection; what comes beyond goes as text."""
PLAN_SECONDS: Final = 15.0
"""
How long a plan is kept.

The server plans anew when a table's statistics change, which lags behind a table that grows,
and what it planned for a few rows may read all of them. A statement that is used once in so
long is not prepared at all.
"""
GIVE_UP_AFTER: Final = 3

_MISSING: Final = "26000"
_EXISTS: Final = "42P05"
_OUTDATED: Final = "0A000"
"""A column's type was changed by a migration since the statement was prepared."""


@dataclass(slots=True)
class _Use:
    """A statement on one connection."""

    since: float
    prepared: bool = False


_lock = threading.Lock()
_uses: WeakKeyDictionary[Any, dict[str, _Use]] = WeakKeyDictionary()
"""By the driver's connection, and the statement's name."""
_losses: Counter[str] = Counter()
"""How often a prepared statement was gone, by alias."""


def fetch(connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any], *, prepare: bool) -> list[tuple[Any, ...]]:
    """
    Run a statement and return its rows; prepared, if asked for, where nothing can break by it.

    Inside a transaction, whoever opened it, it goes as text: a name that is missing would
    break the transaction.
    """
    if (
        prepare
        and connection.vendor == "postgresql"
        and not connection.in_atomic_block
        and _losses[connection.alias] < GIVE_UP_AFTER
        # The values of an EXECUTE cannot be bound on the server.
        and not connection.settings_dict["OPTIONS"].get("server_side_binding")
        and connection.get_autocommit()
    ):
        name, as_prepare, as_execute = _texts(sql, len(params))
        try:
            if _is_prepared(connection, name, as_prepare):
                return _run(connection, as_execute, params)
        except DatabaseError as error:
            # Refused before it did anything, so it may be sent once more.
            state = _sqlstate(error)
            if state not in {_MISSING, _OUTDATED}:
                raise
            _uses.get(connection.connection, {}).pop(name, None)
            if state == _MISSING:
                _count_loss(connection)
            else:
                _deallocate(connection, name)
    return _run(connection, sql, params)


def _run(connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


@lru_cache(maxsize=256)
def _texts(sql: str, count: int) -> tuple[str, str, str]:
    """Return a statement's name, its PREPARE and its EXECUTE."""
    name = f"outbox_{hashlib.sha256(sql.encode()).hexdigest()[:24]}"
    parts = sql.split("%s")
    numbered = parts[0] + "".join(f"${number}{part}" for number, part in enumerate(parts[1:], 1))
    places = f"({', '.join(['%s'] * count)})" if count else ""
    return name, f"PREPARE {name} AS {numbered.replace('%%', '%')}", f"EXECUTE {name}{places}"


def _is_prepared(connection: BaseDatabaseWrapper, name: str, as_prepare: str) -> bool:
    """Return whether the statement is prepared now, which is done at its second use."""
    connection.ensure_connection()
    driver = connection.connection
    uses = _uses.get(driver)
    if uses is None:
        with _lock:
            uses = _uses.setdefault(driver, {})
    now = time.monotonic()
    use = uses.get(name)
    if use is None or now - use.since > PLAN_SECONDS:
        if use is not None and use.prepared:
            del uses[name]
            _deallocate(connection, name)
        if len(uses) < PER_CONNECTION:
            uses[name] = _Use(now)
        return False
    if not use.prepared:
        try:
            with connection.cursor() as cursor:
                cursor.execute(as_prepare)
        except DatabaseError as error:
            # A pooler gave us a session on which another process prepared the same text.
            if _sqlstate(error) != _EXISTS:
                raise
        use.prepared = True
    return True


def _deallocate(connection: BaseDatabaseWrapper, name: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"DEALLOCATE {name}")
    except DatabaseError as error:
        if _sqlstate(error) != _MISSING:
            raise
        _count_loss(connection)


def _count_loss(connection: BaseDatabaseWrapper) -> None:
    _losses[connection.alias] += 1
    if _losses[connection.alias] == GIVE_UP_AFTER:
        logger.info(
            "sessions change between statements, as behind a pooler; planning each anew database=%s", connection.alias
        )


def _sqlstate(error: DatabaseError) -> str | None:
    return getattr(error.__cause__, "sqlstate", None)
