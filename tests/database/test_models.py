"""The table: what its constraints refuse, and how its moments are written and read."""

from __future__ import annotations

import json
import zoneinfo
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from django_outbox import emit_event, on_event
from django_outbox.lease import new_id
from django_outbox.models import OutboxEvent, Status
from tests.conftest import StartPython

MOMENT = datetime(2026, 7, 1, 12, 30, 15, 678_000, tzinfo=UTC)


def create(**values: Any) -> OutboxEvent:
    defaults = {"id": new_id(), "type": "thing.done", "payload": {}, "occurred_at": MOMENT, "created_at": MOMENT}
    with transaction.atomic():
        return OutboxEvent.objects.create(**(defaults | values))


# --- constraints -----------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"status": "pending", "lease_until": MOMENT, "leased_by": "relay"},
        {"status": "waiting", "due_at": MOMENT},
        {"status": "waiting", "due_at": MOMENT, "lease_until": MOMENT, "leased_by": "relay"},
        {"status": "dead"},
        {"status": "dead", "due_at": MOMENT, "dead_at": MOMENT},
        {"status": "done", "finished_at": MOMENT},
        {"status": "failed", "finished_at": MOMENT},
        {"payload": []},
        {"payload": "text"},
        {"deliveries": {"one": None}, "failures": {"one": {"error": "x"}}, "headers": {"a": []}},
    ],
)
def test_a_legal_row_can_be_stored(values: dict[str, Any]) -> None:
    row = OutboxEvent.objects.get(id=create(**values).id)
    assert {name: getattr(row, name) for name in values} == values


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        # Two constraints refuse these; which one speaks is the database's choice.
        ({"status": "running"}, "(status|due)"),
        ({"status": ""}, "(status|due)"),
        ({"status": "Pending"}, "(status|due)"),
        ({"status": "waiting"}, "due"),
        ({"status": "pending", "due_at": MOMENT}, "due"),
        ({"status": "done", "due_at": MOMENT}, "due"),
        ({"status": "failed", "due_at": MOMENT}, "due"),
        ({"status": "done", "leased_by": "relay"}, "finished"),
        ({"status": "failed", "leased_by": "relay"}, "finished"),
        ({"status": "done", "lease_until": MOMENT}, "finished"),
        ({"status": "failed", "lease_until": MOMENT}, "finished"),
        ({"attempts": -1}, "counters"),
        ({"fence": -1}, "counters"),
        ({"lost_leases": -1}, "counters"),
        ({"deliveries": []}, "deliveries_object"),
        ({"deliveries": "one"}, "deliveries_object"),
        ({"failures": 7}, "failures_object"),
        ({"headers": ["a"]}, "headers_object"),
        ({"headers": True}, "headers_object"),
    ],
)
def test_a_row_against_the_rules_is_refused_by_the_database(values: dict[str, Any], constraint: str) -> None:
    with pytest.raises(IntegrityError, match=f"(event|outboxevent)_{constraint}"):
        create(**values)


@pytest.mark.django_db
@pytest.mark.parametrize("column", ["deliveries", "failures", "headers", "payload"])
@pytest.mark.parametrize("text", ["null", "[]", "1"])
def test_a_json_null_or_another_type_in_place_of_an_object_is_refused_also_from_plain_sql(
    column: str, text: str
) -> None:
    row = create()
    table = OutboxEvent._meta.db_table
    parameter = "%s::jsonb" if connection.vendor == "postgresql" else "%s"
    id_ = row.id if connection.vendor == "postgresql" else row.id.hex
    with connection.cursor() as cursor:
        if column == "payload":
            cursor.execute(f"UPDATE {table} SET payload = {parameter} WHERE id = %s", [text, id_])
            assert OutboxEvent.objects.get().payload == json.loads(text)
            return
        with pytest.raises(IntegrityError), transaction.atomic():
            cursor.execute(f"UPDATE {table} SET {column} = {parameter} WHERE id = %s", [text, id_])


@pytest.mark.django_db
def test_a_row_from_plain_sql_gets_its_defaults_from_the_database() -> None:
    id_ = new_id()
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {OutboxEvent._meta.db_table}"
            " (id, type, payload, headers, deliveries, failures, occurred_at, created_at)"
            " VALUES (%s, 'thing.done', '{}', '{}', '{}', '{}', %s, %s)",
            [str(id_) if connection.vendor == "postgresql" else id_.hex, "2026-07-01 12:00:00", "2026-07-01 12:00:00"],
        )
    row = OutboxEvent.objects.get()
    assert (row.id, row.status, row.attempts, row.fence, row.lost_leases) == (id_, Status.PENDING, 0, 0, 0)
    assert (row.quiet, row.leased_by, row.last_error, row.request_id) == (False, "", "", "")


@pytest.mark.django_db
def test_djangos_own_validation_knows_the_constraints() -> None:
    event = OutboxEvent(
        id=new_id(), type="thing.done", payload={"a": 1}, occurred_at=MOMENT, created_at=MOMENT, status="waiting"
    )
    with pytest.raises(ValidationError, match="due"):
        event.validate_constraints()


