"""
What is slow, failing or unknown must not be in the way of what is not.

Handlers run in relays of this process and wait for the test where it matters; the one
test of a deployment that lacks a handler starts processes.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_outbox import Event, NewEvent, RetryLater, emit_event, emit_events, on_event
from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import StartRelay, emit, ended, eventually, running_relay
from tests.concurrency.stage import Stage

pytestmark = pytest.mark.django_db(transaction=True)


class Starts:
    """When handlers began, by the name in the payload."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.at: dict[str, list[float]] = defaultdict(list)

    def note(self, event: Event) -> None:
        with self._lock:
            self.at[event.payload["name"]].append(time.monotonic())


@pytest.fixture
def starts() -> Starts:
    return Starts()


def configure(settings: Any, *, events: dict[str, Any], **top: Any) -> None:
    settings.OUTBOX = {"POLL_SECONDS": 30, **top, "EVENTS": {"REPLAY_EVERY_SECONDS": None, **events}}


def place(*names: str) -> None:
    with transaction.atomic():
        emit_events([NewEvent("order.placed", {"name": name}) for name in names])


def test_a_batch_behind_a_slow_handler_is_not_delivered_twice(settings: Any, starts: Starts) -> None:
    """Scenario 1, times halved: a lease of 1 s, the first handler of five takes 1.5 s, two relays."""
    configure(settings, events={"LEASE_SECONDS": 1})

    @on_event("order.placed", name="slow")
    def slow(event: Event) -> None:
        starts.note(event)
        if event.payload["name"] == "first":
            threading.Event().wait(1.5)

    place("first", "b", "c", "d", "e")
    with running_relay(threads=1) as one, running_relay(threads=1) as two:
        eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 5)
        one.wait_until_idle()
        two.wait_until_idle()
        assert one.relay.counts["lost"] + two.relay.counts["lost"] == 0
    assert {name: len(times) for name, times in starts.at.items()} == dict.fromkeys(("first", "b", "c", "d", "e"), 1)


def test_a_long_handler_keeps_no_lock_and_nobody_waiting(settings: Any, starts: Starts) -> None:
    """Scenario 17: two relays, one handler at work for as long as the test wants, then twenty fast events."""
    configure(settings, events={})
    inside, go = threading.Event(), threading.Event()

    @on_event("report.asked", name="long")
    def long(event: Event) -> None:
        inside.set()
        assert go.wait(30)

    on_event("order.placed", name="fast")(starts.note)
    with running_relay(threads=2) as one, running_relay(threads=2) as two:
        with transaction.atomic():
            emit_event("report.asked")
        try:
            assert inside.wait(10)
            began = time.monotonic()
            for number in range(20):
                place(str(number))
            emitted = time.monotonic() - began
            eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 20)
            assert time.monotonic() - began < 2
            # An emit takes some milliseconds; one that waited for a lock would have waited for the handler.
            assert emitted < 1
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(
                        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype IN"
                        " ('transactionid', 'tuple') AND datname = current_database() AND pid <> pg_backend_pid()"
                        " AND state = 'idle in transaction'"
                    )
                    assert cursor.fetchone() == (0,)
        finally:
            go.set()
        eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 21)
        one.wait_until_idle()
        two.wait_until_idle()


def test_what_a_busy_relay_claimed_ahead_does_not_wait_while_another_is_idle(settings: Any, starts: Starts) -> None:
    """Two relays with one thread each; both claim ahead, one of them is busy for as long as the test wants."""
    configure(settings, events={})
    inside, go = threading.Event(), threading.Event()

    @on_event("report.asked", name="long")
    def long(event: Event) -> None:
        inside.set()
        assert go.wait(30)

    on_event("order.placed", name="fast")(starts.note)
    with running_relay(threads=1), running_relay(threads=1):
        with transaction.atomic():
            emit_event("report.asked")
        try:
            assert inside.wait(10)
            for number in range(20):
                place(str(number))
            eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 20, seconds=5)
        finally:
            go.set()


def test_rows_that_keep_failing_and_new_ones_do_not_starve_each_other(settings: Any, starts: Starts) -> None:
    """Scenario 64, shortened: 300 rows that fail for ever, and 20 new events a second, for 4 s."""
    configure(settings, events={"RETRY_BASE_SECONDS": 0.5, "RETRY_CAP_SECONDS": 1, "MAX_ATTEMPTS": 50})
    emitted: dict[str, float] = {}

    @on_event("order.placed", name="handler")
    def handler(event: Event) -> None:
        starts.note(event)
        if event.payload["name"].startswith("bad"):
            # A failure that asks for a retry is logged without a traceback: six hundred of them are not the point.
            raise RetryLater("not today")

    bad = [f"bad {number}" for number in range(300)]
    with running_relay(threads=4) as running:
        place(*bad)
        pace = threading.Event()
        for number in range(80):
            name = f"new {number}"
            emitted[name] = time.monotonic()
            place(name)
            pace.wait(0.05)
        eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 80)
        running.relay.stop()
    waits = sorted(starts.at[name][0] - emitted[name] for name in emitted)
    assert waits[int(len(waits) * 0.95)] < 2, waits
    # A second, with a quarter of it for jitter, is the longest that a retry waits for its time.
    late = sorted(
        after - before - 1.25
        for name in bad
        for before, after in zip(starts.at[name], starts.at[name][1:], strict=False)
    )
    assert len(late) > 600
    assert late[int(len(late) * 0.95)] < 1, late[-10:]
    assert min(len(starts.at[name]) for name in bad) >= 3


def test_a_delivery_whose_handler_is_not_deployed_waits_is_named_and_runs_when_it_is_back(
    start_relay: StartRelay, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scenario 4."""
    (id_,) = emit({})
    code, said = ended(start_relay("--drain", environment={"FIELD_WITHOUT": "beta"}))
    assert code == 0, said
    row = OutboxEvent.objects.get(id=id_)
    assert (row.status, row.attempts, row.deliveries["beta"]) == ("waiting", 0, None)
    assert "beta" in row.last_error
    assert "no handler of this name here, its events wait handler=beta" in said
    call_command("outbox_status", "--json")
    assert "beta" in capsys.readouterr().out
    call_command("outbox_retry", str(id_), verbosity=0)
    code, said = ended(start_relay("--drain"))
    assert code == 0, said
    assert OutboxEvent.objects.get(id=id_).status == "done"
    assert stage.counts() == {"alpha a": 1, "beta a": 1, "gamma a": 1}
