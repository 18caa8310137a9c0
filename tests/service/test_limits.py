"""Request bodies: refused by what they claim, by what they weigh, and by how long they take."""

import socket
from collections.abc import Iterator
from typing import Any

PROBLEM = "application/problem+json"


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
    for path in ("/search", "/nowhere", "/live"):
        assert service.client.post(path, content=bytes(200_000)).status_code == 413


def test_a_client_that_asks_before_it_sends_is_refused_without_sending(start_service) -> None:
    service = start_service(max_upload_bytes=1000)
    with connect(service) as connection:
        connection.sendall(
            b"POST /search HTTP/1.1\r\nHost: test\r\nContent-Length: 9999999\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


def test_a_body_that_takes_too_long_is_408_and_the_connection_ends(start_service, pictures) -> None:
    service = start_service(body_timeout_ms=150)
    with connect(service) as connection:
        connection.sendall(
            b"POST /search HTTP/1.1\r\nHost: test\r\nContent-Length: 5000\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        )
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
            connection.sendall(
                b"POST /search HTTP/1.1\r\nHost: test\r\nContent-Length: 5000\r\n"
                b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
            )
    assert service.search(pictures[0]).status_code == 200
    assert service.metric("kinlens_searches_in_flight") == 0
