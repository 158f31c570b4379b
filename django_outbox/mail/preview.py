"""What a stored email looks like, for people: texts, the HTML made harmless, the attachments by name."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Final
from uuid import UUID

from django.core.mail import EmailMessage

from django_outbox.mail import store
from django_outbox.mail.codec import decode

__all__ = ["Preview", "preview"]

TEXT_SHOWN: Final = 100_000
HTML_SHOWN: Final = 1_000_000
IMAGES_SHOWN: Final = 2 * 2**20
"""Bytes of inline images that are shown."""

# Nothing is loaded, run or sent: no remote image tells its sender that somebody looked.
_HEAD: Final = (
    '<!doctype html><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
    " style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'\">"
    '<meta name="referrer" content="no-referrer"><meta http-equiv="x-dns-prefetch-control" content="off">'
)


@dataclass(frozen=True, slots=True)
class Preview:
    """An email for a page; ``document`` goes into the ``srcdoc`` of a sandboxed frame, and nowhere else."""

    sender: str
    recipients: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""
    document: str = ""
    attachments: list[tuple[str, str, int]] = field(default_factory=list)
    """Name, type and size in bytes."""
    problem: str = ""


def preview(email_id: UUID, *, using: str) -> Preview | None:
    """Return how an email looks, or ``None`` when its content is gone."""
    loaded = store.load(email_id, using=using)
    if loaded is None:
        return None
    try:
        message = decode(*loaded, with_message_id=False)
    except (ValueError, KeyError, TypeError, LookupError) as error:
        return Preview("", problem=f"It cannot be read: {error}")
    html, text = _bodies(message)
    attachments = list(_attachments(message))
    names = (("To", message.to), ("Cc", message.cc), ("Bcc", message.bcc), ("Reply-To", message.reply_to))
    return Preview(
        sender=message.from_email,
        recipients=[(name, ", ".join(map(str, listed))) for name, listed in names if listed],
        text=text[:TEXT_SHOWN],
        document=_HEAD + _with_images(html[:HTML_SHOWN], attachments) if html else "",
        attachments=[(each.name, each.mimetype, len(each.content)) for each in attachments],
    )


def _bodies(message: EmailMessage) -> tuple[str, str]:
    """Return the HTML and the plain text of a message."""
    html, text = "", ""
    if message.content_subtype == "html":
        html = str(message.body)
    else:
        text = str(message.body)
    for content, mimetype in getattr(message, "alternatives", ()):
        if mimetype == "text/html" and isinstance(content, str):
            html = html or content
    return html, text


@dataclass(frozen=True, slots=True)
class _Attachment:
    name: str
    mimetype: str
    content: bytes
    cid: str = ""


def _attachments(message: EmailMessage) -> Iterator[_Attachment]:
    attachment: Any
    for attachment in message.attachments:
        if isinstance(attachment, Message):
            payload = attachment.get_payload(decode=True)
            yield _Attachment(
                name=attachment.get_filename() or "(no name)",
                mimetype=attachment.get_content_type(),
                content=payload if isinstance(payload, bytes) else b"",
                cid=str(attachment.get("Content-ID", "")).strip("<> "),
            )
        else:
            name, content, mimetype = attachment
            data = content if isinstance(content, bytes) else str(content).encode("utf-8", "replace")
            if isinstance(content, EmailMessage):
                data = b""
            yield _Attachment(name or "(no name)", mimetype or "", data)


def _with_images(html: str, attachments: list[_Attachment]) -> str:
    """Put the images that came with the message where it refers to them."""
    room = IMAGES_SHOWN
    for each in attachments:
        if each.cid and re.fullmatch(r"image/(?:png|jpeg|gif|webp)", each.mimetype) and len(each.content) <= room:
            room -= len(each.content)
            html = html.replace(
                f"cid:{each.cid}", f"data:{each.mimetype};base64,{base64.b64encode(each.content).decode()}"
            )
    return html
