"""
Every built-in handler may be run twice, by two relays at once, or be killed anywhere: its effect is there once.

Two at once start at one barrier, in threads with connections of their own. A process is
killed by itself, before each of its statements in turn and before its commit; see
``dying``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from django_outbox import alerts, audit, emit_events, handlers, notifications, webhooks
from django_outbox.audit import protect, verify
from django_outbox.events import NewEvent
from django_outbox.handlers import register_builtin_handlers
from django_outbox.models import (
    AuditEntry,
    Notification,
    OperatorAlert,
    OutboxEmail,
    OutboxEvent,
    WebhookDelivery,
)
from django_outbox.notifications import NewNotification, notifies
from tests.builtins.helpers import event_of
from tests.concurrency.helpers import RunningRelay, together
from tests.conftest import StartPython

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.filterwarnings(r"ignore:The EMAIL_\w+ setting is deprecated"),
]

DEATHS = {"audit-log": 3, "notification-fanout": 2, "operator-alert": 5, "webhook-fanout": 1}
"""How many statements each makes at least: as many places to die at."""


@pytest.fixture(autouse=True)
def _set_up(settings: Any) -> None:
    settings.OUTBOX = {"ALERT_EMAILS": ["ops@example.com"], "WEBHOOKS": {"ALLOW_PORTS": [443]}}
    # The table is emptied after the test, on SQLite row by row.
    protect(using="default", wanted=False)
    webhooks.create_endpoint("https://example.com/hook")
    webhooks.create_endpoint("https://example.com/other")

    @notifies("order.paid")
    def two(event: Any) -> list[NewNotification]:
        return [NewNotification(name, "paid") for name in ("1", "2")]


def effects() -> dict[str, int]:
    """Return how often each event had each effect, at the most and at the least."""
    assert verify().broken is None
    counts = {
        "audit-log": AuditEntry.objects.count(),
        "notification-fanout": Notification.objects.count(),
        "webhook-fanout": WebhookDelivery.objects.count(),
        "operator-alert": OperatorAlert.objects.count(),
    }
    return {name: count for name, count in counts.items() if count}


EACH = {"audit-log": 1, "notification-fanout": 2, "webhook-fanout": 2, "operator-alert": 1}


def function_of(name: str) -> Callable[[Any], None]:
    return handlers._BUILTIN[name].function


@pytest.mark.parametrize("name", EACH)
def test_two_copies_at_once_have_one_effect(name: str) -> None:
    type_ = "outbox.event.dead" if name == "operator-alert" else "order.paid"
    events = [event_of(type=type_, payload={"id": str(number)}) for number in range(5)]
    for event in events:
        together(*[partial(function_of(name), event)] * 3)
    assert effects() == {name: 5 * EACH[name]}
    if name == "operator-alert":
        assert OutboxEmail.objects.count() == 1
        assert OutboxEvent.objects.filter(type=alerts.SUMMARY_DUE).count() == 1


def test_two_summaries_at_once_send_one_message() -> None:
    for number in range(3):
        alerts.alert(event_of(type="outbox.event.dead", payload={"id": str(number)}))
    due = OutboxEvent.objects.get(type=alerts.SUMMARY_DUE)
    event = event_of(id=due.pk, type=alerts.SUMMARY_DUE, payload=due.payload)
    together(*[partial(alerts.alert, event)] * 3)
    assert OutboxEmail.objects.count() == 2


@pytest.mark.parametrize("name", EACH)
def test_a_process_killed_anywhere_leaves_one_effect_once_it_was_run_again(
    name: str, start_python: StartPython
) -> None:
    process = start_python("-W", "ignore::DeprecationWarning", "-m", "tests.builtins.dying", name)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    places = int(said.split()[-1])
    assert places >= DEATHS[name]
    # The last one was not killed, and run once.
    assert effects() == {name: (places + 1) * EACH[name]}
    if name == "operator-alert":
        assert OutboxEmail.objects.count() == 1


def test_many_threads_and_a_relay_append_one_chain(settings: Any) -> None:
    settings.OUTBOX = {"BUILTIN_HANDLERS": ["audit-log"]}
    register_builtin_handlers()
    with transaction.atomic():
        ids = emit_events([NewEvent("order.paid", {"number": number}) for number in range(60)])
    relay = RunningRelay(threads=8)

    def outside() -> None:
        for _ in range(20):
            audit.append(event_of())

    together(outside, outside)
    relay.wait_for(done=60)
    assert relay.stop() == 0
    assert verify().entries == 100
    assert set(AuditEntry.objects.values_list("pk", flat=True)) >= set(ids)


def test_an_event_that_cannot_be_entered_fails_alone() -> None:
    """What a batch refuses is found by writing each by itself."""
    bad = event_of(type="x" * 200) if connection.vendor == "postgresql" else event_of(payload={"no": float("nan")})
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def enter(event: Any) -> None:
        barrier.wait(10)
        try:
            audit.append(event)
        except Exception as error:  # noqa: BLE001  counted below
            errors.append(error)

    together(*[partial(enter, event) for event in (event_of(), bad, event_of(), event_of())])
    assert len(errors) == 1
    assert verify().entries == 3


@pytest.mark.postgres
def test_whoever_sits_on_the_head_holds_nobody_for_ever(raw_connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    audit.append(event_of())
    monkeypatch.setattr(audit, "_LOCK_SECONDS", 0.2)
    session = raw_connect()
    session.execute("BEGIN")
    session.execute("SELECT * FROM django_outbox_audit_head FOR UPDATE")
    from django.db import OperationalError

    with pytest.raises(OperationalError):
        audit.append(event_of())
    session.execute("ROLLBACK")
    audit.append(event_of())
    assert verify().entries == 2


def test_a_resolver_that_fails_halfway_tells_the_rest_at_the_next_attempt() -> None:
    fails = [True]

    @notifies("user.created")
    def many(event: Any) -> Iterator[NewNotification]:
        for number in range(700):
            if number == 600 and fails:
                raise ConnectionError
            yield NewNotification(str(number), "hello")

    event = event_of(type="user.created")
    with pytest.raises(ConnectionError):
        notifications.fan_out(event)
    fails.clear()
    assert notifications.fan_out(event) == 200
    assert Notification.objects.count() == 700
