"""Deliver: run one leased call of a task, and tell Django's signals about it."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_outbox import lease as engine
from django_outbox.conf import TaskSettings, get_settings
from django_outbox.delivery import Cause, Result, SingleRun, Work
from django_outbox.errors import InvalidPayload, Reject, clean_error
from django_outbox.payload import encode_json
from django_outbox.retry import Schedule
from django_outbox.tasks import compat, store
from django_outbox.tasks.store import TASKS, Found, Unknown, decoded, error_entry

__all__ = ["TaskRun", "TaskWork"]

logger = logging.getLogger("django_outbox.tasks")

_OPTIONS: Final[Mapping[str, str]] = {
    # column → field of the task
    "backend_alias": "backend",
    "queue_name": "queue_name",
    "priority": "priority",
    "max_attempts": "max_attempts",
    "timeout_seconds": "timeout",
    "waits": "retry",
    "dedupe_key": "dedupe_key",
}
_COLUMNS: Final = ("queue_name", "priority")
_FORGOTTEN: Final = "builtins.ImportError"
_LANES: Final = 50
"""Priorities and queue names that one look claims from; what is behind them has its turn at the next."""


TELL_EVERY_SECONDS: Final = 60.0
_told: dict[str, float] = {}
"""When an unknown task was last spoken of, by its path; emptied when many have been."""


def _tell_of_unknown(path: str, lease: engine.Lease) -> None:
    """Log that a call waits for code; the many that wait for the same share a line a minute."""
    now = time.monotonic()
    if now - _told.get(path, -TELL_EVERY_SECONDS) >= TELL_EVERY_SECONDS:
        if len(_told) >= 1_000:
            _told.clear()
        _told[path] = now
        logger.warning("no such task here, its calls wait task=%s id=%s", path, lease.id)


class TaskRun(SingleRun):
    """One call of a task, on its way."""

    def __init__(self, lease: engine.Lease, *, using: str) -> None:
        content = lease.content
        super().__init__(lease, using=using, name=content["task_path"])
        self.timeout = content["timeout_seconds"]
        self._found: Found | None = None
        self._unknown = ""
        self._started: float | None = None
        self._told = False
        self._caught: dict[str, str] | None = None
        self._returned: Any = None
        try:
            self._found = store.find_task(self.name)
            self.is_async = self._found.is_async
        except Unknown as error:
            self._unknown = clean_error(str(error), limit=500)

    @property
    def cause(self) -> Cause:
        """What an emit or an enqueue inherits that the task makes."""
        content = self.lease.content
        return Cause(self.lease.id, content["request_id"], content["organization_id"], self.lease.quiet)

    @property
    def schedule(self) -> Schedule | None:
        """The call's own schedule; ``None``: the queue's."""
        content = self.lease.content
        attempts, waits = content["max_attempts"], content["waits"]
        if attempts is None and waits is None:
            return None
        queue = get_settings().tasks.schedule
        return replace(
            queue,
            max_attempts=queue.max_attempts if attempts is None else attempts,
            waits=() if waits is None else tuple(decoded(waits)),
        )

    def refused(self) -> Result | None:
        """Park the call of a task that this process does not know."""
        if self._found is not None:
            return None
        since = self.lease.content["parked_at"]
        now = self.lease.clock.now()
        spent = now - (now if since is None else since) >= get_settings().park_for_seconds
        columns: dict[str, Any] = {}
        if since is None:
            columns["parked_at"] = datetime.fromtimestamp(now, UTC)
        _tell_of_unknown(self.name, self.lease)
        text = f"no relay that had this task knows {self.name}: {self._unknown}"
        if spent:
            columns["errors"] = self._errors_with(error_entry(_FORGOTTEN, text))
        return Result(text, outcome=engine.Park(spent=spent), columns=columns)

    def invoke(self, step: SingleRun, *, timeout: float, savepoint: bool = False) -> Result:
        """Run the task in this thread; the columns of its outcome come with the result, from whichever process."""
        result = super().invoke(step, timeout=timeout, savepoint=savepoint)
        return replace(result, columns=self._columns(result))

    def perform(self, *, timeout: float) -> Result:
        """Run the task; what it raises is kept for its result, and goes on."""
        found = self._found
        if found is None:
            return Result(f"the child process does not know the task {self.name}")
        # Cut to the millisecond, so that SQLite, which keeps no more, never shows an end before its
        # start; but no start before its row was written, which may be in the same millisecond.
        digits = 3 if connections[self.using].vendor == "sqlite" else 6
        written = round(self.lease.content["created_at"], digits)
        self._started = max(int(self.lease.clock.now() * 1_000) / 1_000, written)
        result = self._result_so_far()
        compat.task_started.send_robust(_sender(result), task_result=result)
        try:
            self._returned = self._normal(self._call(found, result, timeout))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._caught = error_entry(
                f"{type(error).__module__}.{type(error).__qualname__}",
                "".join(traceback.format_exception(error)),
            )
            if self._is_last(error):
                result.errors.append(compat.TaskError(**self._caught))
                self._tell_finished(result, compat.TaskResultStatus.FAILED)
            raise
        object.__setattr__(result, "_return_value", self._returned)
        self._tell_finished(result, compat.TaskResultStatus.SUCCESSFUL)
        return Result()

    def settled(self) -> engine.Settled:
        """Return how the call ended, with its own schedule and the columns of its outcome."""
        settled = super().settled()
        result = self._result
        if result is None:
            return settled
        if isinstance(settled.outcome, engine.Retry) and (schedule := self.schedule) is not None:
            settled = replace(settled, outcome=engine.Retry(settled.outcome.delay, schedule))
        if not settled.columns and not isinstance(settled.outcome, engine.Park):
            # It did not come from `invoke`: past its time limit, interrupted, or its process was lost.
            settled = replace(settled, columns=self._columns(result))
        return settled

    # Running it.

    def _call(self, found: Found, result: Any, timeout: float) -> Any:
        args = [compat.TaskContext(task_result=result), *result.args] if found.task.takes_context else result.args
        if found.is_async:
            return async_to_sync(_bounded)(found, args, result.kwargs, timeout)
        returned = found.function(*args, **result.kwargs)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("the task returned a coroutine, which would never run; write `async def`")
        return returned

    @staticmethod
    def _normal(value: Any) -> Any:
        """Return what will be read back for a return value."""
        if value is None:
            return None
        try:
            return decoded(encode_json(value, what="return value", limit=get_settings().max_payload_bytes))
        except InvalidPayload as error:
            # The work is done; running it again would only do it again.
            raise Reject(f"The task ran, but what it returned cannot be kept. {error}") from error

    def _is_last(self, error: BaseException) -> bool:
        """Return whether no further attempt follows this one's failure by itself."""
        lease = self.lease
        schedule = self.schedule or get_settings().tasks.schedule
        return isinstance(error, Reject) or lease.was_dead or lease.attempts >= schedule.max_attempts

    # Telling about it.

    def _result_so_far(self) -> Any:
        content = self.lease.content
        task = _plain_task(self.name, *(content[name] for name in _OPTIONS))
        if content["not_before"] is not None:
            task = store.restored(task, run_after=_moment(content["not_before"]))
        payload = decoded(content["payload"])
        started = _moment(self._started)
        return compat.TaskResult(
            task=task,
            id=self.lease.text,
            status=compat.TaskResultStatus.RUNNING,
            enqueued_at=_moment(content["created_at"]),
            started_at=_moment(content["started_at"]) or started,
            last_attempted_at=started,
            finished_at=None,
            args=payload["args"],
            kwargs=payload["kwargs"],
            backend=content["backend_alias"],
            errors=[compat.TaskError(**entry) for entry in decoded(content["errors"])],
            worker_ids=self._worker_ids(),
        )

    def _tell_finished(self, result: Any, status: Any) -> None:
        """Send ``task_finished``, unless the attempt counts as over already: the thread came back too late."""
        with self._lock:
            told, self._told = self._told or (self._begun and not self._running), True
        if not told:
            object.__setattr__(result, "status", status)
            object.__setattr__(result, "finished_at", _moment(self.lease.clock.now()))
            compat.task_finished.send_robust(_sender(result), task_result=result)

    # Writing it down.

    def _columns(self, result: Result) -> dict[str, Any]:
        content = self.lease.content
        now = datetime.fromtimestamp(self._started or self.lease.clock.now(), UTC)
        columns: dict[str, Any] = {"worker_ids": self._worker_ids(), "last_attempted_at": now}
        if content["started_at"] is None:
            columns["started_at"] = now
        if content["parked_at"] is not None:
            columns["parked_at"] = None
        if not result.ok:
            columns["errors"] = self._errors_with(self._caught or error_entry("builtins.RuntimeError", result.error))
        elif self._returned is not None:
            columns["return_value"] = self._returned
        return columns

    def _worker_ids(self) -> list[str]:
        """Return the holders of all attempts, this one's last."""
        known = decoded(self.lease.content["worker_ids"])
        missing = self.lease.lost_leases + int(self.lease.suspect)
        return [*known, *[store.LOST] * missing, self.lease.holder][-store.WORKERS_KEPT :]

    def _errors_with(self, entry: Mapping[str, str]) -> list[Any]:
        errors = [*decoded(self.lease.content["errors"]), dict(entry)]
        return errors if len(errors) <= store.ERRORS_KEPT else [errors[0], *errors[1 - store.ERRORS_KEPT :]]


