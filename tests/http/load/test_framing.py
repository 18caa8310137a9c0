"""One request, one answer: no header makes a part of one request another one.

Each body here is itself a request, so a service that lost the end of a body would answer twice.
"""

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httptools
import pytest

from tests.tiny import encoded, photo

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
    (b"Transfer-Encoding: chunked\r\n", b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n"),
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
    for upgrade, expect, (framing, body) in itertools.product(UPGRADES, EXPECTS, framings):
        yield request(upgrade, framing, expect, body=body, version=version)
        if upgrade and expect:
            yield request(framing, expect, upgrade, body=body, version=version)


def test_a_readable_request_gets_one_answer_and_so_does_the_next_one(running_service) -> None:
    for sent in requests(READABLE, b"1.1"):
        assert answers(running_service, [sent + LAST]).statuses == [415, 200], sent
        assert answers(running_service, [sent + sent + LAST]).statuses == [415, 415, 200], sent


def test_http_1_0_gets_one_answer_and_the_connection_closes(running_service) -> None:
    for sent in requests(READABLE, b"1.0"):
        expected = 400 if b"ransfer" in sent else 415
        connection = running_service.connect(sent + LAST)
        data = connection.makefile("rb").read()
        assert data.startswith(b"HTTP/1.1 %d" % expected), sent
        assert data.count(b"HTTP/1.1 ") == 1, sent


def test_an_unreadable_request_is_400_and_the_connection_closes(running_service) -> None:
    for version in (b"1.1", b"1.0"):
        for sent in requests(UNREADABLE, version):
            got = answers(running_service, [sent + LAST])
            assert got.statuses == [400], sent
            assert json.loads(got.bodies[0])["type"] == "urn:kinlens:problem:bad-request"
            first = LAST.replace(b"Connection: close\r\n", b"")  # is answered first
            statuses = answers(running_service, [first + sent + LAST]).statuses
            assert statuses in ([200], [200, 400]), sent


@pytest.mark.parametrize(
    "start",
    [b"CONNECT / HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"POST / HTTP/2.0", b"GET http:// HTTP/1.1"],
)
def test_other_protocols_are_refused_once(running_service, start: bytes) -> None:
    for upgrade in UPGRADES:
        head = b"%b\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (start, upgrade, SIZE)
        assert answers(running_service, [head, INNER, LAST], 0.01).statuses == [400]


def test_packets_may_end_anywhere(running_service) -> None:
    for upgrade, (framing, body) in itertools.product(UPGRADES[:2], (READABLE[0], READABLE[4])):
        sent = request(upgrade, framing, body=body)
        end = sent.index(b"\r\n\r\n")
        for at in (30, sent.index(b"ontent-"), *range(end, end + 9), len(sent) - 3, len(sent)):
            parts = [sent[:at], sent[at:] + LAST]
            assert answers(running_service, parts, 0.005).statuses == [415, 200], at
        single = [bytes([byte]) for byte in sent + LAST]
        assert answers(running_service, single).statuses == [415, 200]


def test_a_search_that_offers_h2c_is_answered(running_service) -> None:
    """As the JDK's client and `curl --http2` send it."""
    image = encoded(photo(1))
    sent = request(UPGRADES[1], b"Content-Length: %d\r\n" % len(image), body=image)
    for parts in ([sent + LAST], [sent[: -len(image)], image, LAST], [sent[:-9], sent[-9:] + LAST]):
        got = answers(running_service, parts, 0.01)
        assert got.statuses == [200, 200]
        assert json.loads(got.bodies[0])["hits"]


def test_an_answer_before_an_expected_body_closes_the_connection(running_service) -> None:
    """The client then never sends its body, so the service must not wait for it."""
    for path in (b"/live", b"/galleries", b"/nowhere"):
        head = b"GET %b HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n" % path
        got = answers(running_service, [head + b"Content-Length: 5\r\n\r\n"])
        assert len(got.statuses) == 1


@pytest.mark.parametrize("kib", [17, 40, 100, 200, 1000])
def test_a_head_above_16_kib_is_431(running_service, kib: int) -> None:
    size = kib * 2**10
    for head in (
        b"GET /live?%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * size),
        LAST[:-2] + b"X-Filler: %b\r\n\r\n" % (b"a" * size),
        LAST[:-2] + b"X: 56789012345\r\n" * (size // 16) + b"\r\n",
    ):
        got = answers(running_service, [head + LAST])
        assert got.statuses[0] == 431
        assert json.loads(got.bodies[0])["type"] == "urn:kinlens:problem:head-too-large"
    assert answers(running_service, [LAST[:-2] + b"X: %b\r\n\r\n" % (b"a" * 16_000)]).statuses == [
        200
    ]
