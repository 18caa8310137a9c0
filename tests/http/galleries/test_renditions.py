"""Pictures for the screen are made in the decoding processes: small, bounded, killable, kept."""

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedder.errors import (
    DeadlineExceededError,
    ImageCostError,
    OverloadedError,
)
from embedder.preprocess import MAX_SIDE_PX, ImageLimits, render_jpeg
from service.galleries.pictures import SIDES_PX, Renditions
from tests.support.shops import Shop, assert_problem, start_shop
from tests.tiny import encoded, picture

LIMITS = ImageLimits()
WAIT_S = 20.0


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    assert image.format == "JPEG"
    return image


def link_of(shop: Shop, data: bytes, key: str = "k") -> str:
    shop.put({key: data})
    [link] = [item["image"] for item in shop.items()["items"] if item["key"] == key]
    return str(link)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF", "GIF", "WEBP"])
@pytest.mark.parametrize("size", [(300, 200), (40, 900), (60, 50)])
def test_a_picture_fits_its_side_and_keeps_its_shape(kind, size) -> None:
    made = opened(render_jpeg(encoded(picture(1, size), kind), LIMITS, 160))
    scale = min(1.0, 160 / max(size))
    assert max(made.size) == min(160, max(size))
    assert [abs(a - b * scale) <= 1 for a, b in zip(made.size, size, strict=True)] == [True, True]


def test_a_picture_shows_what_the_original_shows_upright_on_white() -> None:
    whole = picture(1, (320, 200))
    exif = Image.Exif()
    exif[0x0112] = 6
    made = opened(render_jpeg(encoded(whole, "JPEG", exif=exif, quality=95), LIMITS, 160))
    assert made.size == (100, 160)
    wanted = whole.transpose(Image.Transpose.ROTATE_270).resize((100, 160))
    difference = np.asarray(made, dtype=float) - np.asarray(wanted, dtype=float)
    assert np.abs(difference).mean() < 4
    clear = render_jpeg(encoded(Image.new("RGBA", (64, 64), (0, 0, 0, 0))), LIMITS, 160)
    assert opened(clear).getpixel((5, 5)) == (255, 255, 255)


def test_a_tiff_is_never_decoded_in_the_service_and_made_once(tmp_path, monkeypatch) -> None:
    shop = start_shop(tmp_path, decode_isolation=True, lanes=1)
    made: list[int] = []
    render = shop.running.runtime.lanes.render

    async def counted(*arguments: Any) -> bytes:
        made.append(1)
        return await render(*arguments)

    monkeypatch.setattr(shop.running.runtime.lanes, "render", counted)
    for module in ("embedder.preprocess", "indexer.ingest.pictures"):
        monkeypatch.setattr(f"{module}.decode", forbidden)
    link = link_of(shop, encoded(picture(3, (3000, 40)), "TIFF"))
    answers = [shop.client.get(link) for _ in range(3)]
    assert [opened(answer.content).size for answer in answers] == [(MAX_SIDE_PX, 27)] * 3
    assert answers[0].headers["content-type"] == "image/jpeg"
    assert made == [1]
    shop.close()


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("decoded in the service")


def test_a_small_picture_can_be_asked_for_and_has_an_etag_of_its_own(tmp_path) -> None:
    shop = start_shop(tmp_path)
    link = link_of(shop, encoded(picture(3, (900, 600))))
    whole = shop.client.get(link)
    etags = {whole.headers["etag"]}
    for side in SIDES_PX:
        answer = shop.client.get(link, params={"version": link[-12:], "size": side})
        assert opened(answer.content).size == (side, round(side * 2 / 3))
        assert len(answer.content) < len(whole.content)
        etags.add(answer.headers["etag"])
        again = shop.client.get(
            link,
            params={"version": link[-12:], "size": side},
            headers={"if-none-match": answer.headers["etag"]},
        )
        assert again.status_code == 304
    assert len(etags) == 4
    for size in ("0", "161", "-1", "x", "99999999999"):
        response = shop.client.get(link.partition("?")[0], params={"size": size})
        assert_problem(response, 422, "invalid-parameter")
    shop.client.delete("/galleries/shop/items", params={"key": "k"}).raise_for_status()
    gone = shop.client.get(link, params={"version": link[-12:], "size": 160})
    assert_problem(gone, 404, "unknown-item")
    shop.close()


def test_a_picture_above_the_limits_is_404_and_says_why(tmp_path) -> None:
    shop = start_shop(tmp_path)
    link = link_of(shop, encoded(picture(3, (1200, 1000)), "TIFF"))
    shop.close()
    shop = start_shop(tmp_path, create=False, max_megapixels=1.0)
    problem = assert_problem(shop.client.get(link), 404, "unknown-item")
    assert "1.2 MP" in problem["detail"]
    shop.close()


class Slow:
    """A decoder that counts how many pictures it makes at the same time."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.now = self.most = self.made = 0

    async def render(self, *_: Any) -> bytes:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        self.made += 1
        return b"jpeg"


def test_few_are_made_at_once_what_waits_is_bounded_and_the_same_is_made_once() -> None:
    async def use() -> None:
        slow, read = Slow(), []

        async def reading() -> bytes:
            read.append(1)
            return b"tiff"

        made = Renditions(slow, LIMITS, at_once=2, waiting=3, limit_s=WAIT_S)  # type: ignore[arg-type]
        keys = ["a", "a", "b", "c", "d", "e"]
        tasks = [asyncio.create_task(made.get(key, reading)) for key in keys]
        await asyncio.sleep(0.05)
        assert len(read) == slow.most == 2, "nothing is read before it has a place"
        with pytest.raises(OverloadedError):
            await made.get("f", reading)
        slow.go.set()
        assert await asyncio.gather(*tasks) == [b"jpeg"] * 6
        assert slow.most == 2
        assert slow.made == 5
        assert await made.get("a", reading) == b"jpeg"
        assert slow.made == 5

    asyncio.run(use())


def test_a_picture_that_costs_too_much_is_503_and_not_tried_again_at_once() -> None:
    class Costly:
        tried = 0

        async def render(self, *_: Any) -> bytes:
            self.tried += 1
            raise ImageCostError("killed")

    async def reading() -> bytes:
        return b""

    async def use() -> None:
        costly = Costly()
        made = Renditions(costly, LIMITS, at_once=1, waiting=0, limit_s=WAIT_S)  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(DeadlineExceededError):
                await made.get("a", reading)
        assert costly.tried == 1

    asyncio.run(use())
