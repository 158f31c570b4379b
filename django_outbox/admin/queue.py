"""
What every queue's pages share: the bounded list, dead first, and the two verbs.

A queue's own module subclasses `QueueAdmin`, names its ``queue`` and says what its
rows look like: `summary` for the list, `advice`, `facts` and `detail` for the page of
one row. The signatures are Django's where a method overrides one of ``ModelAdmin``.
"""

# ruff: noqa: ARG002

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.timesince import timesince, timeuntil

from django_outbox.conf import get_settings
from django_outbox.lease import DISCARDABLE, RETRYABLE, Queue, Report, discard, retry
from django_outbox.models import Leasable, Status

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _Paginator = Paginator[Any]
else:
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator

logger = logging.getLogger("django_outbox.admin")

LISTED: Final = 10_000
"""Rows that a list counts and pages through, that a filter without an index looks at, that one action changes."""
COUNTED: Final = 1_000
"""Where the counts above the list stop."""

# The order of each list is the one of its index: due first, or newest first.
ORDER: Final[Mapping[str, tuple[str, str]]] = {
    Status.DEAD: ("-dead_at", "-id"),
    Status.FAILED: ("-finished_at", "-id"),
    Status.WAITING: ("due_at", "id"),
    Status.PENDING: ("created_at", "id"),
    Status.DONE: ("-finished_at", "-id"),
}
NEWEST: Final = ("-id",)

_VERBS: Final[Mapping[str, Callable[..., Report]]] = {"retry": retry, "discard": discard}


def chosen_status(request: HttpRequest) -> str | None:
    """Return the status that the list is filtered by."""
    value = request.GET.get("status") or request.GET.get("status__exact")
    return value if value in ORDER else None


def _number(count: int, bound: int) -> str:
    return f"{bound:,}+" if count > bound else f"{count:,}"


def in_words(moment: datetime) -> str:
    """Return a moment as people say it."""
    now = datetime.now(UTC)
    if abs((moment - now).total_seconds()) < 60:
        return "just now" if moment <= now else "in less than a minute"
    return f"{timesince(moment, depth=1)} ago" if moment < now else f"in {timeuntil(moment, depth=1)}"


def exact(moment: datetime) -> str:
    """Return a moment to the second, in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(moment: datetime | None) -> SafeString | str:
    """Return a moment in words, with the exact one behind them."""
    if moment is None:
        return ""
    return format_html('<time datetime="{}" title="{}">{}</time>', moment.isoformat(), exact(moment), in_words(moment))


def both(moment: datetime | None) -> SafeString | str:
    """Return a moment to the second, with its words beside it."""
    return "" if moment is None else format_html("{} ({})", exact(moment), ago(moment))


def held(row: Leasable) -> bool:
    """Return whether a relay holds the row under a live lease."""
    return row.lease_until is not None and row.lease_until > datetime.now(UTC)


def again(row: Leasable) -> str:
    """Return when a row is tried next, as a sentence."""
    return f"It is tried again by itself {in_words(row.due_at)}." if row.due_at else "It is not tried again by itself."


def clipped(text: str) -> SafeString:
    """Return the beginning of an error, with more of it behind."""
    return format_html(
        '<span class="outbox-why" title="{}">{}</span>', text[:500], text if len(text) <= 140 else f"{text[:139]}…"
    )


def lease_facts(row: Leasable) -> list[tuple[str, Any]]:
    """Return what is known of any queue's row: its counters, times and holder; the empty ones too."""
    times = [
        ("created", row.created_at),
        ("not before", row.not_before),
        ("due", row.due_at),
        ("died", row.dead_at),
        ("finished", row.finished_at),
    ]
    return [
        ("attempts", str(row.attempts)),
        *((name, both(moment)) for name, moment in times),
        ("held by", f"{row.leased_by}{'' if held(row) else ' (its lease is over)'}" if row.leased_by else ""),
        ("lease until", ago(row.lease_until)),
        ("processes lost", str(row.lost_leases or "")),
        ("fence", str(row.fence)),
        ("announced when it dies", "no" if row.quiet else ""),
    ]


# --- lists -----------------------------------------------------------------------------------------------------------


class BoundedPaginator(_Paginator):
    """Counts no further than it pages."""

    @cached_property
    def count(self) -> int:
        """The number of rows, at most ``LISTED``."""
        # The order stays in: with it the planner walks the list's index and stops.
        rows: Any = self.object_list
        return int(rows[:LISTED].count())


