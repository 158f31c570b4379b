"""The pages of the events queue: what is owed to whom, and the payload."""

# The signatures are Django's.
# ruff: noqa: ARG002

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Q, QuerySet
from django.db.models.fields.json import KeyTransform
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_outbox.admin.queue import (
    NEWEST,
    ORDER,
    QueueAdmin,
    StatusFilter,
    again,
    both,
    chosen_status,
    exact,
    held,
    lease_facts,
)
from django_outbox.events import EVENTS, registry
from django_outbox.lease import DISCARDABLE, Report, discard
from django_outbox.models import OutboxEvent, Status

SAMPLED: Final = 300
"""Newest rows in which the filters find their choices, beside the registry."""
PAYLOAD_SHOWN: Final = 100_000
"""Characters of JSON that the detail page shows."""


def _about(event: OutboxEvent) -> str:
    return f"{event.aggregate_type}:{event.aggregate_id}" if event.aggregate_id else event.aggregate_type


# --- one delivery ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """One handler's share of an event, as a person reads it."""

    handler: str
    state: str
    tone: str
    when: str
    error: str
    advice: str
    owed: bool


def deliveries_of(event: OutboxEvent) -> list[Delivery]:
    """Return how each handler of an event stands."""
    return [_delivery(event, name, event.failures.get(name, {})) for name in event.deliveries]


def _delivery(event: OutboxEvent, name: str, failure: Mapping[str, Any]) -> Delivery:
    delivered = _parsed(event.deliveries[name])
    advice = ""
    if delivered:
        state, tone = "delivered", "done"
    elif failure.get("discarded"):
        state, tone = "discarded", "quiet"
    elif failure.get("lost"):
        state, tone = "worker lost", "dead"
        advice = "Its process died each time this handler ran. Look for memory or native code, then retry."
    elif failure.get("rejected"):
        state, tone = "rejected", "failed"
        advice = "The handler refused it for good. Retry once that has changed."
    elif failure.get("parked_at"):
        state, tone = "parked: no such handler", "waiting"
    elif failure.get("marks"):
        state, tone = "suspect", "waiting"
        advice = "Its process died while this handler ran; it is started once more, in a process of its own."
    elif failure.get("error"):
        again = event.due_at is not None or event.status == Status.PENDING
        state, tone = ("retrying", "waiting") if again else ("given up", "dead")
    else:
        state, tone = "owed", "pending"
    owed = not delivered and not failure.get("discarded")
    if owed and registry.resolve(event.type, name) is None:
        advice = (
            f"No code for it here. Deploy the code; or, if it was renamed: outbox_retry --rename-handler {name}=NEW;"
            " or, if it is gone, discard this delivery."
        )
    return Delivery(
        handler=name,
        state=state,
        tone=tone,
        when=exact(moment) if (moment := delivered or _parsed(failure.get("at"))) else "",
        error="" if delivered else str(failure.get("error", "")),
        advice=advice,
        owed=owed,
    )


def _parsed(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def advice_for(event: OutboxEvent) -> str:
    """Return what happens next to an event, and what to press."""
    if held(event):
        return "A relay is working on it right now. Neither button changes it meanwhile."
    states = {each.state for each in deliveries_of(event)}
    match event.status:
        case Status.DEAD:
            return (
                f"Its schedule is spent. {again(event)} Once the cause is gone, press Retry to try at once, on a new"
                " schedule. If it shall never be delivered, press Discard."
            )
        case Status.FAILED if "rejected" in states:
            return "A handler refused it for good. Once that has changed, press Retry."
        case Status.WAITING if "parked: no such handler" in states:
            return f"No relay that had it knows a handler that it is owed to; see below. {again(event)}"
        case Status.WAITING:
            return f"{again(event)} Retry makes it due now, with a new schedule."
    return _ADVICE[event.status]


_ADVICE: Final[Mapping[str, str]] = {
    Status.FAILED: "It was discarded. Nothing more happens to it.",
    Status.PENDING: "It is due; the next free relay takes it. Is one running? outbox_status says what is in flight.",
    Status.DONE: "Every delivery was made, or closed by hand. Nothing is owed.",
}


# --- filters ---------------------------------------------------------------------------------------------------------


def _sampled(request: HttpRequest, rows: QuerySet[Any]) -> tuple[list[str], list[str]]:
    """Return the event types and handlers of the newest rows, and of the newest that are dead or waiting."""
    # Two filters ask, in one request.
    found: tuple[list[str], list[str]] | None = vars(request).get("outbox_sampled")
    if found is None:
        types: set[str] = set()
        handlers: set[str] = set()
        for status in (None, Status.DEAD, Status.WAITING):
            sample = rows.order_by(*ORDER[status]).filter(status=status) if status else rows.order_by(*NEWEST)
            for type_, deliveries in sample.values_list("type", "deliveries")[:SAMPLED]:
                types.add(type_)
                handlers.update(deliveries)
        for handler in registry.handlers():
            types.update(pattern for pattern in handler.patterns if "*" not in pattern)
            handlers.add(handler.name)
        found = sorted(types), sorted(handlers)
        vars(request)["outbox_sampled"] = found
    return found


class _SampledFilter(admin.SimpleListFilter):
    """A filter whose choices come from the registry and the newest rows."""

    place: ClassVar[int]

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, str]]:
        """Return the choices, and the one that the address names, whatever it is."""
        choices = _sampled(request, model_admin.get_queryset(request))[self.place]
        chosen = request.GET.get(self.parameter_name or "")
        return [(name, name) for name in (choices if not chosen or chosen in choices else [chosen, *choices])]

    def value(self) -> str | None:
        """Return the value in the address, if a column can hold it."""
        value: str | None = super().value()
        if value and "\x00" in value:
            raise IncorrectLookupParameters
        return value

    def has_output(self) -> bool:
        """Show it always: a list that is filtered must say so."""
        return True


