"""A shop with attributes and a calibrated model, and searches in it, for tests of searches."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kinlens.embedder.calibration import Calibration, Curve, ViewsCurve
from kinlens.embedder.fake import FakeEmbedder
from tests.support.servers import Running, render
from tests.support.shops import start_shop
from tests.support.waiting import until
from tests.tiny import encoded

COUNT = 12
COLOURS = ("red", "green", "blue")
CALIBRATION = Calibration(
    thresholds=(),
    split="test",
    gallery_images=100,
    queries=100,
    negative_pairs=500,
    curves=(
        ViewsCurve(
            views=2,
            products=6,
            wrong_hits=500,
            curve=Curve(
                slope=20.0, hits=0.5, below=0.0, absent=6.0, absent_best=4.0, absent_last=8.0
            ),
        ),
    ),
)


def photo(number: int) -> bytes:
    """The image of item `number`, the one of the fixture `pictures` with that number."""
    return encoded(render(number))


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def attributes_of(number: int) -> dict[str, Any]:
    return {"colour": COLOURS[number % 3], "price": number, "product": f"p{number // 2}"}


def start_market(
    state: Path,
    calibration: Calibration | None = CALIBRATION,
    no_calibration: str | None = None,
    embedder: type[FakeEmbedder] = FakeEmbedder,
    **settings: Any,
) -> Any:
    """Items `000.png` .. with a colour of three, their number as price, two to a product."""
    shop = start_shop(
        state, embedder(calibration=calibration, no_calibration=no_calibration), **settings
    )
    items = {f"{n:03d}.png": photo(n) for n in range(COUNT)}
    texts = [json.dumps(attributes_of(n)) for n in range(COUNT)]
    shop.put_form(items, texts).raise_for_status()
    # The service looks at new items in the background.
    until(lambda: calibration is None or shop.gallery()["calibration"] is not None)
    return shop


def post(service: Running, body: dict[str, Any], path: str = "/search") -> httpx.Response:
    return service.client.post(path, json=body)


def found(service: Running, *images: bytes, **body: Any) -> dict[str, Any]:
    """The answer to a search as JSON."""
    sent = [{"data": text_of(data)} for data in images]
    response = post(service, {"images": sent, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def keys(answer: dict[str, Any]) -> list[str]:
    return [hit["key"] for hit in answer["hits"]]


def numbers(hits: Sequence[dict[str, Any]]) -> list[int]:
    return [hit["attributes"]["price"] for hit in hits]
