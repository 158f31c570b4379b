"""
Prometheus metrics of a relay: what it does, and how its queues stand. The extra ``metrics`` brings the client.

Served by ``run_outbox --metrics-port``. Names and labels only, never an id, an address
or a payload: whoever may read metrics need not be allowed to read rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections

from django_outbox import lease as engine

if TYPE_CHECKING:
    from django_outbox.relay import Relay

__all__ = ["METRICS", "Address", "serving"]

Address = tuple[str, int]

BACKLOG_SECONDS: Final = 10.0
"""The tables are asked at most so often, however often somebody asks for the metrics."""

METRICS: Final = {
    # name → type, labels, meaning: the documentation lists these
    "outbox_rows_total": ("counter", ("queue", "outcome"), "Rows that left this relay, by what became of them."),
    "outbox_in_flight": (
        "gauge",
        ("queue",),
        "Rows that this relay holds; back to zero when it has nothing to do.",
    ),
    "outbox_stuck_threads": ("gauge", ("queue",), "Threads given up, whose handler is past its time limit."),
    "outbox_database_up": ("gauge", (), "1 while the database does what this relay asks of it, else 0."),
    "outbox_due": ("gauge", ("queue",), "Rows that are due and that nobody holds; counted to 100,000."),
    "outbox_oldest_due_seconds": ("gauge", ("queue",), "For how long the oldest due row has been due."),
    "outbox_rows": ("gauge", ("queue", "status"), "Rows that are not done, by status; counted to 100,000."),
    "outbox_parked": ("gauge", ("queue", "handler"), "Rows that wait for a handler no relay knew."),
}


class _Collector:
    """Reads a relay's figures when they are asked for, and its tables now and then."""

    def __init__(self, relay: Relay, core: Any) -> None:
        self._relay = relay
        self._core = core
        self._backlogs: list[engine.Backlog] = []
        self._read_at = float("-inf")

    def describe(self) -> list[Any]:
        """Return nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield every metric, those of the tables as far as the database answers."""
        lanes = self._relay.lanes
        yield self._family(
            "outbox_rows_total",
            {(lane.work.queue.name, outcome): count for lane in lanes for outcome, count in lane.counts.copy().items()},
        )
        yield self._family("outbox_in_flight", {(lane.work.queue.name,): len(lane.flights) for lane in lanes})
        yield self._family("outbox_stuck_threads", {(lane.work.queue.name,): len(lane.stuck) for lane in lanes})
        backlogs = self._read()
        yield self._family("outbox_database_up", {(): float(not self._relay.health.down and backlogs is not None)})
        for name, of in _OF_BACKLOG.items():
            yield self._family(name, {labels: value for each in backlogs or () for labels, value in of(each).items()})

    def _family(self, name: str, values: dict[tuple[str, ...], float]) -> Any:
        kind, labels, meaning = METRICS[name]
        family = (self._core.CounterMetricFamily if kind == "counter" else self._core.GaugeMetricFamily)(
            name, meaning, labels=labels
        )
        for given, value in sorted(values.items()):
            family.add_metric(given, value)
        return family

    def _read(self) -> list[engine.Backlog] | None:
        if time.monotonic() - self._read_at < BACKLOG_SECONDS:
            return self._backlogs
        using = self._relay.using
        try:
            self._backlogs = [engine.backlog(lane.work.queue, using=using) for lane in self._relay.lanes]
        except (DatabaseError, InterfaceError):
            return None
        finally:
            # Each request has a thread of its own, which ends with it.
            with suppress(Exception):
                connections[using].close()
        self._read_at = time.monotonic()
        return self._backlogs


_OF_BACKLOG: Final[dict[str, Callable[[engine.Backlog], dict[tuple[str, ...], float]]]] = {
    "outbox_due": lambda each: {(each.queue,): each.due},
    "outbox_oldest_due_seconds": lambda each: {(each.queue,): each.oldest_due_seconds},
    "outbox_rows": lambda each: {
        (each.queue, status): getattr(each, status) for status in ("pending", "waiting", "dead", "failed")
    },
    "outbox_parked": lambda each: {(each.queue, handler): count for handler, count in each.parked.items()},
}


@contextmanager
def serving(relay: Relay, where: Address | None) -> Iterator[None]:
    """
    Serve a relay's metrics at an address and port during the block, from a thread; do nothing for ``None``.

    :raises ImproperlyConfigured: without the extra ``metrics``, or when the port cannot be had.
    """
    if where is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, core, start_http_server  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ImproperlyConfigured(
            "Metrics need the Prometheus client: pip install 'django-transactional-outbox[metrics]'."
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(relay, core))
    address, port = where
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ImproperlyConfigured(f"Metrics cannot be served at {address}, port {port}: {error.strerror}.") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
