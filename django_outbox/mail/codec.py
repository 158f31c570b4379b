"""
An email as it is stored: JSON of version 1, and the bytes of its attachments beside it.

`encode` takes a message apart or refuses it; `decode` makes one that is built to the
same bytes. What a message bears beyond Django's own attributes and Anymail's is
refused, not dropped: a mail that arrives without its metadata is worse than an error
where it is written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from email.charset import Charset
from email.headerregistry import AddressHeader
from email.utils import format_datetime, make_msgid
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.mail import EmailAttachment, EmailMessage, EmailMultiAlternatives
from django.utils.encoding import punycode
from django.utils.functional import Promise

from django_outbox.conf import EmailSettings
from django_outbox.errors import InvalidEmail
from django_outbox.mail import compat

__all__ = ["ANYMAIL_ATTRIBUTES", "Stored", "decode", "encode"]

VERSION: Final = 1
_NESTED: Final = 5
"""How deep messages attached to messages may go."""
_LISTS: Final = ("to", "cc", "bcc", "reply_to")

ANYMAIL_ATTRIBUTES: Final = (
    "esp_extra",
    "envelope_sender",
    "metadata",
    "send_at",
    "tags",
    "track_clicks",
    "track_opens",
    "template_id",
    "merge_data",
    "merge_global_data",
    "merge_headers",
    "merge_metadata",
)

# What every message bears and what is stored otherwise, or speaks of an earlier sending.
_KNOWN: Final = {
    *_LISTS,
    *("subject", "body", "from_email", "attachments", "alternatives", "extra_headers", "outbox"),
    *("content_subtype", "encoding", "mixed_subtype", "alternative_subtype"),
    *("connection", "_connection", "anymail_status", "sent_using"),
}

# Nearly every address is of this form; the header parser takes a hundred times as long.
_SIMPLE_ADDRESS: Final = re.compile(
    r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message, taken apart."""

    document: str
    blobs: Mapping[str, bytes]
    """SHA-256 as hex → content."""
    message_id: str
    subject: str
    recipient: str


def encode(message: EmailMessage, settings: EmailSettings) -> Stored:
    """
    Take a message apart, with lazy strings in the active language; `decode` gives it back.

    The stored form is built once, so that what Django refuses is refused here.

    :raises InvalidEmail: for what cannot be stored exactly, or is no mail that can be sent.
    :raises ValueError: Django's own, for a header that holds a line break.
    """
    if not isinstance(message, EmailMessage):
        raise InvalidEmail(f"The email queue takes Django's EmailMessage, not {type(message).__name__}.")
    encoder = _Encoder(settings)
    document = encoder.message(message, depth=0)
    recipients = [address for name in _LISTS[:3] for address in document.get(name, ()) if address]
    if not recipients:
        raise InvalidEmail("The message has no recipients.")
    if len(recipients) > settings.max_recipients:
        raise InvalidEmail(
            f'The message has {len(recipients)} recipients; OUTBOX["EMAIL"]["MAX_RECIPIENTS"] is'
            f" {settings.max_recipients}. Queue one message for each of them."
        )
    # In quick succession: the rest is only done for a message that will be queued.
    for address in recipients:
        _check_address(address, "recipient")
    _check_address(document["from"], "from_email")
    message_id = _message_id(document, settings)
    document["message_id"] = message_id
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    encoder.add(len(text) if text.isascii() else len(text.encode()), "document")
    _check_by_building(document, encoder.blobs)
    return Stored(
        document=text,
        blobs=encoder.blobs,
        message_id=message_id,
        subject=document["subject"][:255],
        recipient=recipients[0][:320],
    )


def decode(document: str, blobs: Mapping[str, bytes], *, with_message_id: bool) -> EmailMessage:
    """
    Return the message of a stored document.

    ``with_message_id`` puts in the Message-ID that it got when it was queued, for backends
    that send MIME; a message that came with one of its own keeps it either way.
    """
    parsed = json.loads(document)
    if parsed.get("v") != VERSION:
        raise InvalidEmail(f"The email is stored in version {parsed.get('v')!r}, which this release cannot read.")
    return _message(parsed, blobs, with_message_id=with_message_id)


# --- taking apart ----------------------------------------------------------------------------------------------------


