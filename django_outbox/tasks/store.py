"""The task table: the queue, how a call is written, and how a row is read back as Django's result."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from django.apps import apps
from django.conf import settings as django_settings
from django.db import transaction
from django.utils.module_loading import import_string

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.errors import clean_error
from django_outbox.lease import NewTask
from django_outbox.tasks import compat

if TYPE_CHECKING:
    from django_outbox.models import OutboxTask

__all__ = ["ERRORS_KEPT", "LOST", "TASKS", "Stored", "Unknown", "error_entry", "find_task", "insert", "read_result"]

LOST: Final = "lost"
"""Stands among a result's worker ids for one whose process died before it could say how the attempt ended."""
WORKERS_KEPT: Final = 10_000
"""Their number is the number of attempts, so none is left out below the most attempts that a task may have."""
ERRORS_KEPT: Final = 10
"""Of a task that failed more often, the first error is kept and the latest ones."""
TRACEBACK_LIMIT: Final = 8_000
"""Characters of a traceback that are kept: its end, where the error is."""
_INSERT_AGAIN: Final = 20

# A key that is live again bars the way for a dead row of the same: one of them at a time.
_NO_LIVE_TWIN: Final = """(dedupe_key = '' OR NOT EXISTS (
    SELECT 1 FROM django_outbox_task AS twin WHERE twin.task_path = django_outbox_task.task_path
    AND twin.dedupe_key = django_outbox_task.dedupe_key AND NOT twin.dedupe_key = ''
    AND twin.status IN ('pending', 'waiting') AND twin.id <> django_outbox_task.id))"""

TASKS: Final = engine.Queue(
    name="tasks",
    model_name="OutboxTask",
    content=(
        "task_path",
        "backend_alias",
        "queue_name",
        "priority",
        "payload",
        "max_attempts",
        "timeout_seconds",
        "waits",
        "dedupe_key",
        "errors",
        "worker_ids",
        "created_at",
        "not_before",
        "started_at",
        "parked_at",
        "organization_id",
        "request_id",
    ),
    bulk="payload",
    handlers=False,
    announcement="task.dead",
    outcome_columns={
        "return_value": "jsonb",
        "errors": "jsonb",
        "worker_ids": "jsonb",
        "started_at": "timestamptz",
        "last_attempted_at": "timestamptz",
        "parked_at": "timestamptz",
    },
    retry_condition=_NO_LIVE_TWIN,
    kind="task_path",
)


# --- the code behind a row -------------------------------------------------------------------------------------------


class Unknown(Exception):
    """This process has no task of the path; the text says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A task of this process's code."""

    task: Any
    function: Callable[..., Any]
    is_async: bool


_found: dict[str, Found] = {}


def find_task(path: str) -> Found:
    """
    Return the task that stands at a dotted path.

    :raises Unknown: when there is none, or its module cannot be imported.
    """
    if (known := _found.get(path)) is not None:
        return known
    if not compat.AVAILABLE:
        raise Unknown(compat.MISSING)
    try:
        task = import_string(path)
    except Exception as error:
        raise Unknown(f"{type(error).__name__}: {error}") from error
    if not isinstance(task, compat.BaseTask):
        # An answer to what stands in a row: nothing but a task is ever called.
        raise Unknown(f"{path} is a {type(task).__name__}, not a task")
    found = _found[path] = Found(task, task.func, inspect.iscoroutinefunction(task.func))
    return found


def clear_found() -> None:
    """Forget which tasks were found, for tests that change what stands at a path."""
    _found.clear()


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """The row that stands for a call: a new one, or the live one of its dedupe key."""

    id: UUID
    created: float | None
    """When it was written, in seconds since 1970; ``None``: it was there before."""


def insert(rows: Sequence[NewTask], *, using: str) -> list[Stored]:
    """
    Write calls in the caller's transaction, or in one of their own; return the rows that stand for them, in order.

    Where a dedupe key is held by a transaction under way, that one is waited for. Its row
    may end between our insert and our look for it; then the insert is tried again.
    """
    stored: dict[UUID, Stored] = {}
    # Two transactions that write several keys each wait for one another in one order, and so do not deadlock.
    open_rows = sorted(rows, key=lambda row: (row.task_path, row.dedupe_key)) if len(rows) > 1 else list(rows)
    for _ in range(_INSERT_AGAIN):
        written = _insert_some(open_rows, using)
        if written:
            wake.notify_on_commit(using, queue=TASKS.name)
        stored |= {id_: Stored(id_, created) for id_, created in written.items()}
        open_rows = [row for row in open_rows if row.id not in stored]
        if not open_rows:
            return [stored[row.id] for row in rows]
        for row in open_rows:
            if (live := _live(row, using)) is not None:
                stored[row.id] = Stored(live, None)
        open_rows = [row for row in open_rows if row.id not in stored]
        if not open_rows:
            return [stored[row.id] for row in rows]
    raise RuntimeError(f"The dedupe key {open_rows[0].dedupe_key!r:.120} was taken and freed {_INSERT_AGAIN} times.")


