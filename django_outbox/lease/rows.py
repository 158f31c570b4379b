"""What the engine speaks of: ids, queues, leases, and the ways in which a delivery ends."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.apps import apps

from django_outbox.retry import Schedule

if TYPE_CHECKING:
    from django_outbox.models import Leasable

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
    outcome_columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Columns of its own that a settle may write (column → PostgreSQL type); see `Settled.columns`."""
    retry_condition: str = ""
    """SQL on the row's own columns; a row for which it is not true is never retried. Empty: all may be."""
    kind: str = ""
    """The column that says what sort of row it is: an event's type, a task's path. Empty: there are no sorts."""
    on_discard: Callable[[Sequence[UUID], str], None] | None = None
    """Called with the ids that became failed by an operator's hand, and the alias, in the same transaction."""
    on_purge: Callable[[Sequence[UUID], str], None] | None = None
    """Called with the ids that a purge deletes, and the alias, in the same transaction."""

    @property
    def model(self) -> type[Leasable]:
        """The model behind the queue; a name without an app label is one of ours."""
        label, _, name = self.model_name.rpartition(".")
        return apps.get_model(label or "django_outbox", name)

    @property
    def parks(self) -> bool:
        """Whether a row of one step waits, since its ``parked_at``, for a relay that has code for its kind."""
        return "parked_at" in self.outcome_columns

    @property
    def plural(self) -> str:
        """What the rows are called."""
        return str(self.model._meta.verbose_name_plural)

    def counted(self, rows: int) -> str:
        """Return a number of the queue's rows in words: ``1 event``, ``2,000 emails``."""
        return f"{rows:,} {self.model._meta.verbose_name if rows == 1 else self.plural}"


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
        global _latest_text  # noqa: PLW0603
        milliseconds = int(self.now() * 1_000)
        # Many deliveries end within one millisecond.
        latest = _latest_text
        if latest[0] != milliseconds:
            moment = datetime.fromtimestamp(milliseconds / 1_000, UTC)
            text = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            _latest_text = latest = (milliseconds, text)
        return latest[1]


_latest_text = (0, "")
"""What `Clock.text` returned last, with its milliseconds since 1970; replaced as a whole, by any thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """
    The right to work one row until ``deadline``, a reading of this process's monotonic clock.

    The deadline is counted from before the claim was sent, so it never outlasts the
    row's ``lease_until`` on the database.
    """

    queue: Queue
    id: UUID
    text: str
    """The id as text, made once."""
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
    seconds: float
    """How long the lease was given for, and is renewed for."""
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
    """
    The attempt failed; ``delay`` is the least wait that was asked for, in seconds.

    ``schedule`` is the row's own, where it has one; otherwise the queue's decides.
    """

    delay: float | None = None
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """Nothing failed, but something is owed to code this relay does not have; ``spent``: the time for that is over."""

    spent: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """What is left was refused for good."""


@dataclass(frozen=True, slots=True)
class Dead:
    """Nothing more is tried by itself, not even slowly: an operator's retry alone brings the row back."""


@dataclass(frozen=True, slots=True)
class Released:
    """
    Nothing was tried, through no fault of the row's: its attempt is given back, its status and time stay.

    Its holder ends such a lease with `release`; `settle` refuses it.
    """


Outcome = Done | Retry | Park | Fail | Dead | Released
"""The closed set of ways in which a delivery ends; `_Record.of` has the one ``match`` over it."""


@dataclass(slots=True)
class Settled:
    """
    A lease with its outcome; ``failures`` replaces the column, ``None`` leaves it.

    ``columns`` are values for the queue's `outcome_columns`: what is absent stays as it is, ``None``
    is NULL. Values are text, numbers, booleans, aware datetimes, UUIDs, or JSON for a jsonb column.
    """

    lease: Lease
    outcome: Outcome
    delivered: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Any] | None = None
    error: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """One task to insert; JSON columns as text, already validated."""

    id: UUID
    task_path: str
    backend_alias: str
    queue_name: str
    priority: int
    payload: str
    run_after: datetime | None = None
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    waits: str | None = None
    dedupe_key: str = ""
    organization_id: str = ""
    request_id: str = ""
    causation_id: UUID | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What an operator verb did: rows changed, rows a relay holds under a live lease, rows in another status."""

    changed: int = 0
    leased: int = 0
    skipped: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(self.changed + other.changed, self.leased + other.leased, self.skipped + other.skipped)
