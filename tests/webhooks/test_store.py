"""Statements about endpoints: several sessions at once, and what they cost on a large table."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import Count

from django_outbox import lease as engine
from django_outbox.models import OutboxEvent, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.testing import drain
from django_outbox.webhooks import WebhookWork, create_endpoint, disable_endpoint, fan_out, rotate_secret, store
from django_outbox.webhooks.box import secrets_in_force, unseal
from django_outbox.webhooks.health import End
from django_outbox.webhooks.turns import endpoint_of
from tests.concurrency.helpers import together
from tests.webhooks.conftest import MakeEndpoint, secret_of
from tests.webhooks.servers import Server, answer
from tests.webhooks.test_deliver import event

committed = pytest.mark.django_db(transaction=True)


def endpoints(count: int) -> list[WebhookEndpoint]:
    return [create_endpoint("https://hooks.example.com/in")[0] for _ in range(count)]


@committed
def test_relays_that_fan_out_one_event_at_once_write_each_delivery_once() -> None:
    """Four sessions, started together by a barrier."""
    endpoints(5)
    placed = event()
    written = together(*[lambda: fan_out(placed)] * 4)
    assert sum(written) == 5
    assert WebhookDelivery.objects.count() == 5


@committed
def test_settles_that_meet_at_the_same_endpoints_lose_no_count_and_do_not_deadlock(work: WebhookWork) -> None:
    """Each session settles for all endpoints, named in its own order, in a transaction of its own."""
    ids = [endpoint.pk for endpoint in endpoints(4)]

    def settle(order: list[UUID]) -> None:
        for _ in range(10):
            with transaction.atomic():
                work._keep_health({id_: [End(ok=True, seconds=0.1)] for id_ in order}, "default")

    together(*[lambda order=order: settle(order) for order in (ids, ids[::-1], ids[2:] + ids[:2])])
    assert set(WebhookEndpoint.objects.values_list("delivered_total", flat=True)) == {30}


@committed
def test_secrets_made_at_once_are_all_kept() -> None:
    (endpoint,) = endpoints(1)
    first = secret_of(endpoint)
    made = together(*[lambda: rotate_secret(endpoint)] * 3)
    endpoint.refresh_from_db()
    assert {entry["secret"] for entry in unseal(endpoint.sealed_secrets)} == {first, *made}


@pytest.mark.django_db
def test_no_more_than_three_former_secrets_are_kept_and_none_beyond_its_time() -> None:
    (endpoint,) = endpoints(1)
    secrets = [secret_of(endpoint), *(rotate_secret(endpoint) for _ in range(5))]
    now = engine.database_now("default").timestamp()
    assert secrets_in_force(endpoint.sealed_secrets, now=now) == secrets[:-5:-1]
    assert secrets_in_force(endpoint.sealed_secrets, now=now + 90_000) == secrets[-1:]
    last = rotate_secret(endpoint, overlap_seconds=0)
    assert secrets_in_force(endpoint.sealed_secrets, now=now) == [last]
    with pytest.raises(ValueError, match="overlap_seconds"):
        rotate_secret(endpoint, overlap_seconds=604_801)
    with pytest.raises(ValueError, match="webhook"):
        rotate_secret(endpoint, secret="whsec_short")


@pytest.mark.django_db
@pytest.mark.parametrize("page", [3, 64])
def test_every_endpoint_with_work_gets_its_turn_from_the_one_after_the_last(
    work: WebhookWork, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("django_outbox.webhooks.turns._PAGE", page)
    made = endpoints(8)
    for _ in range(3):
        fan_out(event())
    order: list[UUID] = []
    for _ in range(8):
        scope, most = next(iter(work.scopes(100, using="default")))
        assert most == 1
        order.append(scope["endpoint_id"])
    ids = sorted(endpoint.pk for endpoint in made)
    assert order == ids
    assert [scope["endpoint_id"] for scope, _ in work.scopes(100, using="default")] == ids
    work.turns._last = ids[4]
    assert [scope["endpoint_id"] for scope, _ in work.scopes(100, using="default")] == [*ids[5:], *ids[:5]]


@pytest.mark.django_db
def test_big_bodies_of_some_endpoints_do_not_keep_the_others_waiting(work: WebhookWork) -> None:
    """A claim is full with what three endpoints have, whose rows have landed by the next one."""
    made = endpoints(12)
    WebhookEndpoint.objects.update(last_success_at=made[0].created_at)
    for _ in range(20):
        fan_out(event())
    WebhookDelivery.objects.update(body="x" * 1_000_000)
    claimer = engine.Claimer(store.DELIVERIES, holder="relay-1", using="default")
    served: set[UUID] = set()
    for _ in range(6):
        leases = claimer.claim_scopes(work.scopes(200, using="default"), 200, lease_seconds=330)
        assert claimer.more
        served.update(endpoint_of(lease) for lease in leases)
        work.claimed(leases)
        work.landed(leases)
    assert served == {endpoint.pk for endpoint in made}


@pytest.mark.django_db
@pytest.mark.postgres
def test_turns_and_claims_read_no_whole_table() -> None:
    """Beside 20,000 rows of one endpoint, due and not, analysed and not: a plan may not depend on them."""
    (busy, other) = endpoints(2)
    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append((sql, params))
        return execute(sql, params, many, context)

    for analyse in (False, True):
        with connection.cursor() as cursor:
            for status, due in (("pending", "NULL"), ("waiting", "now() + interval '1 hour'")):
                cursor.execute(
                    f"""INSERT INTO django_outbox_webhook_delivery
                        (id, event_id, endpoint_id, event_type, body, created_at, status, due_at)
                        SELECT gen_random_uuid(), gen_random_uuid(), %s, 'a.b', '{{}}', now(), '{status}', {due}
                        FROM generate_series(1, 10000)""",
                    [busy.pk],
                )
            if analyse:
                cursor.execute("ANALYZE django_outbox_webhook_delivery")
        claimer = engine.Claimer(store.DELIVERIES, holder="relay-1", using="default")
        with connection.execute_wrapper(note):
            store.turns(UUID(int=0), limit=64, using="default")
            claimer.claim(4, lease_seconds=330, scope={"endpoint_id": other.pk})
            scopes = [({"endpoint_id": endpoint.pk}, 4) for endpoint in (busy, other)]
            assert len(claimer.claim_scopes(scopes, 100, lease_seconds=330)) == 4
        for sql, params in statements:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
                plan = json.dumps(cursor.fetchone()[0])
            for scan in plan.split('"Node Type": ')[1:]:
                assert not (scan.startswith('"Seq Scan"') and "webhook_delivery" in scan.split("}")[0]), sql
        statements.clear()


@pytest.mark.django_db
def test_a_huge_answer_is_delivered_once_and_only_its_beginning_kept(
    receiver: Server, endpoint_for: MakeEndpoint
) -> None:
    """50 MB, then a chunked body of NULs without end."""
    endpoint_for(receiver)

    def endless(sock: Any, request: Any) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            sock.sendall(b"1000\r\n" + b"\x00" * 4_096 + b"\r\n")

    for behaviour in (answer(200, body=b"a" * 50_000_000), endless):
        receiver.behaviour = behaviour
        fan_out(event())
        assert drain(queues=("webhooks",)) == {"done": 1}
    responses = list(WebhookAttempt.objects.order_by("id").values_list("response", flat=True))
    assert [len(each) for each in responses] == [16_384, 16_384]
    assert "\x00" not in responses[1]
    assert len(receiver.requests) == 2


@pytest.mark.django_db
def test_the_commands_show_and_retry_the_queue(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint = endpoint_for(receiver)
    disable_endpoint(endpoint)
    fan_out(event())
    WebhookEndpoint.objects.update(enabled=True, disabled_at=None)
    said = StringIO()
    call_command("outbox_status", "--json", stdout=said)
    assert '"webhooks"' in said.getvalue()
    call_command("outbox_retry", "--queue", "webhooks", "--status", "dead", stdout=StringIO())
    assert drain(queues=("webhooks",)) == {"done": 1}
    call_command("outbox_purge", "--queue", "webhooks", "--older-than", "0s", stdout=StringIO())
    assert not WebhookDelivery.objects.exists()
    assert not WebhookAttempt.objects.exists()


@pytest.mark.django_db
def test_a_drain_sends_no_webhooks_unless_they_are_named(receiver: Server, endpoint_for: MakeEndpoint) -> None:
    endpoint_for(receiver)
    fan_out(event())
    assert drain() == {}
    assert receiver.connections == 0
    assert WebhookDelivery.objects.aggregate(rows=Count("id"))["rows"] == 1
    assert not OutboxEvent.objects.exists()
