"""The registration page, and the one behind the link in the welcome mail."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.core import signing
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from example_project.accounts.confirmation import confirmed_user_id
from example_project.accounts.forms import RegistrationForm
from example_project.accounts.models import ConfirmedEmail
from example_project.accounts.registration import register


def register_view(request: HttpRequest) -> HttpResponse:
    """Show the form; register the user; answer without waiting for mail server or CRM."""
    form = RegistrationForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            register(
                username=form.cleaned_data["username"],
                email=form.cleaned_data["email"],
                password=form.cleaned_data["password1"],
                request_id=request.headers.get("X-Request-ID", "")[:64],
            )
        except IntegrityError:
            # Somebody took the name after the form had looked: no user, no event.
            form.add_error("username", "A user with that username already exists.")
        else:
            return redirect("registered")
    return render(request, "accounts/register.html", {"form": form})


def registered_view(request: HttpRequest) -> HttpResponse:
    """Say that it worked."""
    return render(request, "accounts/registered.html")


def confirm_view(request: HttpRequest, token: str) -> HttpResponse:
    """Confirm the address to which the link was sent, if it is not too old."""
    try:
        user = get_object_or_404(User, pk=confirmed_user_id(token))
    except signing.BadSignature:
        return render(request, "accounts/confirmed.html", {"user": None}, status=400)
    ConfirmedEmail.objects.get_or_create(user=user)
    return render(request, "accounts/confirmed.html", {"user": user})
