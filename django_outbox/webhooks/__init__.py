"""
The webhook queue: signed requests to customers' endpoints.

Importing this package imports no models, so that a receiver can use `verify` anywhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_outbox.webhooks.deliver import WebhookWork
    from django_outbox.webhooks.endpoints import (
        change_endpoint,
        create_endpoint,
        disable_endpoint,
        enable_endpoint,
        fan_out,
        pause_endpoint,
        replay,
        rotate_secret,
        send_test,
    )
    from django_outbox.webhooks.signing import sign, verify
    from django_outbox.webhooks.store import DELIVERIES

__all__ = [
    "DELIVERIES",
    "WebhookWork",
    "change_endpoint",
    "create_endpoint",
    "disable_endpoint",
    "enable_endpoint",
    "fan_out",
    "pause_endpoint",
    "replay",
    "rotate_secret",
    "send_test",
    "sign",
    "verify",
]

_WHERE = {"DELIVERIES": "store", "WebhookWork": "deliver", "sign": "signing", "verify": "signing"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE.get(name, 'endpoints')}"), name)
    globals()[name] = value
    return value
