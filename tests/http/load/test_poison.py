"""A few clients that do harm among many that do not; images are decoded in processes."""

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tiny import encoded, picture

SETTINGS: dict[str, Any] = {
    "decode_isolation": True,
    "decode_timeout_ms": 60_000,
    "request_timeout_ms": 60_000,
}
IDLE_GAUGES = ("kinlens_searches_in_flight", "kinlens_queue_depth")


def variant(data: bytes, number: int) -> bytes:
    """The same PNG picture as other bytes, so that no cache and no flight knows it."""
    return data + number.to_bytes(4, "big")


def send_raw(service: Any, data: bytes, part: float = 1.0) -> socket.socket:
    """The first `part` of a request for a search, on a connection that the caller drops."""
    body = (
        b"--b\r\nContent-Disposition: form-data; name=image; filename=q.png\r\n\r\n"
        + data
        + b"\r\n--b--\r\n"
    )
    head = (
        "POST /search HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
    connection.sendall(head.encode() + body[: int(len(body) * part)])
    return connection


@pytest.fixture(scope="module")
def heavy() -> bytes:
    """48 megapixels with transparency: long and large to decode."""
    return encoded(Image.new("RGBA", (8000, 6000), (10, 200, 30, 128)), "PNG", compress_level=1)


@pytest.fixture
def settled(until: Callable[..., None]) -> Callable[[Any], None]:
    """Check that nothing is left of what was sent."""

    def check(service: Any) -> None:
        for gauge in IDLE_GAUGES:
            until(lambda gauge=gauge: service.metric(gauge) == 0)
        assert service.client.get("/ready").status_code == 200

    return check


def test_24_clients_get_their_answers_while_8_leave_in_the_middle_of_a_batch(
    start_service, embedder, pictures, until, settled
) -> None:
    service = start_service(**SETTINGS)
    embedder.gate.clear()
    leaving = [send_raw(service, variant(pictures[n], 1000 + n)) for n in range(8)]
    with ThreadPoolExecutor(24) as clients:
        staying = [clients.submit(service.search, variant(pictures[n % 12], n)) for n in range(24)]
        until(lambda: service.metric("kinlens_searches_in_flight") == 32)
        for connection in leaving:
            connection.close()
        until(lambda: service.metric("kinlens_searches_in_flight") == 24)
        embedder.gate.set()
        answers = [client.result() for client in staying]
    assert [answer.status_code for answer in answers] == [200] * 24
    assert [answer.json()["hits"][0]["id"] for answer in answers] == [n % 12 for n in range(24)]
    settled(service)
    assert service.runtime.lanes.restarts == 0


def test_clients_that_leave_while_their_image_is_decoded_or_sent_disturb_nobody(
    start_service, pictures, heavy, until, settled
) -> None:
    service = start_service(**SETTINGS, lanes=1)
    before = service.metric("kinlens_searches_in_flight")
    leaving = [send_raw(service, heavy)]
    until(lambda: busy_pids(service))
    leaving += [send_raw(service, variant(pictures[n], 1000 + n)) for n in range(4)]
    leaving += [send_raw(service, variant(pictures[n], 2000 + n), part=0.5) for n in range(3)]
    until(lambda: service.metric("kinlens_searches_in_flight") == before + 5)
    with ThreadPoolExecutor(12) as clients:
        staying = [clients.submit(service.search, variant(pictures[n], n)) for n in range(12)]
        for connection in leaving:
            connection.close()
        answers = [client.result() for client in staying]
    assert [answer.json()["hits"][0]["id"] for answer in answers] == list(range(12))
    settled(service)
    assert service.runtime.lanes.restarts == 0


def test_one_truncated_jpeg_among_31_good_ones_fails_alone(
    start_service, pictures, settled
) -> None:
    service = start_service(**SETTINGS)
    truncated = encoded(picture(1), "JPEG")[:-100]
    uploads = [variant(pictures[n % 12], n) for n in range(31)]
    uploads.insert(16, truncated)
    with ThreadPoolExecutor(32) as clients:
        responses = list(clients.map(service.search, uploads))
    refused = responses.pop(16)
    assert refused.status_code == 422
    assert refused.json()["type"] == "urn:kinlens:problem:corrupt-image"
    assert [response.status_code for response in responses] == [200] * 31
    assert [r.json()["hits"][0]["id"] for r in responses] == [n % 12 for n in range(31)]
    assert service.search(variant(pictures[1], 99)).json()["hits"][0]["id"] == 1
    settled(service)


def test_a_process_killed_in_the_middle_of_an_image_costs_no_answer(
    start_service, pictures, heavy, until, settled
) -> None:
    service = start_service(**SETTINGS)
    until(lambda: not busy_pids(service))
    with ThreadPoolExecutor(13) as clients:
        doomed = clients.submit(service.search, heavy)
        until(lambda: busy_pids(service))
        [victim] = busy_pids(service)
        others = [clients.submit(service.search, variant(pictures[n], n)) for n in range(12)]
        os.kill(victim, signal.SIGKILL)
        answers = [other.result() for other in others]
        assert doomed.result().status_code == 200
    assert [answer.json()["hits"][0]["id"] for answer in answers] == list(range(12))
    assert victim not in service.runtime.lanes.pids
    assert service.metric("kinlens_decoder_restarts") == 1
    settled(service)


def test_an_image_above_the_memory_limit_is_422_and_the_others_are_answered(
    start_service, pictures, heavy, settled
) -> None:
    service = start_service(**SETTINGS, decode_memory_mb=300)
    with ThreadPoolExecutor(13) as clients:
        large = clients.submit(service.search, heavy)
        others = [clients.submit(service.search, variant(pictures[n], n)) for n in range(12)]
        refused = large.result()
        answers = [other.result() for other in others]
    assert refused.status_code == 422
    assert refused.json()["type"] == "urn:kinlens:problem:image-too-costly"
    assert "300 MB" in refused.json()["detail"]
    assert [answer.json()["hits"][0]["id"] for answer in answers] == list(range(12))
    settled(service)
    assert (service.runtime.lanes.kills, service.runtime.lanes.restarts) == (1, 1)


def test_every_process_killed_at_once_is_replaced_and_the_service_ready_again(
    start_service, pictures, until, settled
) -> None:
    service = start_service(**SETTINGS)
    lanes = service.runtime.lanes
    for pid in lanes.pids:
        os.kill(pid, signal.SIGKILL)
    assert service.search(pictures[4]).json()["hits"][0]["id"] == 4
    settled(service)


def busy_pids(service: Any) -> list[int]:
    """The processes that are in the middle of an image: others sleep, once they have started."""

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    return [pid for pid in service.runtime.lanes.pids if state(pid) == "R"]
