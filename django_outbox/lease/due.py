"""Which parts of a queue have something due: a walk from one part to the next, not over its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_outbox.lease.claim import LEASED_SEEN, SCANS
from django_outbox.lease.prepared import fetch
from django_outbox.lease.rows import Queue
from django_outbox.lease.vendors import POSTGRES, SQLITE, Dialect, SQLite, dialect_of, statement, table_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

SCOPES_SEEN: Final = 2_000
"""Parts of one status that a look walks over; the rest of them has to wait until there are fewer."""

_Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Scope:
    """Values of a queue's two leading columns, and in how many seconds a row with them can be claimed; 0: now."""

    values: tuple[Any, Any]
    seconds: float


def due_scopes(
    queue: Queue, columns: _Pair, *, using: str, only: Collection[Any] = (), spare_expired: bool = False
) -> list[Scope]:
    """
    Return the values of two columns with which something can be claimed, now or later, the soonest first.

    ``columns`` lead the queue's partial indexes. ``only``: just these values of the first
    one. A flood of rows of one pair costs no more than one row of it: each step goes by
    index to the next pair (a loose index scan), and looks at the first free row there, and
    at most at `LEASED_SEEN` that are leased.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    look = _sqlite_scopes if isinstance(dialect, SQLite) else _postgres_scopes
    soonest: dict[tuple[Any, Any], float] = {}
    for first, second, seconds in look(connection, table, columns, tuple(sorted(only)), spare_expired):
        if seconds is not None:
            pair = (first, second)
            soonest[pair] = min(max(0.0, float(seconds)), soonest.get(pair, float("inf")))
    return sorted((Scope(pair, seconds) for pair, seconds in soonest.items()), key=lambda scope: scope.seconds)


def _scan(name: str) -> str:
    """Return the predicate of a scan's index."""
    return f"status = '{name}'" + (" AND due_at IS NOT NULL" if name == "dead" else "")


def _seconds(dialect: Dialect, table: str, name: str, scope: str, *, spare_expired: bool) -> str:
    """
    Return the expression for when a row of a scan and scope can be claimed, in seconds from now.

    That is when the first free one falls due, or when the lease of one that is due runs
    out; the second is looked for only where the first is not past already.
    """
    condition, order = SCANS[name]
    free = "lease_until IS NULL" if spare_expired else f"(lease_until IS NULL OR lease_until <= {dialect.now})"
    first = f"(SELECT {order} FROM {table} WHERE {_scan(name)} AND {scope} AND {free} ORDER BY {order}, id LIMIT 1)"
    lease = f"""(SELECT min(lease_until) FROM (
        SELECT lease_until FROM {table} WHERE {condition.format(now=dialect.now)} AND {scope}
        ORDER BY {order}, id LIMIT {LEASED_SEEN}) AS leased WHERE lease_until > {dialect.now})"""
    # PostgreSQL's least() leaves NULLs out, SQLite's min() does not.
    soonest = f"least({first}, {lease})"
    if isinstance(dialect, SQLite):
        soonest = f"min(coalesce({first}, {lease}), coalesce({lease}, {first}))"
    return (
        f"CASE WHEN {first} <= {dialect.now} THEN 0.0 ELSE {dialect.epoch(soonest)} - {dialect.epoch(dialect.now)} END"
    )


def _postgres_scopes(
    connection: BaseDatabaseWrapper,
    table: str,
    columns: _Pair,
    only: tuple[Any, ...],
    spare_expired: bool,  # noqa: FBT001
) -> list[tuple[Any, ...]]:
    params: list[Any] = [list(only), list(only)] if only else []
    return fetch(
        connection,
        _postgres_walks(table, columns, bool(only), spare_expired),
        params * len(SCANS),
        prepare=True,
    )


@statement
def _postgres_walks(
    table: str,
    columns: _Pair,
    narrowed: bool,  # noqa: FBT001  positional, for the cache
    spare_expired: bool,  # noqa: FBT001
) -> str:
    one, two = (f'"{name}"' for name in columns)
    only = f" AND {one} = ANY(%s)" if narrowed else ""
    walks, looks = [], []
    for name in SCANS:
        # The row comparison is a condition of the index that starts with the two columns; the
        # sorted LIMIT 1 stops at the first entry behind the pair at hand.
        walks.append(f"""
            {name}_walk AS (
                (SELECT {one}, {two} FROM {table} WHERE {_scan(name)}{only} ORDER BY {one}, {two} LIMIT 1)
                UNION ALL
                SELECT later.* FROM {name}_walk AS w, LATERAL (
                    SELECT {one}, {two} FROM {table}
                    WHERE {_scan(name)} AND ({one}, {two}) > (w.{one}, w.{two}){only}
                    ORDER BY {one}, {two} LIMIT 1
                ) AS later
            )""")
        scope = f"{one} = w.{one} AND {two} = w.{two}"
        seconds = _seconds(POSTGRES, table, name, scope, spare_expired=spare_expired)
        looks.append(f"SELECT w.{one}, w.{two}, {seconds} FROM (SELECT * FROM {name}_walk LIMIT {SCOPES_SEEN}) AS w")
    return f"WITH RECURSIVE {','.join(walks)} {' UNION ALL '.join(looks)}"


def _sqlite_scopes(
    connection: BaseDatabaseWrapper,
    table: str,
    columns: _Pair,
    only: tuple[Any, ...],
    spare_expired: bool,  # noqa: FBT001
) -> Iterator[tuple[Any, Any, Any]]:
    """Walk step by step: a statement costs next to nothing in the process itself, and SQLite knows no LATERAL."""
    with connection.cursor() as cursor:
        for name in SCANS:
            last: list[Any] = []
            for _ in range(SCOPES_SEEN):
                cursor.execute(_sqlite_step(table, columns, name, bool(last), len(only)), [*last, *only])
                if (pair := cursor.fetchone()) is None:
                    break
                last = list(pair)
                cursor.execute(_sqlite_look(table, columns, name, spare_expired), last)
                yield (*pair, cursor.fetchone()[0])


@statement
def _sqlite_step(
    table: str,
    columns: _Pair,
    name: str,
    later: bool,  # noqa: FBT001  positional, for the cache
    only: int,
) -> str:
    one, two = (f'"{each}"' for each in columns)
    after = f" AND ({one}, {two}) > (%s, %s)" if later else ""
    narrowed = f" AND {one} IN ({', '.join(['%s'] * only)})" if only else ""
    return f"SELECT {one}, {two} FROM {table} WHERE {_scan(name)}{after}{narrowed} ORDER BY {one}, {two} LIMIT 1"


@statement
def _sqlite_look(
    table: str,
    columns: _Pair,
    name: str,
    spare_expired: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    one, two = (f'"{each}"' for each in columns)
    # Numbered by a subselect, so that the pair is given once.
    seconds = _seconds(SQLITE, table, name, f"{one} = pair.a AND {two} = pair.b", spare_expired=spare_expired)
    return f"SELECT {seconds} FROM (SELECT %s AS a, %s AS b) AS pair"
