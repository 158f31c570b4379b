"""
The statements of the webhook queue: fan-out, turns, attempts, endpoints' health, retention.

What the engine does with deliveries as with any queue's rows stands in ``lease``; these
are about endpoints. The same holds: the database's clock, rows locked in id order, one
statement where one will do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections, transaction

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.lease.prepared import fetch
from django_outbox.lease.vendors import Dialect, SQLite, dialect_of, statement, table_of
from django_outbox.webhooks.health import Health

ENDPOINT_DISABLED: Final = "endpoint_disabled"
ENDPOINT_GONE: Final = "endpoint_gone"
ENDPOINT_MISSING: Final = "endpoint_missing"
UNWANTED: Final = (ENDPOINT_DISABLED, ENDPOINT_GONE, ENDPOINT_MISSING)
"""Reasons of deliveries that nobody misses: quiet, and purged after `UNWANTED_DAYS`."""

UNWANTED_SECONDS: Final = 30 * 86_400.0
HELD_SECONDS: Final = 5.0
"""After so long an endpoint is looked at again, all of whose deliveries were under way at the last look."""


def _model(name: str) -> Any:
    """Return a model of ours, late: a relay's child process imports this before Django is set up."""
    return apps.get_model("django_outbox", name)


def _forget_attempts(ids: Sequence[UUID], using: str) -> None:
    _model("WebhookAttempt").objects.using(using).filter(delivery_id__in=list(ids)).delete()


DELIVERIES: Final = engine.Queue(
    name="webhooks",
    model_name="WebhookDelivery",
    content=("event_id", "endpoint_id", "event_type", "organization_id", "body"),
    bulk="body",
    handlers=False,
    announcement="webhook.delivery.exhausted",
    outcome_columns={"reason": "text", "last_status": "int"},
    on_purge=_forget_attempts,
)


def _tables(using: str) -> tuple[Dialect, str, str, str]:
    connection = connections[using]
    quote = connection.ops.quote_name
    endpoints, attempts = (_model(name)._meta.db_table for name in ("WebhookEndpoint", "WebhookAttempt"))
    return dialect_of(connection), table_of(DELIVERIES, connection), quote(endpoints), quote(attempts)


# --- fan-out


def insert_deliveries(
    *,
    event_id: UUID,
    event_type: str,
    patterns: Sequence[str],
    organization_id: str,
    body: str,
    quiet: bool,
    using: str,
    endpoint_id: UUID | None = None,
) -> int:
    """
    Insert a delivery for each endpoint that wants the event, in the caller's transaction; return how many.

    One statement. What was written before, by this or by a relay at the same moment, is
    left as it is: of two at once the second waits for the first's commit and then writes
    nothing. A process that dies before the commit leaves nothing. An endpoint that is
    disabled gets a row that waits for an operator to replay it. Endpoints are found by
    organization, in the index for that.
    """
    dialect, deliveries, endpoints, _ = _tables(using)
    values = {
        "event_id": "uuid",
        "event_type": "text",
        "organization_id": "text",
        "body": "text",
        "quiet": "boolean",
    }
    if isinstance(dialect, SQLite):
        # The front of the event's id, which is its time, and random bits of its own: ids stay in order.
        new_id = (
            "substr(o.event_id, 1, 16) || substr('89ab', 1 + (random() & 3), 1)"
            " || substr(lower(hex(randomblob(8))), 2, 15)"
        )
        wanted = (
            "EXISTS (SELECT 1 FROM json_each(e.event_types) AS t WHERE t.value IN (SELECT value FROM json_each(%s)))"
        )
        pattern_list: Any = json.dumps(list(patterns))
    else:
        new_id = "(left(o.event_id::text, 19) || right(gen_random_uuid()::text, 17))::uuid"
        wanted = "jsonb_exists_any(e.event_types, %s::text[])"
        pattern_list = list(patterns)
    whose = "e.organization_id = ''" if not organization_id else "e.organization_id IN ('', %s)"
    params: list[Any] = [organization_id] if organization_id else []
    if endpoint_id is None:
        condition = f"{whose} AND {wanted}"
        params.append(pattern_list)
    else:
        condition, params = "e.id = %s", [dialect.param(endpoint_id)]
    sql = f"""
        INSERT INTO {deliveries} (id, event_id, endpoint_id, event_type, organization_id, body, created_at,
            status, quiet, dead_at, reason)
        SELECT {new_id}, o.event_id, e.id, o.event_type, o.organization_id, o.body, {dialect.clock},
            CASE WHEN e.enabled THEN 'pending' ELSE 'dead' END, o.quiet OR NOT e.enabled,
            CASE WHEN NOT e.enabled THEN {dialect.clock} END,
            CASE WHEN e.enabled THEN '' ELSE '{ENDPOINT_DISABLED}' END
        FROM {dialect.records(values)}, {endpoints} AS e
        WHERE {condition}
        ORDER BY e.id
        ON CONFLICT (event_id, endpoint_id) DO NOTHING"""
    record = {
        "event_id": dialect.id_param(event_id),
        "event_type": event_type,
        "organization_id": organization_id,
        "body": body,
        "quiet": quiet,
    }
    with connections[using].cursor() as cursor:
        cursor.execute(sql, [json.dumps([record], ensure_ascii=False), *params])
        written = int(cursor.rowcount)
    if written:
        wake.notify_on_commit(using, queue=DELIVERIES.name)
    return written


