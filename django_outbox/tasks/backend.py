"""The backend for ``TASKS``, and the task class whose ``using`` says more than Django's own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

from django.conf import settings as django_settings
from django.utils import timezone

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.delivery import current_cause
from django_outbox.payload import encode_json, unstorable
from django_outbox.tasks import compat, store

__all__ = ["Call", "OutboxTaskBackend", "Task", "enqueue_many"]

_KEY_LENGTH: Final = 255
_PATH_LENGTH: Final = 255
_NAME_LENGTH: Final = 64
_WAITS: Final = 32
_DAY: Final = 86_400.0


if TYPE_CHECKING:
    _BaseTask = compat.BaseTask[..., Any]
else:
    _BaseTask = compat.BaseTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_BaseTask):
    """
    A task of the outbox: Django's own, and what may be said of its attempts.

    What is ``None`` follows ``OUTBOX["TASKS"]``. All of it is written with the call, so
    that a later change in the code is for later calls.
    """

    max_attempts: int | None = None
    """Failed attempts after which a call is dead."""
    timeout: float | None = None
    """Time limit of one attempt, in seconds."""
    retry: tuple[float, ...] | None = None
    """Waits in seconds after the first failure, the second and so on; the last stands for all later ones."""
    dedupe_key: str = ""
    """While a call of this task with this key is live, another adds nothing."""

    def __post_init__(self) -> None:
        """Bring the fields into their form and validate the task."""
        _set(self, "timeout", _seconds(self.timeout))
        given: Any = self.retry
        if given is not None:
            waits = given if isinstance(given, (list, tuple)) else [given]
            _set(self, "retry", tuple(_seconds(wait) for wait in waits))
        self.get_backend().validate_task(self)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        max_attempts: int | None = None,
        timeout: float | timedelta | None = None,
        retry: float | timedelta | Sequence[float | timedelta] | None = None,
        dedupe_key: str | None = None,
    ) -> Any:
        """
        Return the task with other options; what is ``None`` stays.

        :raises InvalidTask: for an option that the backend does not take.
        """
        given: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
            "max_attempts": max_attempts,
            "timeout": timeout,
            "retry": retry,
            "dedupe_key": dedupe_key,
        }
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def _set(task: Task, name: str, value: object) -> None:
    object.__setattr__(task, name, value)


def _seconds(value: Any) -> Any:
    """Return seconds for a duration; anything else as it is, for the validation to name."""
    return value.total_seconds() if isinstance(value, timedelta) else value


@dataclass(frozen=True, slots=True)
class Call:
    """One call for `enqueue_many`."""

    task: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


class OutboxTaskBackend(compat.BaseTaskBackend):
    """
    Enqueues tasks as rows of the outbox, in the caller's transaction, for `run_outbox` to run.

    ``TASKS = {"default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend"}}``. The rows
    are on ``OUTBOX["DATABASE"]``; inside ``atomic()`` there they stand or fall with it,
    outside they commit at once.
    """

    task_class = Task
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Any) -> None:
        """
        Raise `InvalidTask` for a task that could not be enqueued, or never run.

        Beside Django's own rules: lengths that fit, and the fields of `Task`.
        """
        super().validate_task(task)
        for problem in _problems(task):
            raise compat.InvalidTask(problem)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """
        Write a call and return its result; one whose dedupe key is live returns that one's.

        :raises InvalidPayload: (a `TypeError`) for arguments that are not JSON, naming their path.
        """
        return self.enqueue_many([Call(task, args, kwargs)])[0]

    def enqueue_many(self, calls: Iterable[Call]) -> list[Any]:
        """Write many calls in as few statements as the database allows: all of them or, if one is refused, none."""
        settings = get_settings()
        batch = list(calls)
        texts = []
        for call in batch:
            self.validate_task(call.task)
            arguments = {"args": list(call.args), "kwargs": dict(call.kwargs or {})}
            texts.append(encode_json(arguments, what="arguments", limit=settings.max_payload_bytes))
        rows = [
            self._row(call.task, text, id_)
            for call, text, id_ in zip(batch, texts, engine.new_ids(len(batch)), strict=True)
        ]
        # One after the other where keys repeat: the second is to find the first.
        stored = store.insert(rows, using=settings.database)
        results = []
        for call, text, each in zip(batch, texts, stored, strict=True):
            if each.created is None:
                results.append(self.get_result(str(each.id)))
                continue
            result = self._fresh(call.task, text, each)
            compat.task_enqueued.send(type(self), task_result=result)
            results.append(result)
        return results

    def get_result(self, result_id: str) -> Any:
        """
        Return how a call stands.

        :raises TaskResultDoesNotExist: when it never was, is purged, or this code does not know its task.
        """
        return store.read_result(result_id, using=get_settings().database)

    def _row(self, task: Any, payload: str, id_: Any) -> engine.NewTask:
        cause = current_cause.get()
        waits = getattr(task, "retry", None)
        return engine.NewTask(
            id=id_,
            task_path=task.module_path,
            backend_alias=self.alias,
            queue_name=task.queue_name,
            priority=int(task.priority),
            payload=payload,
            run_after=_utc(task.run_after),
            max_attempts=getattr(task, "max_attempts", None),
            timeout_seconds=getattr(task, "timeout", None),
            waits=None if waits is None else json.dumps(list(waits)),
            dedupe_key=getattr(task, "dedupe_key", ""),
            organization_id=cause.organization_id if cause else "",
            request_id=cause.request_id if cause else "",
            causation_id=cause.event_id if cause else None,
            quiet=cause.quiet if cause else False,
        )

    def _fresh(self, task: Any, payload: str, stored: store.Stored) -> Any:
        arguments = store.decoded(payload)
        return compat.TaskResult(
            task=task,
            id=str(stored.id),
            status=compat.TaskResultStatus.READY,
            enqueued_at=store.shown(datetime.fromtimestamp(stored.created or 0.0, UTC)),
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=arguments["args"],
            kwargs=arguments["kwargs"],
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )


def enqueue_many(calls: Iterable[Call]) -> list[Any]:
    """
    Enqueue many calls of tasks, of one backend, at once; return their results in order.

    ``enqueue_many([Call(send, ["a@example.com"]), Call(send, ["b@example.com"])])``

    :raises InvalidTask: for calls of several backends, or of another than the outbox's.
    """
    batch = list(calls)
    if not batch:
        return []
    aliases = {call.task.backend for call in batch}
    backend = batch[0].task.get_backend()
    if len(aliases) > 1 or not isinstance(backend, OutboxTaskBackend):
        raise compat.InvalidTask(
            f"enqueue_many() takes tasks of one backend of the outbox, not of {', '.join(sorted(aliases))}."
        )
    return backend.enqueue_many(batch)


def _problems(task: Any) -> Iterable[str]:
    if len(task.module_path) > _PATH_LENGTH:
        yield f"The path of the task is longer than {_PATH_LENGTH} characters: {task.module_path[:80]}…"
    if not isinstance(task.queue_name, str) or len(task.queue_name) > _NAME_LENGTH or unstorable(task.queue_name):
        yield f"queue_name must be a text of at most {_NAME_LENGTH} characters."
    if task.run_after is not None and not 1 < task.run_after.year < 9998:
        yield "run_after must lie in the years 2 to 9997."
    attempts = getattr(task, "max_attempts", None)
    if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= 10_000):
        yield f"max_attempts is {attempts!r:.80}; it must be a whole number between 1 and 10,000."
    timeout = getattr(task, "timeout", None)
    if timeout is not None and not _is_number(timeout, 0.01, _DAY):
        yield f"timeout is {timeout!r:.80}; it must lie between 0.01 seconds and one day."
    retry = getattr(task, "retry", None)
    if retry is not None and not (1 <= len(retry) <= _WAITS and all(_is_number(wait, 0, 366 * _DAY) for wait in retry)):
        yield f"retry is {retry!r:.80}; it must be 1 to {_WAITS} waits in seconds, each at most a year."
    key = getattr(task, "dedupe_key", "")
    if not isinstance(key, str) or len(key) > _KEY_LENGTH or unstorable(key):
        yield f"dedupe_key must be a text of at most {_KEY_LENGTH} characters, without NUL."


def _is_number(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )


def _utc(moment: datetime | None) -> datetime | None:
    if moment is None:
        return None
    if timezone.is_naive(moment):
        # As Django's own fields do: a naive time is one of the project's zone.
        moment = moment.replace(tzinfo=ZoneInfo(django_settings.TIME_ZONE or "UTC"))
    return moment.astimezone(UTC)
