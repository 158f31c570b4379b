"""
Several holders on one table: no row for two of them, nobody waits, no deadlock.

Interleavings are forced in one of three ways, named at each test: threads that start
at one moment; a session of the test's own that keeps a row locked in an open
transaction; and, to know that a statement has begun to wait for that session, the
server's own view of who waits.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import connection, transaction

from django_outbox import lease as engine
from django_outbox.events import EVENTS, announcement
from django_outbox.models import OutboxEvent
from django_outbox.retry import Schedule
from django_outbox.testing import travel
from tests.concurrency.helpers import DEADLINE_SECONDS, Worker, eventually, together
from tests.conftest import RawConnect
from tests.testapp.models import PARCELS, Parcel

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
SCHEDULE = Schedule(max_attempts=3, base=0, cap=0, replay_every=None, replay_for=None)
TABLE = OutboxEvent._meta.db_table


def insert(count: int) -> list[UUID]:
    rows = [
        engine.NewRow(id=engine.new_id(), type="thing.done", payload="{}", deliveries='{"one": null}')
        for _ in range(count)
    ]
    with transaction.atomic():
        return engine.insert_events(rows, using=USING)


def claim(limit: int = 100, *, holder: str = "relay-1") -> list[engine.Lease]:
    return engine.Claimer(EVENTS, holder=holder, using=USING).claim(limit, lease_seconds=60)


def done(lease: engine.Lease) -> engine.Settled:
    return engine.Settled(lease, engine.Done(), delivered={"one": "2026-01-01T00:00:00.000Z"})


def failed(lease: engine.Lease) -> engine.Settled:
    return engine.Settled(lease, engine.Retry(), error="it broke")


def lock(session: psycopg.Connection[Any], id_: UUID, *, nowait: bool = False) -> None:
    session.execute(f"SELECT 1 FROM {TABLE} WHERE id = %s FOR UPDATE {'NOWAIT' if nowait else ''}", [id_])


def somebody_waits_for(session: psycopg.Connection[Any], observer: psycopg.Connection[Any]) -> bool:
    pid = session.info.backend_pid
    found = observer.execute("SELECT 1 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", [pid]).fetchone()
    return found is not None


def test_no_row_is_claimed_by_two_relays() -> None:
    """Four claimers that start at one moment, each in small claims."""
    ids = insert(120)

    def relay(name: str) -> Callable[[], list[UUID]]:
        def work() -> list[UUID]:
            claimer = engine.Claimer(EVENTS, holder=name, using=USING)
            mine: list[UUID] = []
            misses = 0
            # Rows that another claimer has locked at that moment are skipped, so one empty claim is no end.
            while misses < 3:
                leases = claimer.claim(3, lease_seconds=60)
                misses = 0 if leases else misses + 1
                mine += [lease.id for lease in leases]
            return mine

        return work

    claimed = Counter(id_ for mine in together(*(relay(f"relay-{n}") for n in range(4))) for id_ in mine)
    assert set(claimed) <= set(ids)
    assert set(claimed.values()) == {1}
    claimed.update(lease.id for lease in claim(200))
    assert claimed == Counter(ids)
    assert set(OutboxEvent.objects.values_list("attempts", "fence")) == {(1, 1)}


def test_no_row_of_many_scopes_is_claimed_by_two_relays() -> None:
    """The same, each claiming from all scopes at once, in orders of their own."""
    carriers = [uuid4() for _ in range(8)]
    created = datetime(2026, 1, 1, tzinfo=UTC)
    parcels = [Parcel(id=engine.new_id(), created_at=created, carrier=carrier) for carrier in carriers * 15]
    ids = [parcel.id for parcel in Parcel.objects.bulk_create(parcels)]

    def relay(name: str) -> Callable[[], list[UUID]]:
        def work() -> list[UUID]:
            claimer = engine.Claimer(PARCELS, holder=name, using=USING)
            scopes = [({"carrier": carrier}, 2) for carrier in random.sample(carriers, len(carriers))]
            mine: list[UUID] = []
            misses = 0
            while misses < 3:
                leases = claimer.claim_scopes(scopes, 100, lease_seconds=60)
                misses = 0 if leases else misses + 1
                mine += [lease.id for lease in leases]
            return mine

        return work

    claimed = Counter(id_ for mine in together(*(relay(f"relay-{n}") for n in range(4))) for id_ in mine)
    assert set(claimed.values()) == {1}
    rest = engine.Claimer(PARCELS, holder="relay-9", using=USING)
    claimed.update(lease.id for lease in rest.claim(200, lease_seconds=60))
    assert claimed == Counter(ids)
    assert set(Parcel.objects.values_list("attempts", "fence")) == {(1, 1)}


def test_rows_whose_lease_ran_out_go_to_one_successor_each() -> None:
    """The same, over rows whose first holder is gone."""
    insert(60)
    claim(60, holder="gone")
    with travel(seconds=61):
        both = together(*(partial(claim, 60, holder=f"relay-{n}") for n in range(2)))
    claimed = Counter(lease.id for leases in both for lease in leases)
    assert set(claimed.values()) == {1}
    assert all(lease.suspect and lease.fence == 2 for leases in both for lease in leases)


@pytest.mark.postgres
def test_a_claim_skips_locked_rows_and_waits_for_nobody(raw_connect: RawConnect) -> None:
    """A session of the test's own keeps the oldest row locked; a claim that waited for it would never end."""
    ids = insert(4)
    other = raw_connect()
    with other.transaction():
        lock(other, ids[0])
        leases = Worker(claim).result()
        assert [lease.id for lease in leases] == ids[1:]
    assert [lease.id for lease in claim()] == ids[:1]


