"""
Signatures of the Standard Webhooks specification 1.0.0, for senders and receivers. Pure.

The signed text is ``id.timestamp.body``, with the body's bytes as they travel. A
secret is ``whsec_`` and base64, its key the decoded bytes, never the text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets as random_source
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from django_outbox.errors import InvalidSignature

__all__ = ["new_secret", "secret_key", "sign", "verify"]

SECRET_PREFIX: Final = "whsec_"  # noqa: S105  a form, not a secret
SIGNING_KEY_PREFIX: Final = "whsk_"
PUBLIC_KEY_PREFIX: Final = "whpk_"

_SECRET_BYTES: Final = 32
_SHORTEST_SECRET, _LONGEST_SECRET = 24, 64
_ID: Final = re.compile(r"[!-~]+")
# Sixteen digits reach the year 300 million; more would only cost time.
_TIMESTAMP: Final = re.compile(r"[0-9]{1,16}")
_SIGNATURES_READ: Final = 32


def new_secret() -> str:
    """Return a new secret of 256 random bits."""
    return SECRET_PREFIX + base64.b64encode(random_source.token_bytes(_SECRET_BYTES)).decode()


def secret_key(secret: str) -> bytes:
    """
    Return the key in a ``whsec_`` secret.

    :raises ValueError: unless it is the prefix and base64 of 24 to 64 bytes. The text never quotes it.
    """
    key = _decoded(secret, SECRET_PREFIX)
    if not _SHORTEST_SECRET <= len(key) <= _LONGEST_SECRET:
        raise ValueError(f"The webhook secret holds {len(key)} bytes; it must hold {_SHORTEST_SECRET} to 64.")
    return key


def _decoded(secret: object, prefix: str) -> bytes:
    if not isinstance(secret, str) or not secret.startswith(prefix):
        raise ValueError(f"A webhook key begins with {prefix!r}.")
    try:
        return base64.b64decode(secret[len(prefix) :], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"What follows {prefix!r} in the webhook key is not base64.") from None


def sign(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    """
    Return one signature, ``v1,`` and base64, as it stands in the ``webhook-signature`` header.

    ``timestamp`` is in whole seconds since 1970, ``body`` the very bytes that are sent.
    Several signatures, one for each secret in force, stand in the header with one space
    between them. A ``whsk_`` key signs with ed25519 (``v1a,``), which needs ``cryptography``.

    :raises ValueError: for a malformed secret.
    """
    signed = _signed(webhook_id, str(int(timestamp)), body)
    if str(secret).startswith(SIGNING_KEY_PREFIX):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415  an extra
            Ed25519PrivateKey,
        )

        # The seed alone, or the seed and the public key after it: both are in use.
        key = _decoded(secret, SIGNING_KEY_PREFIX)
        if len(key) not in {32, 64}:
            raise ValueError("The webhook signing key must hold 32 or 64 bytes.")
        return "v1a," + base64.b64encode(Ed25519PrivateKey.from_private_bytes(key[:32]).sign(signed)).decode()
    return "v1," + _hmac(secret_key(secret), signed)


def _signed(webhook_id: str, timestamp: str, body: bytes) -> bytes:
    return b"%b.%b.%b" % (webhook_id.encode(), timestamp.encode(), body)


def _hmac(key: bytes, signed: bytes) -> str:
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def verify(
    secrets: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_seconds: float = 300,
    now: float | None = None,
) -> Any:
    """
    Return the parsed body of a webhook that one of ``secrets`` signed.

    ``headers`` are those of the request, in any case of letters (Django's
    ``request.headers``); ``body`` is the raw bytes (``request.body``), not parsed and
    written again. Give the old and the new secret while one replaces the other. A
    ``whpk_`` key verifies ed25519 signatures. The receiver still has to remember the
    ``webhook-id``: the same event may come more than once.

    :raises InvalidSignature: when a header is missing or malformed, the timestamp is more
        than ``tolerance_seconds`` away from ``now`` (by default this computer's clock), no
        signature matches, or the body is not JSON.
    :raises ValueError: when a secret is malformed.
    """
    keys = [secrets] if isinstance(secrets, str) else list(secrets)
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"verify() takes the raw bytes of the body, not {type(body).__name__}.")
    raw = bytes(body)
    given = {str(name).lower(): value for name, value in headers.items()}
    webhook_id = _header(given, "webhook-id", _ID)
    timestamp = _header(given, "webhook-timestamp", _TIMESTAMP)
    # One space between signatures is the rule; what others send more of does no harm.
    signatures = str(given.get("webhook-signature", "")).split(" ")[:_SIGNATURES_READ]
    age = (time.time() if now is None else now) - int(timestamp)
    if not -tolerance_seconds <= age <= tolerance_seconds:
        raise InvalidSignature(f"The webhook's timestamp is {abs(age):.0f} s {'old' if age > 0 else 'ahead'}.")
    signed = _signed(webhook_id, timestamp, raw)
    # Every key and signature is compared, in constant time each: how long it takes tells nothing.
    matches = [_matches(key, signature, signed) for key in keys for signature in signatures]
    if not any(matches):
        raise InvalidSignature("No signature of the webhook matches.")
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidSignature("The webhook's body is signed, but is not JSON.") from None


def _header(headers: Mapping[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = headers.get(name)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise InvalidSignature(f"The {name} header is {'missing' if value is None else 'malformed'}.")
    return value


def _matches(key: str, signature: str, signed: bytes) -> bool:
    if key.startswith(PUBLIC_KEY_PREFIX):
        return _matches_ed25519(key, signature, signed)
    return hmac.compare_digest(f"v1,{_hmac(secret_key(key), signed)}".encode(), signature.encode("utf-8", "replace"))


def _matches_ed25519(key: str, signature: str, signed: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature as Mismatch  # noqa: PLC0415  an extra
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    public = Ed25519PublicKey.from_public_bytes(_decoded(key, PUBLIC_KEY_PREFIX))
    version, _, text = signature.partition(",")
    if version != "v1a":
        return False
    try:
        public.verify(base64.b64decode(text, validate=True), signed)
    except (Mismatch, binascii.Error, ValueError):
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON.")
