"""Anymail's backends, their HTTP session replaced by one that answers as a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from anymail.backends.resend import EmailBackend as ResendBackend
from anymail.exceptions import AnymailCancelSend
from anymail.message import AnymailMessage
from anymail.signals import post_send, pre_send

from django_outbox.mail import EmailWork, enqueue_email
from django_outbox.models import OutboxEmail
from django_outbox.testing import drain
from tests.mail.conftest import message

pytestmark = pytest.mark.django_db


class Provider(requests.Session):
    """What the provider answers, and what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.answers: list[tuple[int, dict[str, Any], dict[str, str]] | Exception] = []

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        self.asked.append(json.loads(options["data"]))
        answer = self.answers.pop(0) if self.answers else (200, {"id": f"provider-{len(self.asked)}"}, {})
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.status_code, body, headers = answer
        response._content, response.reason = json.dumps(body).encode(), "reason"
        response.headers.update(headers)
        return response


@pytest.fixture
def provider(settings: Any, no_test_outbox: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    session = Provider()
    settings.OUTBOX = {"EMAIL": {"BACKEND": "anymail.backends.resend.EmailBackend"}}
    settings.ANYMAIL = {"RESEND_API_KEY": "key"}
    monkeypatch.setattr("anymail.backends.base_requests.AnymailRequestsBackend.create_session", lambda self: session)
    yield session
    session.close()


def test_anymails_attributes_reach_the_provider_and_its_id_comes_back(provider: Provider) -> None:
    made = AnymailMessage(
        "Hi", "Text", "shop@example.com", ["ann@example.com"], tags=["welcome"], metadata={"user": "1"}
    )
    enqueue_email(made)
    assert drain() == {"done": 1}
    (asked,) = provider.asked
    assert "welcome" in json.dumps(asked)
    # An API makes a Message-ID of its own, and some refuse another.
    assert "message-id" not in json.dumps(asked).lower()
    assert OutboxEmail.objects.get().provider_message_id == "provider-1"


class Ours(ResendBackend):  # type: ignore[misc]
    """A project's own subclass of an Anymail backend."""


def test_a_subclass_of_anymails_is_known_for_one(provider: Provider, settings: Any) -> None:
    settings.OUTBOX = {"EMAIL": {"BACKEND": f"{__name__}.Ours"}}
    enqueue_email(message())
    drain()
    assert "message-id" not in json.dumps(provider.asked).lower()


def test_a_message_id_of_ones_own_is_passed_on(provider: Provider) -> None:
    enqueue_email(message(headers={"Message-ID": "<mine@example.com>"}))
    drain()
    assert "<mine@example.com>" in json.dumps(provider.asked)


@pytest.mark.parametrize(
    ("status", "outcome", "kind"),
    [
        (422, "failed", "rejected"),
        (400, "failed", "rejected"),
        (500, "waiting", "temporary"),
        (409, "waiting", "temporary"),
    ],
)
def test_a_refusal_charges_its_own_message(provider: Provider, status: int, outcome: str, kind: str) -> None:
    provider.answers = [(status, {"message": "no"}, {})]
    enqueue_email(message(1))
    enqueue_email(message(2))
    drain(queues=["email"])
    first, second = OutboxEmail.objects.order_by("created_at", "id")
    assert (first.status, first.failure_kind, first.last_code) == (outcome, kind, str(status))
    assert second.status == "done"


@pytest.mark.parametrize(("status", "seconds"), [(401, 5), (403, 5), (429, 90)])
def test_what_is_wrong_with_the_account_charges_nobody(
    provider: Provider, work: EmailWork, status: int, seconds: int
) -> None:
    provider.answers = [(status, {"message": "no"}, {"Retry-After": "90"})]
    enqueue_email(message(1))
    enqueue_email(message(2))
    assert drain() == {"released": 2}
    assert {email.attempts for email in OutboxEmail.objects.all()} == {0}
    assert round(work.backends.paused_seconds("default")) == seconds
    assert len(provider.asked) == 1


@pytest.mark.parametrize(
    ("error", "maybe_sent"), [(requests.ConnectTimeout("no"), False), (requests.ReadTimeout("no"), True)]
)
def test_a_request_without_an_answer_may_have_been_heard(
    provider: Provider, error: Exception, maybe_sent: bool
) -> None:
    provider.answers = [error]
    enqueue_email(message())
    assert drain() == {"waiting": 1}
    assert OutboxEmail.objects.get().maybe_sent is maybe_sent


def test_a_receiver_that_fails_after_the_provider_accepted_sends_nothing_twice(provider: Provider) -> None:
    def fails(sender: Any, **_: Any) -> None:
        raise RuntimeError("boom")

    post_send.connect(fails)
    try:
        enqueue_email(message())
        assert drain() == {"done": 1}
    finally:
        post_send.disconnect(fails)
    assert OutboxEmail.objects.get().provider_message_id == "provider-1"
    assert len(provider.asked) == 1


def test_a_receiver_that_cancels_ends_the_email(provider: Provider) -> None:
    def cancels(sender: Any, **_: Any) -> None:
        raise AnymailCancelSend

    pre_send.connect(cancels)
    try:
        enqueue_email(message())
        drain(queues=["email"])
    finally:
        pre_send.disconnect(cancels)
    assert OutboxEmail.objects.get().failure_kind == "cancelled"
    assert provider.asked == []
