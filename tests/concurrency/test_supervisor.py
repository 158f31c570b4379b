"""
``manage.py run_outbox --processes N``: relays that die, hang, stop, and lose their supervisor.

Handlers tell a loopback server of the test which process they run in and wait there for
a word of it (``stage.py``), so each process is stopped or killed at a known place. What
the processes print is read as it comes; its end is the end of all of them, as every
relay inherits its supervisor's output. Leases are a second long where a successor must come.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command

from django_outbox.models import OutboxEvent
from django_outbox.relay import Supervisor
from tests.concurrency.helpers import Heard, StartRelay, emit, eventually
from tests.concurrency.stage import Stage
from tests.conftest import StartPython

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = 30.0
"""For what includes the start of several interpreters."""
HOLD = {"alpha": [["hold", "x"]]}


def all_done() -> bool:
    return not OutboxEvent.objects.exclude(status="done").exists()


def nothing_is_leased() -> bool:
    return not OutboxEvent.objects.exclude(leased_by="", lease_until=None).exists()


def hold_many(stage: Stage, count: int) -> None:
    """Emit more than one single-threaded relay takes ahead, each of which holds; wait until so many are at work."""
    emit(*[HOLD] * 30, names=[f"row-{number}" for number in range(30)])
    stage.wait_for("hold x", count=count, seconds=SECONDS)


@pytest.mark.postgres
def test_each_of_them_delivers_and_none_is_the_supervisor(start_relay: StartRelay, stage: Stage) -> None:
    relays = Heard(start_relay("--processes", "3", "--threads", "1"))
    hold_many(stage, 3)
    assert sorted(stage.pids["hold x"]) == sorted(relays.pids)
    assert len({*relays.pids, relays.process.pid}) == 4
    stage.release("x")
    eventually(all_done)
    assert relays.stop() == 0, relays.said
    assert "Outbox relays, 3 under a supervisor, on database 'default'" in relays.said
    assert "queue events: 1 threads" in relays.said
    assert "Relay ended: 30 done." in relays.said
    assert set(stage.counts("end").values()) == {1}


@pytest.mark.parametrize(
    ("command", "processes"),
    [(("manage.py",), "1"), pytest.param(("-m", "django"), "2", marks=pytest.mark.postgres)],
    ids=["manage", "django"],
)
def test_drain_ends_when_each_of_them_has_drained(
    start_relay: StartRelay, command: tuple[str, ...], processes: str
) -> None:
    emit({}, {}, {})
    relays = Heard(start_relay("--processes", processes, "--drain", command=command))
    assert relays.end() == 0, relays.said
    assert "Relay ended: 3 done." in relays.said
    assert len(relays.pids) == int(processes)
    assert all_done()


def test_a_killed_relay_is_started_again_and_its_row_delivered(start_relay: StartRelay, stage: Stage) -> None:
    """Not only by its siblings: it has none."""
    emit(HOLD)
    relays = Heard(start_relay("--processes", "1", events={"LEASE_SECONDS": 1}))
    stage.wait_for("hold x", seconds=SECONDS)
    (first,) = stage.pids["hold x"]
    os.kill(first, signal.SIGKILL)
    stage.wait_for("hold x", count=2, seconds=SECONDS)
    stage.release("x")
    eventually(all_done)
    assert relays.stop(signal.SIGINT) == 0, relays.said
    assert relays.pids == stage.pids["hold x"]
    assert re.search(rf"relay ended unasked process=1 pid={first} by='signal 9", relays.said)


@pytest.mark.postgres
def test_drain_starts_again_what_died_and_not_what_is_done(start_relay: StartRelay) -> None:
    emit({"beta": [["signal", "SIGKILL"]]}, {}, {})
    relays = Heard(start_relay("--processes", "2", "--drain"))
    assert relays.end() == 0, relays.said
    assert len(relays.pids) == 3, relays.said


def test_too_many_stuck_threads_cost_a_relay_its_process_and_nobody_else_anything(
    start_relay: StartRelay, stage: Stage
) -> None:
    emit(HOLD, HOLD)
    relays = Heard(
        start_relay("--processes", "1", "--threads", "1", SHUTDOWN_GRACE_SECONDS=0.2, events={"TIMEOUT_SECONDS": 0.2})
    )
    stage.wait_for("hold x", count=3, seconds=SECONDS)
    stage.release("x")
    eventually(all_done)
    assert relays.stop() == 0, relays.said
    assert re.search(r"relay ended unasked process=1 pid=\d+ by='exit code 75'", relays.said)
    assert len(set(stage.pids["hold x"])) >= 2


@pytest.mark.postgres
def test_sigterm_lets_handlers_finish_and_leaves_nothing_leased(start_relay: StartRelay, stage: Stage) -> None:
    relays = Heard(start_relay("--processes", "2", "--threads", "1"))
    hold_many(stage, 2)
    relays.process.send_signal(signal.SIGTERM)
    eventually(lambda: OutboxEvent.objects.filter(lease_until=None, attempts=0).count() == 28)
    stage.release("x")
    assert relays.end() == 0, relays.said
    assert nothing_is_leased()
    assert OutboxEvent.objects.filter(status="done", attempts=1).count() == 2
    assert set(stage.counts("end").values()) == {1}


@pytest.mark.postgres
def test_handlers_that_outlast_the_grace_time_do_not_outlast_the_stop(start_relay: StartRelay, stage: Stage) -> None:
    relays = Heard(start_relay("--processes", "2", "--threads", "1", SHUTDOWN_GRACE_SECONDS=0.2))
    hold_many(stage, 2)
    assert relays.stop() == 0, relays.said
    assert nothing_is_leased()
    assert OutboxEvent.objects.filter(status="waiting", attempts=1).count() == 2


@pytest.mark.postgres
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_relays_are_starting_ends_well(start_relay: StartRelay, number: signal.Signals) -> None:
    relays = Heard(start_relay("--processes", "4"))
    relays.wait_for("relay started process=2")
    # The terminal signals the whole group; the relays have not yet come to their own handlers.
    for pid in relays.pids:
        os.kill(pid, number)
    assert relays.stop(number) == 0, relays.said
    assert len(relays.pids) < 4
    assert "Traceback" not in relays.said


@pytest.mark.postgres
def test_relays_whose_supervisor_is_killed_finish_and_end(start_relay: StartRelay, stage: Stage) -> None:
    relays = Heard(start_relay("--processes", "2", "--threads", "1"))
    hold_many(stage, 2)
    relays.process.kill()
    eventually(lambda: OutboxEvent.objects.filter(lease_until=None, attempts=0).count() == 28)
    stage.release("x")
    assert relays.end() == -signal.SIGKILL
    assert relays.said.count("the supervisor is gone") == 2
    assert nothing_is_leased()
    assert OutboxEvent.objects.filter(status="done", attempts=1).count() == 2


def test_a_relay_still_starting_when_its_supervisor_is_killed_ends_too(start_relay: StartRelay) -> None:
    relays = Heard(start_relay("--processes", "1"))
    relays.wait_for("relay started process=1")
    relays.process.kill()
    assert relays.end() == -signal.SIGKILL


_HASTY = """
import sys
from django.core.management import execute_from_command_line
from django_outbox.relay import supervisor
supervisor.REPORT_SECONDS = supervisor.TICK_SECONDS = 0.1
supervisor.STOP_SLACK_SECONDS = 0.1
if __name__ == "__main__":
    execute_from_command_line(["manage.py", "run_outbox", *sys.argv[1:]])
