"""``outbox_verify_audit``: check the audit log's chain of hashes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_outbox.audit import Broken, verify
from django_outbox.conf import get_settings
from django_outbox.management.verbs import HelpFormatter

_EXAMPLES: Final = """\
examples:
  manage.py outbox_verify_audit
  manage.py outbox_verify_audit --json >> /var/log/audit-heads.jsonl
  manage.py outbox_verify_audit --known 1000:3f0c…  (as an earlier run printed it)"""


class Command(BaseCommand):
    """Verify the audit log."""

    help = """\
Read the whole audit log in order and check every entry's hash.

Exits with 1 and names the first broken entry when one was changed, removed or
inserted. The last line holds the position and the hash of the last entry; kept
somewhere else and given to a later run with --known, it also shows that the
chain was not cut short or written anew as a whole. Entries are read in pages,
and may be appended meanwhile."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser whose help ends with examples."""
        return super().create_parser(
            prog_name, subcommand, **{"formatter_class": HelpFormatter, "epilog": _EXAMPLES, **kwargs}
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            choices=tuple(connections),
            help=f'alias of the database (default: OUTBOX["DATABASE"]); one of: {", ".join(connections)}',
        )
        parser.add_argument(
            "--known",
            metavar="POSITION:HASH",
            action="append",
            default=[],
            help="an entry's hash as it was noted earlier; may be repeated",
        )
        parser.add_argument("--json", action="store_true", dest="as_json", help="report as one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002  the signature is Django's
        """Verify and report."""
        using = options["database"] or get_settings().database
        known = _known(options["known"])
        visible = self.stderr.isatty() and not options["as_json"]

        def progress(entries: int) -> None:
            if visible:
                self.stderr.write(f"\r{entries:,} entries", ending="")

        found = verify(using=using, known=known, progress=progress)
        if visible:
            self.stderr.write("\r", ending="")
        if options["as_json"]:
            report = {"database": using, "entries": found.entries, "hash": found.hash, "intact": found.broken is None}
            if found.broken is not None:
                broken = found.broken
                report["broken"] = {"position": broken.position, "id": broken.id, "reason": broken.reason}
            self.stdout.write(json.dumps(report))
        elif found.broken is None:
            self.stdout.write(self.style.SUCCESS(f"The audit log is intact: {found.entries:,} entries."))
            if found.entries:
                self.stdout.write(f"{found.entries}:{found.hash}")
        else:
            self.stdout.write(self.style.ERROR(_sentence(found.broken)))
            self.stdout.write(f"Entries before it that are intact: {found.entries:,}.")
        if found.broken is not None:
            sys.exit(1)


def _sentence(broken: Broken) -> str:
    named = f" (event {broken.id})" if broken.id else ""
    return f"The audit log is broken at entry {broken.position}{named}: {broken.reason}."


def _known(values: Sequence[str]) -> dict[int, str]:
    known = {}
    for value in values:
        position, _, hash_ = value.partition(":")
        if not position.isdecimal() or len(hash_) != 64:
            raise CommandError(f"--known {value}: write POSITION:HASH, as an earlier run printed it.")
        known[int(position)] = hash_.lower()
    return known
