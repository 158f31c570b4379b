"""The pages: the one to watch, registration, the receiver of webhooks, and the admin with the outbox in it."""

from __future__ import annotations

from django.contrib import admin
from django.templatetags.static import static
from django.urls import path
from django.views.generic import RedirectView

from example_project.accounts.receiver import receive
from example_project.accounts.views import act, front, register_view, state_view

urlpatterns = [
    path("", front, name="front"),
    path("state/", state_view, name="state"),
    path("act/<slug:what>/", act, name="act"),
    path("register/", register_view, name="register"),
    path("receiver/", receive, name="receiver"),
    path("admin/", admin.site.urls),
    # The admin's pages name no icon, and browsers ask here then.
    path("favicon.ico", RedirectView.as_view(url=static("accounts/icon.svg"))),
]
