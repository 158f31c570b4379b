"""What is stored of a message, and that it builds to the same bytes."""

from __future__ import annotations

import email.policy
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from email import message_from_bytes
from email.charset import QP, Charset
from email.message import EmailMessage as PythonMessage
from email.message import MIMEPart
from email.mime.application import MIMEApplication
from email.mime.image import MIMEImage
from typing import Any, ClassVar

import pytest
from anymail.message import AnymailMessage, attach_inline_image
from django.core.mail import EmailMessage, EmailMultiAlternatives
from django.utils import translation
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from django_outbox.conf import EmailSettings
from django_outbox.errors import InvalidEmail
from django_outbox.mail.codec import ANYMAIL_ATTRIBUTES, decode, encode
from tests.mail.conftest import MODERN, message

SETTINGS = EmailSettings()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
# Set, so that two builds of one message differ in nothing.
FIXED = {"Date": "Mon, 30 Nov 2026 10:00:00 -0000", "Message-ID": "<fixed@example.com>"}


def multi(**fields: Any) -> EmailMultiAlternatives:
    return EmailMultiAlternatives(
        **{
            "subject": "Hello",
            "body": "Text.\n",
            "from_email": "Shop <shop@example.com>",
            "to": ["Ann Example <ann@example.com>"],
            "headers": FIXED,
            **fields,
        }
    )


def built(message: EmailMessage) -> bytes:
    """Return a message's bytes, with the boundaries that a fixed seed gives."""
    random.seed(7)
    if MODERN:
        return bytes(message.message(policy=email.policy.SMTP).as_bytes())
    return bytes(message.message().as_bytes(linesep="\r\n"))  # type: ignore[call-arg]


def stored(message: EmailMessage, **settings: Any) -> EmailMessage:
    found = encode(message, EmailSettings(**settings))
    return decode(found.document, found.blobs, with_message_id=True)


def html() -> EmailMessage:
    made = multi()
    made.attach_alternative("<p>Text, <b>bold</b>.</p>", "text/html")
    return made


def html_only() -> EmailMessage:
    made = EmailMessage("Hello", "<p>Text.</p>", "shop@example.com", ["ann@example.com"], headers=FIXED)
    made.content_subtype = "html"
    return made


def several_alternatives() -> EmailMessage:
    made = multi()
    made.attach_alternative("<p>Text.</p>", "text/html")
    made.attach_alternative("BEGIN:VCALENDAR\r\nEND:VCALENDAR\r\n", ["text/calendar", " method=REQUEST"][0])
    made.attach_alternative(b"\x00\x01binary", "application/x-thing")
    return made


def attachments() -> EmailMessage:
    made = multi()
    made.attach("invoice.pdf", b"%PDF-1.4 " + bytes(range(256)), "application/pdf")
    made.attach("notes.txt", "Grüße aus Köln\n", "text/plain")
    made.attach("same.bin", b"one", "application/octet-stream")
    made.attach("same.bin", b"two", "application/octet-stream")
    made.attach("Größenübersicht 表.txt", "übergroß\n", "text/plain")
    made.attach(None, b"no name", "application/octet-stream")
    return made


def inline_image() -> EmailMessage:
    made = multi()
    cid = attach_inline_image(made, PNG, "logo.png", "png")
    made.attach_alternative(f'<img src="cid:{cid}">', "text/html")
    return made


def mime_parts() -> EmailMessage:
    made = multi()
    if MODERN:
        part = MIMEPart()
        part.set_content(b"%PDF", maintype="application", subtype="pdf", filename="Übersicht.pdf")
        made.attach(part)
    else:
        made.attach(MIMEApplication(b"%PDF", "pdf"))
        image = MIMEImage(PNG, "png")
        image.add_header("Content-ID", "<logo>")
        made.attach(image)
    return made


def nested() -> EmailMessage:
    made = multi()
    made.attach("forwarded.eml", html(), "message/rfc822")
    return made


