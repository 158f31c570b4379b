"""What operators see of tasks: the admin, the commands, the checks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.urls import reverse

from django_outbox import checks
from django_outbox.models import OutboxTask
from django_outbox.testing import drain, travel
from tests.testapp import tasks

pytestmark = pytest.mark.django_db

LIST = "/admin/django_outbox/outboxtask/"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield


def visit(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("olga", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def page(result: Any) -> str:
    return reverse("admin:django_outbox_outboxtask_change", args=[result.id])


def dead() -> Any:
    result = tasks.fail.using(max_attempts=1).enqueue()
    drain(queues=["tasks"])
    return result


def command(name: str, *arguments: str) -> str:
    said = io.StringIO()
    call_command(name, *arguments, stdout=said, skip_checks=True)
    return said.getvalue()


# --- the admin -------------------------------------------------------------------------------------------------------


def test_dead_tasks_are_one_click_away(client: Client) -> None:
    result = dead()
    tasks.add.enqueue(1)
    staff = visit(client, "view_outboxtask")
    assert "?status=dead" in staff.get(LIST).content.decode()
    shown = staff.get(LIST, {"status": "dead"})
    assert [str(row.pk) for row in shown.context["cl"].result_list] == [result.id]
    assert "ValueError: it broke" in shown.content.decode()


@pytest.mark.parametrize(
    ("query", "count"),
    [("", 3), ("task_path=tests.testapp.tasks.add", 1), ("queue_name=reports", 1), ("queue_name=none", 0)],
)
def test_the_list_is_filtered_by_task_and_queue(client: Client, query: str, count: int) -> None:
    dead()
    tasks.add.enqueue(1)
    tasks.wait.using(priority=-3).enqueue()
    shown = visit(client, "view_outboxtask").get(f"{LIST}?{query}")
    assert len(shown.context["cl"].result_list) == count


def test_arguments_results_and_tracebacks_need_a_permission_of_their_own(client: Client) -> None:
    kept = tasks.give_back.enqueue("marzipan")
    failed = dead()
    drain()
    staff = visit(client, "view_outboxtask")
    assert "marzipan" not in staff.get(page(kept)).content.decode()
    assert "raise ValueError(text)" not in staff.get(page(failed)).content.decode()
    User.objects.get().user_permissions.add(Permission.objects.get(codename="read_outboxtask"))
    text = staff.get(page(kept)).content.decode()
    assert text.count("marzipan") == 2
    assert "raise ValueError(text)" in staff.get(page(failed)).content.decode()


def test_retry_and_discard_need_theirs_and_do_what_they_say(client: Client) -> None:
    result = dead()
    staff = visit(client, "view_outboxtask")
    assert staff.post(page(result), {"verb": "retry", "shown": "dead"}).status_code == 403
    User.objects.get().user_permissions.add(*Permission.objects.filter(codename__endswith="_outboxtask"))
    staff.post(page(result), {"verb": "retry", "shown": "dead"})
    assert OutboxTask.objects.get().status == "waiting"
    staff.post(page(result), {"verb": "discard", "shown": "waiting"})
    assert OutboxTask.objects.get().status == "failed"


@pytest.mark.parametrize("status", ["pending", "waiting", "dead", "failed", "done"])
def test_a_page_says_what_comes_next(client: Client, status: str) -> None:
    result = {
        "pending": lambda: tasks.add.enqueue(1),
        "waiting": lambda: tasks.later.enqueue(60),
        "dead": dead,
        "failed": tasks.refuse.enqueue,
        "done": lambda: tasks.add.using(max_attempts=2, retry=[5], timeout=9, dedupe_key="k").enqueue(1),
    }[status]()
    if status != "pending":
        drain()
    shown = visit(client, "view_outboxtask", "read_outboxtask").get(page(result))
    assert shown.context["row"].status == status
    assert shown.context["advice"]


def test_a_parked_task_is_named(client: Client) -> None:
    result = tasks.add.enqueue(1)
    OutboxTask.objects.update(task_path="shop.tasks.gone")
    drain()
    assert "No relay that had it knows this task" in visit(client, "view_outboxtask").get(page(result)).content.decode()
    assert json.loads(command("outbox_status", "--json"))["queues"]["tasks"]["parked"] == {"shop.tasks.gone": 1}
    said = command("outbox_status", "--queue", "tasks")
    assert "No relay that had these tasks knows them" in said
    assert "shop.tasks.gone" in said


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_commands_take_tasks() -> None:
    result = dead()
    assert command("outbox_retry", "--queue", "tasks", "--status", "dead") == "Retried 1 task, due now.\n"
    drain(queues=["tasks"])
    assert "Discarded 1 task." in command("outbox_discard", "--queue", "tasks", result.id, "--no-input")
    with travel(days=100):
        command("outbox_purge", "--queue", "tasks", "--status", "failed", "--older-than", "90d", "--no-input")
    assert not OutboxTask.objects.exists()


def test_tasks_are_chosen_by_their_path() -> None:
    dead()
    tasks.add.enqueue(1)
    other = tasks.refuse.enqueue()
    drain(queues=["tasks"])
    path = "tests.testapp.tasks.refuse"
    said = command("outbox_retry", "--queue", "tasks", "--type", path, "--status", "failed", "--status", "dead")
    assert said == "Retried 1 task, due now.\n"
    assert OutboxTask.objects.get(status="waiting").pk == UUID(other.id)
    said = command("outbox_discard", "--queue", "tasks", "--type", path, "--status", "waiting", "--no-input")
    assert said == "Discarded 1 task.\n"
    for wrong in ("shop.*", "not a path"):
        with pytest.raises(CommandError, match="path"):
            command("outbox_retry", "--queue", "tasks", "--type", wrong)
    with pytest.raises(CommandError, match="no handlers"):
        command("outbox_retry", "--queue", "tasks", "--handler", "one")


# --- the checks ------------------------------------------------------------------------------------------------------


def ids(settings: Any, **entry: Any) -> list[str]:
    settings.TASKS = {"default": {"BACKEND": checks.TASK_BACKEND, **entry}}
    return [str(message.id).rpartition(".")[2] for message in checks.check_outbox()]


def test_what_the_backend_does_not_take_is_said(settings: Any) -> None:
    assert ids(settings) == []
    assert ids(settings, QUEUES=["mail"]) == []
    assert ids(settings, OPTIONS={"max_attempts": 3}) == ["E041"]
    assert ids(settings, QUEUES=["x" * 65, ""]) == ["E041", "E041"]
    settings.TASKS = {"default": {"BACKEND": "elsewhere.Backend", "OPTIONS": {"a": 1}}}
    assert checks.check_outbox() == []


def test_a_backend_without_the_tasks_api_is_an_error(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "API_AVAILABLE", False)
    assert ids(settings) == ["E040"]
