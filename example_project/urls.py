"""The example's pages: registration, a receiver of webhooks, and the admin with the outbox in it."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.accounts.views import confirm_view, register_view, registered_view
from example_project.receiver.views import receive, received

urlpatterns = [
    path("", register_view, name="register"),
    path("registered/", registered_view, name="registered"),
    path("confirm/<str:token>/", confirm_view, name="confirm"),
    path("hooks/", received, name="received"),
    path("hooks/in/", receive, name="receive"),
    path("admin/", admin.site.urls),
]