def nested_python() -> EmailMessage:
    inner = PythonMessage()
    inner["Subject"], inner["From"], inner["To"] = "Inner", "a@example.com", "b@example.com"
    inner.set_content("Inner text.\n")
    made = multi()
    made.attach("forwarded.eml", message_from_bytes(inner.as_bytes()), "message/rfc822")
    return made


def headers_in_order() -> EmailMessage:
    return multi(
        headers={**FIXED, "X-Zulu": "1", "X-Alpha": "2", "List-Id": "News <news.example.com>", "X-Mike": "Grüße"},
        cc=["c@example.com"],
        bcc=["d@example.com"],
        reply_to=["Answers <e@example.com>"],
    )


def latin() -> EmailMessage:
    made = multi(subject="Grüße aus Köln", body="Größe\n" * 3)
    made.encoding = "iso-8859-1"
    return made


def long_lines() -> EmailMessage:
    return multi(subject="A long subject " * 12, body="x" * 1_200 + "\n.\nFrom here on\n")


KINDS: list[Callable[[], EmailMessage]] = [
    multi,
    html,
    html_only,
    several_alternatives,
    attachments,
    inline_image,
    mime_parts,
    nested,
    nested_python,
    headers_in_order,
    latin,
    long_lines,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_message_is_built_to_the_same_bytes(kind: Callable[[], EmailMessage]) -> None:
    made = kind()
    assert built(stored(made)) == built(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_stored_the_same_twice(kind: Callable[[], EmailMessage]) -> None:
    made = kind()
    again = stored(made)
    first, second = encode(made, SETTINGS), encode(again, SETTINGS)
    assert (first.document, first.blobs) == (second.document, second.blobs)


@pytest.mark.skipif(MODERN, reason="6.0 has no such attributes")
def test_the_subtypes_of_multipart_are_kept() -> None:
    made = html()
    made.mixed_subtype = "related"  # type: ignore[attr-defined]
    made.attach("a.bin", b"a", "application/octet-stream")
    assert b"multipart/related" in built(stored(made))
    assert built(stored(made)) == built(made)


@pytest.mark.skipif(MODERN, reason="the modern API takes names only")
def test_a_charset_object_is_kept() -> None:
    charset = Charset("utf-8")
    charset.body_encoding = QP
    made = message(body="Grüße\n", headers=FIXED)
    made.encoding = charset
    assert b"quoted-printable" in built(stored(made))
    assert built(stored(made)) == built(made)


def test_one_content_is_stored_once() -> None:
    made = multi()
    made.attach("a.bin", b"same", "application/octet-stream")
    made.attach("b.bin", b"same", "application/octet-stream")
    assert list(encode(made, SETTINGS).blobs.values()) == [b"same"]


def test_lazy_strings_are_resolved_in_the_active_language() -> None:
    made = multi(subject=gettext_lazy("Yes"), body=gettext_lazy("No"), headers={**FIXED, "X-Word": gettext_lazy("Yes")})
    with translation.override("de"):
        found = encode(made, SETTINGS)
    with translation.override("fr"):
        back = decode(found.document, found.blobs, with_message_id=True)
    assert (back.subject, back.body, back.extra_headers["X-Word"]) == ("Ja", "Nein", "Ja")
    assert type(stored(multi(body=mark_safe("a"))).body) is str


def test_header_values_become_text() -> None:
    when = datetime(2026, 11, 30, 10, tzinfo=UTC)
    back = stored(multi(headers={"X-Count": 3, "Date": when}))
    assert back.extra_headers["X-Count"] == "3"
    assert back.extra_headers["Date"] == "Mon, 30 Nov 2026 10:00:00 +0000"
    built(back)


def test_a_long_unsubscribe_header_stays_whole() -> None:
    url = f"<https://example.com/unsubscribe/{'a' * 90}>, <mailto:unsubscribe@example.com>"
    text = built(stored(multi(headers={**FIXED, "List-Unsubscribe": url, "X-Other": "word " * 40})))
    assert str(message_from_bytes(text)["List-Unsubscribe"]).split() == url.split()
    assert b"=?utf-8?" not in text.lower()
    assert all(len(line) < 100 for line in text.split(b"\r\n") if b"unsubscribe" not in line)


# --- Message-ID


def test_the_message_id_is_fixed_and_of_the_senders_domain() -> None:
    found = encode(message(), SETTINGS)
    assert found.message_id.endswith("@example.com>")
    for _ in range(2):
        back = decode(found.document, found.blobs, with_message_id=True)
        assert f"Message-ID: {found.message_id}".encode() in built(back)
    assert "Message-ID" not in decode(found.document, found.blobs, with_message_id=False).extra_headers


@pytest.mark.parametrize(
    ("sender", "setting", "domain"),
    [
        ("Shop <shop@shop.example>", None, "shop.example"),
        ("shop@shop.example", "mail.example", "mail.example"),
        ("shop@bücher.example", None, "xn--bcher-kva.example"),
        ("webmaster", None, "localhost"),
    ],
)
def test_the_message_id_has_a_domain(sender: str, setting: str | None, domain: str) -> None:
    found = encode(message(from_email=sender), EmailSettings(message_id_domain=setting))
    assert found.message_id.endswith(f"@{domain}>")


def test_a_message_keeps_a_message_id_of_its_own() -> None:
    found = encode(message(headers={"message-id": "<mine@example.com>"}), SETTINGS)
    assert found.message_id == "<mine@example.com>"
    back = decode(found.document, found.blobs, with_message_id=False)
    assert back.extra_headers == {"message-id": "<mine@example.com>"}


# --- Anymail's and other attributes


def test_anymails_attributes_are_kept() -> None:
    values: dict[str, Any] = {
        "esp_extra": {"options": {"pool": "a", "ratio": 0.5}, "list": [1, None, True]},
        "envelope_sender": "bounce@example.com",
        "metadata": {"zulu": "1", "alpha": 2},
        "send_at": datetime(2027, 1, 2, 3, 4, tzinfo=UTC),
        "tags": ["welcome", "new"],
        "track_clicks": False,
        "track_opens": None,
        "template_id": "t-1",
        "merge_data": {"ann@example.com": {"name": "Ann", "since": date(2020, 1, 2)}},
        "merge_global_data": {"raw": b"\x00\x01", "pair": (1, 2)},
        "merge_headers": {"ann@example.com": {"X-A": "b"}},
        "merge_metadata": {"ann@example.com": {"id": 1}},
    }
    assert set(values) == set(ANYMAIL_ATTRIBUTES)
    made = AnymailMessage("Hi", "Text", "shop@example.com", ["ann@example.com"], **values)
    back = stored(made)
    for name, value in values.items():
        assert getattr(back, name) == value, name
        assert type(getattr(back, name)) is type(value), name
    assert list(back.metadata) == ["zulu", "alpha"]  # type: ignore[attr-defined]


def test_what_was_not_given_is_not_there() -> None:
    back = stored(AnymailMessage("Hi", "Text", "shop@example.com", ["ann@example.com"]))
    assert not any(hasattr(back, name) for name in ANYMAIL_ATTRIBUTES)


def test_an_unknown_attribute_is_refused_unless_the_settings_name_it() -> None:
    made = message()
    made.smtp_url = "smtp://other"  # type: ignore[attr-defined]
    with pytest.raises(InvalidEmail, match=r"smtp_url.*EXTRA_ATTRIBUTES"):
        encode(made, SETTINGS)
    assert stored(made, extra_attributes=("smtp_url",)).smtp_url == "smtp://other"  # type: ignore[attr-defined]


def test_a_value_that_json_has_no_form_for_is_refused() -> None:
    made = message()
    made.metadata = {"thing": object()}  # type: ignore[attr-defined]
    with pytest.raises(InvalidEmail, match=r"metadata\['thing'\] is a object"):
        encode(made, SETTINGS)


class Shouting(EmailMessage):
    def message(self, **options: Any) -> Any:
        self.subject = self.subject.upper()
        return super().message(**options)


class Defaults(EmailMultiAlternatives):
    content_subtype = "html"
    metadata: ClassVar = {"kind": "newsletter"}

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"from_email": "news@example.com", **fields})


