"""``manage.py`` for a relay that looks after its LISTEN connection every half second, where another takes 15."""

from __future__ import annotations

import sys

from django.core.management import execute_from_command_line

from django_outbox import wake

# Names that a type checker takes for constants.
vars(wake).update(PING_SECONDS=0.5, PING_DEADLINE_SECONDS=0.5, RECONNECT_MIN_SECONDS=0.1, RECONNECT_MAX_SECONDS=0.5)

if __name__ == "__main__":
    execute_from_command_line(["manage.py", *sys.argv[1:]])
