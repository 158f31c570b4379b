"""
The admin: what is dead, why, and what to press.

Nothing is edited here; retry and discard go through the verbs of ``lease``. Every
list is an ordered walk of one index with an end: no count over the table, no sort of
it, and a filter that no index serves looks at the newest rows only, and says so.
"""

# The signatures are Django's.
# ruff: noqa: ARG002

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.fields.json import KeyTransform
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil

from django_outbox.conf import get_settings
from django_outbox.events import EVENTS, registry
from django_outbox.lease import DISCARDABLE, RETRYABLE, Report, discard, retry
from django_outbox.models import OutboxEvent, Status

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[OutboxEvent]
    _Paginator = Paginator[OutboxEvent]
    _Rows = QuerySet[OutboxEvent]
else:
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator
    _Rows = QuerySet

__all__ = ["OutboxEventAdmin"]

logger = logging.getLogger("django_outbox.admin")

LISTED: Final = 10_000
"""Rows that a list counts and pages through, that a filter without an index looks at, that one action changes."""
COUNTED: Final = 1_000
"""Where the counts above the list stop."""
SAMPLED: Final = 300
"""Newest rows in which the filters find their choices, beside the registry."""
PAYLOAD_SHOWN: Final = 100_000
"""Characters of JSON that the detail page shows."""

# The order of each list is the one of its index: due first, or newest first.
_ORDER: Final[Mapping[str, tuple[str, str]]] = {
    Status.DEAD: ("-dead_at", "-id"),
    Status.FAILED: ("-finished_at", "-id"),
    Status.WAITING: ("due_at", "id"),
    Status.PENDING: ("created_at", "id"),
    Status.DONE: ("-finished_at", "-id"),
}
_NEWEST: Final = ("-id",)


def _status(request: HttpRequest) -> str | None:
    """Return the status that the list is filtered by."""
    value = request.GET.get("status") or request.GET.get("status__exact")
    return value if value in _ORDER else None


def _number(count: int, bound: int) -> str:
    return f"{bound:,}+" if count > bound else f"{count:,}"


def _events(count: int) -> str:
    return f"{count:,} event{'' if count == 1 else 's'}"


def _words(moment: datetime) -> str:
    """Return a moment as people say it."""
    now = datetime.now(UTC)
    if abs((moment - now).total_seconds()) < 60:
        return "just now" if moment <= now else "in less than a minute"
    return f"{timesince(moment, depth=1)} ago" if moment < now else f"in {timeuntil(moment, depth=1)}"