def test_a_subclass_that_builds_its_own_messages_is_refused() -> None:
    with pytest.raises(InvalidEmail, match=r"Shouting overrides message\(\)"):
        encode(Shouting("a", "b", "c@example.com", ["d@example.com"]), SETTINGS)


def test_a_subclass_that_only_sets_things_is_kept() -> None:
    back = stored(Defaults(subject="a", body="<p>", to=["a@example.com"]))
    assert back.content_subtype == "html"
    assert back.from_email == "news@example.com"
    assert back.metadata == {"kind": "newsletter"}  # type: ignore[attr-defined]


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"to": []}, "no recipients"),
        ({"to": [""]}, "no recipients"),
        ({"to": [f"u{number}@example.com" for number in range(51)]}, "MAX_RECIPIENTS"),
        ({"to": ["a@example.com, b@example.com"]}, "must be one address"),
        ({"to": ["not an address"]}, "not an address"),
        ({"to": ["a@b@c"]}, "not an address"),
        ({"to": ["a@example.com\nBcc: x@example.com"]}, "not an address|line"),
        ({"cc": ["jürgen@example.com"]}, "letters before the @"),
        ({"bcc": ["Name <jürgen@example.com>"]}, "letters before the @"),
        ({"from_email": "a@b, c@d"}, "from_email"),
        ({"headers": {"Bcc": "x@example.com"}}, "Bcc"),
        ({"headers": {"bcc": "x@example.com"}}, "Bcc"),
        ({"headers": {"Message-ID": f"<{'a' * 300}@b>"}}, "Message-ID"),
        ({"subject": "a\x00b"}, "subject holds a NUL"),
        ({"body": "a\ud800b"}, "body holds a lone surrogate"),
        ({"subject": b"bytes"}, "subject is bytes"),
        ({"attachments": [("a.bin", object(), "application/x")]}, "attachment is a object"),
        ({"body": "x" * (11 * 2**20)}, "MAX_MESSAGE_BYTES"),
        ({"attachments": [("a.bin", b"x" * (11 * 2**20), "application/x")]}, "MAX_MESSAGE_BYTES"),
    ],
)
def test_what_cannot_be_sent_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEmail, match=words):
        encode(message(**fields), SETTINGS)


