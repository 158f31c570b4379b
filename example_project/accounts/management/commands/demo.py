"""
Show the outbox at work, and check what it shows.

Everything is counted where it arrived: entries in the audit log, mails in the
mailbox, requests at the token service, webhooks at the receiver.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler, get_internal_wsgi_application
from django.db import IntegrityError, connection, transaction
from django.urls import reverse

from django_outbox.audit import verify
from django_outbox.models import AuditEntry, Notification, OutboxEmail, OutboxEvent, OutboxTask, Status, WebhookDelivery
from example_project.accounts.management.commands.run import HOST
from example_project.accounts.models import TokenRequest
from example_project.accounts.registration import change_password, register
from example_project.accounts.tasks import draw_avatar
from example_project.receiver.models import ReceivedWebhook
from example_project.receiver.subscription import subscribe

MANAGE: Final = Path(settings.BASE_DIR) / "manage.py"
REFUSALS: Final = 2
"""How often the token service turns each request away before it takes it."""
RUNS: Final = {
    "user.created": {"audit-log": 1, "welcome-email": 1, "notification-fanout": 1, "webhook-fanout": 1},
    "user.password_changed": {
        "audit-log": 1,
        "security-email": 1,
        "revoke-tokens": REFUSALS + 1,
        "notification-fanout": 1,
        "webhook-fanout": 1,
    },
}
HANDLERS: Final = tuple(dict.fromkeys(name for runs in RUNS.values() for name in runs))
SUBJECTS: Final = {"welcome-email": "Welcome", "security-email": "Your password was changed"}
CHANGES: Final = 3
"""How many of the users change their password."""
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
        if not {"DATABASE_URL", "EMAIL_FILE_PATH", "RECEIVER_PORT"} <= os.environ.keys():
            # Settings are read when Django starts. So the demo names its database and
            # its mailbox in the environment, and starts itself again.
            with TemporaryDirectory(prefix="outbox-demo-") as directory:
                places = {
                    "DATABASE_URL": f"sqlite:///{quote(directory)}/demo.sqlite3",
                    "EMAIL_FILE_PATH": f"{directory}/mails",
                    "RECEIVER_PORT": str(unused_port()),
                    "TOKEN_SERVICE_REFUSALS": str(REFUSALS),
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

        subscribe(f"http://{HOST}:{settings.RECEIVER_PORT}{reverse('receive')}")
        people = register_everybody()
        self._say("register", f"{len(people.committed)} users, each with its event in the same transaction")
        for user in people.committed[:CHANGES]:
            change_password(user, secrets.token_urlsafe(12))
        self._say("change", f"{CHANGES} passwords, likewise")
        self._say(
            "roll back", f"{len(people.undone)} more: an exception after the emit, an inner savepoint, a name taken"
        )
        events = list(
            OutboxEvent.objects.filter(
                aggregate_type="user", aggregate_id__in=[str(user.pk) for user in people.committed]
            ).order_by("created_at", "id")
        )

        with receiver_running():
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
                queues = (mine, OutboxEmail.objects.all(), WebhookDelivery.objects.all(), OutboxTask.objects.all())
                while any(rows.exclude(status=Status.DONE).exists() for rows in queues) and process.poll() is None:
                    if time.monotonic() - began > DELIVER_WITHIN_SECONDS:
                        break
                    time.sleep(0.1)
                undone = sum(rows.exclude(status=Status.DONE).count() for rows in queues)
                words = f"{undone} rows not done" if undone else "all done, retries included,"
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
        self._title("What was delivered, and how often each handler ran for it")
        self.stdout.write(f"  The token service refuses {REFUSALS} times. Only revoke-tokens is run again for it.\n\n")
        heads = [name.partition("-")[0] for name in HANDLERS]
        widths = [max(len(head), 8) for head in heads]
        row = "  {:<22}{:<8}" + "".join(f"{{:>{width + 1}}}" for width in widths)
        self.stdout.write(row.format("event", "user", *heads))
        self.stdout.write("  " + "-" * (30 + sum(width + 1 for width in widths)))
        for event in events:
            counts = [str(runs(event, name)) if name in event.deliveries else "" for name in HANDLERS]
            self.stdout.write(row.format(event.type, event.payload["username"], *counts).rstrip())

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


def unused_port() -> int:
    """Return a port that the system chose, so that demos side by side do not want the same one."""
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def receiver_running() -> Iterator[None]:
    """Serve this project, and with it the receiver of webhooks, in a thread."""
    server = ThreadedWSGIServer((HOST, settings.RECEIVER_PORT), QuietHandler)
    server.set_app(get_internal_wsgi_application())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class QuietHandler(WSGIRequestHandler):
    """Serves requests and says nothing of them."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the signature is Django's
        """Say nothing."""


