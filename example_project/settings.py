"""
Settings of the example project: SQLite out of the box, PostgreSQL with ``DATABASE_URL``.

    DATABASE_URL=postgres://user:password@localhost/example python manage.py migrate
"""

from __future__ import annotations

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

# Mail is queued with the rows it belongs to, and delivered to the console, or as files into a directory.
MAIL_DIRECTORY = env.str("EMAIL_FILE_PATH", default="")
_MAIL_BACKEND = f"django.core.mail.backends.{'filebased' if MAIL_DIRECTORY else 'console'}.EmailBackend"
if django.VERSION >= (6, 1):
    MAILERS = {
        "default": {"BACKEND": "django_outbox.mail.EmailBackend", "OPTIONS": {"deliver_with": "mailbox"}},
        "mailbox": {
            "BACKEND": _MAIL_BACKEND,
            "OPTIONS": {"file_path": MAIL_DIRECTORY} if MAIL_DIRECTORY else {},
        },
    }
else:
    EMAIL_BACKEND = "django_outbox.mail.EmailBackend"
    EMAIL_FILE_PATH = MAIL_DIRECTORY or None
DEFAULT_FROM_EMAIL = "hello@example.com"
# What links in mails begin with: a relay has no request to take it from.
SITE_URL = env.str("SITE_URL", default="http://127.0.0.1:8000")

TASKS = {"default": {"BACKEND": "django_outbox.tasks.OutboxTaskBackend"}}

OUTBOX: dict[str, Any] = {
    "BUILTIN_HANDLERS": ["webhook-fanout"],
    "EVENTS": {
        # So that the demo's retries take seconds. The default of 5 is the one for real receivers.
        "RETRY_BASE_SECONDS": 0.5,
        "LEASE_SECONDS": env.float("OUTBOX_LEASE_SECONDS", default=60.0),
    },
    "EMAIL": {"BACKEND": None if django.VERSION >= (6, 1) else _MAIL_BACKEND},
    # So that the receiver page of this project can be reached on a laptop. Never in production.
    "WEBHOOKS": {
        "ALLOW_HTTP": DEBUG,
        "ALLOW_NETWORKS": ["127.0.0.1"] if DEBUG else [],
        "ALLOW_PORTS": [443, 8000] if DEBUG else [443],
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {"django_outbox": {"handlers": ["console"], "level": "INFO"}},
}
