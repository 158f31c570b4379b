"""What retry, discard, rename_handler and purge promise, on every database."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from pytest_django import DjangoCaptureOnCommitCallbacks

from django_outbox import Event, Reject, on_event
from django_outbox import lease as engine
from django_outbox.events import EVENTS
from django_outbox.lease import Report
from django_outbox.models import OutboxEvent
from django_outbox.retry import Schedule
from django_outbox.testing import drain

pytestmark = pytest.mark.django_db

USING = "default"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
TIME = "2026-01-01T00:00:00.000Z"
SCHEDULE = Schedule(max_attempts=1, base=10, cap=1_000, replay_every=3_600, replay_for=None)


def insert(
    count: int = 1, *, handlers: Sequence[str] = ("one",), type_: str = "thing.done", **values: Any
) -> list[UUID]:
    """Insert events owed to these handlers; ``values`` are columns to overwrite then."""
    rows = [
        engine.NewRow(id=engine.new_id(), type=type_, payload="{}", deliveries=json.dumps(dict.fromkeys(handlers)))
        for _ in range(count)
    ]
    with transaction.atomic():
        ids = engine.insert_events(rows, using=USING)
    if values:
        OutboxEvent.objects.filter(id__in=ids).update(**values)
    return ids


def insert_dead(count: int = 1, **values: Any) -> list[UUID]:
    return insert(count, **{"status": "dead", "attempts": 8, "dead_at": LONG_AGO, "due_at": FAR_AHEAD, **values})


def insert_failed(count: int = 1, **values: Any) -> list[UUID]:
    return insert(count, **{"status": "failed", "attempts": 1, "finished_at": LONG_AGO, **values})


def row(id_: UUID) -> OutboxEvent:
    return OutboxEvent.objects.get(pk=id_)


def claim(limit: int = 100) -> list[engine.Lease]:
    return engine.Claimer(EVENTS, holder="relay-1", using=USING).claim(limit, lease_seconds=60)


def retry(**arguments: Any) -> Report:
    return engine.retry(EVENTS, using=USING, **arguments)


def discard(**arguments: Any) -> Report:
    return engine.discard(EVENTS, using=USING, **arguments)


# --- retry -----------------------------------------------------------------------------------------------------------


def test_retry_gives_a_dead_row_a_new_life_due_now() -> None:
    (id_,) = insert_dead(fence=7, lost_leases=2, last_error="boom")

    assert retry(ids=[id_]) == Report(changed=1)

    event = row(id_)
    assert (event.status, event.attempts, event.lost_leases, event.dead_at) == ("waiting", 0, 0, None)
    assert event.due_at is not None
    assert event.due_at < datetime.now(UTC) + timedelta(seconds=1)
    assert event.fence == 7
    assert [lease.id for lease in claim()] == [id_]


def test_retry_makes_a_waiting_row_due_now() -> None:
    (id_,) = insert(status="waiting", due_at=FAR_AHEAD, attempts=3)
    assert claim() == []
    assert retry(ids=[id_]) == Report(changed=1)
    (lease,) = claim()
    assert (lease.id, lease.attempts) == (id_, 1)


def test_retry_clears_rejections_marks_and_parking_and_keeps_deliveries_and_discards() -> None:
    (id_,) = insert_failed(
        deliveries={"made": TIME, "rejected": None, "lost": None, "parked": None, "discarded": None},
        failures={
            "rejected": {"error": "no", "at": TIME, "rejected": True},
            "lost": {"error": "worker lost", "at": TIME, "lost": True, "marks": 2},
            "parked": {"error": "unknown", "at": TIME, "parked_at": TIME},
            "discarded": {"error": "old", "at": TIME, "discarded": True},
        },
    )
    assert retry(ids=[id_]) == Report(changed=1)
    event = row(id_)
    assert event.deliveries["made"] == TIME
    assert event.failures == {
        "rejected": {"error": "no", "at": TIME},
        "lost": {"error": "worker lost", "at": TIME},
        "parked": {"error": "unknown", "at": TIME},
        "discarded": {"error": "old", "at": TIME, "discarded": True},
    }


def test_retry_runs_only_what_is_still_owed() -> None:
    runs: list[str] = []
    for name in ("made", "owed", "discarded"):
        on_event("thing.done", name=name)(lambda event: runs.append(event.handler))
    (id_,) = insert_dead(
        handlers=("made", "owed", "discarded"),
        deliveries={"made": TIME, "owed": None, "discarded": None},
        failures={"discarded": {"discarded": True}},
    )
    retry(ids=[id_])
    drain()
    assert runs == ["owed"]
    assert row(id_).status == "done"


def test_retry_leaves_a_row_alone_whose_deliveries_were_all_discarded() -> None:
    (id_,) = insert_dead()
    discard(ids=[id_])
    assert retry(ids=[id_]) == Report(skipped=1)
    assert row(id_).status == "failed"


def test_retry_skips_and_counts_rows_under_a_live_lease() -> None:
    held, free = insert_dead(2)
    OutboxEvent.objects.filter(pk=held).update(leased_by="relay-2", lease_until=FAR_AHEAD)
    assert retry(ids=[held, free]) == Report(changed=1, leased=1)
    assert (row(held).status, row(held).leased_by) == ("dead", "relay-2")


def test_retry_clears_an_expired_lease_so_that_its_late_holder_cannot_settle() -> None:
    insert_dead(due_at=LONG_AGO)
    (lease,) = claim()
    OutboxEvent.objects.update(lease_until=LONG_AGO)
    assert retry() == Report(changed=1)
    engine.settle([engine.Settled(lease, engine.Done())], schedule=SCHEDULE, using=USING)
    event = row(lease.id)
    assert (event.status, event.leased_by, event.lease_until) == ("waiting", "", None)


def test_retry_changes_only_rows_that_still_have_the_status_that_was_seen() -> None:
    (dead,), (done,), (failed,) = insert_dead(), insert(status="done", finished_at=LONG_AGO), insert_failed()
    assert retry(ids=[dead, done, failed], status=["dead"]) == Report(changed=1, skipped=2)
    assert [row(id_).status for id_ in (dead, done, failed)] == ["waiting", "done", "failed"]


def test_retry_never_touches_done_and_pending_rows_whatever_it_is_asked() -> None:
    ids = [*insert(status="done", finished_at=LONG_AGO), *insert()]
    assert retry(ids=ids, status=["done", "pending"]) == Report(skipped=2)
    assert [row(id_).status for id_ in ids] == ["done", "pending"]


def test_ids_that_do_not_exist_are_counted_as_skipped_and_repeated_ones_once() -> None:
    (id_,) = insert_dead()
    assert retry(ids=[id_, id_, engine.new_id()]) == Report(changed=1, skipped=1)


def test_no_ids_are_no_rows_not_all_rows() -> None:
    insert_dead()
    assert retry(ids=[]) == Report()
    assert discard(ids=[]) == Report()


def test_filters_choose_by_type_and_by_the_handler_that_is_owed() -> None:
    (other_type,) = insert_dead(type_="thing.undone")
    (owed,) = insert_dead(handlers=("one", "two"), deliveries={"one": None, "two": TIME})
    (delivered,) = insert_dead(handlers=("one", "two"), deliveries={"one": TIME, "two": None})
    (discarded,) = insert_dead(
        handlers=("one", "two"), deliveries={"one": None, "two": None}, failures={"one": {"discarded": True}}
    )
    assert retry(type="thing.done", handler="one") == Report(changed=1)
    statuses = {id_: row(id_).status for id_ in (other_type, owed, delivered, discarded)}
    assert statuses == {other_type: "dead", owed: "waiting", delivered: "dead", discarded: "dead"}


def test_filters_narrow_ids_too() -> None:
    (wanted,), (other,) = insert_dead(), insert_dead(type_="thing.undone")
    assert retry(ids=[wanted, other], type="thing.done") == Report(changed=1, skipped=1)
    assert row(other).status == "dead"


def test_a_limit_takes_the_oldest_first() -> None:
    newer, oldest, old = insert_dead(3)
    for id_, days in ((newer, 3), (oldest, 1), (old, 2)):
        OutboxEvent.objects.filter(pk=id_).update(dead_at=LONG_AGO + timedelta(days=days))
    assert retry(limit=2) == Report(changed=2)
    assert row(newer).status == "dead"


def test_many_rows_change_in_chunks_that_report_how_far_they_are() -> None:
    insert_dead(1_200)
    reached: list[int] = []
    assert retry(progress=reached.append) == Report(changed=1_200)
    assert reached == [500, 1_000, 1_200]


def test_a_verb_in_a_transaction_that_rolls_back_changes_nothing() -> None:
    (id_,) = insert_dead()
    with transaction.atomic():
        retry(ids=[id_])
        transaction.set_rollback(True)
    assert row(id_).status == "dead"


def test_retried_rows_wake_the_relays_once_and_a_retry_of_nothing_does_not(
    django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks,
) -> None:
    insert_dead(2)
    with django_capture_on_commit_callbacks() as callbacks:
        retry()
    assert len(callbacks) == 1
    with django_capture_on_commit_callbacks() as callbacks:
        retry(status=["failed"])
    assert callbacks == []


# --- discard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"status": "dead", "dead_at": LONG_AGO, "due_at": FAR_AHEAD},
        {"status": "waiting", "due_at": FAR_AHEAD},
        {"status": "pending"},
    ],
    ids=lambda values: str(values["status"]),
)
def test_discard_closes_a_row_for_good(values: dict[str, Any]) -> None:
    (id_,) = insert(handlers=("made", "owed"), **values, deliveries={"made": TIME, "owed": None})
    assert discard(ids=[id_]) == Report(changed=1)
    event = row(id_)
    assert (event.status, event.due_at, event.leased_by) == ("failed", None, "")
    assert event.finished_at is not None
    assert event.failures == {"owed": {"discarded": True}}
    assert claim() == []


def test_discard_announces_nothing() -> None:
    on_event("outbox.*", name="alert")(print)
    insert_dead()
    discard()
    assert not OutboxEvent.objects.filter(type__startswith="outbox.").exists()


def test_discard_skips_what_a_relay_holds_and_what_is_over() -> None:
    (held,), (done,), (failed,) = insert(), insert(status="done", finished_at=LONG_AGO), insert_failed()
    claim()
    assert discard(ids=[held, done, failed]) == Report(leased=1, skipped=2)
    assert [row(id_).status for id_ in (held, done, failed)] == ["pending", "done", "failed"]


def test_discarding_the_last_owed_delivery_makes_the_row_done() -> None:
    (id_,) = insert(
        handlers=("made", "gone"), status="waiting", due_at=FAR_AHEAD, deliveries={"made": TIME, "gone": None}
    )
    assert discard(handler="gone") == Report(changed=1)
    event = row(id_)
    assert (event.status, event.due_at, event.failures) == ("done", None, {"gone": {"discarded": True}})
    assert event.finished_at is not None


def test_discarding_a_delivery_beside_rejected_ones_makes_the_row_failed() -> None:
    (id_,) = insert_dead(handlers=("no", "gone"), failures={"no": {"error": "no", "at": TIME, "rejected": True}})
    assert discard(handler="gone") == Report(changed=1)
    assert row(id_).status == "failed"


def test_discarding_a_delivery_beside_owed_ones_leaves_the_row_where_it_is() -> None:
    (id_,) = insert_dead(handlers=("owed", "gone"))
    assert discard(handler="gone") == Report(changed=1)
    event = row(id_)
    assert (event.status, event.attempts, event.due_at, event.dead_at) == ("dead", 8, FAR_AHEAD, LONG_AGO)


def test_the_rejected_delivery_of_a_failed_row_can_be_discarded() -> None:
    rejected = {"no": {"error": "no", "at": TIME, "rejected": True}}
    (id_,) = insert_failed(handlers=("made", "no"), deliveries={"made": TIME, "no": None}, failures=rejected)
    assert discard(ids=[id_], handler="no", status=["failed"]) == Report(changed=1)
    assert row(id_).status == "done"


def test_discarding_a_delivery_that_is_not_owed_changes_nothing() -> None:
    (id_,) = insert_dead(handlers=("made", "owed"), deliveries={"made": TIME, "owed": None})
    assert discard(ids=[id_], handler="made") == Report(skipped=1)
    assert discard(ids=[id_], handler="stranger") == Report(skipped=1)
    assert row(id_).failures == {}


def test_the_other_handlers_still_get_an_event_of_which_one_delivery_was_discarded() -> None:
    runs: list[str] = []
    for name in ("stays", "goes"):
        on_event("thing.done", name=name)(lambda event: runs.append(event.handler))
    insert(handlers=("stays", "goes"))
    discard(handler="goes", status=["pending"])
    drain()
    assert runs == ["stays"]
    assert OutboxEvent.objects.get().status == "done"


def test_a_rejected_row_is_tried_again_after_a_retry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    refuse = [True]

    @on_event("thing.done", name="one")
    def one(event: Event) -> None:
        if refuse:
            raise Reject("not yet")

    (id_,) = insert()
    drain()
    assert row(id_).status == "failed"
    refuse.clear()
    retry(ids=[id_])
    drain()
    assert row(id_).status == "done"


# --- rename ----------------------------------------------------------------------------------------------------------


def test_a_renamed_delivery_reaches_the_new_handler_now() -> None:
    runs: list[str] = []
    on_event("thing.done", name="new")(lambda event: runs.append(event.handler))
    (id_,) = insert(handlers=("old",))
    drain()
    assert row(id_).failures["old"]["parked_at"]

    assert engine.rename_handler(EVENTS, "old", "new", using=USING) == Report(changed=1)
    drain()

    event = row(id_)
    assert runs == ["new"]
    assert (event.status, list(event.deliveries), event.failures) == ("done", ["new"], {})


def test_a_rename_to_a_handler_that_had_the_event_repeats_nothing() -> None:
    (id_,) = insert_dead(handlers=("old", "new"), deliveries={"old": None, "new": TIME})
    assert engine.rename_handler(EVENTS, "old", "new", using=USING) == Report(changed=1)
    assert (row(id_).status, row(id_).deliveries) == ("done", {"new": TIME})


def test_a_rename_leaves_delivered_held_and_other_rows_alone() -> None:
    (delivered,) = insert(handlers=("old", "two"), deliveries={"old": TIME, "two": None})
    (held,) = insert(handlers=("old",), leased_by="relay-2", lease_until=FAR_AHEAD)
    (other,) = insert(handlers=("two",))
    assert engine.rename_handler(EVENTS, "old", "new", using=USING) == Report(leased=1)
    assert all("new" not in row(id_).deliveries for id_ in (delivered, held, other))


# --- purge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "moment"), [("done", "finished_at"), ("failed", "finished_at"), ("dead", "dead_at")]
)
def test_purge_deletes_what_ended_long_ago_and_nothing_else(status: str, moment: str) -> None:
    (old,) = insert(1, status=status)
    (young,) = insert(1, status=status)
    for id_, when in ((old, LONG_AGO), (young, datetime.now(UTC) - timedelta(hours=1))):
        OutboxEvent.objects.filter(pk=id_).update(**{moment: when})
    others = [*insert(), *insert(status="waiting", due_at=LONG_AGO)]
    if status != "done":
        others += insert(status="done", finished_at=LONG_AGO)

    assert engine.purge(EVENTS, using=USING, status=status, older_than_seconds=86_400) == 1

    assert set(OutboxEvent.objects.values_list("pk", flat=True)) == {young, *others}
    assert old not in {young, *others}


def test_purge_works_in_batches_and_stops_at_its_limit() -> None:
    insert(25, status="done", finished_at=LONG_AGO)
    reached: list[int] = []
    gone = engine.purge(EVENTS, using=USING, older_than_seconds=0, batch=10, limit=22, progress=reached.append)
    assert gone == 22
    assert reached == [10, 20, 22]
    assert engine.purge(EVENTS, using=USING, older_than_seconds=0) == 3


def test_an_interrupted_purge_keeps_what_it_had_not_reached() -> None:
    insert(25, status="done", finished_at=LONG_AGO)

    def interrupt(gone: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.purge(EVENTS, using=USING, older_than_seconds=0, batch=10, progress=interrupt)
    assert OutboxEvent.objects.count() == 15


def test_purge_leaves_dead_rows_alone_that_a_relay_is_replaying() -> None:
    insert_dead(leased_by="relay-2", lease_until=FAR_AHEAD)
    assert engine.purge(EVENTS, using=USING, status="dead", older_than_seconds=0) == 0


@pytest.mark.parametrize("status", ["pending", "waiting", "gone"])
def test_purge_refuses_rows_that_are_not_over(status: str) -> None:
    with pytest.raises(ValueError, match="Only done, failed and dead"):
        engine.purge(EVENTS, using=USING, status=status, older_than_seconds=0)
