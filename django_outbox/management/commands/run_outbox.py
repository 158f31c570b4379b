"""``manage.py run_outbox``: the relay."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from typing import Any, TypedDict

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from django.utils import autoreload

from django_outbox import lease as engine
from django_outbox import metrics
from django_outbox.conf import get_settings
from django_outbox.events import registry
from django_outbox.management.verbs import HelpFormatter
from django_outbox.relay import WORK, Mode, Relay, Supervisor, chosen, ensure_logging, tune_collector

EPILOG = """
examples:
  manage.py run_outbox                 deliver until SIGTERM or Ctrl-C; run as many of these as you like
  manage.py run_outbox --drain         deliver what is due now, then exit: for cron, scripts and demos
  manage.py run_outbox --once          one claim, then exit
  manage.py run_outbox --threads 32    for handlers that wait for the network
  manage.py run_outbox --processes 4   for handlers that compute: four relays under one supervisor
  manage.py run_outbox --reload        while you write handlers: starts anew when your code changes

exit codes:
   0  stopped by SIGTERM or SIGINT, or the work is done
  75  too many handlers are stuck past their time limit: start the relay again
      (with --processes the supervisor does)
"""


class _Options(TypedDict):
    using: str
    queues: list[str] | None
    threads: int | None
    mode: Mode


class Command(BaseCommand):
    """Parse, print, and let the relay work."""

    help = "Deliver outbox rows to their handlers, at least once each, until stopped."
    _metrics: metrics.Address | None = None

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Keep the examples' line breaks."""
        return super().create_parser(prog_name, subcommand, epilog=EPILOG, formatter_class=HelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags."""
        parser.add_argument(
            "--queue",
            action="append",
            metavar="NAME",
            help="Serve this queue, or of the tasks those with one queue name, as in tasks:reports; repeatable."
            f" Default: all. Queues: {', '.join(WORK)}.",
        )
        parser.add_argument(
            "--threads",
            type=int,
            metavar="N",
            help='Handler threads per queue. Default: its CONCURRENCY, as in OUTBOX["EVENTS"]["CONCURRENCY"].',
        )
        parser.add_argument(
            "--processes",
            type=int,
            metavar="N",
            help="Run N relays, each in a process of its own, under a supervisor that starts a dead one again. "
            "Default: one relay in this process.",
        )
        parser.add_argument("--database", metavar="ALIAS", help='Database alias. Default: OUTBOX["DATABASE"].')
        parser.add_argument(
            "--metrics-port",
            type=int,
            metavar="PORT",
            help="Serve Prometheus metrics there, with --processes at this port and those after it. "
            "Needs the extra: django-transactional-outbox[metrics].",
        )
        parser.add_argument(
            "--metrics-address",
            default="127.0.0.1",
            metavar="ADDRESS",
            help="Address to serve metrics at (127.0.0.1: this host only).",
        )
        ending = parser.add_mutually_exclusive_group()
        ending.add_argument("--once", action="store_true", help="Claim once per queue, deliver that, exit.")
        ending.add_argument("--drain", action="store_true", help="Deliver until nothing is due now, exit.")
        ending.add_argument(
            "--reload", action="store_true", help="Start anew when code changes, for development; as runserver does."
        )

    def handle(self, **options: Any) -> None:
        """Run one relay in this process, or several under a supervisor; exits with its code."""
        what = self._checked(options)
        processes, verbosity = options["processes"], options["verbosity"]
        ensure_logging()
        if options["reload"]:
            autoreload.run_with_reloader(self._run_reloading, what, verbosity)
            return
        if processes is None:
            counts, code = self._run_relay(what, verbosity)
        else:
            counts, code = self._run_supervisor(what, verbosity, processes)
        if verbosity:
            words = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "nothing to do"
            self.stdout.write(f"Relay ended: {words}.")
        self.stdout.flush()
        if code:
            sys.exit(code)

    def _checked(self, options: dict[str, Any]) -> _Options:
        """Return the relay's options; raise for what cannot be."""
        using = options["database"] or get_settings().database
        if using not in connections:
            raise CommandError(f"There is no database {using!r}. Aliases: {', '.join(sorted(connections))}.")
        try:
            chosen(options["queue"])
        except ValueError as error:
            raise CommandError(str(error)) from None
        processes = options["processes"]
        for name, value, highest in (
            ("threads", options["threads"], 1_000),
            ("processes", processes, 100),
            ("metrics-port", options["metrics_port"], 65_536 - (processes or 1)),
        ):
            if value is not None and not 1 <= value <= highest:
                raise CommandError(f"--{name} is {value}; it must lie between 1 and {highest}.")
        if processes is not None and processes > 1 and connections[using].vendor == "sqlite":
            raise CommandError(
                f"--processes is {processes}, but {using!r} is an SQLite database, which serves one relay process."
                " Leave the option out, and use --threads, or PostgreSQL."
            )
        if processes is not None and options["reload"]:
            raise CommandError("--reload is for one relay on a developer's machine; leave out --processes.")
        if options["metrics_port"] is not None:
            self._metrics = (options["metrics_address"], options["metrics_port"])
        mode: Mode = "once" if options["once"] else "drain" if options["drain"] else "serve"
        return {"using": using, "queues": options["queue"], "threads": options["threads"], "mode": mode}

    def _run_relay(self, what: _Options, verbosity: int) -> tuple[Counter[str], int]:
        show = None
        if what["mode"] == "drain" and self.stdout.isatty() and verbosity:
            show = _Progress(self, what)
        relay = Relay(**what, progress=show)
        if verbosity:
            self._introduce(relay, f"Outbox relay {relay.holder}")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: relay.stop())
        tune_collector()
        with metrics.serving(relay, self._metrics):
            code = relay.run()
        if show is not None:
            show.close()
        return relay.counts, code

    def _run_reloading(self, what: _Options, verbosity: int) -> None:
        """Run a relay beside Django's reloader, in the process that this starts anew; not in its main thread."""
        relay, ended = Relay(**what), threading.Event()

        def stop(**_: object) -> None:
            # Handlers at work may finish, or their rows would wait for the end of their leases.
            relay.stop()
            ended.wait(relay.settings.shutdown_grace_seconds + 10)

        def stop_with_the_parent() -> None:
            # Ctrl-C reaches both; a parent that was killed would leave this process behind for ever.
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(0.5)
            stop()
            os._exit(0)

        autoreload.file_changed.connect(stop, weak=False)
        atexit.register(stop)
        threading.Thread(target=stop_with_the_parent, name="outbox-parent", daemon=True).start()
        if verbosity:
            self._introduce(relay, f"Outbox relay {relay.holder}, started anew when code changes,")
        try:
            with metrics.serving(relay, self._metrics):
                relay.run()
        finally:
            ended.set()

    def _run_supervisor(self, what: _Options, verbosity: int, processes: int) -> tuple[Counter[str], int]:
        if verbosity:
            # It is never run; it knows what the ones in the other processes will serve.
            self._introduce(Relay(**what), f"Outbox relays, {processes} under a supervisor,")
        supervisor = Supervisor(processes=processes, metrics=self._metrics, **what)
        code = supervisor.run()
        return supervisor.counts, code

    def _introduce(self, relay: Relay, who: str) -> None:
        lines = [f"{who} on database {relay.using!r} ({connections[relay.using].display_name})"]
        for lane in relay.lanes:
            queue = lane.settings
            lines.append(
                f"  queue {lane.work.label}: {lane.threads} threads, lease {queue.lease_seconds:g} s,"
                f" time limit {queue.timeout_seconds:g} s, {queue.max_attempts} attempts,"
                f" poll every {relay.settings.poll_seconds:g} s"
            )
        lines += self._handlers(relay) if any(lane.work.queue.handlers for lane in relay.lanes) else []
        self.stdout.write("\n".join(lines))
        self.stdout.flush()

    def _handlers(self, relay: Relay) -> list[str]:
        lines = []
        for handler in registry.handlers():
            marks = [word for word, on in (("atomic", handler.atomic), ("async", handler.is_async)) if on]
            suffix = f" ({', '.join(marks)})" if marks else ""
            lines.append(f"  {', '.join(handler.patterns)} -> {handler.name}{suffix}")
        if not registry.handlers():
            lines.append(
                "  no handlers are registered: write @on_event(...) functions in a module"
                f" {relay.settings.handlers_module}.py of an installed app"
            )
        return lines


class _Progress:
    """One line on the terminal, rewritten a few times a second."""

    def __init__(self, command: BaseCommand, what: _Options) -> None:
        self._command = command
        self._began = time.monotonic()
        self._shown = 0.0
        served = chosen(what["queues"])
        self._due = sum(engine.backlog(work.queue, using=what["using"]).due for work in served)

    def __call__(self, counts: Counter[str]) -> None:
        now = time.monotonic()
        if now - self._shown < 0.2:
            return
        self._shown = now
        settled = counts.total()
        rate = settled / max(now - self._began, 0.001)
        line = f"{settled:,} of about {max(self._due, settled):,} settled, {rate:,.0f}/s"
        failed = counts["waiting"] + counts["dead"] + counts["failed"]
        if failed:
            line += f", {failed:,} not delivered yet"
        self._command.stdout.write(f"\r{line:<78}", ending="")
        self._command.stdout.flush()

    def close(self) -> None:
        """End the line."""
        self._shown = 0.0
        self._command.stdout.write("")
