"""What the tests of the email queue share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
import pytest
from django.core import mail
from django.core.mail import EmailMessage

from django_outbox import events
from django_outbox.mail import EmailWork
from django_outbox.relay import queues
from tests.mail.servers import RealServer, Script, ScriptedServer, real_server, scripted_server

SMTP = "django.core.mail.backends.smtp.EmailBackend"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let these tests use the settings and arguments that Django 6.1 deprecates, on all versions alike."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for words in (r"The EMAIL_\w+ setting is deprecated", r"The 'fail_silently' argument is deprecated"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{words}"))


@pytest.fixture(autouse=True)
def _fresh_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test meet the pauses and connections of another."""
    work = EmailWork(owed_to=events.registry.deliveries)
    monkeypatch.setattr(queues, "WORK", {**queues.WORK, "email": work})
    monkeypatch.setattr("django_outbox.testing.WORK", queues.WORK)
    yield
    work.rest()


@pytest.fixture
def work() -> EmailWork:
    found = queues.WORK["email"]
    assert isinstance(found, EmailWork)
    return found


@pytest.fixture
def queued(settings: Any) -> None:
    """Make the queue Django's backend."""
    settings.EMAIL_BACKEND = "django_outbox.mail.EmailBackend"


@pytest.fixture
def no_test_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mail leave for real: outside of Django's test mode there is no ``mail.outbox``."""
    monkeypatch.delattr(mail, "outbox")


@pytest.fixture
def smtp(settings: Any, no_test_outbox: None) -> Iterator[RealServer]:
    """Deliver to a real server."""
    with real_server() as server:
        point_to(settings, server.port)
        yield server


@pytest.fixture(params=[False, True], ids=["by turns", "pipelining"])
def scripted(
    settings: Any, no_test_outbox: None, request: pytest.FixtureRequest
) -> Iterator[Callable[[Script], ScriptedServer]]:
    """
    Return a function that starts a scripted server and has mail delivered to it.

    Once it is one that gets each command when it has answered the last, and once one that gets
    a message's commands at once.
    """
    with ExitStack() as stack:

        def start(script: Script) -> ScriptedServer:
            server = stack.enter_context(scripted_server(script, pipelining=request.param))
            point_to(settings, server.port)
            return server

        yield start


def point_to(settings: Any, port: int, **email: Any) -> None:
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", port
    settings.OUTBOX = {**getattr(settings, "OUTBOX", {}), "EMAIL": {"BACKEND": SMTP, **email}}


def message(number: int = 1, **fields: Any) -> EmailMessage:
    """Return a plain message to one recipient."""
    given = {
        "subject": f"Number {number}",
        "body": f"Text of {number}.\n",
        "from_email": "shop@example.com",
        "to": [f"user{number}@example.com"],
    }
    return EmailMessage(**{**given, **fields})


MODERN = django.VERSION >= (6, 0)
