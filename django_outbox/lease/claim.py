"""Claim: who gets which due row, and when the next one falls due."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from django_outbox.lease.prepared import fetch
from django_outbox.lease.rows import Clock, Lease, Queue
from django_outbox.lease.vendors import POSTGRES, SQLITE, Dialect, dialect_of, statement, table_of, write_transaction

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_Scoped = tuple[Mapping[str, Any], int]
"""A scope, and how many of its rows at most."""

_NO_SCOPE: Final[Mapping[str, Any]] = MappingProxyType({})
_SHARED: Final = ("id", "fence", "attempts", "status", "lost_leases", "quiet")

SMALL_LIMIT: Final = 100
USUAL_LIMIT: Final = 500
"""Claims of these sizes have their limits in the text, so that also a plan for any parameters is made for them."""

FRESH_LIMIT: Final = 20
"""Rows of a claim of new ones only: enough for a wake-up. Where there are more, the next claim is a whole one."""

CLAIM_BYTES: Final = 8 * 2**20
"""Content that one statement brings, if it is not a single row's."""

SCOPES_LIMIT: Final = 64
"""Scopes that one statement claims from."""

LEASED_SEEN: Final = 500
"""Leased rows at the head of a scan among which the next lease to run out is looked for."""

SCANS: Final = {
    # status → what makes it due, and its order: the index of the same name serves both.
    "pending": ("status = 'pending'", "created_at"),
    "waiting": ("status = 'waiting' AND due_at <= {now}", "due_at"),
    "dead": ("status = 'dead' AND due_at <= {now}", "due_at"),
}


