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

from django_outbox.lease.claim import SMALL_LIMIT, USUAL_LIMIT, Claimer, next_due_seconds
from django_outbox.lease.due import Scope, due_scopes
from django_outbox.lease.enqueue import insert_rows, insert_values, keep_rows
from django_outbox.lease.insert import insert_events
from django_outbox.lease.operate import DISCARDABLE, RETRYABLE, Backlog, backlog, discard, purge, rename_handler, retry
from django_outbox.lease.rows import (
    Clock,
    Dead,
    Done,
    Fail,
    Lease,
    NewRow,
    NewTask,
    Outcome,
    Park,
    Queue,
    Released,
    Report,
    Retry,
    Settled,
    holder_name,
    new_id,
    new_ids,
)
from django_outbox.lease.settle import LOCKED, REFUSED_TEXT, record, release, renew, settle
from django_outbox.lease.tasks import insert_tasks
from django_outbox.lease.vendors import database_now, shift_clock

__all__ = [
    "DISCARDABLE",
    "LOCKED",
    "REFUSED_TEXT",
    "RETRYABLE",
    "SMALL_LIMIT",
    "USUAL_LIMIT",
    "Backlog",
    "Claimer",
    "Clock",
    "Dead",
    "Done",
    "Fail",
    "Lease",
    "NewRow",
    "NewTask",
    "Outcome",
    "Park",
    "Queue",
    "Released",
    "Report",
    "Retry",
    "Scope",
    "Settled",
    "backlog",
    "database_now",
    "discard",
    "due_scopes",
    "holder_name",
    "insert_events",
    "insert_rows",
    "insert_tasks",
    "insert_values",
    "keep_rows",
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
