"""The load balancer of `docker compose --profile scale` in front of replicas."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import structlog

from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.proxies import started
from tests.support.servers import DEFAULTS, WAIT_S, FakeGallery, Running, run
from tests.support.trailers import with_trailers
from tests.support.waiting import until

REPLICAS = 3


@pytest.fixture
def replicas(photos: list[bytes]) -> Iterator[list[tuple[Running, FakeGallery]]]:
    with ExitStack() as stack:
        embedder, running = FakeEmbedder(), []
        settings = Settings(**DEFAULTS, trusted_proxies=("127.0.0.1",))
        for _ in range(REPLICAS):
            gallery = FakeGallery(embedder, photos)
            replica = run(create_app(settings, embedder, {"shop": gallery}))
            stack.callback(replica.close)
            running.append((replica, gallery))
        yield running


@pytest.fixture
def balancer(replicas: list[tuple[Running, FakeGallery]], tmp_path: Path) -> Iterator[str]:
    with started("haproxy", [replica.url for replica, _ in replicas], tmp_path) as proxy:
        yield proxy.url


def search(url: str, data: bytes) -> httpx.Response:
    return httpx.post(f"{url}/search", files={"image": ("q.png", data)}, timeout=WAIT_S)


def test_searches_reach_every_replica_that_is_up(balancer, replicas, photos) -> None:
    assert {search(balancer, data).status_code for data in photos} == {200}
    assert all(gallery.searches for _, gallery in replicas)
    first = replicas[0][0]
    first.close()
    assert {search(balancer, data).status_code for data in photos} == {200}
    for replica, _ in replicas[1:]:
        replica.close()
    until(lambda: search(balancer, photos[0]).status_code == 503)
    refused = search(balancer, photos[0])
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["type"] == "urn:kinlens:problem:overloaded"


def test_a_forwarded_trailer_changes_no_address(balancer) -> None:
    """HAProxy adds its X-Forwarded-For to the head and forwards the trailers of the client."""
    address = ("127.0.0.1", int(balancer.rsplit(":", 1)[1]))
    with structlog.testing.capture_logs() as events:
        for number in range(4):
            with socket.create_connection(address, WAIT_S, source_address=("127.0.0.9", 0)) as sent:
                sent.sendall(with_trailers(f"6.6.6.{number}"))
                assert sent.recv(100).startswith(b"HTTP/1.1 4")
    posts = [event for event in events if event.get("method") == "POST"]
    assert [event["client"] for event in posts] == ["127.0.0.9"] * 4
