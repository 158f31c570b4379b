"""``outbox_status``: how the queues stand."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import CommandParser

from django_outbox.lease import Backlog, backlog
from django_outbox.management.verbs import OutboxCommand, duration_seconds


class Command(OutboxCommand):
    """Show the backlog."""

    help = """\
Show what is due, in flight, waiting, dead and failed, and which handlers no relay knows.

Counts stop at 100,000, so the command is quick on any table. With --fail-over it
exits with 1 when something has been due for longer than that: a check for monitoring."""

    examples = """\
examples:
  manage.py outbox_status
  manage.py outbox_status --json
  manage.py outbox_status --fail-over 5m || page-somebody"""

    default_queue = None
    json_help = "figures as one JSON object: {database, queues: {events: {...}}}"

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        super().add_arguments(parser)
        parser.add_argument(
            "--fail-over", metavar="DURATION", help="exit with 1 when the oldest due row is older: 30s, 5m, 1h"
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Look and print."""
        queues, using = self.places(options)
        bound = None if options["fail_over"] is None else duration_seconds(options["fail_over"])
        found = [backlog(queue, using=using) for queue in queues]
        if options["as_json"]:
            self.stdout.write(json.dumps({"database": using, "queues": {each.queue: each.as_dict() for each in found}}))
        else:
            self.stdout.write("\n\n".join("\n".join(_page(each, using)) for each in found))
        if bound is not None and any(each.oldest_due_seconds > bound for each in found):
            sys.exit(1)


def _page(found: Backlog, using: str) -> list[str]:
    def number(value: int) -> str:
        return f"{found.counted_to:,}+" if value >= found.counted_to else f"{value:,}"

    named = "" if found.queue == "events" else f" --queue {found.queue}"
    oldest = f"the oldest for {_age(found.oldest_due_seconds)}" if found.due else ""
    rows = [
        ("due now", found.due, oldest),
        ("in flight", found.leased, "held by a relay" if found.leased else ""),
        ("pending", found.pending, "new, delivered in order" if found.pending else ""),
        ("waiting", found.waiting, "delayed, retrying or parked: they come by themselves" if found.waiting else ""),
        ("dead", found.dead, f"look: outbox admin, then outbox_retry{named} --status dead" if found.dead else ""),
        (
            "failed",
            found.failed,
            "refused for good, or discarded by hand" if found.failed else "",
        ),
    ]
    lines = [f"{found.queue} on database {using!r}", ""]
    lines += [f"  {name:<10} {number(value):>9}   {note}".rstrip() for name, value, note in rows]
    if found.parked:
        what = "events knows their handler" if found.queue == "events" else f"{found.queue} knows them"
        lines += ["", f"No relay that had these {what}:", ""]
        width = max(len(name) for name in found.parked)
        lines += [f"  {name:<{width}} {number(value):>9}" for name, value in found.parked.items()]
        name = next(iter(found.parked))
        if found.queue != "events":
            name = next(iter(found.parked))
            lines += [
                "",
                "  Deploy the code that has it and they run. If it is gone:",
                f"    manage.py outbox_discard --queue {found.queue} --type {name} --status waiting",
            ]
            return lines
        lines += [
            "",
            "  Deploy the code that has it and they are delivered. If it was renamed or removed:",
            f"    manage.py outbox_retry --rename-handler {name}=NEW",
            f"    manage.py outbox_discard --handler {name}",
        ]
    return lines


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