@pytest.mark.postgres
def test_a_claim_takes_what_a_row_became_and_not_what_it_was(raw_connect: RawConnect) -> None:
    """A row is settled between a claim's snapshot and its lock: an open transaction holds the claim's own one row."""
    ids = insert(2)
    other, observer = raw_connect(), raw_connect()
    # The first row is under a live lease that only an uncommitted transaction knows of.
    with other.transaction():
        other.execute(
            f"UPDATE {TABLE} SET leased_by = 'x', lease_until = now() + interval '1 hour' WHERE id = %s", [ids[0]]
        )
        assert [lease.id for lease in claim(1)] == ids[1:]
    assert claim(1) == []
    assert observer.execute(f"SELECT leased_by FROM {TABLE} WHERE id = %s", [ids[0]]).fetchone() == ("x",)


@pytest.mark.postgres
def test_a_record_that_waited_for_a_lock_judges_the_row_as_it_then_is(raw_connect: RawConnect) -> None:
    """A successor's claim is open when the write begins, and commits once the write waits for it."""
    (id_,) = insert(1)
    (lease,) = claim()
    successor, observer = raw_connect(), raw_connect()
    with successor.transaction():
        successor.execute(f"UPDATE {TABLE} SET fence = fence + 1, leased_by = 'relay-2' WHERE id = %s", [id_])
        worker = Worker(
            lambda: engine.record(lease, using=USING, delivered={"one": "2026-01-01T00:00:00.000Z"}),
        )
        eventually(lambda: somebody_waits_for(successor, observer))
    assert worker.result() is False
    row = OutboxEvent.objects.get(id=id_)
    assert (row.status, row.leased_by, row.fence, row.deliveries) == ("pending", "relay-2", 2, {"one": None})


@pytest.mark.postgres
def test_a_settle_waits_for_nobody_and_says_which_rows_are_locked(raw_connect: RawConnect) -> None:
    """Two sessions of the test's own keep a row each locked; one of them takes its row from the relay."""
    ids = insert(4)
    leases = claim()
    batch = [done(lease) for lease in leases]
    other, successor = raw_connect(), raw_connect()
    with other.transaction(), successor.transaction():
        lock(other, ids[0])
        successor.execute(f"UPDATE {TABLE} SET fence = fence + 1, leased_by = 'relay-2' WHERE id = %s", [ids[3]])
        answer = Worker(lambda: engine.settle(batch, schedule=SCHEDULE, using=USING)).result()
        assert answer == dict(zip(leases, (engine.LOCKED, "done", "done", engine.LOCKED), strict=True))
    again = [settled for settled in batch if answer[settled.lease] == engine.LOCKED]
    assert engine.settle(again, schedule=SCHEDULE, using=USING) == {leases[0]: "done"}
    assert OutboxEvent.objects.get(id=ids[3]).leased_by == "relay-2"


@pytest.mark.postgres
def test_a_release_waits_for_nobody(raw_connect: RawConnect) -> None:
    """A session of the test's own keeps one row locked; its lease runs out by itself."""
    ids = insert(3)
    leases = claim()
    other = raw_connect()
    with other.transaction():
        lock(other, ids[0])
        assert Worker(lambda: engine.release(leases, using=USING)).result() == 2
    assert OutboxEvent.objects.get(id=ids[0]).leased_by == "relay-1"


@pytest.mark.postgres
@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_a_batch_is_locked_in_id_order_whatever_order_it_came_in(raw_connect: RawConnect, verb: str) -> None:
    """The test locks the lowest id; a batch that waits for it must not have locked a higher one before."""
    ids = sorted(insert(6))
    OutboxEvent.objects.update(status="dead", dead_at="2020-01-01T00:00:00Z")
    verbs: dict[str, Callable[[], Any]] = {
        "retry": lambda: engine.retry(EVENTS, using=USING, ids=ids[::-1]),
        "discard": lambda: engine.discard(EVENTS, using=USING, ids=ids[::-1]),
    }
    first, observer, third = raw_connect(), raw_connect(), raw_connect()
    with first.transaction():
        lock(first, ids[0])
        worker = Worker(verbs[verb])
        eventually(lambda: somebody_waits_for(first, observer))
        with third.transaction():
            for id_ in ids[1:]:
                lock(third, id_, nowait=True)
    worker.result()


