"""
The box in which endpoints' secrets and custom headers are kept: encrypted and authenticated, by Fernet.

Its keys are derived from the settings. Several may be in force: the first encrypts, all
decrypt.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings

from django_outbox.conf import get_settings
from django_outbox.errors import InvalidSettings

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

__all__ = ["custom_headers", "seal", "secrets_in_force", "unseal"]


def _box() -> MultiFernet:
    texts = get_settings().webhooks.secret_keys
    if texts is None:
        # Django takes keys of bytes, too.
        given = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
        texts = tuple(key.decode("latin-1") if isinstance(key, bytes) else key for key in given)
    return _box_for(texts)


@lru_cache(maxsize=4)
def _box_for(texts: tuple[str, ...]) -> MultiFernet:
    try:
        from cryptography.fernet import Fernet, MultiFernet  # noqa: PLC0415  an extra
    except ImportError:
        raise InvalidSettings(
            "Webhook secrets are encrypted by the package cryptography, which cannot be imported."
            ' Install "django-transactional-outbox[webhooks]".'
        ) from None
    if not texts:
        raise InvalidSettings('OUTBOX["WEBHOOKS"]["SECRET_KEYS"] is empty. Leave it out to use SECRET_KEY.')
    # A key for this purpose alone: whoever learns it has not learned SECRET_KEY.
    keys = [hmac.digest(b"django_outbox.webhooks.secrets", text.encode(), hashlib.sha256) for text in texts]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])


def seal(value: Any) -> str:
    """Return a value as it is stored: JSON, encrypted and authenticated with the first key."""
    return _box().encrypt(json.dumps(value).encode()).decode()


def unseal(text: str) -> Any:
    """
    Return a stored value.

    :raises InvalidSettings: when no key of the settings opens it.
    """
    box = _box()
    from cryptography.fernet import InvalidToken  # noqa: PLC0415  an extra

    try:
        return json.loads(box.decrypt(text.encode()))
    except InvalidToken:
        raise InvalidSettings(
            "A webhook endpoint's secrets cannot be decrypted with the keys in force. Put the former key into"
            ' OUTBOX["WEBHOOKS"]["SECRET_KEYS"], or into SECRET_KEY_FALLBACKS.'
        ) from None


@lru_cache(maxsize=256)
def _unsealed(
    sealed: str,
    keys: tuple[str, ...] | None,  # noqa: ARG001  part of the cache's key
) -> Any:
    """Return a stored value that must not be changed: a busy endpoint's is needed hundreds of times a second."""
    return unseal(sealed)


def secrets_in_force(sealed: str, *, now: float) -> list[str]:
    """Return the secrets to sign with at a time in seconds since 1970, the newest first."""
    entries = _unsealed(sealed, get_settings().webhooks.secret_keys)
    return [entry["secret"] for entry in entries if entry["until"] is None or entry["until"] > now]


def custom_headers(sealed: str) -> dict[str, str]:
    """Return an endpoint's custom headers."""
    return dict(_unsealed(sealed, get_settings().webhooks.secret_keys)) if sealed else {}
