"""What a holder writes: renewals, records of deliveries, releases, and how each lease ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)

from django_outbox.errors import clean_error
from django_outbox.lease.insert import insert_events
from django_outbox.lease.prepared import fetch
from django_outbox.lease.rows import Dead, Done, Fail, Lease, NewRow, Park, Queue, Released, Retry, Settled
from django_outbox.lease.vendors import (
    POSTGRES,
    SQLITE,
    Dialect,
    SQLite,
    dialect_of,
    statement,
    table_of,
    write_transaction,
)
from django_outbox.retry import Schedule, park_seconds

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_outbox.lease")

REFUSED_TEXT: Final = "The database refused this row's outcome; the relay's log says why."
LOCKED: Final = "locked"
"""What `settle` answers for a row that is still its holder's, but locked by somebody else: not written yet."""
PREPARED_ROWS: Final = 50
"""For more rows than these, planning costs little beside them."""
LOST_HOLDER: Final = "lost"
"""Stands in ``leased_by`` of a released row whose last worker never settled it."""

_GUARD: Final = "e.id = o.id AND e.fence = o.fence AND e.leased_by = %s AND e.status NOT IN ('done', 'failed')"


@dataclass(frozen=True, slots=True)
class _Update:
    """A guarded update of rows of one queue and holder."""

    queue: Queue
    holder: str
    records: Sequence[Mapping[str, Any]]
    columns: tuple[tuple[str, str], ...]
    """The records' fields beyond id and fence, with their PostgreSQL types."""
    assignments: str
    """Refers to the row as ``e`` and to its record as ``o``."""


def _guarded_update(
    connection: BaseDatabaseWrapper, *updates: _Update, lazy_commit: bool = False, skip_locked: bool = False
) -> list[set[int]]:
    """
    Update the rows that their holders still hold; return the ids of each update's, as integers.

    One statement on PostgreSQL, one transaction on SQLite, however many queues. A process
    that dies before it left the rows as they were, after it as they are now.
    """
    dialect = dialect_of(connection)
    arguments = [(json.dumps(update.records, separators=(",", ":")), update.holder) for update in updates]
    parts = tuple((table_of(update.queue, connection), update.columns, update.assignments) for update in updates)
    if isinstance(dialect, SQLite):
        with ExitStack() as stack:
            if len(parts) > 1:
                stack.enter_context(write_transaction(connection, parts[0][0]))
            cursor = stack.enter_context(connection.cursor())
            written = []
            for part, params in zip(parts, arguments, strict=True):
                cursor.execute(_sqlite_update(*part), params)
                written.append({int(row[0], 16) for row in cursor.fetchall()})
            return written
    lazy = lazy_commit and not connection.in_atomic_block
    sql = _postgres_update(parts, lazy, skip_locked)
    few = sum(len(update.records) for update in updates) <= PREPARED_ROWS
    rows = fetch(connection, sql, list(chain.from_iterable(arguments)), prepare=few)
    if len(parts) == 1:
        return [{row[0].int for row in rows}]
    return [{id_.int for number, id_ in rows if number == position} for position in range(len(parts))]


@statement
def _sqlite_update(table: str, columns: tuple[tuple[str, str], ...], assignments: str) -> str:
    source = SQLITE.records({"id": "uuid", "fence": "bigint", **dict(columns)})
    return f"UPDATE {table} AS e SET {assignments} FROM {source} WHERE {_GUARD} RETURNING id"


