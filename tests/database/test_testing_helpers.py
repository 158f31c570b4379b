"""The helpers that projects use in their own tests, inside Django's plain ``TestCase``."""

from __future__ import annotations

import asyncio
import decimal
import threading
import uuid
from datetime import date, timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone

from django_outbox import Event, NewEvent, emit_event, emit_events, on_event
from django_outbox.events import registry
from django_outbox.models import OutboxEvent
from django_outbox.testing import assert_emitted, capture_events, drain, isolated_handlers, travel
from tests.testapp.models import Effect, Note


def emit(type_: str = "thing.done", payload: object = None, *, delay: float | None = None) -> uuid.UUID:
    with transaction.atomic():
        return emit_event(type_, payload, delay=delay)


class DrainInATestCase(TestCase):
    def setUp(self) -> None:
        self.seen: list[Event] = []
        on_event("thing.*", name="listener")(self.seen.append)

    def test_pending_handlers_run_without_threads_or_commits(self) -> None:
        """Scenario 29."""
        before = threading.active_count()
        with transaction.atomic():
            Note.objects.create(text="a user")
            emit_event("thing.done", {"n": 1})
        assert self.seen == []
        assert drain() == {"done": 1}
        assert [event.payload for event in self.seen] == [{"n": 1}]
        assert threading.active_count() == before
        assert connection.in_atomic_block

    def test_djangos_capture_of_commit_callbacks_runs_the_wake_and_drain_the_handlers(self) -> None:
        """Scenario 29, with the helper that Django ships."""
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            emit()
            emit()
        assert len(callbacks) >= 1
        assert self.seen == []
        assert drain() == {"done": 2}
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            emit()
        assert len(callbacks) == 1
        assert drain() == {"done": 1}

    def test_what_a_handler_emits_is_delivered_too(self) -> None:
        def chain(event: Event) -> None:
            with transaction.atomic():
                emit_events([NewEvent("thing.done"), NewEvent("thing.else")])

        on_event("chain.begun", name="chain")(chain)
        emit("chain.begun")
        assert drain() == {"done": 3}
        assert len(self.seen) == 2

    def test_it_takes_more_rows_than_one_claim(self) -> None:
        with transaction.atomic():
            emit_events(NewEvent("thing.done", {"n": number}) for number in range(250))
        assert drain() == {"done": 250}
        assert [event.payload["n"] for event in self.seen] == list(range(250))

    def test_nothing_due_counts_nothing(self) -> None:
        emit(delay=60)
        counts = drain()
        assert counts == {}
        assert counts["done"] == 0

    def test_a_handler_runs_under_a_savepoint_of_its_own(self) -> None:
        def fail(event: Event) -> None:
            Effect.objects.create(key="gone", handler="one")
            raise RuntimeError

        on_event("bad.thing", name="one")(fail)
        on_event("bad.thing", name="two")(lambda event: Effect.objects.create(key="kept", handler="two"))
        emit("bad.thing")
        with self.assertLogs("django_outbox.delivery", "ERROR"):
            assert drain() == {"waiting": 1}
        assert list(Effect.objects.values_list("key", flat=True)) == ["kept"]

    def test_a_drain_inside_a_handler_does_not_run_the_same_event_again(self) -> None:
        inner: list[dict[str, int]] = []
        on_event("outer.thing", name="outer")(lambda event: inner.append(dict(drain())))
        emit("outer.thing")
        emit()
        counts = drain()
        assert len(inner) == 1
        assert counts.total() + sum(inner[0].values()) == 2
        assert len(self.seen) == 1

    def test_an_unknown_queue_is_refused_by_name(self) -> None:
        emit()
        for queues in (["event"], ["events", "mail"]):
            with pytest.raises(ValueError, match=r"no queue '(event|mail)'\. Queues: events"):
                drain(queues=queues)
        assert drain(queues=[]) == {}
        assert drain(queues=("events",)) == {"done": 1}

    def test_commit_hooks_of_handlers_wait_for_a_commit_as_in_every_test_case(self) -> None:
        hooks: list[str] = []

        def handle(event: Event) -> None:
            transaction.on_commit(lambda: hooks.append(event.type))

        on_event("hook.set", name="one")(handle)
        emit("hook.set")
        with self.captureOnCommitCallbacks(execute=True):
            drain()
        assert hooks == ["hook.set"]

    @override_settings(OUTBOX={"MAX_ATEMPTS": 1})
    def test_wrong_settings_are_told_before_anything_is_claimed(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="MAX_ATEMPTS"):
            drain()


