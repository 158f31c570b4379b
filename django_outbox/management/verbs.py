"""
What the operators' commands share: their arguments, their words and their progress.

The commands hold no logic. They turn arguments into a call of one function of the
engine, and its report into text or JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import DEFAULT_DB_ALIAS, connections

from django_outbox import events, mail, tasks, webhooks
from django_outbox.conf import get_settings
from django_outbox.errors import InvalidEventType, InvalidHandlerName
from django_outbox.lease import Queue, Report

__all__ = [
    "HelpFormatter",
    "OutboxCommand",
    "add_selection",
    "check_filters",
    "duration_seconds",
    "positive",
    "row_ids",
]

QUEUES: Final = {queue.name: queue for queue in (events.EVENTS, mail.EMAILS, webhooks.DELIVERIES, tasks.TASKS)}
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and examples."""


def add_selection(parser: CommandParser, *, status: Iterable[str], handler: str, everything: str) -> None:
    """Add the arguments by which an operator says which rows of one queue are meant."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="ids of the queue's rows")
    parser.add_argument(
        "--status",
        action="append",
        default=None,
        metavar="STATUS",
        help=f"only rows in this status, now: {', '.join(status)}; may be repeated",
    )
    parser.add_argument("--type", help="only events of this type; of the queue tasks only those of this path")
    parser.add_argument("--handler", metavar="NAME", help=handler)
    parser.add_argument("--limit", type=int, metavar="N", help="at most this many, oldest first")
    parser.add_argument("--all", action="store_true", dest="everything", help=everything)


class OutboxCommand(BaseCommand):
    """A command on one queue, or on all of them, of one database."""

    examples: ClassVar[str]
    default_queue: ClassVar[str | None] = events.EVENTS.name
    """The queue without ``--queue``; ``None``: all."""
    json_help: ClassVar[str] = "report as one JSON object"

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser whose help ends with examples."""
        return super().create_parser(
            prog_name, subcommand, **{"formatter_class": HelpFormatter, "epilog": self.examples, **kwargs}
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what every operator's command has."""
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            choices=tuple(connections),
            help=f'alias of the database (default: OUTBOX["DATABASE"]); one of: {", ".join(connections)}',
        )
        parser.add_argument(
            "--queue",
            choices=tuple(QUEUES),
            metavar="NAME",
            default=self.default_queue,
            help=f"which queue (default: {self.default_queue or 'all'}); one of: {', '.join(QUEUES)}",
        )
        parser.add_argument("--json", action="store_true", dest="as_json", help=self.json_help)

    @staticmethod
    def places(options: dict[str, Any]) -> tuple[list[Queue], str]:
        """Return the queues and the database alias that the arguments name."""
        chosen = list(QUEUES.values()) if options["queue"] is None else [QUEUES[options["queue"]]]
        return chosen, options["database"] or get_settings().database or DEFAULT_DB_ALIAS

    @classmethod
    def place(cls, options: dict[str, Any]) -> tuple[Queue, str]:
        """Return the one queue, and the database alias, that the arguments name."""
        chosen, using = cls.places(options)
        return chosen[0], using

    def say_report(self, queue: Queue, report: Report, done: str, options: dict[str, Any]) -> None:
        """Print what a verb did; ``done`` is its sentence with ``{rows}`` for the number."""
        if options["as_json"]:
            figures = {"changed": report.changed, "leased": report.leased, "skipped": report.skipped}
            self.stdout.write(json.dumps(figures))
            return
        sentence = done.format(rows=queue.counted(report.changed))
        self.stdout.write(self.style.SUCCESS(sentence) if report.changed else sentence)
        if report.leased:
            self.stdout.write(
                f"Left alone: {queue.counted(report.leased)} held by a relay right now. Run the command again when it"
                " is done."
            )
        if report.skipped:
            self.stdout.write(
                f"Left alone: {queue.counted(report.skipped)} not found, in another status, or with nothing to change."
            )

    @contextmanager
    def progress(self, queue: Queue, options: dict[str, Any]) -> Iterator[Callable[[int], None]]:
        """
        Show on a terminal how far long work has come; end in order when it is interrupted.

        Every batch is committed on its own, so an interrupt loses nothing.
        """
        visible = self.stdout.isatty() and not options["as_json"]
        reached = 0

        def show(rows: int) -> None:
            nonlocal reached
            reached = rows
            if visible:
                self.stdout.write(f"\r{queue.counted(rows)} ...", ending="")
                self.stdout.flush()

        try:
            yield show
        except KeyboardInterrupt:
            raise CommandError(
                f"Interrupted after {queue.counted(reached)}. Those are committed; run it again for the rest.",
                returncode=130,
            ) from None
        finally:
            if visible and reached:
                self.stdout.write("\r\x1b[K", ending="")

    def confirm(self, question: str, options: dict[str, Any]) -> None:
        """Ask on a terminal, unless told not to; raise `CommandError` for anything but yes."""
        if options["interactive"] and sys.stdin.isatty():
            answer = input(f"{question} [y/N] ")
            if answer.strip().lower() not in {"y", "yes"}:
                raise CommandError("Nothing was changed.")


