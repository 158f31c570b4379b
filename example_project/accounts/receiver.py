"""The built-in receiver of webhooks: what a customer's server would do."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_outbox.errors import InvalidSignature
from django_outbox.models import WebhookEndpoint
from django_outbox.webhooks import change_endpoint, create_endpoint, verify
from example_project.accounts.models import ReceivedWebhook, ReceiverSecret, Switch

SWITCH = "receiver"
DESCRIPTION = "the built-in receiver"


@csrf_exempt
@require_POST
def receive(request: HttpRequest) -> HttpResponse:
    """
    Take a webhook whose signature is right, once.

    Delivery is at least once, so a receiver notes the id and does its work with it in one
    transaction: a repeat finds the id.
    """
    secrets = list(ReceiverSecret.objects.values_list("secret", flat=True))
    try:
        document = verify(secrets, request.headers, request.body)
    except InvalidSignature:
        return HttpResponse("unknown signature", status=401, content_type="text/plain")
    if Switch.fails(SWITCH):
        return HttpResponse("down for repairs", status=503, content_type="text/plain")
    with transaction.atomic():
        received, new = ReceivedWebhook.objects.get_or_create(
            webhook_id=document["id"], defaults={"type": document["type"]}
        )
        if not new:
            ReceivedWebhook.objects.filter(pk=received.pk).update(times=F("times") + 1)
    return HttpResponse(status=204)


def subscribe(address: str) -> None:
    """Have every event sent to the receiver at this address, such as ``http://127.0.0.1:8000``."""
    url = f"{address}{reverse('receiver')}"
    endpoint = WebhookEndpoint.objects.filter(description=DESCRIPTION).first()
    if endpoint is None:
        endpoint, secret = create_endpoint(url, description=DESCRIPTION)
        ReceiverSecret.objects.create(endpoint_id=endpoint.pk, secret=secret)
    elif endpoint.url != url:
        change_endpoint(endpoint, url=url)
