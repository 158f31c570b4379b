"""The registration form."""

from __future__ import annotations

from django import forms
from django.contrib.auth.forms import BaseUserCreationForm
from django.contrib.auth.models import User


class RegistrationForm(BaseUserCreationForm):  # type: ignore[type-arg]  # generic in the stubs alone
    """Name, email address and password of a new user. It validates; `register` saves."""

    email = forms.EmailField()

    class Meta(BaseUserCreationForm.Meta):
        model = User
        fields = ("username", "email")
