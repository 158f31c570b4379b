"""The example's pages: registration, and the admin with the outbox in it."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.accounts.views import register_view, registered_view

urlpatterns = [
    path("", register_view, name="register"),
    path("registered/", registered_view, name="registered"),
    path("admin/", admin.site.urls),
]
