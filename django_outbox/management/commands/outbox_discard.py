"""``outbox_discard``: close rows, or one handler's delivery of them, for good."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_outbox.lease import DISCARDABLE, discard
from django_outbox.management.verbs import OutboxCommand, add_selection, check_filters, positive, row_ids


class Command(OutboxCommand):
    """Discard events or deliveries."""

    help = """\
Close rows of a queue, events by default, for good: they end as failed, unannounced.

What an event still owes is never delivered then, also after a retry. With --handler
only that handler's delivery is closed; the other handlers still get the event. Rows
that a relay is working on are left alone and counted. Say which: by id, by a filter,
or --all. Without --status, ids and --handler take rows that are dead, waiting or
pending, other filters and --all take dead ones only. On a terminal it asks first."""

    examples = """\
examples:
  manage.py outbox_discard 01890a5d-ac96-774b-bcce-b302099a8057
  manage.py outbox_discard --handler crm-sync           the handler is gone, nobody will deliver these
  manage.py outbox_discard --status dead --type user.created --limit 100
  manage.py outbox_discard --all --no-input             every dead event, without asking"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        super().add_arguments(parser)
        add_selection(
            parser, status=DISCARDABLE, handler="close only what is owed to this handler", everything="all dead rows"
        )
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="do not ask for confirmation"
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Run the verb and report."""
        queue, using = self.place(options)
        ids = row_ids(options["ids"]) or None
        status, type_, handler = options["status"], options["type"], options["handler"]
        allowed = (*DISCARDABLE, "failed") if handler else DISCARDABLE
        check_filters(queue, status=status or (), allowed=allowed, type=type_, handler=handler)
        limit = positive("--limit", options["limit"])
        if not (ids or status or type_ or handler or options["everything"]):
            raise CommandError(
                "Say which rows: ids, a filter (--status dead, --type TYPE, --handler NAME), or --all for every"
                " dead one. `outbox_status` shows what there is."
            )
        if options["everything"] and ids:
            raise CommandError("Give ids or --all, not both.")
        chosen = status or (DISCARDABLE if ids or handler else ("dead",))
        what = queue.counted(len(ids)) if ids else f"all {' and '.join(chosen)} {queue.plural}"
        of_type = f" of type {type_}" if type_ else ""
        at_most = f", {limit:,} at most," if limit and not ids else ""
        only = f"the delivery to {handler} of " if handler else ""
        self.confirm(f"Close {only}{what}{of_type}{at_most} for good on database {using!r}?", options)
        with self.progress(queue, options) as progress:
            report = discard(
                queue,
                using=using,
                ids=ids,
                status=chosen,
                type=type_,
                handler=handler,
                limit=limit,
                progress=progress,
            )
        self.say_report(
            queue, report, f"Closed the delivery to {handler} of {{rows}}." if handler else "Discarded {rows}.", options
        )
