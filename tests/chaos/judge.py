"""The verdict on a chaos run, from the ledger alone: what is lost, what is doubled, and whether that is explained."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django_outbox.models import OutboxEvent
from tests.chaos.models import Effect, Order
from tests.chaos.outbox_handlers import HANDLERS, TYPE
from tests.chaos.run import Incident, Run

CUT_SECONDS: Final = 0.5
"""An effect so close to a cut of sessions may be one whose commit nobody confirmed."""


@dataclass
class Verdict:
    """What was found: lines for people, numbers for scripts; without problems all is well."""

    facts: dict[str, Any]
    checks: list[tuple[str, list[str]]] = field(default_factory=list)
    """What was looked at, with what is wrong there."""

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong."""
        return [problem for _, found in self.checks for problem in found]


def judge(run: Run) -> Verdict:
    """Compare business rows, events and effects, and say what does not add up."""
    orders = set(Order.objects.values_list("number", flat=True))
    events: dict[str, list[OutboxEvent]] = defaultdict(list)
    for event in OutboxEvent.objects.filter(type=TYPE):
        events[event.aggregate_id].append(event)
    effects: dict[tuple[UUID, str], list[Effect]] = defaultdict(list)
    for effect in Effect.objects.order_by("at"):
        effects[effect.event, effect.handler].append(effect)
    committed = {number for emitter in run.emitters for number in emitter.committed}
    rolled_back = {number for emitter in run.emitters for number in emitter.rolled_back}
    lost_leases: Counter[str] = Counter()
    for place in run.places:
        lost_leases.update(place.read_log())
    doubled, unexplained = _duplicates(effects, run.incidents, lost_leases)

    verdict = Verdict(run.facts())
    verdict.facts |= {
        "orders": len(orders),
        "rolled_back": len(rolled_back),
        "commits_of_unknown_end": sum(len(emitter.unknown) for emitter in run.emitters),
        "events": sum(map(len, events.values())),
        "retried_after_worker_lost": run.replayed,
        "effects": sum(map(len, effects.values())),
        "leases_lost": lost_leases.total(),
        "duplicates": dict(doubled),
    }
    known = {event.id: event for several in events.values() for event in several}
    not_done = Counter((event.status, event.last_error) for event in known.values() if event.status != "done")
    verdict.checks = [
        (
            f"lost 0: {len(orders):,} business rows, each with its event; {len(committed):,} commits were confirmed",
            [
                *_few("a confirmed business row is gone", sorted(committed - orders)),
                *_few("a business row has no event, or several", [n for n in orders if len(events.get(n, ())) != 1]),
            ],
        ),
        (
            f"{len(rolled_back):,} rolled back left nothing, and there is no effect without a committed row",
            [
                *_few("a rolled-back business row is there", sorted(rolled_back & orders)),
                *_few("an event has no business row", sorted(set(events) - orders)),
                *_few("an effect has no event", sorted({str(id_) for id_, _ in effects if id_ not in known})),
            ],
        ),
        (
            f"every event is done, {run.replayed} of them after a retry by hand because processes died three times",
            [f"{count} events are {status}: {error[:200]}" for (status, error), count in not_done.items()],
        ),
        (
            "every event had its effect by every handler",
            _few(
                "an effect is missing",
                [
                    f"{handler} of {event.id}"
                    for event in known.values()
                    if event.status == "done"
                    for handler in HANDLERS
                    if (event.id, handler) not in effects
                ],
            ),
        ),
        (
            "atomic effects exactly once",
            _few(
                "an atomic effect came twice",
                [f"{len(each)} of {id_}" for (id_, name), each in effects.items() if name == "atomic" and each[1:]],
            ),
        ),
        (
            f"{doubled.total()} duplicates among {verdict.facts['effects']:,} effects, all explained",
            _few("a duplicate has no explanation", unexplained),
        ),
        (
            "relays ended only when killed or asked; no business commit failed while the database was there",
            [
                *run.problems,
                *(problem for place in run.places for problem in place.problems),
                *(problem for emitter in run.emitters for problem in emitter.problems[:5]),
            ],
        ),
    ]
    return verdict


def _duplicates(
    effects: dict[tuple[UUID, str], list[Effect]], incidents: list[Incident], lost_leases: Counter[str]
) -> tuple[Counter[str], list[str]]:
    """
    Count what came more than once, by what explains it; return what nothing explains too.

    Each repeat needs an incident of its own: one in which the event was in the hands of
    a process that was killed or paused, or of anybody when sessions were cut, or the
    loss of its lease, which a relay has logged.
    """
    doubled: Counter[str] = Counter()
    unexplained = []
    for (event, handler), several in effects.items():
        causes = [
            incident.kind
            for incident in incidents
            if event in incident.in_hand
            or (incident.of_the_database and any(_near(effect.at, incident) for effect in several))
        ]
        causes += ["lease lost"] * lost_leases[str(event)]
        for cause in causes[: len(several) - 1]:
            doubled[cause] += 1
        if len(several) - 1 > len(causes):
            pids = ", ".join(str(effect.pid) for effect in several)
            unexplained.append(f"{len(several)} times {handler} of {event} (pids {pids}), {len(causes)} reasons for it")
    return doubled, unexplained


def _near(at: float, incident: Incident) -> bool:
    return incident.began - CUT_SECONDS <= at <= incident.ended + CUT_SECONDS


def _few(what: str, found: list[str]) -> list[str]:
    """Return the first ones found, each with what it is, and how many more there are."""
    lines = [f"{what}: {each}" for each in found[:5]]
    return [*lines, f"{what}: {len(found) - 5} more"] if len(found) > 5 else lines
