"""
The transport: one request to addresses that were judged before, bounded in time and in bytes.

`requests` builds and sends it, through connections of our own:

- They dial the given addresses and nothing else. URL, Host header, SNI and the check of
  the certificate stay on the host's name.
- Every read and write is given the time that is left of one deadline. A time limit per
  read is no defence: a server that sends a byte now and then never exceeds it.
- There is no session: no cookies, no redirects, no proxies or passwords from the
  environment, no connection that outlives its request.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException, RemoteDisconnected
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import certifi
import requests
from requests.adapters import HTTPAdapter
from urllib3 import BaseHTTPResponse
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.util.ssl_ import create_urllib3_context

__all__ = ["RESPONSE_LIMIT", "Answer", "send"]

RESPONSE_LIMIT: Final = 16_384
"""Bytes of a response's body that are read, as they come: nothing is decompressed."""

BODY_SECONDS: Final = 5.0
"""How long a body is read at most: the status decides, the rest is for people to look at."""

CONNECT_SECONDS: Final = 10.0
ADDRESSES_TRIED: Final = 3

_STOPPED_READING: Final = (errno.EPIPE, errno.ECONNRESET, errno.EPROTOTYPE)

_HEADER_BYTES: Final = 256 * 1_024
"""What may arrive before the headers are complete, interim responses included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    What became of a request.

    ``code`` is empty when a status and headers arrived; else ``timeout``, ``tls``,
    ``connection``, ``protocol`` (an answer that is not HTTP) or ``request`` (it could not
    be sent as it is), with ``error`` in words.
    """

    status: int | None = None
    code: str = ""
    error: str = ""
    retry_after: str = ""
    location: str = ""
    body: bytes = b""
    seconds: float = 0.0
    address: str = ""


class _Call:
    """The bounds of the request that this thread makes."""

    def __init__(self, addresses: Sequence[str], deadline: float, ca_bundle: str | None) -> None:
        self.addresses = tuple(addresses[:ADDRESSES_TRIED])
        self.deadline = deadline
        self.bytes_left = _HEADER_BYTES
        self.address = ""
        self.ca_bundle = ca_bundle
        self.connection: _Connection | None = None
        """For whoever made the call to close."""

    def left(self) -> float:
        """Return the seconds that are left; raise when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit of the request was reached")
        return left

    def took(self, count: int) -> None:
        """Count bytes that arrived."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise _TooMuch("the answer's headers are too long")


class _TooMuch(HTTPException):
    """More arrived than an answer may hold."""


# A connection is made, used and closed in one thread. TLS makes its socket inside the
# handshake, where nothing can be handed to it: it finds its bounds here.
_local = threading.local()


def _is_elsewhere(_: logging.LogRecord) -> bool:
    return getattr(_local, "call", None) is None


# It warns of an answer whose headers cannot be parsed, with the URL, whose path is often a password.
logging.getLogger("urllib3.connection").addFilter(_is_elsewhere)


def _call() -> _Call:
    call: _Call = _local.call
    return call


class _Socket(socket.socket):
    """A socket whose every operation ends at the call's deadline."""

    def recv_into(self, *args: Any) -> int:
        self.settimeout(_call().left())
        count = super().recv_into(*args)
        _call().took(count)
        return count

    def recv(self, *args: Any) -> bytes:
        self.settimeout(_call().left())
        data = super().recv(*args)
        _call().took(len(data))
        return data

    def send(self, *args: Any) -> int:
        self.settimeout(_call().left())
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        self.settimeout(_call().left())
        super().sendall(*args)


class _TLSSocket(ssl.SSLSocket):
    """The same with TLS; OpenSSL keeps to the socket's time limit over a whole handshake, read or write."""

    def do_handshake(self, *args: Any, **kwargs: Any) -> None:
        self.settimeout(_call().left())
        super().do_handshake(*args, **kwargs)

    def recv_into(self, *args: Any) -> int:
        self.settimeout(_call().left())
        count = super().recv_into(*args)
        _call().took(count)
        return count

    def recv(self, *args: Any) -> bytes:
        self.settimeout(_call().left())
        data = super().recv(*args)
        _call().took(len(data))
        return data

    def send(self, *args: Any) -> int:
        self.settimeout(_call().left())
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        self.settimeout(_call().left())
        super().sendall(*args)


