"""
Alerts: operators are told what died, in few messages.

After a quiet time the first death is told at once. What dies in the window after it is
counted, and told in one summary at its end; while there is more to tell, one summary
follows another. So an outage that kills a thousand rows makes two messages, and one more
for each window that it lasts.

Everything here may happen twice and does its work once: a death is noted under the id of
its announcement, a message has a key made of what it is about, and the event that asks
for the next summary an id made of its window.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid5

from django.apps import apps
from django.conf import settings as django_settings
from django.core.mail import EmailMessage
from django.db import connections, transaction

from django_outbox import lease as engine
from django_outbox import mail, wake, webhooks
from django_outbox.conf import get_settings
from django_outbox.delivery import Cause, current_cause
from django_outbox.errors import UnsafeURL, clean_text
from django_outbox.events import Event, registry
from django_outbox.lease.vendors import dialect_of
from django_outbox.models import WebhookEndpoint
from django_outbox.webhooks import store
from django_outbox.webhooks.box import seal
from django_outbox.webhooks.guard import check_url
from django_outbox.webhooks.signing import new_secret

__all__ = ["HANDLER", "OPERATOR_ENDPOINT", "SUMMARY_DUE", "TYPES", "alert", "email_addresses"]

HANDLER: Final = "operator-alert"
SUMMARY_DUE: Final = "outbox.alert.due"
"""The event that asks for a summary at the end of a window."""
ALERT: Final = "outbox.alert"
"""The type of the webhooks that operators get."""
TYPES: Final = (
    "outbox.event.dead",
    "email.delivery.exhausted",
    "webhook.delivery.exhausted",
    "webhook.endpoint.disabled",
    "task.dead",
    SUMMARY_DUE,
)
"""What the handler is registered for."""

logger = logging.getLogger("django_outbox.alerts")

_SPACE: Final = UUID("5d0c0d0e-6a58-4f0e-9d0b-2b1f6f4c9a51")
OPERATOR_ENDPOINT: Final = uuid5(_SPACE, "endpoint")
"""The id of the webhook endpoint that `ALERT_WEBHOOK_URL` is kept in."""

_LATE_SECONDS: Final = 5.0
"""How long after its window a summary is made, so that what was noted at its end is committed."""
_GROUPS: Final = 15
_READ: Final = 5_000
_KEPT_DAYS: Final = 30
_WORDS: Final = {
    "outbox.event.dead": ("event", "events"),
    "email.delivery.exhausted": ("email", "emails"),
    "webhook.delivery.exhausted": ("webhook delivery", "webhook deliveries"),
    "webhook.endpoint.disabled": ("webhook endpoint", "webhook endpoints"),
    "task.dead": ("task", "tasks"),
}


def email_addresses() -> list[str]:
    """Return whom alerts are mailed to: ``OUTBOX["ALERT_EMAILS"]``, or else Django's ``ADMINS``."""
    given = get_settings().alert_emails
    if given is not None:
        return list(given)
    admins: Sequence[Any] = django_settings.ADMINS
    # Pairs of name and address, or addresses alone from Django 6.0 on.
    return [admin if isinstance(admin, str) else str(admin[1]) for admin in admins]


def alert(event: Event, *, using: str | None = None) -> None:
    """
    Note an announcement, and tell the operators at once or later; or make the summary that is due.

    Called twice for one event, also by two relays at once, it tells once. Its messages go
    through the queues, in the transaction that notes what they tell. They are quiet: that
    one cannot be delivered is never told, neither is that the operators' own endpoint is
    disabled.
    """
    alias = using or get_settings().database
    token = current_cause.set((current_cause.get() or Cause())._replace(quiet=True))
    try:
        # Where it is the outermost, a process that dies before the commit leaves nothing, and is repeated.
        with transaction.atomic(using=alias):
            if event.type == SUMMARY_DUE:
                _summarize(event, alias)
            elif not _about_ourselves(event):
                _note(event, alias)
    finally:
        current_cause.reset(token)


def _about_ourselves(event: Event) -> bool:
    return isinstance(event.payload, Mapping) and event.payload.get("endpoint_id") == str(OPERATOR_ENDPOINT)


