"""
What the built-in handlers wrote, to look at.

Each list is a walk of one index, newest first, counted no further than it is paged.
The signatures are Django's where a method overrides one of ``ModelAdmin``.
"""

# ruff: noqa: ARG002

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_outbox.admin.queue import BoundedPaginator, ago, clipped
from django_outbox.conf import get_settings
from django_outbox.models import AuditEntry, Notification, OperatorAlert

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class _Written(_ModelAdmin):
    """Rows that code writes and people read."""

    sortable_by = ()
    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    search_fields = ("id",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are written by code, not added."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are what happened; nobody edits them."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes them here."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all rows, on the database of the outbox."""
        rows: QuerySet[Any] = super().get_queryset(request).using(get_settings().database)
        return rows

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """Allow in the address only what an index serves."""
        return lookup in {"id", "id__exact"}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by id, or by the whole of what an index finds."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            return self.found(queryset, term), False

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the rows that a search finds through an index, other than by id."""
        return rows.none()


@admin.register(AuditEntry)
class AuditEntryAdmin(_Written):
    """The audit log, newest first."""

    list_display: Any = ("position", "type", "aggregate", "when")
    ordering: ClassVar[Any] = ("-position",)
    search_help_text = 'An id, a position, or an aggregate with its type, such as "user 7".'
    fields: ClassVar[Any] = (
        "position",
        "id",
        "type",
        "aggregate",
        "organization_id",
        "recorded_at",
        "shown_content",
        "previous_hash",
        "hash",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Leave contents in the database until one is looked at."""
        return super().get_queryset(request).defer("content")

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Find a position, or what happened to an aggregate."""
        if term.isdecimal() and len(term) < 19:
            return rows.filter(position=int(term))
        type_, _, id_ = term.partition(" ")
        return rows.filter(aggregate_type=type_, aggregate_id=id_.strip()) if id_.strip() else rows.none()

    @admin.display(description="aggregate")
    def aggregate(self, row: AuditEntry) -> str:
        """Show whom it was about."""
        return f"{row.aggregate_type} {row.aggregate_id}".strip()

    @admin.display(description="entered")
    def when(self, row: AuditEntry) -> SafeString | str:
        """Show when it was entered."""
        return ago(row.recorded_at)

    @admin.display(description="content")
    def shown_content(self, row: AuditEntry) -> SafeString:
        """Show the content laid out; what is hashed is the text without white space."""
        try:
            text = json.dumps(json.loads(row.content), indent=2, ensure_ascii=False, sort_keys=True)
        except ValueError:
            text = row.content
        return format_html("<pre>{}</pre>", text)


@admin.register(Notification)
class NotificationAdmin(_Written):
    """Who was told what."""

    list_display: Any = ("recipient", "title", "event_type", "when", "read")
    ordering: ClassVar[Any] = ("-id",)
    search_help_text = "An id, or a recipient."

    def found(self, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Find a recipient's."""
        return rows.filter(recipient=term)

    @admin.display(description="written")
    def when(self, row: Notification) -> SafeString | str:
        """Show when it was written."""
        return ago(row.created_at)

    @admin.display(description="read", boolean=True)
    def read(self, row: Notification) -> bool:
        """Show whether it was read."""
        return row.read_at is not None


@admin.register(OperatorAlert)
class OperatorAlertAdmin(_Written):
    """What operators were told, or will be."""

    list_display: Any = ("type", "subject", "why", "when", "told")
    ordering: ClassVar[Any] = ("-created_at", "-id")
    search_help_text = "The id of an announcement."

    @admin.display(description="why")
    def why(self, row: OperatorAlert) -> SafeString:
        """Show the error."""
        return clipped(row.error)

    @admin.display(description="noted")
    def when(self, row: OperatorAlert) -> SafeString | str:
        """Show when it was noted."""
        return ago(row.created_at)

    @admin.display(description="told")
    def told(self, row: OperatorAlert) -> SafeString | str:
        """Show when the message went out that tells it."""
        return ago(row.told_at) or "in the next summary"