@statement
def _postgres_update(
    parts: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...],
    lazy_commit: bool,  # noqa: FBT001  positional, for the cache
    skip_locked: bool,  # noqa: FBT001
) -> str:
    """
    Return the update of one table, or of several by data-modifying CTEs.

    The rows are locked in id order before any is written. LATERAL has the primary key serve
    for each record: a plain join of a table that statistics call small, and whose guard they
    take to leave one row, compares every leased row with every record, 300 ms for 500. For
    500 rows 3,000 page hits to find them twice, the rest of 7,000 to write them.
    """
    commit = "set_config('synchronous_commit', 'off', true)" if lazy_commit else "'on'"
    lock = POSTGRES.lock_skipping if skip_locked else POSTGRES.lock
    ctes = [f"commit_mode AS MATERIALIZED (SELECT {commit})"]
    updates = []
    for number, (table, columns, assignments) in enumerate(parts):
        read = POSTGRES.records({"id": "uuid", "fence": "bigint", **dict(columns)})
        ctes.append(
            f"held{number} AS MATERIALIZED (SELECT o.* FROM (SELECT * FROM {read} ORDER BY id) AS o"
            f" CROSS JOIN LATERAL (SELECT FROM {table} AS e WHERE {_GUARD} {lock}) AS row)"
        )
        updates.append(
            f"UPDATE {table} AS e SET {assignments} FROM held{number} AS o, commit_mode"
            " WHERE e.id = o.id RETURNING e.id"
        )
    if len(updates) == 1:
        return f"WITH {', '.join(ctes)} {updates[0]}"
    ctes += [f"written{number} AS ({update})" for number, update in enumerate(updates)]
    answers = (f"SELECT {number}, id FROM written{number}" for number in range(len(updates)))
    return f"WITH {', '.join(ctes)} {' UNION ALL '.join(answers)}"


def _key(lease: Lease, dialect: Dialect) -> dict[str, Any]:
    return {"id": dialect.id_param(lease.id), "fence": lease.fence}


def renew(leases: Mapping[Lease, Mapping[str, str]], *, using: str) -> list[Lease]:
    """
    Extend leases, of any queues, from now by their own ``seconds``, each with the deliveries made so far.

    Returns those that are lost: such a row belongs to another, or is settled already, and
    no further step of it may start. A renewed lease's ``deadline`` moves with it. A row
    that somebody keeps locked is neither renewed nor lost: the others must not lose their
    leases waiting for it.
    """
    if not leases:
        return []
    connection = connections[using]
    dialect = dialect_of(connection)
    started = time.monotonic()
    extended = f"lease_until = {dialect.after('o.seconds')}"
    groups = _by_holder(leases)
    updates = []
    for (queue, holder), group in groups.items():
        records = [_key(lease, dialect) | {"seconds": lease.seconds} for lease in group]
        columns: tuple[tuple[str, str], ...] = (("seconds", "float8"),)
        assignments = extended
        if queue.handlers and any(leases[lease] for lease in group):
            columns += (("delivered", "jsonb"),)
            assignments += f", deliveries = {dialect.merged('e.deliveries', 'o.delivered')}"
            for entry, lease in zip(records, group, strict=True):
                entry["delivered"] = dict(leases[lease]) or None
        updates.append(_Update(queue, holder, records, columns, assignments))
    missing = []
    for kept, group in zip(
        _guarded_update(connection, *updates, lazy_commit=True, skip_locked=True), groups.values(), strict=True
    ):
        for lease in group:
            if lease.id.int in kept:
                lease.deadline = started + lease.seconds
            else:
                missing.append(lease)
    held = _still_held(connection, missing)
    return [lease for lease in missing if lease not in held]


def _by_holder(leases: Iterable[Lease]) -> dict[tuple[Queue, str], list[Lease]]:
    groups: dict[tuple[Queue, str], list[Lease]] = {}
    for lease in leases:
        groups.setdefault((lease.queue, lease.holder), []).append(lease)
    return groups


