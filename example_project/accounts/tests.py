# ruff: noqa: S101  asserts are what tests are made of
"""How a project tests its events: plain ``TestCase``s, no relay, no thread, no sleep."""

from __future__ import annotations

import re

from django.contrib.auth.models import User
from django.core import mail
from django.db import transaction
from django.test import TestCase

from django_outbox.models import OutboxEmail, OutboxEvent, OutboxTask
from django_outbox.testing import assert_emitted, drain, travel
from example_project.accounts.models import AuditRecord, ConfirmedEmail, CrmContact
from example_project.accounts.registration import register
from example_project.accounts.tasks import draw_avatar


class RegistrationTest(TestCase):
    """A registration and what follows from it."""

    def test_the_form_creates_a_user_and_emits_in_one_go(self) -> None:
        """Nothing is sent while the visitor waits."""
        form = {"username": "amber", "email": "amber@example.com", "password1": "s3a-Breeze", "password2": "s3a-Breeze"}
        response = self.client.post("/", form, headers={"X-Request-ID": "r-1"})
        self.assertRedirects(response, "/registered/")
        event = assert_emitted("user.created", username="amber")
        assert event.request_id == "r-1"
        assert mail.outbox == []

    def test_a_taken_name_is_an_error_of_the_form_and_no_event(self) -> None:
        """The second one leaves nothing."""
        register(username="amber", email="amber@example.com")
        form = {"username": "amber", "email": "b@example.com", "password1": "s3a-Breeze", "password2": "s3a-Breeze"}
        self.assertContains(self.client.post("/", form), "already exists")
        assert OutboxEvent.objects.count() == 1

    def test_only_the_handler_that_failed_runs_again(self) -> None:
        """Three deliveries, of which the CRM refuses its own twice."""
        register(username="amber", email="amber@example.com")
        assert drain() == {"waiting": 1, "done": 2}  # the event waits for its CRM; the mail is out, the avatar drawn
        with travel(minutes=1):
            assert drain() == {"waiting": 1}
        with travel(minutes=2):
            assert drain() == {"done": 1}
        assert CrmContact.objects.count() == 1
        assert AuditRecord.objects.count() == 1
        assert [message.to for message in mail.outbox] == [["amber@example.com"]]

    def test_the_link_in_the_welcome_mail_confirms_the_address(self) -> None:
        """And a forged or an old one does not."""
        user = register(username="amber", email="amber@example.com")
        drain()
        link = re.findall(r"http://[^/]+(/confirm/\S+)", str(mail.outbox[0].body))[0]
        self.assertContains(self.client.get(link), "confirmed")
        assert ConfirmedEmail.objects.get().user == user
        assert self.client.get(link[:-2] + "x/").status_code == 400

    def test_a_link_that_has_expired_is_not_sent(self) -> None:
        """The mail server was down for longer than the link is good for."""
        register(username="amber", email="amber@example.com")
        drain(queues=["events"])
        with travel(hours=25):
            drain(queues=["email"])
        assert mail.outbox == []
        assert OutboxEmail.objects.get().failure_kind == "expired"

    def test_an_avatar_is_drawn_and_can_be_asked_for(self) -> None:
        """The task's result is the picture."""
        register(username="amber", email="amber@example.com")
        drain(queues=["tasks"])
        result = draw_avatar.get_result(str(OutboxTask.objects.get().pk))
        assert ">A</text>" in str(result.return_value)

    def test_a_rolled_back_registration_leaves_nothing(self) -> None:
        """The event is one of the rows that go."""
        with transaction.atomic():
            register(username="nettle", email="nettle@example.com")
            transaction.set_rollback(True)
        drain()
        assert User.objects.count() == 0
        assert mail.outbox == []
