"""
The example project as its users run it: every step is a process of its own.

The interleavings are forced with a socket: a handler connects to the test when
it starts, and works until the test answers. Nothing here waits for a clock but
for the lease of a killed relay.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from django.conf import settings

ROOT = Path(__file__).resolve().parents[2]
WITHIN_SECONDS = 60

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the relay is stopped with SIGTERM")


@dataclass
class Project:
    """The example project on a database of its own."""

    env: dict[str, str]
    directory: Path
    relays: list[subprocess.Popen[str]] = field(default_factory=list)

    def manage(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, str(ROOT / "manage.py"), *args], env)

    def python(self, code: str) -> Any:
        """Run code in the project; return the JSON value it prints last."""
        setup = "import django, json; django.setup()\n"
        result = self._run([sys.executable, "-c", setup + code], {})
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    def register(self, name: str) -> None:
        self.python(
            "from example_project.accounts.registration import register\n"
            f"print(register(username='{name}', email='{name}@example.com').pk)"
        )

    def outcome(self) -> dict[str, Any]:
        """Return what stands in the outbox, and what arrived at the receiving end."""
        found: dict[str, Any] = self.python(
            "from django_outbox.models import OutboxEvent as E\n"
            "from example_project.accounts.models import *\n"
            "print(json.dumps({'events': list(E.objects.values_list('status', flat=True)),"
            " 'open_leases': E.objects.exclude(leased_by='').count(),"
            " 'audit': AuditRecord.objects.count(), 'contacts': CrmContact.objects.count(),"
            " 'refused': CrmRequest.objects.filter(accepted=False).count(),"
            " 'accepted': CrmRequest.objects.filter(accepted=True).count()}))"
        )
        found["mails"] = sum(
            file.read_text().count("\nTo: ") for file in Path(self.env["EMAIL_FILE_PATH"]).glob("*.log")
        )
        return found

    def start_relay(self, *args: str, **env: str) -> subprocess.Popen[str]:
        log = (self.directory / f"relay{len(self.relays)}.log").open("w")
        with log:
            relay = subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), "run_outbox", *args],
                cwd=ROOT,
                env=self.env | env,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.relays.append(relay)
        return relay

    def drain_until_done(self) -> None:
        """Drain again and again: a drain ends when nothing is due now, and a retry falls due later."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while True:
            result = self.manage("run_outbox", "--drain")
            assert result.returncode == 0, result.stderr
            if set(self.outcome()["events"]) <= {"done"}:
                return
            assert time.monotonic() < deadline, self.outcome()

    def log(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.directory.glob("relay*.log")))

    def _run(self, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=WITHIN_SECONDS * 2,
            check=False,
        )


@contextmanager
def own_database(directory: Path) -> Iterator[str]:
    """Yield the URL of an empty database of the kind these tests run on."""
    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        yield f"sqlite:///{quote(str(directory / 'example.sqlite3'))}"
        return
    name = f"outbox_example_{secrets.token_hex(4)}"
    server = {
        key: str(default[setting])
        for key, setting in (("host", "HOST"), ("port", "PORT"), ("user", "USER"), ("password", "PASSWORD"))
        if default.get(setting)
    }
    with psycopg.connect(dbname="postgres", autocommit=True, **server) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            user = quote(server.get("user", ""), safe="")
            secret = f":{quote(server['password'], safe='')}" if "password" in server else ""
            address = urlencode({key: server[key] for key in ("host", "port") if key in server})
            yield f"postgres://{user}{secret}@/{name}?{address}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with own_database(tmp_path) as url:
        env = os.environ | {
            "DATABASE_URL": url,
            "EMAIL_FILE_PATH": str(tmp_path / "mails"),
            "DJANGO_SETTINGS_MODULE": "tests.acceptance.pausing.settings",
            "PYTHONPATH": str(ROOT),
        }
        made = Project(env, tmp_path)
        migrated = made.manage("migrate", "--verbosity=0")
        assert migrated.returncode == 0, migrated.stderr
        try:
            yield made
        finally:
            for relay in made.relays:
                if relay.poll() is None:
                    relay.kill()
                relay.wait()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WITHIN_SECONDS)
        yield server


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


