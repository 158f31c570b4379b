"""
The audit log: every event once, in a chain of hashes.

An entry's hash covers its content and the hash before it, so whoever changes, removes or
inserts one changes every hash after it. The right to append is the lock on one row, the
chain's head, held in a transaction of its own that does nothing else. The order is the
one in which entries were completed, which is neither that of emits nor of commits.

`verify` reads the chain; ``docs/reference/audit.md`` says how another program does it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import DatabaseError, InterfaceError, OperationalError, connections, router, transaction

from django_outbox.conf import get_settings
from django_outbox.events import Event
from django_outbox.lease.vendors import SQLite, dialect_of

__all__ = ["GENESIS", "Broken", "Verified", "append", "canonical", "chain_hash", "protect", "verify"]

GENESIS: Final = "0" * 64
"""What stands for the hash before the first entry's."""
VERSION: Final = 1
"""Of the content's form; part of it."""

_HEAD_ID: Final = 1
_BATCH: Final = 100
_PAGE: Final = 2_000
_PAGE_BYTES: Final = 8 * 2**20
_LOCK_SECONDS: Final = 10
_TRIGGER: Final = "django_outbox_audit_append_only"
_REFUSAL: Final = "the audit log is append-only: its entries are neither changed nor deleted"


# Made once: json.dumps() makes one for each call that is not plain.
_canonical: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def canonical(value: Any) -> str:
    """
    Return a JSON value as the one text that is hashed.

    Keys sorted by code point, no white space, characters as they are (UTF-8), numbers as
    Python writes them, no NaN.
    """
    return _canonical(value)


def chain_hash(previous: str, content: str) -> str:
    """Return the hash of an entry: SHA-256 over the hash before it, a line feed and its content, in hexadecimal."""
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()


# --- appending -------------------------------------------------------------------------------------------------------


class _Ticket:
    """An event that a thread waits to see entered."""

    __slots__ = ("_called", "error", "event", "over")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.over = False
        self.error: Exception | None = None
        # A bare lock, released once: thousands a second of `threading.Event` cost as much as the writing.
        self._called = threading.Lock()
        self._called.acquire()

    def wait(self) -> None:
        """Return when the thread is to go on: the event is entered or failed, or else it is the thread's turn."""
        self._called.acquire()

    def call(self) -> None:
        """Have the thread go on."""
        self._called.release()


@dataclass(slots=True)
class _Line:
    """
    The threads of this process that want to append to one database's chain.

    Only one transaction at a time can have the head, so the thread whose turn it is
    writes for all that wait, and then calls the next.
    """

    busy: bool = False
    waiting: deque[_Ticket] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, ticket: _Ticket) -> None:
        """Return once the event is over, or once it is this thread's turn."""
        with self.lock:
            if not self.busy:
                self.busy = True
                return
            self.waiting.append(ticket)
        try:
            ticket.wait()
        except BaseException:
            self._forsake(ticket)
            raise

    def _forsake(self, ticket: _Ticket) -> None:
        with self.lock:
            turn = ticket not in self.waiting and not ticket.over
            if not turn and not ticket.over:
                self.waiting.remove(ticket)
        if turn:
            self.leave()

    def take(self) -> list[_Ticket]:
        """Return those who wait, for the thread whose turn it is to write along."""
        with self.lock:
            return [self.waiting.popleft() for _ in range(min(len(self.waiting), _BATCH))]

    def leave(self) -> None:
        """End the turn, and call who comes next."""
        with self.lock:
            if self.waiting:
                self.waiting.popleft().call()
            else:
                self.busy = False


_lines: dict[str, _Line] = {}


def append(event: Event, *, using: str | None = None) -> None:
    """
    Enter an event, once however often this is called; return when that is committed.

    Inside a transaction of the caller's the entry is part of it, and the chain stays
    locked until it ends: a handler calls this outside of one. A process that dies before
    the commit leaves nothing, and the redelivered event is entered then.
    """
    alias = using or get_settings().database
    if connections[alias].in_atomic_block:
        _write(lambda: [event], alias, look=True)
        return
    line = _lines.setdefault(alias, _Line())
    ticket = _Ticket(event)
    line.enter(ticket)
    if not ticket.over:
        try:
            _write_for_all(line, ticket, alias)
        finally:
            line.leave()
    if ticket.error is not None:
        raise ticket.error