class DrainOutsideATransaction(TransactionTestCase):
    def test_handlers_run_in_autocommit_as_under_a_relay(self) -> None:
        modes: list[bool] = []
        on_event("thing.done", name="one")(lambda event: modes.append(connection.in_atomic_block))
        emit()
        assert drain() == {"done": 1}
        assert modes == [False]


class DrainOnAnotherAlias(TestCase):
    databases = {"default", "orders"}  # noqa: RUF012  Django's own form

    def test_only_the_rows_of_that_alias_are_taken(self) -> None:
        seen: list[Event] = []
        on_event("thing.*", name="listener")(seen.append)
        with transaction.atomic(using="orders"):
            emit_event("thing.elsewhere", using="orders")
        emit("thing.here")
        assert drain(using="orders") == {"done": 1}
        assert [event.type for event in seen] == ["thing.elsewhere"]
        assert_emitted("thing.elsewhere", using="orders")
        with pytest.raises(AssertionError):
            assert_emitted("thing.elsewhere")


class Travel(TestCase):
    def setUp(self) -> None:
        self.seen: list[Event] = []
        on_event("thing.done", name="listener")(self.seen.append)

    def test_every_unit_moves_the_engines_clock_and_they_add_up(self) -> None:
        emit(delay=((3 * 24 + 2) * 60 + 1) * 60 + 5)
        with travel(days=3, hours=2, minutes=1):
            assert drain() == {}
        with travel(days=3, hours=2, minutes=1, seconds=6):
            assert drain() == {"done": 1}

    def test_blocks_nest_and_end_also_on_an_error(self) -> None:
        emit(delay=90)
        with pytest.raises(LookupError), travel(minutes=1):
            with travel(seconds=20):
                assert drain() == {}
            raise LookupError
        with travel(minutes=1):
            assert drain() == {}
            with travel(minutes=1):
                assert drain() == {"done": 1}

    def test_back_in_time_nothing_later_is_due_and_new_rows_are_older(self) -> None:
        now = timezone.now()
        with travel(hours=-1):
            emit()
        row = OutboxEvent.objects.get()
        assert row.created_at < now - timedelta(minutes=59)
        assert abs(row.occurred_at - row.created_at) < timedelta(seconds=1)
        assert drain() == {"done": 1}

    def test_fractions_and_tiny_spans_can_be_travelled(self) -> None:
        emit()
        for seconds in (1e-7, 0.5, -1e-7):
            with travel(seconds=seconds):
                drain()
        assert len(self.seen) == 1

    def test_djangos_clock_stays(self) -> None:
        before = timezone.now()
        with travel(days=30):
            assert timezone.now() - before < timedelta(minutes=1)

    def test_stored_moments_follow_the_clock(self) -> None:
        with travel(days=30):
            emit(delay=60)
        row = OutboxEvent.objects.get()
        later = timezone.now() + timedelta(days=30)
        for moment in (row.created_at, row.due_at, row.not_before):
            assert moment is not None
            assert abs(moment - later) < timedelta(minutes=2)


class CaptureEvents(TestCase):
    def test_what_is_emitted_is_recorded_in_order_and_written_all_the_same(self) -> None:
        emit("thing.before")
        with capture_events() as captured:
            emit("thing.a", {"n": 1})
            with transaction.atomic():
                emit_events([NewEvent("thing.b"), NewEvent("thing.c")])
        emit("thing.after")
        assert [(event.type, event.payload) for event in captured] == [
            ("thing.a", {"n": 1}),
            ("thing.b", None),
            ("thing.c", None),
        ]
        assert OutboxEvent.objects.count() == 5

    def test_blocks_nest_and_each_records_its_own(self) -> None:
        with capture_events() as outer:
            with capture_events() as inner:
                emit("thing.a")
            emit("thing.b")
        assert [event.type for event in outer] == ["thing.a", "thing.b"]
        assert [event.type for event in inner] == ["thing.a"]

    def test_two_blocks_that_recorded_the_same_end_each_on_its_own(self) -> None:
        with capture_events() as outer:
            with capture_events():
                pass
            emit("thing.a")
        assert len(outer) == 1

    def test_what_was_refused_is_not_recorded_and_an_error_ends_the_block(self) -> None:
        with pytest.raises(LookupError), capture_events() as captured:
            with pytest.raises(TypeError):
                emit("thing.a", b"")
            raise LookupError
        emit("thing.b")
        assert captured == []

    def test_what_handlers_emit_is_recorded(self) -> None:
        on_event("thing.done", name="one")(lambda event: emit("thing.followed"))
        emit()
        with capture_events() as captured:
            drain()
        assert [event.type for event in captured] == ["thing.followed"]


