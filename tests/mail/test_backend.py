"""Queueing mail: Django's own callers, options, idempotency, transactions."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.forms import PasswordResetForm
from django.contrib.auth.models import User
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage, EmailMultiAlternatives, mail_admins, send_mail, send_mass_mail
from django.db import connection, transaction
from django.test import override_settings

from django_outbox.errors import InvalidEmail
from django_outbox.mail import EmailBackend, enqueue_email
from django_outbox.models import OutboxEmail, OutboxEmailContent
from django_outbox.testing import drain, travel
from tests.mail.conftest import message

pytestmark = pytest.mark.django_db


def test_mail_is_queued_in_the_callers_transaction(queued: None) -> None:
    with transaction.atomic():
        assert send_mail("Hi", "Text", "a@example.com", ["b@example.com"]) == 1
    with pytest.raises(RuntimeError), transaction.atomic():
        send_mail("Hi", "Text", "a@example.com", ["c@example.com"])
        raise RuntimeError
    assert [email.recipient for email in OutboxEmail.objects.all()] == ["b@example.com"]
    assert mail.outbox == []
    assert drain() == {"done": 1}
    assert [sent.to for sent in mail.outbox] == [["b@example.com"]]


@pytest.mark.django_db(transaction=True)
def test_mail_outside_a_transaction_commits_by_itself(queued: None) -> None:
    assert not connection.in_atomic_block
    assert send_mail("Hi", "Text", "a@example.com", ["b@example.com"]) == 1
    assert OutboxEmail.objects.count() == 1


def test_many_messages_are_queued_all_or_none(queued: None) -> None:
    data = [(f"Number {n}", "Text", "a@example.com", [f"u{n}@example.com"]) for n in range(5)]
    assert send_mass_mail(data) == 5
    with pytest.raises(InvalidEmail):
        send_mass_mail([*data, ("Bad", "Text", "a@example.com", ["not an address"])])
    assert OutboxEmail.objects.count() == 5
    assert EmailBackend().send_messages([]) == 0
    assert EmailBackend().send_messages(message(n) for n in range(3)) == 3


def test_djangos_password_reset_works(queued: None, settings: Any) -> None:
    User.objects.create_user("ann", "ann@example.com", "secret")
    form = PasswordResetForm({"email": "ann@example.com"})
    assert form.is_valid()
    form.save(
        domain_override="example.com",
        subject_template_name="mail/subject.txt",
        email_template_name="mail/body.txt",
    )
    assert OutboxEmail.objects.get().recipient == "ann@example.com"


def test_a_failure_is_silent_where_that_is_asked_for(queued: None, caplog: pytest.LogCaptureFixture) -> None:
    with transaction.atomic():
        assert send_mail("Hi\nBcc: x@example.com", "Text", "a@example.com", ["b@example.com"], fail_silently=True) == 0
        assert send_mail("Hi", "Text", "a@example.com", ["b@example.com"], fail_silently=True) == 1
        # A database error is silent, too, and leaves the transaction usable.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("django_outbox.lease.enqueue.table_of", lambda *_: "no_such_table")
            assert send_mail("Hi", "Text", "a@example.com", ["c@example.com"], fail_silently=True) == 0
        assert OutboxEmail.objects.count() == 1
    assert sum("email not queued, silently" in record.message for record in caplog.records) == 2


def test_scenario_32_a_bad_mail_between_two_good_ones_is_refused_when_queued(queued: None) -> None:
    for subject in ("One", "Hi\r\nBcc: x@example.com", "Two"):
        try:
            with transaction.atomic():
                send_mail(subject, "Text", "a@example.com", ["b@example.com"])
        except ValueError:
            assert "\r\n" in subject
    assert drain() == {"done": 2}
    assert [sent.subject for sent in mail.outbox] == ["One", "Two"]


def test_scenario_33_a_full_message_arrives_with_all_its_parts(queued: None) -> None:
    from tests.mail.test_codec import attachments, built, html, inline_image

    for made in (html(), attachments(), inline_image()):
        mail.outbox.clear()
        EmailBackend().send_messages([made])
        assert drain() == {"done": 1}
        (sent,) = mail.outbox
        assert built(sent) == built(made)
        assert isinstance(sent, EmailMultiAlternatives)


def test_credentials_are_refused(queued: None) -> None:
    with pytest.raises(ImproperlyConfigured, match="keeps no credentials"):
        EmailBackend(username="a", password="b")


# --- options


def test_options_stand_in_the_message(queued: None) -> None:
    made = message()
    expires_at = datetime(2030, 1, 1, tzinfo=UTC)
    made.outbox = {  # type: ignore[attr-defined]
        "idempotency_key": "welcome:1",
        "priority": "urgent",
        "delay": timedelta(minutes=5),
        "expires_at": expires_at,
        "sensitive": True,
    }
    assert EmailBackend().send_messages([made]) == 1
    email = OutboxEmail.objects.get()
    assert (email.idempotency_key, email.priority, email.status) == ("welcome:1", 0, "waiting")
    assert (email.expires_at, email.sensitive, email.subject) == (expires_at, True, "")
    assert email.due_at is not None
    assert 290 < (email.due_at - email.created_at).total_seconds() < 310
    assert email.not_before is not None


def test_arguments_win_over_the_messages_options() -> None:
    made = message()
    made.outbox = {"priority": "bulk", "idempotency_key": "a"}  # type: ignore[attr-defined]
    enqueue_email(made, priority="urgent")
    email = OutboxEmail.objects.get()
    assert (email.priority, email.idempotency_key) == (0, "a")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": "high"}, "urgent, normal, bulk"),
        ({"delay": -1}, "between 0 and ten years"),
        ({"delay": float("nan")}, "between 0 and ten years"),
        ({"delay": "soon"}, "seconds or a timedelta"),
        ({"expires_at": "tomorrow"}, "must be a datetime"),
        ({"sensitive": 1}, "True or False"),
        ({"idempotency_key": "x" * 256}, "255"),
        ({"idempotency_key": "a\x00"}, "cannot store"),
        ({"idempotency_key": "a\ud800"}, "cannot store"),
    ],
)
def test_a_bad_option_is_refused_before_any_sql(options: dict[str, Any], words: str) -> None:
    with transaction.atomic():
        with pytest.raises(InvalidEmail, match=words):
            enqueue_email(message(), **options)
        assert OutboxEmail.objects.count() == 0


def test_an_unknown_option_is_refused() -> None:
    made = message()
    made.outbox = {"lane": "urgent"}  # type: ignore[attr-defined]
    with pytest.raises(InvalidEmail, match="no option 'lane'"):
        enqueue_email(made)
    made.outbox = "urgent"  # type: ignore[attr-defined]
    with pytest.raises(InvalidEmail, match="must be a dict"):
        enqueue_email(made)


def test_a_naive_expiry_is_in_the_projects_zone(settings: Any) -> None:
    with override_settings(TIME_ZONE="Europe/Berlin"):
        enqueue_email(message(), expires_at=datetime(2030, 1, 1, 12))  # noqa: DTZ001  that is the point
    assert OutboxEmail.objects.get().expires_at == datetime(2030, 1, 1, 11, tzinfo=UTC)


# --- idempotency


def test_one_key_queues_one_email(queued: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "django_outbox.mail")
    first, created = enqueue_email(message(1), idempotency_key="order:1")
    again = enqueue_email(message(2), idempotency_key="order:1")
    assert created
    assert again == (first, False)
    assert "email queued before" in caplog.text
    made = message(3)
    made.outbox = {"idempotency_key": "order:1"}  # type: ignore[attr-defined]
    assert EmailBackend().send_messages([made, message(4)]) == 1
    assert OutboxEmail.objects.count() == 2
    assert OutboxEmailContent.objects.count() == 2
    # Also once it was sent, as long as the row is kept.
    drain()
    assert enqueue_email(message(5), idempotency_key="order:1") == (first, False)


def test_one_key_twice_in_one_batch_queues_one_email(queued: None) -> None:
    made = [message(number) for number in (1, 2)]
    for each in made:
        each.outbox = {"idempotency_key": "same"}  # type: ignore[attr-defined]
    assert EmailBackend().send_messages(made) == 1


# --- other databases


@pytest.mark.django_db(databases=["default", "orders"])
def test_another_database_can_be_named() -> None:
    with transaction.atomic(using="orders"):
        id_, _ = enqueue_email(message(), using="orders")
    assert OutboxEmail.objects.using("orders").get().pk == id_
    assert drain(queues=["email"], using="orders") == {"done": 1}
    assert not OutboxEmail.objects.exists()


# --- Django's tests and ours


def test_enqueue_in_a_handler_of_an_event_is_part_of_it() -> None:
    from django_outbox import Event, emit_event, on_event

    @on_event("user.created", name="welcome-mail", atomic=True)
    def welcome(event: Event) -> None:
        enqueue_email(message(), idempotency_key=f"welcome:{event.payload['id']}")

    with transaction.atomic():
        id_ = emit_event("user.created", {"id": 1}, organization_id="acme", request_id="r-1")
    assert drain() == {"done": 2}
    email = OutboxEmail.objects.get()
    assert (email.causation_id, email.organization_id, email.request_id) == (id_, "acme", "r-1")


def test_mail_admins_goes_through_the_queue_like_any_other(queued: None, settings: Any) -> None:
    settings.ADMINS = ["ops@example.com"] if _strings() else [("Ops", "ops@example.com")]
    mail_admins("Down", "It is down.")
    with travel(seconds=1):
        assert drain() == {"done": 1}
    assert mail.outbox[0].to == ["ops@example.com"]


def _strings() -> bool:
    import django

    return django.VERSION >= (6, 0)


def test_queueing_a_message_does_not_change_it() -> None:
    made = EmailMessage("Hi", "Text", "a@example.com", ["b@example.com"])
    before = dict(vars(made))
    enqueue_email(made)
    assert vars(made) == before
