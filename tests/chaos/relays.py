"""The relays of a chaos run: started, hit, and started again as a service manager would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent.parent
RESTART_SECONDS = 0.3

_STARTED = re.compile(r"relay started process=\d+ pid=(\d+)")
_UNASKED = re.compile(r"relay ended unasked process=\d+ pid=(\d+) by='(.*)'")
_LOST = re.compile(r"(?:lease lost|outcome not written), the row is another relay's.* id=([0-9a-f-]{36})")


class Place:
    """A place for one `run_outbox`: who runs there now, and what all that ran there have said."""

    def __init__(self, name: str, *arguments: str, directory: Path) -> None:
        self.name = name
        self.supervises = "--processes" in arguments
        self.log = directory / f"{name}.log"
        self.hit: set[int] = set()
        """The processes that were killed here: nobody else may end before the end."""
        self.problems: list[str] = []
        self.starts = 0
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0
        self._start_at = 0.0
        self._file: IO[bytes] = self.log.open("ab")

    def tend(self) -> None:
        """Start a relay if none runs; note one that ended and was not hit."""
        if (process := self._process) is not None:
            if (code := process.poll()) is None:
                return
            self._process = None
            self._start_at = time.monotonic() + RESTART_SECONDS
            if process.pid not in self.hit:
                self.problems.append(f"the relay {self.name} (pid {process.pid}) ended by itself with code {code}")
        if time.monotonic() >= self._start_at:
            self._began = self.log.stat().st_size
            self.starts += 1
            self._process = subprocess.Popen(
                [sys.executable, "-m", "django", "run_outbox", *self._arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PGAPPNAME": "chaos relay"},
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int | None:
        """The process that was started here, if it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def relays(self) -> list[int]:
        """The processes here that deliver: under a supervisor, those that it started and that still are."""
        if self.pid is None:
            return []
        if not self.supervises:
            return [self.pid]
        said = self.log.read_bytes()[self._began :].decode(errors="replace")
        ended = {int(pid) for pid, _ in _UNASKED.findall(said)}
        return [pid for pid in map(int, _STARTED.findall(said)) if pid not in ended and is_there(pid)]

    def stop(self) -> None:
        """Ask it to stop."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)

    def end(self, *, within: float) -> None:
        """Wait for its end after `stop`; a relay that takes longer or fails is a problem."""
        if self._process is None:
            return
        try:
            code = self._process.wait(within)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the relay {self.name} did not stop within {within:g} s after SIGTERM")
        else:
            if code != 0 and self._process.pid not in self.hit:
                self.problems.append(f"the relay {self.name} was asked to stop and ended with code {code}")

    def kill(self) -> None:
        """Leave nothing running, whatever happened."""
        for pid in {*self.relays, self.pid} - {None}:
            with suppress(ProcessLookupError):
                os.kill(int(pid or 0), signal.SIGCONT)
                os.kill(int(pid or 0), signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._file.close()

    def read_log(self) -> dict[str, int]:
        """Look through all that was said: note relays that died and were not hit; count leases lost, by event."""
        said = self.log.read_text(errors="replace")
        for pid, how in _UNASKED.findall(said):
            if int(pid) not in self.hit:
                self.problems.append(f"a relay under the supervisor {self.name} (pid {pid}) died by itself: {how}")
        lost: dict[str, int] = {}
        for event in _LOST.findall(said):
            lost[event] = lost.get(event, 0) + 1
        return lost


def is_there(pid: int) -> bool:
    """Return whether a process runs, or is stopped; one that ended and is not yet buried does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True