# --- turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a delivery needs of its endpoint, as it stood when it was read."""

    url: str
    enabled: bool
    sealed_secrets: str
    sealed_headers: str
    half_open: bool
    wait_seconds: float
    """For how long pause and breaker leave it alone; 0: they do not."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> Target:
        """Return it from the columns of `_target_columns`."""
        url, enabled, sealed_secrets, sealed_headers, open_seconds, open_left, pause_left = row
        return cls(
            url=url,
            enabled=bool(enabled),
            sealed_secrets=sealed_secrets,
            sealed_headers=sealed_headers,
            half_open=open_seconds > 0,
            wait_seconds=max(open_left or 0.0, pause_left or 0.0, 0.0),
        )


def _target_columns(dialect: Dialect) -> str:
    return f"""e.url, e.enabled, e.sealed_secrets, e.sealed_headers, e.open_seconds,
        {dialect.epoch("e.open_until")} - {dialect.epoch(dialect.now)},
        {dialect.epoch("e.paused_until")} - {dialect.epoch(dialect.now)}"""


@dataclass(frozen=True, slots=True)
class Turn:
    """An endpoint with deliveries to come, and what decides when how many of them may start."""

    endpoint_id: UUID
    target: Target | None
    """``None``: it does not exist any more."""
    due_seconds: float
    """Until the first of them is due; 0: now."""
    slow: bool
    proven: bool
    """It has answered before."""

    @property
    def wait_seconds(self) -> float:
        """For how long it is to be left alone; deliveries of a disabled one are not sent, so nothing keeps them."""
        return self.target.wait_seconds if self.target is not None and self.target.enabled else 0.0

    @property
    def half_open(self) -> bool:
        """Whether its breaker lets one request through."""
        return self.target is not None and self.target.enabled and self.target.half_open


def turns(after: UUID, *, limit: int, using: str) -> tuple[list[Turn], UUID | None]:
    """
    Return endpoints after an id that have deliveries to come, and where to go on (``None``: this was the last).

    The indexes by endpoint are read by jumping from one endpoint to the next, at most
    ``limit`` of them, so the cost depends on neither the deliveries of any nor the
    endpoints that have none.
    """
    dialect, deliveries, endpoints, _ = _tables(using)
    scans = {
        "pending": ("status = 'pending'", "created_at"),
        "waiting": ("status = 'waiting'", "due_at"),
        "dead": ("status = 'dead' AND due_at IS NOT NULL", "due_at"),
    }

    def following(id_: str) -> str:
        heads = " UNION ALL ".join(
            f"SELECT * FROM (SELECT endpoint_id FROM {deliveries} WHERE {scan} AND endpoint_id > {id_}"
            f" ORDER BY endpoint_id LIMIT 1) AS {name}_head"
            for name, (scan, _) in scans.items()
        )
        return f"(SELECT n.endpoint_id FROM ({heads}) AS n ORDER BY n.endpoint_id LIMIT 1)"

    # Each a subselect with a LIMIT, which the planner cannot turn into a join that reads all rows.
    firsts = [
        f"""(SELECT {order} FROM {deliveries} WHERE {scan} AND endpoint_id = turn.id
            AND (lease_until IS NULL OR lease_until <= {dialect.now}) ORDER BY {order}, id LIMIT 1)"""
        for scan, order in scans.values()
    ]
    left = [f"{dialect.epoch(moment)} - {dialect.epoch(dialect.now)}" for moment in firsts]
    start = "%s" if isinstance(dialect, SQLite) else "%s::uuid"
    sql = f"""
        WITH RECURSIVE turn(id, step) AS (
            SELECT {following(start)}, 1
            UNION ALL
            SELECT {following("turn.id")}, turn.step + 1 FROM turn
            WHERE turn.id IS NOT NULL AND turn.step < {int(limit)}
        )
        SELECT turn.id, {", ".join(left)},
            e.streak, e.mean_seconds, e.last_success_at IS NOT NULL, {_target_columns(dialect)}
        FROM turn LEFT JOIN {endpoints} AS e ON e.id = turn.id
        WHERE turn.id IS NOT NULL ORDER BY turn.step"""
    rows = fetch(connections[using], sql, [dialect.id_param(after)] * 3, prepare=True)
    found = []
    for given, pending, waiting, dead, streak, mean, proven, *columns in rows:
        moments = [float(each) for each in (None if pending is None else 0.0, waiting, dead) if each is not None]
        found.append(
            Turn(
                endpoint_id=dialect.id_value(given),
                # All of them may be in some relay's hands, and that relay may be gone.
                due_seconds=max(0.0, min(moments, default=HELD_SECONDS)),
                target=None if columns[0] is None else Target.of(columns),
                slow=columns[0] is not None and Health(streak=streak, mean_seconds=mean).slow,
                proven=bool(proven),
            )
        )
    return found, dialect.id_value(rows[-1][0]) if len(rows) == limit else None


def take_probe(endpoint_id: UUID, *, seconds: float, using: str) -> str | None:
    """
    Take the one request that a half-open breaker lets through, among all relays.

    Return until when it is ours, for `give_probe_back`, or ``None``. The breaker is closed to
    others for ``seconds``: a relay that dies with the request keeps it no longer.
    """
    dialect, _, endpoints, _ = _tables(using)
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"""UPDATE {endpoints} SET open_until = {dialect.after("%s")}
                WHERE id = %s AND open_seconds > 0 AND open_until <= {dialect.now}
                RETURNING CAST(open_until AS text)""",
            [seconds, dialect.id_param(endpoint_id)],
        )
        row = cursor.fetchone()
    return None if row is None else str(row[0])


def give_probe_back(endpoint_id: UUID, until: str, *, using: str) -> None:
    """Let any relay take a probe of which no request came; ``until`` is what `take_probe` returned."""
    dialect, _, endpoints, _ = _tables(using)
    with connections[using].cursor() as cursor:
        # What a settle has written of the breaker since stands.
        cursor.execute(
            f"""UPDATE {endpoints} SET open_until = {dialect.now}
                WHERE id = %s AND open_seconds > 0 AND CAST(open_until AS text) = %s""",
            [dialect.id_param(endpoint_id), until],
        )


# --- attempts


def target(endpoint_id: UUID, *, using: str) -> Target | None:
    """Return an endpoint as it stands now, if it exists."""
    dialect, _, endpoints, _ = _tables(using)
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"SELECT {_target_columns(dialect)} FROM {endpoints} AS e WHERE e.id = %s", [dialect.id_param(endpoint_id)]
        )
        row = cursor.fetchone()
    return None if row is None else Target.of(row)


def open_attempt(lease: engine.Lease, target: Target, *, probe: bool, using: str) -> UUID | None:
    """
    Write that a request is about to be made, and return the attempt's id.

    ``None`` and nothing written: the lease is gone, or the endpoint is not what was read
    of it: changed, disabled, paused, or its breaker open (but for the ``probe``).

    What is written here before the process dies is an attempt with an unknown end. The
    commit does not wait for the disk: a server that loses power may forget the last
    half second of attempts, and no delivery.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    attempt_id = engine.new_id()
    sql = _open_attempt(using, dialect, not connection.in_atomic_block, probe)
    params = [
        dialect.id_param(attempt_id),
        dialect.id_param(lease.id),
        lease.fence,
        lease.holder,
        target.url,
        target.sealed_secrets,
        target.sealed_headers,
    ]
    return attempt_id if fetch(connection, sql, params, prepare=True) else None


