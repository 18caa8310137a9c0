"""Many clients at once: bad uploads, clients that leave, crowds with the same photograph."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def variant(data: bytes, number: int) -> bytes:
    """The same PNG picture as other bytes, so that no cache and no flight knows it."""
    return data + number.to_bytes(4, "big")


def send_raw(service: Any, data: bytes) -> socket.socket:
    """A whole request for a search, on a connection that the caller may drop."""
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
    connection.sendall(head.encode() + body)
    return connection


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
