"""The app in a project: its migrations, its place among the apps, its databases."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction

from django_outbox import emit_event
from django_outbox.models import OutboxEvent
from tests.conftest import RawConnect, StartPython
from tests.earlyapp.models import Account
from tests.testapp.models import Note


@pytest.mark.django_db
def test_the_migrations_are_complete() -> None:
    call_command("makemigrations", "django_outbox", check=True, dry_run=True, stdout=StringIO())


@pytest.mark.django_db(databases=["default", "orders"])
@pytest.mark.parametrize("alias", ["default", "orders"])
def test_the_table_is_on_every_alias_that_is_migrated(alias: str) -> None:
    assert "django_outbox_event" in connections[alias].introspection.table_names()


@pytest.mark.django_db(databases=["default", "orders"])
def test_the_system_checks_find_nothing_in_this_project() -> None:
    call_command("check", databases=["default", "orders"], fail_level="WARNING", stdout=StringIO())


@pytest.mark.django_db
def test_an_app_that_loads_before_ours_emits_from_its_models() -> None:
    account = Account.open("amber")
    event = OutboxEvent.objects.get()
    assert (event.type, event.payload) == ("account.opened", {"id": account.pk, "name": "amber"})


@pytest.mark.django_db(transaction=True)
def test_another_process_with_these_settings_sees_what_this_one_committed(start_python: StartPython) -> None:
    with transaction.atomic():
        Note.objects.create(text="committed")
        emit_event("note.written", {})
    process = start_python(
        "-c",
        "import django; django.setup()\n"
        "from django_outbox.models import OutboxEvent\n"
        "from tests.testapp.models import Note\n"
        "print(Note.objects.get().text, OutboxEvent.objects.get().type)",
    )
    output, _ = process.communicate(timeout=30)
    assert output.splitlines()[-1:] == ["committed note.written"], output


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_another_session_sees_only_what_is_committed(raw_connect: RawConnect) -> None:
    with transaction.atomic():
        emit_event("note.written", {})
        assert raw_connect().execute("SELECT count(*) FROM django_outbox_event").fetchone() == (0,)
    assert raw_connect().execute("SELECT count(*) FROM django_outbox_event").fetchone() == (1,)


@pytest.mark.sqlite
@pytest.mark.django_db
def test_the_file_of_this_run_is_in_wal_mode() -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)