def _write_for_all(line: _Line, ticket: _Ticket, using: str) -> None:
    """Write the event of the thread whose turn it is, and those of all that wait; each gets its own error."""
    batch = [ticket]

    def events() -> list[Event]:
        # Asked once the head is locked: who came in the meantime is written along.
        batch.extend(line.take())
        return [each.event for each in batch]

    try:
        try:
            _write(events, using, look=ticket.event.attempt > 1)
        except (OperationalError, InterfaceError):
            raise
        except (DatabaseError, TypeError, ValueError):
            # The database is there, so one of them is at fault: it has an entry already, of a run that was
            # lost or is made twice, or cannot be entered at all.
            for each in batch:
                _write_alone(each, using)
    except BaseException as error:
        for each in batch:
            each.error = error if isinstance(error, Exception) else RuntimeError(f"interrupted: {error!r}")
        raise
    finally:
        for each in batch:
            each.over = True
        for each in batch[1:]:
            each.call()


def _write_alone(ticket: _Ticket, using: str) -> None:
    event = ticket.event
    try:
        _write(lambda: [event], using, look=True)
    except (DatabaseError, InterfaceError, TypeError, ValueError) as error:
        ticket.error = error


def _write(events: Callable[[], Sequence[Event]], using: str, *, look: bool) -> None:
    """
    Append events in one transaction, under the lock on the head.

    ``look``: leave out those that have an entry. Of two relays with the same event the
    second waits at the head for the first's commit, and then finds its entry: the
    statement that looks has a snapshot of its own.
    """
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        position, last, now = _locked_head(cursor, using)
        fresh = {event.id: event for event in events()}
        if look:
            entered = _entered(cursor, list(fresh), using)
            fresh = {id_: event for id_, event in fresh.items() if id_ not in entered}
        dialect = dialect_of(connections[using])
        recorded_at, now_text = dialect.json_value(now), _text(now)
        rows: list[dict[str, Any]] = []
        for event in fresh.values():
            position += 1
            content = _canonical(_document(event, position, now_text))
            previous, last = last, chain_hash(last, content)
            rows.append(
                {
                    "id": dialect.id_param(event.id),
                    "position": position,
                    "type": event.type,
                    "aggregate_type": event.aggregate_type,
                    "aggregate_id": event.aggregate_id,
                    "organization_id": event.organization_id,
                    "recorded_at": recorded_at,
                    "content": content,
                    "previous_hash": previous,
                    "hash": last,
                }
            )
        if rows:
            _insert(cursor, rows, using)


def _entered(cursor: Any, ids: Sequence[UUID], using: str) -> set[UUID]:
    """Return those of these events that have an entry. The primary key serves it."""
    dialect = dialect_of(connections[using])
    entries, _ = _tables(using)
    marks = ", ".join(["%s"] * len(ids))
    cursor.execute(f"SELECT id FROM {entries} WHERE id IN ({marks})", [dialect.id_param(id_) for id_ in ids])
    return {dialect.id_value(id_) for (id_,) in cursor.fetchall()}


def _insert(cursor: Any, rows: Sequence[Mapping[str, Any]], using: str) -> None:
    """Write the entries, and the head."""
    dialect = dialect_of(connections[using])
    entries, heads = _tables(using)
    names = ", ".join(_COLUMNS)
    values = ", ".join(f"o.{name}" for name in _COLUMNS)
    # One parameter, so that the text is the same for any number of entries, and parsed once.
    insert = f"INSERT INTO {entries} ({names}) SELECT {values} FROM {dialect.records(_COLUMNS)}"
    head = f"UPDATE {heads} SET position = %s, hash = %s WHERE id = {_HEAD_ID}"
    document = json.dumps(rows)
    end = [rows[-1]["position"], rows[-1]["hash"]]
    if isinstance(dialect, SQLite):
        cursor.execute(head, end)
        cursor.execute(insert, [document])
    else:
        # One round trip for both: the head is locked meanwhile, and other relays wait for it.
        cursor.execute(f"WITH head AS ({head}) {insert}", [*end, document])


