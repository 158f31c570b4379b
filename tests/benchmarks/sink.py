"""A mail server that takes everything and keeps nothing; it prints its port."""

from __future__ import annotations

import socket
import socketserver

_REPLIES = {b"EHLO": b"250-sink\r\n250 8BITMIME\r\n", b"DATA": b"354 go on\r\n", b"QUIT": b"221 bye\r\n"}


class _Sink(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wfile.write(b"220 sink\r\n")
        while line := self.rfile.readline():
            verb = line[:4].upper()
            self.wfile.write(_REPLIES.get(verb, b"250 ok\r\n"))
            if verb == b"QUIT":
                return
            if verb == b"DATA":
                while self.rfile.readline() not in {b".\r\n", b""}:
                    pass
                self.wfile.write(b"250 taken\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


if __name__ == "__main__":
    with _Server(("127.0.0.1", 0), _Sink) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