@statement
def _open_attempt(using: str, dialect: Dialect, lazy_commit: bool, probe: bool) -> str:  # noqa: FBT001  positional, for the cache
    """Return the statement; both primary keys serve it."""
    _, deliveries, endpoints, attempts = _tables(using)
    rested = f"""AND (e.paused_until IS NULL OR e.paused_until <= {dialect.now})
        AND (e.open_seconds = 0 OR e.open_until IS NULL)"""
    cast = mode = commit_mode = ""
    if not isinstance(dialect, SQLite):
        cast, mode = "::uuid", " CROSS JOIN commit_mode"
        lazy = "set_config('synchronous_commit', 'off', true)" if lazy_commit else "1"
        commit_mode = f"WITH commit_mode AS MATERIALIZED (SELECT {lazy})"
    return f"""
        INSERT INTO {attempts} (id, delivery_id, number, fence, started_at)
        {commit_mode}
        SELECT %s{cast}, d.id, d.attempts, d.fence, {dialect.clock} FROM {deliveries} AS d
        JOIN {endpoints} AS e ON e.id = d.endpoint_id{mode}
        WHERE d.id = %s AND d.fence = %s AND d.leased_by = %s AND d.status NOT IN ('done', 'failed')
            AND e.enabled AND e.url = %s AND e.sealed_secrets = %s AND e.sealed_headers = %s
            {"" if probe else rested}
        RETURNING id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How a request ended, for its row."""

    id: UUID
    reason: str
    http_status: int | None
    duration_ms: int
    error: str
    response: str
    address: str


