"""Settings of relay processes that tests start: this computer's ports in ``TEST_WEBHOOK_PORTS`` may be reached."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403

OUTBOX = {
    "WEBHOOKS": {
        "ALLOW_HTTP": True,
        "ALLOW_NETWORKS": ["127.0.0.0/8"],
        "ALLOW_PORTS": [443, *map(int, os.environ["TEST_WEBHOOK_PORTS"].split())],
    },
}
