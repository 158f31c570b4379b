"""
Settings of the example project: SQLite out of the box, PostgreSQL with ``DATABASE_URL``.

    DATABASE_URL=postgres://user:password@localhost/example python manage.py migrate
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import django
import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()
environ.Env.read_env(BASE_DIR / ".env")

DEBUG = env.bool("DJANGO_DEBUG", default=True)
# A key for a laptop. With DJANGO_DEBUG off there is no default, and Django refuses to start without one.
SECRET_KEY = env.str("DJANGO_SECRET_KEY", default="example-only-not-a-secret" if DEBUG else "")
ALLOWED_HOSTS = env.list("DJANGO_ALLOWED_HOSTS", default=[])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_outbox",
    "example_project.accounts",
    "example_project.receiver",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "example_project.accounts.middleware.content_security_policy",
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

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"

DATABASES: dict[str, dict[str, Any]] = {
    "default": env.db_url("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'db.sqlite3'}"),
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"] = {
        # Take the write lock when a transaction begins: one that starts by reading and
        # then writes would otherwise fail at once if somebody wrote in between.
        "transaction_mode": "IMMEDIATE",
        # Wait for the write lock this long instead of failing with "database is locked".
        "timeout": 20,
        # Readers and the writer do not block each other, and the relay sees commits at once.
        "init_command": "PRAGMA journal_mode=WAL",
        **DATABASES["default"].get("OPTIONS", {}),
    }

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

# Whatever is mailed goes through the outbox, in the transaction that it belongs to. From there it
# goes to the console, or as files into a directory.
MAIL_DIRECTORY = env.str("EMAIL_FILE_PATH", default="")
_QUEUE = "django_outbox.mail.EmailBackend"
_DELIVERS = f"django.core.mail.backends.{'filebased' if MAIL_DIRECTORY else 'console'}.EmailBackend"
if django.VERSION >= (6, 1):
    MAILERS: dict[str, dict[str, Any]] = {
        "default": {"BACKEND": _QUEUE, "OPTIONS": {"deliver_with": "delivers"}},
        "delivers": {"BACKEND": _DELIVERS, "OPTIONS": {"file_path": MAIL_DIRECTORY} if MAIL_DIRECTORY else {}},
    }
    _EMAIL: dict[str, Any] = {}
else:
    EMAIL_BACKEND = _QUEUE
    EMAIL_FILE_PATH = MAIL_DIRECTORY or None
    _EMAIL = {"BACKEND": _DELIVERS}
DEFAULT_FROM_EMAIL = "hello@example.com"
EMAIL_SUBJECT_PREFIX = "[example] "

TASKS = {"default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend"}}

# The built-in receiver of webhooks is on this machine, without TLS. Neither is for production.
RECEIVER_PORT = env.int("RECEIVER_PORT", default=8000)
# What links in mails begin with: a relay has no request to take it from.
SITE_URL = env.str("SITE_URL", default=f"http://127.0.0.1:{RECEIVER_PORT}")
# How often the pretend token service turns a request away before it takes it.
TOKEN_SERVICE_REFUSALS = env.int("TOKEN_SERVICE_REFUSALS", default=0)

# So that retries take seconds and something that is down is soon dead. Leave all of this out for real receivers.
_IMPATIENT: dict[str, Any] = {"MAX_ATTEMPTS": 3, "RETRY_BASE_SECONDS": 0.5, "RETRY_CAP_SECONDS": 2}
OUTBOX: dict[str, Any] = {
    "BUILTIN_HANDLERS": ["audit-log", "webhook-fanout", "notification-fanout", "operator-alert"],
    # A TransactionTestCase empties every table, on SQLite row by row, which the protection would refuse.
    "AUDIT_PROTECT": "test" not in sys.argv,
    "ALERT_EMAILS": ["operators@example.com"],
    "ALERT_WINDOW_SECONDS": 30,
    "EVENTS": {**_IMPATIENT, "LEASE_SECONDS": env.float("OUTBOX_LEASE_SECONDS", default=60.0)},
    "EMAIL": _EMAIL,
    "WEBHOOKS": {
        **_IMPATIENT,
        "ALLOW_HTTP": DEBUG,
        "ALLOW_NETWORKS": ["127.0.0.1"] if DEBUG else [],
        "ALLOW_PORTS": [443, RECEIVER_PORT] if DEBUG else [443],
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {"django_outbox": {"handlers": ["console"], "level": "INFO"}},
}
