"""Take webhooks, and show them."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from django_outbox import InvalidSignature
from django_outbox.webhooks.signing import verify
from example_project.accounts.models import Switch
from example_project.receiver.models import ReceivedWebhook, SenderSecret

SWITCH = "receiver"


# The signature says who sent it; a CSRF token is for browsers.
@csrf_exempt
@require_POST
def receive(request: HttpRequest) -> HttpResponse:
    """Verify the raw bytes, remember the id, answer soon; slow work would follow from the row."""
    secrets = list(SenderSecret.objects.order_by("-id").values_list("value", flat=True)[:4])
    try:
        body = verify(secrets, request.headers, request.body)
    except InvalidSignature as error:
        return HttpResponse(str(error), status=401, content_type="text/plain")
    if Switch.fails(SWITCH):
        return HttpResponse("down for repairs", status=503, content_type="text/plain")
    ReceivedWebhook.objects.get_or_create(
        webhook_id=request.headers["webhook-id"], defaults={"type": body["type"], "body": body}
    )
    return HttpResponse(status=204)


@require_GET
def received(request: HttpRequest) -> HttpResponse:
    """Show what arrived last."""
    rows = ReceivedWebhook.objects.order_by("-id")[:50]
    return render(request, "receiver/received.html", {"rows": rows, "secrets": SenderSecret.objects.count()})