"""


@pytest.fixture
def start_hasty(start_python: StartPython, stage: Stage) -> Callable[..., Heard]:
    """Return a function that starts a supervisor which reports every 100 ms and has no patience."""

    def start(*arguments: str) -> Heard:
        return Heard(
            start_python(
                "-c",
                _HASTY,
                *arguments,
                DJANGO_SETTINGS_MODULE="tests.concurrency.field_settings",
                FIELD_OUTBOX=json.dumps({"SHUTDOWN_GRACE_SECONDS": 0.1, "EVENTS": {"RETRY_BASE_SECONDS": 100}}),
                FIELD_PORT=str(stage.port),
            )
        )

    return start


def test_it_says_regularly_what_each_of_them_does(start_hasty: Callable[..., Heard], stage: Stage) -> None:
    emit(HOLD)
    relays = start_hasty("--processes", "1")
    relays.wait_for(r"relay at work process=1 seconds=0\.1 done=0 failed=0 in_flight=1\n")
    stage.release("x")
    relays.wait_for(r"relay at work process=1 seconds=0\.1 done=1 failed=0 in_flight=0\n")
    emit({"beta": [["raise", "no"]]}, names="f")
    relays.wait_for(r"relay at work process=1 seconds=0\.1 done=0 failed=1 in_flight=0\n")
    assert relays.stop() == 0, relays.said
    assert "Relay ended: 1 done, 1 waiting." in relays.said


def test_a_relay_that_does_not_answer_is_told_of_and_killed_at_the_end_of_a_stop(
    start_hasty: Callable[..., Heard],
) -> None:
    relays = start_hasty("--processes", "1")
    relays.wait_for("relay at work process=1")
    (relay,) = relays.pids
    os.kill(relay, signal.SIGSTOP)
    relays.wait_for("relay does not answer process=1")
    assert relays.stop() == 0, relays.said
    assert f"relay did not stop and is killed process=1 pid={relay}" in relays.said


def test_pauses_double_to_half_a_minute_and_are_short_again_after_a_minute_of_life() -> None:
    supervisor = Supervisor(processes=1, using="default", threads=None, mode="serve")
    (place,) = supervisor._places
    place.started = 999.0
    for pause in (0.5, 1, 2, 4, 8, 16, 30, 30, *[30] * 3_000):
        supervisor._again(place, 1_000.0)
        assert place.start_at is not None
        assert 1_000 + pause <= place.start_at <= 1_000 + pause * 1.25
    place.started = 1_000.0
    supervisor._again(place, 1_060.0)
    assert place.start_at is not None
    assert place.start_at < 1_061


def test_a_relay_that_only_dies_is_given_up_where_it_was_to_end_by_itself() -> None:
    supervisor = Supervisor(processes=1, using="default", threads=None, mode="drain")
    (place,) = supervisor._places
    for _ in range(9):
        supervisor._again(place, 0.0)
        assert not place.over
    supervisor._again(place, 0.0)
    assert place.over
    assert supervisor.run() == 1


@pytest.mark.sqlite
def test_sqlite_serves_one_relay_process() -> None:
    with pytest.raises(CommandError, match="SQLite database, which serves one relay process"):
        call_command("run_outbox", processes=2)


@pytest.mark.parametrize("processes", [0, -1, 101])
def test_a_number_of_processes_that_makes_no_sense_is_refused(processes: int) -> None:
    with pytest.raises(CommandError, match="between 1 and 100"):
        call_command("run_outbox", processes=processes)
