"""Hostile clients in front of the shipped nginx, HAProxy and Caddy, with shorter time limits."""

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.framings import (
    LAST,
    READABLE,
    UNREADABLE,
    UPGRADES,
    answers,
    is_split,
    request,
    requests,
)
from tests.support.proxies import HOST, OPTIONS, STALLED_S, Proxy, started
from tests.support.servers import (
    DEFAULTS,
    FakeGallery,
    GatedEmbedder,
    create_app,
    run,
    settings_of,
)
from tests.support.waiting import until
from tests.tiny import encoded, photo

MIB = 2**20
LARGE = 16 * MIB  # more than the buffers of a connection
LIMITS = {"max_upload_bytes": MIB, "max_batch_bytes": MIB, "max_held_bytes": 4 * MIB}
GET = LAST.replace(b"Connection: close\r\n", b"")


@pytest.fixture(scope="module", params=OPTIONS)
def proxy(
    request: pytest.FixtureRequest, photos: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    embedder = GatedEmbedder()
    hosts = (HOST, "localhost", "127.0.0.1")
    given = {"trusted_proxies": ("127.0.0.1",), "allowed_hosts": hosts}
    settings = settings_of(**DEFAULTS | LIMITS | given)
    gallery = FakeGallery(embedder, [*photos, photos[0] + bytes(LARGE)])
    with ExitStack() as stack:
        service = run(create_app(settings, embedder, {"shop": gallery}))
        stack.callback(service.close)
        folder = tmp_path_factory.mktemp(request.param)
        yield stack.enter_context(started(request.param, [service.url], folder))


def is_alive(proxy: Proxy) -> bool:
    return answers(proxy, [LAST]).statuses == [200]


def received(connection: socket.socket) -> int:
    """The number of bytes until the connection closes."""
    count = 0
    with contextlib.suppress(ConnectionError), connection:
        while data := connection.recv(MIB):
            count += len(data)
    return count


def test_no_body_is_read_as_a_request(proxy) -> None:
    image = encoded(photo(1))
    sent = request(UPGRADES[1], b"Content-Length: %d\r\n" % len(image), body=image)
    assert answers(proxy, [sent[: -len(image)], image, LAST], 0.01).statuses == [200, 200]
    for sent in requests(READABLE, b"1.1"):
        got = answers(proxy, [sent + LAST])
        assert got.statuses[0] >= 400, sent
        assert not is_split(got), sent


def test_nothing_of_an_unreadable_request_is_left_for_the_next_client(proxy) -> None:
    [live] = answers(proxy, [LAST]).bodies
    for sent in requests(UNREADABLE, b"1.1"):
        answers(proxy, [sent + LAST])
        assert answers(proxy, [LAST]).bodies == [live], sent


def test_a_large_head_is_refused(proxy) -> None:
    for size in (17_000, 100_000, 2_000_000):
        got = answers(proxy, [LAST[:-2] + b"X: %b\r\n\r\n" % (b"a" * size)])
        assert 200 not in got.statuses
    assert is_alive(proxy)


def test_a_slow_head_is_cut_off(proxy) -> None:
    for start in (b"", GET[:-2], b"G"):
        received(proxy.connect(start))  # ends


def test_a_client_that_does_not_read_is_cut_off(proxy) -> None:
    sent = GET.replace(b"/live", b"/galleries/shop/items/12/image")

    def is_cut_off() -> bool:
        connection = proxy.connect(sent)
        time.sleep(STALLED_S + 1)
        return received(connection) < LARGE

    until(is_cut_off)
    assert is_alive(proxy)


def test_pipelines_block_no_other_client(proxy) -> None:
    clients = [proxy.connect() for _ in range(5)]
    for client in clients:
        client.settimeout(0.5)
        with contextlib.suppress(OSError):
            client.sendall(GET * 2_000)
    assert is_alive(proxy)
    for client in clients:
        client.close()


def test_a_flood_of_unfinished_bodies_gets_503_at_most(proxy) -> None:
    body = request(b"Content-Length: %d\r\n" % MIB, body=bytes(MIB - 1))
    flood = [proxy.connect(body) for _ in range(10)]
    with proxy.client() as client:
        files = {"image": encoded(photo(1))}
        for _ in range(5):
            assert client.post("/search", files=files).status_code in (200, 503)
        assert client.get("/live").status_code == 200
        for connection in flood:
            connection.close()
        until(lambda: client.post("/search", files=files).status_code == 200)
