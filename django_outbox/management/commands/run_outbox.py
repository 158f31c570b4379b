"""``manage.py run_outbox``: the relay."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import connections

from django_outbox import lease as engine
from django_outbox.conf import get_settings
from django_outbox.events import EVENTS, registry
from django_outbox.relay import Mode, Relay

EPILOG = """
examples:
  manage.py run_outbox                 deliver until SIGTERM or Ctrl-C; run as many of these as you like
  manage.py run_outbox --drain         deliver what is due now, then exit: for cron, scripts and demos
  manage.py run_outbox --once          one claim, then exit
  manage.py run_outbox --threads 32    for handlers that wait for the network

exit codes:
   0  stopped by SIGTERM or SIGINT, or the work is done
  75  too many handlers are stuck past their time limit: start the relay again
"""


class _Formatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Django's order of flags, with the line breaks of the examples."""


class Command(BaseCommand):
    """Parse, print, and let the relay work."""

    help = "Deliver outbox rows to their handlers, at least once each, until stopped."

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Keep the examples' line breaks."""
        return super().create_parser(prog_name, subcommand, epilog=EPILOG, formatter_class=_Formatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags."""
        parser.add_argument(
            "--queue",
            action="append",
            choices=[EVENTS.name],
            metavar="NAME",
            help=f"Serve this queue; repeatable. Default: all. Queues: {EVENTS.name}.",
        )
        parser.add_argument(
            "--threads",
            type=int,
            metavar="N",
            help='Handler threads per queue. Default: OUTBOX["EVENTS"]["CONCURRENCY"].',
        )
        parser.add_argument("--database", metavar="ALIAS", help='Database alias. Default: OUTBOX["DATABASE"].')
        ending = parser.add_mutually_exclusive_group()
        ending.add_argument("--once", action="store_true", help="Claim once per queue, deliver that, exit.")
        ending.add_argument("--drain", action="store_true", help="Deliver until nothing is due now, exit.")

    def handle(self, **options: Any) -> None:
        """Run one relay in this process; exits with its code."""
        settings = get_settings()
        using = options["database"] or settings.database
        if using not in connections:
            raise CommandError(f"There is no database {using!r}. Aliases: {', '.join(sorted(connections))}.")
        threads = options["threads"]
        if threads is not None and not 1 <= threads <= 1_000:
            raise CommandError(f"--threads is {threads}; it must lie between 1 and 1000.")
        mode: Mode = "once" if options["once"] else "drain" if options["drain"] else "serve"
        show = _Progress(self, using) if mode == "drain" and self.stdout.isatty() and options["verbosity"] else None
        relay = Relay(using=using, threads=threads, mode=mode, progress=show)
        self._introduce(relay, options["verbosity"])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: relay.stop())
        # What start-up made stays for the process's life, and rows come by the hundred: looking
        # through all of it every few rows would cost a seventh of the relay's time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        code = relay.run()
        if show is not None:
            show.close()
        if options["verbosity"]:
            words = ", ".join(f"{count:,} {name}" for name, count in sorted(relay.counts.items())) or "nothing to do"
            self.stdout.write(f"Relay ended: {words}.")
        self.stdout.flush()
        if code:
            sys.exit(code)

    def _introduce(self, relay: Relay, verbosity: int) -> None:
        if not logging.getLogger("django_outbox").hasHandlers():
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if not verbosity:
            return
        queue = relay.queue_settings
        database = connections[relay.using]
        lines = [
            f"Outbox relay {relay.holder} on database {relay.using!r} ({database.display_name})",
            (
                f"  queue {relay.queue.name}: {relay.threads} threads, lease {queue.lease_seconds:g} s,"
                f" time limit {queue.timeout_seconds:g} s, {queue.max_attempts} attempts,"
                f" poll every {relay.settings.poll_seconds:g} s"
            ),
        ]
        for handler in registry.handlers():
            marks = [word for word, on in (("atomic", handler.atomic), ("async", handler.is_async)) if on]
            suffix = f" ({', '.join(marks)})" if marks else ""
            lines.append(f"  {', '.join(handler.patterns)} -> {handler.name}{suffix}")
        if not registry.handlers():
            lines.append(
                "  no handlers are registered: write @on_event(...) functions in a module"
                f" {relay.settings.handlers_module}.py of an installed app"
            )
        self.stdout.write("\n".join(lines))
        self.stdout.flush()


class _Progress:
    """One line on the terminal, rewritten a few times a second."""

    def __init__(self, command: BaseCommand, using: str) -> None:
        self._command = command
        self._began = time.monotonic()
        self._shown = 0.0
        self._due = engine.backlog(EVENTS, using=using).due

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