class QueueChangeList(ChangeList):
    """A list in the order of an index."""

    windowed = False
    """Whether only the newest rows were looked at."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[str | Combinable]:
        """Return the order of the index that serves the filter in force."""
        # A search is served by the primary key or an index of its own, which end in the id.
        status = None if self.query else chosen_status(request)
        return list(ORDER[status] if status else NEWEST)

    def get_queryset(self, request: HttpRequest, exclude_parameters: list[str | None] | None = None) -> QuerySet[Any]:
        """Return the rows of the list, without what it does not show."""
        page: Any = self.model_admin
        rows = super().get_queryset(request, exclude_parameters)
        if not self.query and any(request.GET.get(name) for name in page.unindexed):
            rows = self._window(request, rows)
        return rows.defer(*page.heavy)

    def _window(self, request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Keep a filter that no index serves to the first rows of the list's order."""
        status = chosen_status(request)
        order = ORDER[status] if status else NEWEST
        first = order[0].lstrip("-")
        whole: QuerySet[Any] = self.root_queryset.order_by(*order)
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
        return [(str(status), str(status)) for status in ORDER]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in the status."""
        value = self.value()
        if value is None:
            return queryset
        if value not in ORDER:
            raise IncorrectLookupParameters
        return queryset.filter(status=value)


# --- the pages -------------------------------------------------------------------------------------------------------


class QueueAdmin(_ModelAdmin):
    """Look at a queue's rows, retry and discard them."""

    queue: ClassVar[Queue]
    heavy: ClassVar[tuple[str, ...]] = ()
    """Columns that the list leaves in the database."""
    unindexed: ClassVar[tuple[str, ...]] = ()
    """Parameters of filters that no index serves: such a list looks at the first ``LISTED`` rows of its order."""
    search_help: ClassVar[str] = "An id."
    born: ClassVar[str] = "created"
    """The word for how a pending row came to be."""

    list_display: Any = ("shown_status", "summary", "why", "when")
    list_display_links: Any = ("summary",)
    list_filter: ClassVar[Any] = (StatusFilter,)
    sortable_by = ()
    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    search_fields = ("id",)
    actions = ("retry", "discard")
    change_list_template = "admin/django_outbox/queue/change_list.html"
    change_form_template = "admin/django_outbox/queue/change_form.html"

    class Media:
        """Style, and the question before a discard."""

        css: ClassVar = {"all": ["django_outbox/admin.css"]}
        js: ClassVar = ["django_outbox/admin.js"]

    # What a queue says of its rows.

    @admin.display(description="what")
    def summary(self, row: Any) -> SafeString | str:
        """Show in the list what the row is."""
        return str(row)

    def heading(self, row: Any) -> str:
        """Return the title of a row's page."""
        return str(row)

    def about(self, row: Any) -> str:
        """Return what stands beside the status on a row's page."""
        return ""

    def advice(self, row: Any) -> str:
        """Return what happens next to a row, and what to press."""
        return again(row)

    def facts(self, row: Any) -> list[tuple[str, Any]]:
        """Return the table at the end of a row's page; what is empty is left out."""
        return lease_facts(row)

    def detail(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return what the queue's own template shows beside the shared parts."""
        return {}

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any] | None:
        """Return the rows that a search finds through an index, other than by id; ``None``: no such search."""
        return None

    def retryable(self, row: Any) -> bool:
        """Return whether the page of a row offers a retry."""
        return row.status in RETRYABLE

    def run_verb(self, request: HttpRequest, row: Any, verb: str, shown: str) -> tuple[Report, str]:
        """Run a verb on one row that was shown in a status; return the report, and whose delivery alone it closed."""
        return _VERBS[verb](self.queue, using=self.using, ids=[row.pk], status=(shown,)), ""

    # Who may do what.

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are enqueued by code, not added."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are what happened; nobody edits them."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """The purge deletes, in batches."""
        return False

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may retry what it may see."""
        return self.may(request, "retry")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may discard what it may see."""
        return self.may(request, "discard")

    def may(self, request: HttpRequest, verb: str) -> bool:
        """Return whether the user may see the rows and has the permission ``<verb>_<model>``."""
        permission = f"{self.opts.app_label}.{verb}_{self.opts.model_name}"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    # The list.

    @property
    def using(self) -> str:
        """The database of the outbox."""
        return get_settings().database

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all rows, on the database of the outbox."""
        rows: QuerySet[Any] = super().get_queryset(request).using(self.using)
        return rows

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list in the order of an index."""
        return QueueChangeList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """Allow in the address only what an index serves, or a window bounds."""
        return lookup in {"status", "id", "id__exact", "status__exact", *self.unindexed}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by id, or by what else the queue looks up in an index."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            pass
        found = self.found(queryset, term)
        if found is None:
            self.message_user(request, f"Search takes {self.search_help}", messages.WARNING)
            return queryset.none(), False
        return found, False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list under a row of links with bounded counts."""
        extra: dict[str, Any] = {
            "title": capfirst(str(self.opts.verbose_name_plural)),
            "listed": LISTED,
            "unindexed": capfirst(" and ".join(self.unindexed)),
        }
        if request.method == "GET":
            extra["status_links"] = self._status_links(request)
        return super().changelist_view(request, extra | (extra_context or {}))

    def _status_links(self, request: HttpRequest) -> list[dict[str, Any]]:
        rows, chosen = self.get_queryset(request), chosen_status(request)
        links: list[dict[str, Any]] = []
        for status, order in ORDER.items():
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
    def shown_status(self, row: Any) -> SafeString:
        """Show the status, and post it back with an action: only a row that still has it is changed."""
        return format_html(
            '<span class="outbox-badge outbox-{}">{}</span><input type="hidden" name="shown" value="{}:{}">',
            row.status,
            row.status,
            row.pk,
            row.status,
        )

    @admin.display(description="why")
    def why(self, row: Any) -> SafeString:
        """Show the beginning of the last error."""
        return clipped(row.last_error)

    @admin.display(description="when")
    def when(self, row: Any) -> SafeString:
        """Show the times that matter in the row's status, and its attempts."""
        match row.status:
            case Status.DEAD:
                lines = [("died", row.dead_at), ("again", row.due_at)]
            case Status.WAITING:
                lines = [("due", row.due_at)]
            case Status.PENDING:
                lines = [(self.born, row.created_at)]
            case _:
                lines = [("", row.finished_at)]
        parts = [format_html("{} {}", word, ago(moment)) for word, moment in lines if moment]
        if held(row):
            parts = [SafeString("a relay works on it")]
        if row.attempts:
            parts.append(format_html("{} attempt{}", row.attempts, "" if row.attempts == 1 else "s"))
        return format_html_join("", '<span class="outbox-line">{}</span>', ((part,) for part in parts))

    # The actions.

    @admin.action(description="Retry selected %(verbose_name_plural)s", permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Give the selected rows a new life, if they still have the status shown."""
        self._act(request, queryset, "retry", RETRYABLE, (Status.DEAD, Status.FAILED))

    @admin.action(description="Discard selected %(verbose_name_plural)s for good", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Close the selected rows, if they still have the status shown."""
        self._act(request, queryset, "discard", DISCARDABLE, (Status.DEAD,))

    def _act(
        self, request: HttpRequest, queryset: QuerySet[Any], verb: str, allowed: Sequence[str], unasked: Sequence[str]
    ) -> None:
        """
        Run a verb on the selection, guarded by the statuses that its user saw.

        ``unasked`` are the statuses taken from a list that shows all of them, when all
        of its pages are selected.
        """
        filtered = chosen_status(request)
        chosen: dict[str, list[UUID]] = defaultdict(list)
        more = False
        if request.POST.get("select_across") == "1":
            room = LISTED
            for status in (filtered,) if filtered else unasked:
                rows = queryset.filter(status=status).order_by(*ORDER[status]).values_list("pk", flat=True)
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
            report += _VERBS[verb](self.queue, using=self.using, ids=ids, status=(status,) if status else allowed)
        self._say(request, verb, report)
        if more:
            self.message_user(
                request,
                f"One action takes {LISTED:,} {self.opts.verbose_name_plural}, and there are more. Run it again, or"
                f" the command outbox_{verb}.",
                messages.WARNING,
            )

    def _say(self, request: HttpRequest, verb: str, report: Report, handler: str = "") -> None:
        logger.info(
            "operator acted verb=%s queue=%s user=%s handler=%s changed=%d leased=%d skipped=%d",
            verb,
            self.queue.name,
            request.user.pk,
            handler,
            report.changed,
            report.leased,
            report.skipped,
        )
        done = "Retried {}, due now." if verb == "retry" else "Discarded {}."
        if handler:
            done = f"Closed the delivery to {handler} of {{}}."
        parts = [done.format(self.queue.counted(report.changed))]
        if report.leased:
            parts.append(f"{self.queue.counted(report.leased)} left alone: a relay is working on them.")
        if report.skipped:
            parts.append(
                f"{self.queue.counted(report.skipped)} left alone: not in the status shown any more, or nothing to"
                f" {verb} in it."
            )
        level = messages.SUCCESS if report.changed and len(parts) == 1 else messages.WARNING
        self.message_user(request, " ".join(parts), level)

    # One row.

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one row, or run a verb on it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            self.message_user(
                request,
                f"There is no {self.opts.verbose_name} {object_id[:64]}; it may have been purged.",
                messages.WARNING,
            )
            name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
            return HttpResponseRedirect(reverse(name, current_app=self.admin_site.name))
        if request.method == "POST":
            return self._verb(request, row)
        context = {
            **self.admin_site.each_context(request),
            "title": self.heading(row),
            "subtitle": str(row.pk),
            "opts": self.opts,
            "original": row,
            "row": row,
            "media": self.media,
            "change": True,
            "has_view_permission": True,
            "about": self.about(row),
            "advice": self.advice(row),
            "facts": [(name, value) for name, value in self.facts(row) if value],
            "may_retry": self.retryable(row) and self.has_retry_permission(request),
            "may_discard": row.status in DISCARDABLE and self.has_discard_permission(request),
            **self.detail(request, row),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.change_form_template, context)

    def _verb(self, request: HttpRequest, row: Any) -> HttpResponse:
        verb = request.POST.get("verb", "")
        if verb not in _VERBS or not self.may(request, verb):
            raise PermissionDenied
        report, handler = self.run_verb(request, row, verb, request.POST.get("shown") or row.status)
        self._say(request, verb, report, handler)
        if report.changed:
            self.log_change(request, row, f"{verb}: {handler}" if handler else verb)
        return HttpResponseRedirect(request.get_full_path())