class _Encoder:
    """Takes one message apart, within its bound."""

    def __init__(self, settings: EmailSettings) -> None:
        self._settings = settings
        self._size = 0
        self.blobs: dict[str, bytes] = {}

    def add(self, size: int, what: str) -> None:
        """Count bytes, and refuse the message once they are too many."""
        self._size += size
        if self._size > self._settings.max_message_bytes:
            raise InvalidEmail(
                f'The message is larger than OUTBOX["EMAIL"]["MAX_MESSAGE_BYTES"]'
                f" ({self._settings.max_message_bytes}) with its {what}. Send a link to a file that size."
            )

    def message(self, message: EmailMessage, *, depth: int) -> dict[str, Any]:
        """Return a message's document."""
        if depth > _NESTED:
            raise InvalidEmail(f"Messages are attached to one another more than {_NESTED} deep.")
        multi = isinstance(message, EmailMultiAlternatives)
        _check_class(type(message), EmailMultiAlternatives if multi else EmailMessage)
        document: dict[str, Any] = {
            "v": VERSION,
            "multi": multi,
            "subject": self.text(message.subject, "subject"),
            "body": self._body(message),
            "from": self.text(message.from_email, "from_email"),
        }
        for name in _LISTS:
            if values := getattr(message, name):
                document[name] = [self.text(value, name) for value in values]
        if headers := message.extra_headers:
            # Pairs: no database keeps the order of an object's keys.
            document["headers"] = [self._header(name, value) for name, value in headers.items()]
        if shape := self._shape(message):
            document["shape"] = shape
        if multi and (alternatives := message.alternatives):  # type: ignore[attr-defined]
            document["alternatives"] = [
                [self.content(content, "alternative", depth), self.text(mimetype, "mimetype")]
                for content, mimetype in alternatives
            ]
        if attachments := message.attachments:
            document["attachments"] = [self._attachment(each, depth) for each in attachments]
        if attributes := self._attributes(message):
            document["attributes"] = attributes
        return document

    def text(self, value: Any, what: str) -> str:
        """Return a value as text that every database stores."""
        if isinstance(value, bytes):
            raise InvalidEmail(f"{what} is bytes; decode it first.")
        # str() of a SafeString is itself; JSON makes plain text of it.
        text = value if type(value) is str else str(value)
        if "\x00" in text:
            raise InvalidEmail(f"{what} holds a NUL character, which no mail may.")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidEmail(f"{what} holds a lone surrogate, which cannot be encoded.") from None
        return text

    def _body(self, message: EmailMessage) -> str:
        body: Any = message.body
        if isinstance(body, bytes):
            try:
                body = body.decode(str(message.encoding or django_settings.DEFAULT_CHARSET))
            except (UnicodeDecodeError, LookupError) as error:
                raise InvalidEmail(f"body is bytes that cannot be decoded: {error}.") from None
        return self.text(body or "", "body")

    def _header(self, name: Any, value: Any) -> list[str]:
        name = self.text(name, "header name")
        if name.lower() == "bcc":
            # Some versions of Django write it into the message, for every recipient to read.
            raise InvalidEmail('headers holds "Bcc". Use the bcc argument.')
        text = format_datetime(value) if isinstance(value, datetime) else self.text(value, f"header {name}")
        return [name, text]

    def _shape(self, message: EmailMessage) -> dict[str, Any]:
        shape: dict[str, Any] = {}
        for name in compat.SHAPE:
            value = getattr(message, name, None)
            if value is None or value == _PLAIN_SHAPE.get(name):
                continue
            if isinstance(value, Charset):
                shape[name] = [value.input_charset, value.header_encoding, value.body_encoding]
            else:
                shape[name] = self.text(value, name)
        return shape

    def content(self, content: Any, what: str, depth: int) -> Any:
        """Return the content of an attachment or alternative: text, or what it refers to."""
        if isinstance(content, EmailMessage):
            return {"message": self.message(content, depth=depth + 1)}
        if isinstance(content, compat.Instance):
            return self._mime(content)
        if isinstance(content, (bytes, bytearray, memoryview)):
            return {"blob": self._blob(bytes(content))}
        if isinstance(content, (str, Promise)):
            return self.text(content, what)
        raise InvalidEmail(f"The content of an {what} is a {type(content).__name__}; give text or bytes.")

    def _attachment(self, attachment: Any, depth: int) -> Any:
        if isinstance(attachment, compat.Instance):
            return self._mime(attachment)
        if not isinstance(attachment, Sequence) or len(attachment) != 3:
            raise InvalidEmail("An attachment must be a MIME part, or filename, content and mimetype; use attach().")
        filename, content, mimetype = attachment
        return [
            None if filename is None else self.text(filename, "filename"),
            self.content(content, "attachment", depth),
            None if mimetype is None else self.text(mimetype, "mimetype"),
        ]

    def _mime(self, part: compat.Instance) -> dict[str, str]:
        try:
            content, kind = compat.mime_bytes(part)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidEmail(f"A MIME attachment cannot be written: {error}.") from None
        return {"mime": self._blob(content), "kind": kind}

    def _blob(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.blobs:
            self.add(len(content), "attachments")
            self.blobs[digest] = content
        return digest

    def _attributes(self, message: EmailMessage) -> dict[str, Any]:
        given = {name for name in vars(message) if name not in _KNOWN}
        allowed = {*ANYMAIL_ATTRIBUTES, *self._settings.extra_attributes}
        if unknown := given - allowed:
            raise InvalidEmail(
                f"The message has an attribute {min(unknown)!r}, which would be lost. Remove it, or name it in"
                ' OUTBOX["EMAIL"]["EXTRA_ATTRIBUTES"].'
            )
        values = {
            name: getattr(message, name, None) for name in (*ANYMAIL_ATTRIBUTES, *self._settings.extra_attributes)
        }
        # A None that was set says something; one that nobody set does not.
        return {
            name: self._value(value, name)
            for name, value in values.items()
            if not _is_unset(value) and (name in given or value is not None)
        }

    def _value(self, value: Any, path: str) -> Any:
        """Return an attribute's value as JSON; what JSON has no form for bears a tag."""
        if isinstance(value, Mapping):
            pairs = value.items()
            return {
                "$pairs": [
                    [self._value(key, f"a key of {path}"), self._value(item, f"{path}[{key!r:.80}]")]
                    for key, item in pairs
                ]
            }
        if isinstance(value, (list, tuple)):
            items = [self._value(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, (str, Promise)):
            return self.text(value, path)
        if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        for tag, (kind, write, _) in _TAGS.items():
            if isinstance(value, kind):
                self.add(len(value) if isinstance(value, bytes) else 0, "attributes")
                return {tag: write(value)}
        raise InvalidEmail(f"{path} is a {type(value).__name__} ({value!r:.80}), which cannot be stored.")


_TAGS: Final[Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]]] = {
    # tag → type, and how it is written and read; a datetime is a date, so it comes first
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
_PLAIN_SHAPE: Final = {"content_subtype": "plain", "mixed_subtype": "mixed", "alternative_subtype": "alternative"}


def _is_unset(value: Any) -> bool:
    # Anymail's word for "nothing was given" is a class of this name.
    return isinstance(value, type) and value.__name__ == "UNSET"


def _check_class(cls: type[EmailMessage], base: type[EmailMessage]) -> None:
    """Refuse a subclass that builds or addresses its messages in a way of its own, which no row can hold."""
    if cls in {EmailMessage, EmailMultiAlternatives}:
        return
    for name in dir(base):
        known = getattr(base, name)
        if name.startswith("__") or name in {"send", "get_connection"} or not callable(known):
            continue
        if getattr(cls, name) is not known:
            raise InvalidEmail(
                f"{cls.__name__} overrides {name}(), which cannot be stored. Queue a plain"
                f" {base.__name__} with what it makes."
            )


def _check_address(address: str, what: str) -> None:
    """Refuse what is not one address that every supported Django sends to."""
    if _SIMPLE_ADDRESS.fullmatch(address):
        return
    try:
        parsed: Any = AddressHeader.value_parser(address)
        defects = {str(defect) for defect in parsed.all_defects}
        boxes = parsed.all_mailboxes
    except Exception as error:  # noqa: BLE001  the parser fails in many ways on what is no address
        raise InvalidEmail(f"The {what} {address!r:.320} is not an address: {error}.") from None
    # Django lets local mailboxes through.
    defects.discard("addr-spec local part with no domain")
    if len(boxes) == 1 and not (boxes[0].local_part or "").isascii():
        raise InvalidEmail(f"The {what} {address!r:.320} has letters before the @ that most servers do not take.")
    if defects or len(boxes) != 1 or "\n" in address or "\r" in address:
        reason = "; ".join(sorted(defects)) or "it must be one address"
        raise InvalidEmail(f"The {what} {address!r:.320} is not an address: {reason}.")


def _message_id(document: Mapping[str, Any], settings: EmailSettings) -> str:
    """Return the message's own Message-ID, or a new one."""
    given = next((value for name, value in document.get("headers", ()) if name.lower() == "message-id"), None)
    if given is not None:
        if len(given) > 255:
            raise InvalidEmail(f"The Message-ID is {len(given)} characters long; at most 255 fit.")
        return str(given)
    # Django's own would ask the resolver for this host's name, in the middle of a transaction.
    sender: str = document["from"]
    domain = settings.message_id_domain or (sender.rpartition("@")[2].rstrip(">").strip() if "@" in sender else "")
    if not domain.isascii():
        domain = punycode(domain)
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,150}", domain):
        domain = "localhost"
    return make_msgid(domain=domain)


