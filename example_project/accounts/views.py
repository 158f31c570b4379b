"""The pages: one to watch, one to register, and the one behind the link in the welcome mail."""

from __future__ import annotations

import secrets

from django.contrib.auth.models import User
from django.core import signing
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_POST

from example_project.accounts.confirmation import confirmed_user_id
from example_project.accounts.forms import RegistrationForm
from example_project.accounts.models import ConfirmedEmail, Switch
from example_project.accounts.registration import change_password, register
from example_project.accounts.state import SWITCHES, state

NAMES = ("amber", "basil", "clover", "dill", "elder", "fennel", "ginger", "hazel", "iris", "juniper")


@ensure_csrf_cookie
def front(request: HttpRequest) -> HttpResponse:
    """Show the page that fetches the state again and again."""
    return render(request, "accounts/front.html")


@never_cache
def state_view(_request: HttpRequest) -> HttpResponse:
    """Return what the page shows."""
    return JsonResponse(state())


@require_POST
def act(request: HttpRequest, what: str) -> HttpResponse:
    """Do what a button of the front page says."""
    if what == "register":
        name = f"{secrets.choice(NAMES)}-{secrets.token_hex(2)}"
        register(username=name, email=f"{name}@example.com", request_id=_request_id(request))
        return JsonResponse({"said": f"Registered {name}."})
    if what == "password":
        user = User.objects.filter(is_staff=False).order_by("-pk").first()
        if user is None:
            return JsonResponse({"said": "Register somebody first."}, status=409)
        change_password(user, secrets.token_urlsafe(12), request_id=_request_id(request))
        return JsonResponse({"said": f"Changed the password of {user.username}."})
    if what in SWITCHES:
        failing = request.POST.get("failing") == "yes"
        Switch.objects.update_or_create(name=what, defaults={"failing": failing})
        return JsonResponse({"said": f"The {what} {'fails' if failing else 'works'} now."})
    return JsonResponse({"said": "There is no such button."}, status=404)


def register_view(request: HttpRequest) -> HttpResponse:
    """Show the form; register the user; answer without waiting for any mail server or service."""
    form = RegistrationForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            register(
                username=form.cleaned_data["username"],
                email=form.cleaned_data["email"],
                password=form.cleaned_data["password1"],
                request_id=_request_id(request),
            )
        except IntegrityError:
            # Somebody took the name after the form had looked: no user, no event.
            form.add_error("username", "A user with that username already exists.")
        else:
            return redirect("front")
    return render(request, "accounts/register.html", {"form": form})


def confirm_view(request: HttpRequest, token: str) -> HttpResponse:
    """Confirm the address to which the link was sent, if it is not too old."""
    try:
        user = get_object_or_404(User, pk=confirmed_user_id(token))
    except signing.BadSignature:
        return render(request, "accounts/confirmed.html", {"user": None}, status=400)
    ConfirmedEmail.objects.get_or_create(user=user)
    return render(request, "accounts/confirmed.html", {"user": user})


def _request_id(request: HttpRequest) -> str:
    return request.headers.get("X-Request-ID", "")[:64]
