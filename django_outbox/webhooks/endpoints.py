"""Endpoints: what an application, and an operator, does with them; and the fan-out to them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.errors import InvalidEventType, Reject, clean_text
from django_outbox.models import WebhookDelivery, WebhookEndpoint
from django_outbox.webhooks import store
from django_outbox.webhooks.box import seal, unseal
from django_outbox.webhooks.guard import check_headers, check_url
from django_outbox.webhooks.signing import new_secret, secret_key

if TYPE_CHECKING:
    from django_outbox.events import Event

logger = logging.getLogger("django_outbox.webhooks")

RESERVED_PREFIXES: Final = ("outbox.", "email.", "webhook.", "task.")
"""Types of the framework's own announcements, which are for the project and not for its customers."""

PREVIOUS_SECRETS: Final = 3
LONGEST_OVERLAP_SECONDS: Final = 7 * 86_400
EVENT_TYPES_LIMIT: Final = 100

BODY_WARNING_BYTES: Final = 20_000
BODY_LIMIT_BYTES: Final = 257 * 1_024
"""The largest payload by default, and what is put around it."""

TEST_TYPE: Final = "webhook.test"

_PATTERN: Final = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*(\.\*)?")


# --- endpoints


def create_endpoint(
    url: str,
    *,
    event_types: Iterable[str] = ("*",),
    organization_id: str = "",
    description: str = "",
    headers: Mapping[str, str] | None = None,
    enabled: bool = True,
    using: str | None = None,
) -> tuple[WebhookEndpoint, str]:
    """
    Store an endpoint and return it with its secret, which is shown this once.

    It gets the events of its organization, or of all without one, whose type is among
    ``event_types``: full types, prefixes such as ``"order.*"``, or ``"*"``. ``headers``
    are sent with every request and stored encrypted. Created disabled, it collects
    events for a later `replay`.

    :raises UnsafeURL: when the guard refuses the URL.
    :raises InvalidEventType: for a malformed or reserved type.
    :raises ValueError: for a header that must not be sent, or a text too long.
    """
    alias = using or get_settings().database
    secret = new_secret()
    now = engine.database_now(alias)
    endpoint = WebhookEndpoint(
        id=engine.new_id(),
        url=check_url(url),
        description=_text("description", description),
        organization_id=_text("organization_id", organization_id),
        event_types=check_event_types(event_types),
        enabled=enabled,
        disabled_at=None if enabled else now,
        disabled_reason="" if enabled else "created",
        sealed_secrets=seal([{"secret": secret, "until": None}]),
        sealed_headers=seal(check_headers(headers)) if headers else "",
        created_at=now,
    )
    endpoint.save(using=alias, force_insert=True)
    # What the database filled in, and times as they read.
    endpoint.refresh_from_db(using=alias)
    return endpoint, secret


