"""Crowds: clients that do harm or leave among many that do not, full queues, one photograph."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from embedder.errors import DeadlineExceededError
from indexer.types import SearchOptions
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


def test_a_model_that_fails_on_one_image_of_a_batch_fails_that_request_alone(
    start_service, embedder, pictures, monkeypatch
) -> None:
    poison = embedder.preprocess(pictures[3])
    embed = embedder.embed

    def embed_or_fail(images: Any) -> Any:
        if any((image == poison).all() for image in images):
            raise RuntimeError("poison")
        return embed(images)

    monkeypatch.setattr(embedder, "embed", embed_or_fail)
    service = start_service()
    with ThreadPoolExecutor(12) as clients:
        statuses = [r.status_code for r in clients.map(service.search, pictures)]
    assert statuses == [500 if n == 3 else 200 for n in range(12)]


def test_a_client_that_leaves_while_it_waits_costs_no_inference(
    start_service, embedder, pictures, until
) -> None:
    service = start_service(lanes=1)
    embedder.gate.clear()
    before = len(embedder.batches)
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(service.search, pictures[0])
        until(lambda: len(embedder.batches) == before + 1)
        connection = send_raw(service, pictures[1])
        until(lambda: service.runtime.lanes.waiting == 1)
        connection.close()
        until(lambda: service.runtime.lanes.waiting == 0)
        embedder.gate.set()
        assert first.result().json()["hits"][0]["id"] == 0
    assert len(embedder.batches) == before + 1


def test_a_full_queue_answers_503_with_retry_after_and_recovers(
    start_service, embedder, pictures, until
) -> None:
    service = start_service(queue_size=2, lanes=1)
    embedder.gate.clear()
    before = len(embedder.batches)
    with ThreadPoolExecutor(3) as clients:
        held = [clients.submit(service.search, pictures[0])]
        until(lambda: len(embedder.batches) == before + 1)
        for number in (1, 2):
            held.append(clients.submit(service.search, pictures[number]))
            until(lambda depth=number: service.runtime.lanes.waiting == depth)
        refused = service.search(pictures[3])
        embedder.gate.set()
        assert [call.result().status_code for call in held] == [200, 200, 200]
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["type"] == "urn:kinlens:problem:overloaded"
    assert service.search(pictures[3]).status_code == 200


def test_a_request_above_its_time_limit_is_503_and_leaves_the_queue(
    start_service, embedder, pictures, until
) -> None:
    service = start_service(request_timeout_ms=200)
    embedder.gate.clear()
    response = service.search(pictures[0])
    embedder.gate.set()
    assert response.status_code == 503
    assert response.json()["type"] == "urn:kinlens:problem:deadline-exceeded"
    assert "0.2 s" in response.json()["detail"]
    assert service.metric("kinlens_queue_depth") == 0
    until(lambda: service.search(pictures[0]).status_code == 200)


def test_an_answer_is_cached_by_content_and_parameters(start_service, gallery, pictures) -> None:
    service = start_service()
    searches = gallery.searches
    first = service.search(pictures[0], k=3).json()
    again = service.search(pictures[0], k=3).json()
    assert (first["cached"], again["cached"]) == (False, True)
    assert again["hits"] == first["hits"]
    assert again["timings_ms"]["embed"] == again["timings_ms"]["search"] == 0
    assert gallery.searches == searches + 1
    other_k = service.search(pictures[0], k=4).json()
    assert not other_k["cached"]
    assert other_k["timings_ms"]["embed"] == 0
    assert other_k["timings_ms"]["search"] > 0
    assert not service.search(pictures[0], k=3, min_score=0.1).json()["cached"]
    assert service.metric("kinlens_cache_lookups_total", kind="answer", level="local") == 1
    assert service.metric("kinlens_cache_lookups_total", kind="embedding", level="local") == 2


def test_a_new_version_of_a_gallery_is_never_answered_from_the_old_ones_cache(
    start_service, embedder, gallery, pictures
) -> None:
    service = start_service()
    assert service.search(pictures[0], k=1).json()["hits"][0]["id"] == 0
    cache = service.runtime.cache
    renewed = type(gallery)(embedder, pictures[::-1], version="v2")
    other = start_service(galleries={"shop": renewed}, cache=cache)
    answer = other.search(pictures[0], k=1).json()
    assert answer["hits"][0]["id"] == 11
    assert not answer["cached"]


def test_an_answer_is_not_remembered_if_the_gallery_changed_during_its_search(
    start_service, gallery, pictures, monkeypatch
) -> None:
    """The hits may be of the later state, under the key of the earlier one."""
    service = start_service()
    first, second = gallery.version, gallery.version[::-1]
    search = gallery.search

    def search_while_changing(*arguments: Any) -> Any:
        hits = search(*arguments)
        gallery.version = second
        return hits

    with monkeypatch.context() as patch:
        patch.setattr(gallery, "search", search_while_changing)
        answer = service.search(pictures[0], k=2).json()
    assert (answer["gallery_version"], answer["cached"]) == (first, False)
    gallery.version = first
    assert not service.search(pictures[0], k=2).json()["cached"]
    assert service.search(pictures[0], k=2).json()["cached"]
    gallery.version = second
    assert not service.search(pictures[0], k=2).json()["cached"]


def test_a_gallery_that_hangs_holds_up_the_list_until_the_limit_and_no_longer(
    start_service, gallery, monkeypatch
) -> None:
    held = threading.Event()

    class Hanging(type(gallery)):
        @property
        def size(self) -> int:
            held.wait(20)
            return 0

        @size.setter
        def size(self, _: int) -> None: ...

    service = start_service(request_timeout_ms=100)
    monkeypatch.setattr(gallery, "__class__", Hanging)
    response = service.client.get("/galleries")
    assert response.status_code == 503
    assert response.json()["type"] == "urn:kinlens:problem:deadline-exceeded"
    metrics = service.client.get("/metrics")
    assert metrics.status_code == 200
    held.set()


def test_a_search_that_nobody_waits_for_any_more_gives_its_thread_back(
    start_service, embedder, gallery, pictures, until
) -> None:
    """It asks at its own pace whether it should go on, for a minute if it has to."""
    told = []

    class Endless(type(gallery)):
        def search(self, queries: Any, k: int, options: SearchOptions | None = None) -> Any:
            assert options is not None
            try:
                for _ in range(600):
                    options.checkpoint()
                    threading.Event().wait(0.1)
            except DeadlineExceededError:
                told.append(True)
                raise

    galleries = {"shop": gallery, "endless": Endless(embedder, pictures, "endless")}
    service = start_service(galleries=galleries, request_timeout_ms=500, lanes=2)
    with ThreadPoolExecutor(4) as clients:
        ask = partial(service.search, gallery="endless")
        assert {answer.status_code for answer in clients.map(ask, pictures[:4])} == {503}
    assert service.search(pictures[5]).status_code == 200
    until(lambda: len(told) >= 2)