async def _bounded(found: Found, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float) -> Any:  # noqa: ASYNC109  raised in our words
    try:
        async with asyncio.timeout(timeout) as limit:
            return await found.function(*args, **kwargs)
    except TimeoutError:
        # The task's own TimeoutError is the task's own failure.
        if not limit.expired():
            raise
        raise TimeoutError(f"the task took longer than its {timeout:g} s") from None


@lru_cache(maxsize=1_024)
def _plain_task(path: str, *options: Any) -> Any:
    """Return the task as it was enqueued, by the values of its `_OPTIONS`; rows of one kind share one."""
    values = dict(zip(_OPTIONS.values(), options, strict=True))
    if values["retry"] is not None:
        values["retry"] = tuple(decoded(values["retry"]))
    return store.restored(store.find_task(path).task, run_after=None, **values)


def _sender(result: Any) -> type:
    """Return who sends the signals about a call: its backend's class, or the base where the settings lost it."""
    try:
        return type(compat.task_backends[result.backend])
    except ImproperlyConfigured:
        return compat.BaseTaskBackend


def _moment(epoch: float | None) -> datetime | None:
    # To the millisecond, for the signals: SQLite's arithmetic is off by some microseconds.
    return None if epoch is None else store.shown(datetime.fromtimestamp(round(epoch, 3), UTC))


