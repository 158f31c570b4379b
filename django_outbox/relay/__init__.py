"""
The relay: claims due rows, runs their handlers in threads, settles what they became.

Who does what in a relay process:

- the calling thread claims, queue by queue, and hands rows to the handler threads (`loop`);
- handler threads, so many for each queue, take rows through their steps (`lane`);
- the settler writes outcomes in batches (`flights`);
- the keeper renews leases, and watches the time limits, for all threads at once (`keeper`);
- the watcher (``wake.py``) says when there may be something to claim;
- the isolator runs, in a child process, rows that have killed a process before (`isolator`).

Each has a database connection of its own, and none of them holds a transaction or a
lock while a handler runs. With ``--processes`` each relay is the child of a supervisor,
which has no database connection at all (`supervisor`).
"""

from __future__ import annotations

from django_outbox.relay.loop import EXIT_FAILED, EXIT_RECYCLE, Mode, Relay
from django_outbox.relay.queues import WORK, chosen
from django_outbox.relay.supervisor import Supervisor, ensure_logging, tune_collector

__all__ = [
    "EXIT_FAILED",
    "EXIT_RECYCLE",
    "WORK",
    "Mode",
    "Relay",
    "Supervisor",
    "chosen",
    "ensure_logging",
    "tune_collector",
]
