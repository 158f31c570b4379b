"""
The example project as its users run it: every step is a process of its own.

The interleavings are forced with a socket: a handler connects to the test when
it starts, and works until the test answers. Nothing here waits for a clock but
for the lease of a killed relay.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict, make_conninfo

ROOT = Path(__file__).resolve().parents[2]
WITHIN_SECONDS = 60

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the relay is stopped with SIGTERM")


FILE = "example.sqlite3"
OPEN = """
    SELECT 1 FROM django_outbox_event WHERE status <> 'done'
    UNION ALL SELECT 1 FROM django_outbox_email WHERE status <> 'done'
"""
REGISTER = """
import django, sys; django.setup()
from example_project.accounts.registration import change_password, register
user = register(username=sys.argv[1], email=f"{sys.argv[1]}@example.com")
change_password(user, "s3a-Breeze")
"""


@dataclass
class Project:
    """The example project on a database of its own."""

    env: dict[str, str]
    directory: Path
    dsn: str
    relays: list[subprocess.Popen[str]] = field(default_factory=list)

    def manage(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, str(ROOT / "manage.py"), *args], env)

    def register(self, name: str) -> None:
        result = self._run([sys.executable, "-c", REGISTER, name], {})
        assert result.returncode == 0, result.stderr

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Read the database directly, as somebody who knows nothing of Django."""
        if self.dsn:
            with psycopg.connect(self.dsn) as connection:
                return connection.execute(sql.encode()).fetchall()
        with closing(sqlite3.connect(self.directory / FILE)) as connection:
            return connection.execute(sql).fetchall()

    def outcome(self) -> dict[str, Any]:
        """Return what stands in the outbox, and what arrived at the receiving end."""
        counts = {
            "open_leases": "django_outbox_event WHERE leased_by <> ''",
            "audit": "django_outbox_audit_entry",
            "notifications": "django_outbox_notification",
            "refused": "accounts_tokenrequest WHERE NOT accepted",
            "accepted": "accounts_tokenrequest WHERE accepted",
            "logins": "accounts_token WHERE NOT revoked",
        }
        mails = Path(self.env["EMAIL_FILE_PATH"]).glob("*.log")
        return {
            "events": sorted(status for (status,) in self.query("SELECT status FROM django_outbox_event")),
            "mails": sum(file.read_text().count("\nTo: ") for file in mails),
            **{name: self.query(f"SELECT count(*) FROM {source}")[0][0] for name, source in counts.items()},
        }

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
            if not self.query(OPEN):
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
def own_project(directory: Path, *, like: Project | None = None) -> Iterator[Project]:
    """Yield the example project on an empty database, or on a copy of another's, of the kind these tests run on."""
    env = os.environ | {
        "EMAIL_FILE_PATH": str(directory / "mails"),
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.pausing.settings",
        "TOKEN_SERVICE_REFUSALS": "2",
        "PYTHONPATH": str(ROOT),
    }
    default = settings.DATABASES["default"]
    if default["ENGINE"].endswith("sqlite3"):
        if like is not None:
            shutil.copy(like.directory / FILE, directory / FILE)
        yield Project(env | {"DATABASE_URL": f"sqlite:///{quote(str(directory / FILE))}"}, directory, dsn="")
        return
    name = f"outbox_example_{secrets.token_hex(4)}"
    server = {
        key: str(default[key.upper()]) for key in ("host", "port", "user", "password") if default.get(key.upper())
    }
    template = f" TEMPLATE {conninfo_to_dict(like.dsn)['dbname']}" if like is not None else ""
    with psycopg.connect(make_conninfo(dbname="postgres", **server), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}{template}".encode())
        try:
            login = ":".join(quote(server[key], safe="") for key in ("user", "password") if key in server)
            address = urlencode([(key, server[key]) for key in ("host", "port") if key in server])
            url = f"postgres://{login}@/{name}?{address}"
            yield Project(env | {"DATABASE_URL": url}, directory, dsn=make_conninfo(dbname=name, **server))
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with own_project(tmp_path_factory.mktemp("migrated")) as made:
        result = made.manage("migrate", "--verbosity=0")
        assert result.returncode == 0, result.stderr
        yield made


@pytest.fixture
def project(migrated: Project, tmp_path: Path) -> Iterator[Project]:
    with own_project(tmp_path, like=migrated) as made:
        try:
            yield made
        finally:
            for relay in made.relays:
                if relay.poll() is None:
                    relay.kill()
                relay.wait()


@pytest.fixture
def empty_project(tmp_path: Path) -> Iterator[Project]:
    with own_project(tmp_path) as made:
        yield made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WITHIN_SECONDS)
        yield server


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


DELIVERED = {
    "audit": 2,
    "notifications": 2,
    "refused": 2,
    "accepted": 1,
    "logins": 0,
    "mails": 2,
    "events": ["done", "done"],
    "open_leases": 0,
}


def test_a_registration_reaches_every_handler_and_only_the_failed_one_runs_again(project: Project) -> None:
    project.register("amber")
    assert project.outcome()["events"] == ["pending", "pending"]
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
    # The token service has refused once by now, so that event waits for the next relay, unheld.
    assert (left["events"], left["open_leases"], left["refused"]) == (["done", "waiting"], 0, 1)
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
    # Without the mail: what was sent and not yet recorded when it died would rightly go out again.
    killed = project.start_relay("--queue", "events", PAUSE_AT=address(listener))
    with listener.accept()[0] as first:
        assert first.recv(16) == b"1\n"
        killed.kill()
        killed.wait(WITHIN_SECONDS)
    assert project.outcome()["open_leases"] >= 1

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
    assert project.query("SELECT username FROM auth_user") == []
    assert project.outcome()["events"] == []


def test_the_project_passes_its_checks_and_has_no_missing_migration(project: Project) -> None:
    env = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
    checked = project.manage("check", "--database", "default", "--fail-level", "WARNING", **env)
    assert checked.returncode == 0, checked.stderr
    migrations = project.manage("makemigrations", "--check", "--dry-run", **env)
    assert migrations.returncode == 0, migrations.stdout


def test_the_projects_own_tests_pass(project: Project) -> None:
    """Scenario 29: its handlers run in plain TestCases."""
    result = project.manage("test", "--noinput", "example_project", DJANGO_SETTINGS_MODULE="example_project.settings")
    assert result.returncode == 0, result.stderr
    assert "Ran 0 tests" not in result.stderr


def test_the_demo_checks_itself_and_prints_a_plain_table(empty_project: Project) -> None:
    env = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
    result = empty_project.manage("demo", **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert result.stdout.count("user.created ") == 8
    assert result.stdout.count("user.password_changed ") == 3
    # Once more on the same database: the counts are of this run alone.
    again = empty_project.manage("demo", **env)
    assert again.returncode == 0, again.stdout + again.stderr