def close_attempts(ends: Sequence[AttemptEnd], *, using: str) -> None:
    """Write how requests ended, in the transaction of their settle. The primary key serves the join."""
    if not ends:
        return
    dialect, _, _, attempts = _tables(using)
    columns = {
        "id": "uuid",
        "reason": "text",
        "http_status": "int",
        "duration_ms": "int",
        "error": "text",
        "response": "text",
        "address": "text",
    }
    records = [
        {name: dialect.json_value(getattr(end, name)) for name in columns}
        for end in sorted(ends, key=lambda end: end.id)
    ]
    assignments = ", ".join(f"{name} = o.{name}" for name in columns if name != "id")
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"""UPDATE {attempts} AS a SET finished_at = {dialect.clock}, {assignments}
                FROM {dialect.records(columns)} WHERE a.id = o.id""",
            [json.dumps(records, ensure_ascii=False)],
        )


# --- health

_HEALTH: Final = tuple(each.name for each in fields(Health))
_MOMENTS: Final = frozenset(name for name in _HEALTH if name.endswith(("_at", "_until", "_since")))
_KINDS: Final = {
    name: "float8"
    if name in _MOMENTS or name == "mean_seconds"
    else "boolean"
    if name == "enabled"
    else "text"
    if name in {"disabled_reason", "last_error"}
    else "bigint"
    for name in _HEALTH
}


