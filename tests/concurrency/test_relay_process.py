"""
``manage.py run_outbox`` as a process: signals, wake-ups from outside, deaths.

Its handlers tell a loopback server of the test what they do and wait there for a word
of it (``stage.py``), so the test kills, stops or overtakes a process at a known place.
Leases are a second long where a successor must come; nothing else runs by the clock.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from django.db import transaction

from django_outbox import NewEvent, emit_events, on_event
from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.events import EVENTS
from django_outbox.models import OutboxEvent
from django_outbox.testing import isolated_handlers
from tests.concurrency.field import acts
from tests.concurrency.helpers import StartRelay, emit, ended, eventually
from tests.concurrency.stage import Stage
from tests.conftest import StartPython

pytestmark = pytest.mark.django_db(transaction=True)


def stored(id_: UUID) -> OutboxEvent:
    return OutboxEvent.objects.get(id=id_)


def lease_is_over(id_: UUID) -> None:
    """Wait until a dead holder's lease has run out."""

    def over() -> bool:
        return not engine.retry(EVENTS, using="default", ids=[id_], status=["pending"]).leased and bool(
            engine.backlog(EVENTS, using="default").due
        )

    eventually(over)


def test_it_says_what_it_serves_delivers_what_is_there_and_ends_well_at_sigterm(
    start_relay: StartRelay, stage: Stage
) -> None:
    emit({}, {})
    relay = start_relay("--threads", "2")
    for actor in ("alpha a", "beta a", "gamma b"):
        stage.wait_for(f"end {actor}")
    eventually(lambda: OutboxEvent.objects.filter(status="done").count() == 2)
    relay.send_signal(signal.SIGTERM)
    code, said = ended(relay)
    assert code == 0, said
    assert "queue events: 2 threads" in said
    assert "field.acted -> alpha" in said
    assert "2 done" in said


def test_an_emit_of_another_process_wakes_it_within_a_second(start_relay: StartRelay, stage: Stage) -> None:
    """The poll is 30 s: what wakes it is NOTIFY on PostgreSQL, the file's version on SQLite."""
    emit({})
    relay = start_relay()
    stage.wait_for("end gamma a")
    for name in "bcd":
        began = time.monotonic()
        emit({}, names=name)
        stage.wait_for(f"end gamma {name}", seconds=5)
        assert time.monotonic() - began < 1
    # Of transactions that follow each other within milliseconds not every one notifies.
    names = [f"quick {number}" for number in range(20)]
    for name in names:
        emit({}, names=[name])
    for name in names:
        stage.wait_for(f"end gamma {name}", seconds=5)
    relay.send_signal(signal.SIGINT)
    assert ended(relay)[0] == 0


def test_sigterm_lets_handlers_finish_and_hands_back_the_rest(start_relay: StartRelay, stage: Stage) -> None:
    """Scenario 3: two handlers at work at SIGTERM; the successor gets the rest at once, and is not full of them."""
    ids = emit({"alpha": [["hold", "x"]]}, {"alpha": [["hold", "x"]]}, {}, {}, {})
    relay = start_relay("--threads", "2")
    stage.wait_for("hold x", count=2)
    relay.send_signal(signal.SIGTERM)
    eventually(lambda: OutboxEvent.objects.filter(lease_until=None, attempts=0).count() == 3)
    successor = start_relay("--threads", "2")
    for name in "cde":
        stage.wait_for(f"end gamma {name}")
    stage.release("x")
    assert ended(relay)[0] == 0
    successor.send_signal(signal.SIGTERM)
    assert ended(successor)[0] == 0
    assert [(stored(id_).status, stored(id_).attempts) for id_ in ids] == [("done", 1)] * 5
    assert set(stage.counts().values()) == {1}


