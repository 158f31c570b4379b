"""
The lease engine: claim, renew, record, settle, release, and the verbs of operators.

All the SQL is here, for PostgreSQL and SQLite. What holds for every statement:

- The database's clock decides. Statements run at READ COMMITTED, compare with
  the statement's time (a volatile clock could not use an index) and assign the
  clock's time.
- A holder's write is guarded by id, fence, holder and a status that is not final,
  so a relay that overslept cannot overwrite its successor. Rows that a write did
  not reach are returned, never raised.
- Writes to several rows lock them in id order first, so relays, the purge and
  operators cannot deadlock; a claim skips what is locked, so it waits for nobody.
- Nothing stays open when a function here returns, unless the caller's own
  transaction was open when it began.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.apps import apps
from django.db import DatabaseError, DataError, IntegrityError, OperationalError, connections, transaction

from django_outbox import wake
from django_outbox.errors import clean_error
from django_outbox.retry import Schedule, park_seconds

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_outbox.models import Leasable

__all__ = [
    "Backlog",
    "Claimer",
    "Clock",
    "Done",
    "Fail",
    "Lease",
    "Lost",
    "NewRow",
    "Outcome",
    "Park",
    "Queue",
    "Report",
    "Retry",
    "Settled",
    "backlog",
    "discard",
    "holder_name",
    "insert_events",
    "new_id",
    "new_ids",
    "next_due_seconds",
    "purge",
    "record",
    "release",
    "rename_handler",
    "renew",
    "retry",
    "settle",
    "shift_clock",
]

logger = logging.getLogger("django_outbox.lease")

REFUSED_TEXT: Final = "The database refused this row's outcome; the relay's log says why."
LOST_HOLDER: Final = "lost"
"""Stands in ``leased_by`` of a released row whose last worker never settled it."""
CHUNK: Final = 500
"""Rows that one statement of an operator verb or a purge locks."""


# --- ids -------------------------------------------------------------------------------------------------------------

_id_lock = threading.Lock()
_last_tick = 0


def new_ids(count: int) -> list[UUID]:
    """
    Return new UUIDv7 values in ascending order.

    The layout and the sub-millisecond counter are those of RFC 9562, sections 5.7
    and 6.2 (method 3); the random 62 bits come from the operating system, so ids of
    two processes, forked ones included, do not meet. Within a process ids ascend even
    when its clock steps back.
    """
    global _last_tick  # noqa: PLW0603
    # 4096 ticks a millisecond: the 12 bits after the version are the time's fraction.
    with _id_lock:
        first = max(time.time_ns() * 4096 // 1_000_000, _last_tick + 1)
        _last_tick = first + count - 1
    noise = os.urandom(8 * count)
    ids = []
    for index in range(count):
        tick = first + index
        tail = int.from_bytes(noise[index * 8 : index * 8 + 8], "big") & 0x3FFF_FFFF_FFFF_FFFF
        ids.append(UUID(int=(tick >> 12) << 80 | 0x7 << 76 | (tick & 0xFFF) << 64 | 0x2 << 62 | tail))
    return ids


def new_id() -> UUID:
    """Return one new UUIDv7; see `new_ids`."""
    return new_ids(1)[0]


def holder_name() -> str:
    """Return a name for a holder of leases that no other process, past or present, has: host, pid and a nonce."""
    return f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(6)}"


# --- what the engine speaks of ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One table on the engine, and how its failures are spoken of."""

    name: str
    model_name: str
    content: tuple[str, ...]
    """Columns that a claim returns beyond the shared ones."""
    bulk: str
    """The column whose bytes bound a claim."""
    handlers: bool
    """Whether a row is owed to several handlers (``deliveries`` and ``failures`` columns)."""
    announcement: str
    """The type of the event that speaks of a row's death."""

    @property
    def model(self) -> type[Leasable]:
        """The model behind the queue."""
        return apps.get_model("django_outbox", self.model_name)


