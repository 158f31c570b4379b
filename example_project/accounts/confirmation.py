"""The link in the welcome mail: who it is for, and until when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.core import signing
from django.urls import reverse

VALID_FOR = timedelta(hours=24)
_SALT = "accounts.confirmation"


def confirmation_link(user_id: int) -> tuple[str, datetime]:
    """Return a link that confirms a user's address, and when it stops working."""
    path = reverse("confirm", args=[signing.dumps(user_id, salt=_SALT)])
    return f"{settings.SITE_URL}{path}", datetime.now(UTC) + VALID_FOR


def confirmed_user_id(token: str) -> int:
    """Return whose link it is; raise ``signing.BadSignature`` for one that is forged or too old."""
    return int(signing.loads(token, salt=_SALT, max_age=VALID_FOR))