class TaskWork(Work):
    """
    The task queue, or those of its parts that bear some queue names.

    ``owed_to`` returns the ``deliveries`` of an event of a type, for the announcements;
    the registry of handlers belongs to a sibling of this package.
    """

    queue = TASKS

    def __init__(self, owed_to: Callable[[str], str], only: Sequence[str] = ()) -> None:
        self._owed_to = owed_to
        self._only = tuple(dict.fromkeys(only))
        self._found = 0
        """Looks in a row that found something due."""

    @property
    def label(self) -> str:
        """``tasks``, with the queue names that are served where not all are."""
        return f"tasks ({', '.join(self._only)})" if self._only else "tasks"

    def narrowed(self, parts: Sequence[str]) -> TaskWork:
        """Return the work on the calls of some queue names only."""
        if wrong := [part for part in parts if not part or len(part) > 64]:
            raise ValueError(f"{wrong[0]!r:.80} is not the queue name of a task.")
        return TaskWork(self._owed_to, parts)

    def settings(self) -> TaskSettings:
        """Return ``OUTBOX["TASKS"]``."""
        return get_settings().tasks

    def start(self, lease: engine.Lease, *, using: str) -> TaskRun:
        """Return the run of a call."""
        return TaskRun(lease, using=using)

    def scopes(self, room: int, *, using: str) -> Iterable[tuple[Mapping[str, Any], int]]:
        """
        Return the priorities and queue names that have something due, the highest first.

        Queue names of one priority share the room, in an order that changes, so that none
        of them waits until another is empty.
        """
        lanes: dict[int, list[str]] = defaultdict(list)
        for scope in self._due_scopes(using):
            if scope.seconds <= 0:
                name, priority = scope.values
                lanes[priority].append(name)
        scopes: list[tuple[Mapping[str, Any], int]] = []
        for priority in sorted(lanes, reverse=True):
            names = lanes[priority]
            random.shuffle(names)
            share = max(1, -(-room // len(names)))
            scopes += [({"queue_name": name, "priority": priority}, share) for name in names]
        return scopes[:_LANES]

    def next_due_seconds(self, *, using: str) -> float | None:
        """Return the seconds until something can be claimed, 0 for now, ``None`` if nothing is in sight."""
        scopes = self._due_scopes(using)
        return scopes[0].seconds if scopes else None

    def _due_scopes(self, using: str) -> list[engine.Scope]:
        # After a look that found something comes one that finds nothing, unless there is a backlog.
        prepare = self._found < 2
        scopes = engine.due_scopes(self.queue, _COLUMNS, using=using, only=self._only, prepare=prepare)
        self._found = self._found + 1 if scopes and scopes[0].seconds <= 0 else 0
        return scopes

    def announce(self, settled: engine.Settled, status: str) -> engine.NewRow:
        """Return the event that says that a task is dead or failed."""
        lease, content = settled.lease, settled.lease.content
        payload = {
            "queue": lease.queue.name,
            "id": lease.text,
            "task": content["task_path"],
            "queue_name": content["queue_name"],
            "priority": content["priority"],
            "status": status,
            "attempts": lease.attempts,
            "error": settled.error,
        }
        return engine.NewRow(
            id=engine.new_id(),
            type=self.queue.announcement,
            payload=json.dumps(payload, ensure_ascii=False),
            deliveries=self._owed_to(self.queue.announcement),
            organization_id=content["organization_id"],
            request_id=content["request_id"],
            causation_id=lease.id,
            quiet=True,
        )