class Claimer:
    """
    Claims due rows of one queue for one holder, fairly between the three scans.

    New rows and retries take turns at filling a claim first, and dead rows that are
    due for a replay get at most a quarter of it, so none of them starves the others.
    """

    def __init__(self, queue: Queue, *, holder: str, using: str) -> None:
        self.queue = queue
        self.holder = holder
        self.using = using
        self.more = False
        """Whether the last claim was ended by its limit or a quota, so that more may be due."""
        self._turn = 0

    def claim(
        self,
        limit: int,
        *,
        lease_seconds: float,
        max_bytes: int = CLAIM_BYTES,
        scope: Mapping[str, Any] = _NO_SCOPE,
        spare_expired: bool = False,
        fresh: bool = False,
    ) -> list[Lease]:
        """
        Lease up to ``limit`` due rows, and no more than ``max_bytes`` of content (but always one row).

        ``scope``: only rows with these values in these columns, which lead the queue's
        partial indexes. ``spare_expired`` leaves out rows whose lease ran out, for a relay
        that comes back from an outage which was everybody's. ``fresh``: pending rows only,
        `FRESH_LIMIT` of them at most whatever they hold; a much shorter statement, for a
        relay that was woken and knows that nothing else is due.

        A row is due when its status says so and no live lease is on it. The attempt is
        counted here, not when it fails: a row that kills its relay would otherwise come
        back for ever without spending its schedule.
        """
        connection = connections[self.using]
        dead = 0
        order: tuple[str, ...] = ("pending",)
        if fresh:
            limit = min(limit, FRESH_LIMIT)
        else:
            if scope:
                # Scopes that are claimed from by turns must not each meet the same turn for ever.
                turn = random.getrandbits(2)
            else:
                turn, self._turn = self._turn, self._turn + 1
            order = ("pending", "waiting") if turn % 2 == 0 else ("waiting", "pending")
            dead = _dead_quota(limit, turn)
        # Counted from before the statement is sent: it may only ever end too early.
        started = time.monotonic()
        find = partial(
            self._claim_sqlite if connection.vendor == "sqlite" else self._claim_postgres,
            connection,
            limit=limit,
            lease_seconds=lease_seconds,
            max_bytes=max_bytes,
            narrowed=_Narrowed.of(scope, spare_expired=spare_expired, connection=connection),
        )
        rows = find(dead=dead, order=order if fresh else ("dead", *order))
        if not rows and not dead and not fresh:
            # Nobody else wants the place; an empty claim says that nothing is due.
            dead = 1
            rows = find(dead=dead, order=("dead", *order))
        leases = self._leases(rows, started, lease_seconds)
        # The database measures bytes in its own way; half the bound is near enough to it.
        self.more = (
            len(leases) >= limit
            or sum(lease.status == "dead" for lease in leases) >= dead > 0
            or self._size(leases) >= max_bytes // 2
        )
        return leases

    def claim_scopes(
        self,
        scopes: Iterable[_Scoped],
        limit: int,
        *,
        lease_seconds: float,
        spare_expired: bool = False,
        fresh: bool = False,
    ) -> list[Lease]:
        """
        Lease up to ``limit`` due rows, scope by scope: of each at most as many as stand beside it.

        As `claim` for each of them, but with one statement for many on PostgreSQL, and bounded
        in bytes as a whole: then the last scopes bring less than they have, or nothing. Scopes
        are taken from the iterable as long as there is room for what they may bring. ``fresh``
        holds for a scope that is the whole queue.
        """
        leases: list[Lease] = []
        more = False
        together = 1 if connections[self.using].vendor == "sqlite" else SCOPES_LIMIT
        try:
            for columns, group in groupby(scopes, key=_columns):
                while batch := _taken(group, room=limit - len(leases), most=together if columns else 1):
                    leases += self._claim_batch(batch, lease_seconds, spare_expired=spare_expired, fresh=fresh)
                    more = more or self.more
                    if len(leases) >= limit or self._size(leases) >= CLAIM_BYTES // 2:
                        self.more = True
                        return leases
        except (DatabaseError, InterfaceError):
            # What is leased already must not wait for the end of its lease. The next claim meets
            # the same trouble, if it is still there; in a caller's transaction nothing is leased now.
            if not leases or connections[self.using].in_atomic_block:
                raise
            more = True
        self.more = more
        return leases

    def _claim_batch(
        self, batch: Sequence[_Scoped], lease_seconds: float, *, spare_expired: bool, fresh: bool
    ) -> list[Lease]:
        """Claim from scopes of the same columns with one statement."""
        if len(batch) == 1:
            ((scope, most),) = batch
            return self.claim(
                most, lease_seconds=lease_seconds, scope=scope, spare_expired=spare_expired, fresh=fresh and not scope
            )
        turn = random.getrandbits(2)
        order = ("dead", "pending", "waiting") if turn % 2 == 0 else ("dead", "waiting", "pending")
        quotas = [_dead_quota(room, turn + place) for place, (_, room) in enumerate(batch)]
        wanted = list(range(len(batch)))
        leases: list[Lease] = []
        came: Counter[tuple[int, bool]] = Counter()
        full = False
        while wanted:
            scopes = [(place, *batch[place], quotas[place]) for place in wanted]
            started = time.monotonic()
            rows = self._claim_several(scopes, order=order, lease_seconds=lease_seconds, spare_expired=spare_expired)
            found = self._leases(rows, started, lease_seconds)
            leases += found
            came.update((row[-2], row[3] == "dead") for row in rows)
            full = full or self._size(found) >= CLAIM_BYTES // 2
            # As in a claim of one scope: where nobody else wants the place, it is a dead row's.
            wanted = [place for place in wanted if not full and not quotas[place] and not came[place, False]]
            for place in wanted:
                quotas[place] = 1
        self.more = full or any(
            came[place, False] + came[place, True] >= room or came[place, True] >= quotas[place] > 0
            for place, (_, room) in enumerate(batch)
        )
        return leases

    def _claim_several(
        self,
        scopes: Sequence[tuple[int, Mapping[str, Any], int, int]],
        *,
        order: tuple[str, ...],
        lease_seconds: float,
        spare_expired: bool,
    ) -> list[tuple[Any, ...]]:
        connection = connections[self.using]
        fields = self.queue.model._meta
        kinds = tuple((name, str(fields.get_field(name).db_type(connection))) for name in scopes[0][1])
        records = [
            {"turn": place, "room": room, "dead_room": quota}
            | {name: POSTGRES.json_value(value) for name, value in scope.items()}
            for place, scope, room, quota in scopes
        ]
        free = _Narrowed.of(_NO_SCOPE, spare_expired=spare_expired, connection=connection).sql
        lazy = not connection.in_atomic_block
        sql = _postgres_claim(self.queue, table_of(self.queue, connection), order, lazy, free, None, kinds)
        params = [json.dumps(records), CLAIM_BYTES, self.holder, lease_seconds]
        rows = fetch(connection, sql, params, prepare=not self.more)
        rows.sort(key=_last)
        return rows

    def _size(self, leases: Sequence[Lease]) -> int:
        return sum(len(lease.content[self.queue.bulk]) for lease in leases)

    def _leases(self, rows: Sequence[tuple[Any, ...]], started: float, lease_seconds: float) -> list[Lease]:
        extra = self.queue.content
        leases = []
        clock = Clock(rows[0][8] if rows else 0.0, started)
        for row in rows:
            given, fence, attempts, status, lost, quiet, age, was_dead, _, last_holder = row[:10]
            id_ = given if isinstance(given, UUID) else UUID(given)
            leases.append(
                Lease(
                    queue=self.queue,
                    id=id_,
                    text=str(id_),
                    fence=fence,
                    holder=self.holder,
                    attempts=attempts,
                    status=status,
                    age=age,
                    # Ourselves we did not kill: the answer to a claim was lost, or a release was.
                    suspect=last_holder not in {"", self.holder},
                    lost_leases=lost,
                    quiet=bool(quiet),
                    was_dead=bool(was_dead),
                    clock=clock,
                    seconds=lease_seconds,
                    deadline=started + lease_seconds,
                    content=dict(zip(extra, row[10:], strict=False)),
                )
            )
        return leases

    def _claim_postgres(
        self,
        connection: BaseDatabaseWrapper,
        *,
        limit: int,
        dead: int,
        order: tuple[str, ...],
        lease_seconds: float,
        max_bytes: int,
        narrowed: _Narrowed,
    ) -> list[tuple[Any, ...]]:
        # A lost claim is a redelivery and never a loss, so its commit need not wait for the
        # disk. Inside a caller's transaction (a test's) that would weaken more than the claim.
        lazy = not connection.in_atomic_block
        rooms = {name: dead if name == "dead" else limit for name in order}
        literal = tuple(rooms.values()) if limit in {USUAL_LIMIT, SMALL_LIMIT, FRESH_LIMIT} else None
        sql = _postgres_claim(self.queue, table_of(self.queue, connection), order, lazy, narrowed.sql, literal)
        params: list[Any] = []
        for room in rooms.values():
            params += narrowed.params if literal else [*narrowed.params, room]
        if len(order) > 1:
            params.append(max_bytes)
        # From a long backlog planning costs little beside the rows, and must see how long it is.
        rows = fetch(connection, sql, [*params, self.holder, lease_seconds], prepare=not self.more)
        rows.sort(key=_last)
        return rows

    def _claim_sqlite(
        self,
        connection: BaseDatabaseWrapper,
        *,
        limit: int,
        dead: int,
        order: tuple[str, ...],
        lease_seconds: float,
        max_bytes: int,
        narrowed: _Narrowed,
    ) -> list[tuple[Any, ...]]:
        """Claim under the write lock, which is taken only when a read finds something due."""
        dialect = SQLITE
        table = table_of(self.queue, connection)
        due = {name: f"{SCANS[name][0].format(now=dialect.now)} AND {narrowed.sql}" for name in order}
        probe = " OR ".join(f"EXISTS (SELECT 1 FROM {table} WHERE {condition})" for condition in due.values())
        shared = ", ".join(_SHARED)
        content = "".join(f", {_content(name, '', dialect)}" for name in self.queue.content)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {probe}", narrowed.params * len(due))
            if not cursor.fetchone()[0]:
                return []
        picked: list[tuple[Any, ...]] = []
        room = limit
        with write_transaction(connection, table), connection.cursor() as cursor:
            scans: dict[str, list[tuple[Any, ...]]] = {}
            for name in order:
                cursor.execute(
                    f"""SELECT {shared},
                            {dialect.epoch(dialect.now)} - {dialect.epoch("coalesce(not_before, created_at)")},
                            dead_at IS NOT NULL, {dialect.epoch(dialect.now)}, leased_by{content},
                            length({self.queue.bulk})
                        FROM {table} WHERE {due[name]}
                        ORDER BY {SCANS[name][1]}, id LIMIT %s""",
                    [*narrowed.params, min(room, dead) if name == "dead" else room],
                )
                scans[name] = cursor.fetchall()
                room -= len(scans[name])
            size = 0
            for row in chain.from_iterable(scans[name] for name in _reading(order)):
                if picked and size >= max_bytes:
                    break
                size += row[-1]
                picked.append((row[0], row[1] + 1, row[2] + 1, *row[3:-1]))
            cursor.execute(
                f"""UPDATE {table} SET attempts = attempts + 1, fence = fence + 1, leased_by = %s,
                        lease_until = {dialect.after("%s")}
                    WHERE id IN {dialect.id_list()}""",
                [self.holder, lease_seconds, json.dumps([row[0] for row in picked])],
            )
        return picked


