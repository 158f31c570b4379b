"""The tables in the reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from django_outbox import errors
from django_outbox.checks import MEANINGS
from django_outbox.conf import (
    EmailSettings,
    OutboxSettings,
    QueueSettings,
    TaskSettings,
    WebhookSettings,
    setting_fields,
)
from django_outbox.metrics import METRICS

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    section = (REFERENCE / page).read_text().partition(f"{heading}\n")[2].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("## `OUTBOX`", OutboxSettings),
        ('## `OUTBOX["EVENTS"]`', QueueSettings),
        ('## `OUTBOX["EMAIL"]`', EmailSettings),
        ('## `OUTBOX["WEBHOOKS"]`', WebhookSettings),
        ('## `OUTBOX["TASKS"]`', TaskSettings),
    ],
)
def test_the_settings_tables_list_every_key(heading: str, cls: type[OutboxSettings | QueueSettings]) -> None:
    expected = [
        [f"`{key}`", f"`{entry.default!r}`", entry.metadata["unit"], entry.metadata["doc"]]
        for key, entry in setting_fields(cls).items()
        if entry.metadata["kind"] != "queue"
    ]
    assert rows("settings.md", heading) == expected


def test_the_checks_table_lists_every_check() -> None:
    expected = [[f"`django_outbox.{name}`", meaning] for name, meaning in MEANINGS.items()]
    assert rows("checks.md", "# System checks") == expected


def test_the_metrics_table_lists_every_metric() -> None:
    expected = [
        [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels)] for name, (kind, labels, _) in METRICS.items()
    ]
    assert [row[:3] for row in rows("metrics.md", "# Metrics")] == expected


def test_the_errors_table_lists_every_error_and_its_builtin() -> None:
    public = [getattr(errors, name) for name in errors.__all__]
    expected = {
        (
            f"`{error.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not errors.OutboxError),
        )
        for error in public
        if isinstance(error, type) and error is not errors.OutboxError
    }
    assert {(name, also) for name, also, _ in rows("errors.md", "# Errors")} == expected
