"""The test suite's settings for a process of its own, with the handlers of ``tests.concurrency.field``."""

import json
import os

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.concurrency.field"]  # noqa: F405
OUTBOX = json.loads(os.environ.get("FIELD_OUTBOX", "{}"))
