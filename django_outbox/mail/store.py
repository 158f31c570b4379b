"""
The email tables: the queue's rows, their content, and the attachments that emails share.

What a message says is written once, beside the row that claims and settles rewrite, and
goes when the row is purged, or for a sensitive one when it is final.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.apps import apps
from django.db import connections, transaction
from django.db.models import Q
from django.db.models.functions import Length

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.mail.codec import Stored

__all__ = [
    "EMAILS",
    "documents",
    "drop_content",
    "insert_emails",
    "insert_follow_up",
    "load",
    "sweep_blobs",
    "wipe_final",
]

_CONTENTS: Final = 100
_SHA_BATCH: Final = 100
DOCUMENT_AHEAD: Final = 50_000
"""Characters of a document that are worth keeping in memory until its turn comes."""
SWEPT: Final = 500
"""Blobs that one sweep looks at."""

_COLUMNS: Final = {
    "priority": "int",
    "backend_alias": "text",
    "subject": "text",
    "recipient": "text",
    "message_id": "text",
    "idempotency_key": "text",
    "expires_at": "timestamptz",
    "sensitive": "boolean",
    "refused": "jsonb",
    "organization_id": "text",
    "request_id": "text",
    "causation_id": "uuid",
}


def _model(name: str) -> Any:
    return apps.get_model("django_outbox", name)


def _discarded(ids: Sequence[UUID], using: str) -> None:
    wipe_final(ids, using=using)


def _purged(ids: Sequence[UUID], using: str) -> None:
    drop_content(ids, using=using)


EMAILS: Final = engine.Queue(
    name="email",
    model_name="OutboxEmail",
    content=(
        "subject",
        "recipient",
        "backend_alias",
        "priority",
        "message_id",
        "expires_at",
        "sensitive",
        "maybe_sent",
        "idempotency_key",
        "organization_id",
        "request_id",
    ),
    # The content stays in its table until the message is sent, so a claim is small.
    bulk="subject",
    handlers=False,
    announcement="email.delivery.exhausted",
    outcome_columns={
        "failure_kind": "text",
        "last_code": "text",
        "refused": "jsonb",
        "maybe_sent": "boolean",
        "provider_message_id": "text",
    },
    retry_condition="NOT wiped",
    on_discard=_discarded,
    on_purge=_purged,
)


def insert_emails(emails: Sequence[tuple[Mapping[str, Any], Stored]], *, using: str) -> list[tuple[UUID, bool]]:
    """
    Write emails in the caller's transaction; return for each the id of its row, and whether it is new.

    An idempotency key that exists already writes nothing, and gives the row that holds it;
    one in a transaction under way is waited for.
    """
    ids = engine.new_ids(len(emails))
    rows = [{"id": id_, "refused": {}, **columns} for id_, (columns, _) in zip(ids, emails, strict=True)]
    keyed = any(row.get("idempotency_key") is not None for row in rows)
    # Keys in one order, so that two transactions which write several cannot wait for one another.
    left = sorted(rows, key=lambda row: row.get("idempotency_key") or "") if keyed else rows
    written: set[UUID] = set()
    held: dict[str, UUID] = {}
    while left:
        unique = "idempotency_key" if keyed else ""
        written |= set(engine.insert_rows(EMAILS, left, columns=_COLUMNS, using=using, unique=unique))
        missed = [row for row in left if row["id"] not in written]
        held |= _holders([row["idempotency_key"] for row in missed], using)
        # Who held a key may have been purged between the two statements.
        left = [row for row in missed if row["idempotency_key"] not in held]
    fresh = [(id_, stored) for id_, (_, stored) in zip(ids, emails, strict=True) if id_ in written]
    if fresh:
        _insert_content(fresh, using)
        wake.notify_on_commit(using, queue=EMAILS.name)
    return [(row["id"], True) if row["id"] in written else (held[row["idempotency_key"]], False) for row in rows]


def _holders(keys: Sequence[str], using: str) -> dict[str, UUID]:
    if not keys:
        return {}
    rows = _model("OutboxEmail").objects.using(using).filter(idempotency_key__in=keys)
    return dict(rows.values_list("idempotency_key", "pk"))


def _insert_content(emails: Sequence[tuple[UUID, Stored]], using: str) -> None:
    content = _model("OutboxEmailContent")
    for start in range(0, len(emails), _CONTENTS):
        chunk = [(id_, stored.document) for id_, stored in emails[start : start + _CONTENTS]]
        engine.insert_values(content, ("email_id", "document"), chunk, using=using)
    blobs = {digest: data for _, stored in emails for digest, data in stored.blobs.items()}
    if blobs:
        places = _blob_ids(blobs, using)
        _refer([(id_, places[digest]) for id_, stored in emails for digest in stored.blobs], using)


def _refer(pairs: Iterable[tuple[UUID, UUID]], using: str) -> None:
    attachment = _model("OutboxEmailAttachment")
    attachment.objects.using(using).bulk_create(
        [attachment(email_id=email_id, blob_id=blob_id) for email_id, blob_id in pairs]
    )


def _blob_ids(blobs: Mapping[str, bytes], using: str) -> dict[str, UUID]:
    """
    Return where each content is stored, after storing those that are not yet.

    A stored blob is locked against removal until the caller commits (its key alone, which
    others who refer to it share). One that a purge holds, or that is not committed yet, is
    written again: nobody waits for anybody here.
    """
    blob = _model("OutboxEmailBlob")
    found: dict[str, UUID] = {}
    digests = sorted(blobs)
    for start in range(0, len(digests), _SHA_BATCH):
        found |= engine.keep_rows(blob, "sha256", digests[start : start + _SHA_BATCH], using=using)
    missing = {
        digest: id_ for digest, id_ in zip(digests, engine.new_ids(len(digests)), strict=True) if digest not in found
    }
    for digest, id_ in missing.items():
        blob.objects.using(using).bulk_create([blob(id=id_, sha256=digest, content=blobs[digest])])
    return found | missing


def load(email_id: UUID, *, using: str, document: str | None = None) -> tuple[str, dict[str, bytes]] | None:
    """Return an email's document, unless it is given, and its blobs; ``None`` when its content is gone."""
    if document is None:
        content = _model("OutboxEmailContent").objects.using(using)
        document = next(iter(content.filter(pk=email_id).values_list("document", flat=True)), None)
    if document is None:
        return None
    if '"blob":' not in document and '"mime":' not in document:
        return document, {}
    ids = _model("OutboxEmailAttachment").objects.using(using).filter(email_id=email_id).values("blob_id")
    blobs = _model("OutboxEmailBlob").objects.using(using).filter(pk__in=ids).values_list("sha256", "content")
    return document, {digest: bytes(data) for digest, data in blobs}


