"""A TCP proxy on loopback before the test's PostgreSQL, which falls silent or cuts when it is told to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from psycopg.conninfo import make_conninfo


class Proxy:
    """
    Forwards every connection to a server on a Unix socket or on a TCP port.

    `freeze` is what a failover behind a balancer or a dropped NAT entry looks like to the
    client: nothing comes any more, nothing is closed, and its kernel believes that all is
    well. Connections made meanwhile are accepted, and answered when it goes on.
    """

    def __init__(self, database: dict[str, Any]) -> None:
        self._database = database
        self._gates = [threading.Event()]
        """What data passes through; new connections get the last one."""
        self.thaw()
        self._lock = threading.Condition()
        self._open: list[socket.socket] = []
        self.accepted = 0
        """How many connections were made to it so far."""
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._listener.close()
        self.cut()
        self.thaw()

    @property
    def url(self) -> str:
        """The server's URL by way of the proxy, without a database, as `TEST_DATABASE_URL` names servers."""
        user = self._database["USER"]
        password = f":{self._database['PASSWORD']}" if self._database["PASSWORD"] else ""
        return f"postgresql://{user}{password}@127.0.0.1:{self.port}/postgres"

    @property
    def dsn(self) -> str:
        """A DSN of the test's database by way of the proxy."""
        return make_conninfo(
            dbname=self._database["NAME"],
            host="127.0.0.1",
            port=self.port,
            user=self._database["USER"],
            password=self._database["PASSWORD"] or None,
        )

    def freeze(self) -> None:
        """Forward nothing more, on any connection, without closing one."""
        for gate in self._gates:
            gate.clear()

    def freeze_open_ones(self) -> None:
        """Forward nothing more on the connections that there are; those made from now on work."""
        self.freeze()
        self._gates.append(threading.Event())
        self._gates[-1].set()

    def thaw(self) -> None:
        """Go on, with what was held back first."""
        for gate in self._gates:
            gate.set()

    def cut(self) -> None:
        """Close every connection there is."""
        with self._lock:
            opened, self._open = self._open, []
        for each in opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._connect()
        except OSError:
            client.close()
            return
        with self._lock:
            self._open += [client, server]
        gate = self._gates[-1]
        back = threading.Thread(target=self._pump, args=(server, client, gate), daemon=True)
        back.start()
        self._pump(client, server, gate)
        back.join()
        client.close()
        server.close()

    def _connect(self) -> socket.socket:
        host, port = self._database["HOST"], int(self._database["PORT"] or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host or "127.0.0.1", port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _pump(self, source: socket.socket, target: socket.socket, gate: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                gate.wait()
                target.sendall(data)
        # Half a connection serves nobody here: its other half ends too.
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
