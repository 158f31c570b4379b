"""The error tree, and the texts of errors as rows, pages and logs keep them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_outbox import errors
from django_outbox.errors import ERROR_TEXT_LIMIT, Reject, RetryLater, clean_error, clean_text


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.NotInTransaction, RuntimeError),
        (errors.InvalidPayload, TypeError),
        (errors.InvalidEventType, ValueError),
        (errors.InvalidHandlerName, ValueError),
        (errors.DuplicateHandler, ValueError),
        (errors.InvalidSettings, ImproperlyConfigured),
        (errors.UnsafeURL, ValueError),
        (errors.InvalidSignature, Exception),
        (errors.RetryLater, Exception),
        (errors.Reject, Exception),
    ],
)
def test_an_error_is_ours_and_the_builtin_that_fits(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.OutboxError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(("delay", "seconds"), [(None, None), (5, 5.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)])
def test_retry_later_keeps_its_delay_in_seconds(delay: float | timedelta | None, seconds: float | None) -> None:
    error = RetryLater("busy", delay=delay)
    assert (error.reason, error.delay, str(error)) == ("busy", seconds, "busy")


def test_retry_later_refuses_a_delay_that_is_no_number_where_it_is_raised() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        RetryLater("busy", delay="soon")  # type: ignore[arg-type]


def test_an_error_text_names_the_class() -> None:
    assert clean_error(ValueError("no such customer")) == "ValueError: no such customer"
    assert clean_error(Reject("gone")) == "Reject: gone"
    assert clean_error(KeyError()) == "KeyError"
    assert clean_error("plain words") == "plain words"


def test_nul_and_lone_surrogates_become_the_replacement_character() -> None:
    assert clean_text("a\x00b\ud800c") == "a\ufffdb\ufffdc"
    assert clean_text("at the end \udfff") == "at the end \ufffd"


def test_a_pair_of_surrogates_becomes_the_character_it_stands_for() -> None:
    assert clean_text("\ud83d\ude00") == "\U0001f600"


@pytest.mark.parametrize("text", ["", "plain", "naïve", "\ufeffmarked", "😀 日本語", "tab\tand\nline"])
def test_a_text_that_can_be_stored_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == text


def test_an_error_of_two_megabytes_with_a_nul_and_a_surrogate_is_cleaned_and_cut() -> None:
    """Scenario 23."""
    text = clean_error(ValueError("\x00\ud800" + "x" * 2_000_000))
    assert len(text) <= ERROR_TEXT_LIMIT
    assert text.startswith("ValueError: \ufffd\ufffdxxx")
    assert text.endswith("…")
    text.encode()


@pytest.mark.parametrize("filler", ["password", "://a", "a" * 40 + "-", "token='", "authorization: ", '"', "é"])
def test_cleaning_a_huge_error_costs_no_time(filler: str) -> None:
    before = time.process_time()
    clean_error(filler * (4_000_000 // len(filler)))
    assert time.process_time() - before < 1.0


def test_an_error_whose_text_cannot_be_read_still_has_one() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert clean_error(Broken()) == "Broken: (its text cannot be read)"


def test_an_error_whose_text_is_not_text_still_has_one() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return None  # type: ignore[return-value]  # noqa: PLE0307  the fault itself

    assert clean_error(Odd()) == "Odd: (its text cannot be read)"


@pytest.mark.parametrize(
    "text",
    [
        "connect to postgresql://app:hunter2@db.example/app failed",
        "connect to redis://:hunter2@cache:6379",
        "postgres://app:p@ss@hunter2@db/app",
        'connection to "host=db user=app password=hunter2 dbname=app" failed',
        "password='hunter2 and more' host=db",
        "PGPASSWORD=hunter2",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        "Authorization: Bearer hunter2hunter2",
        "Authorization: Basic hunter2hunter2",
        "{'Authorization': 'Bearer hunter2', 'Accept': '*/*'}",
        "{'authorization': b'Bearer hunter2'}",
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter2, Signature=hunter2",
        "Proxy-Authorization: Basic hunter2",
        "Cookie: sessionid=hunter2; csrftoken=hunter2",
        "Set-Cookie: sessionid=hunter2; Path=/",
        "got bearer hunter2hunter2 instead",
        '{"api_key": "hunter2"}',
        "{'client_secret': 'hunter2'}",
        "https://api.example/v1?access_token=hunter2&page=1",
        "X-Api-Key: hunter2",
        "passphrase = hunter2",
        "signed with whsec_hunter2+/=",
        'password: "hunter2 without an end',
    ],
)
def test_a_secret_never_reaches_the_text(text: str) -> None:
    cleaned = clean_error(text)
    assert "hunter2" not in cleaned
    assert "[hidden]" in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "could not reach https://api.example/v1/customers/7?page=2",
        "no row with key 17 in table token_usage",
        "mail to jo@example.com was refused",
        "basic rules apply",
    ],
)
def test_a_text_without_a_secret_stays_readable(text: str) -> None:
    assert clean_error(text) == text


def test_what_stands_beside_a_secret_stays() -> None:
    cleaned = clean_error("GET https://app:hunter2@api.example/v1 answered 503 to {'token': 'hunter2', 'page': 3}")
    assert cleaned == "GET https://[hidden]@api.example/v1 answered 503 to {'token': [hidden], 'page': 3}"


def test_a_secret_that_the_cut_divides_is_not_left_in_half() -> None:
    """The part of a text that is examined ends in the middle of a DSN, and a long header before it shrinks."""
    limit = 100
    header = "Cookie: " + "c" * 300 + "\n"
    text = header + "x" * (4 * limit - len(header) - 24) + " postgres://app:hunter2@db"
    assert "hunter" not in clean_error(text, limit=limit)


def test_the_name_of_an_exception_is_not_taken_for_that_of_a_credential() -> None:
    class TokenExpiredError(Exception):
        pass

    assert clean_error(TokenExpiredError("503 Service Unavailable")) == "TokenExpiredError: 503 Service Unavailable"
    assert clean_error(TokenExpiredError("token=abc")) == "TokenExpiredError: token=[hidden]"
