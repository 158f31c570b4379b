"""``outbox_purge``: delete old finished rows in batches."""

from __future__ import annotations

import json
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from django_outbox.conf import QueueSettings, get_settings
from django_outbox.lease import Queue, purge
from django_outbox.management.verbs import OutboxCommand, duration_seconds, positive

_STATUSES: Final = ("done", "failed", "dead")


class Command(OutboxCommand):
    """Purge the queues."""

    help = """\
Delete rows of every queue that ended long ago, oldest first, in small batches.

Every batch is a transaction of its own, so relays go on, memory stays flat and an
interrupt loses nothing. An idle relay purges done rows by itself; failed and dead
ones go only here, and only when you say how old. The age counts from when the row
was done, failed or dead. Deleting failed or dead rows asks first on a terminal."""

    default_queue = None
    examples = """\
examples:
  manage.py outbox_purge                                done, older than RETENTION_SECONDS
  manage.py outbox_purge --older-than 1d
  manage.py outbox_purge --queue events --status failed --older-than 90d
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
            help="30d, 12h, 90m, 2w or seconds; default for done rows: the queue's RETENTION_SECONDS",
        )
        parser.add_argument("--limit", type=int, metavar="N", help="at most this many of each queue")
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask for confirmation"
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Run the verb and report."""
        queues, using = self.places(options)
        status = options["status"]
        if status not in _STATUSES:
            raise CommandError(f"--status {status} cannot be purged. Use one of: {', '.join(_STATUSES)}.")
        limit = positive("--limit", options["limit"])
        ages = {queue.name: _age_seconds(queue, status, options["older_than"]) for queue in queues}
        if len(queues) == 1 and ages[queues[0].name] is None:
            raise CommandError(
                f'OUTBOX["{queues[0].name.upper()}"]["RETENTION_SECONDS"] is None: done {queues[0].plural} are kept for'
                " ever. Say --older-than 30d."
            )
        if status != "done":
            what = " and ".join(queue.plural for queue in queues)
            age = next(iter(ages.values()))
            self.confirm(f"Delete {status} {what} older than {age:g} s from database {using!r}?", options)
        figures: dict[str, dict[str, Any]] = {}
        for queue in queues:
            age = ages[queue.name]
            gone = 0
            if age is not None:
                with self.progress(queue, options) as progress:
                    gone = purge(
                        queue, using=using, older_than_seconds=age, status=status, limit=limit, progress=progress
                    )
            figures[queue.name] = {"purged": gone, "older_than_seconds": age}
            if not options["as_json"]:
                older = "kept for ever" if age is None else f"older than {age:g} s"
                self.stdout.write(f"Purged {queue.counted(gone)}: {status}, {older}.")
        if options["as_json"]:
            total = sum(each["purged"] for each in figures.values())
            self.stdout.write(json.dumps({"purged": total, "status": status, "queues": figures}))


def _age_seconds(queue: Queue, status: str, given: str | float | None) -> float | None:
    """Return how old rows must be to go; ``None``: the queue keeps them for ever."""
    if given is not None:
        return duration_seconds(given)
    if status != "done":
        raise CommandError(f"Say how old {status} rows must be to go, such as --older-than 30d.")
    settings: QueueSettings = getattr(get_settings(), queue.name)
    return settings.retention_seconds