def _still_held(connection: BaseDatabaseWrapper, leases: Iterable[Lease]) -> set[Lease]:
    """Return those, among these, whose rows are still their holders', locked or not."""
    dialect = dialect_of(connection)
    source = dialect.records({"id": "uuid", "fence": "bigint"})
    held: set[Lease] = set()
    for (queue, holder), group in _by_holder(leases).items():
        # The primary key serves the join.
        sql = f"SELECT e.id FROM {table_of(queue, connection)} AS e JOIN {source} ON {_GUARD}"
        document = json.dumps([_key(lease, dialect) for lease in group])
        with connection.cursor() as cursor:
            cursor.execute(sql, [document, holder])
            found = {dialect.id_value(row[0]) for row in cursor.fetchall()}
        held.update(lease for lease in group if lease.id in found)
    return held


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
    dialect = dialect_of(connection)
    columns: tuple[tuple[str, str], ...] = (("lost_leases", "int"),)
    assignments = "lost_leases = coalesce(o.lost_leases, e.lost_leases)"
    entry = _key(lease, dialect) | {"lost_leases": lost_leases}
    if lease.queue.handlers:
        columns += _MAPS
        assignments += (
            f", deliveries = {dialect.merged('e.deliveries', 'o.delivered')},"
            " failures = coalesce(o.failures, e.failures)"
        )
        entry |= {"delivered": delivered or None, "failures": None if failures is None else dict(failures)}
    (written,) = _guarded_update(connection, _Update(lease.queue, lease.holder, [entry], columns, assignments))
    return bool(written)


def release(leases: Sequence[Lease], *, using: str) -> int:
    """
    Give back rows of one queue that were not started, their attempt with them; return how many were given back.

    A row that somebody keeps locked is not waited for: its lease runs out by itself.
    """
    if not leases:
        return 0
    connection = connections[using]
    dialect = dialect_of(connection)
    update = _Update(
        leases[0].queue,
        leases[0].holder,
        [_key(lease, dialect) | {"suspect": int(lease.suspect)} for lease in leases],
        (("suspect", "int"),),
        # A holder without a lease marks a suspect: nobody has found out yet what it did to its last one.
        "attempts = e.attempts - 1, lease_until = NULL,"
        f" leased_by = CASE WHEN o.suspect = 1 THEN '{LOST_HOLDER}' ELSE '' END",
    )
    (written,) = _guarded_update(connection, update, lazy_commit=True, skip_locked=True)
    return len(written)


@dataclass(slots=True)
class _Record:
    """An outcome as columns."""

    settled: Settled
    status: str
    delay: float | None
    refund: int
    error: str
    failures: Mapping[str, Any] | None
    columns: Mapping[str, Any]

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
            case Retry(requested, own):
                schedule = own or schedule
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
            case Dead():
                status = "dead"
            case Released():
                raise ValueError("A released row has no outcome; give it back with release().")
        return cls(settled, status, delay, refund, error, settled.failures, settled.columns)

    @property
    def first_death(self) -> bool:
        return self.status in {"dead", "failed"} and not self.settled.lease.was_dead

    def entry(self, dialect: Dialect) -> dict[str, Any]:
        lease = self.settled.lease
        entry: dict[str, Any] = {
            "id": lease.text if dialect is POSTGRES else lease.id.hex,
            "fence": lease.fence,
            "status": self.status,
        }
        # What is absent reads as NULL; nearly every row is done and has only the first of these.
        if self.settled.delivered:
            entry["delivered"] = self.settled.delivered
        if self.delay is not None:
            entry["delay"] = self.delay
        if self.refund:
            entry["refund"] = self.refund
        if self.failures is not None:
            entry["failures"] = self.failures
        if self.error:
            entry["error"] = self.error
        if self.columns:
            entry["columns"] = {name: dialect.json_value(value) for name, value in self.columns.items()}
        return entry


Announce = Callable[[Settled, str], NewRow | None]
"""Makes the event that speaks of a row which became dead or failed (the second argument says which), if any."""

Along = Callable[[Sequence[tuple[Settled, str]]], None]
"""Writes what belongs to the outcomes that a settle wrote; the second of each pair is the status written."""


