"""Places for arriving bodies, and how large a body may be where it goes."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from service.http.bounds import FORM_BYTES, Bounds
from service.http.places import Places

IMAGE, BATCH, KEYS, PLAIN = 5 * 2**20, 40 * 2**20, 2**20, 16 * 2**10


@dataclass(eq=False)
class Upload:
    address: str
    places: int = 1
    gone: list[bool] = field(default_factory=list)

    def send_away(self) -> None:
        self.gone.append(True)


def test_an_address_may_have_all_places_while_nobody_else_wants_one() -> None:
    places = Places(4)
    assert all(places.enter(Upload("a")) for _ in range(4))
    assert not places.enter(Upload("a"))
    assert places.taken == 4


def test_another_address_takes_the_oldest_place_of_the_one_that_has_most() -> None:
    places = Places(4)
    first, *others = [Upload("a") for _ in range(3)] + [Upload("b")]
    assert all(places.enter(upload) for upload in (first, *others))
    assert places.enter(Upload("c"))
    assert first.gone
    assert not any(upload.gone for upload in others)
    assert places.taken == 4


def test_places_are_not_taken_from_an_address_that_has_no_more_than_the_newcomer() -> None:
    places = Places(2)
    assert places.enter(Upload("a"))
    assert places.enter(Upload("b"))
    assert not places.enter(Upload("c"))
    assert not places.enter(Upload("a"))


def test_addresses_end_up_with_equal_shares() -> None:
    places = Places(8)
    held = {name: [Upload(name) for _ in range(8)] for name in "ab"}
    for upload in held["a"]:
        places.enter(upload)
    entered = [places.enter(upload) for upload in held["b"]]
    assert sum(entered) == 4
    assert sum(bool(upload.gone) for upload in held["a"]) == 4


def test_a_large_body_counts_as_several_and_is_let_in_when_all_is_free() -> None:
    places = Places(4)
    assert places.enter(Upload("a", places=9))
    assert places.taken == 4
    small = Upload("b")
    assert places.enter(small)
    assert not places.enter(Upload("a", places=9))
    places.leave(small)
    assert places.taken == 0


def bound(method: str, path: str, kind: str = "") -> int:
    headers = [(b"content-type", kind.encode())]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": headers}
    return Bounds(IMAGE, BATCH).of(scope)


@pytest.mark.parametrize(
    ("method", "path", "kind", "expected"),
    [
        ("POST", "/search", "multipart/form-data; boundary=b", IMAGE + FORM_BYTES),
        ("POST", "/search", "image/jpeg", IMAGE + FORM_BYTES),
        ("POST", "/search", "", IMAGE + FORM_BYTES),
        ("POST", "/search", "application/json; charset=utf-8", BATCH + FORM_BYTES),
        ("POST", "/search", "APPLICATION/JSON", BATCH + FORM_BYTES),
        ("POST", "/search/batch", "multipart/form-data", BATCH + FORM_BYTES),
        ("PUT", "/galleries/shop/items", "multipart/form-data", BATCH + FORM_BYTES),
        ("PATCH", "/galleries/shop/items", "application/json", KEYS),
        ("POST", "/galleries/shop/items/delete", "application/json", KEYS),
        ("POST", "/jobs/train", "application/json", PLAIN),
        ("GET", "/live", "", PLAIN),
        ("POST", "/nowhere", "application/json", PLAIN),
        ("PUT", "/galleries/shop/items/7", "application/json", PLAIN),
    ],
)
def test_each_route_has_the_bound_that_it_needs(
    method: str, path: str, kind: str, expected: int
) -> None:
    assert bound(method, path, kind) == expected


def test_a_body_counts_as_one_upload_for_each_image_that_it_may_hold() -> None:
    bounds = Bounds(IMAGE, BATCH)
    assert bounds.places(0) == bounds.places(1) == bounds.places(IMAGE + FORM_BYTES) == 1
    assert bounds.places(IMAGE + FORM_BYTES + 1) == 2
    assert bounds.places(BATCH + FORM_BYTES) == 8


def test_json_may_be_larger_than_an_upload_and_is_refused_above_its_own_bound(
    start_service,
) -> None:
    service = start_service(max_upload_bytes=100_000, max_batch_bytes=400_000)
    headers = {"content-type": "application/json"}
    for size, refused in ((300_000, False), (600_000, True)):
        answer = service.client.post("/search", content=b"[" * size, headers=headers)
        assert (answer.status_code == 413) is refused
        assert answer.status_code < 500
    raw = service.client.post(
        "/search", content=bytes(300_000), headers={"content-type": "image/png"}
    )
    assert raw.status_code == 413