def test_sigterm_beyond_the_grace_time_counts_a_failed_attempt_and_exits_well(
    start_relay: StartRelay, stage: Stage
) -> None:
    (id_,) = emit({"beta": [["hold", "x"]]})
    relay = start_relay(SHUTDOWN_GRACE_SECONDS=0.3)
    stage.wait_for("hold x")
    relay.send_signal(signal.SIGTERM)
    code, said = ended(relay)
    assert code == 0, said
    row = stored(id_)
    assert (row.status, row.attempts, row.lease_until) == ("waiting", 1, None)
    assert "interrupted" in row.failures["beta"]["error"]
    assert row.deliveries["alpha"] is not None
    stage.release("x")
    assert ended(start_relay("--drain"))[0] == 0
    assert stage.counts() == {"alpha a": 1, "beta a": 2, "gamma a": 1}
    assert stored(id_).status == "done"


def test_a_killed_relay_is_succeeded_when_its_lease_is_over(start_relay: StartRelay, stage: Stage) -> None:
    """Scenario 2: SIGKILL in mid-handler; one repeat, nothing stays claimed, no list of workers asked."""
    (id_,) = emit({"beta": [["hold", "x"]]})
    relay = start_relay(events={"LEASE_SECONDS": 1})
    stage.wait_for("hold x")
    relay.kill()
    ended(relay)
    stage.release("x")
    successor = start_relay(events={"LEASE_SECONDS": 1})
    stage.wait_for("end gamma a")
    eventually(lambda: stored(id_).status == "done")
    successor.send_signal(signal.SIGTERM)
    assert ended(successor)[0] == 0
    row = stored(id_)
    assert (row.attempts, row.failures, row.lost_leases, row.leased_by) == (2, {}, 0, "")
    assert stage.counts("start")["beta a"] == 2


def test_a_row_that_kills_its_process_dies_alone_after_three_starts(start_relay: StartRelay, stage: Stage) -> None:
    """Scenario 12: the third start is in a child process, whose death the relay outlives and reports."""
    bad, *good = emit({"beta": [["signal", "SIGKILL"]]}, {}, {}, {}, {}, {})
    for _ in range(2):
        relay = start_relay("--threads", "1", "--drain", events={"LEASE_SECONDS": 1})
        code, said = ended(relay)
        assert code != 0, said
        assert stored(bad).status == "pending"
        lease_is_over(bad)
    relay = start_relay("--threads", "1", "--drain", events={"LEASE_SECONDS": 1})
    code, said = ended(relay, seconds=30)
    assert code == 0, said
    row = stored(bad)
    assert (row.status, row.due_at, row.attempts, row.lost_leases, row.leased_by) == ("dead", None, 3, 0, "")
    assert "worker lost" in row.last_error
    assert row.failures["beta"]["lost"] is True
    assert row.deliveries["alpha"] is not None
    assert row.deliveries["gamma"] is not None
    starts = stage.counts("start")
    assert starts["beta a"] == 3
    assert starts["gamma a"] == 1
    assert stage.counts("end")["beta a"] == 0
    assert stage.pids["start beta a"][2] != relay.pid
    # Its neighbours in the same claims: delivered once, and blamed for nothing.
    for id_, name in zip(good, "bcdef", strict=True):
        assert (stored(id_).status, stored(id_).failures) == ("done", {})
        assert [starts[f"{handler} {name}"] for handler in acts.NAMES] == [1, 1, 1]
    (spoken,) = OutboxEvent.objects.filter(type="outbox.event.dead")
    assert spoken.payload["id"] == str(bad)


def test_a_suspect_in_the_child_process_that_behaves_is_delivered(start_relay: StartRelay, stage: Stage) -> None:
    """Two deaths of its processes that were not its fault; the third start succeeds, and its siblings run too."""
    (id_,) = emit({"beta": [["fail-before", 2]]})
    OutboxEvent.objects.update(
        lost_leases=1,
        failures={"beta": {"error": "", "at": "2026-01-01T00:00:00.000Z", "marks": 1}},
        leased_by="gone",
        lease_until="2020-01-01T00:00:00Z",
    )
    code, said = ended(start_relay("--drain"), seconds=30)
    assert code == 0, said
    row = stored(id_)
    assert (row.status, row.failures.get("beta", {}).get("marks")) == ("done", None)
    assert stage.counts("end") == {"alpha a": 1, "beta a": 1, "gamma a": 1}
    assert stage.counts("start") == {"alpha a": 1, "beta a": 2, "gamma a": 1}