def _check_by_building(document: dict[str, Any], blobs: Mapping[str, bytes]) -> None:
    # Bytes are encoded whatever they are; only the shape around them can be wrong.
    mime = {each["mime"] for each in _references(document) if "mime" in each}
    small = {digest: content if digest in mime else b"" for digest, content in blobs.items()}
    message = _message(document, small, with_message_id=True)
    try:
        compat.build(message)
    except (TypeError, LookupError, AttributeError) as error:
        raise InvalidEmail(f"The message cannot be built: {error}.") from error


def _references(document: Mapping[str, Any]) -> Iterable[Mapping[str, str]]:
    """Return what a document says in place of contents."""
    for content in (
        *(alternative[0] for alternative in document.get("alternatives", ())),
        *(each if isinstance(each, dict) else each[1] for each in document.get("attachments", ())),
    ):
        if isinstance(content, dict):
            if "message" in content:
                yield from _references(content["message"])
            else:
                yield content


# --- putting together ------------------------------------------------------------------------------------------------


def _message(document: Mapping[str, Any], blobs: Mapping[str, bytes], *, with_message_id: bool) -> EmailMessage:
    headers: dict[str, str] = dict(document.get("headers", ()))
    given = document.get("message_id")
    if with_message_id and given and not any(name.lower() == "message-id" for name in headers):
        # First, where Django puts it.
        headers = {"Message-ID": given, **headers}
    message = compat.new_message(
        multi=document["multi"],
        subject=document["subject"],
        body=document["body"],
        from_email=document["from"],
        headers=headers,
        **{name: document.get(name, []) for name in _LISTS},
    )
    for name, value in document.get("shape", {}).items():
        if name in compat.SHAPE:
            setattr(message, name, _charset(value) if isinstance(value, list) else value)
    if "alternatives" in document:
        for content, mimetype in document["alternatives"]:
            message.attach_alternative(_content(content, blobs), mimetype)  # type: ignore[attr-defined]
    for each in document.get("attachments", ()):
        if isinstance(each, dict):
            message.attachments.append(compat.mime_part(blobs[each["mime"]], each["kind"]))
        else:
            filename, content, mimetype = each
            message.attachments.append(EmailAttachment(filename, _content(content, blobs), mimetype))
    for name, value in document.get("attributes", {}).items():
        setattr(message, name, _untagged(value))
    return message


def _charset(value: Sequence[Any]) -> Charset:
    charset = Charset(value[0])
    charset.header_encoding, charset.body_encoding = value[1], value[2]
    return charset


def _content(content: Any, blobs: Mapping[str, bytes]) -> Any:
    if isinstance(content, str):
        return content
    if "blob" in content:
        return blobs[content["blob"]]
    if "mime" in content:
        return compat.mime_part(blobs[content["mime"]], content["kind"])
    return _message(content["message"], blobs, with_message_id=True)


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$pairs":
        return {_untagged(key): _untagged(item) for key, item in content}
    if tag == "$tuple":
        return tuple(_untagged(item) for item in content)
    return _TAGS[tag][2](content)
