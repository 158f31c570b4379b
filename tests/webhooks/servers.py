"""Local HTTP and HTTPS servers that behave as a test says, and remember what they were sent."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DEADLINE_SECONDS = 10.0


@dataclass
class Request:
    """One request as it came."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    sni: str | None = None

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]

    def header(self, name: str) -> str | None:
        """Return the one value of a header."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) < 2, values
        return values[0] if values else None


Behaviour = Callable[[socket.socket, Request], None]


def answer(status: int | str = 200, *headers: str, body: bytes = b"ok", reason: str = "Whatever") -> Behaviour:
    """Return a behaviour: a whole answer, then the end of the connection."""

    def behave(connection: socket.socket, request: Request) -> None:
        lines = [f"HTTP/1.1 {status} {reason}", *headers, f"Content-Length: {len(body)}", "Connection: close"]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return behave


class Server:
    """A server on a loopback port; ``behaviour`` may be replaced at any time."""

    def __init__(
        self, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.behaviour = behaviour or answer()
        self.requests: list[Request] = []
        self.connections = 0
        self.ended = threading.Event()
        """Set when the test is over, for behaviours that go on for ever."""
        self._tls = tls
        self._names: dict[int, str | None] = {}
        self._changed = threading.Condition()
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256
        )
        self.port = int(self._listener.getsockname()[1])
        if tls is not None:
            tls.sni_callback = self._note_name
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/in"

    def wait_for(self, count: int, *, seconds: float = DEADLINE_SECONDS) -> list[Request]:
        """Wait until so many requests came, and return all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, seconds), len(self.requests)
            return list(self.requests)

    def _note_name(self, sock: Any, name: str | None, context: ssl.SSLContext) -> None:
        self._names[threading.get_ident()] = name

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        with suppress(OSError, ssl.SSLError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            request = self._read(connection)
            if request is not None:
                with self._changed:
                    self.requests.append(request)
                    self._changed.notify_all()
                self.behaviour(connection, request)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _read(self, connection: socket.socket) -> Request | None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(65_536)
            if not more:
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (each.partition(":") for each in rest)]
        length = int(next((value for name, value in headers if name.lower() == "content-length"), "0"))
        while len(body) < length:
            body += connection.recv(65_536)
        return Request(line, headers, body, self._names.pop(threading.get_ident(), None))


@contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port that completes connections and never says or reads anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield int(listener.getsockname()[1])


class Authority:
    """A certificate authority for one run of the tests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        builder = self._builder(self._name, self._key.public_key())
        self._certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=True,
                    crl_sign=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = directory / "ca.pem"
        self.bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def context(self, *names: str) -> ssl.SSLContext:
        """Return a server's context with a certificate for these names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName(
            [x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name) for name in names]
        )
        certificate = (
            self._builder(subject, key.public_key())
            .add_extension(alternatives, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        path = self._directory / f"{names[0]}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context
