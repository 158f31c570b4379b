"""Mail servers on loopback: a real one, and one that says and does what a test wants."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


@dataclass
class Received:
    """A message as a server took it."""

    sender: str
    recipients: list[str]
    content: bytes


@dataclass
class RealServer:
    """aiosmtpd, which keeps what it gets."""

    port: int
    received: list[Received] = field(default_factory=list)


class _AnyPort(Controller):
    """A controller that finds out which port it got, before it tries the port."""

    def _trigger_server(self) -> None:
        server: Any = self.server
        self.port = server.sockets[0].getsockname()[1]
        super()._trigger_server()  # type: ignore[no-untyped-call]


@contextmanager
def real_server() -> Iterator[RealServer]:
    server = RealServer(0)

    class Handler:
        async def handle_DATA(self, smtp: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
            content = envelope.content
            assert isinstance(content, bytes)
            server.received.append(Received(str(envelope.mail_from), list(envelope.rcpt_tos), content))
            return "250 2.0.0 kept"

    controller = _AnyPort(Handler(), hostname="127.0.0.1", port=0, server_hostname="mail.test")
    controller.start()
    try:
        server.port = controller.port
        yield server
    finally:
        controller.stop()


Script = Callable[["Talk", str, str], "str | None"]
"""
``script(talk, verb, line) -> reply`` for each command; ``None`` for the ordinary reply.

The verbs are CONNECT, EHLO, MAIL, RCPT, DATA, BODY, RSET, QUIT, AUTH and their like. A
reply of ``"drop"`` closes the connection, ``"silence"`` says nothing until the client
gives up, and ``"slow <seconds> <reply>"`` takes its time.
"""


@dataclass
class Talk:
    """One connection to the scripted server."""

    number: int
    messages: int = 0
    """Messages begun in it, this one included."""
    recipients: list[str] = field(default_factory=list)


@dataclass
class ScriptedServer:
    """A server that follows a script, and keeps what it accepted."""

    port: int
    script: Script
    pipelining: bool = False
    """Whether it says that it takes commands without waiting for their replies."""
    received: list[Received] = field(default_factory=list)
    sessions: int = 0
    commands: list[str] = field(default_factory=list)


_ORDINARY = {
    "CONNECT": "220 mail.test ESMTP",
    "EHLO": "250-mail.test\r\n250-8BITMIME\r\n250 ENHANCEDSTATUSCODES",
    "HELO": "250 mail.test",
    "DATA": "354 go on",
    "BODY": "250 2.0.0 kept",
    "QUIT": "221 bye",
}


@contextmanager
def scripted_server(script: Script, *, pipelining: bool = False) -> Iterator[ScriptedServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ScriptedServer(listener.getsockname()[1], script, pipelining)
    closing = threading.Event()
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server.sessions += 1
            thread = threading.Thread(target=_talk, args=(client, server, Talk(server.sessions), closing))
            thread.start()
            threads.append(thread)

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield server
    finally:
        closing.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for thread in threads:
            thread.join(5)


def _talk(client: socket.socket, server: ScriptedServer, talk: Talk, closing: threading.Event) -> None:
    client.settimeout(20)
    with client, client.makefile("rb") as stream, suppress(OSError):
        _Conversation(client, stream, server, talk, closing).run()


@dataclass
class _Conversation:
    client: socket.socket
    stream: Any
    server: ScriptedServer
    talk: Talk
    closing: threading.Event
    sender: str = ""

    def run(self) -> None:
        alive = bool(self.say("CONNECT"))
        while alive:
            line = self.stream.readline().decode("utf-8", "replace").strip()
            if not line:
                return
            verb = line.split(" ", 1)[0].upper()
            if verb == "MAIL":
                self.talk.messages += 1
                self.talk.recipients = []
                self.sender = ""
            reply = self.say(verb, line)
            if verb == "MAIL" and reply.startswith("250"):
                self.sender = _address(line)
            if verb == "RCPT" and reply.startswith("25"):
                self.talk.recipients.append(_address(line))
            if verb == "DATA" and reply.startswith("354"):
                body = _body(self.stream)
                if body is None:
                    return
                reply = self.say("BODY")
                if reply.startswith("250"):
                    self.server.received.append(Received(self.sender, list(self.talk.recipients), body))
            alive = bool(reply) and verb != "QUIT"

    def say(self, verb: str, line: str = "") -> str:
        """Answer a command; return the reply, or nothing once the connection is over."""
        self.server.commands.append(line or verb)
        reply = self.server.script(self.talk, verb, line) or self._ordinary(verb)
        if reply == "silence":
            self._wait_until_given_up()
            return ""
        if reply == "drop":
            return ""
        if reply.startswith("slow "):
            _, seconds, reply = reply.split(" ", 2)
            self.closing.wait(float(seconds))
        self.client.sendall(reply.encode() + b"\r\n")
        return reply

    def _ordinary(self, verb: str) -> str:
        if verb == "RCPT" and not self.sender:
            return "503 5.5.1 MAIL first"
        if verb == "DATA" and not self.talk.recipients:
            return "554 5.5.1 no valid recipients"
        if verb == "EHLO" and self.server.pipelining:
            return _ORDINARY[verb].replace("\r\n", "\r\n250-PIPELINING\r\n", 1)
        return _ORDINARY.get(verb, "250 2.0.0 ok")

    def _wait_until_given_up(self) -> None:
        while not self.closing.wait(0.02):
            with suppress(BlockingIOError):
                if self.client.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                    return


def _address(line: str) -> str:
    return line.partition("<")[2].partition(">")[0]


def _body(stream: Any) -> bytes | None:
    """Return a message's text, or ``None`` if it never ended."""
    lines = []
    while (line := stream.readline()) != b".\r\n":
        if not line:
            return None
        lines.append(line[1:] if line.startswith(b"..") else line)
    return b"".join(lines)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until another thread or process has brought something about."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.01)
