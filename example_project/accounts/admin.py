"""What the handlers left behind, to look at. The events themselves are under "Outbox"."""

from __future__ import annotations

from django.contrib import admin

from example_project.accounts.models import AuditRecord, ConfirmedEmail, CrmContact, CrmRequest

admin.site.register(AuditRecord, list_display=["action", "subject", "occurred_at", "event_id"])
admin.site.register(ConfirmedEmail, list_display=["user", "confirmed_at"])
admin.site.register(CrmContact, list_display=["email", "name"])
admin.site.register(CrmRequest, list_display=["idempotency_key", "attempt", "accepted", "received_at"])