def _dial(port: int) -> socket.socket:
    """Connect to the first of the call's addresses that answers."""
    call = _call()
    error: OSError = OSError("there is no address to connect to")
    for address in call.addresses:
        sock = _Socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(CONNECT_SECONDS, call.left()))
            sock.connect((address, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _require_peer(sock, address)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            call.address = address
            return sock
    raise error


def _require_peer(sock: socket.socket, address: str) -> None:
    peer = sock.getpeername()[0]
    # One address may be written in several ways.
    if peer != address and ip_address(peer) != ip_address(address):
        raise OSError("the connection leads to another address")


class _Connection(HTTPConnection):
    """
    A connection to one of the call's addresses, on which head and body of a request leave in one write.

    Two writes would be two packets, two times that the thread waits for its turn, and a
    receiver that is woken twice.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsent = bytearray()

    def _new_conn(self) -> socket.socket:
        return _dial(int(self.port))

    def send(self, data: Any) -> None:
        """Keep it until `flush`."""
        self._unsent += data

    def flush(self) -> None:
        """Send what was kept."""
        super().send(self._unsent)


class _TLSConnection(_Connection, HTTPSConnection):
    pass


class _Exchange:
    """What requests takes for a pool of connections: it makes one, for one request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        call = _call()
        host, timeout = str(parts.hostname), call.left()
        self._connection: _Connection
        if parts.scheme == "https":
            context = _tls_context(call.ca_bundle)
            self._connection = _TLSConnection(host, parts.port or 443, timeout=timeout, ssl_context=context)
        else:
            self._connection = _Connection(host, parts.port or 80, timeout=timeout)
        call.connection = self._connection

    def urlopen(
        self,
        *,
        method: str,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        preload_content: bool,
        decode_content: bool,
        **_: Any,
    ) -> BaseHTTPResponse:
        """Send a request, and return the answer once its headers are there; what goes wrong is raised as it is."""
        connection = self._connection
        connection.connect()
        connection.request(
            method, url, body=body, headers=headers, preload_content=preload_content, decode_content=decode_content
        )
        try:
            connection.flush()
        except OSError as error:
            # It may have answered before it had read everything.
            if error.errno not in _STOPPED_READING:
                raise
        return connection.getresponse()


class _Adapter(HTTPAdapter):
    """The adapter of all requests, which keeps nothing of any: each has a connection of its own."""

    def __init__(self) -> None:
        super().__init__(max_retries=0)

    def init_poolmanager(self, *_: Any, **__: Any) -> None:
        """Do without: nothing is pooled."""

    def get_connection_with_tls_context(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> Any:
        return _Exchange(str(request.url))

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """Leave it to the context, which verifies; requests would load the authorities anew each time."""

    def build_response(self, request: requests.PreparedRequest, answer: Any) -> requests.Response:
        """Return the answer without cookies, encoding or history, which nobody reads."""
        response = requests.Response()
        response.status_code = answer.status
        response.headers = answer.headers
        response.raw = answer
        response.request = request
        return response


_adapter: Final = _Adapter()


@lru_cache(maxsize=4)
def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Return a context that verifies certificates and host names; loading the authorities takes milliseconds."""
    context = create_urllib3_context()
    context.load_verify_locations(cafile=ca_bundle or certifi.where())
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = True
    context.sslsocket_class = _TLSSocket
    return context


def send(
    url: str,
    *,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    timeout_seconds: float,
    ca_bundle: str | None = None,
) -> Answer:
    """
    POST the bytes to one of at most three ``addresses`` under the name in ``url``, and return what became of it.

    All of it takes at most ``timeout_seconds``, from connecting to the end of what is
    read of the answer. A redirect is an answer like any other. Nothing is tried again,
    and nothing that goes wrong on the way is raised.
    """
    started = time.monotonic()
    call = _Call(addresses, started + timeout_seconds, ca_bundle)
    _local.call = call
    try:
        response = _adapter.send(_request(url, headers, body), stream=True, timeout=timeout_seconds)
        read = _read(response.raw, call)
    # ValueError: what http.client cannot encode into a header or a request line.
    except (requests.RequestException, HTTPError, HTTPException, OSError, ValueError) as error:
        code, words = _fault(error)
        return Answer(code=code, error=words, seconds=time.monotonic() - started, address=call.address)
    finally:
        if call.connection is not None:
            call.connection.close()
        _local.call = None
    status = response.status_code
    protocol = not 200 <= status < 600
    return Answer(
        status=status,
        code="protocol" if protocol else "",
        error=f"HTTP status {status} ends no request" if protocol else "",
        retry_after=_header(response, "Retry-After"),
        location=_header(response, "Location"),
        body=read,
        seconds=time.monotonic() - started,
        address=call.address,
    )


def _request(url: str, headers: Mapping[str, str], body: bytes) -> requests.PreparedRequest:
    """Return a POST as requests prepares it; without cookies and passwords, so they need no looking for."""
    request = requests.PreparedRequest()
    request.method = "POST"
    request.url = _prepared_url(url)
    request.prepare_headers({**headers, "Content-Length": str(len(body))})
    request.body = body
    return request


@lru_cache(maxsize=1_024)
def _prepared_url(url: str) -> str:
    """Return a URL as requests sends it; an endpoint's is always the same."""
    request = requests.PreparedRequest()
    request.prepare_url(url, None)
    prepared = str(request.url)
    if urlsplit(prepared).hostname != urlsplit(url).hostname:
        raise ValueError("the URL reads differently when it is sent")
    return prepared


def _header(response: requests.Response, name: str) -> str:
    return str(response.headers.get(name, ""))[:2_048]


def _read(raw: Any, call: _Call) -> bytes:
    """Return the first bytes of a body. That it breaks off, stalls or never ends changes nothing: the status stands."""
    call.deadline = min(call.deadline, time.monotonic() + BODY_SECONDS)
    call.bytes_left = 4 * RESPONSE_LIMIT
    read = bytearray()
    try:
        # What is there, not what was asked for: a stalled body would take the bytes before it along.
        while len(read) < RESPONSE_LIMIT and (data := raw.read1(RESPONSE_LIMIT - len(read), decode_content=False)):
            read += data
    except (HTTPError, HTTPException, OSError, ValueError):
        pass
    finally:
        raw.close()
    return bytes(read[:RESPONSE_LIMIT])


def _fault(error: BaseException) -> tuple[str, str]:
    """Return the code and the words for what went wrong; the libraries' own texts quote the URL."""
    chain = list(_chain(error))
    for kind, code in (
        (TimeoutError, "timeout"),
        (ssl.SSLError, "tls"),
        (RemoteDisconnected, "connection"),
        (HTTPException, "protocol"),
        # Of an answer; one of a request is requests' own, of the same name.
        (InvalidHeader, "protocol"),
        (OSError, "connection"),
    ):
        # The innermost one knows best; requests' own errors are OSErrors too.
        for each in reversed(chain):
            if isinstance(each, kind) and not isinstance(each, requests.RequestException):
                return code, _words(each)
    return "request", f"the request cannot be sent: {type(chain[-1]).__name__}"


def _chain(error: BaseException, *, depth: int = 12) -> Iterator[BaseException]:
    yield error
    if depth:
        inner = [error.__cause__, error.__context__, getattr(error, "reason", None), *error.args]
        for each in dict.fromkeys(one for one in inner if isinstance(one, BaseException)):
            yield from _chain(each, depth=depth - 1)


def _words(error: BaseException) -> str:
    name = type(error).__name__
    match error:
        case TimeoutError():
            words = "the time limit was reached"
        case ssl.SSLCertVerificationError():
            words = f"the certificate does not verify: {error.verify_message}"
        case ssl.SSLError():
            words = f"TLS failed: {error.reason or name}"
        case RemoteDisconnected():
            words = "the server closed the connection without an answer"
        case HTTPException() | InvalidHeader():
            words = f"the answer is not HTTP: {name}"
        case _:
            words = f"the connection failed: {getattr(error, 'strerror', None) or name}"
    return words
