"""What plain psycopg does: the yardstick beside every workload."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

import psycopg


class NarrowTable:
    """
    A queue as one would write it by hand for speed alone: no retries, no handlers, no lease, no history.

    It exists inside the ``with`` block.
    """

    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def __enter__(self) -> Self:
        self._session.execute("DROP TABLE IF EXISTS bench_narrow")
        self._session.execute(
            """CREATE TABLE bench_narrow (
                id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                payload jsonb NOT NULL,
                status text NOT NULL DEFAULT 'pending',
                due timestamptz NOT NULL DEFAULT clock_timestamp(),
                attempts int NOT NULL DEFAULT 0,
                token uuid
            )"""
        )
        self._session.execute("CREATE INDEX ON bench_narrow (due, id) WHERE status = 'pending'")
        return self

    def __exit__(self, *_: object) -> None:
        self._session.execute("DROP TABLE bench_narrow")

    def insert(self, payloads: Sequence[object]) -> None:
        """Insert rows with one statement, from an array."""
        self._session.execute(
            "INSERT INTO bench_narrow (payload) SELECT unnest(%s::jsonb[])",
            [[json.dumps(payload) for payload in payloads]],
        )

    def fill(self, count: int) -> None:
        """Empty the table and insert so many rows, as the events of the other side were."""
        self._session.execute("TRUNCATE bench_narrow")
        for first in range(0, count, 1_000):
            self.insert([{"number": n, "customer": "Ada"} for n in range(first, min(first + 1_000, count))])
        self._session.execute("VACUUM (ANALYZE) bench_narrow")

    def drain(self) -> float:
        """Claim 500 at a time, loop over them, settle them with one statement; return the seconds it took."""
        began = time.perf_counter()
        token = uuid.uuid4()
        while True:
            rows = self._session.execute(
                """WITH due AS MATERIALIZED (
                    SELECT id FROM bench_narrow WHERE status = 'pending' AND due <= statement_timestamp()
                    ORDER BY due, id LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED
                )
                UPDATE bench_narrow AS b SET status = 'taken', attempts = attempts + 1, token = %s
                FROM due WHERE b.id = due.id RETURNING b.id, b.payload""",
                [token],
            ).fetchall()
            if not rows:
                return time.perf_counter() - began
            done = []
            for id_, payload in rows:
                _no_op(payload)
                done.append(id_)
            self._session.execute(
                "UPDATE bench_narrow SET status = 'done' WHERE id = ANY(%s) AND token = %s AND status = 'taken'",
                [done, token],
            )


def _no_op(payload: object) -> None:
    pass


class Listening:
    """A thread that waits for NOTIFY on a session of its own and notes when each number arrived."""

    channel = "bench"

    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.arrivals: dict[int, int] = {}
        self._session = session
        self._session.execute(f"LISTEN {self.channel}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for note in self._session.notifies():
            if note.payload == "end":
                return
            self.hear(int(note.payload))

    def hear(self, number: int) -> None:
        """Note that a number arrived."""
        self.arrivals[number] = time.monotonic_ns()

    def join(self) -> None:
        """Wait until the thread has seen the note that ends it."""
        self._thread.join(timeout=10)


class Claiming(Listening):
    """One that then claims what lies in the narrow table, on another session and without waiting for the disk."""

    channel = "bench_claim"

    def __init__(
        self, session: psycopg.Connection[tuple[Any, ...]], claims: psycopg.Connection[tuple[Any, ...]]
    ) -> None:
        self._claims = claims
        self._claims.execute("SET synchronous_commit = off")
        self._claims.prepare_threshold = 0
        super().__init__(session)

    def hear(self, number: int) -> None:
        """Claim, and note when a row was there to be worked on."""
        rows = self._claims.execute(
            """WITH due AS MATERIALIZED (
                SELECT id FROM bench_narrow WHERE status = 'pending' AND due <= statement_timestamp()
                ORDER BY due, id LIMIT 20 FOR NO KEY UPDATE SKIP LOCKED
            )
            UPDATE bench_narrow AS b SET status = 'taken', attempts = attempts + 1
            FROM due WHERE b.id = due.id RETURNING b.payload"""
        ).fetchall()
        for (payload,) in rows:
            super().hear(int(payload["number"]))
