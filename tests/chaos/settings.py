"""Settings of the chaos run, for the process that makes it and for the relays: one database, short leases."""

from __future__ import annotations

import os
from typing import Any

SECRET_KEY = "for chaos only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["django_outbox", "tests.chaos"]


def _database(place: str) -> dict[str, Any]:
    if "://" not in place:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": place,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
        }
    # Imported here: a relay on SQLite needs no libpq.
    from psycopg.conninfo import conninfo_to_dict

    server = conninfo_to_dict(place)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "chaos_outbox",
        "CONN_MAX_AGE": None,
        **{key.upper(): str(server[key]) for key in ("host", "port", "user", "password") if server.get(key)},
    }


DATABASES = {"default": _database(os.environ["CHAOS_DATABASE"])}

LEASE_SECONDS = 2.0

OUTBOX = {
    "POLL_SECONDS": 1,
    "SHUTDOWN_GRACE_SECONDS": 5,
    "EVENTS": {
        "LEASE_SECONDS": LEASE_SECONDS,
        "RETRY_BASE_SECONDS": 0.1,
        "RETRY_CAP_SECONDS": 1,
        "REPLAY_EVERY_SECONDS": None,
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django_outbox": {"handlers": ["stderr"], "level": "INFO"}},
}