def _exact(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(moment: datetime | None) -> SafeString | str:
    """Return a moment in words, with the exact one behind them."""
    if moment is None:
        return ""
    return format_html('<time datetime="{}" title="{}">{}</time>', moment.isoformat(), _exact(moment), _words(moment))


def _about(event: OutboxEvent) -> str:
    return f"{event.aggregate_type}:{event.aggregate_id}" if event.aggregate_id else event.aggregate_type


def _held(event: OutboxEvent) -> bool:
    return event.lease_until is not None and event.lease_until > datetime.now(UTC)


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
        when=_exact(moment) if (moment := delivered or _parsed(failure.get("at"))) else "",
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
    if _held(event):
        return "A relay is working on it right now. Neither button changes it meanwhile."
    again = (
        f"It is tried again by itself {_words(event.due_at)}." if event.due_at else "It is not tried again by itself."
    )
    states = {each.state for each in deliveries_of(event)}
    match event.status:
        case Status.DEAD:
            return (
                f"Its schedule is spent. {again} Once the cause is gone, press Retry to try at once, on a new schedule."
                " If it shall never be delivered, press Discard."
            )
        case Status.FAILED if "rejected" in states:
            return "A handler refused it for good. Once that has changed, press Retry."
        case Status.WAITING if "parked: no such handler" in states:
            return f"No relay that had it knows a handler that it is owed to; see below. {again}"
        case Status.WAITING:
            return f"{again} Retry makes it due now, with a new schedule."
    return _ADVICE[event.status]


_ADVICE: Final[Mapping[str, str]] = {
    Status.FAILED: "It was discarded. Nothing more happens to it.",
    Status.PENDING: "It is due; the next free relay takes it. Is one running? outbox_status says what is in flight.",
    Status.DONE: "Every delivery was made, or closed by hand. Nothing is owed.",
}


# --- lists -----------------------------------------------------------------------------------------------------------


class BoundedPaginator(_Paginator):
    """Counts no further than it pages."""

    @cached_property
    def count(self) -> int:
        """The number of rows, at most ``LISTED``."""
        # The order stays in: with it the planner walks the list's index and stops.
        rows: Any = self.object_list
        return int(rows[:LISTED].count())


class EventChangeList(ChangeList):
    """A list in the order of an index."""

    windowed = False
    """Whether only the newest rows were looked at."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[str | Combinable]:
        """Return the order of the index that serves the filter in force."""
        # A search is served by the primary key or the aggregate's index, which end in the id.
        status = None if self.query else _status(request)
        return list(_ORDER[status] if status else _NEWEST)

    def get_queryset(self, request: HttpRequest, exclude_parameters: list[str | None] | None = None) -> _Rows:
        """Return the rows of the list, without what it does not show."""
        rows: _Rows = super().get_queryset(request, exclude_parameters)
        if not self.query and (request.GET.get("type") or request.GET.get("handler")):
            rows = self._window(request, rows)
        return rows.defer("payload", "headers")

    def _window(self, request: HttpRequest, rows: _Rows) -> _Rows:
        """Keep a filter that no index serves to the first rows of the list's order."""
        status = _status(request)
        order = _ORDER[status] if status else _NEWEST
        first = order[0].lstrip("-")
        whole: _Rows = self.root_queryset.order_by(*order)
        if status:
            whole = whole.filter(status=status)
        last = list(whole.values_list(first, flat=True)[LISTED : LISTED + 1])
        if not last:
            return rows
        self.windowed = True
        return rows.filter(**{f"{first}__{'gte' if order[0].startswith('-') else 'lte'}": last[0]})


class StatusFilter(admin.SimpleListFilter):
    """By status, the dead first."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, str]]:
        """Return the statuses, those first that need a person."""
        return [(str(status), str(status)) for status in _ORDER]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the status."""
        value = self.value()
        if value is None:
            return queryset
        if value not in _ORDER:
            raise IncorrectLookupParameters
        return queryset.filter(status=value)


def _sampled(request: HttpRequest, rows: _Rows) -> tuple[list[str], list[str]]:
    """Return the event types and handlers of the newest rows, and of the newest that are dead or waiting."""
    # Two filters ask, in one request.
    found: tuple[list[str], list[str]] | None = vars(request).get("outbox_sampled")
    if found is None:
        types: set[str] = set()
        handlers: set[str] = set()
        for status in (None, Status.DEAD, Status.WAITING):
            sample = rows.order_by(*_ORDER[status]).filter(status=status) if status else rows.order_by(*_NEWEST)
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
        if _status(request) in {None, Status.DONE}:
            return queryset.filter(deliveries__has_key=name)
        rows: QuerySet[Any] = queryset.alias(owed=KeyTransform(name, "deliveries")).filter(owed=None)
        return rows


@admin.register(OutboxEvent)
class OutboxEventAdmin(_ModelAdmin):
    """Look at events, retry and discard them."""

    list_display = ("shown_status", "event", "owed_to", "why", "when")
    list_display_links = ("event",)
    list_filter = (StatusFilter, TypeFilter, HandlerFilter)
    sortable_by = ()
    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    search_fields = ("id",)
    search_help_text = "An event's id, or what it is about as type:id, such as order:123."
    actions = ("retry", "discard")
    change_form_template = "admin/django_outbox/outboxevent/change_form.html"

    class Media:
        """Style, and the question before a discard."""

        css: ClassVar = {"all": ["django_outbox/admin.css"]}
        js: ClassVar = ["django_outbox/admin.js"]

    # Who may do what.

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Events are emitted, not added."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: OutboxEvent | None = None) -> bool:
        """Events are what happened; nobody edits them."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: OutboxEvent | None = None) -> bool:
        """The purge deletes, in batches."""
        return False

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may retry what it may see."""
        return self._may(request, "retry")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may discard what it may see."""
        return self._may(request, "discard")

    def _may(self, request: HttpRequest, verb: str) -> bool:
        permission = f"{self.opts.app_label}.{verb}_{self.opts.model_name}"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    # The list.

    def get_queryset(self, request: HttpRequest) -> _Rows:
        """Return all events, on the database of the outbox."""
        return OutboxEvent.objects.using(get_settings().database)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list in the order of an index."""
        return EventChangeList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """Allow in the address only what an index serves."""
        return lookup in {"status", "type", "handler", "id", "id__exact", "status__exact"}

    def get_search_results(self, request: HttpRequest, queryset: _Rows, search_term: str) -> tuple[_Rows, bool]:
        """Find by id, or by ``type:id`` of the aggregate; both are looked up in an index."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            pass
        place = next((index for index, letter in enumerate(term) if letter in ":/"), -1)
        if place < 0 or not term[place + 1 :].strip():
            self.message_user(
                request,
                "Search takes an event's id, or type:id of what it is about, such as order:123.",
                messages.WARNING,
            )
            return queryset.none(), False
        # The predicate of the partial index stands here too: SQLite uses it only when it reads it.
        about = Q(aggregate_type=term[:place].strip(), aggregate_id=term[place + 1 :].strip())
        return queryset.filter(about & ~Q(aggregate_id="")), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list under a row of links with bounded counts."""
        extra: dict[str, Any] = {"title": "Events", "listed": LISTED}
        if request.method == "GET":
            extra["status_links"] = self._status_links(request)
        return super().changelist_view(request, extra | (extra_context or {}))

    def _status_links(self, request: HttpRequest) -> list[dict[str, Any]]:
        rows, chosen = self.get_queryset(request), _status(request)
        links: list[dict[str, Any]] = []
        for status, order in _ORDER.items():
            # Nobody needs to know how many are done, and it is the one count that is always at its bound.
            count = (
                None if status == Status.DONE else rows.filter(status=status).order_by(*order)[: COUNTED + 1].count()
            )
            links.append(
                {
                    "label": str(status),
                    "count": None if count is None else _number(count, COUNTED),
                    "none": count == 0,
                    "query": f"?status={status}",
                    "current": chosen == status,
                }
            )
        links.append({"label": "all", "count": None, "query": "?", "current": chosen is None})
        return links

    @admin.display(description="status")
    def shown_status(self, event: OutboxEvent) -> SafeString:
        """Show the status, and post it back with an action: only a row that still has it is changed."""
        return format_html(
            '<span class="outbox-badge outbox-{}">{}</span><input type="hidden" name="shown" value="{}:{}">',
            event.status,
            event.status,
            event.pk,
            event.status,
        )

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

    @admin.display(description="why")
    def why(self, event: OutboxEvent) -> SafeString:
        """Show the beginning of the last error."""
        text = event.last_error
        return format_html(
            '<span class="outbox-why" title="{}">{}</span>', text[:500], text if len(text) <= 140 else f"{text[:139]}…"
        )

    @admin.display(description="when")
    def when(self, event: OutboxEvent) -> SafeString:
        """Show the times that matter in the row's status, and its attempts."""
        match event.status:
            case Status.DEAD:
                lines = [("died", event.dead_at), ("again", event.due_at)]
            case Status.WAITING:
                lines = [("due", event.due_at)]
            case Status.PENDING:
                lines = [("emitted", event.created_at)]
            case _:
                lines = [("", event.finished_at)]
        parts = [format_html("{} {}", word, _ago(moment)) for word, moment in lines if moment]
        if _held(event):
            parts = [SafeString("a relay works on it")]
        if event.attempts:
            parts.append(format_html("{} attempt{}", event.attempts, "" if event.attempts == 1 else "s"))
        return format_html_join("", '<span class="outbox-line">{}</span>', ((part,) for part in parts))

    # The actions.

    @admin.action(description="Retry selected events", permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: _Rows) -> None:
        """Give the selected rows a new life, if they still have the status shown."""
        self._act(request, queryset, "retry", RETRYABLE, (Status.DEAD, Status.FAILED))

    @admin.action(description="Discard selected events for good", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: _Rows) -> None:
        """Close the selected rows, if they still have the status shown."""
        self._act(request, queryset, "discard", DISCARDABLE, (Status.DEAD,))

    def _act(
        self, request: HttpRequest, queryset: _Rows, verb: str, allowed: Sequence[str], unasked: Sequence[str]
    ) -> None:
        """
        Run a verb on the selection, guarded by the statuses that its user saw.

        ``unasked`` are the statuses taken from a list that shows all of them, when all
        of its pages are selected.
        """
        filtered = _status(request)
        chosen: dict[str, list[UUID]] = defaultdict(list)
        more = False
        if request.POST.get("select_across") == "1":
            room = LISTED
            for status in (filtered,) if filtered else unasked:
                rows = queryset.filter(status=status).order_by(*_ORDER[status]).values_list("pk", flat=True)
                ids = list(rows[: room + 1])
                more = more or len(ids) > room
                chosen[status] += ids[:room]
                room -= len(chosen[status])
        else:
            shown = dict(text.rpartition(":")[::2] for text in request.POST.getlist("shown"))
            for text in request.POST.getlist(ACTION_CHECKBOX_NAME):
                chosen[shown.get(text) or filtered or ""].append(UUID(text))
        report = Report()
        for status, ids in chosen.items():
            # A page made by something else than this list says nothing about statuses.
            report += _VERBS[verb](EVENTS, using=self._using, ids=ids, status=(status,) if status else allowed)
        self._say(request, verb, report)
        if more:
            self.message_user(
                request,
                f"One action takes {LISTED:,} events, and there are more. Run it again, or the command outbox_{verb}.",
                messages.WARNING,
            )

    @property
    def _using(self) -> str:
        return get_settings().database

    def _say(self, request: HttpRequest, verb: str, report: Report, handler: str = "") -> None:
        logger.info(
            "operator acted verb=%s user=%s handler=%s changed=%d leased=%d skipped=%d",
            verb,
            request.user.pk,
            handler,
            report.changed,
            report.leased,
            report.skipped,
        )
        done = "Retried {}, due now." if verb == "retry" else "Discarded {}."
        if handler:
            done = f"Closed the delivery to {handler} of {{}}."
        parts = [done.format(_events(report.changed))]
        if report.leased:
            parts.append(f"{_events(report.leased)} left alone: a relay is working on them.")
        if report.skipped:
            parts.append(
                f"{_events(report.skipped)} left alone: not in the status shown any more, or nothing to {verb} in it."
            )
        level = messages.SUCCESS if report.changed and len(parts) == 1 else messages.WARNING
        self.message_user(request, " ".join(parts), level)

    # One event.

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one event, or run a verb on it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        event = self.get_object(request, object_id)
        if event is None:
            self.message_user(
                request, f"There is no event {object_id[:64]}; it may have been purged.", messages.WARNING
            )
            return HttpResponseRedirect(
                reverse("admin:django_outbox_outboxevent_changelist", current_app=self.admin_site.name)
            )
        if request.method == "POST":
            return self._verb(request, event)
        deliveries = deliveries_of(event)
        context = {
            **self.admin_site.each_context(request),
            "title": event.type,
            "subtitle": str(event.pk),
            "opts": self.opts,
            "original": event,
            "event": event,
            "media": self.media,
            "change": True,
            "has_view_permission": True,
            "deliveries": deliveries,
            "advice": advice_for(event),
            "facts": _facts(event, self.admin_site.name),
            "payload": _json(event.payload),
            "headers": _json(event.headers) if event.headers else "",
            "may_retry": event.status in RETRYABLE and self.has_retry_permission(request),
            "may_discard": event.status in DISCARDABLE and self.has_discard_permission(request),
            "may_close": event.status in (*DISCARDABLE, Status.FAILED)
            and len(deliveries) > 1
            and self.has_discard_permission(request),
            "about": _about(event),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.change_form_template, context)

    def _verb(self, request: HttpRequest, event: OutboxEvent) -> HttpResponse:
        verb = request.POST.get("verb", "")
        if verb not in _VERBS or not self._may(request, verb):
            raise PermissionDenied
        shown = request.POST.get("shown") or event.status
        handler = request.POST.get("handler") or None
        if handler and verb == "discard":
            report = discard(EVENTS, using=self._using, ids=[event.pk], status=(shown,), handler=handler)
        else:
            handler = None
            report = _VERBS[verb](EVENTS, using=self._using, ids=[event.pk], status=(shown,))
        self._say(request, verb, report, handler or "")
        if report.changed:
            self.log_change(request, event, f"{verb}: {handler}" if handler else verb)
        return HttpResponseRedirect(request.get_full_path())


_VERBS: Final[Mapping[str, Callable[..., Report]]] = {"retry": retry, "discard": discard}


def _json(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= PAYLOAD_SHOWN:
        return text
    return f"{text[:PAYLOAD_SHOWN]}\n… {len(text) - PAYLOAD_SHOWN:,} more characters"


def _facts(event: OutboxEvent, site: str) -> list[tuple[str, Any]]:
    """Return what is known beside payload and deliveries; what is empty is left out."""
    times = [
        ("occurred", event.occurred_at),
        ("emitted", event.created_at),
        ("not before", event.not_before),
        ("due", event.due_at),
        ("died", event.dead_at),
        ("finished", event.finished_at),
    ]
    lease = f"{event.leased_by}{'' if _held(event) else ' (its lease is over)'}" if event.leased_by else ""
    facts: list[tuple[str, Any]] = [
        ("attempts", str(event.attempts)),
        *(
            (name, format_html("{} ({})", f"{moment:%Y-%m-%d %H:%M:%S} UTC", _ago(moment)))
            for name, moment in times
            if moment
        ),
        ("held by", lease),
        ("lease until", _ago(event.lease_until)),
        ("processes lost", str(event.lost_leases or "")),
        ("organization", event.organization_id),
        ("request", event.request_id),
        ("fence", str(event.fence)),
        ("announced when it dies", "no" if event.quiet else ""),
    ]
    if event.causation_id:
        link = reverse("admin:django_outbox_outboxevent_change", args=[event.causation_id], current_app=site)
        facts.append(("caused by", format_html('<a href="{}">{}</a>', link, event.causation_id)))
    return [(name, value) for name, value in facts if value]