@dataclass(frozen=True, slots=True)
class Clock:
    """The database's clock, read once and carried on by this process's monotonic clock."""

    epoch: float
    monotonic: float

    def now(self) -> float:
        """Return the database's time as seconds since 1970."""
        return self.epoch + (time.monotonic() - self.monotonic)

    def text(self) -> str:
        """Return the database's time as it stands in ``deliveries``: ISO 8601, UTC, milliseconds."""
        return datetime.fromtimestamp(self.now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """
    The right to work one row until ``deadline``, a reading of this process's monotonic clock.

    The deadline is counted from before the claim was sent, so it never outlasts the
    row's ``lease_until`` on the database.
    """

    queue: Queue
    id: UUID
    fence: int
    holder: str
    attempts: int
    status: str
    age: float
    suspect: bool
    """Its last holder never settled it."""
    lost_leases: int
    quiet: bool
    was_dead: bool
    clock: Clock
    deadline: float
    content: dict[str, Any]

    @property
    def age_now(self) -> float:
        """Seconds since the row was created, or since a delayed row was first due."""
        return self.age + (self.clock.now() - self.clock.epoch)

    def current(self) -> bool:
        """Return whether the lease still runs by this process's own clock."""
        return time.monotonic() < self.deadline


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is owed any more."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed; ``delay`` is the least wait that was asked for, in seconds."""

    delay: float | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """Nothing failed, but something is owed to code this relay does not have; ``spent``: the time for that is over."""

    spent: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """What is left was refused for good."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What is left has killed its process too often to be started again."""


Outcome = Done | Retry | Park | Fail | Lost
"""The closed set of ways in which a delivery ends; `_Record.of` has the one ``match`` over it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A lease with its outcome; ``failures`` replaces the column, ``None`` leaves it."""

    lease: Lease
    outcome: Outcome
    delivered: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """One event to insert; JSON columns as text, already validated. ``status`` is pending or done."""

    id: UUID
    type: str
    payload: str
    deliveries: str
    headers: str = "{}"
    occurred_at: datetime | None = None
    aggregate_type: str = ""
    aggregate_id: str = ""
    organization_id: str = ""
    request_id: str = ""
    causation_id: UUID | None = None
    quiet: bool = False
    delay: float | None = None
    given_id: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What an operator verb did: rows changed, rows a relay holds under a live lease, rows in another status."""

    changed: int = 0
    leased: int = 0
    skipped: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(self.changed + other.changed, self.leased + other.leased, self.skipped + other.skipped)


# --- the two databases -----------------------------------------------------------------------------------------------

_offset_seconds = 0.0


@contextmanager
def shift_clock(seconds: float) -> Iterator[None]:
    """Add to the database's time, as every statement of the engine in this process sees it. For tests."""
    global _offset_seconds  # noqa: PLW0603
    before = _offset_seconds
    _offset_seconds = before + seconds
    try:
        yield
    finally:
        _offset_seconds = before


class _Postgres:
    """How PostgreSQL writes what the two databases write differently."""

    data_refused = (DataError, IntegrityError)

    @property
    def now(self) -> str:
        """The statement's time: stable, so an index condition can use it."""
        return self._shifted("statement_timestamp()")

    @property
    def clock(self) -> str:
        return self._shifted("clock_timestamp()")

    def _shifted(self, clock: str) -> str:
        return f"({clock} + interval '{_offset_seconds!r} seconds')" if _offset_seconds else clock

    def after(self, seconds: str) -> str:
        return f"({self.clock} + ({seconds}) * interval '1 second')"

    def epoch(self, moment: str) -> str:
        return f"extract(epoch from {moment})::float8"

    def records(self, columns: Mapping[str, str]) -> str:
        return f"jsonb_to_recordset(%s::jsonb) AS o({', '.join(f'{name} {kind}' for name, kind in columns.items())})"

    def merged(self, left: str, right: str) -> str:
        return f"CASE WHEN {right} IS NULL THEN {left} ELSE {left} || {right} END"

    def has_key(self, column: str) -> str:
        return f"jsonb_exists({column}, %s)"

    def id_list(self) -> str:
        return "(SELECT value::uuid FROM jsonb_array_elements_text(%s::jsonb))"

    def json_value(self, text: str) -> str:
        return f"{text}::jsonb"

    def json_text(self, column: str) -> str:
        return f"{column}::text"

    lock = "FOR NO KEY UPDATE"
    lock_skipping = "FOR NO KEY UPDATE SKIP LOCKED"

    def id_param(self, value: UUID) -> str:
        return str(value)

    def id_value(self, value: Any) -> UUID:
        return value if isinstance(value, UUID) else UUID(value)


class _SQLite:
    """How SQLite does. Its times are text in UTC, ``YYYY-MM-DD HH:MM:SS.mmm``, which sorts as it should."""

    data_refused = (DataError, IntegrityError)

    @property
    def now(self) -> str:
        return self.clock

    @property
    def clock(self) -> str:
        shift = f", '{_offset_seconds:+.3f} seconds'" if _offset_seconds else ""
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'{shift})"

    def after(self, seconds: str) -> str:
        # A NULL modifier gives NULL, as PostgreSQL's arithmetic does.
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', ({_offset_seconds!r} + ({seconds})) || ' seconds')"

    def epoch(self, moment: str) -> str:
        # julianday() is exact to 0.1 ms here; unixepoch() has fractions from SQLite 3.42 on only.
        return f"((julianday({moment}) - 2440587.5) * 86400.0)"

    def records(self, columns: Mapping[str, str]) -> str:
        fields = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in columns)
        return f"(SELECT {fields} FROM json_each(%s)) AS o"

    def merged(self, left: str, right: str) -> str:
        return f"CASE WHEN {right} IS NULL THEN {left} ELSE json_patch({left}, {right}) END"

    def has_key(self, column: str) -> str:
        return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE key = %s)"

    def id_list(self) -> str:
        return "(SELECT value FROM json_each(%s))"

    def json_value(self, text: str) -> str:
        return text

    def json_text(self, column: str) -> str:
        return column

    # One writer at a time: the write lock of the transaction stands for every row lock.
    lock = ""
    lock_skipping = ""

    def id_param(self, value: UUID) -> str:
        return value.hex

    def id_value(self, value: Any) -> UUID:
        return value if isinstance(value, UUID) else UUID(value)


_Dialect = _Postgres | _SQLite
_POSTGRES: Final = _Postgres()
_SQLITE: Final = _SQLite()


def _dialect(connection: BaseDatabaseWrapper) -> _Dialect:
    return _SQLITE if connection.vendor == "sqlite" else _POSTGRES


def _table(queue: Queue, connection: BaseDatabaseWrapper) -> str:
    return connection.ops.quote_name(queue.model._meta.db_table)


@contextmanager
def _transaction(connection: BaseDatabaseWrapper, table: str) -> Iterator[None]:
    """
    Open a transaction (a savepoint inside the caller's), on SQLite with the write lock from its first moment.

    A SQLite transaction that reads first and writes later fails at once when another
    writer came between; ``transaction_mode: IMMEDIATE`` avoids it, this also without it.
    """
    with transaction.atomic(using=connection.alias):
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute(f"UPDATE {table} SET fence = fence WHERE 0")
        yield


# --- the event insert ------------------------------------------------------------------------------------------------

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


def insert_events(rows: Sequence[NewRow], *, using: str) -> list[UUID]:
    """
    Insert event rows in the caller's transaction; return the ids that were written.

    A row owed to nobody is done at once. A caller-given id that exists already
    writes nothing. One statement on either database.
    """
    if not rows:
        return []
    connection = connections[using]
    dialect = _dialect(connection)
    table = connection.ops.quote_name(apps.get_model("django_outbox", "OutboxEvent")._meta.db_table)
    given = any(row.given_id for row in rows)
    source, params = _event_source(rows, dialect)
    # A delayed row waits; one that nobody handles is done; `deliveries` says which.
    owed = "r.deliveries <> '{}'"
    sql = f"""
        INSERT INTO {table} (id, type, payload, deliveries, headers, occurred_at, aggregate_type, aggregate_id,
            organization_id, request_id, causation_id, quiet, failures, created_at, status, due_at, not_before,
            finished_at)
        SELECT r.id, r.type, r.payload, r.deliveries, r.headers, coalesce(r.occurred_at, {dialect.clock}),
            r.aggregate_type, r.aggregate_id, r.organization_id, r.request_id, r.causation_id, r.quiet, '{{}}',
            {dialect.clock},
            CASE WHEN NOT ({owed}) THEN 'done' WHEN r.delay IS NULL THEN 'pending' ELSE 'waiting' END,
            CASE WHEN {owed} THEN {dialect.after("r.delay")} END,
            {dialect.after("r.delay")},
            CASE WHEN NOT ({owed}) THEN {dialect.clock} END
        FROM {source}
        {"WHERE true ON CONFLICT (id) DO NOTHING RETURNING id" if given else ""}"""
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        if given:
            return [dialect.id_value(row[0]) for row in cursor.fetchall()]
    return [row.id for row in rows]