@dataclass(frozen=True, slots=True)
class _Narrowed:
    """Which of a scan's rows count: the free ones, in the scope."""

    sql: str
    params: list[Any]

    @classmethod
    def of(cls, scope: Mapping[str, Any], *, spare_expired: bool, connection: BaseDatabaseWrapper) -> _Narrowed:
        dialect = dialect_of(connection)
        names = [connection.ops.quote_name(name) for name in scope]
        free = "lease_until IS NULL" if spare_expired else f"(lease_until IS NULL OR lease_until <= {dialect.now})"
        return cls(
            " AND ".join([*(f"{name} = %s" for name in names), free]),
            [dialect.param(value) for value in scope.values()],
        )


def _reading(order: Sequence[str]) -> list[str]:
    """Return scans in the order in which their rows are to be worked: dead ones are taken first and come last."""
    return sorted(order, key=lambda name: name == "dead")


def _columns(entry: _Scoped) -> tuple[str, ...]:
    return tuple(entry[0])


def _taken(scopes: Iterator[_Scoped], *, room: int, most: int) -> list[_Scoped]:
    """Take as many scopes as there is room for what they may bring."""
    taken = []
    for scope, rows in scopes:
        taken.append((scope, min(rows, room)))
        room -= rows
        if room <= 0 or len(taken) >= most:
            break
    return taken