_COLUMNS: Final = {
    "id": "uuid",
    "position": "bigint",
    "type": "text",
    "aggregate_type": "text",
    "aggregate_id": "text",
    "organization_id": "text",
    "recorded_at": "timestamptz",
    "content": "text",
    "previous_hash": "text",
    "hash": "text",
}
"""Of an entry, in PostgreSQL's types."""
_COPIED: Final = tuple(_COLUMNS)[:7]
"""Columns that repeat what the content says."""


def _document(event: Event, position: int, recorded_at: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "position": position,
        "recorded_at": recorded_at,
        "id": str(event.id),
        "type": event.type,
        "occurred_at": _text(event.occurred_at),
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "organization_id": event.organization_id,
        "request_id": event.request_id,
        "causation_id": None if event.causation_id is None else str(event.causation_id),
        "headers": event.headers,
        "payload": event.payload,
    }


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _locked_head(cursor: Any, using: str) -> tuple[int, str, datetime]:
    """Lock the head, and return the last position and hash, and the time; it is made where there is none yet."""
    connection = connections[using]
    dialect = dialect_of(connection)
    entries, heads = _tables(using)
    fields = f"h.position, h.hash, {dialect.epoch(dialect.clock)}"
    select = f"SELECT {fields} FROM {heads} AS h WHERE h.id = {_HEAD_ID}"
    if isinstance(dialect, SQLite):
        # A transaction that begins with a read fails at once when another wrote since; this takes the write lock.
        cursor.execute(f"UPDATE {heads} SET position = position WHERE id = {_HEAD_ID}")
    else:
        select = f"{select} FOR UPDATE OF h"
        # In a transaction of our own only; inside the caller's they would stay until its end.
        if len(connection.savepoint_ids) == 0:
            # Somebody else's transaction that sits on the head must not hold all handler threads. And the
            # commit need not wait for the disk: the settle that records the delivery stands later in the
            # write-ahead log and does. What a power cut takes, it takes with that, and it is repeated.
            select = f"""
                WITH own AS MATERIALIZED (
                    SELECT set_config('lock_timeout', '{_LOCK_SECONDS}s', true) AS a,
                        set_config('synchronous_commit', 'off', true) AS b
                )
                SELECT {fields}, own.a, own.b FROM own, {heads} AS h WHERE h.id = {_HEAD_ID} FOR UPDATE OF h"""
    cursor.execute(select, [])
    if (row := cursor.fetchone()) is None:
        # Of two that find none the second waits for the first's insert, writes nothing, and then finds it.
        cursor.execute(
            f"""
            INSERT INTO {heads} (id, position, hash)
            SELECT {_HEAD_ID}, coalesce(max(position), 0),
                coalesce((SELECT hash FROM {entries} ORDER BY position DESC LIMIT 1), '{GENESIS}') FROM {entries}
            WHERE true ON CONFLICT (id) DO NOTHING"""
        )
        cursor.execute(select, [])
        row = cursor.fetchone()
    return int(row[0]), str(row[1]), datetime.fromtimestamp(round(float(row[2]), 3), UTC)


def _tables(using: str) -> tuple[str, str]:
    quote = connections[using].ops.quote_name
    entries, heads = (apps.get_model("django_outbox", name)._meta.db_table for name in ("AuditEntry", "AuditHead"))
    return quote(entries), quote(heads)


