"""Workloads of the webhook queue: how fast it sends, how fast it fans out, and whether it is fair."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import Any

import requests
from django.db import connection, transaction
from django.test import override_settings

from django_outbox import Event
from django_outbox import lease as engine
from django_outbox.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from django_outbox.webhooks import create_endpoint, fan_out, store
from tests.benchmarks.harness import ROOT, Bench, Line, RelayProcess, absolute, checkpoint, compared, load, progress
from tests.webhooks.servers import Server, silent_port

THREADS = 16
PAYLOAD = {"order_id": 4711, "customer": "Ada", "total": "12.50", "lines": [{"sku": "A-1", "count": 2}] * 3}


@contextmanager
def _reachable(*ports: int) -> Iterator[None]:
    """Let this process, and relays that it starts, reach these ports."""
    os.environ["BENCH_WEBHOOK_PORTS"] = " ".join(map(str, ports))
    webhooks = {"ALLOW_HTTP": True, "ALLOW_NETWORKS": ["127.0.0.0/8"], "ALLOW_PORTS": [443, *ports]}
    with override_settings(OUTBOX={"WEBHOOKS": webhooks}):
        yield


@contextmanager
def _receiver() -> Iterator[int]:
    """Run a receiver in a process of its own, and yield its port."""
    command = [sys.executable, "-m", "tests.benchmarks.receiver"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _empty() -> None:
    load(0)
    with connection.cursor() as cursor:
        for model in (WebhookDelivery, WebhookEndpoint, WebhookAttempt):
            cursor.execute(f"TRUNCATE {model._meta.db_table}")
    checkpoint()


def _analyze() -> None:
    with connection.cursor() as cursor:
        for model in (WebhookDelivery, WebhookEndpoint):
            cursor.execute(f"VACUUM (ANALYZE) {model._meta.db_table}")


def _event() -> Event:
    return Event(
        id=engine.new_id(),
        type="order.placed",
        payload=PAYLOAD,
        occurred_at=datetime.now(UTC),
        aggregate_type="",
        aggregate_id="",
        organization_id="",
        request_id="",
        causation_id=None,
        headers={},
        handler="webhook-fanout",
        attempt=1,
        idempotency_key="",
    )


def _post_bare(url: str, bodies: list[str]) -> float:
    """Post the bodies from as many threads, a fresh connection each, and return how many a second."""
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    for body in bodies:
        work.put(body)

    def post() -> None:
        while True:
            try:
                body = work.get_nowait()
            except queue.Empty:
                return
            requests.post(url, data=body.encode(), headers={"Content-Type": "application/json"}, timeout=30)

    threads = [threading.Thread(target=post) for _ in range(THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(bodies) / (time.perf_counter() - began)


def webhooks(bench: Bench) -> Iterator[Line]:
    """Deliver to a local receiver with 16 threads, and post the same bodies with ``requests`` alone, by turns."""
    per_endpoint = bench.size(125, least=10)
    ours: list[float] = []
    reference: list[float] = []
    statements: list[float] = []
    with _receiver() as port, _reachable(port):
        url = f"http://127.0.0.1:{port}/in"
        for _ in bench.each_round("webhooks"):
            _empty()
            for _ in range(THREADS):
                create_endpoint(url)
            for _ in range(per_endpoint):
                fan_out(_event())
            _analyze()
            count = THREADS * per_endpoint
            with RelayProcess(mode="drain", threads=THREADS) as relay:
                relay.go()
                figures = relay.end()
            if figures.counts.get("done", 0) != count:
                raise RuntimeError(f"{count} deliveries were owed: {figures.counts}")
            ours.append(count / figures.seconds)
            statements.append(figures.statements / count)
            reference.append(_post_bare(url, list(WebhookDelivery.objects.values_list("body", flat=True))))
    yield compared("webhooks: 16 threads; reference requests", ours, reference, unit="/s", at_least=0.6)
    yield Line(workload="webhooks: statements per delivery", ours=f"{median(statements):.2f}")


def hook_fanout(bench: Bench) -> Iterator[Line]:
    """Write the deliveries of events that 1,000 endpoints want."""
    rates = []
    with _reachable(443):
        _empty()
        for _ in range(1_000):
            create_endpoint("https://hooks.example.com/in", event_types=["order.*"])
        _analyze()
        for _ in bench.each_round("hook_fanout"):
            for _ in range(bench.size(20, least=3)):
                began = time.perf_counter()
                written = fan_out(_event())
                rates.append(written / (time.perf_counter() - began))
    rate = median(rates)
    yield absolute(
        "webhooks: fan-out to 1,000 endpoints",
        rate,
        shown="{:,.0f} rows/s",
        target=">= 20,000/s",
        reached=rate >= 20_000,
    )


def hook_fairness(bench: Bench) -> Iterator[Line]:
    """Owe 10,000 deliveries to an endpoint that takes connections and is silent, and time those to its neighbour."""
    backlog = bench.size(10_000, least=500)
    count = bench.size(100, least=20)
    waits: list[float] = []
    arrivals: queue.SimpleQueue[float] = queue.SimpleQueue()

    def note(sock: socket.socket, request: Any) -> None:
        arrivals.put(time.perf_counter())
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with Server(note) as neighbour, silent_port() as silent, _reachable(neighbour.port, silent):
        for _ in bench.each_round("hook_fairness"):
            _empty()
            create_endpoint(f"http://127.0.0.1:{silent}/", event_types=["order.*"])
            with transaction.atomic():
                for _ in range(backlog):
                    fan_out(_event())
            healthy, _ = create_endpoint(neighbour.url)
            _analyze()
            with RelayProcess(mode="serve", threads=THREADS) as relay:
                relay.go()
                for number in range(count):
                    progress(f"hook_fairness: {number} of {count}")
                    time.sleep(0.05)
                    with transaction.atomic():
                        _owe(healthy)
                    committed = time.perf_counter()
                    waits.append(arrivals.get(timeout=60) - committed)
                relay.stop()
    waits.sort()
    worst, middle = waits[-1], median(waits)
    yield Line(workload="webhooks: beside a silent endpoint, p50", ours=f"{middle * 1e3:.1f} ms")
    yield absolute(
        "webhooks: beside a silent endpoint, worst",
        worst * 1e3,
        shown="{:.0f} ms",
        target="< 1000 ms",
        reached=worst < 1,
    )


def _owe(endpoint: WebhookEndpoint) -> None:
    store.insert_deliveries(
        event_id=engine.new_id(),
        event_type="order.placed",
        patterns=(),
        organization_id="",
        body="{}",
        quiet=False,
        using="default",
        endpoint_id=endpoint.pk,
    )
