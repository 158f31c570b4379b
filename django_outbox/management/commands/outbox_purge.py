"""``outbox_purge``: delete old finished rows in batches."""

from __future__ import annotations

import json
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from django_outbox.conf import get_settings
from django_outbox.lease import purge
from django_outbox.management.verbs import OutboxCommand, duration_seconds, plural, positive

_STATUSES: Final = ("done", "failed", "dead")


class Command(OutboxCommand):
    """Purge events."""

    help = """\
Delete events that ended long ago, oldest first, in small batches.

Every batch is a transaction of its own, so relays go on, memory stays flat and an
interrupt loses nothing. An idle relay purges done events by itself; failed and dead
ones go only here, and only when you say how old. The age counts from when the event
was done, failed or dead. Deleting failed or dead events asks first on a terminal."""

    examples = """\
examples:
  manage.py outbox_purge                                done, older than RETENTION_SECONDS
  manage.py outbox_purge --older-than 1d
  manage.py outbox_purge --status failed --older-than 90d
  manage.py outbox_purge --status dead --older-than 1w --limit 10000 --no-input"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        super().add_arguments(parser)
        parser.add_argument(
            "--status", default="done", metavar="STATUS", help=f"one of {', '.join(_STATUSES)} (default: done)"
        )
        parser.add_argument(
            "--older-than",
            metavar="DURATION",
            help='30d, 12h, 90m, 2w or seconds; default for done events: OUTBOX["EVENTS"]["RETENTION_SECONDS"]',
        )
        parser.add_argument("--limit", type=int, metavar="N", help="at most this many")
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask for confirmation"
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Run the verb and report."""
        queue, using = self.place(options)
        status = options["status"]
        if status not in _STATUSES:
            raise CommandError(f"--status {status} cannot be purged. Use one of: {', '.join(_STATUSES)}.")
        limit = positive("--limit", options["limit"])
        age = options["older_than"]
        if age is not None:
            seconds: float | None = duration_seconds(age)
        elif status == "done":
            seconds = get_settings().events.retention_seconds
        else:
            raise CommandError(f"Say how old {status} events must be to go, such as --older-than 30d.")
        if seconds is None:
            raise CommandError(
                'OUTBOX["EVENTS"]["RETENTION_SECONDS"] is None: done events are kept for ever. Say --older-than 30d.'
            )
        if status != "done":
            self.confirm(f"Delete {status} events older than {seconds:g} s from database {using!r}?", options)
        with self.progress(options) as progress:
            gone = purge(queue, using=using, older_than_seconds=seconds, status=status, limit=limit, progress=progress)
        if options["as_json"]:
            self.stdout.write(json.dumps({"purged": gone, "status": status, "older_than_seconds": seconds}))
        else:
            self.stdout.write(f"Purged {plural(gone)}: {status}, older than {seconds:g} s.")
