"""Fixtures that every kind of test shares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.test import TransactionTestCase
from psycopg.conninfo import make_conninfo

from django_outbox.testing import isolated_handlers

ROOT = Path(__file__).parent.parent

RawConnect = Callable[[], "psycopg.Connection[tuple[Any, ...]]"]
StartPython = Callable[..., "subprocess.Popen[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what belongs to the other database."""
    vendor = connection.vendor
    for item in items:
        for marker, wanted, name in (("postgres", "postgresql", "PostgreSQL"), ("sqlite", "sqlite", "SQLite")):
            if item.get_closest_marker(marker) and vendor != wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}; this run is on {connection.display_name}"))


_KEPT = {"django_migrations", "django_content_type", "auth_permission"}
"""What migrations wrote."""


@pytest.fixture(autouse=True, scope="session")
def _quick_flush() -> Iterator[None]:
    """
    Have what a committing test leaves deleted, where Django truncates every table and then writes permissions anew.

    On PostgreSQL a TRUNCATE makes new files for a table and all its indexes, so that a third of
    such a test's time went into emptying what was empty.
    """
    slow = TransactionTestCase._fixture_teardown  # type: ignore[attr-defined]

    def quick(self: TransactionTestCase) -> None:
        for alias in self._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
            flushed = connections[alias]
            tables = set(flushed.introspection.django_table_names(only_existing=True, include_views=False)) - _KEPT
            try:
                # In any order: foreign keys are judged at the commit, when nothing is left.
                with transaction.atomic(using=alias), flushed.cursor() as cursor:
                    for table in sorted(tables):
                        cursor.execute(f"DELETE FROM {flushed.ops.quote_name(table)}")
            except DatabaseError:  # a table that refuses: the audit log
                slow(self)
                return

    TransactionTestCase._fixture_teardown = quick  # type: ignore[attr-defined]
    yield
    TransactionTestCase._fixture_teardown = slow  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Take away at the end of a test the handlers that it registered."""
    with isolated_handlers():
        yield


@pytest.fixture
def pg_dsn(django_db_setup: None) -> str:
    """Return the DSN of the test database, for connections that Django does not know."""
    settings = connection.settings_dict
    return make_conninfo(
        dbname=settings["NAME"],
        host=settings["HOST"] or None,
        port=settings["PORT"] or None,
        user=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
    )


@pytest.fixture
def raw_connect(pg_dsn: str) -> Iterator[RawConnect]:
    """Return a function that opens another session in autocommit; all are closed at the end."""
    opened: list[psycopg.Connection[tuple[Any, ...]]] = []

    def connect() -> psycopg.Connection[tuple[Any, ...]]:
        opened.append(psycopg.connect(pg_dsn, autocommit=True))
        return opened[-1]

    yield connect
    for session in opened:
        session.close()


@pytest.fixture
def start_python(django_db_setup: None) -> Iterator[StartPython]:
    """
    Return a function that starts ``python <arguments>`` on the databases of this run.

    ``start_python("-m", "django", "run_outbox", "--drain")`` runs a management
    command; keyword arguments are added to its environment. Output is captured,
    standard error with it. What still runs when the test ends is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONUNBUFFERED": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
