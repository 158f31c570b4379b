"""A chaos run: emitters that work, relays that are hit by a seeded stream of incidents, and a drain at the end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connection, connections, transaction

from django_outbox import NewEvent, emit_events
from django_outbox.models import OutboxEvent
from tests.chaos.models import Order
from tests.chaos.outbox_handlers import TYPE
from tests.chaos.relays import Place
from tests.chaos.settings import LEASE_SECONDS
from tests.server import Server

GAP_SECONDS: Final = 1.0
"""The mean time between two incidents."""
READY_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 90.0
STOP_SECONDS: Final = 25.0
TROUBLE: Final = (DatabaseError, InterfaceError)

# Shuffled, dealt, and shuffled again when it is used up, so that even a short run has some of everything.
DECK: Final = {
    "postgresql": (
        *("kill",) * 4,
        *("pause",) * 2,
        *("terminate",) * 3,
        *("restart fast", "restart immediate", "kill supervisor"),
    ),
    "sqlite": ("kill",),
}


class _RolledBack(Exception):
    """What the business changed its mind with."""


@dataclass
class Incident:
    """Something that was done to the relays, and the rows that those it hit had in hand."""

    kind: str
    began: float
    ended: float
    in_hand: set[UUID] = field(default_factory=set)

    @property
    def of_the_database(self) -> bool:
        """Whether it cut sessions: what was under way then is told by the time."""
        return self.kind.startswith(("terminate", "restart"))


class Emitter(threading.Thread):
    """A part of the business: orders and their events in one transaction each, some of them rolled back."""

    def __init__(self, name: str, seed: str, away: Callable[[float], bool]) -> None:
        super().__init__(name=name, daemon=True)
        self.committed: list[str] = []
        self.rolled_back: list[str] = []
        self.unknown: list[str] = []
        """Of those whose commit failed: the database was away, and may have committed or not."""
        self.problems: list[str] = []
        self.over = threading.Event()
        self._chance = random.Random(seed)
        self._away = away

    def run(self) -> None:
        """Emit about twenty events a second until told to stop."""
        written = 0
        while not self.over.wait(self._chance.expovariate(4)):
            numbers = [f"{self.name}-{written + place}" for place in range(self._chance.choice((1, 1, 1, 2, 5, 20)))]
            written += len(numbers)
            began = time.time()
            try:
                self._write(numbers)
            except _RolledBack:
                self.rolled_back += numbers
            except TROUBLE as error:
                self.unknown += numbers
                connection.close()
                if not self._away(began):
                    self.problems.append(f"a business transaction failed while the database was there: {error!r}")
            else:
                self.committed += numbers
        connections.close_all()

    def _write(self, numbers: list[str]) -> None:
        with transaction.atomic():
            Order.objects.bulk_create([Order(number=number) for number in numbers])
            emit_events(
                NewEvent(
                    TYPE,
                    {
                        "number": number,
                        "seconds": self._chance.uniform(0, 0.02),
                        "fails": self._chance.random() < 0.1,
                    },
                    aggregate_type="order",
                    aggregate_id=number,
                )
                for number in numbers
            )
            if self._chance.random() < 0.15:
                raise _RolledBack


class Run:
    """Everything of one run; `play` makes it, the judge reads it."""

    def __init__(self, *, seed: int, seconds: float, server: Server | None, directory: Path) -> None:
        self.seed = seed
        self.seconds = seconds
        self.incidents: list[Incident] = []
        self.replayed = 0
        """Events that were dead at the end because processes died under them three times, and were retried."""
        self.problems: list[str] = []
        self._chance = random.Random(f"incidents {seed}")
        self._server = server
        self._vendor = connection.vendor
        self._deck: list[str] = []
        self._resume: list[tuple[float, int]] = []
        """Paused processes, and when they go on."""
        arguments: dict[str, tuple[str, ...]] = {"first": ("--threads", "4")}
        if server is not None:
            arguments |= {"second": ("--threads", "2"), "supervised": ("--processes", "2", "--threads", "2")}
        self.places = [Place(name, *options, directory=directory) for name, options in arguments.items()]
        self.emitters = [Emitter(f"e{number}", f"emitter {number} {seed}", self._away) for number in (1, 2)]

    def play(self, tell: Callable[[str], None]) -> None:
        """Emit and hit for the time that was asked for, then let everything come to rest."""
        try:
            tell("relays start")
            self._tend_until(self._at_work, READY_SECONDS, "the relays did not begin to deliver")
            for emitter in self.emitters[1:]:
                emitter.start()
            until = time.monotonic() + self.seconds
            while (left := until - time.monotonic()) > 0:
                self._tend(min(left, self._chance.expovariate(1 / GAP_SECONDS)))
                kind = self._deal()
                tell(f"{until - time.monotonic():4.0f} s left: {kind}")
                self._hit(kind)
            tell("chaos is over, the relays drain")
            for emitter in self.emitters:
                emitter.over.set()
                emitter.join(30)
            self._tend_until(self._at_rest, DRAIN_SECONDS, "the relays did not come to rest")
            self._replay()
            tell("relays stop")
            for place in self.places:
                place.stop()
            for place in self.places:
                place.end(within=STOP_SECONDS)
        finally:
            for place in self.places:
                place.kill()

    # --- tending

    def _tend(self, seconds: float) -> None:
        """Keep relays running for so long, and let paused ones go on when it is time."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for when, pid in list(self._resume):
                if now >= when:
                    self._resume.remove((when, pid))
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            for place in self.places:
                place.tend()
            if now >= until:
                return
            time.sleep(min(0.05, until - now))

    def _tend_until(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        until = time.monotonic() + seconds
        while True:
            self._tend(0.1)
            if not self._resume and condition():
                return
            if time.monotonic() >= until:
                self.problems.append(f"{problem} within {seconds:g} s")
                return

    def _at_work(self) -> bool:
        """Whether every relay holds or has settled something; the first emitter gives them what to do."""
        if not self.emitters[0].is_alive():
            self.emitters[0].start()
        if not OutboxEvent.objects.filter(status="done").exists():
            return False
        return all(len(place.relays) == (2 if place.supervises else 1) for place in self.places)

    def _at_rest(self) -> bool:
        try:
            return not OutboxEvent.objects.filter(status__in=("pending", "waiting")).exists()
        except TROUBLE:
            connection.close()
            return False

    def _replay(self) -> None:
        """Do as an operator would with rows whose processes died three times: give them a new life."""
        from django.core.management import call_command

        victims = OutboxEvent.objects.filter(status="dead", type=TYPE, last_error__contains="worker lost")
        ids = [str(id_) for id_ in victims.values_list("id", flat=True)]
        if ids:
            self.replayed = len(ids)
            call_command("outbox_retry", *ids, verbosity=0)
            self._tend_until(self._at_rest, DRAIN_SECONDS, "what was retried did not come to rest")

    # --- incidents

    def _deal(self) -> str:
        if not self._deck:
            self._deck = list(DECK[self._vendor])
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    def _hit(self, kind: str) -> None:
        match kind.split():
            case ["kill"]:
                self._kill()
            case ["kill", "supervisor"]:
                self._kill_supervisor()
            case ["pause"]:
                self._pause()
            case ["terminate"]:
                self._terminate()
            case ["restart", how]:
                self._restart(how)

    def _victim(self) -> tuple[Place, int] | None:
        paused = {pid for _, pid in self._resume}
        relays = [(place, pid) for place in self.places for pid in place.relays if pid not in paused]
        return self._chance.choice(relays) if relays else None

    def _kill(self) -> None:
        """SIGKILL; stopped before, so that what it has in hand is known."""
        if (victim := self._victim()) is None:
            return
        place, pid = victim
        incident = self._begin("kill")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            incident.in_hand = self._in_hand(pid)
            place.hit.add(pid)
            os.kill(pid, signal.SIGKILL)
        incident.ended = time.time()

    def _kill_supervisor(self) -> None:
        """SIGKILL; its relays must finish what they hold and end by themselves, so nothing may be doubled."""
        for place in self.places:
            if place.supervises and (pid := place.pid) is not None:
                incident = self._begin("kill supervisor")
                place.hit.add(pid)
                os.kill(pid, signal.SIGKILL)
                incident.ended = time.time()

    def _pause(self) -> None:
        """SIGSTOP for longer than a lease, and SIGCONT while others go on and more happens."""
        if (victim := self._victim()) is None:
            return
        incident = self._begin("pause")
        with suppress(ProcessLookupError):
            os.kill(victim[1], signal.SIGSTOP)
            incident.in_hand = self._in_hand(victim[1])
        seconds = LEASE_SECONDS * self._chance.uniform(1.2, 2.0)
        self._resume.append((time.monotonic() + seconds, victim[1]))
        incident.ended = time.time() + seconds

    def _terminate(self) -> None:
        """End some sessions of the relays, listening ones too."""
        incident = self._begin("terminate")
        share = self._chance.choice((0.2, 0.5, 1.0))
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND backend_type = 'client backend' AND application_name <> 'chaos' ORDER BY pid"
            )
            sessions = [pid for (pid,) in cursor.fetchall()]
            sessions = self._chance.sample(sessions, round(len(sessions) * share))
            before = self._in_hand()
            cursor.execute(
                "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM unnest(%s::int[]) AS pid", [sessions]
            )
            incident.in_hand = before | self._in_hand()
        incident.ended = time.time()

    def _restart(self, how: str) -> None:
        """Stop the server for a moment."""
        if self._server is None:
            return
        incident = self._begin(f"restart {how}")
        before = self._in_hand()
        connection.close()
        self._server.stop("immediate" if how == "immediate" else "fast")
        self._tend(self._chance.uniform(0.1, 2.0))
        self._server.start()
        incident.ended = time.time()
        incident.in_hand = before | self._in_hand()

    def _begin(self, kind: str) -> Incident:
        now = time.time()
        # Until it says when it ended it is not over.
        incident = Incident(kind, now, now + 3600)
        self.incidents.append(incident)
        return incident

    def _away(self, began: float) -> bool:
        """Whether the server was away at some time since then."""
        return any(each.kind.startswith("restart") and each.ended + 1 >= began for each in self.incidents)

    def _in_hand(self, pid: int | None = None) -> set[UUID]:
        """Return the events that a process, or anybody, has leased; holders are named host:pid:nonce."""
        rows = OutboxEvent.objects.exclude(leased_by="").values_list("id", "leased_by")
        return {id_ for id_, holder in rows if pid is None or holder.split(":")[-2:-1] == [str(pid)]}

    def counts(self) -> Counter[str]:
        """Return how often each kind of incident came about."""
        return Counter(incident.kind for incident in self.incidents)

    def facts(self) -> dict[str, Any]:
        """Return what was done, for the report."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "incidents": dict(sorted(self.counts().items())),
            "relay_starts": sum(place.starts for place in self.places),
            "in_hand_when_killed_or_paused": sum(
                len(incident.in_hand) for incident in self.incidents if not incident.of_the_database
            ),
        }
