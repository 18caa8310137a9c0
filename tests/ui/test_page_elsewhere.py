"""Hits whose image is at the shop: shown by the page, if the settings name the origin."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.page_browser import opening, send_image, settled
from tests.support.shops import Shop, start_shop
from tests.support.stores import WebStore
from tests.support.waiting import until
from tests.tiny import encoded, photo

pytestmark = pytest.mark.browser

LOADED = "(images) => images.every((image) => image.complete && image.naturalWidth > 0)"


@pytest.fixture
def shop(tmp_path: Path, web_store: WebStore) -> Iterator[Shop]:
    made = start_shop(tmp_path / "state", image_url=f"{web_store.address}/{{key}}")
    for n in range(3):
        web_store.write(f"lamps/{n}.png", data := encoded(photo(n)))
        item = {"image": ("x.png", data), "key": (None, f"lamps/{n}.png"), "keep": (None, "false")}
        made.client.put(f"{made.url}/items", files=item).raise_for_status()
    yield made
    made.close()


def test_the_page_shows_images_of_the_shop(
    browser: Browser, shop: Shop, web_store: WebStore
) -> None:
    with opening(browser, shop.running.url.rstrip("/")) as open_it:
        page = open_it("/")
        send_image(page, encoded(photo(1)))
        settled(page)
        images = page.locator(".card .card-image img")
        expect(images).to_have_count(3)
        assert images.first.evaluate("(image) => image.src") == f"{web_store.address}/lamps/1.png"
        until(lambda: images.evaluate_all(LOADED))
