"""Which backend delivers: the settings of Django before 6.1, and MAILERS."""

from __future__ import annotations

from typing import Any

import django
import pytest
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage, send_mail

from django_outbox.conf import EmailSettings
from django_outbox.mail import enqueue_email
from django_outbox.mail.transport import delivering_backend
from django_outbox.models import OutboxEmail
from django_outbox.testing import drain
from tests.mail.conftest import message
from tests.mail.servers import RealServer, real_server

pytestmark = pytest.mark.django_db

SMTP = "django.core.mail.backends.smtp.EmailBackend"
CONSOLE = "django.core.mail.backends.console.EmailBackend"
QUEUE = "django_outbox.mail.EmailBackend"
mailers = pytest.mark.skipif(django.VERSION < (6, 1), reason="MAILERS came with Django 6.1")


class Subclass(EmailMessage):
    """Only a name."""


def named(backend: object) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def test_the_settings_name_the_backend(settings: Any, no_test_outbox: None) -> None:
    settings.EMAIL_BACKEND = QUEUE
    assert named(delivering_backend("default", EmailSettings(backend=CONSOLE))) == CONSOLE


def test_without_one_it_is_djangos(settings: Any, no_test_outbox: None) -> None:
    """So `enqueue_email` works where EMAIL_BACKEND is an ordinary one."""
    settings.EMAIL_BACKEND = CONSOLE
    assert named(delivering_backend("default", EmailSettings())) == CONSOLE


def test_the_queue_cannot_deliver_to_itself(settings: Any, no_test_outbox: None) -> None:
    settings.EMAIL_BACKEND = QUEUE
    with pytest.raises(ImproperlyConfigured, match="Nothing delivers the queued mail"):
        delivering_backend("default", EmailSettings())


@mailers
def test_a_queue_alias_names_the_alias_that_delivers(settings: Any, no_test_outbox: None) -> None:
    with real_server() as news, real_server() as shop:
        settings.MAILERS = {
            "default": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "shop"}},
            "news": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "bulk"}},
            "shop": _smtp(shop),
            "bulk": _smtp(news),
        }
        message(1).send()
        message(2).send(using="news")
        send_mail("Hi", "Text", "a@example.com", ["b@example.com"])
        enqueue_email(message(3))
        aliases = dict(OutboxEmail.objects.values_list("recipient", "backend_alias"))
        assert aliases == {
            "user1@example.com": "shop",
            "user2@example.com": "bulk",
            "b@example.com": "shop",
            "user3@example.com": "shop",
        }
        assert drain() == {"done": 4}
        assert len(shop.received) == 3
        assert len(news.received) == 1


@mailers
def test_rows_from_before_mailers_follow_the_queues_alias(settings: Any, no_test_outbox: None) -> None:
    enqueue_email(message(1))
    assert OutboxEmail.objects.get().backend_alias == "default"
    with real_server() as shop:
        settings.MAILERS = {
            "default": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "shop"}},
            "shop": _smtp(shop),
        }
        assert drain() == {"done": 1}


@mailers
def test_mail_of_an_alias_that_is_gone_waits_and_keeps_nobody_up(settings: Any, no_test_outbox: None) -> None:
    with real_server() as shop:
        settings.MAILERS = {
            "default": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "shop"}},
            "old": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "gone"}},
            "shop": _smtp(shop),
        }
        message(1).send(using="old")
        message(2).send()
        assert drain() == {"released": 1, "done": 1}
        assert OutboxEmail.objects.get(recipient="user1@example.com").attempts == 0


@mailers
def test_djangos_test_mode_swaps_every_alias(settings: Any) -> None:
    settings.MAILERS = {
        "default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"},
        "other": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"},
    }
    message(1).send()
    assert len(mail.outbox) == 1
    enqueue_email(message(2))
    assert drain() == {"done": 1}
    assert len(mail.outbox) == 2
    assert vars(mail.outbox[1])["sent_using"] == "default"


@mailers
def test_an_unknown_option_is_reported_by_django(settings: Any) -> None:
    from django.core.mail import InvalidMailer

    settings.MAILERS = {"default": {"BACKEND": QUEUE, "OPTIONS": {"deliver_to": "shop"}}}
    with pytest.raises(InvalidMailer, match="deliver_to"):
        message(1).send()


def _smtp(server: RealServer) -> dict[str, Any]:
    return {"BACKEND": SMTP, "OPTIONS": {"host": "127.0.0.1", "port": server.port}}