def runs(event: OutboxEvent, handler: str) -> int:
    """Return how often a handler ran for an event, or its effect came about, counted at the receiving end."""
    if handler == "audit-log":
        return AuditEntry.objects.filter(pk=event.pk).count()
    if handler in SUBJECTS:
        return mailbox().count((event.payload["email"], SUBJECTS[handler]))
    if handler == "notification-fanout":
        return Notification.objects.filter(event_id=event.pk).count()
    if handler == "webhook-fanout":
        return ReceivedWebhook.objects.filter(webhook_id=str(event.pk)).count()
    return TokenRequest.objects.filter(idempotency_key=f"{handler}:{event.pk}").count()


def calls_for(events: list[OutboxEvent]) -> list[OutboxTask]:
    """Return the calls of the task that belong to the events' users."""
    users = {event.payload["user_id"] for event in events}
    calls = OutboxTask.objects.filter(task_path=draw_avatar.module_path)
    return [call for call in calls if call.payload["args"][0] in users]


def mailbox() -> list[tuple[str, str]]:
    """Return recipient and subject of every mail in the mailbox."""
    separator = b"-" * 79
    mails = [
        message_from_bytes(mail.strip())
        for file in Path(settings.MAIL_DIRECTORY).glob("*.log")
        for mail in file.read_bytes().split(separator)
        if mail.strip()
    ]
    return [(str(mail["To"]), str(mail["Subject"])) for mail in mails]


def checks(people: Registrations, events: list[OutboxEvent], exit_code: int) -> Iterator[tuple[bool, str]]:
    """Yield what must be true, and whether it is."""
    wanted = len(people.committed) + CHANGES
    ids = [event.pk for event in events]
    done = sum(event.status == Status.DONE for event in events)
    yield len(events) == done == wanted, f"{wanted} things happened: {len(events)} events, {done} done, none dead"

    mails = mailbox()
    users = User.objects.filter(username__in=people.undone).count()
    left = OutboxEvent.objects.filter(payload__username__in=people.undone).count()
    sent = sum(address == f"{name}@example.com" for name in people.undone for address, _ in mails)
    yield (
        users == left == sent == 0,
        f"{len(people.undone)} rolled-back ones left nothing: {users} users, {left} events, {sent} mails",
    )
    entries, broken = AuditEntry.objects.filter(pk__in=ids).count(), verify().broken
    yield entries == wanted and broken is None, f"audit-log: {entries} entries, and the chain of hashes holds"

    emails = [user.email for user in people.committed]
    welcome, security = (sum((email, subject) in set(mails) for email in emails) for subject in SUBJECTS.values())
    links = OutboxEmail.objects.filter(recipient__in=emails, sensitive=True, wiped=False).count()
    yield (
        (welcome, security, links) == (len(emails), CHANGES, 0),
        f"emails: {welcome} of welcome, {security} of security; {links} working links left in the database",
    )

    pictures = [str(call.return_value) for call in calls_for(events) if call.status == Status.DONE]
    calls = OutboxTask.objects.filter(task_path=draw_avatar.module_path).count()
    yield (
        len(pictures) == len(people.committed)
        and calls == User.objects.filter(is_staff=False).count()
        and all(text.startswith("<svg") for text in pictures),
        f"draw_avatar: {len(pictures)} tasks returned a picture, none left by what was rolled back",
    )

    requests = TokenRequest.objects.filter(idempotency_key__in=[f"revoke-tokens:{pk}" for pk in ids])
    refused, accepted = requests.filter(accepted=False).count(), requests.filter(accepted=True).count()
    yield (
        (refused, accepted) == (REFUSALS * CHANGES, CHANGES),
        f"revoke-tokens: {refused} requests refused, {accepted} accepted",
    )
    received = ReceivedWebhook.objects.filter(webhook_id__in=[str(pk) for pk in ids]).count()
    told = Notification.objects.filter(event_id__in=ids).count()
    yield received == told == wanted, f"{received} webhooks received, their signatures right; {told} notifications"
    yield (
        all(runs(event, name) == count for event in events for name, count in RUNS[event.type].items()),
        "what failed was run again, and nothing else was",
    )
    yield exit_code == 0, f"the relay stopped on SIGTERM with exit code {exit_code}"
