"""``outbox_retry``: give dead, failed or waiting rows a new life."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_outbox import events
from django_outbox.lease import RETRYABLE, rename_handler, retry
from django_outbox.management.verbs import OutboxCommand, add_selection, check_filters, positive, row_ids


class Command(OutboxCommand):
    """Retry events."""

    help = """\
Give rows of a queue, events by default, a new life: due now, attempts back to zero,
rejections cleared.

What was delivered is not run again; a handler's delivery that was discarded stays so.
Rows that a relay is working on are left alone and counted. Say which: by id, by a
filter, or --all. Without --status, ids are taken in any status that can be retried,
filters and --all take dead and failed rows."""

    examples = """\
examples:
  manage.py outbox_retry 01890a5d-ac96-774b-bcce-b302099a8057
  manage.py outbox_retry --status dead --type user.created
  manage.py outbox_retry --handler crm-sync --limit 100     the 100 oldest, to see how it goes
  manage.py outbox_retry --status waiting --handler crm-sync  do not wait for their time
  manage.py outbox_retry --rename-handler crm=crm-sync      it has a new name, and no alias in the code
  manage.py outbox_retry --all"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        super().add_arguments(parser)
        add_selection(
            parser,
            status=RETRYABLE,
            handler="only events that are owed to this handler",
            everything="all dead and failed rows",
        )
        parser.add_argument(
            "--rename-handler",
            metavar="OLD=NEW",
            help="re-point what is owed to the handler OLD at NEW, and make it due now",
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Run the verb and report."""
        queue, using = self.place(options)
        ids = row_ids(options["ids"]) or None
        status, type_, handler = options["status"], options["type"], options["handler"]
        renaming = options["rename_handler"]
        if renaming and not queue.handlers:
            raise CommandError(f"--rename-handler is about events; the queue {queue.name} has no handlers.")
        allowed = (*RETRYABLE, "pending") if renaming else RETRYABLE
        check_filters(queue, status=status or (), allowed=allowed, type=type_, handler=handler)
        limit = positive("--limit", options["limit"])
        if not (ids or status or type_ or handler or renaming or options["everything"]):
            raise CommandError(
                "Say which rows: ids, a filter (--status dead, --type TYPE, --handler NAME), or --all for every"
                " dead and failed one. `outbox_status` shows what there is."
            )
        if options["everything"] and ids:
            raise CommandError("Give ids or --all, not both.")
        with self.progress(queue, options) as progress:
            if renaming:
                old, new = _names(renaming)
                if type_ or handler:
                    raise CommandError("--rename-handler chooses by the old name; add ids, --status or --limit only.")
                report = rename_handler(
                    queue, old, new, using=using, ids=ids, status=status or allowed, limit=limit, progress=progress
                )
                done = f"Renamed {old} to {new} in {{rows}}, due now."
            else:
                report = retry(
                    queue,
                    using=using,
                    ids=ids,
                    status=status or (RETRYABLE if ids else ("dead", "failed")),
                    type=type_,
                    handler=handler,
                    limit=limit,
                    progress=progress,
                )
                done = "Retried {rows}, due now."
        self.say_report(queue, report, done, options)


def _names(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not old or not new:
        raise CommandError(f"{text!r} names no rename. Write --rename-handler OLD=NEW.")
    check_filters(events.EVENTS, handler=old)
    known = [handler.name for handler in events.registry.handlers()]
    if new not in known:
        raise CommandError(
            f"No handler is named {new!r} in this code, so nothing would run it."
            f" Registered: {', '.join(sorted(set(known))) or 'none'}."
        )
    return old, new
