"""Where a result matches: a toggle on each card, a heat map over both images."""

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.page_browser import OpenPage, judge, search_with_card, searched
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

HEAT = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    return Array.from({ length: height }, (_, row) => Array.from({ length: width },
        (_, column) => data[4 * (row * width + column) + 3] > 0));
}"""
HIT = [[row > 1 and column > 1 for column in range(4)] for row in range(4)]
QUERY = [[row < 2 and column < 2 for column in range(4)] for row in range(4)]


def heat(page: Page, where: str) -> Locator:
    return page.locator(f"{where} canvas")


def position(layer: Locator, over: Locator) -> list[float]:
    """left, top, width, height of a layer in fractions of the element below it."""
    inner, outer = layer.bounding_box(), over.bounding_box()
    assert inner is not None
    assert outer is not None
    across, down = outer["width"], outer["height"]
    left, top = (inner["x"] - outer["x"]) / across, (inner["y"] - outer["y"]) / down
    return [left, top, inner["width"] / across, inner["height"] / down]


def test_a_toggle_shows_the_regions_of_both_images_and_another_replaces_it(results: Page) -> None:
    toggles = results.get_by_test_id("where")
    toggles.first.click()
    first = results.get_by_test_id("card").first
    expect(first.locator("canvas")).to_have_count(1)
    expect(heat(results, "#stage")).to_have_count(1)
    expect(toggles.first).to_have_attribute("aria-pressed", "true")
    assert first.locator("canvas").evaluate(HEAT) == HIT
    assert heat(results, "#stage").evaluate(HEAT) == QUERY
    # The model sees the middle: here 0.8 of each side.
    middle = pytest.approx([0.1, 0.1, 0.8, 0.8], abs=0.02)
    assert position(first.locator("canvas"), first.locator(".card-image")) == middle

    toggles.nth(2).click()
    expect(results.get_by_test_id("card").nth(2).locator("canvas")).to_have_count(1)
    expect(results.get_by_test_id("heat")).to_have_count(2)
    expect(toggles.first).to_have_attribute("aria-pressed", "false")
    toggles.nth(2).click()
    expect(results.get_by_test_id("heat")).to_have_count(0)

    results.get_by_test_id("card-search").first.focus()
    results.keyboard.press("w")
    expect(results.get_by_test_id("heat")).to_have_count(2)
    search_with_card(results, 1)
    expect(results.get_by_test_id("heat")).to_have_count(0)
    results.get_by_test_id("where").first.click()  # sent with the image of the item
    expect(results.get_by_test_id("heat")).to_have_count(2)


def test_of_a_part_its_middle_is_covered(results: Page) -> None:
    results.get_by_test_id("crop-add").click()  # the middle 0.6 of each side
    expect(results.get_by_test_id("crop-frame")).to_have_count(1)
    expect(results.get_by_test_id("results")).to_have_attribute("aria-busy", "false")
    judge(results, "like", 1, chips=1)
    results.get_by_test_id("where").first.click()
    layer, stage = heat(results, "#stage"), results.get_by_test_id("stage")
    expect(layer).to_have_count(1)
    box = stage.bounding_box()
    assert box is not None
    side = 0.8 * 0.6 * min(box["width"], box["height"])
    across, down = side / box["width"], side / box["height"]
    expected = [(1 - across) / 2, (1 - down) / 2, across, down]
    assert position(layer, stage) == pytest.approx(expected, abs=0.02)


def test_a_failure_is_shown_and_a_model_without_a_map_has_no_toggle(
    open_shop: OpenPage, fake_shop: Shop, results: Page, allowed: list[str]
) -> None:
    allowed.append("404")
    fake_shop.galleries["shop"] = fake_shop.galleries["shop"][:1]
    results.get_by_test_id("where").nth(3).click()
    expect(results.get_by_test_id("error")).to_contain_text("There is no such item")
    expect(results.get_by_test_id("where").nth(3)).to_have_attribute("aria-pressed", "false")

    fake_shop.reset()
    fake_shop.has_map = False
    page = searched(open_shop, fake_shop)
    expect(page.get_by_test_id("where")).to_have_count(0)
