"""The inserts of events and of tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections

from django_outbox.lease.rows import NewRow, NewTask
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of

_EVENT_COLUMNS: Final = (
    # column, PostgreSQL type, value of a row
    ("id", "uuid"),
    ("type", "text"),
    ("payload", "jsonb"),
    ("deliveries", "jsonb"),
    ("headers", "jsonb"),
    ("occurred_at", "timestamptz"),
    ("aggregate_type", "text"),
    ("aggregate_id", "text"),
    ("organization_id", "text"),
    ("request_id", "text"),
    ("causation_id", "uuid"),
    ("quiet", "boolean"),
    ("delay", "float8"),
)


_TASK_COLUMNS: Final = (
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

_Columns = tuple[tuple[str, str], ...]


@lru_cache(maxsize=8)
def _one_row(columns: _Columns) -> str:
    return f"(SELECT {', '.join(f'%s::{kind} AS {name}' for name, kind in columns)}) AS r"


def insert_events(rows: Sequence[NewRow], *, using: str) -> list[UUID]:
    """
    Insert event rows in the caller's transaction; return the ids that were written.

    A row owed to nobody is done at once. A caller-given id that exists already
    writes nothing. One statement on either database.
    """
    if not rows:
        return []
    connection = connections[using]
    dialect = dialect_of(connection)
    table = connection.ops.quote_name(apps.get_model("django_outbox", "OutboxEvent")._meta.db_table)
    given = any(row.given_id for row in rows)
    source, params = _source(_EVENT_COLUMNS, rows, dialect)
    with connection.cursor() as cursor:
        cursor.execute(_insert_statement(dialect, dialect.clock, table, source, given), params)
        if given:
            return [dialect.id_value(row[0]) for row in cursor.fetchall()]
    return [row.id for row in rows]


@lru_cache(maxsize=256)
def _insert_statement(
    dialect: Dialect,
    clock: str,
    table: str,
    source: str,
    given: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    """Return the INSERT for a source of rows; few sources occur, and building the text costs more than sending it."""
    # A delayed row waits; one that nobody handles is done; `deliveries` says which.
    owed = "r.deliveries <> '{}'"
    return f"""
        INSERT INTO {table} (id, type, payload, deliveries, headers, occurred_at, aggregate_type, aggregate_id,
            organization_id, request_id, causation_id, quiet, failures, created_at, status, due_at, not_before,
            finished_at)
        SELECT r.id, r.type, r.payload, r.deliveries, r.headers, coalesce(r.occurred_at, {clock}),
            r.aggregate_type, r.aggregate_id, r.organization_id, r.request_id, r.causation_id, r.quiet, '{{}}',
            {clock},
            CASE WHEN NOT ({owed}) THEN 'done' WHEN r.delay IS NULL THEN 'pending' ELSE 'waiting' END,
            CASE WHEN {owed} THEN {dialect.after("r.delay")} END,
            {dialect.after("r.delay")},
            CASE WHEN NOT ({owed}) THEN {clock} END
        FROM {source}
        {"WHERE true ON CONFLICT (id) DO NOTHING RETURNING id" if given else ""}"""


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
    keyed = any(row.dedupe_key for row in rows)
    if len(rows) == 1:
        sql = _one_task_statement(dialect, dialect.clock, table, keyed)
        params = _task_values(rows[0], dialect)
    else:
        source, params = _source(_TASK_COLUMNS, rows, dialect)
        sql = _tasks_statement(dialect, dialect.clock, table, source, keyed)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        # SQLite keeps milliseconds, and its arithmetic is off by some microseconds.
        digits = 3 if isinstance(dialect, SQLite) else 6
        return {dialect.id_value(id_): round(float(created), digits) for id_, created in cursor.fetchall()}


_TASK_OWN: Final = tuple(name for name, _ in _TASK_COLUMNS if name != "run_after")
_TASK_TARGET: Final = f"({', '.join(_TASK_OWN)}, created_at, errors, worker_ids, status, due_at, not_before)"
# Without a target, since no other constraint can be violated: the ids are new.
_SKIP_TAKEN: Final = "ON CONFLICT DO NOTHING"


@lru_cache(maxsize=64)
def _one_task_statement(
    dialect: Dialect,
    clock: str,
    table: str,
    keyed: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    """Return the INSERT of one row: plain VALUES take a third less time to plan than a SELECT."""
    values = ", ".join(["%s"] * len(_TASK_OWN))
    return f"""
        INSERT INTO {table} {_TASK_TARGET} VALUES ({values}, {clock}, '[]', '[]', %s, %s, %s)
        {_SKIP_TAKEN if keyed else ""} RETURNING id, {dialect.epoch("created_at")}"""


def _task_values(row: NewTask, dialect: Dialect) -> list[Any]:
    values = [
        *(getattr(row, name) for name in _TASK_OWN),
        "pending" if row.run_after is None else "waiting",
        row.run_after,
        row.run_after,
    ]
    return [_sqlite_value(value) for value in values] if isinstance(dialect, SQLite) else values


@lru_cache(maxsize=256)
def _tasks_statement(
    dialect: Dialect,
    clock: str,
    table: str,
    source: str,
    keyed: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    values = ", ".join(f"r.{name}" for name in _TASK_OWN)
    return f"""
        INSERT INTO {table} {_TASK_TARGET}
        SELECT {values}, {clock}, '[]', '[]', CASE WHEN r.run_after IS NULL THEN 'pending' ELSE 'waiting' END,
            r.run_after, r.run_after
        FROM {source} {f"WHERE true {_SKIP_TAKEN}" if keyed else ""}
        RETURNING id, {dialect.epoch("created_at")}"""


def _source(columns: _Columns, rows: Sequence[NewRow] | Sequence[NewTask], dialect: Dialect) -> tuple[str, list[Any]]:
    """Return a FROM item named ``r`` with the rows in it, and its parameters."""
    if isinstance(dialect, SQLite):
        values = [[_sqlite_value(getattr(row, name)) for name, _ in columns] for row in rows]
        fields = ", ".join(f"json_extract(value, '$[{index}]') AS {name}" for index, (name, _) in enumerate(columns))
        return f"(SELECT {fields} FROM json_each(%s)) AS r", [json.dumps(values, ensure_ascii=False)]
    if len(rows) == 1:
        return _one_row(columns), [getattr(rows[0], name) for name, _ in columns]
    # What all rows share goes in once as a scalar, only what differs as arrays.
    arrays: list[tuple[str, str]] = []
    scalars: list[str] = []
    array_params: list[Any] = []
    scalar_params: list[Any] = []
    for name, kind in columns:
        column = [getattr(row, name) for row in rows]
        first = column[0]
        if name != "id" and column.count(first) == len(column):
            scalars.append(f"%s::{kind} AS {name}")
            scalar_params.append(first)
        else:
            arrays.append((name, kind))
            array_params.append([None if value is None else str(value) for value in column])
    # psycopg sends a Python list as a text array; each element is cast on the server.
    unnest = ", ".join(f"%s::{kind}[]" for _, kind in arrays)
    names = ", ".join(name for name, _ in arrays)
    select = ", ".join([*(f"u.{name}" for name, _ in arrays), *scalars])
    return f"(SELECT {select} FROM unnest({unnest}) AS u({names})) AS r", [*scalar_params, *array_params]


def _sqlite_value(value: Any) -> Any:
    if isinstance(value, UUID):
        return value.hex
    if isinstance(value, datetime):
        return str(value.astimezone(UTC).replace(tzinfo=None))
    return value
