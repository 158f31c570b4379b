"""The example project's settings, with the pausing handler, short leases and a short poll."""

from __future__ import annotations

from example_project.settings import *  # noqa: F403
from example_project.settings import INSTALLED_APPS, OUTBOX

INSTALLED_APPS = [*INSTALLED_APPS, "tests.acceptance.pausing"]
OUTBOX = OUTBOX | {
    "POLL_SECONDS": 1,
    "EVENTS": OUTBOX["EVENTS"] | {"LEASE_SECONDS": 3},
}
