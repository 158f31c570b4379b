"""PgBouncer before the test's PostgreSQL."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from tests.concurrency.helpers import eventually

REQUIRED = "TEST_REQUIRES_PGBOUNCER"
"""Set where the tests must not be skipped for want of it."""


def find_pgbouncer() -> str:
    """Return the program's path; skip the test where there is none, but fail it where there must be one."""
    # Debian puts it where only root looks.
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"pgbouncer is not installed, and {REQUIRED} is set")
        pytest.skip("needs pgbouncer (apt-get install pgbouncer)")
    return program


@contextmanager
def pgbouncer(database: dict[str, Any], directory: Path, *, mode: Literal["transaction", "session"]) -> Iterator[str]:
    """Run one with three server connections at most (session mode: 20); yield its URL, without a database."""
    program = find_pgbouncer()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    users = directory / "users.txt"
    users.write_text(f'"{database["USER"]}" "{database["PASSWORD"]}"\n')
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"""
        [databases]
        * = host={database["HOST"] or "127.0.0.1"} port={database["PORT"] or 5432}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = trust
        auth_file = {users}
        pool_mode = {mode}
        default_pool_size = {3 if mode == "transaction" else 20}
        """.replace("        ", "")
    )
    command = [program, str(configuration)]
    if sys.platform != "win32" and os.geteuid() == 0:
        # It refuses to run as root. The server's account gets through to the server's socket.
        host = Path(database["HOST"] or "/")
        user = host.owner() if host.is_absolute() and host.owner() != "root" else "nobody"
        for path in (directory, users, configuration):
            shutil.chown(path, user)
        command = [program, "-u", user, str(configuration)]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"postgresql://{database['USER']}@127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            psycopg.connect(f"{url}/{database['NAME']}", connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        eventually(answers)
        yield f"{url}/postgres"
    finally:
        process.terminate()
        process.wait(10)
