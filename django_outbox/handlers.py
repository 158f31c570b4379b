"""
The built-in handlers, off until named in ``OUTBOX["BUILTIN_HANDLERS"]``.

They turn events into rows of the other queues, which never import one another: what
joins them stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from django.conf import settings as django_settings

from django_outbox import webhooks
from django_outbox.conf import get_settings, problems
from django_outbox.delivery import current_cause
from django_outbox.events import Event, on_event

__all__ = ["register_builtin_handlers"]


def fan_out_to_webhooks(event: Event) -> None:
    """Write a delivery for each webhook endpoint that wants the event."""
    cause = current_cause.get()
    webhooks.fan_out(event, quiet=cause is not None and cause.quiet)


@dataclass(frozen=True, slots=True)
class _Builtin:
    types: tuple[str, ...]
    function: Callable[[Event], None]


_BUILTIN: Final = {
    "webhook-fanout": _Builtin(("*",), fan_out_to_webhooks),
}


def register_builtin_handlers() -> None:
    """
    Register the handlers that the settings name.

    :raises DuplicateHandler: when a handler of the project has one of their names.
    """
    # A project whose OUTBOX is wrong must still start far enough to be told so by its checks.
    if problems(getattr(django_settings, "OUTBOX", {})):
        return
    for name in get_settings().builtin_handlers:
        on_event(*_BUILTIN[name].types, name=name)(_BUILTIN[name].function)