@pytest.mark.parametrize(
    "fields",
    [
        {"subject": "Hi\r\nBcc: x@example.com"},
        {"subject": "Hi\nBcc: x@example.com"},
        {"headers": {"X-Note": "a\r\nBcc: x@example.com"}},
        {"from_email": "a@example.com\nBcc: x@example.com"},
        {"reply_to": ["a@example.com\nBcc: x@example.com"]},
    ],
)
def test_scenario_32_a_line_break_in_a_header_is_refused_when_queued(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"newline|line ?break|linefeed|not an address|carriage"):
        encode(message(**fields), SETTINGS)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidEmail, match="not str"):
        encode("mail", SETTINGS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    [
        "a@example.com",
        "Ann <a@example.com>",
        '"Ann, B." <a@example.com>',
        "a+b@sub.example.com",
        "a@bücher.example",
        "Jürgen <a@example.com>",
        "webmaster",
    ],
)
def test_an_address_that_can_be_sent_to_is_taken(address: str) -> None:
    built(stored(message(to=[address])))


def test_messages_nest_to_a_depth_only() -> None:
    made: Any = message()
    for _ in range(7):
        outer = message()
        outer.attach("inner.eml", made, "message/rfc822")
        made = outer
    with pytest.raises(InvalidEmail, match="more than 5 deep"):
        encode(made, SETTINGS)
