"""What a holder writes: renewals, records of deliveries, releases, and how each lease ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.db import DatabaseError, DataError, IntegrityError, OperationalError, connections, transaction

from django_outbox.errors import clean_error
from django_outbox.lease.insert import insert_events
from django_outbox.lease.rows import Done, Fail, Lease, Lost, NewRow, Park, Queue, Retry, Settled
from django_outbox.lease.vendors import SQLite, dialect_of, table_of
from django_outbox.retry import Schedule, park_seconds

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_outbox.lease")

REFUSED_TEXT: Final = "The database refused this row's outcome; the relay's log says why."
LOST_HOLDER: Final = "lost"
"""Stands in ``leased_by`` of a released row whose last worker never settled it."""

_GUARD: Final = "e.id = o.id AND e.fence = o.fence AND e.leased_by = %s AND e.status NOT IN ('done', 'failed')"


def _guarded_update(
    connection: BaseDatabaseWrapper,
    queue: Queue,
    records: Sequence[Mapping[str, Any]],
    *,
    holder: str,
    columns: Mapping[str, str],
    assignments: str,
    params: Sequence[Any] = (),
    lazy_commit: bool = False,
    skip_locked: bool = False,
) -> set[UUID]:
    """
    Update the rows of ``records`` that ``holder`` still holds, in one statement; return their ids.

    ``columns`` names the record's fields beyond id and fence, with their PostgreSQL
    types; ``assignments`` refers to the row as ``e`` and to its record as ``o``. The
    primary key serves the join, in id order.
    """
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    source = dialect.records({"id": "uuid", "fence": "bigint", **columns})
    document = json.dumps(records, separators=(",", ":"))
    if isinstance(dialect, SQLite):
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
    return {"id": dialect_of(connection).id_param(lease.id), "fence": lease.fence}


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
    dialect = dialect_of(connection)
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
        records,
        holder=first.holder,
        columns=columns,
        assignments=assignments,
        params=[lease_seconds],
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
    dialect = dialect_of(connection)
    source = dialect.records({"id": "uuid", "fence": "bigint"})
    # The primary key serves the join.
    sql = f"SELECT e.id FROM {table_of(leases[0].queue, connection)} AS e JOIN {source} ON {_GUARD}"
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
    dialect = dialect_of(connection)
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
    written = _guarded_update(
        connection, lease.queue, [entry], holder=lease.holder, columns=columns, assignments=assignments
    )
    return bool(written)


def release(leases: Sequence[Lease], *, using: str) -> int:
    """Give back rows that were not started, their attempt with them; return how many were still held."""
    if not leases:
        return 0
    connection = connections[using]
    return len(
        _guarded_update(
            connection,
            leases[0].queue,
            [_key(lease, connection) | {"suspect": int(lease.suspect)} for lease in leases],
            holder=leases[0].holder,
            columns={"suspect": "int"},
            # A holder without a lease marks a suspect: nobody has found out yet what it did to its last one.
            assignments="attempts = e.attempts - 1, lease_until = NULL,"
            f" leased_by = CASE WHEN o.suspect = 1 THEN '{LOST_HOLDER}' ELSE '' END",
            lazy_commit=True,
        )
    )


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
        entry: dict[str, Any] = {
            "id": lease.text if connection.vendor == "postgresql" else lease.id.hex,
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
        return entry


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
        if not _is_refusal(error):
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
        if not _is_refusal(error):
            raise
        # Nothing can be written to this row. Its lease runs out, and its neighbours do not wait for it.
        logger.critical("row cannot be settled queue=%s id=%s error=%s", lease.queue.name, lease.id, clean_error(error))
        return set()


def _is_refusal(error: DatabaseError) -> bool:
    """Return whether the database refused the data, as it would again; a trigger's RAISE EXCEPTION counts."""
    return isinstance(error, (DataError, IntegrityError)) or getattr(error.__cause__, "sqlstate", None) == "P0001"


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
    dialect = dialect_of(connection)
    columns = {"status": "text", "delay": "float8", "refund": "int", "error": "text"}
    assignments = f"""
        status = o.status, attempts = e.attempts - coalesce(o.refund, 0), due_at = {dialect.after("o.delay")},
        lease_until = NULL, leased_by = '', lost_leases = 0, last_error = coalesce(o.error, ''),
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
        [item.entry(connection) for item in records],
        holder=records[0].settled.lease.holder,
        columns=columns,
        assignments=assignments,
    )


def _settled_before(connection: BaseDatabaseWrapper, records: Sequence[_Record]) -> set[UUID]:
    """
    Return the ids whose rows already bear these outcomes.

    A fence belongs to one claim, so a row with our fence, no holder and the status we
    meant to write was settled by us: the statement went through, its reply did not.
    """
    dialect = dialect_of(connection)
    queue = records[0].settled.lease.queue
    source = dialect.records({"id": "uuid", "fence": "bigint", "status": "text"})
    sql = f"""
        SELECT e.id FROM {table_of(queue, connection)} AS e JOIN {source}
        ON e.id = o.id AND e.fence = o.fence AND e.status = o.status AND e.leased_by = ''"""
    document = json.dumps([_key(item.settled.lease, connection) | {"status": item.status} for item in records])
    with connection.cursor() as cursor:
        cursor.execute(sql, [document])
        return {dialect.id_value(row[0]) for row in cursor.fetchall()}