def settle(
    batch: Sequence[Settled],
    *,
    schedule: Schedule,
    using: str,
    announce: Announce | None = None,
    along: Along | None = None,
    again: bool = False,
) -> dict[Lease, str]:
    """
    End the leases of one queue with their outcomes, each at most once; return the status written for each.

    Only the holder of a row's current fence can change it; a lease that is missing from the
    answer was not written and never will be. Nobody is waited for: a row that is still held,
    but that somebody else has locked, is answered as `LOCKED`, and the caller tries it again
    later. The first time a row becomes dead or failed, and only if this call wrote that, the
    announcement is inserted in the same transaction; ``along`` is called in it too, with the
    rows that this call wrote. Neither can prevent the settle: what it raises is logged and its
    own writes are undone, unless the connection is to blame.

    ``again``: an earlier call's reply was lost, so a row that bears this very outcome
    counts as written. A batch that the database refuses for its data is split until the
    bad row stands alone; that row is settled with a fixed error text. Errors of the
    connection are the caller's to try again, with the whole batch.
    """
    if not batch:
        return {}
    connection = connections[using]
    records = [_Record.of(settled, schedule) for settled in batch]
    settling = _Settling(connection, announce, along)
    written = settling.settle(records)
    missed = [item for item in records if item.settled.lease.id.int not in written]
    if again and missed:
        before = _settled_before(connection, missed)
        written |= before
        missed = [item for item in missed if item.settled.lease.id.int not in before]
    answer = {item.settled.lease: item.status for item in records if item.settled.lease.id.int in written}
    if missed and connection.vendor != "sqlite":
        answer |= dict.fromkeys(
            _still_held(connection, (item.settled.lease for item in missed)) - settling.hopeless, LOCKED
        )
    return answer


@dataclass(slots=True)
class _Settling:
    """One call of `settle`."""

    connection: BaseDatabaseWrapper
    announce: Announce | None
    along: Along | None
    hopeless: set[Lease] = field(default_factory=set)
    """Rows to which nothing can be written: their leases run out, and their neighbours do not wait for them."""

    def settle(self, records: Sequence[_Record]) -> set[int]:
        try:
            return self._write(records)
        except DatabaseError as error:
            if not _is_refusal(error):
                raise
            if len(records) > 1:
                middle = len(records) // 2
                return self.settle(records[:middle]) | self.settle(records[middle:])
            lease = records[0].settled.lease
            logger.error(
                "outcome refused by the database queue=%s id=%s error=%s",
                lease.queue.name,
                lease.id,
                clean_error(error),
            )
        refused = records[0]
        refused.error, refused.failures, refused.columns = REFUSED_TEXT, None, {}
        try:
            return self._write([refused])
        except DatabaseError as error:
            if not _is_refusal(error):
                raise
            logger.critical(
                "row cannot be settled queue=%s id=%s error=%s", lease.queue.name, lease.id, clean_error(error)
            )
            self.hopeless.add(lease)
            return set()

    def _write(self, records: Sequence[_Record]) -> set[int]:
        connection = self.connection
        queue = records[0].settled.lease.queue
        announce, along = self.announce, self.along
        deaths = [item for item in records if item.first_death and not item.settled.lease.quiet] if announce else []
        if not deaths and along is None and not connection.in_atomic_block:
            return _write_statement(connection, queue, records)
        with transaction.atomic(using=connection.alias):
            written = _write_statement(connection, queue, records)
            for item in deaths:
                if item.settled.lease.id.int in written and announce is not None:
                    self._beside("announcement", [item], partial(self._insert_announcement, announce, item))
            ours = [item for item in records if item.settled.lease.id.int in written]
            if along is not None and ours:
                self._beside("what goes along", ours, partial(along, [(item.settled, item.status) for item in ours]))
        return written

    def _insert_announcement(self, announce: Announce, item: _Record) -> None:
        if (row := announce(item.settled, item.status)) is not None:
            insert_events([row], using=self.connection.alias)

    def _beside(self, what: str, items: Sequence[_Record], write: Callable[[], None]) -> None:
        """Write in the settle's transaction what must never prevent the settle."""
        try:
            with transaction.atomic(using=self.connection.alias):
                write()
        except (OperationalError, InterfaceError):
            raise  # the connection's trouble, or a lock's: the whole settle is tried again
        except DatabaseError as error:
            # Without the traceback: the database's words may show the row.
            lease = items[0].settled.lease
            logger.error("%s not written queue=%s id=%s error=%s", what, lease.queue.name, lease.id, clean_error(error))
        except Exception:
            lease = items[0].settled.lease
            logger.exception("%s not written queue=%s id=%s", what, lease.queue.name, lease.id)


