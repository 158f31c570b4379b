"""What Django expects of a backend for its Tasks API, and what ours says beyond it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import TransactionTestCase

from django_outbox import InvalidPayload
from django_outbox.models import OutboxTask
from django_outbox.tasks import Call, OutboxTaskBackend, Task, enqueue_many
from django_outbox.testing import drain
from tests.conftest import ROOT
from tests.tasks.api import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    default_task_backend,
    task,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
    task_with,
)
from tests.testapp import tasks

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    tasks.calls.clear()


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str, Any]]]:
    """What the three signals told: their names, the status and the sender."""
    told: list[tuple[str, str, Any]] = []
    receivers = []
    for name, signal in (("enqueued", task_enqueued), ("started", task_started), ("finished", task_finished)):

        def receive(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            told.append((name, str(task_result.status), sender))

        signal.connect(receive)
        receivers.append((signal, receive))
    yield told
    for signal, receive in receivers:
        signal.disconnect(receive)


def row(result: Any) -> OutboxTask:
    return OutboxTask.objects.get(pk=result.id)


# --- what the backend is ---------------------------------------------------------------------------------------------


def test_the_backend_offers_everything_the_api_knows() -> None:
    backend = default_task_backend
    assert isinstance(task_backends["default"], OutboxTaskBackend)
    assert (backend.supports_defer, backend.supports_async_task) == (True, True)
    assert (backend.supports_get_result, backend.supports_priority) == (True, True)
    assert backend.check() == []
    assert isinstance(tasks.add, Task)


def test_importing_never_fails_and_using_it_without_the_api_says_what_to_install() -> None:
    script = """
import importlib.util
importlib.util.find_spec = lambda name: None
from django_outbox.tasks import OutboxTaskBackend, TaskWork
try:
    OutboxTaskBackend("default", {})
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.startswith("ImproperlyConfigured")
    assert "django-tasks" in said.stdout


# --- enqueue ---------------------------------------------------------------------------------------------------------


def test_a_call_is_enqueued_as_a_row(heard: list[Any]) -> None:
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.attempts, result.is_finished) == (TaskResultStatus.READY, 0, False)
    assert (result.args, result.kwargs, result.backend) == ([1], {"b": 2}, "default")
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
    assert (result.errors, result.worker_ids) == ([], [])
    assert len(result.id) < 64
    stored = row(result)
    assert (stored.status, stored.payload) == ("pending", {"args": [1], "kwargs": {"b": 2}})
    assert (stored.task_path, stored.queue_name, stored.priority) == ("tests.testapp.tasks.add", "default", 0)
    assert abs(result.enqueued_at - stored.created_at) < timedelta(milliseconds=1)
    assert heard == [("enqueued", "READY", OutboxTaskBackend)]
    assert tasks.calls == []
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value


def test_it_stands_or_falls_with_the_transaction() -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        tasks.add.enqueue(1)
        raise ZeroDivisionError
    assert not OutboxTask.objects.exists()
    with transaction.atomic():
        tasks.add.enqueue(1)
    assert OutboxTask.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_it_commits_by_itself_outside_a_transaction() -> None:
    tasks.add.enqueue(1)
    assert not connection.in_atomic_block
    connection.close()
    assert OutboxTask.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_the_relays_are_told_once_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("django_outbox.wake.notify", lambda alias, *, queue: told.append(queue))
    with transaction.atomic():
        tasks.add.enqueue(1)
        tasks.add.enqueue(2)
        assert told == []
    assert told == ["tasks"]
    tasks.add.enqueue(3)
    assert told == ["tasks", "tasks"]


def test_arguments_are_validated_as_payloads_are_and_the_transaction_stays_usable() -> None:
    for bad, path in (({"at": [object()]}, r"\$\.args\[0\]\.at\[0\]"), (b"x", "bytes"), ("a\0b", "NUL")):
        with pytest.raises(InvalidPayload, match=path) as caught:
            tasks.give_back.enqueue(bad)
        assert isinstance(caught.value, TypeError)
    with pytest.raises(InvalidPayload, match="bytes as JSON"):
        tasks.give_back.enqueue("x" * 300_000)
    assert not OutboxTask.objects.exists()


