"""The webhook queue in a running relay: committed rows, real threads, real local servers."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from django.db import transaction

from django_outbox import emit_event
from django_outbox import lease as engine
from django_outbox.handlers import register_builtin_handlers
from django_outbox.models import OutboxEvent, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.webhooks import WebhookWork, store
from tests.concurrency.helpers import ended, eventually, running_relay
from tests.conftest import RawConnect, StartPython
from tests.webhooks.conftest import MakeEndpoint, prove
from tests.webhooks.servers import Request, Server, answer, silent_port

pytestmark = pytest.mark.django_db(transaction=True)


def owe(endpoint_id: Any, count: int) -> None:
    """Queue deliveries for one endpoint."""
    with transaction.atomic():
        for _ in range(count):
            store.insert_deliveries(
                event_id=engine.new_id(),
                event_type="order.placed",
                patterns=(),
                organization_id="",
                body="{}",
                quiet=False,
                using="default",
                endpoint_id=endpoint_id,
            )


def test_an_event_becomes_a_delivery_and_arrives(receiver: Server, endpoint_for: MakeEndpoint, settings: Any) -> None:
    endpoint_for(receiver, event_types=["order.*"])
    settings.OUTBOX = {**settings.OUTBOX, "BUILTIN_HANDLERS": ["webhook-fanout"]}
    register_builtin_handlers()
    with running_relay() as running:
        with transaction.atomic():
            id_ = emit_event("order.placed", {"total": 1.0}, organization_id="acme")
            emit_event("user.created")
        (request,) = receiver.wait_for(1)
        running.wait_for(done=3)
    assert json.loads(request.body)["data"] == {"total": 1.0}
    assert request.header("webhook-id") == str(id_)
    assert list(OutboxEvent.objects.get(pk=id_).deliveries) == ["webhook-fanout"]
    assert len(receiver.requests) == 1


def test_no_more_requests_are_under_way_at_an_endpoint_than_its_cap(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    """The receiver holds every request until the third has been counted, and notes how many it holds at once."""
    endpoint = endpoint_for(receiver, webhooks={"ENDPOINT_CONCURRENCY": 3})
    lock, held, most = threading.Lock(), 0, 0
    full = threading.Event()

    def behave(connection: socket.socket, request: Request) -> None:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
            if held == 3:
                full.set()
        full.wait(10)
        with lock:
            held -= 1
        answer(200)(connection, request)

    receiver.behaviour = behave
    prove(endpoint)
    owe(endpoint.pk, 12)
    with running_relay(threads=16) as running:
        running.wait_for(done=12)
    assert most == 3
    assert WebhookAttempt.objects.count() == 12


def test_a_row_that_lands_frees_its_place_however_often_was_looked_in_vain(
    receiver: Server, endpoint_for: MakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks in vain put off the answer to a wake-up, here for ever; the receiver holds the first request till then."""
    monkeypatch.setattr("django_outbox.relay.loop.EMPTY_FLOOR_SECONDS", 3_600.0)
    endpoint = endpoint_for(receiver, webhooks={"ENDPOINT_CONCURRENCY": 1})
    looked = threading.Event()

    def behave(connection: socket.socket, request: Request) -> None:
        looked.wait(10)
        answer(200)(connection, request)

    receiver.behaviour = behave
    prove(endpoint)
    owe(endpoint.pk, 2)
    with running_relay() as running:
        receiver.wait_for(1)
        (lane,) = [lane for lane in running.relay.lanes if lane.work.queue.name == "webhooks"]

        def put_off() -> bool:
            running.relay._wake("webhooks")
            return lane.floor_at > time.monotonic() + 60

        eventually(put_off)
        looked.set()
        running.wait_for(done=2)


def test_a_silent_endpoint_does_not_keep_its_neighbours_waiting(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork, settings: Any
) -> None:
    healthy, stalled = endpoint_for(receiver), endpoint_for(receiver)
    with silent_port() as port:
        WebhookEndpoint.objects.filter(pk=stalled.pk).update(url=f"http://127.0.0.1:{port}/")
        webhooks = settings.OUTBOX["WEBHOOKS"]
        settings.OUTBOX = {
            "WEBHOOKS": {**webhooks, "ALLOW_PORTS": [*webhooks["ALLOW_PORTS"], port], "TIMEOUT_SECONDS": 2.0}
        }
        owe(stalled.pk, 200)
        with running_relay(threads=8) as running:
            eventually(lambda: len(work.turns._loads) == 1)
            for number in range(10):
                began = time.monotonic()
                owe(healthy.pk, 1)
                receiver.wait_for(number + 1)
                assert time.monotonic() - began < 1
            assert len(work.turns._loads[stalled.pk].started) == 1
            running.wait_for(done=10)


