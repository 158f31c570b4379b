"""The admin's pages about webhooks: what they do, and what nobody can read there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.core import serializers
from django.test import Client
from django.urls import reverse

from django_outbox.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.webhooks import disable_endpoint, fan_out
from django_outbox.webhooks.box import custom_headers, unseal
from tests.webhooks.conftest import MakeEndpoint, secret_of
from tests.webhooks.servers import Server, answer
from tests.webhooks.test_deliver import event, send

pytestmark = pytest.mark.django_db

LIST = "/admin/django_outbox/webhookendpoint/"
DELIVERIES = "/admin/django_outbox/webhookdelivery/"

Visit = Callable[..., Client]


@pytest.fixture
def visit(client: Client) -> Visit:
    def log_in(*permissions: str) -> Client:
        user = User.objects.create_user("olga", is_staff=True, is_superuser="*" in permissions)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client.force_login(user)
        return client

    return log_in


def page(endpoint: WebhookEndpoint) -> str:
    return reverse("admin:django_outbox_webhookendpoint_change", args=[endpoint.pk])


def press(client: Client, endpoint: WebhookEndpoint, verb: str, **data: str) -> Any:
    return client.post(f"{LIST}{endpoint.pk}/verb/", {"verb": verb, **data})


def words(response: Any) -> str:
    return " ".join(str(message) for message in get_messages(response.wsgi_request))


FORM = {
    "url": "https://hooks.example.com/T0KEN",
    "description": "",
    "organization_id": "acme",
    "event_types": "order.*",
}


def test_an_endpoint_is_added_and_its_secret_shown_in_the_very_answer(visit: Visit) -> None:
    client = visit("*")
    response = client.post(f"{LIST}add/", {**FORM, "headers": "Authorization: Bearer s3cret"})
    endpoint = WebhookEndpoint.objects.get()
    assert response.status_code == 200
    assert secret_of(endpoint) in response.content.decode()
    assert "no-store" in response["Cache-Control"]
    assert (endpoint.url, endpoint.event_types) == ("https://hooks.example.com/T0KEN", ["order.*"])
    assert custom_headers(endpoint.sealed_headers) == {"Authorization": "Bearer s3cret"}
    assert secret_of(endpoint) not in client.get(page(endpoint)).content.decode()
    assert "whsec_" not in str(dict(client.session))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": "https://127.0.0.1/"}, "url"),
        ({"url": ""}, "url"),
        ({"event_types": "webhook.*"}, "event_types"),
        ({"event_types": "Order!"}, "event_types"),
        ({"headers": "Host: evil"}, "headers"),
        ({"headers": "X-A: 1\nX-A: 2"}, "headers"),
    ],
)
def test_what_is_refused_is_said_at_its_field(visit: Visit, change: dict[str, str], field: str) -> None:
    response = visit("*").post(f"{LIST}add/", {**FORM, "headers": "", **change})
    assert response.status_code == 200
    assert response.context["adminform"].form.errors[field]
    assert not WebhookEndpoint.objects.exists()


def test_a_change_keeps_what_is_left_empty(visit: Visit, receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver, headers={"X-Tenant": "acme"})
    client = visit("*")
    data = {"url": "", "description": "new", "organization_id": "", "event_types": "user.*", "headers": ""}
    assert client.post(page(endpoint), data).status_code == 302
    endpoint.refresh_from_db()
    assert (endpoint.url, endpoint.description, endpoint.event_types) == (receiver.url, "new", ["user.*"])
    assert custom_headers(endpoint.sealed_headers) == {"X-Tenant": "acme"}
    client.post(page(endpoint), {**data, "remove_headers": "1", "url": f"{receiver.url}/b"})
    endpoint.refresh_from_db()
    assert (endpoint.url, endpoint.sealed_headers) == (f"{receiver.url}/b", "")


def test_the_buttons_do_what_they_say(visit: Visit, receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    client = visit("*")
    old = secret_of(endpoint)
    assert press(client, endpoint, "test").status_code == 302
    assert send() == {"done": 1}
    press(client, endpoint, "disable")
    fan_out(event())
    assert "disabled" in words(press(client, endpoint, "test"))
    assert "1 deliveries" in words(press(client, endpoint, "enable-replay"))
    assert send() == {"done": 1}
    press(client, endpoint, "pause")
    fan_out(event())
    assert send() == {}
    press(client, endpoint, "resume")
    assert send() == {"done": 1}
    response = press(client, endpoint, "rotate")
    endpoint.refresh_from_db()
    new = secret_of(endpoint)
    assert new in response.content.decode()
    assert [entry["secret"] for entry in unseal(endpoint.sealed_secrets)] == [new, old]
    press(client, endpoint, "rotate", compromised="1")
    endpoint.refresh_from_db()
    assert len(unseal(endpoint.sealed_secrets)) == 1
    assert press(client, endpoint, "nonsense").status_code == 403
    assert client.get(f"{LIST}{endpoint.pk}/verb/").status_code == 405


def test_whoever_may_only_look_may_press_nothing(visit: Visit, receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    client = visit("view_webhookendpoint")
    for verb in ("rotate", "test", "disable", "enable", "replay", "pause"):
        assert press(client, endpoint, verb).status_code == 403
    content = client.get(page(endpoint)).content.decode()
    assert "Make a new secret" not in content
    assert "Send a test" not in content
    assert client.post(page(endpoint), {**FORM, "headers": ""}).status_code == 403


def test_whoever_may_change_an_endpoint_may_not_make_secrets(
    visit: Visit, receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint = endpoint_for(receiver)
    client = visit("view_webhookendpoint", "change_webhookendpoint")
    assert press(client, endpoint, "pause").status_code == 302
    assert press(client, endpoint, "rotate").status_code == 403


@pytest.mark.parametrize("may", ["view_webhookendpoint", "change_webhookendpoint"])
def test_nobody_reads_secrets_headers_or_the_path_of_a_url(
    visit: Visit, receiver: Server, endpoint_for: MakeEndpoint, caplog: pytest.LogCaptureFixture, may: str
) -> None:
    """List, detail, history, deletion, messages, logs, serialised rows: the secret, header values and URL stay away."""
    url = f"http://127.0.0.1:{receiver.port}/T0KEN?key=PASSW0RD"
    endpoint = endpoint_for(receiver, url=url, headers={"Authorization": "Bearer s3cret-value"})
    secret = secret_of(endpoint)
    receiver.behaviour = answer(500, body=f"Bearer s3cret-value {secret} {url}".encode())
    with caplog.at_level(logging.DEBUG, logger="django_outbox"):
        fan_out(event())
        send()
        row = WebhookDelivery.objects.get()
        client = visit("view_webhookendpoint", may, "view_webhookdelivery", "view_webhookattempt")
        if may == "change_webhookendpoint":
            data = {"url": "", "description": "x", "organization_id": "", "event_types": "*", "headers": ""}
            client.post(page(endpoint), data)
            press(client, endpoint, "pause")
        seen = [
            client.get(address).content.decode()
            for address in (
                LIST,
                page(endpoint),
                f"{page(endpoint).removesuffix('change/')}history/",
                DELIVERIES,
                f"{DELIVERIES}?status=waiting",
                f"{DELIVERIES}{row.pk}/change/",
                f"{DELIVERIES}{row.pk}/history/",
            )
        ]
    seen.append(" ".join(str(entry.get_change_message()) + entry.object_repr for entry in LogEntry.objects.all()))
    seen.append(caplog.text)
    seen.append(serializers.serialize("json", [endpoint], fields=("sealed_secrets", "sealed_headers", "last_error")))
    seen.append(serializers.serialize("json", [row, WebhookAttempt.objects.get()]))
    for text in seen:
        assert "s3cret" not in text
        assert secret not in text
        assert secret[6:] not in text
    for text in seen[:-1]:
        assert "T0KEN" not in text
        assert "PASSW0RD" not in text
    assert f"http://127.0.0.1:{receiver.port}/…" in seen[0]


def test_dead_deliveries_are_one_click_away_and_can_be_retried(
    visit: Visit, receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint, other = endpoint_for(receiver), endpoint_for(receiver)
    for each in (endpoint, other):
        disable_endpoint(each)
    fan_out(event())
    row = WebhookDelivery.objects.get(endpoint_id=endpoint.pk)
    client = visit("*")
    content = client.get(page(endpoint)).content.decode()
    link = f"{DELIVERIES}?endpoint_id={endpoint.pk}&amp;status=dead"
    assert link in content
    listed = client.get(link.replace("&amp;", "&")).context["cl"].result_list
    assert [each.pk for each in listed] == [row.pk]
    assert client.get(f"{DELIVERIES}?q={row.event_id}").context["cl"].result_count == 2
    detail = f"{DELIVERIES}{row.pk}/change/"
    assert "Enable it and replay" in client.get(detail).content.decode()
    WebhookEndpoint.objects.update(enabled=True, disabled_at=None)
    client.post(detail, {"verb": "retry", "shown": "dead"})
    assert send() == {"done": 1}
    shown = client.get(detail).content.decode()
    assert "delivered" in shown
    assert "order.placed" in shown


def test_answers_of_receivers_are_for_those_who_may_read_attempts(
    visit: Visit, receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint_for(receiver)
    receiver.behaviour = answer(500, body=b"an inside page")
    fan_out(event())
    send()
    detail = f"{DELIVERIES}{WebhookDelivery.objects.get().pk}/change/"
    client = visit("view_webhookdelivery")
    assert "an inside page" not in client.get(detail).content.decode()
    assert "HTTP 500" in client.get(detail).content.decode()
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_webhookattempt"))
    assert "an inside page" in client.get(detail).content.decode()