def _insert_some(rows: Sequence[NewTask], using: str) -> dict[UUID, float]:
    if len(rows) <= _BATCH:
        return engine.insert_tasks(rows, using=using)
    written: dict[UUID, float] = {}
    with transaction.atomic(using=using):
        for start in range(0, len(rows), _BATCH):
            written |= engine.insert_tasks(rows[start : start + _BATCH], using=using)
    return written


_BATCH: Final = 1_000


def _live(row: NewTask, using: str) -> UUID | None:
    rows = _model().objects.using(using).filter(task_path=row.task_path, dedupe_key=row.dedupe_key)
    found: UUID | None = rows.filter(status__in=("pending", "waiting")).values_list("pk", flat=True).first()
    return found


def _model() -> type[OutboxTask]:
    return apps.get_model("django_outbox", "OutboxTask")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_result(result_id: str, *, using: str) -> Any:
    """
    Return a row as Django's ``TaskResult``.

    :raises TaskResultDoesNotExist: for an id that names no row, or a row whose task this process does not know.
    """
    try:
        id_ = UUID(str(result_id))
    except ValueError:
        raise compat.TaskResultDoesNotExist(result_id) from None
    row = _model().objects.using(using).filter(pk=id_).first()
    if row is None:
        raise compat.TaskResultDoesNotExist(result_id)
    try:
        found = find_task(row.task_path)
    except Unknown as error:
        raise compat.TaskResultDoesNotExist(f"{result_id}: {error}") from None
    held = row.lease_until is not None and row.lease_until > datetime.now(UTC)
    worker_ids = [*row.worker_ids, row.leased_by] if held and row.leased_by else list(row.worker_ids)
    result: Any = compat.TaskResult(
        task=restored(
            found.task,
            priority=row.priority,
            backend=row.backend_alias,
            queue_name=row.queue_name,
            run_after=shown(row.not_before),
            max_attempts=row.max_attempts,
            timeout=row.timeout_seconds,
            retry=None if row.waits is None else tuple(row.waits),
            dedupe_key=row.dedupe_key,
        ),
        id=str(row.pk),
        status=_status(row.status, held=held),
        enqueued_at=shown(row.created_at),
        started_at=shown(row.started_at),
        last_attempted_at=shown(row.last_attempted_at),
        finished_at=None if held else shown(row.finished_at or row.dead_at),
        args=row.payload["args"],
        kwargs=row.payload["kwargs"],
        backend=row.backend_alias,
        errors=[compat.TaskError(**entry) for entry in row.errors],
        worker_ids=worker_ids,
    )
    object.__setattr__(result, "_return_value", row.return_value)
    return result


def _status(status: str, *, held: bool) -> Any:
    """Return what Django calls a status; a row that waits for a retry is ready, as far as it knows."""
    statuses = compat.TaskResultStatus
    if status == "done":
        return statuses.SUCCESSFUL
    if held:
        return statuses.RUNNING
    return statuses.FAILED if status in {"dead", "failed"} else statuses.READY


def restored(task: Any, **values: Any) -> Any:
    """
    Return a task as it was enqueued: these values where its class has such fields, the task's own elsewhere.

    Nothing is validated, since it was when it was enqueued; a queue name that was taken
    out of the settings meanwhile must not keep its tasks from being read.
    """
    cls = type(task)
    copy = object.__new__(cls)
    for entry in fields(cls):
        value = values[entry.name] if entry.name in values else getattr(task, entry.name)
        object.__setattr__(copy, entry.name, value)
    return copy


def shown(moment: datetime | None) -> datetime | None:
    """Return a moment as Django's own fields would: aware in UTC, or naive in the project's zone without USE_TZ."""
    if moment is None or django_settings.USE_TZ:
        return moment
    return moment.astimezone(ZoneInfo(django_settings.TIME_ZONE)).replace(tzinfo=None)


def error_entry(class_path: str, traceback: str) -> dict[str, str]:
    """Return one entry of ``errors``: the end of the traceback, without what looks like a credential."""
    if len(traceback) > TRACEBACK_LIMIT:
        traceback = "…" + traceback[-TRACEBACK_LIMIT:]
    return {"exception_class_path": class_path, "traceback": clean_error(traceback, limit=2 * TRACEBACK_LIMIT)}


def decoded(text: str) -> Any:
    """Return JSON that the database gave as text."""
    return json.loads(text)