class TypeFilter(_SampledFilter):
    """By event type."""

    title = "type"
    parameter_name = "type"
    place = 0

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the type."""
        return queryset.filter(type=self.value()) if self.value() else queryset


class HandlerFilter(_SampledFilter):
    """By handler: in the list of one status other than done the events owed to it, else all of its events."""

    title = "handler"
    parameter_name = "handler"
    place = 1

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the handler."""
        name = self.value()
        if not name:
            return queryset
        if chosen_status(request) in {None, Status.DONE}:
            return queryset.filter(deliveries__has_key=name)
        rows: QuerySet[Any] = queryset.alias(owed=KeyTransform(name, "deliveries")).filter(owed=None)
        return rows


@admin.register(OutboxEvent)
class OutboxEventAdmin(QueueAdmin):
    """Look at events, retry and discard them, or one handler's delivery of them."""

    queue = EVENTS
    heavy = ("payload", "headers")
    unindexed = ("type", "handler")
    born = "emitted"
    search_help = "an event's id, or type:id of what it is about, such as order:123."
    search_help_text = "An event's id, or what it is about as type:id, such as order:123."
    list_display = ("shown_status", "event", "owed_to", "why", "when")
    list_display_links = ("event",)
    list_filter = (StatusFilter, TypeFilter, HandlerFilter)
    change_form_template = "admin/django_outbox/outboxevent/change_form.html"

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any] | None:
        """Find by ``type:id`` of the aggregate."""
        place = next((index for index, letter in enumerate(term) if letter in ":/"), -1)
        if place < 0 or not term[place + 1 :].strip():
            return None
        # The predicate of the partial index stands here too: SQLite uses it only when it reads it.
        about = Q(aggregate_type=term[:place].strip(), aggregate_id=term[place + 1 :].strip())
        return rows.filter(about & ~Q(aggregate_id=""))

    @admin.display(description="event")
    def event(self, event: OutboxEvent) -> SafeString:
        """Show the type, and what the event is about."""
        return format_html('{} <span class="outbox-about">{}</span>', event.type, _about(event))

    @admin.display(description="owed to")
    def owed_to(self, event: OutboxEvent) -> SafeString | str:
        """Show the handlers that have not had it yet."""
        return format_html_join(
            ", ",
            '<span title="{}">{}</span>',
            (
                (each.state, f"{each.handler} (parked)" if each.state.startswith("parked") else each.handler)
                for each in deliveries_of(event)
                if each.owed
            ),
        )

    # One event.

    def heading(self, row: OutboxEvent) -> str:
        """Return the type."""
        return row.type

    def about(self, row: OutboxEvent) -> str:
        """Return the aggregate."""
        return _about(row)

    def advice(self, row: OutboxEvent) -> str:
        """Return what happens next, and what to press."""
        return advice_for(row)

    def detail(self, request: HttpRequest, row: OutboxEvent) -> dict[str, Any]:
        """Return deliveries, payload and headers."""
        deliveries = deliveries_of(row)
        return {
            "deliveries": deliveries,
            "payload": _json(row.payload),
            "headers": _json(row.headers) if row.headers else "",
            "may_close": row.status in (*DISCARDABLE, Status.FAILED)
            and len(deliveries) > 1
            and self.has_discard_permission(request),
        }

    def facts(self, row: OutboxEvent) -> list[tuple[str, Any]]:
        """Return what is known beside payload and deliveries."""
        cause: SafeString | str = ""
        if row.causation_id:
            name = "admin:django_outbox_outboxevent_change"
            link = reverse(name, args=[row.causation_id], current_app=self.admin_site.name)
            cause = format_html('<a href="{}">{}</a>', link, row.causation_id)
        return [
            ("occurred", both(row.occurred_at)),
            *(("emitted" if name == "created" else name, value) for name, value in lease_facts(row)),
            ("organization", row.organization_id),
            ("request", row.request_id),
            ("caused by", cause),
        ]

    def run_verb(self, request: HttpRequest, row: Any, verb: str, shown: str) -> tuple[Report, str]:
        """Run a verb on one event, or close one handler's delivery of it."""
        handler = request.POST.get("handler") or None
        if handler and verb == "discard":
            return discard(EVENTS, using=self.using, ids=[row.pk], status=(shown,), handler=handler), handler
        return super().run_verb(request, row, verb, shown)


def _json(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= PAYLOAD_SHOWN:
        return text
    return f"{text[:PAYLOAD_SHOWN]}\n… {len(text) - PAYLOAD_SHOWN:,} more characters"
