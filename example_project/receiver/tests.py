# ruff: noqa: S101  asserts are what tests are made of
"""A webhook from the event to the receiver's page, over a real connection."""

from __future__ import annotations

import time
from io import StringIO
from urllib.parse import urlsplit

from django.core.management import call_command
from django.test import LiveServerTestCase, TestCase, override_settings

from django_outbox.testing import drain
from django_outbox.webhooks.signing import new_secret, sign
from example_project.accounts.registration import register
from example_project.receiver.models import ReceivedWebhook, SenderSecret


class ReceiverTest(TestCase):
    """What the receiver takes."""

    def setUp(self) -> None:
        """Know a sender."""
        self.secret = new_secret()
        SenderSecret.objects.create(value=self.secret)

    def post(self, body: bytes, *, signed: bytes | None = None) -> int:
        """Send a body with the signature of this or another one."""
        timestamp = int(time.time())
        headers = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(self.secret, "msg_1", timestamp, body if signed is None else signed),
        }
        return self.client.post("/hooks/in/", body, content_type="application/json", headers=headers).status_code

    def test_a_signed_webhook_is_kept_once(self) -> None:
        """A redelivery changes nothing."""
        body = b'{"type":"user.created","data":{"username":"amber"}}'
        assert self.post(body) == self.post(body) == 204
        assert ReceivedWebhook.objects.count() == 1
        self.assertContains(self.client.get("/hooks/"), "amber")

    def test_what_is_not_signed_is_refused(self) -> None:
        """Changed on the way, or from somebody else."""
        assert self.post(b'{"type":"user.created"}', signed=b"{}") == 401
        assert self.client.post("/hooks/in/", b"{}", content_type="application/json").status_code == 401
        assert ReceivedWebhook.objects.count() == 0


class RoundTripTest(LiveServerTestCase):
    """From a registration to the receiver's page."""

    host = "127.0.0.1"

    def test_a_registration_arrives(self) -> None:
        """Through fan-out, signature, connection and verification."""
        port = urlsplit(self.live_server_url).port
        webhooks = {"ALLOW_HTTP": True, "ALLOW_NETWORKS": ["127.0.0.1"], "ALLOW_PORTS": [port]}
        with override_settings(OUTBOX={"BUILTIN_HANDLERS": ["webhook-fanout"], "WEBHOOKS": webhooks}):
            call_command("connect_receiver", url=f"{self.live_server_url}/hooks/in/", stdout=StringIO())
            register(username="amber", email="amber@example.com")
            drain()
            assert drain(queues=["webhooks"]) == {"done": 2}
        assert sorted(ReceivedWebhook.objects.values_list("type", flat=True)) == ["user.created", "webhook.test"]
