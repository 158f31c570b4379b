"""What the tests of this directory that start relays as processes share."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from tests.concurrency.field import acts
from tests.concurrency.helpers import StartRelay
from tests.concurrency.proxy import Proxy
from tests.concurrency.stage import Stage
from tests.conftest import StartPython


@pytest.fixture
def stage() -> Iterator[Stage]:
    acts.register()
    with Stage() as stage:
        yield stage


@pytest.fixture
def proxy(django_db_setup: None) -> Iterator[Proxy]:
    """A proxy between whoever is given its address and this run's PostgreSQL."""
    with Proxy(connection.settings_dict) as proxy:
        yield proxy


@pytest.fixture
def start_relay(start_python: StartPython, stage: Stage) -> StartRelay:
    """Return a function that starts ``run_outbox`` with the field's handlers and these settings."""

    def start(
        *arguments: str,
        command: tuple[str, ...] = ("-m", "django"),
        events: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **top: Any,
    ) -> subprocess.Popen[str]:
        queue = {"RETRY_BASE_SECONDS": 0, "RETRY_CAP_SECONDS": 0, "REPLAY_EVERY_SECONDS": None} | (events or {})
        return start_python(
            *command,
            "run_outbox",
            *arguments,
            DJANGO_SETTINGS_MODULE="tests.concurrency.field_settings",
            FIELD_OUTBOX=json.dumps({"POLL_SECONDS": 30, "SHUTDOWN_GRACE_SECONDS": 10, **top, "EVENTS": queue}),
            FIELD_PORT=str(stage.port),
            PGAPPNAME="outbox relay",
            **(environment or {}),
        )

    return start
