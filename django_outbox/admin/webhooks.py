"""
The pages of the webhook queue: endpoints and what to do with them, deliveries and their attempts.

A secret is shown in the answer to the request that made it, and never again; header
values never are, and of a URL its host alone. The signatures are Django's where a
method overrides one of ``ModelAdmin``.
"""

# ruff: noqa: ARG002

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from django_outbox.admin.queue import QueueAdmin, again, ago, both, exact, held, lease_facts
from django_outbox.conf import get_settings
from django_outbox.errors import InvalidSettings
from django_outbox.models import Status, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.webhooks.box import custom_headers
from django_outbox.webhooks.endpoints import (
    change_endpoint,
    check_event_types,
    create_endpoint,
    disable_endpoint,
    enable_endpoint,
    pause_endpoint,
    replay,
    rotate_secret,
    send_test,
)
from django_outbox.webhooks.guard import check_headers, check_url, shown_url
from django_outbox.webhooks.store import DELIVERIES

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _ModelForm = forms.ModelForm[Any]
else:
    _ModelAdmin = admin.ModelAdmin
    _ModelForm = forms.ModelForm

logger = logging.getLogger("django_outbox.admin")

ATTEMPTS_SHOWN: Final = 20
BODY_SHOWN: Final = 100_000


class EndpointForm(_ModelForm):
    """What a person may say of an endpoint. What is secret goes in and does not come out."""

    url = forms.CharField(
        label="URL",
        max_length=2_048,
        required=False,
        widget=forms.TextInput(attrs={"size": 80, "autocomplete": "off"}),
    )
    event_types = forms.CharField(
        widget=forms.Textarea(attrs={"rows": 4, "cols": 60}),
        initial="*",
        help_text='One a line: a type, a prefix such as "order.*", or "*" for all.',
    )
    headers = forms.CharField(
        label="Custom headers",
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60, "autocomplete": "off"}),
        help_text="One a line, as Name: value. They are stored encrypted and not shown again.",
    )
    remove_headers = forms.BooleanField(label="Remove the custom headers", required=False)

    class Meta:
        model = WebhookEndpoint
        fields = ("description", "organization_id")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A new endpoint has an id of its own already, so that says nothing.
        self.stored = not self.instance._state.adding
        if self.stored:
            self.initial.pop("url", None)
            self.initial["event_types"] = "\n".join(self.instance.event_types)
            self.fields["url"].help_text = f"It is {shown_url(self.instance.url)}. Leave this empty to keep it."
            self.fields["headers"].help_text = f"{_header_names(self.instance)} Leave this empty to keep them."
        else:
            self.fields["url"].required = True
            del self.fields["remove_headers"]

    def clean_url(self) -> str:
        """Have the guard judge it."""
        url = self.cleaned_data["url"].strip()
        return str(_judged(lambda: check_url(url))) if url else ""

    def clean_event_types(self) -> list[str]:
        """Split it into filters."""
        words = self.cleaned_data["event_types"].replace(",", " ").split()
        types: list[str] = _judged(lambda: check_event_types(words))
        return types

    def clean_headers(self) -> dict[str, str]:
        """Split it into names and values."""
        lines = [line for line in self.cleaned_data["headers"].splitlines() if line.strip()]
        pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        if len({name for name, _ in pairs}) < len(pairs):
            raise forms.ValidationError("A header is given twice.")
        headers: dict[str, str] = _judged(lambda: check_headers(dict(pairs)))
        return headers


def _judged(judge: Callable[[], Any]) -> Any:
    try:
        return judge()
    except ValueError as error:
        raise forms.ValidationError(str(error)) from None


def _header_names(endpoint: WebhookEndpoint) -> str:
    try:
        names = ", ".join(custom_headers(endpoint.sealed_headers))
    except InvalidSettings:
        return "They cannot be decrypted with the keys in force."
    return f"Sent now: {names}." if names else "None are sent now."


