"""
The relay: claims due rows, runs their handlers in threads, settles what they became.

Who does what in a relay process:

- the calling thread claims, and hands rows to the handler threads;
- handler threads run handlers, one row each at a time;
- the settler writes outcomes in batches;
- the keeper renews leases and watches the time limits, for all threads at once;
- the watcher (``wake.py``) says when there may be something to claim;
- the isolator runs, in a child process, rows that have killed a process before.

Each has a database connection of its own, and none of them holds a transaction or a
lock while a handler runs. With ``--processes`` each relay is the child of a supervisor,
which has no database connection at all.
"""

from __future__ import annotations

from django_outbox.relay.loop import EXIT_FAILED, EXIT_RECYCLE, Mode, Relay
from django_outbox.relay.supervisor import Supervisor, ensure_logging, tune_collector

__all__ = ["EXIT_FAILED", "EXIT_RECYCLE", "Mode", "Relay", "Supervisor", "ensure_logging", "tune_collector"]
