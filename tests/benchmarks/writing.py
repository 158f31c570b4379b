"""Workloads of the writing side: one event per transaction, and many in one."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from django_outbox import NewEvent, emit_event, emit_events
from tests.benchmarks.harness import TABLE, Bench, Line, checkpoint, compared, progress, raw_connect
from tests.benchmarks.reference import NarrowTable

EMITS_IN_A_RUN = 20

PAYLOAD = {"order_id": 4711, "customer": "Ada", "total": "12.50"}

INSERT = f"""
    INSERT INTO {TABLE} (id, type, payload, deliveries, headers, failures, occurred_at, created_at,
        aggregate_type, aggregate_id, organization_id, request_id)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"""


def _business_row(cursor: CursorWrapper) -> None:
    cursor.execute("INSERT INTO bench_purchase (customer, total) VALUES (%s, %s)", ["Ada", "12.50"])


def _only_business() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        _business_row(cursor)


def _by_hand() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        _business_row(cursor)
        now = timezone.now()
        payload, owed = json.dumps(PAYLOAD), json.dumps({"first": None})
        row: list[Any] = [uuid.uuid4(), "bench.one", payload, owed, "{}", "{}", now, now, "order", "4711", "", ""]
        cursor.execute(INSERT, row)


def _by_hand_with_notify() -> None:
    _by_hand()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify('bench', '')")


def _ours() -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            _business_row(cursor)
        emit_event("bench.one", PAYLOAD, aggregate_type="order", aggregate_id="4711")


def emit(bench: Bench) -> Iterator[Line]:
    """
    Time a transaction without an event, with one written by hand, and with one emitted.

    The kinds take turns, in runs of 20 transactions, so that the disk's moods fall on all
    alike. A figure is the mean of a run, the share of its notifications included (what is
    committed within 10 ms shares one); what an event adds is the difference of the medians
    of these means.
    """
    kinds: dict[str, Callable[[], None]] = {
        "none": _only_business,
        "hand": _by_hand,
        "notify": _by_hand_with_notify,
        "ours": _ours,
    }
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLE}")
        cursor.execute("DROP TABLE IF EXISTS bench_purchase")
        cursor.execute("CREATE TABLE bench_purchase (id bigserial PRIMARY KEY, customer text, total numeric)")
    checkpoint()
    added: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in bench.each_round("emit"):
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(bench.size(1_000, least=100) // EMITS_IN_A_RUN):
            for kind, transact in kinds.items():
                began = time.perf_counter()
                for _ in range(EMITS_IN_A_RUN):
                    transact()
                taken[kind].append((time.perf_counter() - began) / EMITS_IN_A_RUN)
        for kind, times in taken.items():
            added[kind].append((median(times) - median(taken["none"])) * 1e6)
    yield compared("emit: time an event adds; reference INSERT", added["ours"], added["hand"], unit="us", at_most=1.5)
    yield compared("emit: the same; reference INSERT and NOTIFY", added["ours"], added["notify"], unit="us")


def bulk(bench: Bench) -> Iterator[Line]:
    """Time 1,000 events in one transaction, ours and in the narrow table by turns."""
    size = 1_000
    batch = [NewEvent("bench.one", {**PAYLOAD, "number": number}) for number in range(size)]
    payloads = [event.payload for event in batch]
    ours: list[float] = []
    reference: list[float] = []
    with raw_connect() as session, NarrowTable(session) as narrow:
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {TABLE}")
        checkpoint()
        for _ in bench.each_round("bulk"):
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(bench.size(20, least=3)):
                began = time.perf_counter()
                with transaction.atomic():
                    emit_events(batch)
                mine.append(time.perf_counter() - began)
                began = time.perf_counter()
                narrow.insert(payloads)
                theirs.append(time.perf_counter() - began)
            ours.append(size / median(mine))
            reference.append(size / median(theirs))
    progress("")
    yield compared("bulk: 1,000 events in one transaction", ours, reference, unit="events/s", at_least=0.25)
