"""The event insert."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections

from django_outbox.lease.rows import NewRow
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of, statement

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

_DEFAULTS: Final = (
    # column, the value that the table gives it by itself
    ("aggregate_type", ""),
    ("aggregate_id", ""),
    ("organization_id", ""),
    ("request_id", ""),
    ("causation_id", None),
    ("quiet", False),
)


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
    if len(rows) == 1:
        sql, params = _one_event(rows[0], dialect, table)
    else:
        source, params = source_of(_EVENT_COLUMNS, rows, dialect)
        sql = _insert_statement(dialect, table, source, given)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        if given:
            return [dialect.id_value(row[0]) for row in cursor.fetchall()]
    return [row.id for row in rows]


def _one_event(row: NewRow, dialect: Dialect, table: str) -> tuple[str, list[Any]]:
    """
    Return the INSERT of one event and its parameters.

    It decides here what the statement for many decides on the server, and leaves to the table
    what the table knows: a transaction that emits waits a third less for it.
    """
    extra = []
    params: list[Any] = [dialect.param(row.id), row.type, row.payload, row.deliveries, row.headers]
    if row.occurred_at is not None:
        params.append(dialect.param(row.occurred_at))
    for name, default in _DEFAULTS:
        if (value := getattr(row, name)) != default:
            extra.append(name)
            params.append(dialect.param(value))
    owed, delayed = row.deliveries != "{}", row.delay is not None
    if delayed:
        params += [row.delay] * (1 + owed)
    shape = (row.occurred_at is not None, owed, delayed, row.given_id)
    return _one_event_statement(dialect, table, tuple(extra), shape), params


@statement
def _one_event_statement(
    dialect: Dialect, table: str, extra: tuple[str, ...], shape: tuple[bool, bool, bool, bool]
) -> str:
    told, owed, delayed, given = shape
    values = {
        **dict.fromkeys(("id", "type", "payload", "deliveries", "headers"), "%s"),
        "failures": "'{}'",
        "created_at": dialect.clock,
        "occurred_at": "%s" if told else dialect.clock,
        **dict.fromkeys(extra, "%s"),
    }
    if delayed:
        values["not_before"] = dialect.after("%s")
        if owed:
            values |= {"status": "'waiting'", "due_at": dialect.after("%s")}
    if not owed:
        values |= {"status": "'done'", "finished_at": dialect.clock}
    sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())})"
    return f"{sql} ON CONFLICT (id) DO NOTHING RETURNING id" if given else sql


@statement
def _insert_statement(
    dialect: Dialect,
    table: str,
    source: str,
    given: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    """Return the INSERT for a source of many rows."""
    clock = dialect.clock
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


def source_of(columns: Sequence[tuple[str, str]], rows: Sequence[Any], dialect: Dialect) -> tuple[str, list[Any]]:
    """Return a FROM item named ``r`` with the rows' columns (name, PostgreSQL type), and its parameters."""
    if isinstance(dialect, SQLite):
        values = [[_sqlite_value(getattr(row, name)) for name, _ in columns] for row in rows]
        fields = ", ".join(f"json_extract(value, '$[{index}]') AS {name}" for index, (name, _) in enumerate(columns))
        return f"(SELECT {fields} FROM json_each(%s)) AS r", [json.dumps(values, ensure_ascii=False)]
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
