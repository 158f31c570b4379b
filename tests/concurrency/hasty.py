"""``manage.py`` for a relay with little patience: it looks after its LISTEN connection every half second, where
another takes 15, and gives a statement one second, where another gives it 30.
"""

from __future__ import annotations

import sys

from django.core.management import execute_from_command_line

from django_outbox import wake
from django_outbox.relay import deadlines

# Names that a type checker takes for constants.
vars(deadlines).update(STATEMENT_SECONDS=1.0, TICK_SECONDS=0.1)
vars(wake).update(PING_SECONDS=0.5, PING_DEADLINE_SECONDS=0.5, RECONNECT_MIN_SECONDS=0.1, RECONNECT_MAX_SECONDS=0.5)

if __name__ == "__main__":
    execute_from_command_line(["manage.py", *sys.argv[1:]])
