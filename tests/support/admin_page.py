"""The admin page of a real service in a real Chromium, for the tests of it."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect

from kinlens.embedder.calibration import Calibration
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.access.keys import Limits
from tests.support import page_browser
from tests.support.shops import Shop, start_shop

FEW, MANY = 12, 60
COLOURS = ("red", "green", "blue")
CALIBRATION = Calibration.model_validate(
    {
        "thresholds": [{"false_matches": 0.1, "pair_score": 0.4, "search_score": 0.6}],
        "split": "validation",
        "gallery_images": 9,
        "queries": 9,
        "negative_pairs": 9,
    }
)


class AdminShop:
    """A service that only lets keys change it, and the secret of one that may do all."""

    def __init__(self, state: Path, images: list[bytes], **settings: Any) -> None:
        given = {"anonymous_scopes": ("search",), "create": False} | settings
        self.shop: Shop = start_shop(state, FakeEmbedder(calibration=CALIBRATION), **given)
        self.url = str(self.shop.client.base_url)
        self.images = images
        self.key = self.make_key("office", "admin")
        self.shop.client.headers["Authorization"] = f"Bearer {self.key}"

    def make_key(self, name: str, scope: Any, **limits: Any) -> str:
        store = self.shop.running.runtime.keys
        assert store is not None
        return store.create(name, (scope,), limits=Limits(**limits))

    def stock(self, gallery: str = "shop", count: int = FEW) -> None:
        """A new gallery of `count` items with colour, price and sale."""
        self.shop.client.delete(f"/galleries/{gallery}")
        self.shop.client.post("/galleries", json={"name": gallery}).raise_for_status()
        if count == 0:
            return
        numbers = range(count)
        images = {f"i/{n:02d}.png": self.images[n % len(self.images)] for n in numbers}
        texts = [
            json.dumps({"colour": COLOURS[n % 3], "price": n, "sale": n % 2 == 0}) for n in numbers
        ]
        answer = self.shop.put_form(images, texts, gallery)
        assert answer.json()["added"] == count, answer.text

    def keys(self, gallery: str = "shop", **query: Any) -> list[str]:
        found = self.shop.items(gallery, limit=200, **query)["items"]
        return [item["key"] for item in found]

    def attributes(self, key: str, gallery: str = "shop") -> dict[str, Any]:
        [item] = self.shop.items(gallery, key_prefix=key)["items"]
        found: dict[str, Any] = item["attributes"]
        return found


def opening(
    browser: Browser, url: str, key: str | None, allowed: Sequence[str] = ()
) -> AbstractContextManager[page_browser.OpenPage]:
    """Opens pages of the service with the key, if any, in their tab."""
    script = f"sessionStorage.setItem('kinlens.key', {json.dumps(key)})"
    before = (lambda page: page.add_init_script(script)) if key else None
    return page_browser.opening(browser, url, allowed, before)


def rows(page: Page) -> Locator:
    return page.get_by_test_id("row")


def row(page: Page, key: str) -> Locator:
    return page.locator(f'[data-testid=row][data-key="{key}"]')


def drop(page: Page, *files: tuple[str, bytes]) -> None:
    """Drop files, each (name, bytes), on the view for adding."""
    expect(page.get_by_test_id("add-drop")).to_be_visible()
    images = ((name, "image/png", data) for name, data in files)
    page_browser.send_files(page, *images, where="[data-testid=add-drop]")


def added(page: Page) -> list[str]:
    """The state of each listed image, once nothing is being sent."""
    expect(page.get_by_test_id("queue-clear")).to_be_visible()
    return page.get_by_test_id("queue-state").all_text_contents()


def fill_row(page: Page, number: int, name: str, kind: str, value: str) -> None:
    """A row of the attribute editor that is open; it must be there."""
    line = page.locator(".attribute-row").filter(visible=True).nth(number)
    line.get_by_label("Name").fill(name)
    line.get_by_label("Kind").select_option(kind)
    field = line.get_by_label("Value")
    if kind == "boolean":
        field.select_option(value)
    else:
        field.fill(value)


def job(number: int, state: str, **more: object) -> dict[str, object]:
    """A job of the gallery `shop` as the service lists it."""
    times = {"created_at": "2026-01-01T00:00:00.000+00:00", "started_at": None, "ended_at": None}
    return {
        "id": f"{number:012x}",
        "kind": "rebuild",
        "gallery": "shop",
        "state": state,
        "step": "embed images: 400 of 1,000",
        "done": 400,
        "total": 1000,
        "by": "office",
        "params": {"bundle_id": "b" * 64, "swap": "never"},
        "error": None,
        "report": None,
        **times,
        **more,
    }
