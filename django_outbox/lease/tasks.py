"""The insert of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections

from django_outbox.lease.insert import source_of
from django_outbox.lease.rows import NewTask
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of, statement

_COLUMNS: Final = (
    # column, PostgreSQL type
    ("id", "uuid"),
    ("task_path", "text"),
    ("backend_alias", "text"),
    ("queue_name", "text"),
    ("priority", "int"),
    ("payload", "jsonb"),
    ("run_after", "timestamptz"),
    ("max_attempts", "int"),
    ("timeout_seconds", "float8"),
    ("waits", "jsonb"),
    ("dedupe_key", "text"),
    ("organization_id", "text"),
    ("request_id", "text"),
    ("causation_id", "uuid"),
    ("quiet", "boolean"),
)

_DEFAULTS: Final = (
    # column, the value that the table gives it by itself
    ("backend_alias", "default"),
    ("queue_name", "default"),
    ("priority", 0),
    ("max_attempts", None),
    ("timeout_seconds", None),
    ("waits", None),
    ("dedupe_key", ""),
    ("organization_id", ""),
    ("request_id", ""),
    ("causation_id", None),
    ("quiet", False),
)

# Without a target, since no other constraint can be violated: the ids are new.
_SKIP_TAKEN: Final = "ON CONFLICT DO NOTHING"


def insert_tasks(rows: Sequence[NewTask], *, using: str) -> dict[UUID, float]:
    """
    Insert task rows in the caller's transaction; return id → creation time (seconds since 1970) of those written.

    A row that has a ``dedupe_key`` writes nothing while another of its task and key is
    pending or waiting: the unique index of those decides, and waits for a transaction
    under way that writes the same. One statement on either database: a process that dies
    before the caller's commit leaves nothing.
    """
    if not rows:
        return {}
    connection = connections[using]
    dialect = dialect_of(connection)
    table = connection.ops.quote_name(apps.get_model("django_outbox", "OutboxTask")._meta.db_table)
    if len(rows) == 1:
        sql, params = _one_task(rows[0], dialect, table)
    else:
        source, params = source_of(_COLUMNS, rows, dialect)
        sql = _tasks_statement(dialect, table, source, any(row.dedupe_key for row in rows))
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        # SQLite keeps milliseconds, and its arithmetic is off by some microseconds.
        digits = 3 if isinstance(dialect, SQLite) else 6
        return {dialect.id_value(id_): round(float(created), digits) for id_, created in cursor.fetchall()}


def _one_task(row: NewTask, dialect: Dialect, table: str) -> tuple[str, list[Any]]:
    """Return the INSERT of one task and its parameters; it leaves to the table what the table knows."""
    params: list[Any] = [dialect.param(row.id), row.task_path, row.payload]
    extra = []
    for name, default in _DEFAULTS:
        if (value := getattr(row, name)) != default:
            extra.append(name)
            params.append(dialect.param(value))
    if row.run_after is not None:
        params += [dialect.param(row.run_after)] * 2
    return _one_task_statement(dialect, table, tuple(extra), row.run_after is not None), params


@statement
def _one_task_statement(
    dialect: Dialect,
    table: str,
    extra: tuple[str, ...],
    deferred: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    values = {
        **dict.fromkeys(("id", "task_path", "payload", *extra), "%s"),
        "created_at": dialect.clock,
        "errors": "'[]'",
        "worker_ids": "'[]'",
    }
    if deferred:
        values |= {"status": "'waiting'", "due_at": "%s", "not_before": "%s"}
    sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())})"
    return f"{sql} {_SKIP_TAKEN if 'dedupe_key' in extra else ''} RETURNING id, {dialect.epoch('created_at')}"


@statement
def _tasks_statement(
    dialect: Dialect,
    table: str,
    source: str,
    keyed: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    own = [name for name, _ in _COLUMNS if name != "run_after"]
    return f"""
        INSERT INTO {table} ({", ".join(own)}, created_at, errors, worker_ids, status, due_at, not_before)
        SELECT {", ".join(f"r.{name}" for name in own)}, {dialect.clock}, '[]', '[]',
            CASE WHEN r.run_after IS NULL THEN 'pending' ELSE 'waiting' END, r.run_after, r.run_after
        FROM {source} {f"WHERE true {_SKIP_TAKEN}" if keyed else ""}
        RETURNING id, {dialect.epoch("created_at")}"""