def test_silent_endpoints_together_leave_threads_to_those_that_answer(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork, settings: Any
) -> None:
    """Twelve endpoints that were quick and are silent now, with work for all threads many times over."""
    healthy, *stalled = [endpoint_for(receiver) for _ in range(13)]
    for endpoint in (healthy, *stalled):
        prove(endpoint)
    with silent_port() as port:
        silent = WebhookEndpoint.objects.exclude(pk=healthy.pk)
        # What a relay learns of them in its first seconds.
        silent.update(url=f"http://127.0.0.1:{port}/", streak=3)
        webhooks = settings.OUTBOX["WEBHOOKS"]
        settings.OUTBOX = {
            "WEBHOOKS": {**webhooks, "ALLOW_PORTS": [*webhooks["ALLOW_PORTS"], port], "TIMEOUT_SECONDS": 2.0}
        }
        for endpoint in stalled:
            owe(endpoint.pk, 10)
        with running_relay(threads=8) as running:
            eventually(lambda: len(work.turns._loads) == 4)
            for number in range(5):
                began = time.monotonic()
                owe(healthy.pk, 1)
                receiver.wait_for(number + 1)
                assert time.monotonic() - began < 1
            running.wait_for(done=5)


def test_what_a_pause_holds_back_is_sent_when_it_ends(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(503, "Retry-After: 1")
    owe(endpoint.pk, 1)
    with running_relay() as running:
        running.wait_for(waiting=1)
        receiver.behaviour = answer(200)
        owe(endpoint.pk, 1)
        running.wait_for(done=1, seconds=20)
    requests = receiver.wait_for(2)
    assert len(requests) == 2
    assert WebhookDelivery.objects.filter(status="done", attempts=1).count() == 1


def test_what_a_killed_relay_held_is_sent_when_its_lease_is_over_and_not_at_the_poll(
    receiver: Server, endpoint_for: MakeEndpoint, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_outbox.webhooks.store.HELD_SECONDS", 0.2)
    endpoint = endpoint_for(receiver)
    settings.OUTBOX = {**settings.OUTBOX, "POLL_SECONDS": 60}
    owe(endpoint.pk, 1)
    (lease,) = engine.Claimer(store.DELIVERIES, holder="killed", using="default").claim(1, lease_seconds=2)
    with running_relay() as running:
        (request,) = receiver.wait_for(1)
        running.wait_for(done=1)
    assert not lease.current()
    assert request.header("X-Outbox-Attempt") == "2"


@pytest.mark.postgres
def test_what_somebody_had_locked_at_the_look_is_sent_soon_and_not_at_the_poll(
    receiver: Server, endpoint_for: MakeEndpoint, settings: Any, raw_connect: RawConnect
) -> None:
    endpoint = endpoint_for(receiver)
    settings.OUTBOX = {**settings.OUTBOX, "POLL_SECONDS": 60}
    owe(endpoint.pk, 1)
    session = raw_connect()
    session.execute("BEGIN")
    session.execute("SELECT FROM django_outbox_webhook_delivery FOR UPDATE")
    with running_relay() as running:
        (lane,) = [lane for lane in running.relay.lanes if lane.work.queue.name == "webhooks"]
        eventually(lambda: lane.look_at > time.monotonic() + 1)  # it found nothing to claim, and sleeps
        session.execute("COMMIT")
        running.wait_for(done=1)


def test_an_idle_relay_looks_for_webhooks_no_more_often_than_it_must(
    receiver: Server, endpoint_for: MakeEndpoint, work: WebhookWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all the work at its cap or paused, the claim loop must not spin."""
    endpoint = endpoint_for(receiver)
    release = threading.Event()

    def behave(connection: socket.socket, request: Request) -> None:
        release.wait(10)
        answer(200)(connection, request)

    receiver.behaviour = behave
    prove(endpoint)
    owe(endpoint.pk, 50)
    looks = 0
    turns = store.turns

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return turns(*args, **options)

    monkeypatch.setattr(store, "turns", counted)
    with running_relay(threads=8) as running:
        receiver.wait_for(4)
        before = looks
        threading.Event().wait(0.5)
        # A round is one statement or two; what settles and wakes meanwhile causes a few.
        assert looks - before <= 10
        release.set()
        running.wait_for(done=50)


def test_a_delivery_whose_process_died_before_is_made_in_a_child_process(
    receiver: Server, endpoint_for: MakeEndpoint, start_python: StartPython
) -> None:
    """What it means for attempt and endpoint comes back over the pipe, and is written with the settle."""
    endpoint = endpoint_for(receiver)
    receiver.behaviour = answer(429, "Retry-After: 600")
    owe(endpoint.pk, 1)
    WebhookDelivery.objects.update(lost_leases=1)
    process = start_python(
        *("-m", "django", "run_outbox", "--drain", "--queue", "webhooks"),
        DJANGO_SETTINGS_MODULE="tests.webhooks.field_settings",
        TEST_WEBHOOK_PORTS=str(receiver.port),
    )
    code, said = ended(process, seconds=60)
    assert code == 0, said
    row = WebhookDelivery.objects.get()
    assert (row.status, row.reason, row.lost_leases) == ("waiting", "http_429", 0), said
    attempt = WebhookAttempt.objects.get()
    assert (attempt.http_status, attempt.finished_at is None) == (429, False)
    endpoint.refresh_from_db()
    assert (endpoint.failed_total, endpoint.paused_until is None) == (1, False)
