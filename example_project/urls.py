"""The pages: the one to watch, registration, the receiver of webhooks, and the admin with the outbox in it."""

from __future__ import annotations

from django.contrib import admin
from django.templatetags.static import static
from django.urls import path
from django.views.generic import RedirectView

from example_project.accounts.views import act, confirm_view, front, register_view, state_view
from example_project.receiver.views import receive, received

urlpatterns = [
    path("", front, name="front"),
    path("state/", state_view, name="state"),
    path("act/<slug:what>/", act, name="act"),
    path("register/", register_view, name="register"),
    path("confirm/<str:token>/", confirm_view, name="confirm"),
    path("hooks/", received, name="received"),
    path("hooks/in/", receive, name="receive"),
    path("admin/", admin.site.urls),
    # The admin's pages name no icon, and browsers ask here then.
    path("favicon.ico", RedirectView.as_view(url=static("accounts/icon.svg"))),
]
