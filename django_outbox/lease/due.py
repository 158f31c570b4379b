"""Which parts of a queue have something due: a walk from one part to the next, not over its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
    queue: Queue,
    columns: _Pair,
    *,
    using: str,
    only: Collection[str] = (),
    prepare: bool = True,
) -> list[Scope]:
    """
    Return the values of two columns with which something can be claimed, now or later, the soonest first.

    ``columns`` lead the queue's partial indexes. ``only``: just these values of the first
    one, a text. A flood of rows of one pair costs no more than one row of it: each step goes by
    index to the next pair (a loose index scan), and looks at the first free row there, and
    at most at `LEASED_SEEN` that are leased. ``prepare`` as in `prepared.fetch`: not for a
    table that may be growing fast, whose plan must see how long it is.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    names = tuple(sorted(only))
    found: Iterable[tuple[Any, ...]]
    if isinstance(dialect, SQLite):
        found = _sqlite_scopes(connection, table, columns, names)
    else:
        params = [list(names)] * len(SCANS) if names else []
        found = fetch(connection, _postgres_walks(table, columns, bool(names)), params, prepare=prepare)
    soonest: dict[tuple[Any, Any], float] = {}
    for first, second, seconds in found:
        if seconds is not None:
            pair = (first, second)
            soonest[pair] = min(max(0.0, float(seconds)), soonest.get(pair, float("inf")))
    return sorted((Scope(pair, seconds) for pair, seconds in soonest.items()), key=lambda scope: scope.seconds)


def _scan(name: str) -> str:
    """Return the predicate of a scan's index."""
    return f"status = '{name}'" + (" AND due_at IS NOT NULL" if name == "dead" else "")


def _seconds(dialect: Dialect, table: str, name: str, scope: str) -> str:
    """
    Return the expression for when a row of a scan and scope can be claimed, in seconds from now.

    That is when the first free one falls due, or when the lease of one that is due runs
    out; the second is looked for only where the first is not past already.
    """
    condition, order = SCANS[name]
    free = f"(lease_until IS NULL OR lease_until <= {dialect.now})"
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


@statement
def _postgres_walks(
    table: str,
    columns: _Pair,
    narrowed: bool,  # noqa: FBT001  positional, for the cache
) -> str:
    one, two = (f'"{name}"' for name in columns)
    walks, looks = [], []
    for name in SCANS:
        pairs = f"SELECT {one}, {two} FROM {table} WHERE {_scan(name)}"
        if narrowed:
            # Name by name: with several at once, servers before 17 do not walk the index in order.
            first = (
                f"SELECT pair.* FROM unnest(%s::text[]) AS given(name),"
                f" LATERAL ({pairs} AND {one} = given.name ORDER BY {two} LIMIT 1) AS pair"
            )
            later = f"{pairs} AND {one} = w.{one} AND {two} > w.{two} ORDER BY {two} LIMIT 1"
        else:
            # The row comparison is a condition of the index that starts with the two columns; the
            # sorted LIMIT 1 stops at the first entry behind the pair at hand.
            first = f"({pairs} ORDER BY {one}, {two} LIMIT 1)"
            later = f"{pairs} AND ({one}, {two}) > (w.{one}, w.{two}) ORDER BY {one}, {two} LIMIT 1"
        walks.append(
            f"{name}_walk AS ({first} UNION ALL SELECT later.* FROM {name}_walk AS w, LATERAL ({later}) AS later)"
        )
        seconds = _seconds(POSTGRES, table, name, f"{one} = w.{one} AND {two} = w.{two}")
        looks.append(f"SELECT w.{one}, w.{two}, {seconds} FROM (SELECT * FROM {name}_walk LIMIT {SCOPES_SEEN}) AS w")
    return f"WITH RECURSIVE {', '.join(walks)} {' UNION ALL '.join(looks)}"


def _sqlite_scopes(
    connection: BaseDatabaseWrapper, table: str, columns: _Pair, only: tuple[str, ...]
) -> Iterator[tuple[Any, ...]]:
    """Walk step by step: a statement costs next to nothing in the process itself, and SQLite knows no LATERAL."""
    one, two = (f'"{name}"' for name in columns)
    with connection.cursor() as cursor:
        for name in SCANS:
            look = _sqlite_look(table, columns, name)
            step = f"SELECT {one}, {two} FROM {table} WHERE {_scan(name)}"
            for part in only or (None,):
                given = [] if part is None else [part]
                within = step if part is None else f"{step} AND {one} = %s"
                after: list[Any] = []
                for _ in range(SCOPES_SEEN):
                    later = f" AND ({one}, {two}) > (%s, %s)" if after else ""
                    cursor.execute(f"{within}{later} ORDER BY {one}, {two} LIMIT 1", [*given, *after])
                    if (pair := cursor.fetchone()) is None:
                        break
                    after = list(pair)
                    cursor.execute(look, after)
                    yield (*pair, cursor.fetchone()[0])


@statement
def _sqlite_look(table: str, columns: _Pair, name: str) -> str:
    one, two = (f'"{each}"' for each in columns)
    # Named by a subselect, so that the pair is given once.
    seconds = _seconds(SQLITE, table, name, f"{one} = pair.a AND {two} = pair.b")
    return f"SELECT {seconds} FROM (SELECT %s AS a, %s AS b) AS pair"
