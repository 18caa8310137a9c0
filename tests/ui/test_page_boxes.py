"""Parts of a photo that a detector found, offered before the first search with the photo."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from kinlens.embedder.bundle import Bundle
from tests.support.detectors import bright_photo, with_detector
from tests.support.page_browser import (
    PHONE,
    OpenPage,
    drop_item,
    intercept,
    opening,
    received,
    send_image,
    settled,
    tab_to,
    violations,
)
from tests.support.page_shop import Shop
from tests.support.servers import DEFAULTS, create_app, run, settings_of

pytestmark = pytest.mark.browser

CAR = {"box": [0.5, 0.4, 0.4, 0.5], "score": 0.9, "label": "car"}
TABLE = {"box": [0, 0, 1, 0.9], "score": 0.8, "label": None}
PLACED = """(frame) => ["left", "top", "width", "height"]
    .map((side) => Number.parseFloat(frame.style[side]) / 100)"""


@pytest.fixture
def offered(open_shop: OpenPage, fake_shop: Shop) -> Page:
    """A photo with two boxes, of which none was chosen yet."""
    fake_shop.boxes = [CAR, TABLE]
    return offer(open_shop, fake_shop)


def offer(open_shop: OpenPage, shop: Shop, **settings: object) -> Page:
    page = open_shop(**settings)
    expect(page.get_by_test_id("sample")).to_have_count(8)
    send_image(page, shop.galleries["shop"][0].data, "street.png")
    expect(page.get_by_test_id("choice")).to_have_count(2)
    return page


def assert_searched(page: Page, shop: Shop, *crops: list[float]) -> None:
    settled(page)
    expect(page.get_by_test_id("card")).to_have_count(20)
    expect(page.get_by_test_id("query-name")).to_have_text("street.png")
    expect(page.get_by_test_id("choice")).to_have_count(0)
    expect(page.get_by_test_id("crop-frame")).to_have_count(len(crops))
    [asked] = shop.asked
    assert np.allclose(asked.crop, crops, atol=0.01) if crops else asked.crop == []


def test_a_box_is_chosen_before_the_first_search(offered: Page, fake_shop: Shop) -> None:
    expect(offered.get_by_test_id("summary")).to_have_text("What are you looking for?")
    expect(offered.get_by_test_id("live")).to_contain_text("Select it on the photo")
    expect(offered.get_by_test_id("results")).to_have_attribute("aria-busy", "false")
    table, car = offered.get_by_test_id("choice").all()  # the smaller one is on top
    assert np.allclose([table.evaluate(PLACED), car.evaluate(PLACED)], [TABLE["box"], CAR["box"]])
    expect(table).to_have_accessible_name("Search with this part, middle part")
    expect(car).to_have_accessible_name("Search with car, bottom right part")
    assert violations(offered) == []
    assert fake_shop.asked == []
    car.click()
    assert_searched(offered, fake_shop, CAR["box"])
    offered.go_back()
    expect(offered.locator("body")).to_have_attribute("data-state", "start")
    offered.go_forward()
    expect(offered.get_by_test_id("crop-frame")).to_have_count(1)


def test_the_keyboard_chooses_a_box(offered: Page, fake_shop: Shop) -> None:
    tab_to(offered, "choice")
    offered.keyboard.press("Tab")
    offered.keyboard.press("Enter")
    assert_searched(offered, fake_shop, CAR["box"])


def test_a_finger_chooses_a_box(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.boxes = [CAR, TABLE]
    page = offer(open_shop, fake_shop, **PHONE)
    car = page.get_by_test_id("choice").nth(1)
    size = car.bounding_box()
    assert size is not None
    assert min(size["width"], size["height"]) >= 44
    car.tap()
    assert_searched(page, fake_shop, CAR["box"])


def test_the_whole_photo_can_be_chosen(offered: Page, fake_shop: Shop) -> None:
    offered.get_by_test_id("choice-whole").click()
    assert_searched(offered, fake_shop)


def test_another_part_can_be_chosen(offered: Page, fake_shop: Shop) -> None:
    offered.get_by_test_id("crop-add").click()
    assert_searched(offered, fake_shop, [0.2, 0.2, 0.6, 0.6])


def test_escape_leaves_the_choice(offered: Page, fake_shop: Shop) -> None:
    offered.keyboard.press("Escape")
    expect(offered.locator("body")).to_have_attribute("data-state", "start")
    expect(offered.get_by_test_id("choice")).to_have_count(0)
    assert fake_shop.asked == []


def test_another_photo_replaces_the_choice(offered: Page, fake_shop: Shop) -> None:
    fake_shop.boxes = []  # then the whole photo is searched at once
    drop_item(offered, fake_shop, 3)
    expect(offered.get_by_test_id("choice")).to_have_count(0)
    assert [asked.crop for asked in fake_shop.asked] == [[]]


def test_a_photo_is_searched_if_no_boxes_come(
    open_shop: OpenPage, fake_shop: Shop, allowed: list[str]
) -> None:
    allowed.append("503")
    fake_shop.boxes = [CAR]
    page = open_shop()
    expect(page.get_by_test_id("sample")).to_have_count(8)
    pending = intercept(page, "**/boxes", times=1)
    send_image(page, fake_shop.galleries["shop"][0].data, "street.png")
    received(page, pending, 1)
    expect(page.get_by_test_id("results")).to_have_attribute("aria-busy", "true")
    assert fake_shop.asked == []
    pending[0].fulfill(status=503)
    assert_searched(page, fake_shop)


def test_the_boxes_of_a_real_detector_are_offered(
    browser: Browser, tiny_bundle: Bundle, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    bundle = with_detector(tiny_bundle, tmp_path / "bundle").path
    service = run(create_app(settings_of(**DEFAULTS | tiny_settings | {"bundle": bundle})))
    with closing(service), opening(browser, service.url.rstrip("/")) as open_it:
        page = open_it()
        expect(page.get_by_test_id("sample").first).to_be_visible()
        send_image(page, bright_photo((1, 1), (3, 0)))
        choices = page.get_by_test_id("choice")
        expect(choices).to_have_count(2)
        expect(choices.last).to_have_accessible_name("Search with thing, top right part")
        choices.last.click()
        settled(page)
        expect(page.get_by_test_id("crop-frame")).to_have_count(1)
        page.get_by_test_id("crop-auto").check()
        places = {"Whole photo", "Top right part", "Bottom part", "Bottom left part"}
        expect(page.get_by_test_id("found-with").first).to_be_visible()
        assert {*page.get_by_test_id("found-with").all_inner_texts()} <= places
