"""
A mail server that takes everything and keeps nothing; it prints its port.

Its argument is the seconds that each of its answers takes, as if it were far away.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import time

_REPLIES = {b"EHLO": b"250-sink\r\n250-PIPELINING\r\n250 8BITMIME\r\n", b"DATA": b"354 go on\r\n"}
_END = b"\r\n.\r\n"
_AWAY_SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0


class _Sink(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request.sendall(b"220 sink\r\n")
        got, in_body = b"", False
        while more := self.request.recv(65_536):
            got += more
            # What came with one packet is answered with one.
            replies = []
            while (end := got.find(_END if in_body else b"\r\n")) >= 0:
                line, got = got[:end], got[end + (len(_END) if in_body else 2) :]
                verb = line[:4].upper()
                replies.append(b"250 taken\r\n" if in_body else _REPLIES.get(verb, b"250 ok\r\n"))
                in_body = not in_body and verb == b"DATA"
            if replies:
                if _AWAY_SECONDS:
                    time.sleep(_AWAY_SECONDS)
                self.request.sendall(b"".join(replies))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


if __name__ == "__main__":
    with _Server(("127.0.0.1", 0), _Sink) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