def _is_refusal(error: DatabaseError) -> bool:
    """Return whether the database refused the data, as it would again; a trigger's RAISE EXCEPTION counts."""
    return isinstance(error, (DataError, IntegrityError)) or getattr(error.__cause__, "sqlstate", None) == "P0001"


_OUTCOME: Final = (("status", "text"), ("delay", "float8"), ("refund", "int"), ("error", "text"))
_MAPS: Final = (("delivered", "jsonb"), ("failures", "jsonb"))


def _write_statement(connection: BaseDatabaseWrapper, queue: Queue, records: Sequence[_Record]) -> set[int]:
    dialect = dialect_of(connection)
    # Only the columns that this batch writes, in the queue's order, so that few texts occur.
    given = set().union(*(item.columns for item in records))
    if unknown := given - queue.outcome_columns.keys():
        raise ValueError(f"The queue {queue.name} has no outcome column {', '.join(sorted(unknown))}.")
    own = tuple(item for item in queue.outcome_columns.items() if item[0] in given)
    columns = _OUTCOME + (_MAPS if queue.handlers else ()) + ((("columns", "jsonb"),) if own else ())
    update = _Update(
        queue,
        records[0].settled.lease.holder,
        [item.entry(dialect) for item in records],
        columns,
        _outcome_assignments(dialect, queue.handlers, own),
    )
    # Others' locks are not waited for: one row that an operator's long transaction holds
    # must not keep the outcomes of all the others.
    return _guarded_update(connection, update, skip_locked=True)[0]


@statement
def _outcome_assignments(
    dialect: Dialect,
    handlers: bool,  # noqa: FBT001  positional, for the cache
    own: tuple[tuple[str, str], ...],
) -> str:
    assignments = f"""
        status = o.status, attempts = e.attempts - coalesce(o.refund, 0), due_at = {dialect.after("o.delay")},
        lease_until = NULL, leased_by = '', lost_leases = 0, last_error = coalesce(o.error, ''),
        dead_at = CASE WHEN o.status = 'dead' THEN coalesce(e.dead_at, {dialect.clock}) ELSE e.dead_at END,
        finished_at = CASE WHEN o.status IN ('done', 'failed') THEN {dialect.clock} END"""
    if handlers:
        assignments += f""",
        deliveries = {dialect.merged("e.deliveries", "o.delivered")},
        failures = coalesce(o.failures, e.failures)"""
    return assignments + "".join(
        f""",
        "{name}" = {dialect.given("o.columns", name, kind, otherwise=f'e."{name}"')}"""
        for name, kind in own
    )


def _settled_before(connection: BaseDatabaseWrapper, records: Sequence[_Record]) -> set[int]:
    """
    Return the ids, as integers, whose rows already bear these outcomes.

    A fence belongs to one claim, so a row with our fence, no holder and the status we
    meant to write was settled by us: the statement went through, its reply did not.
    """
    dialect = dialect_of(connection)
    queue = records[0].settled.lease.queue
    source = dialect.records({"id": "uuid", "fence": "bigint", "status": "text"})
    sql = f"""
        SELECT e.id FROM {table_of(queue, connection)} AS e JOIN {source}
        ON e.id = o.id AND e.fence = o.fence AND e.status = o.status AND e.leased_by = ''"""
    document = json.dumps([_key(item.settled.lease, dialect) | {"status": item.status} for item in records])
    with connection.cursor() as cursor:
        cursor.execute(sql, [document])
        return {dialect.id_value(row[0]).int for row in cursor.fetchall()}
