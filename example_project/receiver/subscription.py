"""What the owner of the receiver does once: ask for the events, and keep the secret that is shown."""

from __future__ import annotations

from typing import Final

from django_outbox.models import WebhookEndpoint
from django_outbox.webhooks import change_endpoint, create_endpoint
from example_project.receiver.models import SenderSecret

DESCRIPTION: Final = "the receiver page"


def subscribe(url: str) -> None:
    """Have the users' events sent to this URL of the receiver, which keeps the secret; called again, move it there."""
    endpoint = WebhookEndpoint.objects.filter(description=DESCRIPTION).first()
    if endpoint is None:
        endpoint, secret = create_endpoint(url, event_types=["user.*"], description=DESCRIPTION)
        SenderSecret.objects.create(value=secret)
    elif endpoint.url != url:
        change_endpoint(endpoint, url=url)
