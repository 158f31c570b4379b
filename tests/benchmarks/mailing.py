"""Workloads of the email queue: what queueing a message costs, and how fast a relay sends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend as SMTPBackend
from django.db import connection, transaction

from django_outbox import emit_event
from django_outbox.mail import enqueue_email
from tests.benchmarks.harness import ROOT, Bench, Line, RelayProcess, absolute, checkpoint, compared

TABLES = "django_outbox_email, django_outbox_email_content, django_outbox_email_blob, django_outbox_email_attachment"


def _message(number: int, attached: bytes = b"") -> EmailMessage:
    made = EmailMessage(
        f"Your order {number}", "Thank you for your order.\n" * 10, "shop@example.com", [f"user{number}@example.com"]
    )
    if attached:
        made.attach("invoice.pdf", attached, "application/pdf")
    return made


def mail_enqueue(bench: Bench) -> Iterator[Line]:
    """Time what an event and a plain text mail add to a transaction, by turns."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLES}, django_outbox_event")
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS bench_purchase (id bigserial PRIMARY KEY, customer text, total text)"
        )

    def transact(more: Callable[[], object] | None) -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO bench_purchase (customer, total) VALUES (%s, %s)", ["Ada", "12.50"])
            if more is not None:
                more()

    kinds: dict[str, Callable[[], object] | None] = {
        "none": None,
        "event": lambda: emit_event("bench.one", {"order_id": 4711}),
        "mail": lambda: enqueue_email(_message(1)),
    }
    checkpoint()
    added: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in bench.each_round("mail_enqueue"):
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(bench.size(600, least=50)):
            for kind, more in kinds.items():
                began = time.perf_counter()
                transact(more)
                taken[kind].append(time.perf_counter() - began)
        for kind, times in taken.items():
            added[kind].append((median(times) - median(taken["none"])) * 1e6)
    with connection.cursor() as cursor:
        # No relay of a later workload is to send them.
        cursor.execute(f"TRUNCATE {TABLES}, django_outbox_event")
    yield compared(
        "mail_enqueue: time a mail adds; reference an event", added["mail"], added["event"], unit="us", at_most=3.0
    )


@contextmanager
def _sink(away_seconds: float = 0.0) -> Iterator[int]:
    """Start a mail server in a process of its own, so many seconds away; it takes everything and keeps nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.sink", str(away_seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _queue(count: int, attached: bytes = b"") -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {TABLES}, django_outbox_event")
    checkpoint()
    for first in range(0, count, 500):
        with transaction.atomic():
            for number in range(first, min(first + 500, count)):
                enqueue_email(_message(number, attached and number.to_bytes(8) + attached))
    with connection.cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE) django_outbox_email")


def _sent_by_relay(count: int, port: int, attached: bytes = b"") -> tuple[float, float]:
    """Return messages a second, and the relay's peak memory."""
    _queue(count, attached)
    os.environ["BENCH_MAIL_PORT"] = str(port)
    with RelayProcess(mode="drain") as relay:
        relay.go()
        figures = relay.end()
    if figures.counts.get("done", 0) != count:
        raise RuntimeError(f"{count} mails were queued and {figures.counts} came of it")
    return count / figures.seconds, figures.peak_mb


def mail_send(bench: Bench) -> Iterator[Line]:
    """Send queued messages, and the same ones in a plain loop over one open connection."""
    count = bench.size(2_000, least=200)
    ours: list[float] = []
    reference: list[float] = []
    for _ in bench.each_round("mail_send"):
        with _sink() as port:
            reference.append(_sent_by_hand(count, port))
            ours.append(_sent_by_relay(count, port)[0])
    yield compared("mail_send: messages sent", ours, reference, unit="messages/s", at_least=0.7)


def mail_far(bench: Bench) -> Iterator[Line]:
    """Send through a server that is 20 ms away, as one on the internet may be."""
    count = bench.size(1_000, least=100)
    ours: list[float] = []
    reference: list[float] = []
    for _ in bench.each_round("mail_far"):
        with _sink(0.02) as port:
            reference.append(_sent_by_hand(max(20, count // 20), port))
            ours.append(_sent_by_relay(count, port)[0])
    yield compared("mail_far: the same, the server 20 ms away", ours, reference, unit="messages/s")


def _sent_by_hand(count: int, port: int) -> float:
    """Send in a plain loop over one open connection; return messages a second."""
    backend = SMTPBackend(host="127.0.0.1", port=port)
    backend.open()
    messages = [_message(number) for number in range(count)]
    began = time.perf_counter()
    for each in messages:
        backend.send_messages([each])
    rate = count / (time.perf_counter() - began)
    backend.close()
    return rate


def mail_memory(bench: Bench) -> Iterator[Line]:
    """Send messages with attachments of 100 kB, and see that memory does not grow with their number."""
    few, many = bench.size(500, least=50), bench.size(10_000, least=500)
    with _sink() as port:
        peaks = [_sent_by_relay(count, port, os.urandom(100_000))[1] for count in (few, many)]
    yield absolute(
        "mail_memory: peak, attachments of 100 kB",
        peaks[1],
        shown="{:.0f} MB",
        target="< 150 MB",
        reached=peaks[1] < 150,
    )
    yield absolute(
        "mail_memory: growth with twenty times the messages",
        peaks[1] - peaks[0],
        shown="{:.0f} MB",
        target="<= 15 MB",
        reached=peaks[1] - peaks[0] <= 15,
    )
