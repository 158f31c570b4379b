"""Lanes: the values by which a queue's rows are claimed apart, and which of them have something due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connections

from django_outbox.lease.claim import SCANS
from django_outbox.lease.rows import Queue
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of, statement, table_of


def due_lanes(queue: Queue, lanes: Sequence[Mapping[str, Any]], *, using: str) -> list[Mapping[str, Any]]:
    """
    Return those lanes, in their order, in which a row can be claimed now.

    A lane is what a claim takes as its scope; all of them name the same columns. One
    statement, which reads the head of three index scans for each lane, and changes nothing.
    """
    if not lanes:
        return []
    connection = connections[using]
    dialect = dialect_of(connection)
    columns = tuple(lanes[0])
    sql = _due_lanes(dialect, table_of(queue, connection), columns, len(lanes))
    params = [dialect.param(lane[name]) for lane in lanes for _ in SCANS for name in columns]
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        row = cursor.fetchone()
    return [lane for lane, due in zip(lanes, row, strict=True) if due]


@statement
def _due_lanes(dialect: Dialect, table: str, columns: tuple[str, ...], count: int) -> str:
    scope = "".join(f' AND "{name}" = %s' for name in columns)
    free = f"(lease_until IS NULL OR lease_until <= {dialect.now})"
    # With the claim's own order, so that the claim's own index serves it: an EXISTS alone
    # may make the planner read the table in the hope of meeting a row soon.
    heads = " OR ".join(
        f"(SELECT 1 FROM {table} WHERE {due.format(now=dialect.now)}{scope} AND {free} ORDER BY {order}, id LIMIT 1)"
        " IS NOT NULL"
        for due, order in SCANS.values()
    )
    return f"SELECT {', '.join([f'({heads})'] * count)}"


def known_lanes(queue: Queue, columns: tuple[str, str], *, using: str) -> set[tuple[Any, Any]]:
    """
    Return the lanes that rows which are not final stand in.

    ``columns`` lead the queue's partial indexes, and on PostgreSQL one entry of each is
    read for every lane, however many rows are in it.
    """
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(_known_lanes(dialect_of(connection), table_of(queue, connection), columns), [])
        return {(first, second) for first, second in cursor.fetchall()}


@statement
def _known_lanes(dialect: Dialect, table: str, columns: tuple[str, str]) -> str:
    names = ", ".join(f'"{name}"' for name in columns)
    scans = {name: f"status = '{name}'" + (" AND due_at IS NOT NULL" if name == "dead" else "") for name in SCANS}
    if isinstance(dialect, SQLite):
        return " UNION ".join(f"SELECT {names} FROM {table} WHERE {scan}" for scan in scans.values())
    walks = []
    for name, scan in scans.items():
        last = ", ".join(f'walk."{column}"' for column in columns)
        walks.append(f"""
            {name}_walk AS (
                (SELECT {names} FROM {table} WHERE {scan} ORDER BY {names} LIMIT 1)
                UNION ALL
                SELECT next.* FROM {name}_walk AS walk, LATERAL (
                    SELECT {names} FROM {table} WHERE {scan} AND ({names}) > ({last}) ORDER BY {names} LIMIT 1
                ) AS next
            )""")
    union = " UNION ".join(f"SELECT * FROM {name}_walk" for name in scans)
    return f"WITH RECURSIVE {','.join(walks)} {union}"
