"""The transport against real local servers, well-behaved, broken and hostile."""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from django_outbox.webhooks.transport import RESPONSE_LIMIT, Answer, send
from tests.webhooks.cases import CASES, rows
from tests.webhooks.servers import Authority, Behaviour, Request, Server, answer, silent_port

BODY = '{"n":"Zoë 🎉","x":1.0}'.encode()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def post(port: int, **options: Any) -> Answer:
    given = {
        "url": f"http://hook.test:{port}/in?a=b",
        "addresses": ["127.0.0.1"],
        "headers": {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "django-outbox"},
        "body": BODY,
        "timeout_seconds": 5.0,
        **options,
    }
    return send(given.pop("url"), **given)


def raw(*parts: bytes) -> Behaviour:
    """Return a behaviour: these bytes, then the end of the connection."""

    def behave(connection: socket.socket, request: Request) -> None:
        for part in parts:
            connection.sendall(part)

    return behave


def dripping(server: Server, head: bytes, drop: bytes = b"x") -> Behaviour:
    """Return a behaviour: the head at once, then a few bytes every 20 ms for ever."""

    def behave(connection: socket.socket, request: Request) -> None:
        connection.sendall(head)
        while not server.ended.wait(0.02):
            connection.sendall(drop)

    return behave


def flooding(head: bytes, block: bytes) -> Behaviour:
    """Return a behaviour: the head, then the same block as fast as it is taken, for ever."""

    def behave(connection: socket.socket, request: Request) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(block)

    return behave


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


# --- what arrives


def test_the_bytes_arrive_as_they_are_under_the_name_of_the_url() -> None:
    with Server() as server:
        got = post(server.port)
        (request,) = server.requests
    assert (got.status, got.code, got.body, got.address) == (200, "", b"ok", "127.0.0.1")
    assert request.body == BODY
    assert request.line == "POST /in?a=b HTTP/1.1"
    assert sorted(name for name, _ in request.headers) == [
        "Accept-Encoding",
        "Content-Length",
        "Content-Type",
        "Host",
        "User-Agent",
    ]
    assert request.header("Host") == f"hook.test:{server.port}"


def test_tls_is_verified_by_name_while_the_address_is_pinned(authority: Authority) -> None:
    """The certificate, SNI and Host follow the name; the connection follows the address that was judged."""
    with Server(tls=authority.context("hook.test")) as server:
        got = post(server.port, url=f"https://hook.test:{server.port}/in", ca_bundle=str(authority.bundle))
        assert (got.status, got.code, got.error) == (200, "", "")
        (request,) = server.requests
        assert request.sni == "hook.test"
        assert request.header("Host") == f"hook.test:{server.port}"
        assert request.body == BODY
        other = post(server.port, url=f"https://other.test:{server.port}/in", ca_bundle=str(authority.bundle))
        assert (other.status, other.code) == (None, "tls")
        unknown = post(server.port, url=f"https://hook.test:{server.port}/in")
        assert (unknown.status, unknown.code) == (None, "tls")
        assert len(server.requests) == 1


def test_an_address_in_the_url_is_verified_too(authority: Authority) -> None:
    with Server(tls=authority.context("127.0.0.1")) as server:
        got = post(server.port, url=f"https://127.0.0.1:{server.port}/in", ca_bundle=str(authority.bundle))
    assert got.status == 200


def test_an_ipv6_address_is_dialled() -> None:
    try:
        server = Server(host="::1") if socket.has_ipv6 else None
    except OSError:
        server = None
    if server is None:
        pytest.skip("this computer has no IPv6")
    with server:
        got = post(server.port, url=f"http://[::1]:{server.port}/in", addresses=["::1"])
        assert (got.status, got.error) == (200, "")
        assert server.requests[0].header("Host") == f"[::1]:{server.port}"


def test_the_next_address_is_tried_and_no_more_than_three() -> None:
    with Server() as server:
        got = post(server.port, addresses=["127.0.0.2", "127.0.0.1"])
        assert (got.status, got.address) == (200, "127.0.0.1")
        bad = [f"127.0.0.{number}" for number in (2, 3, 4)]
        got = post(server.port, addresses=[*bad, "127.0.0.1"])
        assert (got.status, got.code, got.address) == (None, "connection", "")
        assert server.connections == 1


def test_neither_proxies_nor_passwords_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "netrc").write_text("machine hook.test login me password s3cret\n")
    with Server() as server, Server() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere")
        assert post(server.port).status == 200
        assert proxy.connections == 0
        assert server.requests[0].header("Authorization") is None


def test_head_and_body_arrive_in_one_piece() -> None:
    pieces: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                pieces.append(sock.recv(65_536))
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert post(listener.getsockname()[1]).status == 200
        thread.join(10)
    assert pieces[0].startswith(b"POST /in?a=b HTTP/1.1\r\n")
    assert pieces[0].endswith(b"\r\n\r\n" + BODY)


