"""Metrics of a relay in a thread of this process, as a scraper gets them over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from prometheus_client.parser import text_string_to_metric_families

from django_outbox import Reject, metrics, on_event
from django_outbox.models import OutboxEvent
from tests.concurrency.helpers import eventually, running_relay
from tests.concurrency.test_relay import TYPE, Held, emit, held, outbox

__all__ = ["held", "outbox"]

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples: (name, label values …) → value."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[label] for label in metrics.METRICS[sample.name][1])): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_they_say_what_the_relay_did_what_it_holds_and_how_the_queue_stands(port: int, held: Held) -> None:
    @on_event(TYPE, name="one")
    def one(event: object) -> None:
        if event.payload == "held":  # type: ignore[attr-defined]
            held.pass_through()
        if event.payload == "refused":  # type: ignore[attr-defined]
            raise Reject("a secret of the row's")

    emit(3, "fine")
    emit(1, "refused")
    emit(1, "held")
    with running_relay(threads=2) as running, metrics.serving(running.relay, ("127.0.0.1", port)):
        held.wait_for_entry()
        running.wait_for(done=3, failed=1)
        during = scrape(port)
        held.go.set()
        running.wait_until_idle()
        after = scrape(port)
    assert during["outbox_rows_total", "events", "done"] == 3
    assert during["outbox_rows_total", "events", "failed"] == 1
    assert during["outbox_in_flight", "events"] == 1
    assert during["outbox_rows", "events", "failed"] == 1
    assert during["outbox_due", "events"] == 0
    assert during["outbox_database_up",] == 1
    assert after["outbox_rows_total", "events", "done"] == 4
    assert after["outbox_in_flight", "events"] == 0
    assert {name for name, *_ in after} <= set(metrics.METRICS)


def test_without_the_database_they_say_so_and_what_the_relay_knows(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "BACKLOG_SECONDS", 0.0)
    with running_relay() as running, metrics.serving(running.relay, ("127.0.0.1", port)):
        table = OutboxEvent._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
        try:
            samples = scrape(port)
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER TABLE elsewhere RENAME TO {table}")
        assert samples["outbox_database_up",] == 0
        assert samples["outbox_in_flight", "events"] == 0
        assert ("outbox_due", "events") not in samples
        eventually(lambda: scrape(port)["outbox_database_up",] == 1)


def test_a_port_that_is_taken_is_said_in_a_sentence(port: int) -> None:
    with socket.socket() as taken, running_relay() as running:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ImproperlyConfigured, match=f"cannot be served at 127.0.0.1, port {port}"):
            with metrics.serving(running.relay, ("127.0.0.1", port)):
                pytest.fail("it was served")


def test_without_the_extra_they_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from django_outbox import metrics\n"
        "with metrics.serving(None, None): pass\n"
        "with metrics.serving(object(), ('127.0.0.1', 1)): pass\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "pip install 'django-transactional-outbox[metrics]'" in run.stderr
