"""The admin of what the built-in handlers write: to read, by id or by what an index finds, and to change nothing."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_outbox import alerts, audit, notifications
from django_outbox.models import AuditEntry, Notification, OperatorAlert
from django_outbox.notifications import NewNotification, notifies
from tests.builtins.helpers import event_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga(client: Client) -> Client:
    @notifies("order.paid")
    def buyer(event: object) -> list[NewNotification]:
        return [NewNotification("7", "Paid <b>twice</b>")]

    for number in range(2):
        event = event_of(aggregate_type="user", aggregate_id=str(number), payload={"text": "<script>"})
        audit.append(event)
        notifications.fan_out(event)
    alerts.alert(event_of(type="outbox.event.dead", payload={"id": "x", "error": "<script>"}))
    client.force_login(User.objects.create_superuser("olga"))
    return client


@pytest.mark.parametrize("model", [AuditEntry, Notification, OperatorAlert])
def test_rows_are_listed_and_shown_and_nobody_changes_them(olga: Client, model: type[AuditEntry]) -> None:
    path = f"/admin/django_outbox/{model._meta.model_name}/"
    row = model._default_manager.first()
    assert row is not None
    for page in (path, f"{path}?q={row.pk}", f"{path}{row.pk}/change/"):
        response = olga.get(page)
        assert response.status_code == 200
        assert "<script>" not in response.content.decode().split('id="content"')[1].split("</main>")[0]
    for page in (f"{path}add/", f"{path}{row.pk}/delete/"):
        assert olga.get(page).status_code == 403
    assert olga.get(f"{path}?q=nothing").status_code == 200


def test_an_aggregate_a_position_and_a_recipient_are_found(olga: Client) -> None:
    listed = olga.get("/admin/django_outbox/auditentry/?q=user 1").content.decode()
    assert "user 1" in listed
    assert "user 0" not in listed
    assert "user 0" in olga.get("/admin/django_outbox/auditentry/?q=1").content.decode()
    assert "Paid" in olga.get("/admin/django_outbox/notification/?q=7").content.decode()
    assert "Paid" not in olga.get("/admin/django_outbox/notification/?q=8").content.decode()