def test_a_stop_while_a_child_process_works_leaves_no_orphan(start_relay: StartRelay, stage: Stage) -> None:
    (id_,) = emit({"alpha": [["hold", "x"]]})
    OutboxEvent.objects.update(lost_leases=1, leased_by="gone", lease_until="2020-01-01T00:00:00Z")
    relay = start_relay(SHUTDOWN_GRACE_SECONDS=0.3)
    stage.wait_for("hold x", seconds=20)
    (child,) = stage.pids["start alpha a"]
    assert child != relay.pid
    # As a service manager does that signals the whole group; it is no death of the handler's making.
    os.kill(child, signal.SIGTERM)
    relay.send_signal(signal.SIGTERM)
    code, said = ended(relay)
    assert code == 0, said
    row = stored(id_)
    assert (row.status, row.lost_leases) == ("waiting", 0)
    assert "interrupted" in row.last_error
    assert "lost" not in row.failures["alpha"]
    eventually(lambda: _is_gone(child))


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_relay_that_slept_through_its_lease_does_not_disturb_its_successor(
    start_relay: StartRelay, stage: Stage
) -> None:
    """SIGSTOP in mid-handler; the successor delivers; the first wakes up and must start nothing and write nothing."""
    (id_,) = emit({"alpha": [["hold", "x"]]})
    first = start_relay("--threads", "1", events={"LEASE_SECONDS": 1})
    stage.wait_for("hold x")
    first.send_signal(signal.SIGSTOP)
    try:
        second = start_relay("--threads", "1", events={"LEASE_SECONDS": 1})
        stage.wait_for("hold x", count=2)
        stage.release("x")
        eventually(lambda: stored(id_).status == "done")
        before = OutboxEvent.objects.filter(id=id_).values().get()
    finally:
        first.send_signal(signal.SIGCONT)
    stage.wait_for("end alpha a", count=2)
    for relay in (first, second):
        relay.send_signal(signal.SIGTERM)
        assert ended(relay)[0] == 0
    assert OutboxEvent.objects.filter(id=id_).values().get() == before
    assert stage.counts() == {"alpha a": 2, "beta a": 1, "gamma a": 1}


_WRONG_CLOCK = """
import datetime, sys, time
offset = float(sys.argv.pop(1))
real, real_ns, real_datetime = time.time, time.time_ns, datetime.datetime
time.time = lambda: real() + offset
time.time_ns = lambda: real_ns() + int(offset * 1e9)

class Wrong(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds=offset)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.UTC).replace(tzinfo=None)

datetime.datetime = Wrong
from django.core.management import execute_from_command_line
datetime.datetime = real_datetime
execute_from_command_line(["manage.py", "run_outbox", *sys.argv[1:]])
"""


@pytest.mark.parametrize("offset", [600, -600])
def test_a_relay_whose_clock_is_wrong_takes_nothing_of_anothers(
    start_python: StartPython, stage: Stage, offset: int
) -> None:
    """Scenario 25: a process with its clock ten minutes off, beside a holder of 60 s leases."""
    held = emit({}, names="h")
    (lease,) = engine.Claimer(EVENTS, holder="relay-a", using="default").claim(10, lease_seconds=60)
    later = emit({}, names="l", delay=300)
    failing = emit({"beta": [["raise", "no"]]}, names="f")
    process = start_python(
        "-c",
        _WRONG_CLOCK,
        str(offset),
        "--drain",
        DJANGO_SETTINGS_MODULE="tests.concurrency.field_settings",
        FIELD_OUTBOX=json.dumps({"EVENTS": {"RETRY_BASE_SECONDS": 100, "RETRY_CAP_SECONDS": 100}}),
        FIELD_PORT=str(stage.port),
    )
    code, said = ended(process)
    assert code == 0, said
    assert stage.counts() == {"alpha f": 1, "beta f": 1, "gamma f": 1}
    assert (stored(held[0]).leased_by, stored(held[0]).fence) == ("relay-a", 1)
    assert (stored(later[0]).status, stored(later[0]).attempts) == ("waiting", 0)
    row = stored(failing[0])
    created, due = row.created_at, row.due_at
    assert due is not None
    assert 99 < (due - created).total_seconds() < 125 + 10
    assert engine.settle(
        [engine.Settled(lease, engine.Done())], schedule=get_settings().events.schedule, using="default"
    ) == {lease: "done"}


