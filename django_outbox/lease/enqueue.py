"""The insert of rows into a queue other than events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from django.db import connections, models

from django_outbox.lease.rows import Queue
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of, statement, table_of

_SHARED: Final = {"id": "uuid", "delay": "float8", "quiet": "boolean"}


def insert_rows(
    queue: Queue, rows: Sequence[Mapping[str, Any]], *, columns: Mapping[str, str], using: str, unique: str = ""
) -> list[UUID]:
    """
    Insert rows of a queue in the caller's transaction; return the ids that were written, in order.

    A row is a mapping with its ``id``, maybe ``delay`` (seconds) and ``quiet``, and values
    for ``columns`` (the queue's own: name → PostgreSQL type); what is absent is NULL. A
    delayed row waits, another is pending. With ``unique``, a column that is unique, a row
    whose value exists already writes nothing. One statement: a process that dies before
    the caller's commit leaves nothing, and rows with one unique value wait for one
    another's transactions, so exactly one is written.
    """
    if not rows:
        return []
    connection = connections[using]
    dialect = dialect_of(connection)
    names = {**_SHARED, **columns}
    one = len(rows) == 1 and not isinstance(dialect, SQLite)
    sql = _insert(dialect, table_of(queue, connection), tuple(names.items()), unique, one)
    if one:
        params = [_scalar(rows[0].get(name)) for name in names]
    else:
        params = [json.dumps([{name: dialect.json_value(value) for name, value in row.items()} for row in rows])]
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        written = {dialect.id_value(row[0]) for row in cursor.fetchall()}
    return [row["id"] for row in rows if row["id"] in written]


@statement
def _insert(
    dialect: Dialect,
    table: str,
    names: tuple[tuple[str, str], ...],
    unique: str,
    one: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    own = [name for name, _ in names if name not in _SHARED]
    columns = "".join(f', "{name}"' for name in own)
    values = "".join(f', o."{name}"' for name in own)
    if one:
        # A single row needs no function to take it apart, which is a third of the statement's time.
        fields = ", ".join(f'%s::{kind} AS "{name}"' for name, kind in names)
        source = f"(SELECT {fields}) AS o"
    else:
        source = dialect.records(dict(names))
    # An INSERT … SELECT whose source could be read as a join needs the WHERE on SQLite.
    conflict = f'WHERE true ON CONFLICT ("{unique}") DO NOTHING' if unique else ""
    return f"""
        INSERT INTO {table} (id, quiet, created_at, status, due_at, not_before{columns})
        SELECT o.id, coalesce(o.quiet, {"0" if isinstance(dialect, SQLite) else "false"}), {dialect.clock},
            CASE WHEN o.delay IS NULL THEN 'pending' ELSE 'waiting' END,
            {dialect.after("o.delay")}, {dialect.after("o.delay")}{values}
        FROM {source}
        {conflict} RETURNING id"""


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def insert_values(
    model: type[models.Model], columns: Sequence[str], rows: Sequence[Sequence[Any]], *, using: str
) -> None:
    """Insert plain rows in the caller's transaction; a UUID is written as the database stores it."""
    connection = connections[using]
    quote = connection.ops.quote_name
    dialect = dialect_of(connection)
    one = f"({', '.join(['%s'] * len(columns))})"
    sql = (
        f"INSERT INTO {quote(model._meta.db_table)} ({', '.join(map(quote, columns))})"
        f" VALUES {', '.join([one] * len(rows))}"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [dialect.param(value) for row in rows for value in row])


def keep_rows(model: type[models.Model], column: str, values: Sequence[str], *, using: str) -> dict[str, UUID]:
    """
    Return value → primary key of the rows that have these values, and keep them from removal until the caller commits.

    Only their keys are locked, which others may do as well (FOR KEY SHARE); a row that
    somebody is removing is left out. The column's index serves it.
    """
    connection = connections[using]
    quote = connection.ops.quote_name
    dialect = dialect_of(connection)
    # On SQLite the caller's transaction, which writes, holds the one write lock.
    lock = "" if isinstance(dialect, SQLite) else "FOR KEY SHARE SKIP LOCKED"
    marks = ", ".join(["%s"] * len(values))
    sql = f"SELECT {quote(column)}, id FROM {quote(model._meta.db_table)} WHERE {quote(column)} IN ({marks}) {lock}"
    with connection.cursor() as cursor:
        cursor.execute(sql, list(values))
        return {value: dialect.id_value(id_) for value, id_ in cursor.fetchall()}
