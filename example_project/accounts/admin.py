"""What stands for systems elsewhere, to look at. The outbox itself is under "Outbox"."""

from __future__ import annotations

from django.contrib import admin

from example_project.accounts.models import ConfirmedEmail, Switch, Token, TokenRequest

admin.site.register(Switch, list_display=["name", "failing"])
admin.site.register(Token, list_display=["user", "device", "revoked"])
admin.site.register(TokenRequest, list_display=["idempotency_key", "attempt", "accepted", "received_at"])
admin.site.register(ConfirmedEmail, list_display=["user", "confirmed_at"])
