"""
Django system checks: what is wrong with the set-up, said before it costs an event.

Errors stop ``migrate`` and ``run_outbox``; warnings name what will hurt under
load. None of them opens a database connection.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import psycopg
import urllib3
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  Django's word
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.log import AdminEmailHandler
from django.utils.module_loading import import_string
from psycopg.conninfo import conninfo_to_dict

from django_outbox import notifications
from django_outbox.alerts import email_addresses
from django_outbox.conf import EmailSettings, OutboxSettings, get_settings, problems, queue_classes
from django_outbox.errors import UnsafeURL
from django_outbox.mail import compat as mail_compat
from django_outbox.mail import queue_mailers
from django_outbox.models import OutboxEvent
from django_outbox.tasks import API_AVAILABLE, API_MISSING
from django_outbox.webhooks.guard import check_url

__all__ = ["MEANINGS", "check_outbox"]

MEANINGS: Final = {
    "E001": "An unknown key in `OUTBOX`.",
    "E002": "A value of the wrong type in `OUTBOX`.",
    "E003": "A value out of range in `OUTBOX`.",
    "E004": "`DATABASE` is not an alias in `DATABASES`.",
    "E005": "The longest retry wait is shorter than the first.",
    "E006": "The replay window closes before the first replay.",
    "E010": "The database is neither PostgreSQL nor SQLite.",
    "E011": "Django uses psycopg2 because psycopg 3 cannot be imported.",
    "E012": "A database router sends events elsewhere, or keeps their table from being created.",
    "E013": "SQLite is older than 3.38.",
    "E014": "`LISTEN_DSN` cannot be parsed.",
    "E020": "Nothing delivers the queued mail, or the queue would deliver to itself.",
    "E021": "The email lease does not cover one email's time limit and the margin.",
    "E022": "The delivering backend cannot be imported.",
    "E030": "`webhook-fanout` is on, but the extra `[webhooks]` is not installed.",
    "E031": "The webhook lease does not cover a look-up, a request and the margin.",
    "E032": "`CA_BUNDLE` names a file that is not there.",
    "E040": "A backend in `TASKS` is the outbox's, but there is no Tasks API: Django is 5.2, without `django-tasks`.",
    "E041": "An option of the outbox's backend in `TASKS` is unknown, or a queue name in it does not fit.",
    "E050": "`operator-alert` is on, but nobody would be told.",
    "E051": "`ALERT_WEBHOOK_URL` is refused, or the extra `[webhooks]` is not installed.",
    "W010": "SQLite without immediate transactions, WAL or a busy time-out.",
    "W011": "The connection pool is smaller than the relay's threads need.",
    "W012": "`LISTEN_DSN` is set, but SQLite has no LISTEN.",
    "W013": "The database runs at another isolation level than READ COMMITTED.",
    "W020": "Error mail to the admins goes through the queue.",
    "W021": "`BACKEND` of the email queue is set beside `MAILERS`, which names the backends.",
    "W030": "`ALLOW_NETWORKS` opens every address to webhooks.",
    "W050": "`notification-fanout` is on, but no resolver says who is told.",
}
"""Every check, by the last part of its id."""

TASK_BACKEND: Final = "django_outbox.tasks.OutboxTaskBackend"
_QUEUE_NAME_LENGTH: Final = 64

OLDEST_SQLITE: Final = (3, 38)

# A relay's connections beside those of its handler threads: the loop, the flusher,
# the renewer, and one to spare for a thread that takes the place of a stuck one.
_CONNECTIONS_BESIDE_HANDLERS: Final = 4

_BUSY_SECONDS: Final = 5

_SQLITE_OPTIONS: Final = (
    '"OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": "PRAGMA journal_mode=WAL;"}'
)


@register("django_outbox")
def check_outbox(**_: Any) -> list[CheckMessage]:
    """
    Return what is wrong with ``OUTBOX`` and with the database that it names.

    Settings come first: while one is wrong, nothing is said about the rest.
    """
    wrong = [
        _message(problem.id, problem.message, problem.hint)
        for problem in problems(getattr(django_settings, "OUTBOX", {}))
    ]
    if wrong:
        return wrong
    outbox = get_settings()
    return [
        *_database_problems(outbox),
        *_email_problems(outbox),
        *_webhook_problems(outbox),
        *_task_problems(),
        *_builtin_problems(outbox),
    ]


def _message(id: str, message: str, hint: str) -> CheckMessage:  # noqa: A002  Django's word
    MEANINGS[id]  # a check that the documentation does not list is a KeyError here
    level = Error if id.startswith("E") else Warning
    return level(message, hint=hint, id=f"django_outbox.{id}")


def _database_problems(outbox: OutboxSettings) -> Iterator[CheckMessage]:
    connection = connections[outbox.database]
    by_vendor: dict[str, Callable[[OutboxSettings, BaseDatabaseWrapper], Iterator[CheckMessage]]] = {
        "postgresql": _postgres_problems,
        "sqlite": _sqlite_problems,
    }
    if connection.vendor in by_vendor:
        yield from by_vendor[connection.vendor](outbox, connection)
    else:
        yield _message(
            "E010",
            f"The outbox is on database {outbox.database!r}, which is {connection.display_name}; "
            "only PostgreSQL and SQLite are supported.",
            'Name the alias of a supported database in OUTBOX["DATABASE"].',
        )
    yield from _router_problems(outbox)


def _task_problems() -> Iterator[CheckMessage]:
    """Look at the entries of ``TASKS`` that name our backend, without making one."""
    given = getattr(django_settings, "TASKS", None)
    for alias, params in given.items() if isinstance(given, dict) else ():
        if not isinstance(params, dict) or params.get("BACKEND") != TASK_BACKEND:
            continue
        where = f"TASKS[{alias!r}]"
        if not API_AVAILABLE:
            yield _message("E040", f"{where} names the outbox's backend, but Django has no Tasks API.", API_MISSING)
        if options := params.get("OPTIONS"):
            yield _message(
                "E041",
                f'{where}["OPTIONS"] has {", ".join(map(str, options))}; the backend of the outbox takes no options.',
                'Attempts, time limits and threads are settings of the queue, OUTBOX["TASKS"], or of a task.',
            )
        for name in params.get("QUEUES") or ():
            if not isinstance(name, str) or not 1 <= len(name) <= _QUEUE_NAME_LENGTH:
                yield _message(
                    "E041",
                    f'{where}["QUEUES"] has {name!r:.80}, which is not a text of 1 to {_QUEUE_NAME_LENGTH} characters.',
                    "Shorten it.",
                )


def _router_problems(outbox: OutboxSettings) -> Iterator[CheckMessage]:
    writes_to = router.db_for_write(OutboxEvent)
    if writes_to != outbox.database:
        yield _message(
            "E012",
            f"The database routers write OutboxEvent to {writes_to!r}, but the relay works on {outbox.database!r}.",
            f'Let db_for_write() return {outbox.database!r} for app label "django_outbox", '
            f'or set OUTBOX["DATABASE"] to {writes_to!r}.',
        )
    if not router.allow_migrate_model(outbox.database, OutboxEvent):
        yield _message(
            "E012",
            f"The database routers do not allow the outbox tables to be created in {outbox.database!r}.",
            f'Let allow_migrate() return True for database {outbox.database!r} and app label "django_outbox".',
        )


def _postgres_problems(outbox: OutboxSettings, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    from django.db.backends.postgresql import psycopg_any  # noqa: PLC0415  fails where there is no PostgreSQL driver

    if not psycopg_any.is_psycopg3:
        yield _message(
            "E011",
            "Django uses psycopg2, which the outbox does not support, because psycopg 3 cannot be imported.",
            'Install its binary, "psycopg[binary]", or the libpq library, and uninstall psycopg2.',
        )
    pool = connection.settings_dict["OPTIONS"].get("pool")
    if pool:
        size = _pool_size(pool if isinstance(pool, dict) else {})
        threads = sum(getattr(outbox, name.lower()).concurrency for name in queue_classes())
        needed = threads + _CONNECTIONS_BESIDE_HANDLERS
        if size < needed:
            yield _message(
                "W011",
                f"The connection pool of {outbox.database!r} holds {size} connections; "
                f"a relay of all queues, with {threads} threads, needs {needed}.",
                f'Set "OPTIONS": {{"pool": {{"max_size": {needed}}}}}, or lower the CONCURRENCY of the queues, as in'
                ' OUTBOX["EVENTS"]["CONCURRENCY"].',
            )
    level = connection.settings_dict["OPTIONS"].get("isolation_level", psycopg.IsolationLevel.READ_COMMITTED)
    if level != psycopg.IsolationLevel.READ_COMMITTED:
        yield _message(
            "W013",
            f"Database {outbox.database!r} does not run at READ COMMITTED: relays will abort one another's claims.",
            'Remove "isolation_level" from its OPTIONS, or give the outbox an alias of its own without it.',
        )
    if outbox.listen_dsn is not None:
        try:
            conninfo_to_dict(outbox.listen_dsn)
        except psycopg.ProgrammingError:
            # Its text quotes the DSN, which holds a password.
            yield _message(
                "E014",
                'OUTBOX["LISTEN_DSN"] is not a PostgreSQL connection string.',
                'Write "postgresql://user:password@host:5432/name" or "host=... dbname=...".',
            )


def _email_problems(outbox: OutboxSettings) -> Iterator[CheckMessage]:
    queue = outbox.email
    yield from _mailers_problems(queue) if mail_compat.mailers() is not None else _backend_problems(queue)
    if django_settings.ADMINS and any(
        isinstance(handler, AdminEmailHandler) and mail_compat.is_queue(mail_compat.handler_backend(handler))
        for handler in _log_handlers()
    ):
        yield _message(
            "W020",
            "Errors are mailed to the admins through the queue: a rollback takes the mail along, a broken database"
            " holds it up, and an error in the relay makes more mail for the relay.",
            "Give AdminEmailHandler in LOGGING the backend that delivers: its email_backend, or using with MAILERS.",
        )


def _backend_problems(queue: EmailSettings) -> Iterator[CheckMessage]:
    path = queue.backend or mail_compat.default_backend_path()
    if mail_compat.is_queue(path):
        yield _message(
            "E020",
            "Mail is queued, but nothing delivers it: the delivering backend is the queue's own.",
            'Name the one that sends, such as OUTBOX["EMAIL"]["BACKEND"] ='
            ' "django.core.mail.backends.smtp.EmailBackend".',
        )
    elif queue.backend is not None and (reason := _import_problem(queue.backend)):
        yield _message("E022", f'OUTBOX["EMAIL"]["BACKEND"] cannot be imported: {reason}.', "Correct the path.")


def _mailers_problems(queue: EmailSettings) -> Iterator[CheckMessage]:
    mailers = mail_compat.mailers() or {}
    queues = queue_mailers()
    for alias, target in queues.items():
        if target not in mailers or target in queues:
            reason = "names no alias" if not target else "is the queue itself" if target in queues else "does not exist"
            yield _message(
                "E020",
                f"Mail of the mailer {alias!r} is queued, but nothing delivers it: its deliver_with {reason}.",
                f'Set MAILERS[{alias!r}]["OPTIONS"] = {{"deliver_with": "<an alias that sends>"}}.',
            )
    if queue.backend is not None:
        yield _message(
            "W021",
            'OUTBOX["EMAIL"]["BACKEND"] has no effect beside MAILERS.',
            "Remove it; the queue's alias says with its deliver_with what delivers.",
        )


def _import_problem(path: str) -> str:
    try:
        import_string(path)
    except ImportError as error:
        return str(error)
    return ""


def _log_handlers() -> Iterator[logging.Handler]:
    """Return the handlers of all loggers that exist."""
    yield from logging.root.handlers
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield from logger.handlers


def _webhook_problems(outbox: OutboxSettings) -> Iterator[CheckMessage]:
    hooks = outbox.webhooks
    if "webhook-fanout" in outbox.builtin_handlers and not _webhooks_installed():
        yield _message(
            "E030",
            "Webhook deliveries are on, but their secrets cannot be encrypted or their answers not be read:"
            " cryptography is missing, or urllib3 is older than 2.2.",
            'Install "django-transactional-outbox[webhooks]".',
        )
    if hooks.ca_bundle is not None and not Path(hooks.ca_bundle).is_file():
        yield _message(
            "E032",
            'OUTBOX["WEBHOOKS"]["CA_BUNDLE"] names a file that is not there.',
            "Give the path of a file in PEM form, or leave it out for the authorities of certifi.",
        )
    if any(ip_network(text).prefixlen == 0 for text in hooks.allow_networks):
        yield _message(
            "W030",
            'OUTBOX["WEBHOOKS"]["ALLOW_NETWORKS"] opens every address: a customer\'s URL can reach your own network.',
            "Name the networks that webhooks are meant to reach, each as narrow as it can be.",
        )


def _builtin_problems(outbox: OutboxSettings) -> Iterator[CheckMessage]:
    if "operator-alert" in outbox.builtin_handlers:
        if not email_addresses() and outbox.alert_webhook_url is None:
            yield _message(
                "E050",
                "The handler operator-alert is on, but there is nobody to tell.",
                'Set OUTBOX["ALERT_EMAILS"], Django\'s ADMINS, or OUTBOX["ALERT_WEBHOOK_URL"].',
            )
        if outbox.alert_webhook_url is not None and (refused := _refused_webhook(outbox.alert_webhook_url)):
            yield _message(
                "E051",
                f'OUTBOX["ALERT_WEBHOOK_URL"] cannot be used: {refused}.',
                'It is sent like any webhook: HTTPS to a public address, unless OUTBOX["WEBHOOKS"] allows more.',
            )
    if "notification-fanout" in outbox.builtin_handlers and not notifications.patterns():
        yield _message(
            "W050",
            "The handler notification-fanout is on, but no resolver is registered, so nobody is told anything.",
            f'Register one with @notifies(...) in the module "{outbox.handlers_module}" of an app.',
        )


def _refused_webhook(url: str) -> str:
    if not _webhooks_installed():
        return 'the package "django-transactional-outbox[webhooks]" is not installed'
    try:
        check_url(url)
    except UnsafeURL as error:
        return str(error).rstrip(".")
    return ""


def _webhooks_installed() -> bool:
    return find_spec("cryptography") is not None and hasattr(urllib3.HTTPResponse, "read1")


def _pool_size(options: dict[str, Any]) -> int:
    # psycopg_pool: four connections unless told, and no more than min_size without max_size.
    smallest = options.get("min_size", 4)
    largest = options.get("max_size")
    return int(smallest if largest is None else largest)


def _sqlite_problems(outbox: OutboxSettings, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        yield _message(
            "E013",
            f"SQLite is {sqlite3.sqlite_version}; the outbox needs {'.'.join(map(str, OLDEST_SQLITE))} or newer.",
            "Use a newer Python or system library, or PostgreSQL.",
        )
    missing = list(_missing_sqlite_options(connection.settings_dict))
    if missing:
        yield _message(
            "W010",
            f"SQLite database {outbox.database!r} lacks {', '.join(missing)}: "
            'writers will fail with "database is locked" under load.',
            f"Put into DATABASES[{outbox.database!r}]: {_SQLITE_OPTIONS}",
        )
    if outbox.listen_dsn is not None:
        yield _message(
            "W012",
            'OUTBOX["LISTEN_DSN"] is set, but the outbox is on SQLite, which has no LISTEN.',
            'Remove it, or name a PostgreSQL alias in OUTBOX["DATABASE"].',
        )


def _missing_sqlite_options(database: dict[str, Any]) -> Iterator[str]:
    options = database["OPTIONS"]
    # A transaction that begins with a read and then writes cannot wait for the write lock: it fails at once.
    if str(options.get("transaction_mode", "")).upper() not in {"IMMEDIATE", "EXCLUSIVE"}:
        yield "immediate transactions"
    if not re.search(r"journal_mode\s*(=|\()\s*['\"]?wal\b", str(options.get("init_command", "")), re.IGNORECASE):
        yield "WAL"
    if options.get("timeout", 0) < _BUSY_SECONDS:
        yield f"a busy time-out of {_BUSY_SECONDS} seconds or more"
