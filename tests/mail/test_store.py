"""What is kept beside the rows, and when it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, connections, transaction

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.mail import EMAILS, EmailWork, enqueue_email, store
from django_outbox.models import OutboxEmail, OutboxEmailAttachment, OutboxEmailBlob, OutboxEmailContent
from django_outbox.testing import drain, travel
from tests.mail.conftest import message
from tests.mail.servers import Script, ScriptedServer

pytestmark = pytest.mark.django_db

Start = Callable[[Script], ScriptedServer]


def queue(number: int = 1, *contents: bytes, **options: Any) -> UUID:
    made = message(number)
    for position, content in enumerate(contents):
        made.attach(f"{position}.bin", content, "application/octet-stream")
    return enqueue_email(made, **options)[0]


def kept() -> tuple[int, int, int]:
    return OutboxEmailContent.objects.count(), OutboxEmailAttachment.objects.count(), OutboxEmailBlob.objects.count()


def test_emails_share_the_bytes_of_their_attachments() -> None:
    queue(1, b"terms", b"one")
    queue(2, b"terms", b"two", b"two")
    assert kept() == (2, 4, 3)
    with pytest.raises(RuntimeError), transaction.atomic():
        queue(3, b"terms", b"three")
        raise RuntimeError
    assert kept() == (2, 4, 3)


def test_retention_removes_what_no_email_needs_any_more(work: EmailWork) -> None:
    queue(1, b"terms", b"one")
    queue(2, b"terms", b"two", delay=3600)
    assert drain() == {"done": 1}
    assert work.purge(using="default", limit=100) == 0
    with travel(days=8):
        assert work.purge(using="default", limit=100) == 1
    assert kept() == (1, 2, 2)
    assert set(OutboxEmailBlob.objects.values_list("content", flat=True)) == {b"terms", b"two"}


def test_an_orphan_that_a_purge_had_to_leave_is_swept_later(work: EmailWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SWEPT", 2)
    queue(1, b"needed")
    for number in range(5):
        OutboxEmailBlob.objects.create(id=engine.new_id(), sha256=f"{number}", content=b"orphan")
    for _ in range(4):
        work.purge(using="default", limit=100)
    assert kept() == (1, 1, 1)


# --- sensitive emails


@pytest.mark.parametrize("reply", [None, "550 5.1.1 no such user"])
def test_what_a_sensitive_email_says_goes_with_its_outcome(scripted: Start, reply: str | None) -> None:
    scripted(lambda session, verb, line: reply if verb == "RCPT" else None)
    queue(1, b"secret", sensitive=True)
    queue(2, b"other")
    drain(queues=["email"])
    email = OutboxEmail.objects.get(sensitive=True)
    assert (email.status, email.wiped, email.subject) == ("failed" if reply else "done", True, "")
    assert kept() == (1, 1, 1)


def test_a_sensitive_email_keeps_what_it_says_while_it_may_be_sent(scripted: Start) -> None:
    scripted(lambda session, verb, line: "451 4.3.0 later" if verb == "RCPT" else None)
    queue(1, b"secret", sensitive=True)
    for seconds in (0, 100, 400, 900):
        with travel(seconds=seconds):
            drain(queues=["email"])
        assert kept() == (1, 1, 1)
    assert OutboxEmail.objects.get().status == "dead"
    with travel(hours=25):
        drain(queues=["email"])
    email = OutboxEmail.objects.get()
    assert (email.status, email.due_at, email.wiped) == ("dead", None, True)
    assert kept() == (0, 0, 0)


def test_a_discard_wipes_a_sensitive_email() -> None:
    ids = [queue(1, b"secret", sensitive=True), queue(2, b"other")]
    report = engine.discard(EMAILS, using="default", ids=ids)
    assert report.changed == 2
    assert kept() == (1, 1, 1)
    assert {email.wiped for email in OutboxEmail.objects.all()} == {True, False}


def test_a_wiped_email_is_not_retried() -> None:
    ids = [queue(1, sensitive=True), queue(2)]
    engine.discard(EMAILS, using="default", ids=ids)
    report = engine.retry(EMAILS, using="default", ids=ids)
    assert (report.changed, report.skipped) == (1, 1)
    assert drain() == {"done": 1}


def test_a_wipe_is_part_of_the_settle(work: EmailWork) -> None:
    """A relay that dies before the commit of its settle leaves the content to its successor."""
    queue(1, sensitive=True)
    (lease,) = engine.Claimer(EMAILS, holder="me", using="default").claim(1, lease_seconds=120)
    settled = engine.Settled(lease, engine.Done())
    with pytest.raises(RuntimeError), transaction.atomic():
        engine.settle(
            [settled], schedule=get_settings().email.schedule, using="default", along=work.along_on("default")
        )
        assert kept()[0] == 0
        raise RuntimeError
    assert kept()[0] == 1
    assert not OutboxEmail.objects.get().wiped


# --- at once


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_a_purge_never_takes_an_attachment_that_is_being_referred_to() -> None:
    """The enqueue holds its transaction open while the purge runs: the purge must see the lock, and pass by."""
    first = queue(1, b"terms")
    done = threading.Event()
    go_on = threading.Event()

    def enqueue() -> None:
        try:
            with transaction.atomic():
                queue(2, b"terms")
                done.set()
                go_on.wait(10)
        finally:
            connections.close_all()

    thread = threading.Thread(target=enqueue)
    thread.start()
    assert done.wait(10)
    store.drop_content([first], using="default")
    go_on.set()
    thread.join(10)
    assert kept() == (1, 1, 1)
    document = store.load(OutboxEmailContent.objects.get().pk, using="default")
    assert document is not None
    assert list(document[1].values()) == [b"terms"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_an_enqueue_waits_for_no_purge_and_keeps_its_attachment() -> None:
    """The purge holds its transaction open: the enqueue cannot lock the bytes, and writes them anew."""
    first = queue(1, b"terms")
    dropped = threading.Event()
    go_on = threading.Event()

    def purge() -> None:
        try:
            with transaction.atomic():
                store.drop_content([first], using="default")
                dropped.set()
                go_on.wait(10)
        finally:
            connections.close_all()

    thread = threading.Thread(target=purge)
    thread.start()
    assert dropped.wait(10)
    second = queue(2, b"terms")
    go_on.set()
    thread.join(10)
    loaded = store.load(second, using="default")
    assert loaded is not None
    assert list(loaded[1].values()) == [b"terms"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_two_transactions_with_the_same_attachments_do_not_wait_for_one_another() -> None:
    """Each holds its transaction open until the other has written the same bytes in the other order."""
    both = threading.Barrier(2, timeout=10)
    failures: list[BaseException] = []

    def enqueue(*contents: bytes) -> None:
        try:
            with transaction.atomic():
                for content in contents:
                    queue(1, content)
                    both.wait()
        except BaseException as error:  # noqa: BLE001  told to the test
            failures.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=enqueue, args=each) for each in ((b"a", b"b"), (b"b", b"a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert OutboxEmail.objects.count() == 4


# --- the engine's part


def test_lanes_are_served_urgent_ones_first_and_only_where_something_is_due() -> None:
    queue(1, priority="bulk")
    queue(1, priority="urgent")
    queue(2, delay=3600)
    OutboxEmail.objects.filter(priority=2).update(backend_alias="other")
    work = EmailWork(lambda type_: "{}")

    def lanes() -> list[tuple[Any, ...]]:
        return [tuple(scope.values()) for scope, _ in work.scopes(500, using="default")]

    assert lanes() == [(0, "default"), (2, "other")]
    work.backends.pause("other", reason="a test")
    assert lanes() == [(0, "default")]
    with travel(hours=2):
        assert lanes() == [(0, "default"), (1, "default")]
    OutboxEmail.objects.filter(priority=0).delete()
    due = work.next_due_seconds(using="default")
    assert due is not None
    assert 0 < due <= 5.0  # the rest of the backend, which ends before the delay


@pytest.mark.postgres
def test_a_claim_of_an_email_is_a_hot_update() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE relname = 'django_outbox_email'")
        assert "fillfactor=50" in cursor.fetchone()[0]
        cursor.execute(
            "SELECT indexdef FROM pg_indexes WHERE tablename = 'django_outbox_email'"
            " AND (indexdef LIKE '%%lease_until%%' OR indexdef LIKE '%%leased_by%%' OR indexdef LIKE '%%attempts%%')"
        )
        assert cursor.fetchall() == []