DELIVERED = {"audit": 1, "contacts": 1, "refused": 2, "accepted": 1, "mails": 1, "events": ["done"], "open_leases": 0}


def test_a_registration_reaches_every_handler_and_only_the_failed_one_runs_again(project: Project) -> None:
    project.register("amber")
    assert project.outcome()["events"] == ["pending"]
    project.drain_until_done()
    assert project.outcome() == DELIVERED


def test_a_relay_stopped_by_sigterm_finishes_the_handler_at_work_and_exits_with_0(
    project: Project, listener: socket.socket
) -> None:
    project.register("amber")
    relay = project.start_relay(PAUSE_AT=address(listener))
    with listener.accept()[0]:
        relay.send_signal(signal.SIGTERM)
    assert relay.wait(WITHIN_SECONDS) == 0, project.log()
    left = project.outcome()
    # The CRM has refused once by now, so the event waits for the next relay, unheld.
    assert (left["events"], left["open_leases"], left["refused"]) == (["waiting"], 0, 1)
    project.drain_until_done()
    assert project.outcome() == DELIVERED


def test_an_idle_relay_exits_with_0_on_sigint(project: Project, listener: socket.socket) -> None:
    relay = project.start_relay(PAUSE_AT=address(listener))
    # An event emitted while it runs shows that it is up.
    project.register("amber")
    with listener.accept()[0]:
        pass
    relay.send_signal(signal.SIGINT)
    assert relay.wait(WITHIN_SECONDS) == 0, project.log()


def test_a_relay_killed_in_mid_handler_loses_nothing(project: Project, listener: socket.socket) -> None:
    """Scenario 2: a new relay finds what the killed one held when its lease is over."""
    project.register("amber")
    killed = project.start_relay(PAUSE_AT=address(listener))
    with listener.accept()[0] as first:
        assert first.recv(16) == b"1\n"
        killed.kill()
        killed.wait(WITHIN_SECONDS)
    assert project.outcome()["open_leases"] == 1

    successor = project.start_relay(PAUSE_AT=address(listener))
    with listener.accept()[0] as second:
        assert second.recv(16) == b"2\n"
    # It runs once more and not twice: one repeat is right where a process died.
    successor.send_signal(signal.SIGTERM)
    assert successor.wait(WITHIN_SECONDS) == 0, project.log()
    project.drain_until_done()
    assert project.outcome() == DELIVERED


KILLED_BEFORE_COMMIT = """
import django, os, signal; django.setup()
from django.db import transaction
from example_project.accounts.registration import register
with transaction.atomic():
    register(username="nettle", email="nettle@example.com")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_emitter_leaves_neither_user_nor_event(project: Project) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_COMMIT], cwd=ROOT, env=project.env, check=False)
    assert killed.returncode == -signal.SIGKILL
    users = project.python("from django.contrib.auth.models import User\nprint(User.objects.count())")
    assert (users, project.outcome()["events"]) == (0, [])


def test_the_project_passes_its_checks_and_has_no_missing_migration(project: Project) -> None:
    env = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
    checked = project.manage("check", "--database", "default", "--fail-level", "WARNING", **env)
    assert checked.returncode == 0, checked.stderr
    migrations = project.manage("makemigrations", "--check", "--dry-run", **env)
    assert migrations.returncode == 0, migrations.stdout


def test_the_demo_checks_itself_and_prints_a_plain_table(project: Project) -> None:
    env = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
    result = project.manage("demo", **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert result.stdout.count("welcome-email") == 9  # eight rows of the table and one line of the count
    # Once more on the same database: the counts are of this run alone.
    again = project.manage("demo", **env)
    assert again.returncode == 0, again.stdout + again.stderr
