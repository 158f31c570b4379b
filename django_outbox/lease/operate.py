"""The verbs of operators: retry, discard, rename, purge; and how a queue stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db import IntegrityError, connections, transaction

from django_outbox import wake
from django_outbox.lease.claim import SCANS
from django_outbox.lease.rows import Queue, Report
from django_outbox.lease.vendors import Dialect, Postgres, dialect_of, table_of, write_transaction

CHUNK: Final = 500
"""Rows that one statement of an operator verb or a purge locks."""

RETRYABLE: Final = ("dead", "failed", "waiting")
DISCARDABLE: Final = ("dead", "waiting", "pending")

_MOMENT: Final = {
    # status → the column by which its index orders it
    "pending": "created_at",
    "waiting": "due_at",
    "dead": "dead_at",
    "failed": "finished_at",
    "done": "finished_at",
}

_Change = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Makes a row's new values from its status, deliveries, failures and ``retryable``; ``None`` leaves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Which rows a verb is meant for."""

    status: tuple[str, ...]
    ids: Iterable[UUID] | None = None
    type: str | None = None
    handler: str | None = None
    limit: int | None = None


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
    deliveries were all discarded is skipped too, as is one that lacks the queue's
    ``retry_condition``, and one that may not live beside another which does.
    """

    def revive(row: dict[str, Any]) -> dict[str, Any] | None:
        if not row["retryable"]:
            return None
        failures = {
            name: {key: value for key, value in entry.items() if key not in {"rejected", "lost", "marks", "parked_at"}}
            for name, entry in row["failures"].items()
        }
        owed = _owed(row["deliveries"], failures)
        if queue.handlers and not owed and row["status"] == "failed":
            return None
        return {"status": "waiting" if owed or not queue.handlers else "done", "failures": failures, "revive": 1}

    allowed = tuple(name for name in status if name in RETRYABLE)
    selection = _Selection(status=allowed, ids=ids, type=type, handler=handler, limit=limit)
    return _operate(queue, revive, selection, using=using, progress=progress)


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

    def close(row: dict[str, Any]) -> dict[str, Any] | None:
        failures = dict(row["failures"])
        owed = _owed(row["deliveries"], failures)
        if handler is not None and handler not in owed:
            return None
        for name in owed if handler is None else [handler]:
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

    allowed = tuple(name for name in status if name in (*DISCARDABLE, *(("failed",) if handler else ())))
    selection = _Selection(status=allowed, ids=ids, type=type, handler=handler, limit=limit)
    return _operate(queue, close, selection, using=using, progress=progress)


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
    selection = _Selection(status=allowed, ids=ids, handler=old, limit=limit)
    return _operate(queue, rename, selection, using=using, progress=progress)


def _owed(deliveries: Mapping[str, Any], failures: Mapping[str, Any]) -> list[str]:
    return [name for name, when in deliveries.items() if when is None and not failures.get(name, {}).get("discarded")]


def _operate(
    queue: Queue, change: _Change, selection: _Selection, *, using: str, progress: Callable[[int], None] | None
) -> Report:
    """Apply ``change`` to rows in chunks, each in a transaction of its own, and wake the relays."""
    report = Report()
    if (selection.handler is not None and not queue.handlers) or (selection.type is not None and not queue.kind):
        # Rows of this queue have no such thing, so the filter matches none.
        return Report(skipped=0 if selection.ids is None else len(set(selection.ids)))
    ids = _matching(queue, selection, using) if selection.ids is None else selection.ids
    chosen = list(dict.fromkeys(ids))[: selection.limit]
    if not selection.status:
        return Report(skipped=len(chosen))
    for start in range(0, len(chosen), CHUNK):
        # Locked in id order, whatever the order in which they were found.
        chunk = sorted(chosen[start : start + CHUNK])
        report += _operate_or_split(queue, change, selection, chunk, using=using)
        if progress is not None:
            progress(min(start + CHUNK, len(chosen)))
    if report.changed:
        wake.notify_on_commit(using, queue=queue.name)
    return report


def _matching(queue: Queue, selection: _Selection, using: str) -> list[UUID]:
    """
    Return the ids of rows to operate on, as they stand now.

    All of them before any is changed: a retried row stays among the waiting ones, at
    a later time, and a walk that went on meanwhile would meet it again and again.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    narrowed, params = _narrowed(queue, selection, dialect)
    table = table_of(queue, connection)
    found: list[UUID] = []
    with connection.cursor() as cursor:
        for name in dict.fromkeys(selection.status):
            # One scan per status, oldest first, on the partial index of that status.
            sql = f"SELECT id FROM {table} WHERE status = '{name}'{narrowed} ORDER BY {_MOMENT[name]}, id"
            if selection.limit is None:
                cursor.execute(sql, params)
            else:
                cursor.execute(f"{sql} LIMIT %s", [*params, selection.limit])
            found += [dialect.id_value(row[0]) for row in cursor.fetchall()]
    return found