def test_arguments_come_as_json_has_them() -> None:
    day, key = datetime(2026, 1, 2, tzinfo=UTC), uuid4()
    result = tasks.give_back.enqueue({"when": day, "key": key, "sum": Decimal("1.20"), "pair": (1, 2)})
    wanted = {"when": "2026-01-02T00:00:00Z", "key": str(key), "sum": "1.20", "pair": [1, 2]}
    assert result.args == [wanted]
    drain()
    result.refresh()
    assert result.return_value == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"queue_name": "elsewhere"}, "Queue 'elsewhere'"),
        ({"run_after": datetime(2026, 1, 1)}, "aware"),  # noqa: DTZ001  that is what is wrong
        ({"run_after": datetime(9999, 1, 1, tzinfo=UTC)}, "years"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"retry": []}, "retry"),
        ({"retry": [1, "soon"]}, "retry"),
        ({"retry": -1}, "retry"),
        ({"dedupe_key": "x" * 256}, "dedupe_key"),
        ({"dedupe_key": "a\0"}, "dedupe_key"),
        ({"dedupe_key": 7}, "dedupe_key"),
    ],
    ids=str,
)
def test_an_option_that_does_not_go_is_refused_when_it_is_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        tasks.add.using(**options)


def test_a_task_must_be_a_function_of_a_module_and_its_context_the_first_argument() -> None:
    with pytest.raises(InvalidTask, match="module level"):
        task(lambda: None)
    with pytest.raises(InvalidTask, match="context"):
        task_with(takes_context=True)(tasks.not_a_task)


def test_a_backend_without_a_list_of_queues_takes_any_name_that_fits() -> None:
    assert row(tasks.add.using(backend="second", queue_name="weekly").enqueue(1)).queue_name == "weekly"
    with pytest.raises(InvalidTask, match="queue_name"):
        tasks.add.using(backend="second", queue_name="x" * 65)


def test_options_are_written_with_the_call() -> None:
    after = datetime.now(UTC) + timedelta(hours=1)
    chosen = tasks.add.using(
        priority=-7,
        queue_name="mail",
        run_after=after,
        max_attempts=3,
        timeout=timedelta(minutes=2),
        retry=[1, timedelta(seconds=10)],
        dedupe_key="k",
    )
    assert (chosen.timeout, chosen.retry, tasks.add.max_attempts) == (120, (1, 10), None)
    result = chosen.enqueue(1)
    stored = row(result)
    assert (stored.status, stored.priority, stored.queue_name) == ("waiting", -7, "mail")
    assert (stored.max_attempts, stored.timeout_seconds, stored.waits) == (3, 120, [1, 10])
    assert stored.due_at == stored.not_before == after
    assert default_task_backend.get_result(result.id).task == chosen
    assert chosen.using(retry=5).retry == (5,)


@pytest.mark.skipif(not hasattr(Task, "__reduce__") or not hasattr(Task, "_reconstruct"), reason="not before 6.1")
def test_a_task_with_options_can_be_pickled() -> None:
    chosen = tasks.add.using(max_attempts=3, dedupe_key="k")
    assert pickle.loads(pickle.dumps(chosen)) == chosen  # noqa: S301  our own


def test_the_decorator_takes_our_options_where_djangos_does() -> None:
    try:
        chosen = task_with(max_attempts=2, retry=[1])(tasks.not_a_task)
    except TypeError:
        pytest.skip("this version's decorator takes Django's own options only")
    assert (chosen.max_attempts, chosen.retry) == (2, (1,))


def test_async_twins() -> None:
    async def go() -> tuple[Any, Any]:
        result = await tasks.add.aenqueue(1, b=2)
        again = await tasks.add.aget_result(result.id)
        await result.arefresh()
        return result, again

    result, again = async_to_sync(go)()
    assert result.id == again.id
    assert again.status == TaskResultStatus.READY


# --- many ------------------------------------------------------------------------------------------------------------


def test_many_are_enqueued_in_one_statement(django_assert_num_queries: Any, heard: list[Any]) -> None:
    with transaction.atomic(), django_assert_num_queries(1):
        results = enqueue_many([*(Call(tasks.add, [n]) for n in range(20)), Call(tasks.wait, kwargs={"seconds": 0})])
    assert [result.args for result in results] == [*([n] for n in range(20)), []]
    assert len(heard) == 21
    assert {UUID(result.id) for result in results} == set(OutboxTask.objects.values_list("pk", flat=True))
    assert enqueue_many([]) == []


