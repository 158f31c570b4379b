"""
Settings of the benchmarks: an empty and a grown database on PostgreSQL, and a SQLite file.

``tests.benchmarks`` starts the server and leaves its URL and the file's path in the
environment, so that the relays it starts work on the same tables.
"""

from __future__ import annotations

import os
from typing import Any

from psycopg.conninfo import conninfo_to_dict

SECRET_KEY = "for benchmarks only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["django_outbox", "django_tasks_db", "tests.benchmarks"]

TASKS = {
    "default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend"},
    "reference": {"BACKEND": "django_tasks_db.DatabaseBackend"},
}


def _postgres(name: str) -> dict[str, Any]:
    server = conninfo_to_dict(os.environ["BENCH_DATABASE_URL"])
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        # A web process keeps its connection.
        "CONN_MAX_AGE": None,
        **{key.upper(): str(server[key]) for key in ("host", "port", "user", "password") if server.get(key)},
    }


DATABASES = {
    "default": _postgres("bench_outbox"),
    "grown": _postgres("bench_outbox_grown"),
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["BENCH_SQLITE_FILE"],
        # As the documentation tells SQLite projects to.
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    },
}

EMAIL_HOST = "127.0.0.1"
EMAIL_PORT = int(os.environ.get("BENCH_MAIL_PORT", "9"))

OUTBOX = {
    "EMAIL": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend"},
    "WEBHOOKS": {
        "ALLOW_HTTP": True,
        "ALLOW_NETWORKS": ["127.0.0.0/8"],
        "ALLOW_PORTS": [443, *map(int, os.environ.get("BENCH_WEBHOOK_PORTS", "").split())],
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"django_outbox": {"handlers": ["stderr"], "level": "WARNING"}},
}