def _dead_quota(limit: int, turn: int) -> int:
    """Return how many dead rows a claim may take: a quarter, or one in every fourth turn."""
    return limit // 4 if limit >= 4 else int(turn % 4 == 3)


@statement
def _postgres_claim(  # noqa: PLR0917  positional, for the cache
    queue: Queue,
    table: str,
    order: tuple[str, ...],
    lazy_commit: bool,  # noqa: FBT001
    narrowed: str,
    literal: tuple[int, ...] | None,
    scoped: tuple[tuple[str, str], ...] = (),
) -> str:
    """
    Return the claim as one statement; ``literal``: its limits, one for each scan, as part of the text.

    ``scoped``: the columns, with their types, of scopes that come as the first parameter, a JSON
    array with the limits of each. Every scan is then made once for each scope, and reads what a
    claim from that scope alone would: 4 rows each of 64 endpoints, one of which has a backlog of
    100,000, take 2,300 page hits and 8 ms, of which planning is 2.

    Every scan is an ordered walk of its own partial index that stops at its limit, so
    the cost depends on neither finished rows nor rows due later. The scans are
    MATERIALIZED: inlined, the planner may run a locking subquery twice and claim more
    than its limit. The update touches no indexed column, so it is a HOT update.

    For 500 of 20,000 pending rows: 130 page hits to find them in ``_pending``, 1,000 to lock
    them, 1,500 to find them by primary key and 1,000 to write them; planning takes 1.4 ms of
    12. For one row: 15 hits, and planning is half of the time unless the statement is prepared.
    The scans of an empty index are one hit each. A claim of pending rows alone needs no bytes
    counted and no two scans put in order, which leaves a third of the time.

    A process that dies before this statement has claimed nothing; after it, its rows are due
    again when their leases run out. Of two relays each takes the rows that the other has not locked.
    """
    dialect = POSTGRES
    bulk = queue.bulk
    # Only a compressed value can be much larger in memory than on its page.
    size = (
        f"CASE WHEN pg_column_compression({bulk}) IS NULL THEN pg_column_size({bulk})"
        f" ELSE octet_length({bulk}::text) END"
    )
    scans = []
    inside = "".join(f" AND {name} = scope.{name}" for name, _ in scoped)
    if scoped:
        columns = {"turn": "int", "room": "int", "dead_room": "int", **dict(scoped)}
        scans.append(f"""
            scope AS MATERIALIZED (SELECT * FROM {dialect.records(columns)})""")
    reading = _reading(order)
    for position, name in enumerate(order):
        due, key = SCANS[name]
        room = "%s" if literal is None else str(literal[position])
        within = ""
        if scoped:
            room = "scope.dead_room" if name == "dead" else "scope.room"
            within = " WHERE turn = scope.turn"
        room += "".join(f" - (SELECT count(*) FROM {other}_rows{within})" for other in order[:position])
        further = "" if len(order) == 1 else f", {reading.index(name)} AS scan, {size} AS size"
        scan = f"""
                SELECT id, leased_by, {key} AS due{further}
                FROM {table}
                WHERE {due.format(now=dialect.now)} AND {narrowed}{inside}
                ORDER BY {key}, id
                LIMIT {room}
                {dialect.lock_skipping}"""
        if scoped:
            scan = f"""
                SELECT found.*, scope.turn FROM scope CROSS JOIN LATERAL ({scan}
                ) AS found"""
        scans.append(f"""
            {name}_rows AS MATERIALIZED ({scan}
            )""")
    commit = "set_config('synchronous_commit', 'off', true)" if lazy_commit else "'on'"
    shared = ", ".join(f"e.{name}" for name in _SHARED)
    content = "".join(f", {_content(name, 'e', dialect)}" for name in queue.content)
    chosen, place = "pending_rows", "due"
    if len(order) > 1:
        chosen, place = "chosen", "turn, p.place" if scoped else "place"
        kept = ("id", "leased_by", "turn") if scoped else ("id", "leased_by")
        every = " UNION ALL ".join(f"SELECT * FROM {name}_rows" for name in order)
        # By way of arrays, since the planner takes an array for ten rows: it then looks each
        # id up in the primary key. Its guess for a LIMIT that it cannot read is a tenth of
        # all pending rows, for which it would read the whole table, every time.
        scans.append(f"""
            picked AS (
                SELECT *, row_number() OVER reading AS place, sum(size) OVER reading - size AS before
                FROM ({every}) AS due_rows
                WINDOW reading AS (ORDER BY {"turn, " if scoped else ""}scan, due, id ROWS UNBOUNDED PRECEDING)
            ),
            chosen AS (
                SELECT p.*
                FROM (
                    SELECT {", ".join(f"array_agg({name} ORDER BY place) AS {name}s" for name in kept)}
                    FROM picked WHERE before < %s
                ) AS lists, unnest({", ".join(f"{name}s" for name in kept)}) WITH ORDINALITY
                    AS p({", ".join(kept)}, place)
            )""")
    return f"""
        WITH {",".join(scans)},
        commit_mode AS MATERIALIZED (SELECT {commit})
        UPDATE {table} AS e
        SET attempts = e.attempts + 1, fence = e.fence + 1, leased_by = %s,
            lease_until = {dialect.after("%s")}
        FROM {chosen} AS p, commit_mode
        WHERE e.id = p.id
        RETURNING {shared},
            {dialect.epoch(f"({dialect.now} - coalesce(e.not_before, e.created_at))")},
            e.dead_at IS NOT NULL, {dialect.epoch(dialect.now)}, p.leased_by{content}, p.{place}"""


