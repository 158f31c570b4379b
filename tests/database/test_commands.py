"""The operators' commands: arguments in, one verb, words or JSON out. What the verbs do is tested with them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import transaction

from django_outbox import lease as engine
from django_outbox import on_event
from django_outbox.management.verbs import duration_seconds
from django_outbox.models import OutboxEvent

pytestmark = pytest.mark.django_db

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
COMMANDS = ("outbox_status", "outbox_retry", "outbox_discard", "outbox_purge")


class Terminal(io.StringIO):
    """Output that somebody watches."""

    def isatty(self) -> bool:
        return True


def run(*arguments: str, stdout: io.StringIO | None = None) -> str:
    out = stdout or io.StringIO()
    call_command(*arguments, stdout=out, no_color=True)
    return out.getvalue()


_TIMES: dict[str, dict[str, Any]] = {
    "pending": {},
    "waiting": {"due_at": FAR_AHEAD},
    "dead": {"dead_at": LONG_AGO},
    "failed": {"finished_at": LONG_AGO},
    "done": {"finished_at": LONG_AGO},
}


def insert(status: str, count: int = 1, *, type_: str = "thing.done", handler: str = "one") -> list[UUID]:
    rows = [
        engine.NewRow(id=engine.new_id(), type=type_, payload="{}", deliveries=json.dumps({handler: None}))
        for _ in range(count)
    ]
    with transaction.atomic():
        ids = engine.insert_events(rows, using="default")
    OutboxEvent.objects.filter(pk__in=ids).update(status=status, **_TIMES[status])
    return ids


def statuses() -> dict[UUID, str]:
    return dict(OutboxEvent.objects.values_list("pk", "status"))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Put somebody at the terminal who answers; return the list of what was asked."""

    def prepare(answer: str) -> list[str]:
        asked: list[str] = []

        def reply(question: str) -> str:
            asked.append(question)
            return answer

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", reply)
        return asked

    return prepare


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_and_ends_with_examples(name: str) -> None:
    command = load_command_class("django_outbox", name)
    text = command.create_parser("manage.py", name).format_help()
    assert command.help in text
    assert f"examples:\n  manage.py {name}" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_database_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(CommandError, match=r"nowhere.*default"):
        run(name, "--database", "nowhere")


@pytest.mark.django_db(databases=["default", "orders"])
@pytest.mark.parametrize("name", ["outbox_retry", "outbox_discard"])
def test_a_command_works_on_the_database_that_it_is_told(name: str) -> None:
    insert("dead")
    assert "0 events" in run(name, "--all", "--database", "orders")
    assert set(statuses().values()) == {"dead"}


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_says_what_is_due_in_flight_waiting_dead_and_failed() -> None:
    for status, count in (("pending", 3), ("waiting", 2), ("dead", 4), ("failed", 1), ("done", 5)):
        insert(status, count)
    OutboxEvent.objects.filter(pk=OutboxEvent.objects.filter(status="pending")[0].pk).update(
        leased_by="relay-1", lease_until=FAR_AHEAD
    )
    lines = {" ".join(line.split()) for line in run("outbox_status").splitlines()}
    assert any(line.startswith("due now 2 the oldest for") for line in lines)
    assert "in flight 1 held by a relay" in lines
    assert any(line.startswith("waiting 2 ") for line in lines)
    assert any(line.startswith("dead 4 ") for line in lines)
    assert any(line.startswith("failed 1 ") for line in lines)


def test_status_names_parked_handlers_and_what_to_do() -> None:
    (id_,) = insert("waiting", handler="crm-sync")
    OutboxEvent.objects.filter(pk=id_).update(
        failures={"crm-sync": {"error": "unknown", "at": "2026-01-01T00:00:00Z", "parked_at": "2026-01-01T00:00:00Z"}}
    )
    text = run("outbox_status")
    assert "manage.py outbox_retry --rename-handler crm-sync=NEW" in text
    assert "manage.py outbox_discard --handler crm-sync" in text


