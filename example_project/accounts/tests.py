# ruff: noqa: S101  asserts are what tests are made of
"""How a project tests its events: plain ``TestCase``s, no relay, no thread, no sleep."""

from __future__ import annotations

import re

from django.contrib.auth.models import User
from django.core import mail
from django.db import transaction
from django.test import TestCase, override_settings

from django_outbox.models import AuditEntry, Notification, OutboxEmail, OutboxEvent, OutboxTask, WebhookDelivery
from django_outbox.testing import assert_emitted, drain, travel
from example_project.accounts.models import ConfirmedEmail, Switch, Token
from example_project.accounts.registration import change_password, register
from example_project.accounts.tasks import draw_avatar
from example_project.receiver.subscription import subscribe


class RegistrationTest(TestCase):
    """A registration and what follows from it."""

    def test_the_form_creates_a_user_and_emits_in_one_go(self) -> None:
        """Nothing is sent while the visitor waits."""
        form = {"username": "amber", "email": "amber@example.com", "password1": "s3a-Breeze", "password2": "s3a-Breeze"}
        response = self.client.post("/register/", form, headers={"X-Request-ID": "r-1"})
        self.assertRedirects(response, "/")
        event = assert_emitted("user.created", username="amber")
        assert event.request_id == "r-1"
        assert mail.outbox == []

    def test_a_taken_name_is_an_error_of_the_form_and_no_event(self) -> None:
        """The second one leaves nothing."""
        register(username="amber", email="amber@example.com")
        form = {"username": "amber", "email": "b@example.com", "password1": "s3a-Breeze", "password2": "s3a-Breeze"}
        self.assertContains(self.client.post("/register/", form), "already exists")
        assert OutboxEvent.objects.count() == 1

    def test_everything_that_follows_is_there_once(self) -> None:
        """An event for four handlers: a mail, an audit entry, a notification, a webhook for the one endpoint."""
        subscribe("http://127.0.0.1:8000/hooks/in/")
        user = register(username="amber", email="amber@example.com")
        drain()
        assert [(message.to, message.subject) for message in mail.outbox] == [(["amber@example.com"], "Welcome")]
        assert AuditEntry.objects.count() == 1
        assert Notification.objects.get().recipient == str(user.pk)
        assert WebhookDelivery.objects.get().event_type == "user.created"

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


class PasswordTest(TestCase):
    """A change of password, and a service that is down."""

    def setUp(self) -> None:
        """Have a user whose registration is delivered."""
        self.user = register(username="amber", email="amber@example.com")
        drain()
        mail.outbox.clear()

    @override_settings(TOKEN_SERVICE_REFUSALS=2)
    def test_only_the_handler_that_failed_runs_again(self) -> None:
        """The token service refuses twice; the mail goes out once, at once."""
        change_password(self.user, "s3a-Breeze")
        drain()
        assert [message.subject for message in mail.outbox] == ["Your password was changed"]
        for minutes in (1, 2):
            assert Token.objects.filter(revoked=False).count() == 2
            with travel(minutes=minutes):
                drain()
        assert Token.objects.filter(revoked=False).count() == 0
        event = OutboxEvent.objects.get(type="user.password_changed")
        assert (event.status, event.attempts) == ("done", 3)
        assert len(mail.outbox) == 1

    def test_operators_are_told_when_it_stays_down(self) -> None:
        """The event dies, and its death is an event that the built-in handler turns into a mail."""
        Switch.objects.create(name="token-service", failing=True)
        change_password(self.user, "s3a-Breeze")
        for minutes in range(3):
            with travel(minutes=minutes):
                drain()
        assert OutboxEvent.objects.get(type="user.password_changed").status == "dead"
        assert mail.outbox[-1].to == ["operators@example.com"]
        assert "user.password_changed (revoke-tokens)" in mail.outbox[-1].subject


class FrontPageTest(TestCase):
    """The page and its buttons."""

    def test_the_page_is_served_under_a_strict_policy_and_shows_what_follows(self) -> None:
        """The state is what the page fetches."""
        page = self.client.get("/")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert self.client.post("/act/password/").status_code == 409
        assert self.client.post("/act/register/").status_code == 200
        assert self.client.post("/act/password/").status_code == 200
        assert self.client.post("/act/token-service/", {"failing": "yes"}).status_code == 200
        assert self.client.post("/act/nothing/").status_code == 404
        drain()
        state = self.client.get("/state/").json()
        assert [row["what"] for row in state["events"]] == ["user.password_changed", "user.created"]
        assert [row["status"] for row in state["events"]] == ["waiting", "done"]
        assert state["switches"] == {"token-service": True, "receiver": False}