def _last(row: tuple[Any, ...]) -> Any:
    return row[-1]


def _content(name: str, alias: str, dialect: Dialect) -> str:
    """Return the expression that reads a content column: JSON as text, times as seconds since 1970."""
    column = f"{alias}.{name}" if alias else name
    if name in {"payload", "headers", "deliveries", "failures"}:
        return dialect.json_text(column)
    if name.endswith("_at") or name == "not_before":
        return dialect.epoch(column)
    return column


def next_due_seconds(
    queue: Queue,
    *,
    using: str,
    scope: Mapping[str, Any] = _NO_SCOPE,
    excluding: Mapping[str, Sequence[Any]] = _NO_SCOPE,
    spare_expired: bool = False,
) -> float | None:
    """
    Return the seconds until a row can be claimed, 0 when one can be now, or ``None``.

    That is when a row falls due, or when the lease of one that is due runs out: a relay
    that was killed is succeeded then, without waiting for a poll. Asked after a claim
    that found nothing more, it also sees what has fallen due since. Reads the first free
    entry of each scan, and at most `LEASED_SEEN` leased ones: nothing but those is before it.

    ``scope`` and ``spare_expired`` as in a claim; ``excluding``: no rows with one of these
    values in these columns.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    narrowed = _Narrowed.of(scope, spare_expired=spare_expired, connection=connection)
    given = {name: values for name, values in excluding.items() if values}
    left_out = "".join(
        f" AND {connection.ops.quote_name(name)} NOT IN ({', '.join(['%s'] * len(values))})"
        for name, values in given.items()
    )
    params = [*narrowed.params, *(dialect.param(value) for values in given.values() for value in values)]
    in_scope = "".join(f" AND {connection.ops.quote_name(name)} = %s" for name in scope) + left_out
    sql = _next_due(dialect, table_of(queue, connection), narrowed.sql + left_out, in_scope)
    seconds = [float(value) for value in fetch(connection, sql, params * 6, prepare=True)[0] if value is not None]
    return max(0.0, min(seconds)) if seconds else None


@statement
def _next_due(dialect: Dialect, table: str, free: str, in_scope: str) -> str:
    # Six ordered walks of the claim's own three indexes, each ended by its first free row or
    # by LEASED_SEEN: under 40 page hits with 5,000 waiting and 5,000 dead rows for tomorrow.
    moments = []
    for name, (condition, order) in SCANS.items():
        scan = f"status = '{name}'" + (" AND due_at IS NOT NULL" if name == "dead" else "")
        moments.append(f"(SELECT {order} FROM {table} WHERE {scan} AND {free} ORDER BY {order}, id LIMIT 1)")
        moments.append(f"""(SELECT min(lease_until) FROM (
            SELECT lease_until FROM {table} WHERE {condition.format(now=dialect.now)}{in_scope}
            ORDER BY {order}, id LIMIT {LEASED_SEEN}) AS {name}_rows WHERE lease_until > {dialect.now})""")
    return "SELECT " + ", ".join(f"{dialect.epoch(moment)} - {dialect.epoch(dialect.now)}" for moment in moments)
