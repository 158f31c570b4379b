"""
Show the outbox at work, and check what it shows.

Everything is counted where it arrived: rows in the audit log, mails in the
mailbox, requests at the CRM.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn
from urllib.parse import quote

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand
from django.db import IntegrityError, connection, transaction

from django_outbox.models import OutboxEmail, OutboxEvent, OutboxTask, Status
from example_project.accounts.crm import REFUSALS
from example_project.accounts.models import AuditRecord, CrmContact, CrmRequest
from example_project.accounts.registration import register
from example_project.accounts.tasks import draw_avatar

MANAGE: Final = Path(settings.BASE_DIR) / "manage.py"
HANDLERS: Final = ("audit-log", "welcome-email", "crm-sync")
RUNS: Final = {"audit-log": 1, "welcome-email": 1, "crm-sync": REFUSALS + 1}
DELIVER_WITHIN_SECONDS: Final = 25.0
STOP_WITHIN_SECONDS: Final = 15.0


class ChangedMindError(Exception):
    """Raised on purpose, to roll a transaction back."""


@dataclass(slots=True)
class Registrations:
    """What the demo registered, and what it rolled back."""

    committed: list[User] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)


class Command(BaseCommand):
    """Register users, run the relay, print what arrived where; fail if anything is off."""

    help = "Register users, some of them in transactions that roll back, run the relay, show who got what."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Run the demo, on a database and a mailbox of its own unless the environment names them."""
        if not {"DATABASE_URL", "EMAIL_FILE_PATH"} <= os.environ.keys():
            # Settings are read when Django starts. So the demo names its database and
            # its mailbox in the environment, and starts itself again.
            with TemporaryDirectory(prefix="outbox-demo-") as directory:
                places = {
                    "DATABASE_URL": f"sqlite:///{quote(directory)}/demo.sqlite3",
                    "EMAIL_FILE_PATH": f"{directory}/mails",
                }
                command = [sys.executable, str(MANAGE), "demo"]
                result = subprocess.run(command, env=places | os.environ, check=False)  # noqa: S603  our own command
            if result.returncode:
                sys.exit(result.returncode)
            return
        self._run()

    def _run(self) -> None:
        started = time.monotonic()
        self._title("django_outbox demo")
        call_command("migrate", verbosity=0)
        sqlite = connection.vendor == "sqlite"
        place = (
            f"{sqlite3.sqlite_version}, {Path(connection.settings_dict['NAME']).name}"
            if sqlite
            else "as DATABASE_URL says"
        )
        self._say("database", f"{connection.display_name} {place}")

        people = register_everybody()
        self._say("register", f"{len(people.committed)} users, each with its event in the same transaction")
        self._say(
            "roll back", f"{len(people.undone)} more: an exception after the emit, an inner savepoint, a name taken"
        )
        events = list(
            OutboxEvent.objects.filter(
                aggregate_type="user", aggregate_id__in=[str(user.pk) for user in people.committed]
            ).order_by("created_at", "id")
        )

        relay_output, exit_code = self._relay(events)
        for event in events:
            event.refresh_from_db()
        self._table(events)

        failed = 0
        self._title("Counted at the receiving end")
        for passed, text in checks(people, events, exit_code):
            failed += not passed
            self.stdout.write(f"  {self.style.SUCCESS('ok  ') if passed else self.style.ERROR('FAIL')}  {text}")
        self.stdout.write(f"\n  {time.monotonic() - started:.1f} seconds, from an empty database to here.\n\n")
        if failed:
            said = "\n".join(relay_output.splitlines()[-40:])
            raise CommandError(f"{failed} of the checks failed. What the relay said last:\n\n{said}")

    def _relay(self, events: list[OutboxEvent]) -> tuple[str, int]:
        """Run one real relay until nothing of these events is open, then stop it as a host would."""
        log = Path(settings.MAIL_DIRECTORY).with_suffix(".relay.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            command = [sys.executable, str(MANAGE), "run_outbox"]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603  as above
            try:
                self._say("relay", f"manage.py run_outbox, a process of its own (pid {process.pid})")
                began = time.monotonic()
                mine = OutboxEvent.objects.filter(pk__in=[event.pk for event in events])
                mails = OutboxEmail.objects.filter(causation_id__in=[event.pk for event in events])
                avatars = OutboxTask.objects.filter(pk__in=[row.pk for row in calls_for(events)])
                while (
                    any(rows.exclude(status=Status.DONE).exists() for rows in (mine, mails, avatars))
                    and process.poll() is None
                ):
                    if time.monotonic() - began > DELIVER_WITHIN_SECONDS:
                        break
                    time.sleep(0.1)
                undone = mine.exclude(status=Status.DONE).count()
                words = f"{undone} events not done" if undone else "all done, retries included,"
                self._say("deliver", f"{words} after {time.monotonic() - began:.1f} s")
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_WITHIN_SECONDS)
                self._say("stop", f"SIGTERM; the relay ended with exit code {process.returncode}")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return log.read_text(errors="replace"), process.returncode

    def _table(self, events: list[OutboxEvent]) -> None:
        self._title("What was delivered")
        self.stdout.write("  The CRM refuses every contact twice. Only crm-sync is run again for it.\n\n")
        row = "  {:<12}  {:<9}  {:<8}  {:<13}  {:<12}  {:>8}"
        self.stdout.write(row.format("event", "id", "user", "handler", "at (UTC)", "attempts"))
        self.stdout.write("  " + "  ".join("-" * width for width in (12, 9, 8, 13, 12, 8)))
        for event in events:
            first = [event.type, f"…{event.pk.hex[-8:]}", event.payload["username"]]
            for handler in HANDLERS:
                delivered = event.deliveries.get(handler)
                # "2026-01-31T12:34:56.789…" → "12:34:56.789"
                at = delivered[11:23] if delivered else "not yet"
                self.stdout.write(row.format(*first, handler, at, runs(event, handler)))
                first = ["", "", ""]

    def _title(self, text: str) -> None:
        self.stdout.write(f"\n{self.style.MIGRATE_HEADING(text)}\n\n")

    def _say(self, what: str, text: str) -> None:
        self.stdout.write(f"  {what:<11}{text}")