def state_of(endpoint: WebhookEndpoint) -> tuple[str, str]:
    """Return how an endpoint stands in a word, and the tone of its badge."""
    if not endpoint.enabled:
        return "disabled", "dead"
    if endpoint.open_seconds:
        return "breaker open", "waiting"
    if endpoint.paused_until is not None and endpoint.paused_until > datetime.now(UTC):
        return "paused", "waiting"
    return ("failing", "waiting") if endpoint.failures else ("enabled", "done")


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(_ModelAdmin):
    """Create endpoints, make new secrets, send tests, enable, replay."""

    form = EndpointForm
    list_display = ("host", "description", "organization_id", "types", "state", "success", "failing")
    list_display_links = ("host",)
    list_filter = ("enabled",)
    search_fields = ("=organization_id", "description")
    search_help_text = "An organization, or words of the description."
    ordering = ("-id",)
    show_full_result_count = False
    actions = None
    change_form_template = "admin/django_outbox/webhookendpoint/change_form.html"

    class Media:
        css: ClassVar = {"all": ["django_outbox/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return all, on the database of the outbox."""
        rows: QuerySet[Any] = super().get_queryset(request).using(get_settings().database)
        return rows

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the form's fields to who may change it, to others what may be seen."""
        if obj is not None and not self.has_change_permission(request, obj):
            return ("host", "description", "organization_id", "types")
        return [
            "url",
            "description",
            "organization_id",
            "event_types",
            "headers",
            *(["remove_headers"] if obj is not None else []),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return what those see who may not change it."""
        return ("host", "types")

    @admin.display(description="endpoint")
    def host(self, endpoint: WebhookEndpoint) -> str:
        """Show the host: path and query may be passwords."""
        return shown_url(endpoint.url)

    @admin.display(description="event types")
    def types(self, endpoint: WebhookEndpoint) -> str:
        """Show the first filters."""
        shown = ", ".join(endpoint.event_types[:5])
        return shown + (", …" if len(endpoint.event_types) > 5 else "")

    @admin.display(description="state")
    def state(self, endpoint: WebhookEndpoint) -> SafeString:
        """Show how it stands."""
        word, tone = state_of(endpoint)
        return format_html('<span class="outbox-badge outbox-{}">{}</span>', tone, word)

    @admin.display(description="last success")
    def success(self, endpoint: WebhookEndpoint) -> SafeString | str:
        """Show when it last took a delivery."""
        return ago(endpoint.last_success_at)

    @admin.display(description="failed since")
    def failing(self, endpoint: WebhookEndpoint) -> str:
        """Show how many attempts have failed since."""
        return str(endpoint.failures or "")

    # Adding and changing.

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:  # noqa: FBT001
        """Store what the form says, by the functions that an application would call."""
        given = form.cleaned_data
        if change:
            headers = {} if given.get("remove_headers") else given["headers"] or None
            change_endpoint(
                WebhookEndpoint.objects.using(get_settings().database).get(pk=obj.pk),
                url=given["url"] or None,
                event_types=given["event_types"],
                organization_id=given["organization_id"],
                description=given["description"],
                headers=headers,
            )
            return
        endpoint, secret = create_endpoint(
            given["url"],
            event_types=given["event_types"],
            organization_id=given["organization_id"],
            description=given["description"],
            headers=given["headers"] or None,
        )
        obj.__dict__.update(endpoint.__dict__)
        vars(request)["outbox_secret"] = secret

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        """Show the secret in this very answer: in a message it would pass through the session."""
        return self._show_secret(request, obj, vars(request)["outbox_secret"])

    def _show_secret(self, request: HttpRequest, endpoint: WebhookEndpoint, secret: str) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": "The endpoint's secret",
            "subtitle": shown_url(endpoint.url),
            "opts": self.opts,
            "secret": secret,
            "back": self._address(endpoint),
        }
        response = TemplateResponse(request, "admin/django_outbox/webhookendpoint/secret.html", context)
        response["Cache-Control"] = "no-store"
        return response

    def _address(self, endpoint: WebhookEndpoint) -> str:
        return reverse(
            "admin:django_outbox_webhookendpoint_change", args=[endpoint.pk], current_app=self.admin_site.name
        )

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the form with the endpoint's figures and buttons beside it."""
        endpoint = self.get_object(request, object_id)
        figures = self._figures(request, endpoint) if endpoint and self.has_view_permission(request) else {}
        return super().change_view(request, object_id, form_url, figures | (extra_context or {}))

    def _figures(self, request: HttpRequest, endpoint: WebhookEndpoint) -> dict[str, Any]:
        rows = WebhookDelivery.objects.using(get_settings().database).filter(endpoint_id=endpoint.pk)
        word, tone = state_of(endpoint)
        deliveries = reverse("admin:django_outbox_webhookdelivery_changelist", current_app=self.admin_site.name)
        facts = [
            ("id", endpoint.pk),
            ("created", both(endpoint.created_at)),
            ("secret made", both(endpoint.rotated_at or endpoint.created_at)),
            ("disabled", both(endpoint.disabled_at)),
            ("because", endpoint.disabled_reason),
            ("paused until", both(endpoint.paused_until)),
            ("breaker open until", both(endpoint.open_until) if endpoint.open_seconds else ""),
            ("delivered", f"{endpoint.delivered_total:,}"),
            ("failed attempts", f"{endpoint.failed_total:,}"),
            ("failed since the last success", str(endpoint.failures or "")),
            ("last success", both(endpoint.last_success_at)),
            ("last failure", both(endpoint.last_failure_at)),
            ("mean duration", f"{endpoint.mean_seconds * 1_000:,.0f} ms" if endpoint.mean_seconds else ""),
        ]
        return {
            "endpoint": endpoint,
            "state": word,
            "tone": tone,
            "facts": [(name, value) for name, value in facts if value],
            "dead": rows.filter(status=Status.DEAD)[:1_001].count(),
            "deliveries": f"{deliveries}?endpoint_id={endpoint.pk}",
            "may_rotate": self.has_rotate_permission(request),
            "may_change": self.has_change_permission(request, endpoint),
        }

    # The buttons.

    def has_rotate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may make new secrets."""
        return self.has_view_permission(request) and request.user.has_perm("django_outbox.rotate_webhookendpoint")

    def get_urls(self) -> list[Any]:
        """Add the address of the buttons."""
        view = self.admin_site.admin_view(require_POST(self.verb_view))
        return [path("<uuid:pk>/verb/", view, name="django_outbox_webhookendpoint_verb"), *super().get_urls()]

    def verb_view(self, request: HttpRequest, pk: Any) -> HttpResponse:
        """Do to an endpoint what a button says."""
        endpoint = self.get_object(request, str(pk))
        verb = request.POST.get("verb", "")
        allowed = self.has_rotate_permission(request) if verb == "rotate" else self.has_change_permission(request)
        if endpoint is None or not allowed or verb not in _VERBS:
            raise PermissionDenied
        if verb == "rotate":
            overlap = 0 if request.POST.get("compromised") else 86_400
            secret = rotate_secret(endpoint, overlap_seconds=overlap)
            said = "made a new secret"
            answer = self._show_secret(request, endpoint, secret)
        else:
            try:
                said, level = _VERBS[verb](endpoint), messages.SUCCESS
            except ValueError as error:
                said, level = str(error), messages.ERROR
            self.message_user(request, said, level)
            answer = HttpResponseRedirect(self._address(endpoint))
        logger.info("operator acted verb=%s endpoint=%s user=%s", verb, endpoint.pk, request.user.pk)
        self.log_change(request, endpoint, said)
        return answer


def _enable(endpoint: WebhookEndpoint) -> str:
    since = enable_endpoint(endpoint)
    return f"Enabled. It had been disabled since {exact(since)}." if since else "It was enabled already."


def _enable_and_replay(endpoint: WebhookEndpoint) -> str:
    since = enable_endpoint(endpoint)
    count = replay(endpoint, since=since) if since else 0
    return f"Enabled, and {count:,} deliveries that it missed are sent anew."


def _replay(endpoint: WebhookEndpoint) -> str:
    return f"{replay(endpoint, since=endpoint.created_at):,} dead deliveries are sent anew."


def _test(endpoint: WebhookEndpoint) -> str:
    return f"A test is on its way: delivery {send_test(endpoint).pk}."


def _disable(endpoint: WebhookEndpoint) -> str:
    disable_endpoint(endpoint)
    return "Disabled. Its events are kept for a replay."


def _pause(endpoint: WebhookEndpoint) -> str:
    pause_endpoint(endpoint, seconds=3_600)
    return "Paused for an hour."


def _resume(endpoint: WebhookEndpoint) -> str:
    pause_endpoint(endpoint, seconds=0)
    return "The pause is over."


_VERBS: Final[dict[str, Callable[[WebhookEndpoint], str]]] = {
    "enable": _enable,
    "enable-replay": _enable_and_replay,
    "replay": _replay,
    "test": _test,
    "disable": _disable,
    "pause": _pause,
    "resume": _resume,
    "rotate": str,
}


@admin.register(WebhookDelivery)
class WebhookDeliveryAdmin(QueueAdmin):
    """Look at deliveries and their attempts, retry and discard them."""

    queue = DELIVERIES
    heavy = ("body",)
    unindexed = ("endpoint_id",)
    born = "written"
    search_help = "a delivery's id, or the id of its event."
    search_help_text = "A delivery's id, or the id of its event."
    change_form_template = "admin/django_outbox/webhookdelivery/change_form.html"

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by id, or by the event's, which leads the index of the one constraint."""
        rows, more = super().get_search_results(request, queryset, search_term)
        if search_term.strip() and not rows[:1]:
            try:
                return queryset.filter(event_id=UUID(search_term.strip())), more
            except ValueError:
                pass
        return rows, more

    @admin.display(description="what")
    def summary(self, row: Any) -> SafeString | str:
        """Show the type of the event, and where it goes."""
        reason = f" {row.reason}" if row.reason else ""
        return format_html('{} <span class="outbox-about">{}{}</span>', row.event_type, row.endpoint_id, reason)

    def heading(self, row: Any) -> str:
        """Return the type of the event."""
        return str(row.event_type)

    def about(self, row: Any) -> str:
        """Return how the last attempt ended."""
        return str(row.reason)

    def advice(self, row: Any) -> str:
        """Return what happens next, and what to press."""
        if held(row):
            return "A relay is working on it right now."
        if row.status == Status.DEAD:
            known = _ADVICE.get(row.reason)
            return known or f"Its schedule is spent. {again(row)} Press Retry to send it now."
        if row.status == Status.WAITING:
            known = _ADVICE.get(row.reason, "") if row.reason == "lookup_failed" else ""
            return f"{known} {again(row)}".strip()
        return {
            Status.PENDING: "It is due; a relay sends it when the endpoint's turn comes, and no pause keeps it.",
            Status.DONE: "It was delivered.",
            Status.FAILED: "It was refused for good, or discarded. Retry sends it anew.",
        }[row.status]

    def facts(self, row: Any) -> list[tuple[str, Any]]:
        """Return ids and figures."""
        name = "admin:django_outbox_webhookendpoint_change"
        link = format_html(
            '<a href="{}">{}</a>',
            reverse(name, args=[row.endpoint_id], current_app=self.admin_site.name),
            row.endpoint_id,
        )
        return [
            ("endpoint", link),
            ("event", row.event_id),
            ("organization", row.organization_id),
            ("last HTTP status", str(row.last_status or "")),
            *lease_facts(row),
        ]

    def detail(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return the attempts, and the body."""
        attempts = WebhookAttempt.objects.using(self.using).filter(delivery_id=row.pk).order_by("-id")[:ATTEMPTS_SHOWN]
        body = row.body if len(row.body) <= BODY_SHOWN else f"{row.body[:BODY_SHOWN]}…"
        return {
            "attempts": [(each, exact(each.started_at), each.reason or "unknown") for each in attempts],
            "may_read": request.user.has_perm("django_outbox.view_webhookattempt"),
            "body": body,
        }


_ADVICE: Final = {
    "non_public": "The endpoint's name leads to an address that is not public, so nothing was sent. Private targets"
    ' are allowed by WEBHOOKS["ALLOW_NETWORKS"]; then press Retry.',
    "invalid_target": "The endpoint's URL is refused by the guard. Change it, then press Retry.",
    "endpoint_missing": "The endpoint was deleted. This goes by itself after 30 days.",
    "endpoint_disabled": "The endpoint is disabled. Enable it and replay what it missed, on the endpoint's page.",
    "endpoint_gone": "The endpoint answered 410 Gone and was disabled.",
    "lookup_failed": "The endpoint's name could not be looked up; no attempt was spent.",
}