@dataclass(frozen=True, slots=True)
class Patient:
    """An endpoint, locked, with its health."""

    health: Health
    url: str
    organization_id: str


def lock_health(endpoint_ids: Sequence[UUID], *, using: str) -> tuple[dict[UUID, Patient], float]:
    """
    Lock endpoints in id order, in the caller's transaction; return them, and the time.

    Two relays that settle deliveries of the same endpoints wait for one another here,
    for as long as a settle takes, and cannot deadlock.
    """
    dialect, _, endpoints, _ = _tables(using)
    names = ", ".join(dialect.epoch(name) if name in _MOMENTS else name for name in _HEALTH)
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"""SELECT id, url, organization_id, {dialect.epoch(dialect.clock)}, {names} FROM {endpoints}
                WHERE id IN {dialect.id_list()} ORDER BY id {dialect.lock}""",
            [json.dumps([dialect.id_param(id_) for id_ in endpoint_ids])],
        )
        rows = cursor.fetchall()
    found = {
        dialect.id_value(id_): Patient(
            Health(**dict(zip(_HEALTH, values, strict=True)) | {"enabled": bool(values[0])}), url, organization
        )
        for id_, url, organization, _, *values in rows
    }
    return found, float(rows[0][3]) if rows else 0.0


def write_health(healths: Mapping[UUID, Health], *, using: str) -> None:
    """Write what became of endpoints that the caller's transaction has locked. No indexed column: HOT updates."""
    if not healths:
        return
    dialect, _, endpoints, _ = _tables(using)

    def column(name: str) -> str:
        if name not in _MOMENTS:
            return f"o.{name}"
        if isinstance(dialect, SQLite):
            return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', o.{name}, 'unixepoch')"
        return f"to_timestamp(o.{name})"

    records = [
        {"id": dialect.id_param(id_), **{name: getattr(health, name) for name in _HEALTH}}
        for id_, health in healths.items()
    ]
    with connections[using].cursor() as cursor:
        cursor.execute(
            f"""UPDATE {endpoints} AS e SET {", ".join(f"{name} = {column(name)}" for name in _HEALTH)}
                FROM {dialect.records({"id": "uuid", **_KINDS})} WHERE e.id = o.id""",
            [json.dumps(records, ensure_ascii=False)],
        )


# --- replay and retention


def dead_since(endpoint_id: UUID, since: datetime, *, using: str, after: UUID | None, limit: int) -> list[UUID]:
    """Return dead deliveries of an endpoint that were created since, oldest first, a page at a time."""
    rows = (
        _model("WebhookDelivery")
        .objects.using(using)
        .filter(endpoint_id=endpoint_id, status="dead", created_at__gte=since)
    )
    if after is not None:
        rows = rows.filter(id__gt=after)
    return list(rows.order_by("id").values_list("id", flat=True)[:limit])


def purge_unwanted(*, using: str, limit: int) -> int:
    """Delete deliveries of missing and disabled endpoints after 30 days; the index of just these finds them."""
    dialect, deliveries, _, _ = _tables(using)
    reasons = ", ".join(f"'{reason}'" for reason in UNWANTED)
    before = dialect.after("-(%s)")
    if not isinstance(dialect, SQLite):
        before = f"({dialect.now} - %s * interval '1 second')"
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute(
            f"""SELECT id FROM {deliveries}
                WHERE status = 'dead' AND reason IN ({reasons}) AND dead_at <= {before}
                    AND (lease_until IS NULL OR lease_until <= {dialect.now})
                ORDER BY dead_at, id LIMIT %s {dialect.lock_skipping}""",
            [UNWANTED_SECONDS, limit],
        )
        ids = [dialect.id_value(row[0]) for row in cursor.fetchall()]
        _forget_attempts(ids, using)
        _model("WebhookDelivery").objects.using(using).filter(id__in=ids).delete()
    return len(ids)
