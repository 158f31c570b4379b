"""The loopback server to which the handlers of ``tests.concurrency.field`` report, from whatever process."""

from __future__ import annotations

import json
import socketserver
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from tests.concurrency.helpers import DEADLINE_SECONDS


class Stage:
    """Notes the lines that handlers tell, in order; `release` lets go those that hold."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pids: dict[str, list[int]] = {}
        self._changed = threading.Condition()
        self._released: set[str] = set()
        stage = self

        class Actor(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                raw = self.rfile.readline()
                if not raw:
                    return
                told = json.loads(raw)
                stage._note(told["line"], told["pid"])
                if told["wait"]:
                    stage._hold(told["line"])
                try:
                    self.wfile.write(b".")
                except OSError:
                    return  # its process was killed

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Actor)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._released.add("*")
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def _note(self, line: str, pid: int) -> None:
        with self._changed:
            self.lines.append(line)
            self.pids.setdefault(line, []).append(pid)
            self._changed.notify_all()

    def _hold(self, line: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: {line, "*"} & self._released, 60)

    def release(self, word: str) -> None:
        """Let every handler go on that holds, or will hold, with this word."""
        with self._changed:
            self._released.add(f"hold {word}")
            self._changed.notify_all()

    def wait_for(self, line: str, *, count: int = 1, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until the line was told so many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lines.count(line) >= count, seconds), (
                f"{line!r} was told {self.lines.count(line)} times within {seconds:g} s: {self.lines}"
            )

    def counts(self, word: str = "start") -> Counter[str]:
        """Return how often each line with this first word was told, without the word."""
        with self._changed:
            return Counter(line.removeprefix(f"{word} ") for line in self.lines if line.startswith(f"{word} "))