def test_status_speaks_json_with_stable_keys() -> None:
    insert("dead")
    found = json.loads(run("outbox_status", "--json"))
    assert found["database"] == "default"
    assert set(found["queues"]["events"]) == {
        "queue", "pending", "waiting", "dead", "failed", "due", "leased", "counted_to", "oldest_due_seconds", "parked",
    }  # fmt: skip
    assert found["queues"]["events"]["dead"] == 1


def test_status_fails_when_something_is_due_for_too_long() -> None:
    (id_,) = insert("pending")
    run("outbox_status", "--fail-over", "1h")
    OutboxEvent.objects.filter(pk=id_).update(created_at=LONG_AGO)
    with pytest.raises(SystemExit, match="1"):
        run("outbox_status", "--fail-over", "1h")


# --- retry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["outbox_retry", "outbox_discard"])
def test_nothing_is_changed_until_it_is_said_what(name: str) -> None:
    insert("dead")
    with pytest.raises(CommandError, match=r"Say which rows.*--all"):
        run(name)
    assert set(statuses().values()) == {"dead"}


def test_retry_takes_ids_in_every_status_that_can_be_retried_and_says_what_it_left() -> None:
    ids = [*insert("dead"), *insert("failed"), *insert("waiting"), *insert("done"), engine.new_id()]
    text = run("outbox_retry", *map(str, ids))
    assert "Retried 3 events, due now." in text
    assert "Left alone: 2 events not found" in text


def test_retry_says_what_a_relay_holds() -> None:
    insert("dead")
    OutboxEvent.objects.update(leased_by="relay-1", lease_until=FAR_AHEAD)
    assert "Left alone: 1 event held by a relay" in run("outbox_retry", "--all")


def test_retry_of_all_leaves_what_comes_by_itself() -> None:
    (waiting,), (pending,) = insert("waiting"), insert("pending")
    insert("dead", 2)
    insert("failed")
    assert json.loads(run("outbox_retry", "--all", "--json")) == {"changed": 3, "leased": 0, "skipped": 0}
    assert OutboxEvent.objects.get(pk=waiting).due_at == FAR_AHEAD
    assert statuses()[pending] == "pending"


def test_retry_filters_by_status_type_and_handler() -> None:
    insert("dead")
    insert("dead", type_="thing.undone")
    insert("dead", handler="two")
    (wanted,) = insert("failed", type_="thing.undone", handler="two")
    run("outbox_retry", "--status", "failed", "--type", "thing.undone", "--handler", "two")
    assert [id_ for id_, status in statuses().items() if status == "waiting"] == [wanted]


def test_retry_stops_at_its_limit() -> None:
    insert("dead", 5)
    assert "Retried 2 events" in run("outbox_retry", "--all", "--limit", "2")


def test_retry_renames_a_handler() -> None:
    on_event("thing.done", name="crm-sync")(print)
    insert("waiting", handler="crm")
    assert "Renamed crm to crm-sync in 1 event" in run("outbox_retry", "--rename-handler", "crm=crm-sync")
    assert OutboxEvent.objects.get().deliveries == {"crm-sync": None}


def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    insert("dead", 600)
    assert "\r500 events" in run("outbox_retry", "--all", "--limit", "550", stdout=Terminal())
    assert "\r" not in run("outbox_retry", "--all")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["outbox_retry", "abc"], "'abc' is not an id"),
        (["outbox_retry", "--status", "done"], "Use one of: dead, failed, waiting"),
        (["outbox_retry", "--handler", "CrmSync"], "'crm-sync'"),
        (["outbox_retry", "--type", "created"], "not an event type"),
        (["outbox_retry", "--type", "user.*"], "one whole event type"),
        (["outbox_retry", "--limit", "0", "--all"], "from 1 up"),
        (["outbox_retry", "--rename-handler", "crm"], "OLD=NEW"),
        (["outbox_retry", "--rename-handler", "crm=stranger"], "No handler is named 'stranger'"),
        (["outbox_retry", "--rename-handler", "crm=discovered", "--type", "a.b"], "chooses by the old name"),
        (["outbox_retry", "--all", "01890a5d-ac96-774b-bcce-b302099a8057"], "not both"),
        (["outbox_discard", "abc"], "'abc' is not an id"),
        (["outbox_discard", "--status", "failed"], "Use one of: dead, waiting, pending"),
        (["outbox_purge", "--status", "pending"], "Use one of: done, failed, dead"),
        (["outbox_purge", "--status", "dead"], "Say how old dead rows"),
        (["outbox_purge", "--older-than", "soon"], "Write a number and a unit: 90s, 15m, 6h, 7d or 2w"),
        (["outbox_purge", "--older-than", "-5"], "'-5' is not a duration"),
        (["outbox_status", "--fail-over", "5y"], "Write a number and a unit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_with_what_to_write_instead(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError) as refusal:
        run(*arguments)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5_400), ("7d", 604_800), ("2W", 1_209_600)]
)
def test_durations_are_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