def change_endpoint(
    endpoint: WebhookEndpoint,
    *,
    url: str | None = None,
    event_types: Iterable[str] | None = None,
    organization_id: str | None = None,
    description: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Change what is given, checked as in `create_endpoint`; ``headers={}`` removes them. Later attempts follow it."""
    changes: dict[str, Any] = {}
    if url is not None:
        changes["url"] = check_url(url)
    if event_types is not None:
        changes["event_types"] = check_event_types(event_types)
    if organization_id is not None:
        changes["organization_id"] = _text("organization_id", organization_id)
    if description is not None:
        changes["description"] = _text("description", description)
    if headers is not None:
        changes["sealed_headers"] = seal(check_headers(headers)) if headers else ""
    _write(endpoint, changes)


def rotate_secret(endpoint: WebhookEndpoint, *, overlap_seconds: float = 86_400, secret: str | None = None) -> str:
    """
    Give the endpoint a new secret and return it; it is shown this once.

    The secret before it signs too for ``overlap_seconds`` (0 to seven days), so that the
    receiver has time to change over; 0 when it became known. At most three former
    secrets stay. ``secret`` imports one instead of making it.

    :raises ValueError: for an overlap out of range, or a malformed secret.
    """
    if not 0 <= overlap_seconds <= LONGEST_OVERLAP_SECONDS:
        raise ValueError(f"overlap_seconds is {overlap_seconds}; it must lie between 0 and {LONGEST_OVERLAP_SECONDS}.")
    fresh = new_secret() if secret is None else secret
    secret_key(fresh)
    alias = endpoint._state.db or get_settings().database
    with transaction.atomic(using=alias):
        stored = WebhookEndpoint.objects.using(alias).select_for_update().get(pk=endpoint.pk)
        now = engine.database_now(alias)
        end = now.timestamp() + overlap_seconds
        former = [
            {"secret": entry["secret"], "until": end if entry["until"] is None else min(entry["until"], end)}
            for entry in unseal(stored.sealed_secrets)
        ]
        kept = [entry for entry in former if entry["until"] > now.timestamp()][:PREVIOUS_SECRETS]
        _write(
            endpoint,
            {
                "sealed_secrets": seal([{"secret": fresh, "until": None}, *kept]),
                # Written anew on this occasion, so that a former key can go one day.
                "sealed_headers": seal(unseal(stored.sealed_headers)) if stored.sealed_headers else "",
                "rotated_at": now,
            },
        )
    return fresh


def disable_endpoint(endpoint: WebhookEndpoint, *, reason: str = "operator") -> None:
    """Send nothing to the endpoint from now on; its events are kept for a `replay`."""
    alias = endpoint._state.db or get_settings().database
    rows = WebhookEndpoint.objects.using(alias).filter(pk=endpoint.pk, enabled=True)
    rows.update(enabled=False, disabled_at=engine.database_now(alias), disabled_reason=reason)
    endpoint.refresh_from_db(using=alias)


def enable_endpoint(endpoint: WebhookEndpoint) -> datetime | None:
    """
    Send to the endpoint again, its record of failures wiped; return since when it had been disabled.

    What it missed stays where it is until `replay` is called with that time.
    """
    alias = endpoint._state.db or get_settings().database
    with transaction.atomic(using=alias):
        stored = WebhookEndpoint.objects.using(alias).select_for_update().get(pk=endpoint.pk)
        since: datetime | None = stored.disabled_at
        _write(
            endpoint,
            {
                "enabled": True,
                "disabled_at": None,
                "disabled_reason": "",
                "paused_until": None,
                "open_until": None,
                "open_seconds": 0,
                "streak": 0,
                "failures": 0,
                "exhausted": 0,
                "failing_since": None,
                "warned_at": None,
            },
        )
    return since


def pause_endpoint(endpoint: WebhookEndpoint, *, seconds: float) -> None:
    """Send nothing to the endpoint for so long, and lose nothing; 0 ends a pause, one it asked for itself included."""
    if not 0 <= seconds <= 366 * 86_400:
        raise ValueError(f"seconds is {seconds}; it must lie between 0 and a year.")
    alias = endpoint._state.db or get_settings().database
    _write(endpoint, {"paused_until": engine.database_now(alias) + timedelta(seconds=seconds) if seconds else None})


def send_test(endpoint: WebhookEndpoint) -> WebhookDelivery:
    """
    Queue a delivery of type ``webhook.test`` for the endpoint and return it; the relay sends it like any other.

    :raises ValueError: while the endpoint is disabled.
    """
    alias = endpoint._state.db or get_settings().database
    if not WebhookEndpoint.objects.using(alias).filter(pk=endpoint.pk, enabled=True).exists():
        raise ValueError("The endpoint is disabled; enable it first.")
    event_id = engine.new_id()
    body = encode_body(event_id, TEST_TYPE, engine.database_now(alias), {"message": "This is a test."})
    store.insert_deliveries(
        event_id=event_id,
        event_type=TEST_TYPE,
        patterns=(),
        organization_id=endpoint.organization_id,
        body=body,
        quiet=True,
        using=alias,
        endpoint_id=endpoint.pk,
    )
    return WebhookDelivery.objects.using(alias).get(event_id=event_id)


def replay(endpoint: WebhookEndpoint, *, since: datetime) -> int:
    """
    Send the endpoint's dead deliveries that were created since a time anew, and return how many.

    Each gets a new life with all its attempts; what was delivered or refused for good
    stays as it is. A naive time is one of the project's time zone.

    :raises ValueError: while the endpoint is disabled.
    """
    alias = endpoint._state.db or get_settings().database
    if not WebhookEndpoint.objects.using(alias).filter(pk=endpoint.pk, enabled=True).exists():
        raise ValueError("The endpoint is disabled; enable it first.")
    if timezone.is_naive(since):
        since = timezone.make_aware(since)
    changed, last = 0, None
    while page := store.dead_since(endpoint.pk, since, using=alias, after=last, limit=1_000):
        changed += engine.retry(store.DELIVERIES, ids=page, status=("dead",), using=alias).changed
        last = page[-1]
    return changed


def _write(endpoint: WebhookEndpoint, changes: Mapping[str, Any]) -> None:
    """Write these columns and no others: deliveries write theirs at the same time."""
    alias = endpoint._state.db or get_settings().database
    if changes:
        WebhookEndpoint.objects.using(alias).filter(pk=endpoint.pk).update(**changes)
    endpoint.refresh_from_db(using=alias)


def check_event_types(event_types: Iterable[str]) -> list[str]:
    """Return the filters of an endpoint, each once, if all of them are well formed and may be asked for."""
    given: list[Any] = [event_types] if isinstance(event_types, str) else list(event_types)
    if not 1 <= len(given) <= EVENT_TYPES_LIMIT:
        raise InvalidEventType(f"An endpoint has 1 to {EVENT_TYPES_LIMIT} event types.")
    for pattern in given:
        if not isinstance(pattern, str) or len(pattern) > 128 or not _PATTERN.fullmatch(pattern):
            raise InvalidEventType(f'{str(pattern)[:128]!r} is not an event type, a prefix such as "order.*", or "*".')
        if pattern.startswith(RESERVED_PREFIXES):
            raise InvalidEventType(f"{pattern!r}: the framework's own announcements are not sent to endpoints.")
    return list(dict.fromkeys(given))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 255 or clean_text(value) != value:
        raise ValueError(f"{name} must be a text of at most 255 characters, without NUL.")
    return str.__str__(value)


# --- fan-out


def matching_patterns(event_type: str) -> list[str]:
    """Return every filter that an event of this type passes."""
    words = event_type.split(".")
    return ["*", event_type, *(".".join(words[:count]) + ".*" for count in range(1, len(words)))]


def encode_body(event_id: UUID, event_type: str, occurred_at: datetime, payload: Any) -> str:
    """
    Return the body of a webhook: compact JSON, written once, stored, signed and sent as it is.

    :raises Reject: when it is too large to send.
    """
    moment = occurred_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    document = {"id": str(event_id), "type": event_type, "timestamp": moment, "data": payload}
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    size = len(body.encode())
    if size > BODY_LIMIT_BYTES:
        raise Reject(f"the webhook's body would be {size:,} bytes, more than the {BODY_LIMIT_BYTES:,} that are sent")
    if size > BODY_WARNING_BYTES:
        logger.warning("webhook body is large event_type=%s event_id=%s bytes=%d", event_type, event_id, size)
    return body


def fan_out(event: Event, *, quiet: bool = False, using: str | None = None) -> int:
    """
    Write one delivery for each endpoint that wants an event, and return how many were written.

    Called again for the same event it writes nothing twice. The framework's own
    announcements are never sent to endpoints. ``quiet``: the deaths of these deliveries
    are not announced.

    :raises Reject: when the body is too large to send.
    """
    if event.type.startswith(RESERVED_PREFIXES):
        return 0
    return store.insert_deliveries(
        event_id=event.id,
        event_type=event.type,
        patterns=matching_patterns(event.type),
        organization_id=event.organization_id,
        body=encode_body(event.id, event.type, event.occurred_at, event.payload),
        quiet=quiet,
        using=using or get_settings().database,
    )