def test_once_and_drain_end_by_themselves(start_relay: StartRelay, stage: Stage) -> None:
    emit({}, {"beta": [["fail-before", 3]]})
    code, said = ended(start_relay("--once"))
    assert code == 0, said
    assert Counter(OutboxEvent.objects.values_list("status", flat=True)) == {"done": 1, "waiting": 1}
    code, said = ended(start_relay("--drain"))
    assert code == 0, said
    assert Counter(OutboxEvent.objects.values_list("status", flat=True)) == {"done": 2}
    assert stage.counts()["beta b"] == 3


def test_too_many_stuck_handlers_end_the_process_with_75(start_relay: StartRelay, stage: Stage) -> None:
    emit({"alpha": [["hold", "x"]]}, {"alpha": [["hold", "x"]]})
    relay = start_relay("--threads", "1", SHUTDOWN_GRACE_SECONDS=0.2, events={"TIMEOUT_SECONDS": 0.2})
    code, said = ended(relay)
    assert code == 75, said
    assert set(OutboxEvent.objects.values_list("status", "lease_until")) == {("waiting", None)}


@pytest.mark.sqlite
def test_with_reload_it_starts_anew_when_code_changes_and_finishes_what_it_does_first(
    start_relay: StartRelay, stage: Stage, tmp_path: Path
) -> None:
    """A module that the process imports is touched while a handler is held; no lease has to run out."""
    code = tmp_path / "sitecustomize.py"
    code.write_text("")
    relay = start_relay("--reload", environment={"PYTHONPATH": str(tmp_path)})
    ids = emit({"alpha": [["hold", "x"]]})
    stage.wait_for("hold x")
    probes = [f"probe {number}" for number in range(1_000)]

    def starts_nothing_more() -> bool:
        # Whether the reloader knew the file already when it was touched, only the outcome tells.
        os.utime(code, (moment := time.time() + 10 * len(ids), moment))
        ids.extend(emit({}, names=[probes[len(ids)]]))
        try:
            stage.wait_for(f"end gamma {probes[len(ids) - 1]}", seconds=1.5)
        except AssertionError:
            return True
        return False

    eventually(starts_nothing_more, seconds=20)
    name = probes[len(ids) - 1]
    stage.release("x")
    stage.wait_for(f"end gamma {name}", seconds=20)
    eventually(lambda: OutboxEvent.objects.filter(status="done").count() == len(ids))
    # Its parent dies, and takes it along: the end of its output is the end of both.
    relay.kill()
    ended(relay)
    assert [(stored(id_).status, stored(id_).attempts) for id_ in ids] == [("done", 1)] * len(ids)
    assert stage.pids["end gamma a"] != stage.pids[f"end gamma {name}"]


@pytest.mark.postgres
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, to read a process's memory")
def test_memory_stays_where_it_is_over_many_events_with_debug_on(start_relay: StartRelay) -> None:
    """Scenario 28, at half its size: Django's query log, which DEBUG turns on, lives in threads nobody else clears."""

    def emitted(count: int) -> None:
        for first in range(0, count, 1_000):
            with transaction.atomic():
                emit_events(NewEvent(acts.COUNTED, "x" * 200) for _ in range(first, min(first + 1_000, count)))

    def delivered(count: int) -> int:
        eventually(lambda: OutboxEvent.objects.filter(status="done").count() == count, seconds=60)
        pages = int(Path(f"/proc/{relay.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20

    with isolated_handlers():
        on_event(acts.COUNTED, name="counter")(acts.count)
        emitted(2_000)
        relay = start_relay("--threads", "4", environment={"FIELD_DEBUG": "1"})
        before = delivered(2_000)
        emitted(8_000)
        after = delivered(10_000)
    relay.send_signal(signal.SIGTERM)
    assert ended(relay)[0] == 0
    assert after - before < 10, (before, after)
