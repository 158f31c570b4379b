"""The test suite's settings for a process of its own, with the handlers of ``tests.concurrency.field``."""

import json
import os

from tests.settings import *  # noqa: F403

# Without the admin and what it brings along: many processes are started, and each would import it.
INSTALLED_APPS = [name for name in INSTALLED_APPS if not name.startswith("django.")]  # noqa: F405
INSTALLED_APPS += ["tests.concurrency.field"]
MIDDLEWARE, TEMPLATES, ROOT_URLCONF = [], [], ""
DEBUG = "FIELD_DEBUG" in os.environ
# What a test is about: {"CONN_MAX_AGE": 0}
DATABASES["default"].update(json.loads(os.environ.get("FIELD_DATABASE", "{}")))  # noqa: F405
OUTBOX = json.loads(os.environ.get("FIELD_OUTBOX", "{}"))