# --- discard ---------------------------------------------------------------------------------------------------------


def test_discard_of_all_takes_dead_events_only() -> None:
    (dead,), (waiting,), (pending,) = insert("dead"), insert("waiting"), insert("pending")
    assert "Discarded 1 event." in run("outbox_discard", "--all", "--no-input")
    assert statuses() == {dead: "failed", waiting: "waiting", pending: "pending"}


def test_discard_of_a_handler_closes_that_delivery_wherever_it_is_owed() -> None:
    insert("waiting", handler="gone")
    insert("pending", handler="gone")
    insert("dead", handler="stays")
    assert "Closed the delivery to gone of 2 events." in run("outbox_discard", "--handler", "gone")
    assert sorted(statuses().values()) == ["dead", "done", "done"]


def test_discard_asks_on_a_terminal_and_takes_no_for_an_answer(answers: Callable[[str], list[str]]) -> None:
    insert("dead")
    asked = answers("n")
    with pytest.raises(CommandError, match="Nothing was changed"):
        run("outbox_discard", "--status", "dead", "--type", "thing.done")
    assert asked == ["Close all dead events of type thing.done for good on database 'default'? [y/N] "]
    assert set(statuses().values()) == {"dead"}


def test_discard_goes_on_after_a_yes_and_does_not_ask_when_told_so(answers: Callable[[str], list[str]]) -> None:
    insert("dead")
    asked = answers("y")
    run("outbox_discard", "--all")
    insert("dead")
    run("outbox_discard", "--all", "--no-input")
    assert len(asked) == 1
    assert set(statuses().values()) == {"failed"}


# --- purge -----------------------------------------------------------------------------------------------------------


def test_purge_removes_done_events_past_their_retention() -> None:
    insert("done", 3)
    kept = insert("dead") + insert("failed")
    assert "Purged 3 events" in run("outbox_purge")
    assert set(statuses()) == set(kept)


def test_purge_removes_other_events_only_when_told_how_old() -> None:
    insert("failed", 2)
    arguments = ["--queue", "events", "--status", "failed", "--older-than", "1d", "--json"]
    assert json.loads(run("outbox_purge", *arguments)) == {
        "purged": 2,
        "status": "failed",
        "queues": {"events": {"purged": 2, "older_than_seconds": 86_400.0}},
    }


def test_purge_without_a_retention_asks_for_an_age(settings: Any) -> None:
    settings.OUTBOX = {"EVENTS": {"RETENTION_SECONDS": None}}
    with pytest.raises(CommandError, match="kept for ever"):
        run("outbox_purge", "--queue", "events")


def test_purge_asks_before_it_deletes_what_was_never_delivered(answers: Callable[[str], list[str]]) -> None:
    insert("dead")
    answers("")
    with pytest.raises(CommandError, match="Nothing was changed"):
        run("outbox_purge", "--status", "dead", "--older-than", "1d")
    assert len(statuses()) == 1


def test_an_interrupted_command_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    insert("dead", 600)

    class Impatient(Terminal):
        def flush(self) -> None:
            if "500 events" in self.getvalue():
                raise KeyboardInterrupt

    with pytest.raises(CommandError, match="Interrupted after 500 events") as stop:
        run("outbox_retry", "--all", stdout=Impatient())
    assert stop.value.returncode == 130
    assert sorted(statuses().values()).count("waiting") == 500
