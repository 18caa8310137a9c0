"""Request bodies: refused by what they claim, by what they weigh, and by how long they take."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROBLEM = "application/problem+json"
STALLED = (
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
)


def connect(service: Any) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
    connection.settimeout(15)
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_60_mb_body_is_413_naming_size_and_limit(running_service, pictures) -> None:
    response = running_service.search(bytes(60 * 2**20))
    assert response.status_code == 413
    assert response.headers["content-type"] == PROBLEM
    problem = response.json()
    assert problem["type"] == "urn:kinlens:problem:body-too-large"
    assert problem["request_id"] == response.headers["x-request-id"]
    assert f"{int(response.request.headers['content-length']):,}" in problem["detail"]
    assert f"{20 * 2**20 + 64 * 2**10:,}" in problem["detail"]
    assert "nosniff" in response.headers["x-content-type-options"]
    assert running_service.search(pictures[0]).status_code == 200


def test_a_body_that_does_not_say_its_size_is_cut_off_at_the_limit(start_service, pictures) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"--b\r\nContent-Disposition: form-data; name=image; filename=a\r\n\r\n"
        for _ in range(30):
            yield bytes(10_000)
        yield b"\r\n--b--\r\n"

    service = start_service(max_upload_bytes=100_000)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = service.client.post("/search", content=chunks(), headers=headers)
    assert response.status_code == 413
    assert response.headers["content-type"] == PROBLEM
    assert f"more than {100_000 + 64 * 2**10:,} bytes" in response.json()["detail"]
    assert service.search(pictures[0]).status_code == 200


def test_a_large_body_is_refused_on_every_route(start_service) -> None:
    service = start_service(max_upload_bytes=1000)
    for path, status in (("/search", 413), ("/jobs/train", 403), ("/nowhere", 404), ("/live", 405)):
        assert service.client.post(path, content=bytes(200_000)).status_code == status


def test_a_client_that_asks_before_it_sends_is_refused_without_sending(start_service) -> None:
    service = start_service(max_upload_bytes=1000)
    with connect(service) as connection:
        connection.sendall(
            b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


def test_a_body_that_takes_too_long_is_408_and_the_connection_ends(start_service, pictures) -> None:
    service = start_service(body_timeout_ms=150)
    with connect(service) as connection:
        connection.sendall(STALLED)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body-too-slow" in answer
    assert b"0.15 s" in answer
    assert service.search(pictures[0]).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(
    start_service, pictures
) -> None:
    service = start_service()
    for _ in range(5):
        with connect(service) as connection:
            connection.sendall(STALLED)
    assert service.search(pictures[0]).status_code == 200
    assert service.metric("kinlens_searches_in_flight") == 0


def test_uploads_above_the_number_that_may_arrive_at_a_time_are_503_until_one_ends(
    start_service, pictures, until
) -> None:
    service = start_service(max_concurrent_uploads=2)
    with connect(service) as first, connect(service) as second:
        asking = STALLED.replace(b"Content-Type", b"Expect: 100-continue\r\nContent-Type")
        chunked = asking.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")
        sent = {first: asking, second: chunked.replace(b"--b\r\n", b"5\r\n--b\r\n\r\n")}
        for connection, request in sent.items():
            connection.sendall(request)
            assert b" 100 Continue" in connection.recv(100), "it has its place"
        refused = service.search(pictures[0])
        assert refused.headers["content-type"] == PROBLEM
        assert refused.json()["type"] == "urn:kinlens:problem:overloaded"
        assert "2 uploads" in refused.json()["detail"]
        assert "KINLENS_MAX_CONCURRENT_UPLOADS" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        assert service.client.get("/ready").status_code == 200
        first.close()
        until(lambda: service.search(pictures[0]).status_code == 200)


def test_an_upload_that_has_arrived_leaves_its_place_to_the_next(
    start_service, embedder, pictures, until
) -> None:
    service = start_service(max_concurrent_uploads=1)
    embedder.gate.clear()
    with ThreadPoolExecutor(3) as clients:
        held = []
        for number in range(3):
            held.append(clients.submit(service.search, pictures[number]))
            until(lambda n=number: service.metric("kinlens_searches_in_flight") == n + 1)
        embedder.gate.set()
        assert [call.result().status_code for call in held] == [200] * 3


def test_json_may_be_larger_than_an_upload_and_is_refused_above_its_own_bound(
    start_service,
) -> None:
    service = start_service(max_upload_bytes=100_000, max_batch_bytes=400_000)

    def status(size: int, kind: str) -> int:
        headers = {"content-type": kind}
        answer = service.client.post("/search", content=b"[" * size, headers=headers)
        return int(answer.status_code)

    assert status(300_000, "application/json") in (400, 422)
    assert status(600_000, "application/json") == status(300_000, "image/png") == 413