def test_an_answer_that_comes_before_the_request_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            sock.sendall(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            # A close with bytes unread would reset the connection, and might take the answer along.
            while sock.recv(65_536):
                pass
            sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert post(listener.getsockname()[1], body=b"x" * 4_000_000).status == 413
        thread.join(10)


def test_every_request_has_a_connection_of_its_own() -> None:
    with Server(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok")) as server:
        assert post(server.port).status == post(server.port).status == 200
        assert server.connections == 2


# --- the table of hostile servers


def hostile(server: Server) -> dict[str, Behaviour]:
    return {
        "one header byte every 0.2 s": dripping(server, b"HTTP/1.1 200 OK\r\nX-A: "),
        "one body byte every 0.2 s after 200": dripping(server, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
        "endless 100 Continue": dripping(server, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "accepts, never answers": dripping(server, b"", b""),
        "gzip of 20 MB zeros": answer(
            200, "Content-Encoding: gzip", body=gzip.compress(bytes(20 * 2**20), compresslevel=1)
        ),
        "200 + Content-Length 100, 3 bytes sent": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"),
        "301 to /b": answer(301, "Location: /b"),
        "101 or 199 or 600 status": answer(600),
        "non-HTTP bytes": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
        "closes before reply": raw(),
        "Set-Cookie": answer(200, "Set-Cookie: a=b; Path=/"),
    }


@pytest.mark.parametrize("case", rows(CASES["transport"]))
def test_a_hostile_server_cannot_hurt(case: dict[str, Any], authority: Authority) -> None:
    started = time.monotonic()
    if case["server"] == "certificate for another name":
        with Server(tls=authority.context("other.test")) as server:
            got = post(server.port, url=f"https://hook.test:{server.port}/", ca_bundle=str(authority.bundle))
    else:
        with Server() as server:
            server.behaviour = hostile(server)[case["server"]]
            got = post(server.port, timeout_seconds=0.4)
            assert len(server.requests) == 1
            if case["server"] == "Set-Cookie":
                assert post(server.port).status == 200
                assert all(request.header("Cookie") is None for request in server.requests)
    assert time.monotonic() - started < 3
    verdict = case["verdict"].partition(",")[0]
    if verdict.startswith("success") or verdict == "cookie never sent anywhere":
        assert (got.status, got.code) == (200, "")
        assert len(got.body) <= RESPONSE_LIMIT
    elif verdict == "fail http_301":
        assert (got.status, got.code, got.location) == (301, "", "/b")
    else:
        assert got.code == verdict.split()[1]
        assert got.error


def test_an_answer_of_two_lengths_is_a_fault_of_the_answer_and_not_of_the_request() -> None:
    with Server() as server:
        server.behaviour = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\nhello")
        got = post(server.port)
    assert (got.status, got.code) == (None, "protocol")
    assert "answer" in got.error


@pytest.mark.parametrize("status", [101, 199, 600, 999])
def test_a_status_that_ends_no_request_is_a_broken_protocol(status: int) -> None:
    with Server(answer(status)) as server:
        assert post(server.port, timeout_seconds=1).code == "protocol"


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 200 + b"\r\n"), "protocol"),
        (raw(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n"), "protocol"),
        (flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000), "protocol"),
        (flooding(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1_000), "protocol"),
        (raw(b"HTTP/1.1 abc OK\r\n\r\n"), "protocol"),
        (raw(b"\x00" * 100_000), "protocol"),
        (raw(b"\x16\x03\x01"), "protocol"),
    ],
    ids=["many headers", "long header", "fast interim answers", "endless headers", "no number", "NULs", "TLS"],
)
def test_an_answer_out_of_bounds_ends_soon(behaviour: Behaviour, code: str) -> None:
    with Server(behaviour) as server:
        got = post(server.port)
    assert (got.status, got.code) == (None, code)
    assert got.seconds < 3


def test_an_endless_chunked_body_is_cut_and_the_connection_dropped() -> None:
    dropped = threading.Event()

    def behave(connection: socket.socket, request: Request) -> None:
        connection.sendall(CHUNKED)
        try:
            while True:
                connection.sendall(b"1000\r\n" + b"\x00" * 4_096 + b"\r\n")
        except OSError:
            dropped.set()

    with Server(behave) as server:
        got = post(server.port)
        assert (got.status, got.body) == (200, b"\x00" * RESPONSE_LIMIT)
        assert dropped.wait(5)
    assert got.seconds < 3


def test_a_body_of_fifty_megabytes_takes_no_memory() -> None:
    def behave(connection: socket.socket, request: Request) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 52428800\r\n\r\n")
        block = b"a" * 65_536
        for _ in range(800):
            connection.sendall(block)

    with Server(behave) as server:
        tracemalloc.start()
        got = post(server.port)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (got.status, len(got.body)) == (200, RESPONSE_LIMIT)
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    "tail",
    [b"zz\r\nabc", b"-5\r\nabc", b"ffffffffffffffffffff\r\nabc", b"3\r\nabc\r\n0\r\n" + b"T: x\r\n" * 500],
    ids=["bad size", "negative size", "huge size", "endless trailer"],
)
def test_a_delivered_200_stays_delivered_whatever_its_body_does(tail: bytes) -> None:
    with Server(raw(CHUNKED + tail)) as server:
        assert post(server.port).status == 200