def _event_source(rows: Sequence[NewRow], dialect: _Dialect) -> tuple[str, list[Any]]:
    """Return a FROM item named ``r`` with the rows in it, and its parameters."""
    if isinstance(dialect, _SQLite):
        values = [[_sqlite_value(getattr(row, name)) for name, _ in _EVENT_COLUMNS] for row in rows]
        fields = ", ".join(
            f"json_extract(value, '$[{index}]') AS {name}" for index, (name, _) in enumerate(_EVENT_COLUMNS)
        )
        return f"(SELECT {fields} FROM json_each(%s)) AS r", [json.dumps(values, ensure_ascii=False)]
    # What all rows share goes in once as a scalar, only what differs as arrays.
    arrays: list[tuple[str, str]] = []
    scalars: list[str] = []
    array_params: list[Any] = []
    scalar_params: list[Any] = []
    for name, kind in _EVENT_COLUMNS:
        column = [getattr(row, name) for row in rows]
        first = column[0]
        if name != "id" and (len(rows) == 1 or column.count(first) == len(column)):
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


# --- claim -----------------------------------------------------------------------------------------------------------

_SHARED: Final = ("id", "fence", "attempts", "status", "lost_leases", "quiet")

_SCANS: Final = {
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

    def claim(self, limit: int, *, lease_seconds: float, max_bytes: int = 8 * 2**20) -> list[Lease]:
        """
        Lease up to ``limit`` due rows, and no more than ``max_bytes`` of content (but always one row).

        A row is due when its status says so and no live lease is on it. The attempt is
        counted here, not when it fails: a row that kills its relay would otherwise come
        back for ever without spending its schedule.
        """
        connection = connections[self.using]
        turn, self._turn = self._turn, self._turn + 1
        first, second = ("pending", "waiting") if turn % 2 == 0 else ("waiting", "pending")
        dead = limit // 4 if limit >= 4 else int(turn % 4 == 3)
        # Counted from before the statement is sent: it may only ever end too early.
        started = time.monotonic()
        find = self._claim_sqlite if connection.vendor == "sqlite" else self._claim_postgres
        rows = find(connection, limit, dead, (first, second), lease_seconds, max_bytes)
        if not rows and not dead:
            # Nobody else wants the place; an empty claim says that nothing is due.
            dead = 1
            rows = find(connection, limit, dead, (first, second), lease_seconds, max_bytes)
        extra = self.queue.content
        leases = []
        for row in rows:
            id_, fence, attempts, status, lost, quiet, age, was_dead, epoch, last_holder = row[:10]
            leases.append(
                Lease(
                    queue=self.queue,
                    id=id_ if isinstance(id_, UUID) else UUID(id_),
                    fence=fence,
                    holder=self.holder,
                    attempts=attempts,
                    status=status,
                    age=age,
                    suspect=bool(last_holder),
                    lost_leases=lost,
                    quiet=bool(quiet),
                    was_dead=bool(was_dead),
                    clock=Clock(epoch, started),
                    deadline=started + lease_seconds,
                    content=dict(zip(extra, row[10:], strict=True)),
                )
            )
        # The database measures bytes in its own way; half the bound is near enough to it.
        self.more = (
            len(leases) >= limit
            or sum(lease.status == "dead" for lease in leases) >= dead > 0
            or sum(len(lease.content[self.queue.bulk]) for lease in leases) >= max_bytes // 2
        )
        return leases

    def _claim_postgres(
        self,
        connection: BaseDatabaseWrapper,
        limit: int,
        dead: int,
        order: tuple[str, str],
        lease_seconds: float,
        max_bytes: int,
    ) -> list[tuple[Any, ...]]:
        """
        Claim in one statement.

        Every scan is an ordered walk of its own partial index that stops at its limit, so
        the cost depends on neither finished rows nor rows due later. The scans are
        MATERIALIZED: inlined, the planner may run a locking subquery twice and claim more
        than its limit. The update touches no indexed column, so it is a HOT update.
        """
        sql_dialect = _POSTGRES
        table = _table(self.queue, connection)
        bulk = self.queue.bulk
        # Only a compressed value can be much larger in memory than on its page.
        size = (
            f"CASE WHEN pg_column_compression({bulk}) IS NULL THEN pg_column_size({bulk})"
            f" ELSE octet_length({bulk}::text) END"
        )
        scans = []
        for position, (name, taken) in enumerate((("dead", ()), (order[0], ("dead",)), (order[1], ("dead", order[0])))):
            due, key = _SCANS[name]
            room = "%s" + "".join(f" - (SELECT count(*) FROM {other}_rows)" for other in taken)
            scans.append(f"""
                {name}_rows AS MATERIALIZED (
                    SELECT id, leased_by, {(position - 1) % 3} AS scan, {key} AS due, {size} AS size
                    FROM {table}
                    WHERE {due.format(now=sql_dialect.now)}
                      AND (lease_until IS NULL OR lease_until <= {sql_dialect.now})
                    ORDER BY {key}, id
                    LIMIT {room}
                    {sql_dialect.lock_skipping}
                )""")
        # A lost claim is a redelivery and never a loss, so its commit need not wait for the
        # disk. Inside a caller's transaction (a test's) that would weaken more than the claim.
        commit = "'on'" if connection.in_atomic_block else "set_config('synchronous_commit', 'off', true)"
        shared = ", ".join(f"e.{name}" for name in _SHARED)
        content = "".join(f", {_content(name, 'e', sql_dialect)}" for name in self.queue.content)
        sql = f"""
            WITH {",".join(scans)},
            picked AS (
                SELECT *, row_number() OVER reading AS place, sum(size) OVER reading - size AS before
                FROM (SELECT * FROM dead_rows UNION ALL SELECT * FROM pending_rows
                      UNION ALL SELECT * FROM waiting_rows) AS due_rows
                WINDOW reading AS (ORDER BY scan, due, id ROWS UNBOUNDED PRECEDING)
            ),
            commit_mode AS MATERIALIZED (SELECT {commit})
            UPDATE {table} AS e
            SET attempts = e.attempts + 1, fence = e.fence + 1, leased_by = %s,
                lease_until = {sql_dialect.after("%s")}
            FROM picked AS p, commit_mode
            WHERE e.id = p.id AND p.before < %s
            RETURNING {shared},
                {sql_dialect.epoch(f"({sql_dialect.now} - coalesce(e.not_before, e.created_at))")},
                e.dead_at IS NOT NULL, {sql_dialect.epoch(sql_dialect.now)}, p.leased_by{content}, p.place"""
        with connection.cursor() as cursor:
            cursor.execute(sql, [dead, limit, limit, self.holder, lease_seconds, max_bytes])
            rows = cursor.fetchall()
        rows.sort(key=_last)
        return [row[:-1] for row in rows]

    def _claim_sqlite(
        self,
        connection: BaseDatabaseWrapper,
        limit: int,
        dead: int,
        order: tuple[str, str],
        lease_seconds: float,
        max_bytes: int,
    ) -> list[tuple[Any, ...]]:
        """Claim under the write lock, which is taken only when a read finds something due."""
        dialect = _SQLITE
        table = _table(self.queue, connection)
        free = f"(lease_until IS NULL OR lease_until <= {dialect.now})"
        due = {name: condition.format(now=dialect.now) for name, (condition, _) in _SCANS.items()}
        probe = " OR ".join(
            f"EXISTS (SELECT 1 FROM {table} WHERE {condition} AND {free})" for condition in due.values()
        )
        shared = ", ".join(_SHARED)
        content = "".join(f", {_content(name, '', dialect)}" for name in self.queue.content)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {probe}", [])
            if not cursor.fetchone()[0]:
                return []
        picked: list[tuple[Any, ...]] = []
        room = limit
        with _transaction(connection, table), connection.cursor() as cursor:
            scans: dict[str, list[tuple[Any, ...]]] = {}
            for name in ("dead", *order):
                cursor.execute(
                    f"""SELECT {shared}, {dialect.epoch(dialect.now)} - {dialect.epoch("coalesce(not_before, created_at)")},
                            dead_at IS NOT NULL, {dialect.epoch(dialect.now)}, leased_by{content},
                            length({self.queue.bulk})
                        FROM {table} WHERE {due[name]} AND {free}
                        ORDER BY {_SCANS[name][1]}, id LIMIT %s""",
                    [dead if name == "dead" else room],
                )
                scans[name] = cursor.fetchall()
                room -= len(scans[name])
            size = 0
            for row in (*scans[order[0]], *scans[order[1]], *scans["dead"]):
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


def _last(row: tuple[Any, ...]) -> Any:
    return row[-1]


def _content(name: str, alias: str, dialect: _Dialect) -> str:
    """Return the expression that reads a content column: JSON as text, times as seconds since 1970."""
    column = f"{alias}.{name}" if alias else name
    if name in {"payload", "headers", "deliveries", "failures"}:
        return dialect.json_text(column)
    if name.endswith("_at"):
        return dialect.epoch(column)
    return column


# --- what a holder writes --------------------------------------------------------------------------------------------

_GUARD: Final = "e.id = o.id AND e.fence = o.fence AND e.leased_by = %s AND e.status NOT IN ('done', 'failed')"


def _guarded_update(
    connection: BaseDatabaseWrapper,
    queue: Queue,
    columns: Mapping[str, str],
    records: Sequence[Mapping[str, Any]],
    holder: str,
    assignments: str,
    params: Sequence[Any] = (),
    *,
    lazy_commit: bool = False,
    skip_locked: bool = False,
) -> set[UUID]:
    """
    Update the rows of ``records`` that ``holder`` still holds, in one statement; return their ids.

    ``columns`` names the record's fields beyond id and fence, with their PostgreSQL
    types; ``assignments`` refers to the row as ``e`` and to its record as ``o``. The
    primary key serves the join, in id order.
    """
    dialect = _dialect(connection)
    table = _table(queue, connection)
    source = dialect.records({"id": "uuid", "fence": "bigint", **columns})
    document = json.dumps(records, separators=(",", ":"))
    if isinstance(dialect, _SQLite):
        sql = f"UPDATE {table} AS e SET {assignments} FROM {source} WHERE {_GUARD} RETURNING id"
        arguments = [*params, document, holder]
    else:
        # A single row cannot deadlock; several are locked in id order before any is written.
        skip = "SKIP LOCKED" if skip_locked else ""
        off = lazy_commit and not connection.in_atomic_block
        commit = "set_config('synchronous_commit', 'off', true)" if off else "'on'"
        sql = f"""
            WITH o AS MATERIALIZED (SELECT * FROM {source}),
            held AS MATERIALIZED (
                SELECT e.id FROM {table} AS e JOIN o ON {_GUARD} ORDER BY e.id {dialect.lock} OF e {skip}
            ),
            commit_mode AS MATERIALIZED (SELECT {commit})
            UPDATE {table} AS e SET {assignments}
            FROM o, held, commit_mode
            WHERE held.id = o.id AND e.id = held.id
            RETURNING e.id"""
        arguments = [document, holder, *params]
    with connection.cursor() as cursor:
        cursor.execute(sql, arguments)
        return {dialect.id_value(row[0]) for row in cursor.fetchall()}


def _key(lease: Lease, connection: BaseDatabaseWrapper) -> dict[str, Any]:
    return {"id": _dialect(connection).id_param(lease.id), "fence": lease.fence}


def renew(leases: Mapping[Lease, Mapping[str, str]], *, lease_seconds: float, using: str) -> list[Lease]:
    """
    Extend the leases of one queue from now, each with the deliveries made so far; return those that are lost.

    A renewed lease's ``deadline`` moves with it. A lost row belongs to another, or is
    settled already: no further handler of it may start. A row that somebody keeps locked
    is neither renewed nor lost: the others must not lose their leases waiting for it.
    """
    if not leases:
        return []
    connection = connections[using]
    dialect = _dialect(connection)
    first = next(iter(leases))
    started = time.monotonic()
    with_deliveries = first.queue.handlers and any(leases.values())
    columns = {"delivered": "jsonb"} if with_deliveries else {}
    assignments = f"lease_until = {dialect.after('%s')}"
    if with_deliveries:
        assignments += f", deliveries = {dialect.merged('e.deliveries', 'o.delivered')}"
    records = [
        _key(lease, connection) | ({"delivered": dict(delivered) or None} if with_deliveries else {})
        for lease, delivered in leases.items()
    ]
    kept = _guarded_update(
        connection,
        first.queue,
        columns,
        records,
        first.holder,
        assignments,
        [lease_seconds],
        lazy_commit=True,
        skip_locked=True,
    )
    missing = []
    for lease in leases:
        if lease.id in kept:
            lease.deadline = started + lease_seconds
        else:
            missing.append(lease)
    held = _still_held(connection, missing) if missing else set()
    return [lease for lease in missing if lease.id not in held]


def _still_held(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> set[UUID]:
    """Return the ids of the rows, among these of one queue and holder, that are still theirs, locked or not."""
    dialect = _dialect(connection)
    source = dialect.records({"id": "uuid", "fence": "bigint"})
    # The primary key serves the join.
    sql = f"SELECT e.id FROM {_table(leases[0].queue, connection)} AS e JOIN {source} ON {_GUARD}"
    document = json.dumps([_key(lease, connection) for lease in leases])
    with connection.cursor() as cursor:
        cursor.execute(sql, [document, leases[0].holder])
        return {dialect.id_value(row[0]) for row in cursor.fetchall()}


def record(
    lease: Lease,
    *,
    using: str,
    delivered: Mapping[str, str] | None = None,
    failures: Mapping[str, Any] | None = None,
    lost_leases: int | None = None,
) -> bool:
    """
    Write part of a delivery under way; return whether the lease was still held.

    Joins the caller's transaction where one is open: that is how ``atomic=True``
    commits a handler's work and the record of it together.
    """
    connection = connections[using]
    dialect = _dialect(connection)
    assignments = (
        f"deliveries = {dialect.merged('e.deliveries', 'o.delivered')}, "
        "failures = coalesce(o.failures, e.failures), lost_leases = coalesce(o.lost_leases, e.lost_leases)"
    )
    entry = _key(lease, connection) | {
        "delivered": delivered or None,
        "failures": None if failures is None else dict(failures),
        "lost_leases": lost_leases,
    }
    columns = {"delivered": "jsonb", "failures": "jsonb", "lost_leases": "int"}
    return bool(_guarded_update(connection, lease.queue, columns, [entry], lease.holder, assignments))


def release(leases: Sequence[Lease], *, using: str) -> int:
    """Give back rows that were not started, their attempt with them; return how many were still held."""
    if not leases:
        return 0
    connection = connections[using]
    return len(
        _guarded_update(
            connection,
            leases[0].queue,
            {"suspect": "int"},
            [_key(lease, connection) | {"suspect": int(lease.suspect)} for lease in leases],
            leases[0].holder,
            # A holder without a lease marks a suspect: nobody has found out yet what it did to its last one.
            f"attempts = e.attempts - 1, lease_until = NULL, leased_by = CASE WHEN o.suspect = 1 THEN '{LOST_HOLDER}'"
            " ELSE '' END",
            lazy_commit=True,
        )
    )


# --- settle ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """An outcome as columns."""

    settled: Settled
    status: str
    delay: float | None
    refund: int
    error: str
    failures: Mapping[str, Any] | None

    @classmethod
    def of(cls, settled: Settled, schedule: Schedule) -> _Record:
        """Decide a row's status and next time from how its delivery ended: the one place that does."""
        lease, error = settled.lease, settled.error
        dead = lease.status == "dead"
        delay: float | None = None
        refund = 0
        match settled.outcome:
            case Done():
                status, error = "done", ""
            case Retry(requested):
                dead, delay = schedule.after_failure(lease.attempts, dead=dead, age=lease.age_now, requested=requested)
                status = "dead" if dead else "waiting"
            case Park(spent):
                # Nothing was tried, so nothing is charged. A dead row that parks stays dead.
                refund = 1
                dead = dead or spent
                status = "dead" if dead else "waiting"
                delay = schedule.replay_delay(age=lease.age_now) if dead else park_seconds(lease.age_now)
            case Fail():
                status = "failed"
            case Lost():
                status = "dead"
        return cls(settled, status, delay, refund, error, settled.failures)

    @property
    def first_death(self) -> bool:
        return self.status in {"dead", "failed"} and not self.settled.lease.was_dead

    def entry(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        lease = self.settled.lease
        return {
            "id": _dialect(connection).id_param(lease.id),
            "fence": lease.fence,
            "status": self.status,
            "delay": self.delay,
            "refund": self.refund,
            "delivered": self.settled.delivered or None,
            "failures": self.failures,
            "error": self.error,
        }


Announce = Callable[[Settled, str], NewRow]
"""Makes the event that speaks of a row which became dead or failed (the second argument says which)."""


def settle(
    batch: Sequence[Settled], *, schedule: Schedule, using: str, announce: Announce | None = None, again: bool = False
) -> dict[UUID, str]:
    """
    End the leases of one queue with their outcomes, each at most once; return the status written for each id.

    Only the holder of a row's current fence can change it; a row that is missing from
    the answer was not written. The first time a row becomes dead or failed, and only if
    this call wrote that, the announcement is inserted in the same transaction.
    ``again``: an earlier call's reply was lost, so a row that bears this very outcome
    counts as written. A batch that the database refuses for its data is split until the
    bad row stands alone; that row is settled with a fixed error text. Errors of the
    connection are the caller's to try again.
    """
    if not batch:
        return {}
    connection = connections[using]
    records = [_Record.of(settled, schedule) for settled in batch]
    written = _settle(connection, records, announce)
    missed = [item for item in records if item.settled.lease.id not in written]
    if again and missed:
        written |= _settled_before(connection, missed)
    return {item.settled.lease.id: item.status for item in records if item.settled.lease.id in written}


def _settle(connection: BaseDatabaseWrapper, records: Sequence[_Record], announce: Announce | None) -> set[UUID]:
    try:
        return _write(connection, records, announce)
    except DatabaseError as error:
        if not _is_refusal(error, connection):
            raise
        if len(records) > 1:
            middle = len(records) // 2
            return _settle(connection, records[:middle], announce) | _settle(connection, records[middle:], announce)
        lease = records[0].settled.lease
        logger.error(
            "outcome refused by the database queue=%s id=%s error=%s", lease.queue.name, lease.id, clean_error(error)
        )
    refused = records[0]
    refused.error, refused.failures = REFUSED_TEXT, None
    try:
        return _write(connection, [refused], announce)
    except DatabaseError as error:
        if not _is_refusal(error, connection):
            raise
        # Nothing can be written to this row. Its lease runs out, and its neighbours do not wait for it.
        logger.critical("row cannot be settled queue=%s id=%s error=%s", lease.queue.name, lease.id, clean_error(error))
        return set()


def _is_refusal(error: DatabaseError, connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database refused the data, as it would again; a trigger's RAISE EXCEPTION counts."""
    refused = isinstance(error, _dialect(connection).data_refused)
    return refused or getattr(error.__cause__, "sqlstate", None) == "P0001"


def _write(connection: BaseDatabaseWrapper, records: Sequence[_Record], announce: Announce | None) -> set[UUID]:
    queue = records[0].settled.lease.queue
    deaths = [item for item in records if item.first_death and not item.settled.lease.quiet] if announce else []
    if not deaths and not connection.in_atomic_block:
        return _write_statement(connection, queue, records)
    with transaction.atomic(using=connection.alias):
        written = _write_statement(connection, queue, records)
        for item in deaths:
            if item.settled.lease.id in written and announce is not None:
                _announce(connection, item, announce)
    return written


def _announce(connection: BaseDatabaseWrapper, item: _Record, announce: Announce) -> None:
    # Speaking of a death must never prevent the death from being recorded.
    try:
        with transaction.atomic(using=connection.alias):
            insert_events([announce(item.settled, item.status)], using=connection.alias)
    except OperationalError:
        raise  # the connection's trouble, not the announcement's: the whole settle is tried again
    except DatabaseError as error:
        lease = item.settled.lease
        logger.error("announcement not written queue=%s id=%s error=%s", lease.queue.name, lease.id, clean_error(error))


def _write_statement(connection: BaseDatabaseWrapper, queue: Queue, records: Sequence[_Record]) -> set[UUID]:
    dialect = _dialect(connection)
    columns = {"status": "text", "delay": "float8", "refund": "int", "error": "text"}
    assignments = f"""
        status = o.status, attempts = e.attempts - o.refund, due_at = {dialect.after("o.delay")},
        lease_until = NULL, leased_by = '', lost_leases = 0, last_error = o.error,
        dead_at = CASE WHEN o.status = 'dead' THEN coalesce(e.dead_at, {dialect.clock}) ELSE e.dead_at END,
        finished_at = CASE WHEN o.status IN ('done', 'failed') THEN {dialect.clock} END"""
    if queue.handlers:
        columns |= {"delivered": "jsonb", "failures": "jsonb"}
        assignments += f""",
        deliveries = {dialect.merged("e.deliveries", "o.delivered")},
        failures = coalesce(o.failures, e.failures)"""
    return _guarded_update(
        connection,
        queue,
        columns,
        [item.entry(connection) for item in records],
        records[0].settled.lease.holder,
        assignments,
    )


def _settled_before(connection: BaseDatabaseWrapper, records: Sequence[_Record]) -> set[UUID]:
    """
    Return the ids whose rows already bear these outcomes.

    A fence belongs to one claim, so a row with our fence, no holder and the status we
    meant to write was settled by us: the statement went through, its reply did not.
    """
    dialect = _dialect(connection)
    queue = records[0].settled.lease.queue
    source = dialect.records({"id": "uuid", "fence": "bigint", "status": "text"})
    sql = f"""
        SELECT e.id FROM {_table(queue, connection)} AS e JOIN {source}
        ON e.id = o.id AND e.fence = o.fence AND e.status = o.status AND e.leased_by = ''"""
    document = json.dumps([_key(item.settled.lease, connection) | {"status": item.status} for item in records])
    with connection.cursor() as cursor:
        cursor.execute(sql, [document])
        return {dialect.id_value(row[0]) for row in cursor.fetchall()}


# --- operators -------------------------------------------------------------------------------------------------------

RETRYABLE: Final = ("dead", "failed", "waiting")
DISCARDABLE: Final = ("dead", "waiting", "pending")


def retry(
    queue: Queue,
    *,
    using: str,
    ids: Iterable[UUID] | None = None,
    status: Iterable[str] = RETRYABLE,
    type: str | None = None,  # noqa: A002
    handler: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """
    Give rows a new life, due now: attempts, death, marks and rejections are cleared, the fence is kept.

    Without ``ids``, every row that the filters match; ``limit`` takes the oldest of
    each status. ``handler`` takes rows that are owed to it. ``status`` is what the
    caller saw: a row that has another one by now is skipped, as is one under a live
    lease; both are counted. A discarded delivery stays discarded, so a row whose
    deliveries were all discarded is skipped too.
    """

    def revive(row: dict[str, Any]) -> dict[str, Any] | None:
        failures = {
            name: {key: value for key, value in entry.items() if key not in {"rejected", "lost", "marks", "parked_at"}}
            for name, entry in row["failures"].items()
        }
        owed = _owed(row["deliveries"], failures)
        if queue.handlers and not owed and row["status"] == "failed":
            return None
        return {"status": "waiting" if owed or not queue.handlers else "done", "failures": failures, "revive": 1}

    allowed = tuple(name for name in status if name in RETRYABLE)
    return _operate(queue, revive, using, ids, allowed, type, handler, limit, progress)


def discard(
    queue: Queue,
    *,
    using: str,
    ids: Iterable[UUID] | None = None,
    status: Iterable[str] = DISCARDABLE,
    type: str | None = None,  # noqa: A002
    handler: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """
    Close rows for good (``failed``), or with ``handler`` only that handler's delivery of them.

    After a handler's delivery was closed the row's status follows from what is left:
    nothing owed is done, only rejections is failed, otherwise it stays. Skips and
    counts as `retry` does. Nothing is announced: an operator knows.
    """

    def close(row: dict[str, Any]) -> dict[str, Any]:
        failures = dict(row["failures"])
        owed = _owed(row["deliveries"], failures)
        for name in [handler] if handler is not None else owed:
            failures[name] = failures.get(name, {}) | {"discarded": True}
        left = _owed(row["deliveries"], failures)
        if handler is None:
            new = "failed"
        elif not left:
            new = "done"
        elif all(failures.get(name, {}).get("rejected") for name in left):
            new = "failed"
        else:
            new = row["status"]
        return {"status": new, "failures": failures, "revive": 0}

    def closing(row: dict[str, Any]) -> dict[str, Any] | None:
        if handler is not None and handler not in _owed(row["deliveries"], row["failures"]):
            return None
        return close(row)

    allowed = tuple(name for name in status if name in (*DISCARDABLE, *(("failed",) if handler else ())))
    return _operate(queue, closing, using, ids, allowed, type, handler, limit, progress)


def rename_handler(
    queue: Queue,
    old: str,
    new: str,
    *,
    using: str,
    ids: Iterable[UUID] | None = None,
    status: Iterable[str] = (*RETRYABLE, "pending"),
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Re-point deliveries owed to the handler name ``old`` at ``new``, and make their rows due now."""

    def rename(row: dict[str, Any]) -> dict[str, Any] | None:
        if old not in _owed(row["deliveries"], row["failures"]):
            return None
        deliveries = {name: when for name, when in row["deliveries"].items() if name != old}
        deliveries.setdefault(new, None)
        failures = {name: entry for name, entry in row["failures"].items() if name != old}
        owed = _owed(deliveries, failures)
        return {"status": "waiting" if owed else "done", "deliveries": deliveries, "failures": failures, "revive": 1}

    allowed = tuple(name for name in status if name in (*RETRYABLE, "pending"))
    return _operate(queue, rename, using, ids, allowed, None, old, limit, progress)


def _owed(deliveries: Mapping[str, Any], failures: Mapping[str, Any]) -> list[str]:
    return [name for name, when in deliveries.items() if when is None and not failures.get(name, {}).get("discarded")]


def _operate(
    queue: Queue,
    change: Callable[[dict[str, Any]], dict[str, Any] | None],
    using: str,
    ids: Iterable[UUID] | None,
    status: tuple[str, ...],
    type_: str | None,
    handler: str | None,
    limit: int | None,
    progress: Callable[[int], None] | None,
) -> Report:
    """Apply ``change`` to rows in chunks, each in a transaction of its own, and wake the relays."""
    report = Report()
    if not status:
        return report if ids is None else Report(skipped=len(set(ids)))
    chosen = list(dict.fromkeys(ids)) if ids is not None else _matching(queue, using, status, type_, handler, limit)
    if limit is not None:
        chosen = chosen[:limit]
    for start in range(0, len(chosen), CHUNK):
        # Locked in id order, whatever the order in which they were found.
        chunk = sorted(chosen[start : start + CHUNK])
        report += _operate_chunk(queue, change, using, chunk, status, type_, handler)
        if progress is not None:
            progress(min(start + CHUNK, len(chosen)))
    if report.changed:
        wake.notify_on_commit(using)
    return report


_MOMENT: Final = {
    # status → the column by which its index orders it
    "pending": "created_at",
    "waiting": "due_at",
    "dead": "dead_at",
    "failed": "finished_at",
    "done": "finished_at",
}


def _matching(
    queue: Queue, using: str, status: tuple[str, ...], type_: str | None, handler: str | None, limit: int | None
) -> list[UUID]:
    """
    Return the ids of rows to operate on, as they stand now.

    All of them before any is changed: a retried row stays among the waiting ones, at
    a later time, and a walk that went on meanwhile would meet it again and again.
    """
    connection = connections[using]
    dialect = _dialect(connection)
    narrowed, params = _narrowed(queue, dialect, type_, handler)
    found: list[UUID] = []
    with connection.cursor() as cursor:
        for name in dict.fromkeys(status):
            # One scan per status, oldest first, on the partial index of that status.
            sql = f"SELECT id FROM {_table(queue, connection)} WHERE status = '{name}'{narrowed} ORDER BY {_MOMENT[name]}, id"
            if limit is None:
                cursor.execute(sql, params)
            else:
                cursor.execute(f"{sql} LIMIT %s", [*params, limit])
            found += [dialect.id_value(row[0]) for row in cursor.fetchall()]
    return found


def _narrowed(queue: Queue, dialect: _Dialect, type_: str | None, handler: str | None) -> tuple[str, list[str]]:
    """Return the conditions that the filters of an operator verb add, and their parameters."""
    sql, params = "", []
    if type_ is not None:
        sql, params = " AND type = %s", [type_]
    if handler is not None and queue.handlers:
        if isinstance(dialect, _Postgres):
            sql += (
                " AND deliveries -> %s::text = 'null'::jsonb"
                " AND NOT coalesce(jsonb_exists(failures -> %s::text, 'discarded'), false)"
            )
        else:
            sql += (
                " AND EXISTS (SELECT 1 FROM json_each(deliveries) AS d WHERE d.key = %s AND d.type = 'null')"
                " AND NOT EXISTS (SELECT 1 FROM json_each(failures) AS f"
                " WHERE f.key = %s AND json_extract(f.value, '$.discarded'))"
            )
        params += [handler, handler]
    return sql, params


def _operate_chunk(
    queue: Queue,
    change: Callable[[dict[str, Any]], dict[str, Any] | None],
    using: str,
    ids: Sequence[UUID],
    status: tuple[str, ...],
    type_: str | None,
    handler: str | None,
) -> Report:
    connection = connections[using]
    dialect = _dialect(connection)
    table = _table(queue, connection)
    maps = ("deliveries", "failures") if queue.handlers else ()
    content = "".join(f", {dialect.json_text(name)}" for name in maps)
    narrowed, params = _narrowed(queue, dialect, type_, handler)
    changes: list[dict[str, Any]] = []
    leased = skipped = 0
    with _transaction(connection, table), connection.cursor() as cursor:
        cursor.execute(
            f"""SELECT id, status, lease_until > {dialect.now}{content} FROM {table}
                WHERE id IN {dialect.id_list()}{narrowed} ORDER BY id {dialect.lock}""",
            [json.dumps([dialect.id_param(id_) for id_ in ids]), *params],
        )
        rows = cursor.fetchall()
        for row in rows:
            id_, current, live, *texts = row
            values = {"status": current, "deliveries": {}, "failures": {}}
            values |= {name: json.loads(text) for name, text in zip(maps, texts, strict=True)}
            if current not in status:
                skipped += 1
            elif live:
                leased += 1
            elif (new := change(values)) is None:
                skipped += 1
            else:
                changes.append({"id": dialect.id_param(dialect.id_value(id_)), **new})
        skipped += len(ids) - len(rows)
        if changes:
            columns = {"id": "uuid", "status": "text", "revive": "int"} | dict.fromkeys(maps, "jsonb")
            keep = "".join(f", {name} = coalesce(o.{name}, e.{name})" for name in maps)
            # Clearing the holder is what stops a relay that overslept: its fence is still the
            # row's, its name is not.
            cursor.execute(
                f"""UPDATE {table} AS e SET status = o.status, lease_until = NULL, leased_by = ''{keep},
                        due_at = CASE WHEN o.status IN ('done', 'failed') THEN NULL
                            WHEN o.revive = 1 THEN {dialect.clock} ELSE e.due_at END,
                        attempts = CASE WHEN o.revive = 1 THEN 0 ELSE e.attempts END,
                        lost_leases = CASE WHEN o.revive = 1 THEN 0 ELSE e.lost_leases END,
                        dead_at = CASE WHEN o.revive = 1 THEN NULL ELSE e.dead_at END,
                        finished_at = CASE WHEN o.status IN ('done', 'failed') THEN {dialect.clock} END
                    FROM {dialect.records(columns)} WHERE e.id = o.id""",
                [json.dumps(changes)],
            )
    return Report(len(changes), leased, skipped)


def purge(
    queue: Queue,
    *,
    using: str,
    older_than_seconds: float,
    status: str = "done",
    batch: int = CHUNK,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """
    Delete finished rows older than an age, a batch per transaction; return how many went.

    ``status`` is done, failed or dead. The retention index finds the batch, oldest
    first; rows that somebody locks are left for the next call. Interrupting loses
    nothing: what was committed is gone, the rest stays.
    """
    if status not in {"done", "failed", "dead"}:
        raise ValueError(f"Only done, failed and dead rows can be purged, not {status!r}.")
    connection = connections[using]
    dialect = _dialect(connection)
    table = _table(queue, connection)
    moment = "dead_at" if status == "dead" else "finished_at"
    free = f"AND (lease_until IS NULL OR lease_until <= {dialect.now})" if status == "dead" else ""
    before = dialect.after("-(%s)")
    if isinstance(dialect, _Postgres):
        before = f"({dialect.now} - %s * interval '1 second')"
    victims = f"""
        SELECT id FROM {table} WHERE status = '{status}' AND {moment} <= {before} {free}
        ORDER BY {moment}, id LIMIT %s {dialect.lock_skipping}"""
    if isinstance(dialect, _Postgres):
        sql = f"WITH old AS MATERIALIZED ({victims}) DELETE FROM {table} WHERE id IN (SELECT id FROM old)"
    else:
        sql = f"DELETE FROM {table} WHERE id IN ({victims})"
    total = 0
    while limit is None or total < limit:
        size = batch if limit is None else min(batch, limit - total)
        with transaction.atomic(using=using), connection.cursor() as cursor:
            cursor.execute(sql, [older_than_seconds, size])
            gone = cursor.rowcount
        total += gone
        if progress is not None:
            progress(total)
        if gone < size:
            break
    return total


# --- looking ---------------------------------------------------------------------------------------------------------


def next_due_seconds(queue: Queue, *, using: str) -> float | None:
    """
    Return the seconds until a row can be claimed, 0 when one can be now, or ``None``.

    That is when a row falls due, or when the lease of one that is due runs out: a relay
    that was killed is succeeded then, without waiting for a poll. Asked after a claim
    that found nothing more, it also sees what has fallen due since. Reads the first free
    entry of each scan, and at most `CHUNK` leased ones: nothing but those is before it.
    """
    connection = connections[using]
    dialect = _dialect(connection)
    table = _table(queue, connection)
    free = f"(lease_until IS NULL OR lease_until <= {dialect.now})"
    moments = []
    for name, (condition, order) in _SCANS.items():
        scan = f"status = '{name}'" + (" AND due_at IS NOT NULL" if name == "dead" else "")
        moments.append(f"(SELECT {order} FROM {table} WHERE {scan} AND {free} ORDER BY {order}, id LIMIT 1)")
        moments.append(f"""(SELECT min(lease_until) FROM (
            SELECT lease_until FROM {table} WHERE {condition.format(now=dialect.now)}
            ORDER BY {order}, id LIMIT {CHUNK}) AS {name}_rows WHERE lease_until > {dialect.now})""")
    left = ", ".join(f"{dialect.epoch(moment)} - {dialect.epoch(dialect.now)}" for moment in moments)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {left}", [])
        seconds = [float(value) for value in cursor.fetchone() if value is not None]
    return max(0.0, min(seconds)) if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """
    How one queue stands.

    Counts stop at ``counted_to``: a page must not wait for a million rows.
    """

    queue: str
    pending: int
    waiting: int
    dead: int
    failed: int
    due: int
    leased: int
    counted_to: int
    oldest_due_seconds: float
    parked: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"parked": dict(self.parked)}


def backlog(queue: Queue, *, using: str, counted_to: int = 100_000) -> Backlog:
    """
    Return how a queue stands: bounded counts by status, what is due, the oldest of it, and who is waited for.

    ``parked`` counts the rows, among those waiting or dead, that are owed to a handler
    which the relay that had them did not know.
    """
    connection = connections[using]
    dialect = _dialect(connection)
    table = _table(queue, connection)
    free = f"(lease_until IS NULL OR lease_until <= {dialect.now})"

    def count(where: str) -> str:
        return f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT {int(counted_to)}) AS counted)"

    due = {name: condition.format(now=dialect.now) for name, (condition, _) in _SCANS.items()}
    ages = [
        f"{dialect.epoch(dialect.now)} - {dialect.epoch(f'(SELECT min({_SCANS[name][1]}) FROM {table} WHERE {due[name]})')}"
        for name in ("pending", "waiting")
    ]
    parts = [count(f"status = '{name}'") for name in ("pending", "waiting", "dead", "failed")]
    parts += [f"{count(f'{condition} AND {free}')}" for condition in due.values()]
    parts += [count(f"{due[name]} AND NOT {free}") for name in ("pending", "waiting", "dead")]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join([*parts, *ages])}", [])
        row = cursor.fetchone()
        parked: dict[str, int] = {}
        if queue.handlers:
            each = (
                "jsonb_each(rows.failures) AS f(key, value) WHERE jsonb_exists(f.value, 'parked_at')"
                if isinstance(dialect, _Postgres)
                else "json_each(rows.failures) AS f WHERE json_extract(f.value, '$.parked_at') IS NOT NULL"
            )
            source = " UNION ALL ".join(
                f"SELECT * FROM (SELECT failures FROM {table} WHERE status = '{name}' LIMIT {int(counted_to)}) AS {name}_rows"
                for name in ("waiting", "dead")
            )
            cursor.execute(f"SELECT f.key, count(*) FROM ({source}) AS rows, {each} GROUP BY f.key ORDER BY f.key")
            parked = {name: int(number) for name, number in cursor.fetchall()}
    pending, waiting, dead, failed, *rest = (int(value) for value in row[:10])
    return Backlog(
        queue=queue.name,
        pending=pending,
        waiting=waiting,
        dead=dead,
        failed=failed,
        due=sum(rest[:3]),
        leased=sum(rest[3:6]),
        counted_to=counted_to,
        oldest_due_seconds=max([0.0, *(float(value) for value in row[10:] if value is not None)]),
        parked=parked,
    )
