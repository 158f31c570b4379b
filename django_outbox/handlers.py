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

from django_outbox import alerts, audit, notifications, webhooks
from django_outbox.conf import get_settings, problems
from django_outbox.delivery import current_cause
from django_outbox.events import Event, on_event

__all__ = ["register_builtin_handlers"]


def write_audit_entry(event: Event) -> None:
    """Enter the event in the audit log."""
    audit.append(event)


def fan_out_to_webhooks(event: Event) -> None:
    """Write a delivery for each webhook endpoint that wants the event."""
    cause = current_cause.get()
    webhooks.fan_out(event, quiet=cause is not None and cause.quiet)


def write_notifications(event: Event) -> None:
    """Write what the project's resolvers say."""
    notifications.fan_out(event)


def alert_operators(event: Event) -> None:
    """Tell operators of a death, at once or in the next summary."""
    alerts.alert(event)


@dataclass(frozen=True, slots=True)
class _Builtin:
    types: Callable[[], tuple[str, ...]]
    """Asked when it is registered; none: it has nothing to do."""
    function: Callable[[Event], None]


_started = False


def _every_type() -> tuple[str, ...]:
    return ("*",)


_BUILTIN: Final = {
    "audit-log": _Builtin(_every_type, write_audit_entry),
    "webhook-fanout": _Builtin(_every_type, fan_out_to_webhooks),
    "notification-fanout": _Builtin(notifications.patterns, write_notifications),
    alerts.HANDLER: _Builtin(lambda: alerts.TYPES, alert_operators),
}


def register_builtin_handlers() -> None:
    """
    Register the handlers that the settings name.

    :raises DuplicateHandler: when a handler of the project has one of their names.
    """
    global _started  # noqa: PLW0603
    # A project whose OUTBOX is wrong must still start far enough to be told so by its checks.
    if problems(getattr(django_settings, "OUTBOX", {})):
        return
    _started = True
    for name in get_settings().builtin_handlers:
        _register(name)


def _register(name: str) -> None:
    if types := _BUILTIN[name].types():
        on_event(*types, name=name)(_BUILTIN[name].function)


def _follow_resolvers() -> None:
    """Register the handler of notifications anew, for the types of a resolver that came after start-up."""
    if _started and "notification-fanout" in get_settings().builtin_handlers:
        _register("notification-fanout")


notifications.resolvers.changed = _follow_resolvers