def _note(event: Event, using: str) -> None:
    window = get_settings().alert_window_seconds
    now = engine.database_now(using).timestamp()
    subject_id, subject, error = _said(event)
    slot = int(now // window)
    row = {
        "id": event.id,
        "type": event.type,
        "subject_id": subject_id,
        "subject": subject,
        "error": error,
        "slot": slot,
    }
    if not _insert(row, using):
        return
    alerts = apps.get_model("django_outbox", "OperatorAlert").objects.using(using)
    quiet_since = datetime.fromtimestamp(now - window, UTC)
    if not alerts.filter(created_at__gt=quiet_since).exclude(pk=event.id).exists():
        # Of two that find it quiet at the same moment the second finds the first's key, and waits for the summary.
        key = f"{HANDLER}:first:{slot}"
        if _send(key, _Group.of([row]), 1, at=now, causes=[str(event.id)], using=using):
            alerts.filter(pk=event.id).update(told_at=datetime.fromtimestamp(now, UTC))
    _ask_for_summary(slot, now, using)


def _summarize(event: Event, using: str) -> None:
    now = engine.database_now(using).timestamp()
    slot = int(event.payload["slot"])
    alerts = apps.get_model("django_outbox", "OperatorAlert").objects.using(using)
    untold = alerts.filter(told_at__isnull=True).order_by("created_at", "pk")
    if connections[using].vendor == "postgresql":
        # Two copies of this event: the second waits here, and finds them told.
        untold = untold.select_for_update()
    rows = list(untold.values("id", "type", "subject_id", "subject", "error")[:_READ])
    if rows:
        ids = [row["id"] for row in rows]
        _send(
            f"{HANDLER}:summary:{ids[-1]}",
            _Group.of(rows),
            len(rows),
            at=now,
            causes=[str(id_) for id_ in ids[:_GROUPS]],
            using=using,
        )
        alerts.filter(pk__in=ids).update(told_at=datetime.fromtimestamp(now, UTC))
        # One more, for what is noted while this one is made; it ends the row of them when it finds nothing.
        _ask_for_summary(max(slot + 1, int(now // get_settings().alert_window_seconds)), now, using)
    old = alerts.filter(created_at__lt=datetime.fromtimestamp(now - _KEPT_DAYS * 86_400, UTC))
    alerts.filter(pk__in=list(old.order_by("created_at", "pk").values_list("pk", flat=True)[:_READ])).delete()


def _ask_for_summary(slot: int, now: float, using: str) -> None:
    """Write the event that makes the summary after a window; one that exists already is left as it is."""
    window = get_settings().alert_window_seconds
    row = engine.NewRow(
        id=uuid5(_SPACE, f"{window:g}:{slot}"),
        type=SUMMARY_DUE,
        payload=json.dumps({"slot": slot}),
        deliveries=registry.deliveries(SUMMARY_DUE),
        quiet=True,
        delay=max((slot + 1) * window + _LATE_SECONDS - now, 0.001),
        given_id=True,
    )
    if engine.insert_events([row], using=using):
        wake.notify_on_commit(using)


# --- what is said ----------------------------------------------------------------------------------------------------


def _said(event: Event) -> tuple[str, str, str]:
    """Return the id of what died, what it is, and why; from whichever queue the announcement comes."""
    payload = event.payload if isinstance(event.payload, Mapping) else {}
    subject_id = payload.get("id") or payload.get("endpoint_id") or ""
    names = ("type", "event_type", "task", "url", "kind")
    kind = next((payload[name] for name in names if payload.get(name)), "")
    handlers = payload.get("handlers")
    if isinstance(handlers, Mapping) and handlers:
        kind = f"{kind} ({', '.join(sorted(handlers))})"
    error = payload.get("error") or payload.get("reason") or ""
    return str(subject_id)[:255], _one_line(kind)[:255], _one_line(error)[:500]


def _one_line(text: Any) -> str:
    return " ".join(clean_text(str(text)).split())


@dataclass(frozen=True, slots=True)
class _Group:
    """Deaths of one kind, told in one line, with one of them as an example."""

    type: str
    subject: str
    error: str
    example_id: str
    count: int

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> list[_Group]:
        """Return the groups, the largest first. What differs in its error alone is one group."""
        counts = Counter((row["type"], row["subject"]) for row in rows)
        examples = {(row["type"], row["subject"]): row for row in reversed(rows)}
        return [
            cls(type_, subject, examples[type_, subject]["error"], examples[type_, subject]["subject_id"], count)
            for (type_, subject), count in counts.most_common()
        ]

    def line(self) -> str:
        """Return it as a line of text."""
        words = _WORDS.get(self.type, ("row", "rows"))[self.count > 1]
        verb = ("was disabled" if self.count == 1 else "were disabled") if "endpoint" in words else "died"
        what = f": {self.subject}" if self.subject else ""
        reason = self.error[:200]
        return (
            f"{self.count:,} {words} {verb}{what}"
            + (f"\n    {reason}" if reason else "")
            + f"\n    id {self.example_id}"
        )


def _title(groups: Sequence[_Group], count: int) -> str:
    if count == 1:
        return groups[0].line().splitlines()[0].removeprefix("1 ").capitalize()
    kinds: Counter[str] = Counter()
    for group in groups:
        kinds[group.type] += group.count
    parts = [f"{number:,} {_WORDS.get(type_, ('row', 'rows'))[number > 1]}" for type_, number in kinds.most_common()]
    return f"{', '.join(parts)} need attention"


def _send(key: str, groups: Sequence[_Group], count: int, *, at: float, causes: list[str], using: str) -> bool:
    """Queue the message on every way that is set up; return whether it is new on one."""
    title = _title(groups, count)
    lines = [group.line() for group in groups[:_GROUPS]]
    if len(groups) > _GROUPS:
        lines.append(f"and {len(groups) - _GROUPS} more kinds")
    new = False
    if addresses := email_addresses():
        window = get_settings().alert_window_seconds
        body = "\n\n".join(
            [
                *lines,
                f"What dies from now on is told in one summary, at most every {window:g} seconds.",
                "Look at the rows in the admin, or with: manage.py outbox_status",
            ]
        )
        message = EmailMessage(
            f"{django_settings.EMAIL_SUBJECT_PREFIX}{title}"[:200], body, django_settings.SERVER_EMAIL, addresses
        )
        new = mail.enqueue_email(message, idempotency_key=key, priority="urgent", using=using)[1]
    if url := get_settings().alert_webhook_url:
        moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        document = {
            "id": str(uuid5(_SPACE, key)),
            "type": ALERT,
            "timestamp": moment,
            # What chats show.
            "text": "\n".join([f"*{title}*", *lines]),
            "data": {
                "title": title,
                "count": count,
                "groups": [
                    {
                        "type": group.type,
                        "subject": group.subject,
                        "error": group.error,
                        "example_id": group.example_id,
                        "count": group.count,
                    }
                    for group in groups[:_GROUPS]
                ],
                "announcements": causes,
            },
        }
        new = _send_webhook(url, uuid5(_SPACE, key), document, using=using) or new
    return new


def _send_webhook(url: str, id_: UUID, document: Mapping[str, Any], *, using: str) -> bool:
    """Write the delivery of an alert to the operators' endpoint; return whether it is new."""
    try:
        _keep_endpoint(url, using)
    except UnsafeURL as error:
        # A check says so at start-up. What is told by email must not be lost for it.
        logger.error("alert webhook not sent: ALERT_WEBHOOK_URL is refused reason=%s", error)
        return False
    written = store.insert_deliveries(
        event_id=id_,
        event_type=ALERT,
        patterns=(),
        organization_id="",
        body=json.dumps(document, ensure_ascii=False, separators=(",", ":")),
        quiet=True,
        using=using,
        endpoint_id=OPERATOR_ENDPOINT,
    )
    return bool(written)


def _keep_endpoint(url: str, using: str) -> None:
    """Make the operators' endpoint, or point it at the URL of the settings. No event's type is among its own."""
    rebuilt = check_url(url)
    endpoint, _ = WebhookEndpoint.objects.using(using).get_or_create(
        pk=OPERATOR_ENDPOINT,
        defaults={
            "url": rebuilt,
            "description": "operator-alert",
            "event_types": [],
            "sealed_secrets": seal([{"secret": new_secret(), "until": None}]),
            "created_at": engine.database_now(using),
        },
    )
    if endpoint.url != rebuilt:
        webhooks.change_endpoint(endpoint, url=url)


# --- the table -------------------------------------------------------------------------------------------------------

_COLUMNS: Final = {
    "id": "uuid",
    "type": "text",
    "subject_id": "text",
    "subject": "text",
    "error": "text",
    "slot": "bigint",
}


def _insert(row: Mapping[str, Any], using: str) -> bool:
    """Note a death; return whether it was not noted yet. One in a transaction under way is waited for."""
    connection = connections[using]
    dialect = dialect_of(connection)
    table = connection.ops.quote_name(apps.get_model("django_outbox", "OperatorAlert")._meta.db_table)
    names = ", ".join(_COLUMNS)
    values = ", ".join(f"o.{name}" for name in _COLUMNS)
    sql = f"""
        INSERT INTO {table} ({names}, created_at) SELECT {values}, {dialect.clock} FROM {dialect.records(_COLUMNS)}
        WHERE true ON CONFLICT (id) DO NOTHING RETURNING id"""
    with connection.cursor() as cursor:
        cursor.execute(sql, [json.dumps([{name: dialect.json_value(value) for name, value in row.items()}])])
        return bool(cursor.fetchall())
