"""A child process for handlers that have killed a process before."""

from __future__ import annotations

import multiprocessing
import signal
from typing import TYPE_CHECKING, Final

from django_outbox import events
from django_outbox import lease as engine
from django_outbox.relay.connections import look_after_connections, tidy_connections

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_SECONDS: Final = 60.0
"""How long the interpreter and the project may take to start; it is not the handler's time."""
COROUTINE_GRACE_SECONDS: Final = 1.0


class Child:
    """A spawned process that runs one handler at a time for the isolator."""

    def __init__(self, using: str) -> None:
        # Spawned, never forked: a fork would share this process's sockets and locks.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_child_main, args=(far_end, using), name="outbox-child", daemon=True)
        self._process.start()
        far_end.close()

    def run(self, lease: engine.Lease, handler_name: str, limit: float) -> events.Result | None:
        """Run a handler there and return how it ended; ``None`` when the process died of it."""
        try:
            self._pipe.send((lease, handler_name, limit))
            if not self._pipe.poll(START_SECONDS):
                # The handler was not started, so it is not to blame.
                self.kill()
                return events.Result(f"the child process did not start within {START_SECONDS:g} s")
            self._pipe.recv()
            if not self._pipe.poll(limit + COROUTINE_GRACE_SECONDS):
                self._process.kill()
                self._process.join()
                return events.Result(f"the handler took longer than its {limit:g} s and its process was ended")
            result: events.Result = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return result

    def kill(self) -> None:
        """End the process at once, from any thread."""
        self._process.kill()

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _child_main(pipe: Connection, using: str) -> None:
    # A Ctrl-C on the terminal, or a service manager that signals the whole group, is the parent's
    # to answer. Not SIG_IGN, which the handler's own child processes would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    import django  # noqa: PLC0415

    django.setup()
    look_after_connections()
    while True:
        try:
            lease, handler_name, limit = pipe.recv()
        except EOFError:
            return
        run = events.EventRun(lease, using=using)
        handler = events.registry.resolve(run.type, handler_name)
        pipe.send("started")
        result = events.Result(f"the child process does not know the handler {handler_name!r}")
        if handler is not None:
            result = run.invoke(handler, timeout=limit)
            left_behind = tidy_connections()
            if left_behind and result.ok:
                result = events.Result(left_behind)
        pipe.send(result)
