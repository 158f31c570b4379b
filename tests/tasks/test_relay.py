"""Tasks in a real relay: many at once, by queue name, past their time limit, and ones that kill their process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from django_outbox import lease as engine
from django_outbox.lease import due
from django_outbox.models import OutboxTask
from django_outbox.relay import WORK, chosen
from django_outbox.tasks import TASKS, Call, enqueue_many
from tests.concurrency.helpers import RunningRelay, eventually, running_relay, together
from tests.tasks.api import TaskResultStatus, task_finished
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def outbox(settings: Any, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    settings.OUTBOX = {"POLL_SECONDS": 60, "STUCK_SECONDS": 0.2}
    tasks.calls.clear()
    tasks.gate.clear()
    with caplog.at_level(logging.CRITICAL):
        yield
    tasks.gate.set()


def row(result: Any) -> OutboxTask:
    return OutboxTask.objects.get(pk=result.id)


# --- what is due, by queue name and priority -------------------------------------------------------------------------


def scopes(*only: str) -> list[tuple[str, int]]:
    return [
        (scope["queue_name"], scope["priority"])
        for scope, _ in WORK["tasks"].narrowed(only).scopes(100, using="default")
    ]


def test_only_priorities_and_queue_names_that_have_something_due_are_looked_at() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=60)
    past = datetime.now(UTC) - timedelta(seconds=60)
    enqueue_many(
        [
            *[Call(tasks.add.using(priority=100, run_after=soon), [n]) for n in range(50)],
            *[Call(tasks.add.using(priority=-5), [n]) for n in range(50)],
            Call(tasks.add.using(priority=7, run_after=past), [1]),
            Call(tasks.wait),
            Call(tasks.wait.using(queue_name="mail")),
        ]
    )
    assert sorted(scopes()[1:3]) == [("mail", 5), ("reports", 5)]
    assert [*scopes()[:1], *scopes()[3:]] == [("default", 7), ("default", -5)]
    assert scopes("reports") == [("reports", 5)]
    assert scopes("nowhere") == []
    assert WORK["tasks"].next_due_seconds(using="default") == 0
    OutboxTask.objects.exclude(priority=100).delete()
    assert scopes() == []
    assert WORK["tasks"].next_due_seconds(using="default") == pytest.approx(60, abs=5)
    assert WORK["tasks"].narrowed(["mail"]).next_due_seconds(using="default") is None


def test_what_is_leased_is_not_due_until_its_lease_runs_out() -> None:
    enqueue_many([Call(tasks.add, [n]) for n in range(3)])
    claimer = engine.Claimer(TASKS, holder="other", using="default")
    assert len(claimer.claim(3, lease_seconds=50)) == 3
    assert scopes() == []
    assert WORK["tasks"].next_due_seconds(using="default") == pytest.approx(50, abs=5)


@pytest.mark.postgres
@pytest.mark.parametrize("narrowed", [False, True], ids=["all", "some"])
def test_a_look_goes_by_the_indexes_from_one_to_the_next(narrowed: bool) -> None:
    for priority in (1, 2):
        enqueue_many([Call(tasks.add.using(priority=priority), [n]) for n in range(3_000)])
    sql = due._postgres_walks('"django_outbox_task"', ("queue_name", "priority"), narrowed)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_outbox_task")
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", [["default", "mail"]] * 3 if narrowed else [])
        (plan,) = cursor.fetchone()[0]

    def scans(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if node.get("Relation Name"):
            yield node
        for part in node.get("Plans", []):
            yield from scans(part)

    assert {scan["Node Type"] for scan in scans(plan["Plan"])} <= {"Index Scan", "Index Only Scan"}
    assert max(scan["Actual Rows"] for scan in scans(plan["Plan"])) <= 1


def test_queues_may_be_named_by_their_parts() -> None:
    assert next(iter(chosen(None))).label == "events"
    assert [work.label for work in chosen(["tasks:reports", "events", "tasks:mail"])] == [
        "events",
        "tasks (reports, mail)",
    ]
    assert [work.label for work in chosen(["tasks:reports", "tasks"])] == ["tasks"]
    for wrong, words in (("elsewhere", "no queue"), ("events:thing", "no parts"), ("tasks:", "queue name")):
        with pytest.raises(ValueError, match=words):
            chosen([wrong])
        with pytest.raises(CommandError, match=words):
            call_command("run_outbox", "--drain", queue=[wrong], skip_checks=True)


def test_run_outbox_serves_one_queue_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plain, report = tasks.add.enqueue(1), tasks.wait.enqueue()
    call_command("run_outbox", "--drain", "--queue", "tasks:reports", skip_checks=True)
    assert "queue tasks (reports): 8 threads" in capsys.readouterr().out
    assert [row(result).status for result in (plain, report)] == ["pending", "done"]


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_relay_runs_them_side_by_side_and_leaves_none() -> None:
    with running_relay() as running:
        enqueue_many([Call(tasks.add, [n]) for n in range(500)])
        running.wait_for(done=500, seconds=30)
    assert sorted(a for a, _ in tasks.calls) == list(range(500))


@pytest.mark.postgres
def test_two_relays_run_each_call_once() -> None:
    enqueue_many([Call(tasks.add, [n]) for n in range(400)])
    relays = [RunningRelay(mode="drain") for _ in range(2)]
    assert [relay.end(seconds=30) for relay in relays] == [0, 0]
    assert sorted(a for a, _ in tasks.calls) == list(range(400))


@pytest.mark.postgres
def test_of_many_that_enqueue_one_key_at_one_moment_one_adds_a_row() -> None:
    keyed = tasks.add.using(dedupe_key="k")
    results = together(*[lambda: keyed.enqueue(1)] * 6)
    assert len({result.id for result in results}) == OutboxTask.objects.count() == 1


def test_a_task_past_its_time_limit_is_given_up_and_a_late_end_is_not_told() -> None:
    told: list[str] = []

    def hear(task_result: Any, **_: Any) -> None:
        told.append(str(task_result.status))

    task_finished.connect(hear)
    try:
        with running_relay() as running:
            result = tasks.hold.using(timeout=0.1, max_attempts=1).enqueue()
            running.wait_for(dead=1)
            result.refresh()
            assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
            assert "took longer" in result.errors[0].traceback
            tasks.gate.set()
            quick = tasks.add.enqueue(1)
            running.wait_for(done=1)
        assert row(quick).status == "done"
        assert told == ["SUCCESSFUL"]
    finally:
        task_finished.disconnect(hear)


def test_a_task_interrupted_by_a_stop_is_a_failed_attempt(settings: Any) -> None:
    settings.OUTBOX |= {"SHUTDOWN_GRACE_SECONDS": 0}
    result = tasks.hold.enqueue()
    running = RunningRelay()
    eventually(lambda: any(lane.flights for lane in running.relay.lanes))
    eventually(lambda: all(flight.run for flight in running.relay.flights.all()))
    assert running.stop() == 0
    result.refresh()
    assert (row(result).status, result.attempts, result.status) == ("waiting", 1, TaskResultStatus.READY)
    assert "interrupted" in result.errors[0].traceback


def test_a_task_that_kills_its_process_dies_alone() -> None:
    result = tasks.kill_itself.enqueue()
    # As if the first process had died of it.
    engine.Claimer(TASKS, holder="gone", using="default").claim(1, lease_seconds=1)
    OutboxTask.objects.update(lease_until=datetime.now(UTC) - timedelta(seconds=1), lost_leases=1)
    neighbour = tasks.add.enqueue(1)
    running = RunningRelay(mode="drain")
    assert running.end(seconds=60) == 0
    assert row(neighbour).status == "done"
    stored = row(result)
    assert (stored.status, stored.due_at) == ("dead", None)
    assert "worker lost" in stored.last_error
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.worker_ids[:-1] == ["lost", "lost"]