def _narrowed(queue: Queue, selection: _Selection, dialect: Dialect) -> tuple[str, list[str]]:
    """Return the conditions that the filters of an operator verb add, and their parameters."""
    sql, params = "", []
    if selection.type is not None:
        sql, params = f" AND {queue.kind} = %s", [selection.type]
    if selection.handler is not None:
        if isinstance(dialect, Postgres):
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
        params += [selection.handler, selection.handler]
    return sql, params


def _operate_or_split(
    queue: Queue, change: _Change, selection: _Selection, ids: Sequence[UUID], *, using: str
) -> Report:
    """
    Operate on a chunk; where a unique constraint refuses it, on its halves, down to the rows that are refused.

    Those are skipped: a second row of one key cannot be given a new life beside the first.
    The chunk's transaction, a savepoint inside the caller's, has undone what it wrote.
    """
    try:
        return _operate_chunk(queue, change, selection, ids, using=using)
    except IntegrityError:
        if len(ids) == 1:
            return Report(skipped=1)
    half = len(ids) // 2
    return sum(
        (_operate_or_split(queue, change, selection, part, using=using) for part in (ids[:half], ids[half:])), Report()
    )


def _operate_chunk(queue: Queue, change: _Change, selection: _Selection, ids: Sequence[UUID], *, using: str) -> Report:
    connection = connections[using]
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    maps = ("deliveries", "failures") if queue.handlers else ()
    content = "".join(f", {dialect.json_text(name)}" for name in maps)
    retryable = queue.retry_condition or "true"
    narrowed, params = _narrowed(queue, selection, dialect)
    changes: list[dict[str, Any]] = []
    leased = skipped = 0
    with write_transaction(connection, table), connection.cursor() as cursor:
        cursor.execute(
            f"""SELECT id, status, lease_until > {dialect.now}, {retryable}{content} FROM {table}
                WHERE id IN {dialect.id_list()}{narrowed} ORDER BY id {dialect.lock}""",
            [json.dumps([dialect.id_param(id_) for id_ in ids]), *params],
        )
        rows = cursor.fetchall()
        for row in rows:
            id_, current, live, may, *texts = row
            values = {"status": current, "deliveries": {}, "failures": {}, "retryable": bool(may)}
            values |= {name: json.loads(text) for name, text in zip(maps, texts, strict=True)}
            if current not in selection.status:
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
            if queue.parks:
                keep += ", parked_at = CASE WHEN o.revive = 1 THEN NULL ELSE e.parked_at END"
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
        closed = [UUID(each["id"]) for each in changes if each["status"] == "failed"]
        if closed and queue.on_discard is not None:
            queue.on_discard(closed, using)
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
    first; rows that somebody locks are left for the next call. What the queue keeps
    beside its rows goes with them (``on_purge``). Interrupting loses nothing: what was
    committed is gone, the rest stays.
    """
    if status not in {"done", "failed", "dead"}:
        raise ValueError(f"Only done, failed and dead rows can be purged, not {status!r}.")
    connection = connections[using]
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    moment = "dead_at" if status == "dead" else "finished_at"
    free = f"AND (lease_until IS NULL OR lease_until <= {dialect.now})" if status == "dead" else ""
    before = dialect.after("-(%s)")
    if isinstance(dialect, Postgres):
        before = f"({dialect.now} - %s * interval '1 second')"
    victims = f"""
        SELECT id FROM {table} WHERE status = '{status}' AND {moment} <= {before} {free}
        ORDER BY {moment}, id LIMIT %s {dialect.lock_skipping}"""
    if isinstance(dialect, Postgres):
        sql = f"WITH old AS MATERIALIZED ({victims}) DELETE FROM {table} WHERE id IN (SELECT id FROM old) RETURNING id"
    else:
        sql = f"DELETE FROM {table} WHERE id IN ({victims}) RETURNING id"
    total = 0
    while limit is None or total < limit:
        size = batch if limit is None else min(batch, limit - total)
        with transaction.atomic(using=using):
            with connection.cursor() as cursor:
                cursor.execute(sql, [older_than_seconds, size])
                ids = [dialect.id_value(row[0]) for row in cursor.fetchall()]
            if ids and queue.on_purge is not None:
                queue.on_purge(ids, using)
        gone = len(ids)
        total += gone
        if progress is not None:
            progress(total)
        if gone < size:
            break
    return total


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

    ``parked`` counts the rows, among those waiting or dead, that are owed to a handler or
    a task which the relay that had them did not know.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    table = table_of(queue, connection)
    bound = f"LIMIT {int(counted_to)}"
    # The bound stands inside: outside, a count of the few leased rows would walk them all.
    parts = [
        f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE status = '{name}' {bound}) AS {name}_rows)"
        for name in ("pending", "waiting", "dead", "failed")
    ]
    for name, (condition, order) in SCANS.items():
        due = f"FROM {table} WHERE {condition.format(now=dialect.now)}"
        rows = f"FROM (SELECT lease_until {due} {bound}) AS {name}_due"
        parts += [
            f"(SELECT count(*) {rows})",
            f"(SELECT count(*) {rows} WHERE lease_until > {dialect.now})",
            "0"
            if name == "dead"
            else f"{dialect.epoch(dialect.now)} - {dialect.epoch(f'(SELECT min({order}) {due})')}",
        ]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(parts)}", [])
        pending, waiting, dead, failed, *scans = cursor.fetchone()
    due_rows, leased_rows = sum(scans[0::3]), sum(scans[1::3])
    return Backlog(
        queue=queue.name,
        pending=pending,
        waiting=waiting,
        dead=dead,
        failed=failed,
        due=min(due_rows - leased_rows, counted_to),
        leased=min(leased_rows, counted_to),
        counted_to=counted_to,
        oldest_due_seconds=max([0.0, *(float(age) for age in scans[2::3] if age is not None)]),
        parked=_parked(queue, using=using, bound=bound) if queue.handlers or queue.parks else {},
    )


def _parked(queue: Queue, *, using: str, bound: str) -> dict[str, int]:
    connection = connections[using]
    key, columns = "f.key", "failures"
    if queue.parks:
        key, columns, each = queue.kind, f"{queue.kind}, parked_at", " WHERE parked_at IS NOT NULL"
    elif isinstance(dialect_of(connection), Postgres):
        each = ", jsonb_each(rows.failures) AS f(key, value) WHERE jsonb_exists(f.value, 'parked_at')"
    else:
        each = ", json_each(rows.failures) AS f WHERE json_extract(f.value, '$.parked_at') IS NOT NULL"
    table = table_of(queue, connection)
    source = " UNION ALL ".join(
        f"SELECT * FROM (SELECT {columns} FROM {table} WHERE status = '{name}' {bound}) AS {name}_rows"
        for name in ("waiting", "dead")
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {key}, count(*) FROM ({source}) AS rows{each} GROUP BY {key} ORDER BY {key}")
        return {name: int(number) for name, number in cursor.fetchall()}
