"""What the checks say of the built-in handlers before they cost anything."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.checks import check_outbox
from django_outbox.notifications import notifies


def found(settings: Any, **outbox: Any) -> dict[str, str]:
    settings.OUTBOX = outbox
    return {
        str(message.id).removeprefix("django_outbox."): message.msg
        for message in check_outbox()
        if str(message.id)[-2] == "5"
    }


def test_alerts_need_somebody_to_tell(settings: Any) -> None:
    assert list(found(settings, BUILTIN_HANDLERS=["operator-alert"])) == ["E050"]
    settings.ADMINS = ["ops@example.com"]
    assert found(settings, BUILTIN_HANDLERS=["operator-alert"]) == {}
    settings.ADMINS = []
    assert found(settings, BUILTIN_HANDLERS=["operator-alert"], ALERT_WEBHOOK_URL="https://example.com/x") == {}


@pytest.mark.parametrize("url", ["http://example.com/x", "https://10.0.0.1/x", "example.com"])
def test_an_alert_webhook_that_would_be_refused_is_named(settings: Any, url: str) -> None:
    outbox = {"BUILTIN_HANDLERS": ["operator-alert"], "ALERT_WEBHOOK_URL": url}
    assert list(found(settings, **outbox)) == ["E051"]


def test_notifications_need_a_resolver(settings: Any) -> None:
    assert list(found(settings, BUILTIN_HANDLERS=["notification-fanout"])) == ["W050"]

    @notifies("order.paid")
    def resolve(event: Any) -> list[Any]:
        return []

    assert found(settings, BUILTIN_HANDLERS=["notification-fanout"]) == {}


def test_a_handler_that_does_not_exist_is_named(settings: Any) -> None:
    settings.OUTBOX = {"BUILTIN_HANDLERS": ["audit"]}
    (message,) = check_outbox()
    assert "audit-log, webhook-fanout, notification-fanout, operator-alert" in message.msg
