"""The system checks of the email queue."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import django
import pytest
from django.utils.log import AdminEmailHandler

from django_outbox.checks import check_outbox
from tests.mail.test_mailers import CONSOLE, QUEUE, mailers


def ids() -> list[str]:
    return [str(found.id).rpartition(".")[2] for found in check_outbox()]


@pytest.fixture
def admins(settings: Any) -> Iterator[None]:
    """Mail errors to somebody."""
    settings.ADMINS = ["ops@example.com"] if django.VERSION >= (6, 0) else [("Ops", "ops@example.com")]
    logger = logging.getLogger("tests.mail")
    handler = AdminEmailHandler()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def test_an_ordinary_backend_is_fine(settings: Any, admins: None) -> None:
    settings.EMAIL_BACKEND = CONSOLE
    assert ids() == []


def test_a_queue_needs_a_backend_that_delivers(settings: Any) -> None:
    settings.EMAIL_BACKEND = QUEUE
    assert ids() == ["E020"]
    settings.OUTBOX = {"EMAIL": {"BACKEND": QUEUE}}
    assert ids() == ["E020"]
    settings.OUTBOX = {"EMAIL": {"BACKEND": CONSOLE}}
    assert ids() == []
    settings.OUTBOX = {"EMAIL": {"BACKEND": "no.such.Backend"}}
    assert ids() == ["E022"]


def test_error_mail_through_the_queue_is_warned_of(settings: Any, admins: None) -> None:
    settings.EMAIL_BACKEND = QUEUE
    settings.OUTBOX = {"EMAIL": {"BACKEND": CONSOLE}}
    assert ids() == ["W020"]
    settings.ADMINS = []
    assert ids() == []


@pytest.mark.parametrize(("email", "expected"), [({"LEASE_SECONDS": 44}, ["E021"]), ({"LEASE_SECONDS": 45}, [])])
def test_the_lease_must_cover_one_email(settings: Any, email: dict[str, Any], expected: list[str]) -> None:
    settings.OUTBOX = {"EMAIL": email}
    assert ids() == expected


def test_the_replay_window_must_reach_the_first_replay(settings: Any) -> None:
    settings.OUTBOX = {"EMAIL": {"REPLAY_FOR_SECONDS": 3_600}}
    assert ids() == ["E006"]


@mailers
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"deliver_with": "console"}, []),
        ({}, ["E020"]),
        ({"deliver_with": "gone"}, ["E020"]),
        ({"deliver_with": "default"}, ["E020"]),
    ],
)
def test_a_mailer_that_queues_names_one_that_delivers(
    settings: Any, options: dict[str, str], expected: list[str]
) -> None:
    settings.MAILERS = {"default": {"BACKEND": QUEUE, "OPTIONS": options}, "console": {"BACKEND": CONSOLE}}
    assert ids() == expected


@mailers
def test_a_backend_beside_mailers_has_no_effect(settings: Any, admins: None) -> None:
    settings.MAILERS = {
        "default": {"BACKEND": QUEUE, "OPTIONS": {"deliver_with": "console"}},
        "console": {"BACKEND": CONSOLE},
    }
    settings.OUTBOX = {"EMAIL": {"BACKEND": CONSOLE}}
    assert ids() == ["W020", "W021"] or ids() == ["W021", "W020"]