def documents(ids: Sequence[UUID], *, using: str) -> dict[UUID, str]:
    """Return the documents of emails, but for large ones, which are loaded when their turn comes."""
    rows = _model("OutboxEmailContent").objects.using(using).alias(size=Length("document"))
    return dict(rows.filter(pk__in=ids, size__lt=DOCUMENT_AHEAD).values_list("pk", "document"))


# --- what goes -------------------------------------------------------------------------------------------------------


def wipe_final(ids: Sequence[UUID], *, using: str) -> None:
    """
    Remove the content of those emails that are sensitive and will not be sent again by themselves.

    Belongs into the transaction that made them so: a crash before its commit leaves both
    undone, and both are done after it.
    """
    email = _model("OutboxEmail").objects.using(using)
    final = Q(status__in=("done", "failed")) | Q(status="dead", due_at__isnull=True)
    chosen = list(email.filter(final, pk__in=ids, sensitive=True, wiped=False).values_list("pk", flat=True))
    if chosen:
        email.filter(pk__in=chosen).update(wiped=True)
        drop_content(chosen, using=using)


def drop_content(ids: Sequence[UUID], *, using: str) -> None:
    """Remove what emails say, and the attachments that no other email needs."""
    with transaction.atomic(using=using):
        _model("OutboxEmailContent").objects.using(using).filter(pk__in=ids).delete()
        attachments = _model("OutboxEmailAttachment").objects.using(using).filter(email_id__in=ids)
        blob_ids = set(attachments.values_list("blob_id", flat=True))
        if blob_ids:
            attachments.delete()
            _drop_blobs(sorted(blob_ids), using)