def row_ids(texts: Iterable[str | UUID]) -> list[UUID]:
    """Return ids from the command line; raise `CommandError` naming the one that is none."""
    ids = []
    for text in texts:
        try:
            ids.append(text if isinstance(text, UUID) else UUID(text))
        except ValueError:
            raise CommandError(
                f"{text!r} is not an id. Write it as the admin shows it, such as"
                " 01890a5d-ac96-774b-bcce-b302099a8057; to choose by handler or type use --handler or --type."
            ) from None
    return ids


def duration_seconds(text: str | float) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``6h``, ``7d`` or ``2w``; else raise `CommandError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", str(text).strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= 100 * 366 * 86_400:
        raise CommandError(
            f"{text!r} is not a duration. Write a number and a unit: 90s, 15m, 6h, 7d or 2w, up to 100 years."
        )
    return seconds


def positive(name: str, value: int | None) -> int | None:
    """Return a number from the command line; raise `CommandError` for one below 1."""
    if value is not None and value < 1:
        raise CommandError(f"{name} is {value}; write a number from 1 up.")
    return value


def check_filters(
    queue: Queue,
    *,
    status: Iterable[str] = (),
    allowed: Iterable[str] = (),
    type: str | None = None,  # noqa: A002
    handler: str | None = None,
) -> None:
    """Raise `CommandError` for a status, event type or handler name that no row of the queue can have."""
    if not queue.kind and (type is not None or handler is not None):
        raise CommandError(f"--type and --handler choose events; the queue {queue.name} has neither.")
    if not queue.handlers and handler is not None:
        raise CommandError(f"--handler chooses events; the queue {queue.name} has no handlers.")
    for name in status:
        if name not in allowed:
            raise CommandError(f"--status {name} does not go here. Use one of: {', '.join(allowed)}.")
    try:
        # The decorator checks its arguments when called, and registers only when applied.
        if handler is not None:
            events.on_event("outbox.event.dead", name=handler)
        if type is not None and queue.handlers:
            events.on_event(type, name="any")
    except (InvalidHandlerName, InvalidEventType) as error:
        raise CommandError(str(error).replace(", which handler 'any' wants,", "")) from None
    if type is not None and "*" in type:
        whole = "event type, such as user.created" if queue.handlers else "path, such as shop.tasks.send_invoice"
        raise CommandError(f"--type takes one whole {whole}, not the pattern {type!r}.")
    if type is not None and not queue.handlers and not all(part.isidentifier() for part in type.split(".")):
        raise CommandError(f"{type!r:.200} is not the path of a task, such as shop.tasks.send_invoice.")
