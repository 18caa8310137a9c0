"""One request, one answer: no header makes a part of one request another one."""

import itertools
import json

import pytest

from tests.support.framings import (
    INNER,
    LAST,
    READABLE,
    SIZE,
    UNREADABLE,
    UPGRADES,
    answers,
    is_split,
    request,
    requests,
)
from tests.tiny import encoded, photo


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


def test_an_unreadable_request_is_refused_and_its_body_is_no_request(running_service) -> None:
    for version in (b"1.1", b"1.0"):
        for sent in requests(UNREADABLE, version):
            got = answers(running_service, [sent + LAST])
            assert got.statuses[0] in (400, 415), sent  # 415: equal lengths count once
            assert not is_split(got), sent


@pytest.mark.parametrize(
    "start", [b"CONNECT / HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"POST / HTTP/2.0"]
)
def test_other_protocols_are_refused_once(running_service, start: bytes) -> None:
    for upgrade in UPGRADES:
        head = b"%b\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (start, upgrade, SIZE)
        [status] = answers(running_service, [head, INNER, LAST], 0.01).statuses
        assert status in (400, 404, 405)


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
def test_a_head_above_16_kib_is_refused(running_service, kib: int) -> None:
    size = kib * 2**10
    for head in (
        b"GET /live?%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * size),
        LAST[:-2] + b"X-Filler: %b\r\n\r\n" % (b"a" * size),
        LAST[:-2] + b"X: 56789012345\r\n" * (size // 16) + b"\r\n",
    ):
        got = answers(running_service, [head + LAST])
        if got.statuses[0] != 400:  # of the server, which did not get it whole
            assert got.statuses[0] == 431
            assert json.loads(got.bodies[0])["type"] == "urn:kinlens:problem:head-too-large"
    assert answers(running_service, [LAST[:-2] + b"X: %b\r\n\r\n" % (b"a" * 16_000)]).statuses == [
        200
    ]
