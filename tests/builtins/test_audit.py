"""The audit log: what an entry says, that the chain shows every change to it, and the command that checks it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from django_outbox import audit, emit_event
from django_outbox.audit import GENESIS, protect, verify
from django_outbox.handlers import register_builtin_handlers
from django_outbox.models import AuditEntry, AuditHead, OutboxEvent
from django_outbox.testing import drain
from tests.builtins.helpers import event_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def audited(settings: Any) -> None:
    settings.OUTBOX = {"BUILTIN_HANDLERS": ["audit-log"]}
    register_builtin_handlers()


def emit(type_: str = "order.paid", payload: Any = None, **options: Any) -> UUID:
    with transaction.atomic():
        return emit_event(type_, payload, **options)


@pytest.fixture
def chain() -> list[AuditEntry]:
    """Return a chain of five entries, in a table that lets itself be changed."""
    for number in range(5):
        audit.append(event_of(payload={"number": number}))
    protect(using="default", wanted=False)
    return list(AuditEntry.objects.order_by("position"))


def test_every_event_is_entered_with_what_it_says(audited: None) -> None:
    id_ = emit(
        "user.created",
        {"b": 1, "a": "Zoë ✓", "n": [1.5, None]},
        aggregate_type="user",
        aggregate_id="7",
        organization_id="acme",
        request_id="r-1",
        headers={"trace": "t"},
        occurred_at=datetime(2026, 2, 3, 5, 5, 6, 789_000, tzinfo=timezone(timedelta(hours=1))),
    )
    assert drain() == {"done": 1}
    entry = AuditEntry.objects.get()
    assert (entry.id, entry.position, entry.previous_hash) == (id_, 1, GENESIS)
    assert (entry.type, entry.aggregate_type, entry.aggregate_id) == ("user.created", "user", "7")
    assert entry.organization_id == "acme"
    content = json.loads(entry.content)
    assert content == {
        "version": 1,
        "position": 1,
        "recorded_at": entry.recorded_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "id": str(id_),
        "type": "user.created",
        "occurred_at": "2026-02-03T04:05:06.789Z",
        "aggregate_type": "user",
        "aggregate_id": "7",
        "organization_id": "acme",
        "request_id": "r-1",
        "causation_id": None,
        "headers": {"trace": "t"},
        "payload": {"b": 1, "a": "Zoë ✓", "n": [1.5, None]},
    }
    assert entry.content == json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def test_a_program_that_knows_sha256_alone_can_follow_the_chain(chain: list[AuditEntry]) -> None:
    last = "0" * 64
    for row in chain:
        last = hashlib.sha256(last.encode() + b"\n" + row.content.encode()).hexdigest()
        assert row.hash == last
    assert AuditHead.objects.get().hash == last


def test_the_same_event_is_entered_once(chain: list[AuditEntry]) -> None:
    again = event_of(id=chain[2].id, payload={"number": 2})
    audit.append(again)
    assert AuditEntry.objects.count() == 5
    assert AuditHead.objects.get().position == 5
    assert verify().broken is None


def test_announcements_are_not_entered(audited: None, settings: Any) -> None:
    from django_outbox import on_event

    settings.OUTBOX = {**settings.OUTBOX, "EVENTS": {"MAX_ATTEMPTS": 1}}

    @on_event("order.paid", name="breaks")
    def fail(event: Any) -> None:
        raise ValueError

    emit()
    drain()
    assert OutboxEvent.objects.filter(type="outbox.event.dead").exists()
    assert list(AuditEntry.objects.values_list("type", flat=True)) == ["order.paid"]


def test_an_intact_chain_is_said_to_be_intact(chain: list[AuditEntry]) -> None:
    seen: list[int] = []
    found = verify(progress=seen.append)
    assert (found.entries, found.hash, found.broken) == (5, chain[-1].hash, None)
    assert seen[-1] == 5
    assert verify(known={2: chain[1].hash}).broken is None


def test_an_empty_log_is_intact() -> None:
    assert verify() == audit.Verified(0, GENESIS)


@pytest.mark.parametrize(
    ("change", "position", "reason"),
    [
        ({"content": "{}"}, 3, "its content is not what was hashed"),
        ({"type": "order.refunded"}, 3, "its column type is not what its content says"),
        ({"aggregate_id": "8"}, 3, "its column aggregate_id is not what its content says"),
        ({"recorded_at": "2020-01-01T00:00:00Z"}, 3, "its column recorded_at is not what its content says"),
        ({"previous_hash": "f" * 64}, 3, "it does not follow the entry before it"),
        ({"hash": "f" * 64}, 3, "its content is not what was hashed"),
        ({"position": 33}, 4, "it does not follow the entry before it"),
    ],
)
def test_a_changed_entry_is_named(chain: list[AuditEntry], change: Any, position: int, reason: str) -> None:
    AuditEntry.objects.filter(position=3).update(**change)
    broken = verify().broken
    assert broken is not None
    if "position" in change:
        assert (broken.position, broken.reason) == (4, "entry 3 is missing before it")
    else:
        assert (broken.position, broken.id, broken.reason) == (position, str(chain[2].id), reason)


def test_an_entry_written_anew_with_a_right_hash_breaks_the_one_after_it(chain: list[AuditEntry]) -> None:
    content = chain[2].content.replace('"number":2', '"number":9')
    AuditEntry.objects.filter(position=3).update(
        content=content, hash=audit.chain_hash(chain[2].previous_hash, content)
    )
    broken = verify().broken
    assert broken is not None
    assert (broken.position, broken.reason) == (4, "it does not follow the entry before it")


def test_a_removed_entry_is_missed(chain: list[AuditEntry]) -> None:
    AuditEntry.objects.filter(position=3).delete()
    broken = verify().broken
    assert broken is not None
    assert (broken.position, broken.reason) == (4, "entry 3 is missing before it")


def test_a_removed_end_is_missed(chain: list[AuditEntry]) -> None:
    AuditEntry.objects.filter(position=5).delete()
    broken = verify().broken
    assert broken is not None
    assert (broken.position, broken.reason) == (5, "it is missing: the chain once had 5 entries")


def test_a_chain_written_anew_as_a_whole_differs_from_a_noted_hash(chain: list[AuditEntry]) -> None:
    noted = {4: chain[3].hash}
    AuditEntry.objects.all().delete()
    AuditHead.objects.all().delete()
    for number in range(5):
        audit.append(event_of(payload={"number": number + 1}))
    assert verify().broken is None
    broken = verify(known=noted).broken
    assert broken is not None
    assert (broken.position, broken.reason) == (4, "its hash is not the one that was noted for it")
    AuditEntry.objects.filter(position__gt=3).delete()
    AuditHead.objects.update(position=3, hash=AuditEntry.objects.get(position=3).hash)
    assert verify().broken is None
    assert verify(known=noted).broken is not None


def test_a_lost_head_is_made_anew_at_the_end_of_the_chain(chain: list[AuditEntry]) -> None:
    AuditHead.objects.all().delete()
    found = verify().broken
    assert found is not None
    assert found.reason == "the head of the chain is missing"
    audit.append(event_of())
    assert verify() == audit.Verified(6, AuditHead.objects.get().hash)


# --- protection


@pytest.fixture
def protected() -> Iterator[None]:
    protect(using="default", wanted=True)
    audit.append(event_of())
    yield
    protect(using="default", wanted=False)


def test_the_database_refuses_to_change_or_delete_an_entry(protected: None) -> None:
    for change in (lambda: AuditEntry.objects.update(type="x.y"), lambda: AuditEntry.objects.all().delete()):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            change()
    audit.append(event_of())
    assert verify().entries == 2


def test_a_setting_takes_the_protection_away_at_the_next_migrate(protected: None, settings: Any) -> None:
    settings.OUTBOX = {"AUDIT_PROTECT": False}
    audit.protect_after_migrate(using="default")
    assert AuditEntry.objects.all().delete()[0] == 1
    settings.OUTBOX = {}
    audit.protect_after_migrate(using="default")
    audit.protect_after_migrate(using="default")
    audit.append(event_of())
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        AuditEntry.objects.all().delete()


def test_migrate_protects_the_log(django_db_setup: None) -> None:
    names = {"postgresql": "SELECT tgname FROM pg_trigger", "sqlite": "SELECT name FROM sqlite_master"}
    with connection.cursor() as cursor:
        cursor.execute(names[connection.vendor])
        assert any(name.startswith("django_outbox_audit_append_only") for (name,) in cursor.fetchall())


# --- the command


def command(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    try:
        call_command("outbox_verify_audit", *arguments, stdout=out, stderr=io.StringIO(), no_color=True)
    except SystemExit as end:
        return int(str(end.code)), out.getvalue()
    return 0, out.getvalue()


def test_the_command_prints_the_end_of_an_intact_chain(chain: list[AuditEntry]) -> None:
    assert command() == (0, f"The audit log is intact: 5 entries.\n5:{chain[-1].hash}\n")
    assert command("--known", f"5:{chain[-1].hash}")[0] == 0
    code, said = command("--json")
    assert (code, json.loads(said)) == (
        0,
        {"database": "default", "entries": 5, "hash": chain[-1].hash, "intact": True},
    )


def test_the_command_names_the_first_broken_entry_and_fails(chain: list[AuditEntry]) -> None:
    AuditEntry.objects.filter(position__in=[2, 4]).update(content="{}")
    code, said = command()
    assert code == 1
    assert said == (
        f"The audit log is broken at entry 2 (event {chain[1].id}): its content is not what was hashed.\n"
        "Entries before it that are intact: 1.\n"
    )
    code, said = command("--json")
    assert code == 1
    assert json.loads(said)["broken"] == {
        "position": 2,
        "id": str(chain[1].id),
        "reason": "its content is not what was hashed",
    }


def test_the_command_refuses_what_is_no_known_entry() -> None:
    with pytest.raises(CommandError, match="POSITION:HASH"):
        call_command("outbox_verify_audit", "--known", "5")