def test_what_came_of_a_stalled_body_is_kept() -> None:
    with Server() as server:
        server.behaviour = dripping(server, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\nfirst words", b"")
        got = post(server.port, timeout_seconds=0.3)
    assert (got.status, got.body) == (200, b"first words")


def test_a_server_that_takes_a_connection_and_is_silent_costs_the_time_limit() -> None:
    with silent_port() as port:
        for scheme in ("http", "https"):
            got = post(port, url=f"{scheme}://hook.test:{port}/", timeout_seconds=0.3)
            assert got.code == "timeout"
            assert 0.25 < got.seconds < 2


def test_a_server_that_never_reads_costs_the_time_limit() -> None:
    with silent_port() as port:
        got = post(port, body=b"x" * 30_000_000, timeout_seconds=0.3)
    assert got.code == "timeout"
    assert got.seconds < 3


def test_drips_inside_tls_cost_the_time_limit(authority: Authority) -> None:
    with Server(tls=authority.context("hook.test")) as server:
        server.behaviour = dripping(server, b"HTTP/1.1 200 OK\r\nX: ")
        url = f"https://hook.test:{server.port}/"
        got = post(server.port, url=url, ca_bundle=str(authority.bundle), timeout_seconds=0.4)
    assert (got.code, got.seconds < 2) == ("timeout", True)


def test_drips_before_the_handshake_is_over_cost_the_time_limit() -> None:
    """A TLS record's head, then its content byte by byte: no single read takes long."""
    with Server() as server:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(65_536)
                connection.sendall(b"\x16\x03\x03\x3f\xff")
                while not server.ended.wait(0.02):
                    connection.sendall(b"\x02")

        server._serve = serve  # type: ignore[method-assign]
        got = post(server.port, url=f"https://hook.test:{server.port}/", timeout_seconds=0.4)
    assert got.code in {"timeout", "tls"}
    assert got.seconds < 2


def test_plain_http_on_a_tls_url_is_a_tls_fault() -> None:
    with Server() as server:

        def serve(connection: socket.socket) -> None:
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server._serve = serve  # type: ignore[method-assign]
        assert post(server.port, url=f"https://hook.test:{server.port}/").code == "tls"


def test_nobody_listens() -> None:
    with silent_port() as port:
        pass
    got = post(port)
    assert (got.status, got.code) == (None, "connection")
    assert "hook.test" not in got.error


@pytest.mark.parametrize("change", [{"X": "a\r\nB: c"}, {"X Y\n": "a"}, {"X": "日本"}, {"X": 1}], ids=str)
def test_what_cannot_be_a_header_is_a_fault_of_the_request(change: dict[str, Any]) -> None:
    with Server() as server:
        got = post(server.port, headers=change)
        assert (got.status, got.code) == (None, "request")
        assert not server.requests


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with Server() as target, Server() as server:
        server.behaviour = answer(status, f"Location: http://127.0.0.1:{target.port}/b")
        got = post(server.port)
        assert got.status == status
        assert got.location.endswith("/b")
        assert target.connections == 0


def test_nothing_of_the_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), Server() as server:
        post(server.port, url=f"http://hook.test:{server.port}/T0KEN", headers={"Authorization": "Bearer s3cret"})
        post(1, url="http://hook.test:1/T0KEN", headers={"Authorization": "Bearer s3cret"})
        server.behaviour = raw(b"HTTP/1.1 200 OK\r\nthis is no header\r\nContent-Length: 0\r\n\r\n")
        assert post(server.port, url=f"http://hook.test:{server.port}/T0KEN").status == 200
    assert "s3cret" not in caplog.text
    assert "T0KEN" not in caplog.text


def test_threads_do_not_share_their_bounds() -> None:
    results: dict[str, Answer] = {}

    def run(name: str, work: Callable[[], Answer]) -> threading.Thread:
        thread = threading.Thread(target=lambda: results.setdefault(name, work()))
        thread.start()
        return thread

    with silent_port() as port, Server() as server:
        slow = run("slow", lambda: post(port, timeout_seconds=0.5))
        fast = [run(f"fast {number}", lambda: post(server.port)) for number in range(8)]
        for thread in (slow, *fast):
            thread.join(10)
    assert results.pop("slow").code == "timeout"
    assert {each.status for each in results.values()} == {200}