def _drop_blobs(ids: Sequence[UUID], using: str) -> int:
    """
    Remove those blobs that no email needs; return how many.

    Locked first and then asked about in a statement of its own: whoever referred to one
    before it was locked has committed, and is seen; whoever comes later cannot lock it and
    writes the bytes anew. One that is locked now is left for `sweep_blobs`.
    """
    blob = _model("OutboxEmailBlob").objects.using(using)
    rows = blob.filter(pk__in=ids)
    if connections[using].vendor == "postgresql":
        rows = rows.select_for_update(skip_locked=True).order_by("pk")
    locked = list(rows.values_list("pk", flat=True))
    needed = set(
        _model("OutboxEmailAttachment")
        .objects.using(using)
        .filter(blob_id__in=locked)
        .values_list("blob_id", flat=True)
    )
    gone = [id_ for id_ in locked if id_ not in needed]
    if gone:
        blob.filter(pk__in=gone).delete()
    return len(gone)


def sweep_blobs(after: UUID | None, *, using: str) -> tuple[UUID | None, int]:
    """
    Look at the next blobs in order of their ids, and remove those that no email needs.

    Returns where to go on, ``None`` from the beginning, and how many went. It finds what a
    purge had to leave because somebody referred to it at that moment and then rolled back.
    """
    rows = _model("OutboxEmailBlob").objects.using(using).order_by("pk")
    if after is not None:
        rows = rows.filter(pk__gt=after)
    ids = list(rows.values_list("pk", flat=True)[:SWEPT])
    if not ids:
        return None, 0
    with transaction.atomic(using=using):
        gone = _drop_blobs(ids, using)
    return (ids[-1] if len(ids) == SWEPT else None), gone


# --- what follows ----------------------------------------------------------------------------------------------------


def insert_follow_up(lease: engine.Lease, addresses: Sequence[str], *, delay: float, using: str) -> UUID | None:
    """
    Queue an email's message once more, for some of its recipients; return the id of the new row.

    It is the same message with the same Message-ID, and still shows whom it was first sent
    to. Belongs into the transaction that settles the first, so that it is queued once.
    """
    loaded = _model("OutboxEmailContent").objects.using(using).filter(pk=lease.id).values_list("document", flat=True)
    text = next(iter(loaded), None)
    if text is None:
        return None
    document = json.loads(text)
    headers = [pair for pair in document.get("headers", []) if pair[0].lower() not in {"to", "cc"}]
    shown = {name.lower(): value for name, value in document.get("headers", [])}
    for name in ("To", "Cc"):
        listed = shown.get(name.lower()) or ", ".join(document.pop(name.lower(), []))
        document.pop(name.lower(), None)
        if listed:
            headers.append([name, listed])
    document |= {"bcc": list(addresses), "headers": headers}
    content = lease.content
    id_ = engine.new_id()
    row = {
        "id": id_,
        "delay": delay,
        "quiet": lease.quiet,
        "priority": content["priority"],
        "backend_alias": content["backend_alias"],
        "subject": content["subject"],
        "recipient": addresses[0][:320],
        "message_id": content["message_id"],
        "expires_at": None if content["expires_at"] is None else datetime.fromtimestamp(content["expires_at"], UTC),
        "sensitive": bool(content["sensitive"]),
        "refused": {},
        "organization_id": content["organization_id"],
        "request_id": content["request_id"],
        "causation_id": lease.id,
    }
    engine.insert_rows(EMAILS, [row], columns=_COLUMNS, using=using)
    model = _model("OutboxEmailContent")
    model.objects.using(using).create(
        email_id=id_, document=json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    )
    attachments = _model("OutboxEmailAttachment").objects.using(using).filter(email_id=lease.id)
    _refer([(id_, blob_id) for blob_id in attachments.values_list("blob_id", flat=True)], using)
    return id_
