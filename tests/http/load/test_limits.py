"""Request bodies: refused by what they claim, by what they weigh, and by how long they take."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from tests.support.shops import assert_problem, start_shop

STALLED = (
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
)
LEFT = (
    b"POST /search",
    b"POST /search/batch",
    b"POST /galleries",
    b"PUT /galleries/shop/items",
    b"POST /galleries/shop/golden",
)
ASKING = STALLED.replace(b"Content-Type", b"Expect: 100-continue\r\nContent-Type")


def test_a_60_mb_body_is_413_naming_size_and_limit(running_service, pictures) -> None:
    response = running_service.search(bytes(60 * 2**20))
    detail = assert_problem(response, 413, "body-too-large")["detail"]
    assert f"{int(response.request.headers['content-length']):,}" in detail
    assert f"{20 * 2**20 + 64 * 2**10:,}" in detail
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
    detail = assert_problem(response, 413, "body-too-large")["detail"]
    assert f"more than {100_000 + 64 * 2**10:,} bytes" in detail
    assert service.search(pictures[0]).status_code == 200


def test_a_large_body_is_refused_on_every_route(start_service) -> None:
    service = start_service(max_upload_bytes=1000)
    for path, status in (("/search", 413), ("/jobs/train", 403), ("/nowhere", 404), ("/live", 405)):
        assert service.client.post(path, content=bytes(200_000)).status_code == status


def test_a_client_that_asks_before_it_sends_is_refused_without_sending(running_service) -> None:
    asking = ASKING.replace(b"Content-Length: 5000", b"Content-Length: 99999999")
    head, _, _ = asking.partition(b"--b")
    answer = running_service.connect(head).makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


def test_a_body_that_takes_too_long_is_408_and_the_connection_ends(start_service, pictures) -> None:
    service = start_service(body_timeout_ms=500)
    answer = service.connect(STALLED).makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body-too-slow" in answer
    assert b"0.5 s" in answer
    assert service.search(pictures[0]).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(
    pictures, tmp_path, until
) -> None:
    shop = start_shop(tmp_path / "state")
    service = shop.running
    with structlog.testing.capture_logs() as events:
        for start in LEFT:
            service.connect(STALLED.replace(b"POST /search", start)).close()
        until(lambda: sum(event["event"] == "request" for event in events) == len(LEFT))
    assert [event.get("status") for event in events] == [499] * len(LEFT), events
    assert service.search(pictures[0]).status_code == 200
    assert service.metric("kinlens_searches_in_flight") == 0
    shop.close()


def test_uploads_above_the_number_that_may_arrive_at_a_time_are_503_until_one_ends(
    start_service, pictures, until
) -> None:
    service = start_service(max_concurrent_uploads=2)
    chunked = ASKING.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")
    first = service.connect(ASKING)
    second = service.connect(chunked.replace(b"--b\r\n", b"5\r\n--b\r\n\r\n"))
    for connection in (first, second):
        assert b" 100 Continue" in connection.recv(100), "it has its place"
    refused = service.search(pictures[0])
    detail = assert_problem(refused, 503, "overloaded")["detail"]
    assert "2 uploads" in detail
    assert "KINLENS_MAX_CONCURRENT_UPLOADS" in detail
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
