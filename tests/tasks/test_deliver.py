"""How a call ends: its result, its retries, its death, and what the signals and the announcement say of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_outbox import lease as engine
from django_outbox import on_event
from django_outbox.models import OutboxEvent, OutboxTask
from django_outbox.relay import WORK
from django_outbox.tasks import TASKS, Call, enqueue_many
from django_outbox.testing import drain, travel
from tests.tasks.api import TaskResultStatus, task_finished, task_started
from tests.testapp import tasks
from tests.testapp.models import Note

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    tasks.calls.clear()
    with caplog.at_level(logging.CRITICAL):
        yield


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str, list[str]]]]:
    """What was told of started and finished calls: the signal, the status and the errors."""
    told: list[tuple[str, str, list[str]]] = []

    def started(task_result: Any, **_: Any) -> None:
        told.append(("started", str(task_result.status), []))

    def finished(task_result: Any, **_: Any) -> None:
        errors = [error.exception_class_path for error in task_result.errors]
        told.append(("finished", str(task_result.status), errors))

    task_started.connect(started)
    task_finished.connect(finished)
    yield told
    task_started.disconnect(started)
    task_finished.disconnect(finished)


def run(result: Any, **shift: float) -> OutboxTask:
    """Run what is due, at a later time if so wished, and return the row of the result, which is refreshed."""
    with travel(**shift):
        drain()
    result.refresh()
    return row(result)


def row(result: Any) -> OutboxTask:
    return OutboxTask.objects.get(pk=result.id)


def wait_seconds(stored: OutboxTask) -> float:
    assert stored.due_at is not None
    seconds: float = (stored.due_at - datetime.now(UTC)).total_seconds()
    return seconds


# --- it ends well ----------------------------------------------------------------------------------------------------


def test_a_call_is_run_and_its_result_kept(heard: list[Any]) -> None:
    result = tasks.add.enqueue(1, b=2)
    stored = run(result)
    assert tasks.calls == [(1, 2)]
    assert (result.status, result.return_value, result.is_finished) == (TaskResultStatus.SUCCESSFUL, 3, True)
    assert (result.attempts, result.worker_ids, result.errors) == (1, stored.worker_ids, [])
    # The start is told by the lease's clock, which may be ahead by as long as the claim took.
    assert result.enqueued_at <= result.started_at == result.last_attempted_at
    assert result.started_at <= result.finished_at + timedelta(seconds=1)
    assert heard == [("started", "RUNNING", []), ("finished", "SUCCESSFUL", [])]
    assert (stored.status, stored.attempts) == ("done", 1)


@pytest.mark.parametrize("value", [None, 0, "", "ü🦀", [1, None], {"a": {"b": 1.5}}, 10**30], ids=repr)
def test_any_json_may_be_returned(value: Any) -> None:
    result = tasks.give_back.enqueue(value)
    run(result)
    assert result.return_value == value


def test_an_async_task_and_one_that_takes_its_context() -> None:
    waited = tasks.wait.enqueue()
    told = tasks.tell.enqueue(extra="x")
    run(waited)
    told.refresh()
    assert waited.return_value == "waited"
    assert told.return_value == {"attempt": 1, "id": told.id, "status": "RUNNING", "workers": 1, "extra": "x"}


def test_higher_priorities_are_run_first_and_calls_of_one_in_order() -> None:
    enqueue_many(
        [
            Call(tasks.add.using(priority=-100), [1]),
            Call(tasks.add, [2]),
            Call(tasks.add.using(priority=100, queue_name="mail"), [3]),
            Call(tasks.add, [4]),
            Call(tasks.add.using(priority=100), [5]),
        ]
    )
    drain()
    order = [a for a, _ in tasks.calls]
    assert {*order[:2]} == {3, 5}
    assert order[2:] == [2, 4, 1]


def test_a_deferred_call_waits_for_its_time() -> None:
    result = tasks.add.using(run_after=datetime.now(UTC) + timedelta(hours=1)).enqueue(1)
    assert run(result).status == "waiting"
    assert result.status == TaskResultStatus.READY
    assert run(result, hours=2).status == "done"


def test_what_a_task_emits_and_enqueues_knows_its_cause() -> None:
    on_event("thing.done", name="do")(lambda event: tasks.note.enqueue(event.type))
    result = tasks.emit.enqueue(1)
    OutboxTask.objects.update(request_id="r1", organization_id="o1", quiet=True)
    drain()
    event = OutboxEvent.objects.get()
    assert str(event.causation_id) == result.id
    assert (event.request_id, event.organization_id, event.quiet) == ("r1", "o1", True)
    caused = OutboxTask.objects.get(task_path__endswith=".note")
    assert (caused.causation_id, caused.request_id, caused.quiet) == (event.id, "r1", True)
    assert Note.objects.get().text == "thing.done"


# --- it fails --------------------------------------------------------------------------------------------------------


def test_a_failed_call_is_tried_again_by_the_queues_schedule(heard: list[Any]) -> None:
    result = tasks.fail.enqueue("no luck")
    stored = run(result)
    assert (stored.status, result.status, stored.last_error) == (
        "waiting",
        TaskResultStatus.READY,
        "ValueError: no luck",
    )
    assert 25 <= wait_seconds(stored) <= 30 * 1.25
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "raise ValueError(text)" in error.traceback
    assert heard == [("started", "RUNNING", [])]
    stored = run(result, hours=1)
    assert (stored.attempts, result.attempts, len(result.errors)) == (2, 2, 2)
    assert result.started_at < result.last_attempted_at


def test_after_its_last_attempt_it_is_dead_announced_and_waits_for_a_person(heard: list[Any]) -> None:
    announced: list[Any] = []
    on_event("task.dead", name="alarm")(announced.append)
    result = tasks.fail.using(max_attempts=2, retry=[60]).enqueue("no luck")
    assert run(result).status == "waiting"
    stored = run(result, minutes=2)
    assert (stored.status, stored.due_at, result.status) == ("dead", None, TaskResultStatus.FAILED)
    assert result.finished_at == stored.dead_at
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    assert heard[1:] == [("started", "RUNNING", []), ("finished", "FAILED", ["builtins.ValueError"] * 2)]
    (event,) = announced
    assert event.payload == {
        "queue": "tasks",
        "id": result.id,
        "task": "tests.testapp.tasks.fail",
        "queue_name": "default",
        "priority": 0,
        "status": "dead",
        "attempts": 2,
        "error": "ValueError: no luck",
    }
    assert drain() == {}


def test_a_call_has_the_waits_and_attempts_that_it_was_enqueued_with(settings: Any) -> None:
    settings.OUTBOX = {"TASKS": {"MAX_ATTEMPTS": 1}}
    result = tasks.fail.using(max_attempts=4, retry=[1, 100]).enqueue()
    waits = []
    for hours in (0, 1, 2):
        stored = run(result, hours=hours)
        assert stored.status == "waiting"
        waits.append(wait_seconds(stored) - hours * 3_600)
    assert [round(wait / 100) for wait in waits] == [0, 1, 1]
    assert run(result, hours=3).status == "dead"
    assert run(tasks.fail.enqueue()).status == "dead"


def test_retry_later_and_reject_are_answers(heard: list[Any]) -> None:
    late, never = tasks.later.enqueue(3_600), tasks.refuse.enqueue()
    stored = run(late)
    never.refresh()
    assert (stored.status, round(wait_seconds(stored) / 3_600)) == ("waiting", 1)
    assert row(never).status == "failed"
    assert never.status == TaskResultStatus.FAILED
    assert never.finished_at == row(never).finished_at
    assert [told for told in heard if told[0] == "finished"] == [
        ("finished", "FAILED", ["django_outbox.errors.Reject"])
    ]
    assert OutboxEvent.objects.get().type == "task.dead"


def test_what_is_no_exception_fails_a_call_too() -> None:
    result = tasks.fail_badly.enqueue()
    run(result)
    assert result.errors[0].exception_class is SystemExit


def test_a_return_value_that_cannot_be_kept_is_not_run_for_again() -> None:
    result = tasks.give_something_else.enqueue()
    stored = run(result)
    assert (stored.status, result.status) == ("failed", TaskResultStatus.FAILED)
    assert "return value" in stored.last_error


def test_a_receiver_that_fails_does_not_fail_the_task() -> None:
    def broken(**_: Any) -> None:
        raise KeyError("a receiver's own")

    task_started.connect(broken)
    try:
        assert run(tasks.add.enqueue(1)).status == "done"
    finally:
        task_started.disconnect(broken)


def test_a_call_is_run_also_when_its_backend_was_taken_out_of_the_settings(heard: list[Any]) -> None:
    result = tasks.add.enqueue(1)
    OutboxTask.objects.update(backend_alias="retired")
    drain()
    assert (row(result).status, len(heard)) == ("done", 2)


def test_of_many_errors_the_first_and_the_latest_are_kept_and_long_ones_cut() -> None:
    result = tasks.fail.using(max_attempts=12, retry=[0]).enqueue("x" * 20_000 + " password=hunter2")
    run(result)
    assert (len(result.errors), result.attempts) == (10, 12)
    assert "hunter2" not in result.errors[-1].traceback
    assert len(result.errors[-1].traceback) < 9_000


def test_an_async_task_is_cancelled_at_its_time_limit() -> None:
    result = tasks.wait.using(timeout=0.05).enqueue(30)
    stored = run(result)
    assert stored.last_error == "TimeoutError: the task took longer than its 0.05 s"
    assert result.errors[0].exception_class is TimeoutError


# --- it is not known here --------------------------------------------------------------------------------------------


def unknown(path: str = "tests.testapp.tasks.gone") -> Any:
    result = tasks.add.enqueue(1)
    OutboxTask.objects.filter(pk=result.id).update(task_path=path)
    return result


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tests.testapp.tasks.gone", "gone"),
        ("nowhere.at.all", "nowhere"),
        ("tests.testapp.tasks.not_a_task", "not a task"),
        ("os.system", "not a task"),
        ("nodots", "nodots"),
    ],
)
def test_a_task_that_this_code_does_not_know_is_parked(path: str, words: str) -> None:
    result = unknown(path)
    assert drain() == {"waiting": 1}
    stored = row(result)
    assert (stored.attempts, stored.worker_ids) == (0, [])
    assert words in stored.last_error
    assert 5 <= wait_seconds(stored) <= 15
    assert engine.backlog(TASKS, using="default").parked == {path: 1}


def test_the_log_names_it_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.tasks.deliver._told", {})
    for _ in range(3):
        unknown("shop.tasks.gone")
    with caplog.at_level(logging.WARNING, logger="django_outbox.tasks"):
        drain()
    lines = [record.getMessage() for record in caplog.records if record.name == "django_outbox.tasks"]
    assert len(lines) == 1
    assert lines[0].startswith("no such task here, its calls wait task=shop.tasks.gone id=")


def test_it_is_run_by_a_relay_that_has_the_code() -> None:
    result = unknown()
    drain()
    OutboxTask.objects.update(task_path="tests.testapp.tasks.add")
    stored = run(result, minutes=1)
    assert (stored.status, stored.parked_at, result.attempts) == ("done", None, 1)


def test_after_a_day_it_is_dead_with_a_clear_reason() -> None:
    result = unknown()
    drain()
    with travel(hours=23):
        assert drain() == {"waiting": 1}
    with travel(hours=25):
        assert drain(queues=["tasks"]) == {"dead": 1}
    stored = row(result)
    assert stored.last_error.startswith("no relay that had this task knows tests.testapp.tasks.gone: ")
    assert stored.errors[0]["exception_class_path"] == "builtins.ImportError"
    assert OutboxEvent.objects.get().type == "task.dead"


def test_it_is_dead_at_once_where_parking_is_off(settings: Any) -> None:
    settings.OUTBOX = {"PARK_FOR_SECONDS": 0}
    unknown()
    assert drain(queues=["tasks"]) == {"dead": 1}


def test_an_operators_retry_gives_it_a_day_again(settings: Any) -> None:
    settings.OUTBOX = {"PARK_FOR_SECONDS": 0}
    result = unknown()
    drain()
    engine.retry(TASKS, using="default")
    assert row(result).parked_at is None


# --- operators -------------------------------------------------------------------------------------------------------


def dead(*keys: str) -> list[Any]:
    failing = [tasks.fail.using(max_attempts=1, dedupe_key=key) for key in keys]
    results = []
    for each in failing:
        results.append(each.enqueue())
        drain(queues=["tasks"])
    return results


def test_retry_skips_and_reports_a_row_whose_key_is_live_again() -> None:
    first, second = dead("one", "two")
    live = tasks.fail.using(dedupe_key="one").enqueue()
    assert engine.retry(TASKS, using="default") == engine.Report(changed=1, skipped=1)
    assert [row(result).status for result in (first, second, live)] == ["dead", "waiting", "pending"]
    assert engine.retry(TASKS, using="default", ids=[row(first).pk]) == engine.Report(skipped=1)
    drain()
    assert engine.retry(TASKS, using="default", ids=[row(live).pk]) == engine.Report(changed=1)


def test_of_dead_rows_of_one_key_one_is_given_a_new_life() -> None:
    rows = dead(*["same"] * 5, "other", *[""] * 3)
    assert engine.retry(TASKS, using="default") == engine.Report(changed=5, skipped=4)
    assert sorted(row(result).status for result in rows) == ["dead"] * 4 + ["waiting"] * 5


def test_a_retried_call_starts_a_new_schedule_and_keeps_its_history() -> None:
    (result,) = dead("k")
    engine.retry(TASKS, using="default")
    stored = run(result, seconds=1)
    assert (stored.status, stored.attempts, result.attempts, len(result.errors)) == ("dead", 1, 2, 2)


def test_a_discarded_call_is_failed_and_frees_its_key() -> None:
    keyed = tasks.add.using(dedupe_key="k")
    result = keyed.enqueue(1)
    assert engine.discard(TASKS, using="default", ids=[row(result).pk]).changed == 1
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert keyed.enqueue(1).id != result.id


def test_results_are_kept_for_their_retention() -> None:
    result = tasks.add.enqueue(1)
    drain()
    work = WORK["tasks"]
    assert work.purge(using="default", limit=100) == 0
    with travel(days=8):
        assert work.purge(using="default", limit=100) == 1
    assert not OutboxTask.objects.filter(pk=result.id).exists()


def test_a_call_whose_process_died_counts_that_attempt_as_lost() -> None:
    result = tasks.add.enqueue(1)
    engine.Claimer(TASKS, holder="gone", using="default").claim(1, lease_seconds=60)
    result.refresh()
    assert (result.status, result.worker_ids) == (TaskResultStatus.RUNNING, ["gone"])
    stored = run(result, minutes=2)
    assert (stored.status, stored.attempts, result.attempts) == ("done", 2, 2)
    assert result.worker_ids[0] == "lost"
