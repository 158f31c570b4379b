"""
The command ``run_outbox`` in a process of its own, driven over standard input, answering in lines of JSON.

It says ``{"ready": true}`` when the interpreter and the project are up, and starts the
relay at the first line that comes. After that the line ``look`` asks for the figures so
far and ``stop`` ends the relay; its last line holds the final figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import threading
import time
from typing import Any

import django
import psycopg
from django.core.management import call_command
from django.db.backends.signals import connection_created

_ticks = itertools.count(1)
_statements = 0


def _count_statement(execute: Any, *args: Any) -> Any:
    global _statements  # noqa: PLW0603
    _statements = next(_ticks)
    return execute(*args)


def _on_connection_created(*, connection: Any, **_: Any) -> None:
    if _count_statement not in connection.execute_wrappers:
        connection.execute_wrappers.append(_count_statement)


class _CountedConnection(psycopg.AsyncConnection[Any]):
    """The relay's LISTEN connection is the only one that Django does not know."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        global _statements  # noqa: PLW0603
        _statements = next(_ticks)
        return await super().execute(*args, **kwargs)


def main() -> None:
    """Run ``run_outbox`` as the command line says, with a relay that reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--mode", choices=["serve", "drain"], required=True)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    django.setup()
    connection_created.connect(_on_connection_created)
    psycopg.AsyncConnection = _CountedConnection  # type: ignore[misc]

    from django_outbox.management.commands import run_outbox
    from django_outbox.relay import Relay
    from tests.benchmarks.outbox_handlers import starts

    answering = threading.Lock()

    def say(**figures: object) -> None:
        with answering:
            print(json.dumps(figures), flush=True)

    class ReportingRelay(Relay):
        def run(self) -> int:
            say(ready=True)
            sys.stdin.readline()
            self.began = time.perf_counter()
            threading.Thread(target=self.obey, daemon=True).start()
            code = super().run()
            self.look(starts=starts)
            return code

        def obey(self) -> None:
            for line in sys.stdin:
                if line.strip() != "look":
                    break
                self.look()
            self.stop()

        def look(self, **more: object) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            say(
                seconds=time.perf_counter() - self.began,
                counts=dict(self.counts),
                statements=_statements,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                # Kilobytes, but bytes on macOS.
                peak_mb=usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
                **more,
            )

    vars(run_outbox)["Relay"] = ReportingRelay
    call_command(
        "run_outbox",
        database=options.database,
        threads=options.threads,
        drain=options.mode == "drain",
        verbosity=0,
        skip_checks=True,
    )


if __name__ == "__main__":
    main()
