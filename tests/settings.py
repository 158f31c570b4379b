"""
Settings of the test suite.

``TEST_DATABASE`` is ``sqlite`` (default) or ``postgres``. For the latter a
server is started for this run, unless ``TEST_DATABASE_URL`` names one; its
databases ``test_outbox`` and ``test_outbox_orders`` are made anew.

The databases bear the same names in and out of a test, and what was started
is left in the environment, so a process that a test starts with these settings
works on the very tables that the test sees.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.server import start_postgres

SECRET_KEY = "for tests only"
USE_TZ = os.environ.get("TEST_USE_TZ", "1") == "1"
TIME_ZONE = os.environ.get("TEST_TIME_ZONE", "UTC")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    # It stands first on purpose: its modules import emit_event before our models are loaded.
    "tests.earlyapp",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_outbox",
    "tests.testapp",
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]


def _run_directory() -> Path:
    """Return the directory of this run's database files; it goes when the run ends."""
    if "TEST_DIRECTORY" not in os.environ:
        os.environ["TEST_DIRECTORY"] = tempfile.mkdtemp(prefix="outbox-tests-")
        atexit.register(shutil.rmtree, os.environ["TEST_DIRECTORY"], ignore_errors=True)
    return Path(os.environ["TEST_DIRECTORY"])


def _sqlite(name: str) -> dict[str, Any]:
    # A file, also under test: threads and processes share it.
    path = str(_run_directory() / f"{name}.sqlite3")
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "TEST": {"NAME": path},
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


def _postgres(name: str) -> dict[str, Any]:
    # Imported here: every process that a test starts on SQLite would pay for libpq too.
    from psycopg.conninfo import conninfo_to_dict

    server = conninfo_to_dict(os.environ.get("TEST_DATABASE_URL") or start_postgres())
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "TEST": {"NAME": name},
        **{key.upper(): str(server[key]) for key in ("host", "port", "user", "password") if server.get(key)},
    }


_database = {"sqlite": _sqlite, "postgres": _postgres}[os.environ.get("TEST_DATABASE", "sqlite")]

DATABASES = {
    "default": _database("test_outbox"),
    "orders": _database("test_outbox_orders"),
}

TASKS = {
    "default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend", "QUEUES": ["default", "reports", "mail"]},
    "second": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend", "QUEUES": []},
}
