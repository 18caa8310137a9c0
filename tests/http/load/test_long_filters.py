"""Long filters are slow to parse, so no route parses them on the event loop."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kinlens.service.api import requests
from tests.support.shops import Shop, base64_of, start_shop

TEXT = f"price in ({','.join(['1'] * 800)})"
TREE = {"price": {"in": [1] * 800}}
LIKE = {"positives": ["a"]}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, photos: list[bytes]) -> Iterator[Shop]:
    shop = start_shop(tmp_path_factory.mktemp("state"))
    shop.put({"a": photos[0], "b": photos[1]}, price=1)
    yield shop
    shop.close()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each filter that is parsed, whether that happens on an event loop."""
    seen: list[bool] = []

    def watched(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(value: Any) -> Any:
            seen.append(asyncio._get_running_loop() is not None)
            return parse(value)

        return look

    for name in ("parse_filter", "filter_from_json"):
        monkeypatch.setattr(requests, name, watched(getattr(requests, name)))
    return seen


def item(shop: Shop) -> str:
    """The address of the first item."""
    return f"{shop.url}/items/{shop.items()['items'][0]['id']}"


ASKED: dict[str, Callable[[Shop, bytes], Any]] = {
    "form": lambda shop, image: shop.search(image, filter=TEXT),
    "bare image": lambda shop, image: shop.client.post(
        "/search", params={"filter": TEXT}, content=image, headers={"content-type": "image/png"}
    ),
    "JSON": lambda shop, _: shop.client.post("/search", json=LIKE | {"filter": TREE}),
    "JSON that hides the name": lambda shop, _: shop.client.post(
        "/search",
        content=json.dumps(LIKE | {"filter": TEXT}).replace("filter", "\\u0066ilter"),
        headers={"content-type": "application/json"},
    ),
    "batch": lambda shop, _: shop.client.post(
        "/search/batch", json={"queries": [LIKE | {"filter": TEXT}]}
    ),
    "batch of images": lambda shop, image: shop.client.post(
        "/search/batch", files={"image": ("a", image)}, data={"filter": TEXT, "gallery": "shop"}
    ),
    "explain": lambda shop, image: shop.client.post(
        f"{item(shop)}/explain",
        json={"images": [{"data": base64_of(image)}], "filter": TEXT},
    ),
    "similar": lambda shop, _: shop.client.get(f"{item(shop)}/similar", params={"filter": TEXT}),
    "items": lambda shop, _: shop.client.get(f"{shop.url}/items", params={"filter": TEXT}),
    "facets": lambda shop, _: shop.client.get(
        f"{shop.url}/items", params={"filter": TEXT, "facets": "price"}
    ),
    "delete": lambda shop, _: shop.client.post(
        f"{shop.url}/items/delete", json={"filter": TEXT.replace("1", "7")}
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_no_route_parses_a_long_filter_on_the_event_loop(name: str, shop, parsed, photos) -> None:
    answer = ASKED[name](shop, photos[2])
    assert answer.status_code == 200, answer.text
    assert parsed
    assert not any(parsed)


def test_an_escaped_field_name_is_not_parsed_on_the_event_loop(shop, parsed, photos) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + photos[2]
    body += b'\r\n--b\r\nContent-Disposition: form-data; name="f\\ilter"\r\n\r\n' + TEXT.encode()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = shop.client.post("/search", content=body + b"\r\n--b--\r\n", headers=headers)
    assert answer.status_code in (200, 400, 422), answer.text
    assert not any(parsed)


def test_a_short_filter_costs_no_thread(shop, parsed, photos) -> None:
    assert shop.search(photos[2], filter="price < 2").json()["hits"]
    assert parsed == [True]