@pytest.mark.postgres
def test_a_renewal_waits_for_nobody_and_calls_a_locked_row_neither_renewed_nor_lost(raw_connect: RawConnect) -> None:
    """A session of the test's own keeps one row locked, as an operator's open transaction may for an hour."""
    ids = insert(3)
    leases = claim()
    before = {lease.id: lease.deadline for lease in leases}
    other, thief = raw_connect(), raw_connect()
    thief.execute(f"UPDATE {TABLE} SET fence = fence + 1, leased_by = 'relay-2' WHERE id = %s", [ids[2]])
    with other.transaction():
        lock(other, ids[0])
        lost = Worker(lambda: engine.renew({lease: {} for lease in leases}, using=USING)).result()
    assert [lease.id for lease in lost] == [ids[2]]
    assert [lease.deadline > before[lease.id] for lease in leases] == [False, True, False]
    assert [lease.id for lease in engine.renew({leases[0]: {}}, using=USING)] == []
    assert leases[0].deadline > before[ids[0]]


def test_settles_renewals_operators_and_the_purge_do_not_deadlock() -> None:
    """All verbs at one moment on the same rows, each in an order of its own, many times over."""
    insert(40)
    OutboxEvent.objects.update(created_at="2020-01-01T00:00:00Z")
    leases = claim()
    rounds = 12

    def shuffled() -> list[engine.Lease]:
        return random.sample(leases, len(leases))

    def settle() -> None:
        for _ in range(rounds):
            batch = [failed(lease) if random.random() < 0.5 else done(lease) for lease in shuffled()[:15]]
            engine.settle(batch, schedule=SCHEDULE, using=USING, announce=announcement)

    def renew() -> None:
        for _ in range(rounds):
            engine.renew({lease: {} for lease in shuffled()}, using=USING)

    def reclaim() -> None:
        for number in range(rounds):
            engine.release(claim(holder=f"relay-{number}"), using=USING)

    def operate() -> None:
        for _ in range(rounds):
            engine.retry(EVENTS, using=USING, ids=[lease.id for lease in shuffled()])
            engine.discard(EVENTS, using=USING, ids=[lease.id for lease in shuffled()[:5]])

    def purge() -> None:
        for status in ("done", "failed", "dead") * (rounds // 3):
            engine.purge(EVENTS, using=USING, older_than_seconds=0, status=status, batch=7)

    together(settle, renew, reclaim, operate, purge, settle)


def test_two_settles_of_one_lease_write_once() -> None:
    """Both at one moment; the announcement is the proof that only one of them wrote."""
    insert(10)
    leases = claim()
    deadly = Schedule(max_attempts=1, base=0, cap=0, replay_every=None, replay_for=None)

    def settle() -> dict[engine.Lease, str]:
        return engine.settle([failed(lease) for lease in leases], schedule=deadly, using=USING, announce=announcement)

    answers = together(settle, settle, settle)
    written = Counter(lease for answer in answers for lease, status in answer.items() if status == "dead")
    assert written == Counter(leases)
    assert OutboxEvent.objects.filter(type="outbox.event.dead").count() == 10


@pytest.mark.postgres
def test_a_purge_leaves_locked_rows_for_the_next_time(raw_connect: RawConnect) -> None:
    """A session of the test's own keeps one row locked; a purge that waited for it would never end."""
    ids = insert(3)
    engine.settle([done(lease) for lease in claim()], schedule=SCHEDULE, using=USING)
    other = raw_connect()

    def purge() -> int:
        return engine.purge(EVENTS, using=USING, older_than_seconds=0)

    with other.transaction():
        lock(other, ids[1])
        assert Worker(purge).result() == 2
    assert purge() == 1


@pytest.mark.sqlite
def test_an_idle_claim_needs_no_write_lock() -> None:
    """A connection of the test's own holds the file's one write lock; a claim that wanted it would wait 20 s."""
    insert(1)
    (lease,) = claim()
    writer = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        assert Worker(claim).result(seconds=DEADLINE_SECONDS) == []
        writer.execute("ROLLBACK")
    finally:
        writer.close()
    assert engine.release([lease], using=USING) == 1


@pytest.mark.sqlite
def test_a_claim_waits_for_a_writer_and_judges_the_rows_as_they_then_are() -> None:
    """The writer takes the row for another holder after the claim's first look, before the claim has the lock."""
    (id_,) = insert(1)
    writer = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    seen: list[str] = []
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute(
            f"UPDATE {TABLE} SET leased_by = 'x', lease_until = '2100-01-01 00:00:00.000' WHERE id = ?", [id_.hex]
        )

        def commit_then(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            seen.append(sql)
            if len(seen) == 2:
                writer.execute("COMMIT")
            return execute(sql, params, many, context)

        with connection.execute_wrapper(commit_then):
            assert claim() == []
        assert len(seen) >= 2, "the first look did not find the row due"
    finally:
        writer.close()
    row = OutboxEvent.objects.get(id=id_)
    assert (row.leased_by, row.fence, json.dumps(row.deliveries)) == ("x", 0, '{"one": null}')
