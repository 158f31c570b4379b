"""The pages of the task queue: which call it is, how its attempts ended, and what it takes and returned."""

# The signatures are Django's.
# ruff: noqa: ARG002

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_outbox.admin.queue import ORDER, QueueAdmin, StatusFilter, again, both, held, lease_facts
from django_outbox.models import OutboxTask, Status
from django_outbox.tasks import TASKS

SAMPLED: Final = 300
"""Newest rows, of all and of the dead, in which the filters find their choices."""
VALUE_SHOWN: Final = 100_000
"""Characters of arguments and of a return value that the page shows."""


_ADVICE: Final[Mapping[str, str]] = {
    Status.DEAD: "Its attempts are spent. {again} Once the cause is gone, press Retry to run it now, with all of its"
    " attempts again. If it shall never run, press Discard.",
    Status.FAILED: "It was rejected or discarded. Press Retry to run it after all.",
    Status.WAITING: "{again} Retry makes it due now, with all of its attempts again.",
    Status.PENDING: "It is due; the next free relay takes it. Is one running? outbox_status says what is in flight.",
    Status.DONE: "It ran, and is kept for the retention time.",
}


class _SampledFilter(admin.SimpleListFilter):
    """By the value of a column; the choices are those of the newest rows."""

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, str]]:
        """Return the values of the newest rows and the newest dead ones, and the one that the address names."""
        rows: QuerySet[Any] = model_admin.get_queryset(request)
        column = self.parameter_name or ""
        found = {request.GET.get(column) or ""} - {""}
        for sample in (rows.order_by("-id"), rows.filter(status=Status.DEAD).order_by(*ORDER[Status.DEAD])):
            found.update(sample.values_list(column, flat=True)[:SAMPLED])
        return [(name, name) for name in sorted(found)]

    def value(self) -> str | None:
        """Return the value in the address, if a column can hold it."""
        value: str | None = super().value()
        if value and "\x00" in value:
            raise IncorrectLookupParameters
        return value

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows with the value."""
        return queryset.filter(**{self.parameter_name or "": self.value()}) if self.value() else queryset

    def has_output(self) -> bool:
        """Show it always: a list that is filtered must say so."""
        return True


class TaskFilter(_SampledFilter):
    """By task."""

    title = "task"
    parameter_name = "task_path"


class QueueNameFilter(_SampledFilter):
    """By queue name."""

    title = "queue"
    parameter_name = "queue_name"


@admin.register(OutboxTask)
class OutboxTaskAdmin(QueueAdmin):
    """Look at calls of tasks, retry and discard them."""

    queue = TASKS
    heavy = ("payload", "return_value", "errors", "worker_ids")
    unindexed = ("task_path", "queue_name")
    born = "enqueued"
    search_help = "a call's id, which is its result's."
    search_help_text = "A call's id, which is its result's."
    list_display = ("shown_status", "summary", "where", "why", "when")
    list_filter: ClassVar[Any] = (StatusFilter, TaskFilter, QueueNameFilter)
    change_form_template = "admin/django_outbox/outboxtask/change_form.html"

    @admin.display(description="task")
    def summary(self, row: OutboxTask) -> SafeString:
        """Show the task's name, and its module."""
        module, _, name = row.task_path.rpartition(".")
        return format_html('{} <span class="outbox-about">{}</span>', name, module)

    @admin.display(description="queue")
    def where(self, row: OutboxTask) -> str:
        """Show the queue name and the priority."""
        return f"{row.queue_name} {row.priority:+d}" if row.priority else row.queue_name

    # One call.

    def heading(self, row: OutboxTask) -> str:
        """Return the task's path."""
        return row.task_path

    def about(self, row: OutboxTask) -> str:
        """Return the queue name and the priority."""
        return self.where(row)

    def advice(self, row: OutboxTask) -> str:
        """Return what happens next, and what to press."""
        if held(row):
            return "A relay is working on it right now. Neither button changes it meanwhile."
        if row.parked_at is not None and row.status in {Status.WAITING, Status.DEAD}:
            return (
                f"No relay that had it knows this task. {again(row)} Deploy the code that has it; if it is gone,"
                " press Discard."
            )
        return _ADVICE[row.status].format(again=again(row))

    def detail(self, request: HttpRequest, row: OutboxTask) -> dict[str, Any]:
        """Return the errors, and to those who may read them the arguments and the return value."""
        may_read = self.may(request, "read")
        return {
            "may_read": may_read,
            "arguments": _json(row.payload) if may_read else "",
            "returned": _json(row.return_value) if may_read and row.status == Status.DONE else "",
            "errors": row.errors if may_read else [{**each, "traceback": ""} for each in row.errors],
        }

    def facts(self, row: OutboxTask) -> list[tuple[str, Any]]:
        """Return what is known beside arguments and errors."""
        cause: SafeString | str = ""
        if row.causation_id:
            link = reverse(
                "admin:django_outbox_outboxevent_change", args=[row.causation_id], current_app=self.admin_site.name
            )
            cause = format_html('<a href="{}">{}</a>', link, row.causation_id)
        own = [
            ("backend", row.backend_alias),
            ("dedupe key", row.dedupe_key),
            ("attempts at most", row.max_attempts),
            ("time limit", f"{row.timeout_seconds:g} s" if row.timeout_seconds else ""),
            ("waits between attempts", ", ".join(f"{wait:g} s" for wait in row.waits) if row.waits else ""),
            ("first started", both(row.started_at)),
            ("last attempted", both(row.last_attempted_at)),
            ("parked since", both(row.parked_at)),
            ("run by", ", ".join(row.worker_ids[-20:])),
            ("organization", row.organization_id),
            ("request", row.request_id),
            ("caused by", cause),
        ]
        return [*(("enqueued" if name == "created" else name, value) for name, value in lease_facts(row)), *own]


def _json(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= VALUE_SHOWN:
        return text
    return f"{text[:VALUE_SHOWN]}\n… {len(text) - VALUE_SHOWN:,} more characters"