def test_of_many_one_that_is_refused_keeps_all_out() -> None:
    with pytest.raises(InvalidPayload):
        enqueue_many([Call(tasks.give_back, [1]), Call(tasks.give_back, [object()])])
    assert not OutboxTask.objects.exists()
    with pytest.raises(InvalidTask, match="one backend"):
        enqueue_many([Call(tasks.add, [1]), Call(tasks.add.using(backend="second"), [1])])


# --- the dedupe key --------------------------------------------------------------------------------------------------


def test_while_a_key_is_live_another_call_adds_nothing(heard: list[Any]) -> None:
    first = tasks.add.using(dedupe_key="nightly").enqueue(1)
    second = tasks.add.using(dedupe_key="nightly").enqueue(2)
    assert (second.id, second.args) == (first.id, [1])
    assert heard == [("enqueued", "READY", OutboxTaskBackend)]
    other = tasks.give_back.using(dedupe_key="nightly").enqueue(3)
    later = tasks.add.using(dedupe_key="weekly", run_after=datetime.now(UTC) + timedelta(days=1)).enqueue(4)
    assert tasks.add.using(dedupe_key="weekly").enqueue(5).id == later.id
    assert OutboxTask.objects.count() == 3
    drain()
    assert tasks.add.using(dedupe_key="nightly").enqueue(6).id not in {first.id, other.id}


def test_a_dead_one_does_not_hold_its_key() -> None:
    failing = tasks.fail.using(dedupe_key="k", max_attempts=1)
    first = failing.enqueue()
    drain()
    assert row(first).status == "dead"
    assert failing.enqueue().id != first.id


def test_one_key_twice_among_many_is_written_once() -> None:
    keyed = tasks.add.using(dedupe_key="k")
    results = enqueue_many([Call(keyed, [1]), Call(tasks.add, [2]), Call(keyed, [3])])
    assert results[0].id == results[2].id != results[1].id
    assert OutboxTask.objects.count() == 2


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_is_found_by_its_id_by_its_task_only() -> None:
    result = tasks.add.enqueue(1)
    assert tasks.add.get_result(result.id).id == result.id
    with pytest.raises(TaskResultMismatch):
        tasks.give_back.get_result(result.id)
    for unknown in ("nothing", str(uuid4()), ""):
        with pytest.raises(TaskResultDoesNotExist):
            default_task_backend.get_result(unknown)


def test_a_result_of_a_task_that_this_code_does_not_know_does_not_exist_for_it() -> None:
    result = tasks.add.enqueue(1)
    OutboxTask.objects.update(task_path="tests.testapp.tasks.gone")
    with pytest.raises(TaskResultDoesNotExist, match="gone"):
        default_task_backend.get_result(result.id)


def test_a_result_is_read_also_when_its_queue_was_taken_out_of_the_settings() -> None:
    result = tasks.add.using(queue_name="mail").enqueue(1)
    OutboxTask.objects.update(queue_name="retired")
    assert tasks.add.get_result(result.id).task.queue_name == "retired"
    assert drain() == {"done": 1}


def test_without_time_zones_moments_are_naive_as_djangos_are(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Tokyo"
    after = datetime(2020, 1, 1, 12)  # noqa: DTZ001  such a project's
    result = tasks.add.using(run_after=after).enqueue(1)
    assert row(result).not_before == datetime(2020, 1, 1, 3, tzinfo=UTC)
    drain()
    result.refresh()
    assert tasks.add.get_result(result.id).task.run_after == after
    assert abs(result.finished_at - datetime.now() - timedelta(hours=9)) < timedelta(days=1)  # noqa: DTZ005
    assert result.finished_at.tzinfo is None


class TaskInATestCase(TransactionTestCase):
    """The helpers' way through a user's own test."""

    def test_what_a_view_enqueues_is_run_by_drain(self) -> None:
        result = tasks.add.enqueue(2, b=3)
        assert drain(queues=["tasks"]) == {"done": 1}
        result.refresh()
        assert result.return_value == 5