class AssertEmitted(TestCase):
    def test_it_returns_the_newest_row_that_matches(self) -> None:
        first = emit(payload={"user_id": 1, "n": 1})
        emit(payload={"user_id": 2, "n": 2})
        last = emit(payload={"user_id": 1, "n": 3})
        assert first != last
        assert assert_emitted("thing.done", user_id=1).id == last
        assert assert_emitted("thing.done", n=2, user_id=2).payload == {"user_id": 2, "n": 2}
        assert assert_emitted("thing.done").id == last

    def test_values_are_compared_as_the_json_that_was_stored(self) -> None:
        id_ = uuid.uuid4()
        emit(
            payload={"id": id_, "price": decimal.Decimal("1.10"), "on": date(2026, 1, 2), "tags": ("a", "b"), "n": None}
        )
        assert_emitted("thing.done", id=id_, price=decimal.Decimal("1.10"), on=date(2026, 1, 2), tags=["a", "b"])
        assert_emitted("thing.done", id=str(id_), n=None)
        with pytest.raises(AssertionError):
            assert_emitted("thing.done", missing=None)

    def test_payload_keys_may_be_named_like_its_parameters(self) -> None:
        emit(payload={"type": "x", "event_type": "y", "payload": "z"})
        assert_emitted("thing.done", type="x", event_type="y", payload="z")

    def test_the_text_says_what_was_emitted_instead(self) -> None:
        with pytest.raises(AssertionError, match=r"'thing\.done' was not emitted\. Emitted types: none"):
            assert_emitted("thing.done")
        emit("other.thing")
        emit("more.things")
        with pytest.raises(AssertionError, match=r"Emitted types: more\.things, other\.thing"):
            assert_emitted("thing.done")
        emit(payload={"user_id": 1})
        with pytest.raises(AssertionError, match=r"not with \{'user_id': 2\}(.|\n)*\{'user_id': 1\}"):
            assert_emitted("thing.done", user_id=2)

    def test_a_payload_that_is_no_object_matches_only_when_nothing_is_asked_of_it(self) -> None:
        emit(payload=["user_id"])
        assert_emitted("thing.done")
        with pytest.raises(AssertionError):
            assert_emitted("thing.done", user_id=1)

    def test_a_rolled_back_event_was_not_emitted(self) -> None:
        with pytest.raises(LookupError), transaction.atomic():
            emit()
            raise LookupError
        with pytest.raises(AssertionError):
            assert_emitted("thing.done")


class IsolatedHandlers(TestCase):
    def test_what_was_registered_inside_is_gone_afterwards_also_on_an_error(self) -> None:
        before = registry.handlers()
        with pytest.raises(LookupError), isolated_handlers() as inside:
            assert inside is registry
            on_event("thing.done", name="one")(lambda event: None)
            emit()
            raise LookupError
        assert registry.handlers() == before
        assert registry.for_type("thing.done") == ()
        emit("thing.done")
        assert drain() == {"waiting": 1}

    def test_what_was_replaced_inside_is_back_afterwards(self) -> None:
        seen: list[str] = []
        on_event("thing.done", name="one")(lambda event: seen.append("outer"))
        with isolated_handlers() as inside:
            inside.replace(())
            on_event("thing.done", name="one")(lambda event: seen.append("inner"))
            emit()
            drain()
        emit()
        drain()
        assert seen == ["inner", "outer"]


class InAnAsyncTest(TestCase):
    async def test_an_async_test_hands_both_to_a_thread(self) -> None:
        from asgiref.sync import sync_to_async

        seen: list[Event] = []
        on_event("thing.done", name="one")(seen.append)
        await sync_to_async(emit)()
        assert await sync_to_async(drain)() == {"done": 1}
        assert len(seen) == 1
        await asyncio.sleep(0)


@pytest.mark.django_db
def test_an_endless_chain_is_stopped_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.testing._ROW_LIMIT", 50)
    on_event("thing.done", name="one")(lambda event: emit())
    emit()
    with pytest.raises(RuntimeError, match="emits without end"):
        drain()
