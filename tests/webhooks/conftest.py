"""What the tests of webhook deliveries share: a receiver, an endpoint for it, settings that let it be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from django_outbox.delivery import Work
from django_outbox.events import registry
from django_outbox.models import WebhookEndpoint
from django_outbox.relay.queues import WORK
from django_outbox.webhooks import WebhookWork, create_endpoint
from django_outbox.webhooks.box import unseal
from tests.webhooks.servers import Server

MakeEndpoint = Callable[..., WebhookEndpoint]


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch) -> WebhookWork:
    """Return the queue as this test's relays and drains see it, new for each test."""
    fresh = WebhookWork(owed_to=registry.deliveries)
    monkeypatch.setitem(cast("dict[str, Work]", WORK), "webhooks", fresh)
    return fresh


def prove(endpoint: WebhookEndpoint) -> None:
    """Have an endpoint answered once, so that it is not one of those that have to prove themselves."""
    WebhookEndpoint.objects.filter(pk=endpoint.pk).update(last_success_at=endpoint.created_at)


def secret_of(endpoint: WebhookEndpoint) -> str:
    """Return the newest secret of an endpoint."""
    return str(unseal(endpoint.sealed_secrets)[0]["secret"])


@pytest.fixture
def receiver() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def open_to() -> Callable[..., dict[str, Any]]:
    """Return a function that gives the settings under which these servers may be reached."""

    def allow(*servers: Server, **webhooks: Any) -> dict[str, Any]:
        return {
            "WEBHOOKS": {
                "ALLOW_HTTP": True,
                "ALLOW_NETWORKS": ["127.0.0.0/8"],
                "ALLOW_PORTS": [443, *(server.port for server in servers)],
                **webhooks,
            }
        }

    return allow


@pytest.fixture
def endpoint_for(settings: Any, open_to: Callable[..., dict[str, Any]]) -> MakeEndpoint:
    """Return a function that makes an endpoint for a server, which may then be reached."""
    servers: list[Server] = []

    def make(server: Server, *, webhooks: dict[str, Any] | None = None, **options: Any) -> WebhookEndpoint:
        servers.append(server)
        settings.OUTBOX = open_to(*servers, **(webhooks or {}))
        endpoint, _ = create_endpoint(options.pop("url", server.url), **options)
        return endpoint

    return make