@pytest.mark.django_db
def test_the_lease_stands_in_no_index_and_no_index_predicate() -> None:
    """A claim that touched an index could not be a HOT update."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'django_outbox_event'")
        else:
            cursor.execute("SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'django_outbox_event'")
        definitions = [row[0] for row in cursor.fetchall() if row[0]]
    assert len(definitions) >= 7
    for changed in ("lease_until", "leased_by", "attempts", "fence", "lost_leases"):
        assert not [sql for sql in definitions if changed in sql]


# --- moments ---------------------------------------------------------------------------------------------------------

ZONES = ["UTC", "Asia/Kathmandu", "America/St_Johns", "Pacific/Kiritimati", "Europe/Berlin"]


@pytest.mark.django_db
@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ZONES)
def test_moments_are_read_as_aware_utc_in_any_zone(use_tz: bool, zone: str) -> None:
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        row = create(due_at=MOMENT, status="waiting")
        read = OutboxEvent.objects.get(id=row.id)
        assert (read.due_at, read.created_at) == (MOMENT, MOMENT)
        assert read.due_at is not None
        assert read.due_at.tzinfo is UTC
        assert list(OutboxEvent.objects.values_list("due_at", flat=True)) == [MOMENT]
        assert OutboxEvent.objects.filter(due_at=MOMENT).exists()
        assert OutboxEvent.objects.filter(due_at__lte=MOMENT, created_at__gte=MOMENT).exists()
        assert not OutboxEvent.objects.filter(due_at__lt=MOMENT).exists()
        assert not OutboxEvent.objects.filter(due_at__gt=MOMENT).exists()
        assert OutboxEvent.objects.filter(due_at__range=(MOMENT, MOMENT)).exists()
        local = MOMENT.astimezone(zoneinfo.ZoneInfo(zone))
        assert OutboxEvent.objects.filter(due_at=local).exists()
        # A naive one, as forms of a project without time zones give it, is one of the project's zone.
        assert OutboxEvent.objects.filter(due_at=local.replace(tzinfo=None)).exists()
        read.save()
        read.refresh_from_db()
        assert read.due_at == MOMENT
    assert OutboxEvent.objects.get(id=row.id).due_at == MOMENT


@pytest.mark.django_db
@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("fold", [0, 1])
def test_the_hour_that_comes_twice_is_two_hours(use_tz: bool, fold: int) -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Europe/Berlin"):
        create(due_at=datetime(2025, 10, 26, 2, 30, fold=fold, tzinfo=berlin), status="waiting")
        assert OutboxEvent.objects.get().due_at == datetime(2025, 10, 26, fold, 30, tzinfo=UTC)


@pytest.mark.django_db
@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ZONES)
def test_the_engines_clock_and_djangos_reading_of_it_agree_in_any_zone(use_tz: bool, zone: str) -> None:
    """The database's clock here is this machine's, so both can be compared."""
    on_event("thing.done", name="one")(lambda event: None)
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        before = datetime.now(UTC) - timedelta(seconds=1)
        with transaction.atomic():
            emit_event("thing.done", occurred_at=MOMENT, delay=60)
        after = datetime.now(UTC) + timedelta(seconds=1)
        row = OutboxEvent.objects.get()
        assert row.due_at is not None
        assert before < row.created_at < after
        assert before < row.due_at - timedelta(seconds=60) < after
        assert row.occurred_at == MOMENT
        assert OutboxEvent.objects.filter(created_at__range=(before, after)).exists()


SCRIPT = """
import datetime, django
django.setup()
from django.conf import settings
from django.db import transaction
from django_outbox import emit_event, on_event
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain
seen = []
on_event("thing.done", name="one")(seen.append)
before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
with transaction.atomic():
    emit_event("thing.done", occurred_at=datetime.datetime(2026, 7, 1, 12))
row = OutboxEvent.objects.get(type="thing.done")
assert before < row.created_at < datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1), row.created_at
assert dict(drain()) == {"done": 1}
row.refresh_from_db()
assert before < row.finished_at < datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
assert row.occurred_at == seen[0].occurred_at, (row.occurred_at, seen)
print(settings.USE_TZ, settings.TIME_ZONE, row.occurred_at.isoformat())
"""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("use_tz", "zone", "occurred"),
    [
        ("0", "Asia/Kathmandu", "2026-07-01T06:15:00+00:00"),
        ("1", "America/St_Johns", "2026-07-01T14:30:00+00:00"),
    ],
)
def test_a_whole_project_in_another_zone_keeps_utc(
    start_python: StartPython, use_tz: str, zone: str, occurred: str
) -> None:
    process = start_python("-W", "error", "-c", SCRIPT, TEST_USE_TZ=use_tz, TEST_TIME_ZONE=zone)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == f"{use_tz == '1'} {zone} {occurred}"
    assert OutboxEvent.objects.get().occurred_at == datetime.fromisoformat(occurred)
