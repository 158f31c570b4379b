"""The insert of rows into a queue other than events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from django.db import connections, models

from django_outbox.lease.rows import Queue
from django_outbox.lease.vendors import SQLite, dialect_of, table_of

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
    own = "".join(f', "{name}"' for name in columns)
    values = "".join(f', o."{name}"' for name in columns)
    # An INSERT … SELECT whose source could be read as a join needs the WHERE on SQLite.
    conflict = f'WHERE true ON CONFLICT ("{unique}") DO NOTHING' if unique else ""
    sql = f"""
        INSERT INTO {table_of(queue, connection)} (id, quiet, created_at, status, due_at, not_before{own})
        SELECT o.id, coalesce(o.quiet, {"0" if isinstance(dialect, SQLite) else "false"}), {dialect.clock},
            CASE WHEN o.delay IS NULL THEN 'pending' ELSE 'waiting' END,
            {dialect.after("o.delay")}, {dialect.after("o.delay")}{values}
        FROM {dialect.records(names)}
        {conflict} RETURNING id"""
    document = json.dumps([{name: dialect.json_value(value) for name, value in row.items()} for row in rows])
    with connection.cursor() as cursor:
        cursor.execute(sql, [document])
        written = {dialect.id_value(row[0]) for row in cursor.fetchall()}
    return [row["id"] for row in rows if row["id"] in written]


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
