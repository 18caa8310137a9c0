"""Requests whose headers try to make a part of one request another one, and their answers.

Each body here is itself a request, so a service that lost the end of a body would answer twice.
"""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httptools

INNER = b"GET /galleries HTTP/1.1\r\nHost: localhost\r\n\r\n"
SIZE = len(INNER)
LAST = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SETTINGS = b"HTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
UPGRADES = (
    b"",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + SETTINGS,
    b"Upgrade: h2c\r\nUpgrade: foo\r\nConnection: keep-alive\r\nConnection: upgrade\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Upgrade: TLS/1.0\r\n",
    b"Connection: upgrade\r\n",
)
EXPECTS = (b"", b"Expect: 100-continue\r\n", b"Expect: a miracle\r\n")
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, INNER)
EXTENDED = b'%x;a=1;b="c"\r\n%b\r\n0;d\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n' % (
    SIZE,
    INNER,
)
READABLE = (
    (b"Content-Length: %d\r\n" % SIZE, INNER),
    (b"content-length:%d  \r\n" % SIZE, INNER),
    (b"Content-Length: 000%d\r\n" % SIZE, INNER),
    (b"Transfer-Encoding: chunked\r\n", CHUNKED),
    (b"transfer-encoding:  Chunked \r\n", EXTENDED),
)
UNREADABLE = (
    *((b"Content-Length: %b\r\n" % value, INNER) for value in (b"", b"+5", b"-5", b"5 5", b"0x5")),
    *((b"Content-Length: %b\r\n" % value, INNER) for value in (b"5, 5", b"5.0", b"9" * 30)),
    (b"Content-Length: %d\r\n" % SIZE * 2, INNER),
    (b"Content-Length: 0\r\nContent-Length: %d\r\n" % SIZE, INNER),
    (b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % SIZE, CHUNKED),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", CHUNKED),
    *(
        (b"Transfer-Encoding:%b\r\n" % value, CHUNKED)
        for value in (b" gzip", b" chunked, gzip", b" gzip, chunked", b" identity", b" xchunked")
    ),
    *(
        (b"Transfer-Encoding%b\r\n" % value, CHUNKED)
        for value in (b" : chunked", b":\x0bchunked", b":\r\n chunked", b": chunked\r", b"")
    ),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", CHUNKED),
    (b"Transfer-Encoding: chunked\r\n", b"+5\r\nhello\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n", b"5\nhello\n0\n\n"),
    (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello!!0\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n", b"f" * 21 + b"\r\nhello\r\n0\r\n\r\n"),
)


class Answers:
    """The statuses and bodies of the answers on a connection, without 100 Continue."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.statuses.append(self.parser.get_status_code())
            self.bodies.append(b"")

    def on_body(self, data: bytes) -> None:
        self.bodies[-1] += data


def answers(service: Any, parts: Sequence[bytes], pause_s: float = 0) -> Answers:
    """What comes back for these packets, until the service closes the connection."""
    connection, got = service.connect(), Answers()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(ConnectionError), connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)  # only makes packets likely; the law holds for any
        while data := connection.recv(2**16):
            got.parser.feed_data(data)
    return got


def request(*headers: bytes, body: bytes, version: bytes = b"1.1") -> bytes:
    start = b"POST /search HTTP/%b\r\nHost: localhost\r\nContent-Type: image/png\r\n" % version
    return start + b"".join(headers) + b"\r\n" + body


def requests(framings: Sequence[tuple[bytes, bytes]], version: bytes) -> Iterator[bytes]:
    """Each pair of an upgrade, an expectation and a framing, in both orders."""
    pairs = itertools.product(enumerate(UPGRADES), enumerate(framings))
    for (row, upgrade), (column, (framing, body)) in pairs:
        expect = EXPECTS[(row + column) % len(EXPECTS)]
        headers = (upgrade, framing, expect) if row % 2 else (framing, expect, upgrade)
        yield request(*headers, body=body, version=version)


def is_split(got: Answers) -> bool:
    """Whether a body was answered as a request: with the list of galleries."""
    return any(b'"galleries"' in body for body in got.bodies)
