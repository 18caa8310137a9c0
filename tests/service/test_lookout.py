"""Looks at the disk on request: shared, few in a second, none waited for without end."""

import asyncio
import time

import pytest

from embedder.errors import DeadlineExceededError, GalleryError
from embedder.fake import FakeEmbedder
from service.galleries.lookout import PER_SECOND, Lookout
from tests.service.shops import assert_problem, start_shop
from tests.tiny import encoded, picture

WAIT_S = 20.0


def test_what_another_process_made_is_there_at_the_first_request(tmp_path) -> None:
    data = encoded(picture(1))
    slow = {"reload_interval_ms": 600_000}
    maker = start_shop(tmp_path, FakeEmbedder(), **slow)
    for name, ask in {
        "put": lambda shop: shop.put_form({"k": data}, gallery="put"),
        "patch": lambda shop: shop.client.patch(
            "/galleries/patch/items", json={"changes": {"k": {"a": 1}}}
        ),
        "list": lambda shop: shop.client.get("/galleries/list/items"),
        "describe": lambda shop: shop.client.get("/galleries/describe"),
        "search": lambda shop: shop.running.search(data, gallery="search"),
        "item": lambda shop: shop.client.get("/galleries/item/items/1"),
        "image": lambda shop: shop.client.get("/galleries/image/items/1/image?size=160"),
        "one": lambda shop: shop.client.delete("/galleries/one/items/1"),
        "remove": lambda shop: shop.client.delete("/galleries/remove/items", params={"key": "k"}),
        "many": lambda shop: shop.client.post("/galleries/many/items/delete", json={"keys": ["k"]}),
        "delete": lambda shop: shop.client.delete("/galleries/delete"),
    }.items():
        other = start_shop(tmp_path, FakeEmbedder(), create=False, **slow)
        maker.client.post("/galleries", json={"name": name}).raise_for_status()
        maker.put({"k": data}, gallery=name, a=0)
        answer = ask(other)
        assert answer.is_success, (name, answer.text)
        assert_problem(other.client.get("/galleries/nowhere"), 404, "unknown-gallery")
        other.close()
    maker.close()


def test_unknown_names_cannot_load_the_disk() -> None:
    looks = 0

    async def refresh() -> None:
        nonlocal looks
        looks += 1

    async def use() -> None:
        lookout = Lookout(refresh)
        begun = time.monotonic()
        while time.monotonic() < begun + 0.5:
            await asyncio.gather(*(lookout.look(WAIT_S) for _ in range(50)))
        assert PER_SECOND <= looks <= 2 * PER_SECOND
        await lookout.close()

    asyncio.run(use())


def test_a_look_begins_after_it_was_asked_for() -> None:
    begun: list[asyncio.Event] = []

    async def refresh() -> None:
        begun.append(asyncio.Event())
        await begun[-1].wait()

    async def use() -> None:
        lookout = Lookout(refresh)
        first = asyncio.create_task(lookout.look(WAIT_S))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(lookout.look(WAIT_S))
        third = asyncio.create_task(lookout.look(WAIT_S))
        await asyncio.sleep(0.01)
        assert len(begun) == 1
        begun[0].set()
        await first
        await asyncio.sleep(0.01)
        assert len(begun) == 2
        assert not second.done()
        begun[1].set()
        await asyncio.gather(second, third)
        assert len(begun) == 2
        await lookout.close()

    asyncio.run(use())


def test_a_disk_that_hangs_or_fails_is_told_in_time_and_piles_nothing_up() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise OSError(5, "Input/output error")

    async def use() -> None:
        hanging, failing = Lookout(hang), Lookout(fail)
        for _ in range(5):
            with pytest.raises(DeadlineExceededError):
                await hanging.look(0.01)
            with pytest.raises(GalleryError, match="Input/output"):
                await failing.look(WAIT_S)
        assert len(asyncio.all_tasks()) <= 3
        await hanging.close()
        await failing.close()

    asyncio.run(use())


def test_a_gallery_that_is_made_while_the_disk_hangs_is_503_in_time(tmp_path, monkeypatch) -> None:
    shop = start_shop(tmp_path, request_timeout_ms=500, reload_interval_ms=600_000)
    gate = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        await gate.wait()

    with monkeypatch.context() as patch:
        patch.setattr(shop.running.runtime.registry._lookout, "_refresh", hang)
        answer = shop.client.post("/galleries", json={"name": "new"})
        assert_problem(answer, 503, "deadline-exceeded")
        assert_problem(shop.client.delete("/galleries/shop"), 503, "deadline-exceeded")
        assert shop.client.get("/live").status_code == 200
    shop.close()
