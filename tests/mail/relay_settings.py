"""The test suite's settings for a relay of its own, which delivers to the server of the test."""

import json
import os

from tests.settings import *  # noqa: F403

EMAIL_HOST = "127.0.0.1"
EMAIL_PORT = int(os.environ["MAIL_PORT"])
OUTBOX = {
    "POLL_SECONDS": 5,
    "EMAIL": {
        "BACKEND": "django.core.mail.backends.smtp.EmailBackend",
        **json.loads(os.environ.get("MAIL_OUTBOX", "{}")),
    },
}