def register_everybody() -> Registrations:
    """Register eight users, and three more in transactions that roll back."""
    people = Registrations()
    # A database given by DATABASE_URL may hold an earlier demo's users.
    suffix = f"-{User.objects.count()}" if User.objects.exists() else ""

    def person(name: str) -> User:
        return register(username=name + suffix, email=f"{name}{suffix}@example.com", request_id=f"demo-{name}")

    for name in ("amber", "basil", "clover", "dill", "elder", "fennel", "ginger"):
        people.committed.append(person(name))

    # The view fails after the user was registered: no user, no event.
    try:
        with transaction.atomic():
            people.undone.append(person("nettle").username)
            change_mind()
    except ChangedMindError:
        pass

    # A part is undone and the rest commits: the event of the rest stays.
    with transaction.atomic():
        people.committed.append(person("hazel"))
        try:
            with transaction.atomic():
                people.undone.append(person("ivy").username)
                change_mind()
        except ChangedMindError:
            pass

    # A later statement breaks a constraint, and the database refuses all of it.
    try:
        with transaction.atomic():
            people.undone.append(person("thistle").username)
            person("amber")
    except IntegrityError:
        pass
    return people


def change_mind() -> NoReturn:
    """Fail, as code that comes after a registration may."""
    raise ChangedMindError


def runs(event: OutboxEvent, handler: str) -> int:
    """Return how often a handler ran for an event, counted at the receiving end."""
    if handler == "audit-log":
        return AuditRecord.objects.filter(event_id=event.pk).count()
    if handler == "welcome-email":
        return mails_by_recipient().count(event.payload["email"])
    return CrmRequest.objects.filter(idempotency_key=f"{handler}:{event.pk}").count()


def calls_for(events: list[OutboxEvent]) -> list[OutboxTask]:
    """Return the calls of the task that belong to the events' users."""
    users = {event.payload["user_id"] for event in events}
    calls = OutboxTask.objects.filter(task_path=draw_avatar.module_path)
    return [call for call in calls if call.payload["args"][0] in users]


def mails_by_recipient() -> list[str]:
    """Return the recipient of every mail in the mailbox."""
    separator = b"-" * 79
    return [
        str(message_from_bytes(mail.strip())["To"])
        for file in Path(settings.MAIL_DIRECTORY).glob("*.log")
        for mail in file.read_bytes().split(separator)
        if mail.strip()
    ]


def checks(people: Registrations, events: list[OutboxEvent], exit_code: int) -> Iterator[tuple[bool, str]]:
    """Yield what must be true, and whether it is."""
    wanted = len(people.committed)
    ids = [event.pk for event in events]
    emails = [user.email for user in people.committed]
    mails = mails_by_recipient()
    done = sum(event.status == Status.DONE for event in events)
    yield len(events) == done == wanted, f"{wanted} registrations: {len(events)} events, {done} done, none open or dead"

    users = User.objects.filter(username__in=people.undone).count()
    left = OutboxEvent.objects.filter(payload__username__in=people.undone).count()
    sent = sum(f"{name}@example.com" in mails for name in people.undone)
    yield (
        users == left == sent == 0,
        (f"{len(people.undone)} rolled-back ones left nothing: {users} users, {left} events, {sent} mails"),
    )
    records = AuditRecord.objects.filter(event_id__in=ids).count()
    yield records == wanted, f"audit-log: {records} rows"

    received = sum(mails.count(email) for email in emails)
    sent_rows = OutboxEmail.objects.filter(recipient__in=emails, status=Status.DONE, wiped=True).count()
    yield received == sent_rows == wanted, f"welcome-email: {received} mails, and no working link left in the database"

    pictures = [str(call.return_value) for call in calls_for(events) if call.status == Status.DONE]
    calls = OutboxTask.objects.filter(task_path=draw_avatar.module_path).count()
    yield (
        len(pictures) == wanted and calls == User.objects.count() and all(text.startswith("<svg") for text in pictures),
        f"draw_avatar: {len(pictures)} tasks returned a picture, none left by what was rolled back",
    )

    requests = CrmRequest.objects.filter(idempotency_key__in=[f"crm-sync:{pk}" for pk in ids])
    refused, accepted = requests.filter(accepted=False).count(), requests.filter(accepted=True).count()
    contacts = CrmContact.objects.filter(email__in=emails).count()
    yield (
        (refused, accepted, contacts) == (REFUSALS * wanted, wanted, wanted),
        (f"crm-sync: {contacts} contacts; {refused} requests refused, {accepted} accepted"),
    )
    yield (
        all(runs(event, handler) == RUNS[handler] for event in events for handler in HANDLERS),
        ("what failed was run again, and nothing else was"),
    )
    yield exit_code == 0, f"the relay stopped on SIGTERM with exit code {exit_code}"
