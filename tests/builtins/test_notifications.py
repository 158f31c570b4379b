"""Notifications: whom a resolver names is told once, and can read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from django.db import transaction
from django.utils.translation import gettext_lazy

from django_outbox import Event, emit_event, notifications
from django_outbox.errors import InvalidEventType, InvalidPayload
from django_outbox.events import registry
from django_outbox.handlers import register_builtin_handlers
from django_outbox.models import Notification
from django_outbox.notifications import NewNotification, notifies
from django_outbox.testing import drain, travel
from tests.builtins.helpers import event_of

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _switched_on(settings: Any) -> None:
    settings.OUTBOX = {"BUILTIN_HANDLERS": ["notification-fanout"]}
    register_builtin_handlers()


def test_a_resolver_says_who_is_told_and_in_what_words() -> None:
    @notifies("order.paid")
    def buyers(event: Event) -> Iterator[NewNotification]:
        yield NewNotification(str(event.payload["buyer"]), "Paid", body="Thank you", url="/orders/1", data={"n": 1})

    with transaction.atomic():
        id_ = emit_event("order.paid", {"buyer": 7}, organization_id="acme")
        emit_event("order.shipped")
    assert drain() == {"done": 1}
    row = Notification.objects.get()
    assert (row.recipient, row.title, row.body, row.url, row.data) == ("7", "Paid", "Thank you", "/orders/1", {"n": 1})
    assert (row.dedup_key, row.event_id, row.event_type) == (f"event:{id_}", id_, "order.paid")
    assert (row.organization_id, row.read_at) == ("acme", None)


def test_the_handler_gets_the_types_of_the_resolvers_and_no_others() -> None:
    assert registry.for_type("order.paid") == ()

    @notifies("order.*")
    def first(event: Event) -> list[NewNotification]:
        return [NewNotification("1", "first")]

    @notifies("order.paid", "user.created")
    def second(event: Event) -> list[NewNotification]:
        return [NewNotification("2", "second")]

    assert [handler.name for handler in registry.for_type("order.shipped")] == ["notification-fanout"]
    assert registry.for_type("invoice.sent") == ()
    notifications.fan_out(event_of(type="order.paid"))
    notifications.fan_out(event_of(type="order.shipped"))
    assert sorted(Notification.objects.values_list("recipient", flat=True)) == ["1", "1", "2"]


def test_a_redelivered_event_tells_nobody_twice_and_whoever_was_missed() -> None:
    told = [NewNotification("1", "one")]

    @notifies("order.paid")
    def resolve(event: Event) -> Iterable[NewNotification]:
        return told

    event = event_of()
    assert notifications.fan_out(event) == 1
    told.append(NewNotification("2", "two"))
    assert notifications.fan_out(event) == 1
    assert notifications.fan_out(event) == 0
    assert notifications.fan_out(event_of()) == 2


def test_a_key_of_ones_own_tells_one_thing_about_several_events_or_two_about_one() -> None:
    @notifies("quota.reached")
    def resolve(event: Event) -> Iterable[NewNotification]:
        yield NewNotification("1", "Quota reached", dedup_key="quota:2026-05")
        yield NewNotification("1", "Once more", dedup_key=f"more:{event.id}")
        yield NewNotification("1", "Not told: the key is taken", dedup_key=f"more:{event.id}")

    for _ in range(2):
        notifications.fan_out(event_of(type="quota.reached"))
    assert sorted(Notification.objects.values_list("title", flat=True)) == ["Once more", "Once more", "Quota reached"]


def test_thousands_of_recipients_are_told_in_batches() -> None:
    @notifies("news.published")
    def everybody(event: Event) -> Iterator[NewNotification]:
        return (NewNotification(str(number), "News") for number in range(1_201))

    assert notifications.fan_out(event_of(type="news.published")) == 1_201


@pytest.mark.parametrize(
    ("new", "word"),
    [
        (NewNotification("", "x"), "recipient"),
        (NewNotification("1", ""), "title"),
        (NewNotification("1", "x" * 256), "title of a notification is 256"),
        (NewNotification("1", "a\x00b"), "cannot store"),
        (NewNotification(7, "x"), "recipient of a notification must be a str"),  # type: ignore[arg-type]
        (NewNotification("1", "x", data={"a": object()}), r"\$\.a"),
        ("a text", "NewNotification"),
    ],
)
def test_what_cannot_be_stored_is_named(new: Any, word: str) -> None:
    @notifies("order.paid")
    def resolve(event: Event) -> list[Any]:
        return [new]

    with pytest.raises(InvalidPayload, match=word):
        notifications.fan_out(event_of())
    assert not Notification.objects.exists()


def test_a_translatable_title_is_stored_as_text() -> None:
    @notifies("order.paid")
    def resolve(event: Event) -> list[NewNotification]:
        return [NewNotification("1", gettext_lazy("Yes"))]  # type: ignore[arg-type]

    notifications.fan_out(event_of())
    assert Notification.objects.get().title == "Yes"


def test_a_resolver_without_types_is_refused() -> None:
    with pytest.raises(InvalidEventType):
        notifies()


def test_a_recipient_reads_what_is_theirs() -> None:
    @notifies("order.paid")
    def resolve(event: Event) -> list[NewNotification]:
        return [NewNotification("1", event.payload["title"]), NewNotification("2", "another's")]

    for title in ("first", "second", "third"):
        notifications.fan_out(event_of(payload={"title": title}))
    rows = list(notifications.for_recipient("1"))
    assert [row.title for row in rows] == ["third", "second", "first"]
    assert notifications.count_unread("1") == 3
    assert notifications.count_unread("1", limit=2) == 2

    others = notifications.for_recipient("2").values_list("pk", flat=True)
    assert notifications.mark_read("1", [rows[0].pk, *others]) == 1
    assert notifications.mark_read("1", [rows[0].pk]) == 0
    assert notifications.count_unread("1") == 2
    assert notifications.mark_unread("1", [rows[0].pk]) == 1
    assert notifications.mark_all_read("1") == 3
    assert (notifications.count_unread("1"), notifications.count_unread("2")) == (0, 3)


def test_what_was_read_long_ago_is_purged() -> None:
    @notifies("order.paid")
    def resolve(event: Event) -> list[NewNotification]:
        return [NewNotification("1", "x")]

    for _ in range(3):
        notifications.fan_out(event_of())
    notifications.mark_read("1", [notifications.for_recipient("1")[0].pk])
    assert notifications.purge(read_before_seconds=3_600) == 0
    with travel(hours=2):
        assert notifications.purge(read_before_seconds=3_600) == 1
    assert Notification.objects.count() == 2
