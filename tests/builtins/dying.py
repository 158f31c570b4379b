"""
``python -m tests.builtins.dying HANDLER``: run a built-in handler, and kill it at each of its statements in turn.

One process is forked for each place to die at: before the first statement, before the
second, …, before the commit; then it runs to its end. Each place has an event of its own,
which is run again, twice, by processes that nothing kills. Prints the number of places.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final
from uuid import UUID, uuid5

import django
from django.test import override_settings

SPACE: Final = UUID("3f0e5d5c-4f0c-4d8e-8a68-0d3f3f2b8f10")
TYPES: Final = {"operator-alert": "outbox.event.dead"}


def event(handler: str, place: int) -> Any:
    """Return the event that is run for a place."""
    from tests.builtins.helpers import event_of

    id_ = uuid5(SPACE, f"{handler}:{place}")
    return event_of(id=id_, type=TYPES.get(handler, "order.paid"), payload={"id": str(id_), "error": "down"})


def run(handler: str, place: int, *, die: bool) -> int:
    """Run the handler in a forked process; return its wait status."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    try:
        from django.db import connection

        from django_outbox import handlers, notifications

        @notifications.notifies("order.paid")
        def two(event: Any) -> list[Any]:
            return [notifications.NewNotification(name, "paid") for name in ("1", "2")]

        left = place

        def count(execute: Any, *arguments: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return execute(*arguments)

        if die:
            connection.ensure_connection()
            commit = connection.commit
            connection.execute_wrappers.append(count)
            connection.commit = lambda: count(commit)  # type: ignore[method-assign]
        handlers._BUILTIN[handler].function(event(handler, place))
        connection.close()
    except BaseException:  # noqa: BLE001  a forked process must not run what follows in the parent
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Die everywhere."""
    (handler,) = sys.argv[1:]
    django.setup()
    override_settings(OUTBOX={"ALERT_EMAILS": ["ops@example.com"]}).enable()
    place = 0
    while (status := run(handler, place, die=True)) != 0:
        if status != signal.SIGKILL:
            raise RuntimeError(f"it ended with status {status}")
        for _ in range(2):
            if run(handler, place, die=False):
                raise RuntimeError("it cannot be run again")
        place += 1
    print(place)  # noqa: T201


if __name__ == "__main__":
    main()
