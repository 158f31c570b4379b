"""Deliveries from fan-out to settle, against real local servers."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from standardwebhooks.webhooks import Webhook

from django_outbox import Event
from django_outbox import lease as engine
from django_outbox.models import OutboxEvent, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.testing import drain, travel
from django_outbox.webhooks import (
    DELIVERIES,
    WebhookWork,
    disable_endpoint,
    enable_endpoint,
    fan_out,
    pause_endpoint,
    replay,
    rotate_secret,
    send_test,
    verify,
)
from tests.webhooks.conftest import MakeEndpoint, prove, secret_of
from tests.webhooks.servers import Server, answer, silent_port

pytestmark = pytest.mark.django_db

PAYLOAD = {"z": "Zoë 日本 🎉", "n": 1.0, "a": {"y": [1, None, True], "b": {}}, "nul": "\x01"}


def event(type_: str = "order.placed", payload: Any = None, **values: Any) -> Event:
    given = {
        "id": engine.new_id(),
        "type": type_,
        "payload": PAYLOAD if payload is None else payload,
        "occurred_at": datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC),
        "aggregate_type": "",
        "aggregate_id": "",
        "organization_id": "",
        "request_id": "",
        "causation_id": None,
        "headers": {},
        "handler": "webhook-fanout",
        "attempt": 1,
        "idempotency_key": "",
        **values,
    }
    return Event(**given)


def send() -> dict[str, int]:
    return dict(drain(queues=("webhooks",)))


def the_delivery(**values: Any) -> WebhookDelivery:
    return WebhookDelivery.objects.get(**values)


def attempts() -> list[WebhookAttempt]:
    return list(WebhookAttempt.objects.order_by("id"))


def announcements(prefix: str = "webhook.") -> list[OutboxEvent]:
    return list(OutboxEvent.objects.filter(type__startswith=prefix).order_by("id"))


# --- what arrives


def test_an_event_arrives_signed_as_the_very_bytes_that_are_stored(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint = endpoint_for(receiver, headers={"X-Tenant": "acme-1", "Authorization": "Bearer s3cret"})
    placed = event()
    assert fan_out(placed) == 1
    assert send() == {"done": 1}
    (request,) = receiver.requests
    assert request.body == the_delivery().body.encode()
    document = json.loads(request.body)
    assert list(document) == ["id", "type", "timestamp", "data"]
    assert document == {
        "id": str(placed.id),
        "type": "order.placed",
        "timestamp": "2026-01-02T03:04:05.678Z",
        "data": PAYLOAD,
    }
    headers = dict(request.headers)
    secret = secret_of(endpoint)
    assert verify(secret, headers, request.body) == document
    assert Webhook(secret).verify(request.body, {name.lower(): value for name, value in headers.items()}) == document
    assert request.header("webhook-id") == str(placed.id)
    assert request.header("Content-Type") == "application/json"
    assert request.header("X-Tenant") == "acme-1"
    assert request.header("Authorization") == "Bearer s3cret"
    assert request.header("X-Outbox-Attempt") == "1"
    (attempt,) = attempts()
    assert (attempt.reason, attempt.http_status, attempt.address) == ("delivered", 200, "127.0.0.1")
    assert attempt.response == "ok"
    assert attempt.finished_at is not None


def test_a_retry_carries_the_same_body_and_id_and_a_fresh_signature(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(500)
    fan_out(event())
    assert send() == {"waiting": 1}
    receiver.behaviour = answer(200)
    now = datetime.now(UTC).timestamp()
    monkeypatch.setattr("time.time", lambda: now + 60)
    with travel(minutes=1):
        assert send() == {"done": 1}
    first, second = receiver.requests
    assert first.body == second.body
    assert first.header("webhook-id") == second.header("webhook-id")
    assert first.header("webhook-timestamp") != second.header("webhook-timestamp")
    for request in (first, second):
        assert verify(secret_of(endpoint), dict(request.headers), request.body)
    assert [(each.number, each.reason) for each in attempts()] == [(1, "http_500"), (2, "delivered")]


def test_both_secrets_sign_while_one_replaces_the_other(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    old = secret_of(endpoint)
    new = rotate_secret(endpoint, overlap_seconds=3_600)
    fan_out(event())
    send()
    (request,) = receiver.requests
    assert len(str(request.header("webhook-signature")).split(" ")) == 2
    for secret in (old, new):
        assert verify(secret, dict(request.headers), request.body)
    with travel(hours=1.1):
        fan_out(event())
        send()
    last = receiver.requests[-1]
    assert verify(new, dict(last.headers), last.body)
    assert len(str(last.header("webhook-signature")).split(" ")) == 1


# --- verdicts


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_a_success_is_a_success(receiver: Server, endpoint_for: MakeEndpoint, status: int) -> None:
    endpoint_for(receiver)
    receiver.behaviour = answer(status)
    fan_out(event())
    assert send() == {"done": 1}
    assert (the_delivery().reason, the_delivery().last_status) == ("", status)


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 403, 404, 408, 413, 425, 429, 500, 502, 503, 599])
def test_anything_else_is_tried_again(receiver: Server, endpoint_for: MakeEndpoint, status: int) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(status, f"Location: {receiver.url}/elsewhere?token=abc")
    fan_out(event())
    assert send() == {"waiting": 1}
    row = the_delivery()
    assert (row.reason, row.last_status, row.attempts) == (f"http_{status}", status, 1)
    assert f"HTTP {status}" in row.last_error
    assert "token" not in row.last_error
    assert len(receiver.requests) == 1
    endpoint.refresh_from_db()
    assert (endpoint.failures, endpoint.failed_total) == (1, 1)
    assert endpoint.streak == (1 if status == 429 or status >= 500 else 0)


def test_a_status_named_in_the_settings_is_not_tried_again(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint_for(receiver, webhooks={"PERMANENT_STATUSES": [404]})
    receiver.behaviour = answer(404)
    fan_out(event())
    assert send() == {"failed": 1}
    assert [each.payload["reason"] for each in announcements()] == ["http_404"]


def test_after_its_attempts_a_delivery_is_dead_and_announced_once(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(404)
    placed = event(organization_id="acme")
    fan_out(placed)
    for hours in range(4):
        with travel(hours=hours):
            send()
    row = the_delivery()
    assert (row.status, row.attempts) == ("dead", 4)
    assert row.due_at is not None
    (told,) = announcements()
    assert told.type == "webhook.delivery.exhausted"
    assert told.payload["endpoint_id"] == str(endpoint.pk)
    assert (told.payload["event_id"], told.payload["reason"]) == (str(placed.id), "http_404")
    assert (told.organization_id, told.quiet, told.causation_id) == ("acme", True, placed.id)
    with travel(hours=12):
        assert send() == {"dead": 1}
    assert len(announcements()) == 1
    endpoint.refresh_from_db()
    assert (endpoint.exhausted, endpoint.failures) == (1, 5)
    with travel(days=8):
        assert send() == {"dead": 1}
    assert the_delivery().due_at is None
    assert fan_out(event("webhook.delivery.exhausted")) == 0


def test_an_endpoint_that_answers_gone_is_disabled_and_its_other_deliveries_end_quietly(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint = endpoint_for(receiver, organization_id="acme")
    prove(endpoint)
    receiver.behaviour = answer(410)
    for _ in range(3):
        fan_out(event(organization_id="acme"))
    assert send()["dead"] == 3
    endpoint.refresh_from_db()
    assert (endpoint.enabled, endpoint.disabled_reason) == (False, "gone")
    reasons = sorted(WebhookDelivery.objects.values_list("reason", flat=True))
    assert set(reasons) <= {"endpoint_gone", "endpoint_disabled"}
    assert not WebhookDelivery.objects.exclude(due_at=None).exists()
    (told,) = announcements()
    assert (told.type, told.payload["reason"]) == ("webhook.endpoint.disabled", "gone")
    assert told.payload["url"] == f"http://127.0.0.1:{receiver.port}/…"


def test_a_connection_that_is_refused_or_stays_silent_is_a_failed_attempt(
    receiver: Server, endpoint_for: MakeEndpoint, settings: Any
) -> None:
    endpoint_for(receiver)
    with silent_port() as port:
        webhooks = settings.OUTBOX["WEBHOOKS"]
        settings.OUTBOX = {
            "WEBHOOKS": {**webhooks, "ALLOW_PORTS": [*webhooks["ALLOW_PORTS"], port], "TIMEOUT_SECONDS": 0.2}
        }
        WebhookEndpoint.objects.update(url=f"http://127.0.0.1:{port}/")
        fan_out(event())
        assert send() == {"waiting": 1}
        assert the_delivery().reason == "timeout"
    with travel(hours=1):
        assert send() == {"waiting": 1}
    assert the_delivery().reason == "connection"
    assert [each.reason for each in attempts()] == ["timeout", "connection"]


# --- names


def resolve(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Answer look-ups of names with these in turn, the last for ever."""
    left = list(answers)

    def getaddrinfo(host: str, port: int, **_: Any) -> Any:
        given = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(given, Exception):
            raise given
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (given, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_a_passing_failure_of_the_look_up_costs_nothing(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, work: WebhookWork
) -> None:
    endpoint = endpoint_for(receiver, url=f"http://hook.test:{receiver.port}/in")
    resolve(monkeypatch, AGAIN, AGAIN, "127.0.0.1")
    fan_out(event())
    assert send() == {"waiting": 1}
    row = the_delivery()
    assert (row.attempts, row.reason) == (0, "lookup_failed")
    assert "Temporary failure" in row.last_error
    work.turns.forget_holds()
    with travel(minutes=1):
        assert send() == {"waiting": 1}
        work.turns.forget_holds()
    with travel(minutes=2):
        assert send() == {"done": 1}
    assert len(attempts()) == 1
    assert the_delivery().attempts == 1
    endpoint.refresh_from_db()
    assert (endpoint.failed_total, endpoint.delivered_total) == (0, 1)


def test_a_name_that_is_never_found_does_not_retry_for_ever(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, work: WebhookWork
) -> None:
    endpoint_for(receiver, url=f"http://hook.test:{receiver.port}/in")
    resolve(monkeypatch, AGAIN)
    fan_out(event())
    # For six hours it costs nothing; then come its four attempts, and the replays.
    steps = [(0, 0), (5, 0), (7, 1), (8, 2), (9, 3), (10, 4), (30, 5), (24 * 8, 6)]
    for hours, charged in steps:
        work.turns.forget_holds()
        with travel(hours=hours):
            assert send() == {"dead" if charged >= 4 else "waiting": 1}, hours
            assert the_delivery().attempts == charged
    assert the_delivery().due_at is None
    assert attempts() == []
    assert [each.payload["reason"] for each in announcements()] == ["lookup_failed"]
    work.turns.forget_holds()


def test_the_endpoints_other_deliveries_wait_after_a_failed_look_up(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, work: WebhookWork
) -> None:
    prove(endpoint_for(receiver, url=f"http://hook.test:{receiver.port}/in"))
    resolve(monkeypatch, AGAIN)
    for _ in range(3):
        fan_out(event())
    assert send() == {"waiting": 1, "released": 2}
    assert send() == {}
    work.turns.forget_holds()


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "::1"])
def test_a_name_that_leads_inside_ends_at_once_and_reaches_nobody(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    endpoint_for(receiver, url=f"http://hook.test:{receiver.port}/in")
    resolve(monkeypatch, address)
    fan_out(event())
    assert send() == {"dead": 1}
    row = the_delivery()
    assert (row.reason, row.due_at) == ("non_public", None)
    assert attempts() == []
    assert receiver.connections == 0
    assert [each.payload["reason"] for each in announcements()] == ["non_public"]


def test_the_request_goes_to_the_address_that_was_judged(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """A name that is public when it is judged and inside a moment later: nothing asks a second time."""
    endpoint_for(receiver, url=f"http://hook.test:{receiver.port}/in", webhooks={"TIMEOUT_SECONDS": 0.3})
    webhooks = settings.OUTBOX["WEBHOOKS"]
    settings.OUTBOX = {"WEBHOOKS": {**webhooks, "ALLOW_NETWORKS": ["127.99.0.0/16"], "TIMEOUT_SECONDS": 0.3}}
    resolve(monkeypatch, "127.99.0.1", "127.0.0.1")
    fan_out(event())
    assert send() == {"waiting": 1}
    assert the_delivery().reason == "connection"
    assert receiver.connections == 0


def test_a_url_that_the_settings_no_longer_allow_is_refused_when_it_is_used(
    receiver: Server, endpoint_for: MakeEndpoint, settings: Any
) -> None:
    endpoint_for(receiver)
    settings.OUTBOX = {}
    fan_out(event())
    assert send() == {"dead": 1}
    assert the_delivery().reason == "invalid_target"
    assert receiver.connections == 0


# --- fan-out


def test_a_redelivered_event_writes_nothing_twice(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint_for(receiver)
    placed = event()
    assert [fan_out(placed), fan_out(placed), fan_out(placed)] == [1, 0, 0]
    endpoint_for(receiver)
    assert fan_out(placed) == 1
    assert send() == {"done": 2}
    assert fan_out(placed) == 0


@pytest.mark.parametrize(
    ("event_types", "wanted"),
    [
        (["*"], {"order.placed", "order.line.added", "user.created"}),
        (["order.*"], {"order.placed", "order.line.added"}),
        (["order.line.*"], {"order.line.added"}),
        (["order.placed", "user.*"], {"order.placed", "user.created"}),
        (["orders.*", "ord.*", "placed"], set()),
    ],
)
def test_an_endpoint_gets_the_types_that_it_asked_for(
    receiver: Server, endpoint_for: MakeEndpoint, event_types: list[str], wanted: set[str]
) -> None:
    endpoint_for(receiver, event_types=event_types)
    got = {type_ for type_ in ("order.placed", "order.line.added", "user.created") if fan_out(event(type_))}
    assert got == wanted


def test_an_endpoint_gets_the_events_of_its_organization(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    names = {}
    for organization in ("", "acme", "globex"):
        names[endpoint_for(receiver, organization_id=organization).pk] = organization
    for organization, wanted in (("", {""}), ("acme", {"", "acme"}), ("initech", {""})):
        placed = event(organization_id=organization)
        fan_out(placed)
        rows = WebhookDelivery.objects.filter(event_id=placed.id)
        assert {names[row.endpoint_id] for row in rows} == wanted


@pytest.mark.parametrize("type_", ["outbox.event.dead", "email.delivery.exhausted", "webhook.endpoint.disabled"])
def test_the_frameworks_own_announcements_never_reach_customers(
    receiver: Server, endpoint_for: MakeEndpoint, type_: str
) -> None:
    endpoint_for(receiver)
    assert fan_out(event(type_)) == 0


def test_events_for_a_disabled_endpoint_wait_for_a_replay(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    fan_out(event())
    send()
    disable_endpoint(endpoint)
    missed = event()
    assert fan_out(missed) == 1
    row = the_delivery(event_id=missed.id)
    assert (row.status, row.due_at, row.reason, row.quiet) == ("dead", None, "endpoint_disabled", True)
    assert row.dead_at is not None
    assert send() == {}
    with pytest.raises(ValueError, match="disabled"):
        replay(endpoint, since=row.created_at)
    with pytest.raises(ValueError, match="disabled"):
        send_test(endpoint)
    since = enable_endpoint(endpoint)
    assert since is not None
    assert replay(endpoint, since=since) == 1
    assert send() == {"done": 1}
    assert len(receiver.requests) == 2
    assert announcements() == []


def test_a_replay_takes_dead_deliveries_of_that_endpoint_and_time_alone(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    first, second = endpoint_for(receiver), endpoint_for(receiver)
    for _ in range(3):
        fan_out(event())
    moments = list(WebhookDelivery.objects.filter(endpoint_id=first.pk).order_by("id"))
    WebhookDelivery.objects.update(status="dead", dead_at=datetime.now(UTC))
    WebhookDelivery.objects.filter(pk=moments[1].pk).update(status="failed", finished_at=datetime.now(UTC))
    WebhookDelivery.objects.filter(pk=moments[0].pk).update(created_at=datetime.now(UTC) - timedelta(days=1))
    assert replay(first, since=datetime.now(UTC) - timedelta(hours=1)) == 1
    assert WebhookDelivery.objects.filter(endpoint_id=second.pk, status="dead").count() == 3
    assert send() == {"done": 1}


def test_a_body_that_is_too_large_is_rejected_and_a_large_one_is_warned_of(
    receiver: Server, endpoint_for: MakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    from django_outbox import Reject

    endpoint_for(receiver)
    with pytest.raises(Reject, match="bytes"):
        fan_out(event(payload="x" * 300_000))
    with caplog.at_level(logging.WARNING):
        assert fan_out(event(payload="x" * 30_000)) == 1
    assert "webhook body is large" in caplog.text
    assert fan_out(event(payload="x" * 262_000)) == 1


def test_a_fan_out_is_one_statement(
    receiver: Server, endpoint_for: MakeEndpoint, django_assert_num_queries: Callable[[int], Any]
) -> None:
    for _ in range(5):
        endpoint_for(receiver)
    with django_assert_num_queries(1):
        assert fan_out(event()) == 5
    ids = [row.id for row in WebhookDelivery.objects.all()]
    assert len({id_.version for id_ in ids}) == 1
    assert all(id_.variant == ids[0].variant for id_ in ids)


def test_a_test_delivery_goes_to_its_endpoint_alone(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint_for(receiver)
    endpoint = endpoint_for(receiver, event_types=["order.*"])
    row = send_test(endpoint)
    assert row.endpoint_id == endpoint.pk
    assert send() == {"done": 1}
    assert json.loads(receiver.requests[0].body)["type"] == "webhook.test"


# --- when an endpoint is left alone


def test_retry_after_pauses_the_endpoint_and_not_only_the_delivery(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(429, "Retry-After: 600")
    fan_out(event())
    assert send() == {"waiting": 1}
    fan_out(event())
    assert send() == {}
    assert work.next_due_seconds(using="default") == pytest.approx(600, abs=5)
    row = the_delivery(status="waiting")
    assert row.due_at is not None
    assert (row.due_at - row.created_at).total_seconds() >= 600
    receiver.behaviour = answer(200)
    with travel(minutes=9):
        assert send() == {}
    with travel(minutes=14):
        assert send() == {"done": 2}
    assert len(attempts()) == 3
    endpoint.refresh_from_db()
    assert endpoint.failures == 0


def test_the_breaker_opens_spends_nothing_and_lets_one_through(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(503)
    for _ in range(12):
        fan_out(event())
    counts = send()
    assert counts["waiting"] == 5
    assert len(receiver.requests) == len(attempts()) == 5
    endpoint.refresh_from_db()
    assert (endpoint.open_seconds, endpoint.streak) == (30, 5)
    assert set(WebhookDelivery.objects.filter(status="pending").values_list("attempts", flat=True)) == {0}
    assert send() == {}
    with travel(seconds=31):
        assert send()["waiting"] == 1
        assert len(receiver.requests) == 6
        endpoint.refresh_from_db()
        assert endpoint.open_seconds == 60
    receiver.behaviour = answer(200)
    with travel(minutes=10):
        assert send() == {"done": 12}
    endpoint.refresh_from_db()
    assert (endpoint.open_seconds, endpoint.open_until, endpoint.streak) == (0, None, 0)


def test_the_one_request_of_a_half_open_breaker_is_taken_once_among_relays(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    from django_outbox.webhooks import store

    endpoint = endpoint_for(receiver)
    WebhookEndpoint.objects.update(open_seconds=30, open_until=datetime.now(UTC) - timedelta(seconds=1), streak=5)
    assert store.take_probe(endpoint.pk, seconds=60, using="default")
    assert not store.take_probe(endpoint.pk, seconds=60, using="default")
    with travel(seconds=61):
        assert store.take_probe(endpoint.pk, seconds=60, using="default")


def test_a_paused_endpoint_loses_nothing(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    pause_endpoint(endpoint, seconds=3_600)
    fan_out(event())
    assert send() == {}
    pause_endpoint(endpoint, seconds=0)
    assert send() == {"done": 1}
    assert the_delivery().attempts == 1


def test_an_endpoint_that_fails_for_days_is_warned_of_and_then_disabled(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(404)
    for _ in range(3):
        fan_out(event())
    for hours in (0, 1, 2, 3, 40, 75):
        with travel(hours=hours):
            send()
            fan_out(event())
    endpoint.refresh_from_db()
    assert (endpoint.enabled, endpoint.disabled_reason) == (False, "failing")
    types = [each.type for each in announcements("webhook.endpoint.")]
    assert types == ["webhook.endpoint.failing", "webhook.endpoint.disabled"]


def test_deliveries_of_a_deleted_endpoint_end_quietly_and_go_after_a_month(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    endpoint = endpoint_for(receiver)
    fan_out(event())
    endpoint.delete()
    assert send() == {"dead": 1}
    assert (the_delivery().reason, the_delivery().due_at) == ("endpoint_missing", None)
    assert announcements() == []
    with travel(days=29):
        assert work.purge(using="default", limit=100) == 0
    with travel(days=31):
        assert work.purge(using="default", limit=100) == 1


def test_a_probe_of_which_no_request_came_is_given_back(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    """Its row was locked, say; but a breaker that was opened anew meanwhile stays open."""
    endpoint = endpoint_for(receiver)
    fan_out(event())
    past = datetime.now(UTC) - timedelta(seconds=1)
    WebhookEndpoint.objects.update(open_seconds=30, open_until=past, streak=5)
    scope = {"endpoint_id": endpoint.pk}
    assert list(work.scopes(10, using="default")) == [(scope, 1)]
    assert list(work.scopes(10, using="default")) == [(scope, 1)]
    work.claimed(engine.Claimer(DELIVERIES, holder="relay-1", using="default").claim(1, lease_seconds=330, scope=scope))
    fan_out(event())
    assert list(work.scopes(10, using="default")) == []
    WebhookEndpoint.objects.update(open_until=past)
    work.turns._loads.clear()
    assert list(work.scopes(10, using="default")) == [(scope, 1)]
    ahead = datetime.now(UTC) + timedelta(seconds=600)
    WebhookEndpoint.objects.update(open_until=ahead)
    assert list(work.scopes(10, using="default")) == []
    endpoint.refresh_from_db()
    assert endpoint.open_until == ahead


def test_done_deliveries_go_with_their_attempts(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    endpoint_for(receiver)
    fan_out(event())
    send()
    with travel(days=8):
        assert work.purge(using="default", limit=100) == 1
    assert attempts() == []


# --- who may write


def claim_one(work: WebhookWork) -> engine.Lease:
    ((scope, most), *_) = work.scopes(10, using="default")
    (lease,) = engine.Claimer(DELIVERIES, holder="relay-1", using="default").claim(most, lease_seconds=330, scope=scope)
    work.claimed([lease])
    return lease


def settle(work: WebhookWork, run: Any) -> dict[engine.Lease, str]:
    written = engine.settle(
        [run.settled()],
        schedule=work.settings().schedule,
        using="default",
        announce=work.announce,
        along=work.along_on("default"),
    )
    work.landed([run.lease])
    return written


def test_whoever_lost_the_lease_changes_neither_delivery_nor_endpoint_nor_attempt(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(410)
    fan_out(event())
    run = work.start(claim_one(work), using="default")
    step = run.next_step()
    assert step is not None
    run.finish(step, run.invoke(step, timeout=45))
    WebhookDelivery.objects.update(fence=99)
    assert settle(work, run) == {}
    endpoint.refresh_from_db()
    assert (endpoint.enabled, endpoint.failed_total) == (True, 0)
    (attempt,) = attempts()
    assert (attempt.finished_at, attempt.reason) == (None, "")
    assert announcements() == []


def test_nothing_is_sent_without_the_lease(receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork) -> None:
    endpoint_for(receiver)
    fan_out(event())
    run = work.start(claim_one(work), using="default")
    step = run.next_step()
    assert step is not None
    WebhookDelivery.objects.update(fence=99)
    run.finish(step, run.invoke(step, timeout=45))
    assert run.lost
    assert attempts() == []
    assert receiver.connections == 0
    work.landed([run.lease])


def test_the_attempt_is_written_before_the_request_is_made(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    """Seen from the receiver: at the moment the request comes, its row is there and unfinished."""
    endpoint_for(receiver)
    fan_out(event())
    run = work.start(claim_one(work), using="default")
    step = run.next_step()
    assert step is not None
    result = run.invoke(step, timeout=45)
    (attempt,) = attempts()
    assert (attempt.finished_at, attempt.number, attempt.fence) == (None, 1, 1)
    run.finish(step, result)
    assert set(settle(work, run).values()) == {"done"}
    assert attempts()[0].finished_at is not None


def test_a_request_whose_process_died_is_an_attempt_with_an_unknown_end_and_is_made_again(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork
) -> None:
    endpoint_for(receiver)
    fan_out(event())
    run = work.start(claim_one(work), using="default")
    step = run.next_step()
    assert step is not None
    run.invoke(step, timeout=45)
    work.landed([run.lease])  # and nobody settles it
    with travel(seconds=331):
        assert send() == {"done": 1}
    assert [(each.number, each.reason, each.finished_at is None) for each in attempts()] == [
        (1, "", True),
        (2, "delivered", False),
    ]
    first, second = receiver.requests
    assert first.header("webhook-id") == second.header("webhook-id")
    assert first.body == second.body


# --- what must not be seen


def test_secrets_that_a_server_sends_back_are_neither_stored_nor_logged(
    receiver: Server, endpoint_for: MakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = endpoint_for(
        receiver, headers={"Authorization": "Bearer s3cret-t0ken"}, url=f"{receiver.url}?key=URLKEY"
    )
    secret = secret_of(endpoint)
    receiver.behaviour = answer(500, body=f"you sent Bearer s3cret-t0ken, s3cret-t0ken and {secret}\x00".encode())
    with caplog.at_level(logging.DEBUG):
        fan_out(event())
        send()
    row = the_delivery()
    (attempt,) = attempts()
    endpoint.refresh_from_db()
    stored = " ".join(
        str(value)
        for each in (row, attempt, endpoint)
        for name, value in vars(each).items()
        if not name.startswith("_") and name not in {"url", "secret"}
    )
    for confidential in ("s3cret", secret, "URLKEY"):
        assert confidential not in stored
        assert confidential not in caplog.text
    assert attempt.response.startswith("you sent [hidden]")
    with connection.cursor() as cursor:
        cursor.execute("SELECT sealed_secrets, sealed_headers FROM django_outbox_webhook_endpoint")
        assert secret[6:20] not in str(cursor.fetchall())


def test_secrets_that_cannot_be_decrypted_cost_an_attempt_and_send_nothing(
    receiver: Server, endpoint_for: MakeEndpoint, settings: Any
) -> None:
    endpoint = endpoint_for(receiver)
    settings.OUTBOX = {"WEBHOOKS": {**settings.OUTBOX["WEBHOOKS"], "SECRET_KEYS": ["another"]}}
    fan_out(event())
    assert send() == {"waiting": 1}
    assert the_delivery().reason == "misconfigured"
    assert receiver.connections == 0
    endpoint.refresh_from_db()
    assert endpoint.failed_total == 0
    settings.OUTBOX = {"WEBHOOKS": {**settings.OUTBOX["WEBHOOKS"], "SECRET_KEYS": ["another", settings.SECRET_KEY]}}
    with travel(hours=1):
        assert send() == {"done": 1}
