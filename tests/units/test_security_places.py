"""Slots for arriving bodies, and how large a body may be where it goes."""

import pytest

from service.http.bodies import FORM_BYTES, Bounds, Upload, UploadSlots
from tests.support.seams import RouteTable

IMAGE, BATCH, KEYS, PLAIN = 5 * 2**20, 40 * 2**20, 2**20, 16 * 2**10


def upload(address: str, slots: int = 1, gone: list[bool] | None = None) -> Upload:
    return Upload(address, slots, lambda: None if gone is None else gone.append(True))


def test_another_address_takes_the_oldest_slot_of_the_one_that_has_most() -> None:
    slots = UploadSlots(4)
    first: list[bool] = []
    others: list[bool] = []
    held = [upload("a", gone=first), *(upload(name, gone=others) for name in "aab")]
    assert all(slots.enter(each) for each in held)
    assert slots.enter(upload("c"))
    assert (first, others) == ([True], [])
    assert slots.taken == 4


def test_addresses_end_up_with_equal_shares() -> None:
    slots = UploadSlots(8)
    gone: list[bool] = []
    for _ in range(8):
        slots.enter(upload("a", gone=gone))
    entered = [slots.enter(upload("b")) for _ in range(8)]
    assert sum(entered) == len(gone) == 4


def test_a_large_body_counts_as_several_and_is_let_in_when_all_is_free() -> None:
    slots = UploadSlots(4)
    assert slots.enter(upload("a", slots=9))
    assert slots.taken == 4
    small = upload("b")
    assert slots.enter(small)
    assert not slots.enter(upload("a", slots=9))
    slots.leave(small)
    assert slots.taken == 0


@pytest.mark.parametrize(
    ("method", "path", "kind", "expected"),
    [
        ("POST", "/search", "multipart/form-data", IMAGE + FORM_BYTES),
        ("POST", "/search", "image/jpeg", IMAGE + FORM_BYTES),
        ("POST", "/search", "", IMAGE + FORM_BYTES),
        ("POST", "/search", "application/json", BATCH + FORM_BYTES),
        ("POST", "/search/batch", "multipart/form-data", BATCH + FORM_BYTES),
        ("PUT", "/galleries/shop/items", "multipart/form-data", BATCH + FORM_BYTES),
        ("PATCH", "/galleries/shop/items", "application/json", KEYS),
        ("POST", "/galleries/shop/items/delete", "application/json", KEYS),
        ("POST", "/jobs/train", "application/json", PLAIN),
        ("GET", "/live", "", PLAIN),
        ("DELETE", "/galleries/shop/items/7", "application/json", PLAIN),
    ],
)
def test_each_route_has_the_bound_that_it_needs(
    running_service, method: str, path: str, kind: str, expected: int
) -> None:
    route = RouteTable(running_service.app.routes).match(method, path)
    assert route is not None
    assert Bounds(IMAGE, BATCH).of(route, kind) == expected


def test_a_body_counts_as_one_upload_for_each_image_that_it_may_hold() -> None:
    bounds = Bounds(IMAGE, BATCH)
    assert bounds.slots(0) == bounds.slots(1) == bounds.slots(IMAGE + FORM_BYTES) == 1
    assert bounds.slots(IMAGE + FORM_BYTES + 1) == 2
    assert bounds.slots(BATCH + FORM_BYTES) == 8


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