# --- verifying -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broken:
    """The first entry at which the chain does not hold, and what is wrong there."""

    position: int
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the chain was read, the last hash there, and where it broke, if it did."""

    entries: int
    hash: str
    broken: Broken | None = None


def verify(*, using: str | None = None, known: Mapping[int, str] | None = None, progress: Any = None) -> Verified:
    """
    Read the whole chain and return how far it holds.

    ``known`` are hashes noted earlier, by position: only they can show that the whole
    chain was written anew, or its end removed together with its head. ``progress`` is
    called with the number of entries read, page by page. Entries that are appended
    meanwhile may or may not be read. Memory does not grow with the chain.
    """
    alias = using or get_settings().database
    known = known or {}
    head = apps.get_model("django_outbox", "AuditHead").objects.using(alias).filter(pk=_HEAD_ID).first()
    position, last = 0, GENESIS
    for page in _pages(alias):
        for row in page:
            reason = _wrong(row, position + 1, last)
            if not reason and known.get(row["position"], row["hash"]) != row["hash"]:
                reason = "its hash is not the one that was noted for it"
            if not reason and head is not None and row["position"] == head.position and row["hash"] != head.hash:
                reason = "its hash is not the one at the head of the chain"
            if reason:
                return Verified(position, last, Broken(row["position"], str(row["id"]), reason))
            position, last = row["position"], row["hash"]
        if progress is not None:
            progress(position)
    end = max([0 if head is None else head.position, *known])
    if position < end:
        return Verified(position, last, Broken(position + 1, "", f"it is missing: the chain once had {end:,} entries"))
    if head is None and position:
        return Verified(position, last, Broken(position, "", "the head of the chain is missing"))
    return Verified(position, last)


def _pages(using: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the chain in order, in pages bounded by rows and, by what the page before weighed, by bytes."""
    rows = apps.get_model("django_outbox", "AuditEntry").objects.using(using).order_by("position")
    last, limit = None, 100
    while page := list((rows if last is None else rows.filter(position__gt=last)).values(*_COLUMNS)[:limit]):
        yield page
        last = page[-1]["position"]
        mean = sum(len(row["content"]) for row in page) / len(page)
        limit = max(10, min(_PAGE, int(_PAGE_BYTES / max(mean, 1))))


def _wrong(row: Mapping[str, Any], position: int, previous: str) -> str:
    """Return what is wrong with an entry, given what must come next; nothing if it is right."""
    if row["position"] != position:
        return (
            f"entry {position} is missing before it" if row["position"] > position else "its position is not positive"
        )
    if row["previous_hash"] != previous:
        return "it does not follow the entry before it"
    if row["hash"] != chain_hash(previous, row["content"]):
        return "its content is not what was hashed"
    try:
        content = json.loads(row["content"])
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return "its content is not a JSON object"
    copies = {**row, "id": str(row["id"]), "recorded_at": _text(row["recorded_at"])}
    for name in _COPIED:
        if content.get(name) != copies[name]:
            return f"its column {name} is not what its content says"
    return ""


# --- protection ------------------------------------------------------------------------------------------------------


def protect(*, using: str, wanted: bool) -> None:
    """
    Have the database refuse to update or delete entries, or not; TRUNCATE is not covered.

    Called after ``migrate`` with ``OUTBOX["AUDIT_PROTECT"]``. Whoever owns the table can
    take the trigger away: it prevents accidents, the chain shows intent.
    """
    connection = connections[using]
    model = apps.get_model("django_outbox", "AuditEntry")
    if not router.allow_migrate_model(using, model) or connection.vendor not in {"postgresql", "sqlite"}:
        return
    table = connection.ops.quote_name(model._meta.db_table)
    with transaction.atomic(using=using), connection.cursor() as cursor:
        if model._meta.db_table not in connection.introspection.table_names(cursor):
            return
        if connection.vendor == "postgresql":
            # Looked for first: to drop one that is not there waits for every transaction on the table.
            cursor.execute("SELECT 1 FROM pg_trigger WHERE tgname = %s AND tgrelid = %s::regclass", [_TRIGGER, table])
            there = cursor.fetchone() is not None
            if there and not wanted:
                cursor.execute(f"DROP TRIGGER {_TRIGGER} ON {table}")
            elif wanted and not there:
                cursor.execute(
                    f"CREATE OR REPLACE FUNCTION {_TRIGGER}() RETURNS trigger LANGUAGE plpgsql AS"
                    f" $$ BEGIN RAISE EXCEPTION '{_REFUSAL}' USING ERRCODE = 'integrity_constraint_violation'; END $$"
                )
                cursor.execute(
                    f"CREATE TRIGGER {_TRIGGER} BEFORE UPDATE OR DELETE ON {table}"
                    f" FOR EACH ROW EXECUTE FUNCTION {_TRIGGER}()"
                )
            return
        for verb in ("update", "delete"):
            name = f"{_TRIGGER}_{verb}"
            if wanted:
                cursor.execute(
                    f"CREATE TRIGGER IF NOT EXISTS {name} BEFORE {verb.upper()} ON {table}"
                    f" BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
                )
            else:
                cursor.execute(f"DROP TRIGGER IF EXISTS {name}")


def protect_after_migrate(*, using: str, **_: Any) -> None:
    """Bring the protection in line with the settings; a receiver of ``post_migrate``."""
    protect(using=using, wanted=get_settings().audit_protect)
