"""
What the engine promises a queue whose rows have one step: no handlers, lanes, columns of its own.

The queue of parcels stands for email, webhook deliveries and tasks, whose tables differ in
their columns alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DataError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_outbox import lease as engine
from django_outbox.events import EVENTS
from django_outbox.models import OutboxEvent
from django_outbox.retry import Schedule
from django_outbox.testing import travel
from tests.testapp.models import PARCELS, Note, Parcel

pytestmark = pytest.mark.django_db

USING = "default"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
SCHEDULE = Schedule(max_attempts=3, base=10, cap=1_000, replay_every=3_600, replay_for=None)
ONE_TRY = Schedule(max_attempts=1, base=10, cap=1_000, replay_every=3_600, replay_for=None)


def insert(count: int = 1, **values: Any) -> list[UUID]:
    parcels = [Parcel(id=engine.new_id(), created_at=LONG_AGO + timedelta(days=n), **values) for n in range(count)]
    return [parcel.id for parcel in Parcel.objects.bulk_create(parcels)]


def claimer(holder: str = "relay-1") -> engine.Claimer:
    return engine.Claimer(PARCELS, holder=holder, using=USING)


def claim(limit: int = 100, *, lease_seconds: float = 60, **options: Any) -> list[engine.Lease]:
    return claimer().claim(limit, lease_seconds=lease_seconds, **options)


def claim_one(**options: Any) -> engine.Lease:
    (lease,) = claim(**options)
    return lease


def stored(id_: UUID) -> Parcel:
    return Parcel.objects.get(id=id_)


def settle(*settled: engine.Settled, schedule: Schedule = SCHEDULE, **options: Any) -> dict[UUID, str]:
    written = engine.settle(settled, schedule=schedule, using=USING, **options)
    return {lease.id: status for lease, status in written.items()}


def done(lease: engine.Lease, **columns: Any) -> engine.Settled:
    return engine.Settled(lease, engine.Done(), columns=columns)


def failed(lease: engine.Lease, **columns: Any) -> engine.Settled:
    return engine.Settled(lease, engine.Retry(), error="it broke", columns=columns)


# --- a row's way -----------------------------------------------------------------------------------------------------


def test_a_row_without_handlers_is_claimed_marked_renewed_released_and_settled() -> None:
    (id_,) = insert(body="glass")
    lease = claim_one(lease_seconds=120)
    assert (lease.content, lease.seconds, lease.attempts) == ({"body": "glass", "lane": 0}, 120, 1)
    assert engine.record(lease, using=USING, lost_leases=1)
    assert stored(id_).lost_leases == 1
    assert engine.renew({lease: {}}, using=USING) == []
    assert engine.release([lease], using=USING) == 1
    assert (stored(id_).attempts, stored(id_).leased_by) == (0, "")
    assert settle(done(claim_one())) == {id_: "done"}
    assert (stored(id_).status, stored(id_).lost_leases) == ("done", 0)
    assert claim() == []


def test_the_verbs_of_operators_work_on_it_and_handlers_and_types_match_nothing() -> None:
    ids = insert(2)
    settle(*[failed(lease) for lease in claim()], schedule=ONE_TRY)
    stand = engine.backlog(PARCELS, using=USING)
    assert (stand.dead, dict(stand.parked)) == (2, {})
    assert engine.retry(PARCELS, using=USING, handler="one") == engine.Report()
    assert engine.discard(PARCELS, using=USING, ids=ids, type="thing.done") == engine.Report(skipped=2)
    assert engine.retry(PARCELS, using=USING, ids=ids[:1]) == engine.Report(changed=1)
    assert engine.discard(PARCELS, using=USING, ids=ids[1:]) == engine.Report(changed=1)
    assert [stored(id_).status for id_ in ids] == ["waiting", "failed"]
    with travel(days=1):
        assert engine.purge(PARCELS, using=USING, older_than_seconds=60, status="failed") == 1


def test_a_row_may_be_dead_for_good() -> None:
    (id_,) = insert()
    assert settle(engine.Settled(claim_one(), engine.Dead(), error="nowhere to go")) == {id_: "dead"}
    assert (stored(id_).status, stored(id_).due_at) == ("dead", None)


def test_a_released_row_cannot_be_settled() -> None:
    (id_,) = insert()
    lease = claim_one()
    with pytest.raises(ValueError, match="release"):
        settle(engine.Settled(lease, engine.Released()))
    assert engine.release([lease], using=USING) == 1
    assert (stored(id_).status, stored(id_).attempts) == ("pending", 0)


# --- the queue's own columns ------------------------------------------------------------------------------------------


def test_a_settle_writes_the_queues_own_columns() -> None:
    (id_,) = insert()
    carrier = uuid4()
    sent_at = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    values = {
        "receipt": 'it\'s "signed" %s 🦀',
        "weight": 10,
        "fragile": True,
        "sent_at": sent_at,
        "answer": {"code": [1, None]},
        "carrier": carrier,
    }
    settle(done(claim_one(), **values))
    row = stored(id_)
    assert {name: getattr(row, name) for name in values} == values


def test_a_column_that_is_absent_stays_and_none_is_null() -> None:
    kept, cleared, changed = insert(3, receipt="old", answer={"old": 1}, weight=1)
    a, b, c = claim()
    settle(done(a), failed(b, receipt=None, answer=None), done(c, weight=2, answer="a text"))
    assert [(row.receipt, row.answer, row.weight) for row in map(stored, (kept, cleared, changed))] == [
        ("old", {"old": 1}, 1),
        (None, None, 1),
        ("old", "a text", 2),
    ]


def test_a_column_that_the_queue_does_not_have_is_refused() -> None:
    insert()
    with pytest.raises(ValueError, match="colour"):
        settle(done(claim_one(), colour="red"))


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_column_that_the_database_refuses_does_not_keep_the_row_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = insert(3)
    a, b, c = claim()
    with caplog.at_level(logging.CRITICAL):
        assert settle(done(a, weight=1), done(b, weight=10**12), done(c, weight=3)) == dict.fromkeys(ids, "done")
    assert [stored(id_).weight for id_ in ids] == [1, None, 3]
    assert stored(ids[1]).last_error == engine.REFUSED_TEXT


# --- scopes ----------------------------------------------------------------------------------------------------------


def test_a_claim_takes_only_rows_of_its_scope() -> None:
    here, there = uuid4(), uuid4()
    insert(2, lane=1, carrier=here)
    wanted = insert(2, lane=0, carrier=here)
    insert(1, lane=0, carrier=there)
    retried = insert(1, lane=0, carrier=here, status="waiting", due_at=LONG_AGO)
    dead = insert(1, lane=0, carrier=here, status="dead", due_at=LONG_AGO, dead_at=LONG_AGO)
    turns = claimer()
    leases = turns.claim(100, lease_seconds=60, scope={"lane": 0, "carrier": here})
    assert {lease.id for lease in leases} == {*wanted, *retried, *dead}
    assert [lease.id for lease in leases if lease.id in wanted] == wanted
    assert turns.more is False
    assert claim(scope={"lane": 0, "carrier": here}) == []
    assert len(claim(scope={"carrier": here})) == 2
    assert len(claim()) == 1


def test_neither_new_rows_nor_retries_starve_in_a_scope_whose_turn_is_always_the_same() -> None:
    insert(60, lane=0)
    insert(60, lane=0, status="waiting", due_at=LONG_AGO)
    turns = claimer()
    statuses = Counter[str]()
    for _ in range(25):
        statuses.update(lease.status for lease in turns.claim(2, lease_seconds=60, scope={"lane": 0}))
        turns.claim(2, lease_seconds=60, scope={"lane": 1})
    # By chance: one in thirty million that either had no turn.
    assert set(statuses) == {"pending", "waiting"}


def test_scopes_are_claimed_from_in_their_order_and_each_brings_no_more_than_its_own() -> None:
    first, second = uuid4(), uuid4()
    mine = {carrier: insert(5, carrier=carrier) for carrier in (second, first)}
    insert(5, carrier=uuid4())
    turns = claimer()
    scopes = [({"carrier": first}, 2), ({"carrier": uuid4()}, 3), ({"carrier": second}, 9)]
    leases = turns.claim_scopes(scopes, 100, lease_seconds=60)
    assert [lease.id for lease in leases] == [*mine[first][:2], *mine[second]]
    assert {(lease.fence, lease.attempts) for lease in leases} == {(1, 1)}
    assert turns.more is True  # the first has more than it was asked for
    leases = turns.claim_scopes([({"carrier": first}, 9), ({"carrier": second}, 9)], 100, lease_seconds=60)
    assert [lease.id for lease in leases] == mine[first][2:]
    assert turns.more is False


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_what_was_leased_before_a_claim_failed_is_not_left_to_its_lease() -> None:
    carrier = uuid4()
    mine = insert(2, carrier=carrier)
    turns = claimer()
    refused = ({"lane": "no number"}, 2)
    leases = turns.claim_scopes([({"carrier": carrier}, 9), refused], 100, lease_seconds=60)
    assert [lease.id for lease in leases] == mine
    assert turns.more is True
    with pytest.raises(DataError):
        turns.claim_scopes([({"carrier": carrier}, 9), refused], 100, lease_seconds=60)


def test_no_scope_is_taken_that_there_is_no_room_for() -> None:
    carriers = [uuid4() for _ in range(6)]
    for carrier in carriers:
        insert(2, carrier=carrier)
    coming = iter([({"carrier": carrier}, 4) for carrier in carriers])
    turns = claimer()
    # Room for what three may bring; they bring two each, so there is room for the fourth and fifth.
    assert len(turns.claim_scopes(coming, 10, lease_seconds=60)) == 10
    assert turns.more is True
    assert list(coming) == [({"carrier": carriers[5]}, 4)]


def test_scopes_of_several_columns_spare_leases_that_ran_out() -> None:
    carrier = uuid4()
    for lane in (0, 1):
        insert(2, lane=lane, carrier=carrier)
    scopes = [({"lane": lane, "carrier": carrier}, 1) for lane in (1, 0)]
    assert [lease.content["lane"] for lease in claimer().claim_scopes(scopes, 10, lease_seconds=60)] == [1, 0]
    with travel(seconds=61):
        turns = claimer("relay-2")
        scopes = [(scope, 9) for scope, _ in scopes]
        leases = turns.claim_scopes(scopes, 100, lease_seconds=60, spare_expired=True)
        assert [(lease.content["lane"], lease.suspect) for lease in leases] == [(1, False), (0, False)]
        leases = turns.claim_scopes(scopes, 100, lease_seconds=60)
        assert [(lease.content["lane"], lease.suspect) for lease in leases] == [(1, True), (0, True)]


def test_dead_rows_get_a_quarter_of_what_a_scope_brings_and_all_that_nobody_else_wants() -> None:
    busy, quiet, empty = uuid4(), uuid4(), uuid4()
    dead = {"status": "dead", "due_at": LONG_AGO, "dead_at": LONG_AGO}
    insert(20, carrier=busy)
    insert(20, carrier=busy, **dead)
    insert(3, carrier=quiet, **dead)
    turns = claimer()
    scopes = [({"carrier": busy}, 8), ({"carrier": quiet}, 1), ({"carrier": empty}, 1)]
    counts = Counter((lease.status, lease.id) for lease in turns.claim_scopes(scopes, 100, lease_seconds=60))
    assert Counter(status for status, _ in counts) == {"pending": 6, "dead": 3}


def test_neither_new_rows_nor_retries_starve_in_any_of_several_scopes() -> None:
    for lane in (0, 1):
        insert(60, lane=lane)
        insert(60, lane=lane, status="waiting", due_at=LONG_AGO)
    turns = claimer()
    kinds = Counter[tuple[int, str]]()
    for _ in range(25):
        leases = turns.claim_scopes([({"lane": 0}, 2), ({"lane": 1}, 2)], 100, lease_seconds=60)
        kinds.update((lease.content["lane"], lease.status) for lease in leases)
    # By chance: one in fifteen million that either had no turn.
    assert set(kinds) == {(lane, status) for lane in (0, 1) for status in ("pending", "waiting")}


@pytest.mark.postgres
def test_many_scopes_take_one_statement_which_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.lease.claim.CLAIM_BYTES", 10_000)
    carriers = [uuid4() for _ in range(20)]
    for carrier in carriers:
        insert(3, carrier=carrier, body="".join(str(uuid4()) for _ in range(30)))
    turns = claimer()
    scopes = [({"carrier": carrier}, 3) for carrier in carriers]
    with CaptureQueriesContext(connection) as queries:
        leases = turns.claim_scopes(scopes, 500, lease_seconds=60)
    assert len(queries) == 1
    assert 8 <= len(leases) <= 12
    assert turns.more is True
    assert len({lease.id for lease in leases} | {lease.id for lease in claim()}) == 60


def test_a_claim_may_spare_rows_whose_lease_ran_out() -> None:
    insert(3)
    assert len(claim(2)) == 2
    with travel(seconds=61):
        turns = claimer("relay-2")
        assert engine.next_due_seconds(PARCELS, using=USING, spare_expired=True) == 0
        assert len(turns.claim(100, lease_seconds=600, spare_expired=True)) == 1
        assert turns.more is False
        assert engine.next_due_seconds(PARCELS, using=USING) == 0
        assert engine.next_due_seconds(PARCELS, using=USING, spare_expired=True) == pytest.approx(600, abs=5)
        assert len(turns.claim(100, lease_seconds=60)) == 2


def test_the_next_due_time_is_asked_for_within_a_scope_or_without_some_values() -> None:
    paused, other, third = uuid4(), uuid4(), uuid4()
    insert(1, carrier=paused)
    assert engine.next_due_seconds(PARCELS, using=USING) == 0
    without = {"carrier": [paused, third], "lane": []}
    assert engine.next_due_seconds(PARCELS, using=USING, excluding=without) is None
    assert engine.next_due_seconds(PARCELS, using=USING, scope={"lane": 1}) is None
    assert engine.next_due_seconds(PARCELS, using=USING, scope={"lane": 0, "carrier": paused}) == 0
    insert(1, carrier=other)
    claim(scope={"carrier": other}, lease_seconds=50)
    assert engine.next_due_seconds(PARCELS, using=USING, excluding=without) == pytest.approx(50, abs=5)


# --- renewals --------------------------------------------------------------------------------------------------------


def test_leases_of_several_queues_are_renewed_together_each_by_its_own_length() -> None:
    parcels = insert(2)
    event = engine.NewRow(id=engine.new_id(), type="thing.done", payload="{}", deliveries='{"one": null}')
    with transaction.atomic():
        engine.insert_events([event], using=USING)
    (about_event,) = engine.Claimer(EVENTS, holder="relay-1", using=USING).claim(9, lease_seconds=60)
    first, second = claim(lease_seconds=600)
    Parcel.objects.filter(id=parcels[1]).update(leased_by="relay-2")
    with travel(seconds=30):
        lost = engine.renew({first: {}, about_event: {"one": "2026-01-01T00:00:00.000Z"}, second: {}}, using=USING)
    assert lost == [second]
    claimed_at = Parcel.objects.get(id=parcels[1]).lease_until
    renewed = Parcel.objects.get(id=parcels[0]).lease_until
    assert claimed_at is not None
    assert renewed is not None
    assert (renewed - claimed_at).total_seconds() == pytest.approx(30, abs=5)
    row = OutboxEvent.objects.get()
    assert row.deliveries == {"one": "2026-01-01T00:00:00.000Z"}
    assert (renewed - row.lease_until).total_seconds() == pytest.approx(540, abs=5)


# --- what goes along --------------------------------------------------------------------------------------------------


def test_what_goes_along_hears_of_the_written_rows_only_and_in_the_same_transaction() -> None:
    insert(3)
    a, b, stale = claim()
    Parcel.objects.filter(id=stale.id).update(leased_by="relay-2")
    heard: list[tuple[UUID, str]] = []

    def along(written: Sequence[tuple[engine.Settled, str]]) -> None:
        assert connection.in_atomic_block
        heard.extend((settled.lease.id, status) for settled, status in written)
        Note.objects.create(text="went along")

    assert settle(done(a), failed(b), done(stale), along=along) == {a.id: "done", b.id: "waiting"}
    assert heard == [(a.id, "done"), (b.id, "waiting")]
    assert Note.objects.count() == 1
    assert settle(done(stale), along=along) == {}
    assert len(heard) == 2


@pytest.mark.parametrize("error", [DataError("bad"), KeyError("a bug")], ids=["data", "bug"])
def test_what_goes_along_cannot_prevent_the_settle(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    (id_,) = insert()

    def along(written: Sequence[tuple[engine.Settled, str]]) -> None:
        Note.objects.create(text="undone")
        raise error

    with caplog.at_level(logging.ERROR):
        assert settle(done(claim_one()), along=along) == {id_: "done"}
    assert stored(id_).status == "done"
    assert not Note.objects.exists()
    assert "what goes along not written" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_lost_connection_while_something_goes_along_undoes_the_settle() -> None:
    (id_,) = insert()
    lease = claim_one()

    def along(written: Sequence[tuple[engine.Settled, str]]) -> None:
        raise OperationalError("the connection was lost")

    with pytest.raises(OperationalError):
        settle(done(lease), along=along)
    assert stored(id_).status == "pending"
    assert settle(done(lease), again=True) == {id_: "done"}


def test_a_death_may_go_without_an_announcement() -> None:
    (id_,) = insert()
    assert settle(failed(claim_one()), schedule=ONE_TRY, announce=lambda _settled, _status: None) == {id_: "dead"}
    assert not OutboxEvent.objects.exists()
