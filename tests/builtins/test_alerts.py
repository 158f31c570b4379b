"""Alerts: the first death is told at once, the rest in summaries, each once, and none about an alert."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core import mail
from django.core.mail import EmailMessage
from django.db import transaction

from django_outbox import alerts, emit_event, on_event
from django_outbox.handlers import register_builtin_handlers
from django_outbox.mail import enqueue_email
from django_outbox.models import OperatorAlert, OutboxEmail, OutboxEvent, WebhookDelivery, WebhookEndpoint
from django_outbox.testing import drain, travel
from tests.builtins.helpers import event_of

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.filterwarnings(r"ignore:The EMAIL_\w+ setting is deprecated"),
]

WINDOW = 600


@pytest.fixture(autouse=True)
def outbox(settings: Any) -> dict[str, Any]:
    settings.OUTBOX = {
        "BUILTIN_HANDLERS": ["operator-alert"],
        "ALERT_EMAILS": ["ops@example.com"],
        "EVENTS": {"MAX_ATTEMPTS": 1},
    }
    register_builtin_handlers()
    return dict(settings.OUTBOX)


@pytest.fixture
def breaks() -> None:
    @on_event("order.paid", name="crm-sync")
    def fail(event: Any) -> None:
        raise ConnectionError("the CRM\nis down")


def emit(count: int = 1) -> None:
    with transaction.atomic():
        for _ in range(count):
            emit_event("order.paid", {})


def announcement(**given: Any) -> Any:
    payload = {"queue": "events", "id": "1", "type": "order.paid", "error": "down", "handlers": {"crm-sync": "down"}}
    return event_of(**{"type": "outbox.event.dead", "payload": payload, **given})


def test_the_first_death_is_told_at_once(breaks: None) -> None:
    emit()
    drain()
    (message,) = mail.outbox
    assert message.to == ["ops@example.com"]
    assert message.from_email == "root@localhost"
    assert message.subject == "[Django] Event died: order.paid (crm-sync)"
    dead = OutboxEvent.objects.get(status="dead")
    assert str(dead.pk) in str(message.body)
    assert "crm-sync: ConnectionError: the CRM is down" in str(message.body)


def test_hundreds_of_deaths_make_two_messages(breaks: None) -> None:
    emit(300)
    drain()
    assert len(mail.outbox) == 1
    with travel(seconds=WINDOW + 10):
        drain()
    assert [message.subject for message in mail.outbox] == [
        "[Django] Event died: order.paid (crm-sync)",
        "[Django] 299 events need attention",
    ]
    assert "299 events died: order.paid (crm-sync)" in str(mail.outbox[1].body)
    assert not OperatorAlert.objects.filter(told_at__isnull=True).exists()
    # The summary asks for one more, which finds nothing and ends it.
    with travel(seconds=3 * WINDOW):
        drain()
        assert len(mail.outbox) == 2
        assert not OutboxEvent.objects.filter(type=alerts.SUMMARY_DUE).exclude(status="done").exists()


def test_an_outage_that_lasts_makes_one_message_a_window(breaks: None) -> None:
    for minute in range(0, 60, 2):
        with travel(minutes=minute):
            emit(3)
            drain()
    with travel(hours=2):
        drain()
    assert 6 <= len(mail.outbox) <= 8
    assert not OperatorAlert.objects.filter(told_at__isnull=True).exists()


def test_after_a_quiet_time_the_next_death_is_told_at_once_again(breaks: None) -> None:
    emit()
    drain()
    with travel(hours=1):
        emit()
        drain()
    assert [message.subject for message in mail.outbox] == ["[Django] Event died: order.paid (crm-sync)"] * 2


def test_deaths_of_all_queues_are_told_in_one_summary() -> None:
    alerts.alert(announcement())
    for payload, type_ in (
        ({"id": "2", "kind": "rejected", "error": "550 no such user"}, "email.delivery.exhausted"),
        ({"id": "3", "event_type": "order.paid", "reason": "http_500"}, "webhook.delivery.exhausted"),
        ({"endpoint_id": "4", "url": "https://example.com", "reason": "gone"}, "webhook.endpoint.disabled"),
        ({"id": "5", "task": "shop.tasks.report", "error": "KeyError: 'x'"}, "task.dead"),
        ({"id": "6", "task": "shop.tasks.report", "error": "KeyError: 'y'"}, "task.dead"),
    ):
        alerts.alert(event_of(type=type_, payload=payload))
    with travel(seconds=WINDOW + 10):
        drain()
    summary = str(mail.outbox[-1].body)
    for line in (
        "2 tasks died: shop.tasks.report\n    KeyError: 'x'\n    id 5",
        "1 email died: rejected\n    550 no such user",
        "1 webhook delivery died: order.paid\n    http_500",
        "1 webhook endpoint was disabled: https://example.com",
    ):
        assert line in summary


def test_addresses_are_those_of_the_admins_unless_given(settings: Any, outbox: dict[str, Any]) -> None:
    settings.OUTBOX = {"BUILTIN_HANDLERS": ["operator-alert"]}
    settings.ADMINS = ["one@example.com"]
    assert alerts.email_addresses() == ["one@example.com"]
    settings.ADMINS = [("Two", "two@example.com")]
    assert alerts.email_addresses() == ["two@example.com"]
    settings.OUTBOX = {**outbox, "ALERT_EMAILS": []}
    alerts.alert(announcement())
    assert not OutboxEmail.objects.exists()


# --- once


def test_an_announcement_delivered_twice_is_told_once() -> None:
    event = announcement()
    for _ in range(2):
        alerts.alert(event)
    assert (OperatorAlert.objects.count(), OutboxEmail.objects.count()) == (1, 1)
    assert OutboxEvent.objects.filter(type=alerts.SUMMARY_DUE).count() == 1


def test_a_summary_made_twice_is_sent_once() -> None:
    for _ in range(3):
        alerts.alert(announcement())
    due = OutboxEvent.objects.get(type=alerts.SUMMARY_DUE)
    for _ in range(2):
        alerts.alert(event_of(id=due.pk, type=alerts.SUMMARY_DUE, payload=due.payload))
    assert OutboxEmail.objects.count() == 2


# --- never about an alert


def test_the_death_of_an_alert_is_not_announced(settings: Any, outbox: dict[str, Any]) -> None:
    settings.OUTBOX = {**outbox, "EMAIL": {"MAX_ATTEMPTS": 1, "BACKEND": "tests.builtins.refusing.EmailBackend"}}
    alerts.alert(announcement())
    with transaction.atomic():
        enqueue_email(EmailMessage("a customer's", "x", "a@example.com", ["b@example.com"]))
    del mail.outbox
    try:
        drain(queues=["events", "email"])
    finally:
        mail.outbox = []
    assert OutboxEmail.objects.filter(status="failed").count() == 2
    assert OperatorAlert.objects.filter(type="email.delivery.exhausted").count() == 1
    assert OutboxEmail.objects.filter(quiet=True).count() == 1


def test_the_death_of_an_announcement_is_not_announced(monkeypatch: pytest.MonkeyPatch, breaks: None) -> None:
    @on_event("outbox.event.dead", name="another")
    def fail(event: Any) -> None:
        raise ValueError

    emit()
    drain()
    assert OutboxEvent.objects.filter(type="outbox.event.dead").count() == 1


# --- the webhook


@pytest.fixture
def hooked(settings: Any, outbox: dict[str, Any]) -> None:
    settings.OUTBOX = {
        **outbox,
        "ALERT_EMAILS": [],
        "ALERT_WEBHOOK_URL": "https://hooks.example.com/T/B/x",
    }


def test_an_alert_goes_to_the_operators_webhook_with_text_that_chats_show(hooked: None) -> None:
    alerts.alert(announcement())
    endpoint = WebhookEndpoint.objects.get()
    assert (endpoint.pk, endpoint.url) == (alerts.OPERATOR_ENDPOINT, "https://hooks.example.com/T/B/x")
    delivery = WebhookDelivery.objects.get()
    assert (delivery.endpoint_id, delivery.event_type, delivery.quiet) == (endpoint.pk, "outbox.alert", True)
    body = json.loads(delivery.body)
    assert (
        body["text"] == "*Event died: order.paid (crm-sync)*\n1 event died: order.paid (crm-sync)\n    down\n    id 1"
    )
    assert body["data"]["groups"] == [
        {
            "type": "outbox.event.dead",
            "subject": "order.paid (crm-sync)",
            "error": "down",
            "example_id": "1",
            "count": 1,
        }
    ]
    assert (body["id"], body["type"]) == (str(delivery.event_id), "outbox.alert")


def test_the_webhook_is_written_once_and_follows_the_setting(hooked: None, settings: Any) -> None:
    for _ in range(3):
        alerts.alert(announcement())
    due = OutboxEvent.objects.get(type=alerts.SUMMARY_DUE)
    settings.OUTBOX = {**settings.OUTBOX, "ALERT_WEBHOOK_URL": "https://hooks.example.com/other"}
    for _ in range(2):
        alerts.alert(event_of(id=due.pk, type=alerts.SUMMARY_DUE, payload=due.payload))
    assert WebhookDelivery.objects.count() == 2
    assert WebhookEndpoint.objects.get().url == "https://hooks.example.com/other"


def test_the_operators_endpoint_gets_no_events(hooked: None) -> None:
    from django_outbox import webhooks

    alerts.alert(announcement())
    assert webhooks.fan_out(event_of()) == 0


def test_that_the_operators_own_endpoint_is_disabled_is_not_told(hooked: None) -> None:
    payload = {"endpoint_id": str(alerts.OPERATOR_ENDPOINT), "url": "https://hooks.example.com", "reason": "gone"}
    alerts.alert(event_of(type="webhook.endpoint.disabled", payload=payload))
    assert not OperatorAlert.objects.exists()
    assert not WebhookDelivery.objects.exists()


def test_an_address_that_is_refused_keeps_no_email_from_being_sent(hooked: None, settings: Any) -> None:
    settings.OUTBOX = {
        **settings.OUTBOX,
        "ALERT_EMAILS": ["ops@example.com"],
        "ALERT_WEBHOOK_URL": "https://127.0.0.1/x",
    }
    alerts.alert(announcement())
    assert OutboxEmail.objects.count() == 1
    assert not WebhookDelivery.objects.exists()
