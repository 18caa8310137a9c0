"""Everybody can use the page: axe-core, keyboard only, any width, light and dark, no motion."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import (
    FITS,
    FOCUSED,
    PHONE,
    SMALL_TARGETS,
    OpenPage,
    drop_item,
    faults,
    judge,
    send_files,
    send_image,
    settled,
    tab_to,
    violations,
)
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

UNSEEN_FOCUS = """() => {
    const node = document.activeElement;
    const own = [node, node.closest(".card, .option, .batch-row"), node.nextElementSibling]
        .filter(Boolean).map((n) => getComputedStyle(n));
    const drawn = [...own, getComputedStyle(node, "::after")];
    return drawn.some((s) => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2)
        ? null : node.outerHTML.slice(0, 120);
}"""
COLUMNS = "(grid) => getComputedStyle(grid).gridTemplateColumns.split(' ').length"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def opened(open_shop: OpenPage, **settings: Any) -> Page:
    page = open_shop(reduced_motion="reduce", **settings)
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


def test_a_search_in_full_use_has_no_violation(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = opened(open_shop)
    page.get_by_test_id("settings").locator("summary").first.click()
    assert faults(page) == []
    drop_item(page, fake_shop, 0)
    columns = []
    for width_px in (1920, 360, 1280):
        page.set_viewport_size({"width": width_px, "height": 800})
        columns.append(page.get_by_test_id("grid").evaluate(COLUMNS))
    assert columns[0] > columns[2] > columns[1] == 2
    page.get_by_test_id("crop-add").click()
    page.get_by_role("checkbox", name="red").check()
    judge(page, "like", 1, chips=2)
    judge(page, "dislike", 3, chips=3)
    page.get_by_test_id("card").first.locator("summary").click()
    page.get_by_test_id("about").locator("summary").click()
    assert faults(page) == []
    page.get_by_test_id("clear-all").click()
    page.get_by_test_id("group").select_option("class")
    expect(page.get_by_test_id("card")).to_have_count(4)
    page.get_by_test_id("group-others").first.locator("summary").click()
    assert violations(page) == []
    page.route("**/search", lambda route: None)
    send_image(page, fake_shop.galleries["shop"][1].data)
    expect(page.get_by_test_id("progress")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0, "no motion was asked for"


def test_a_phone_has_large_targets(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = opened(open_shop, **PHONE)
    expect(page.get_by_test_id("camera")).to_be_visible()
    assert page.evaluate(SMALL_TARGETS) == []
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("settings").locator("summary").first.tap()
    page.get_by_test_id("like").first.tap()
    expect(page.get_by_test_id("chip")).to_have_count(1)
    settled(page)
    assert page.evaluate(SMALL_TARGETS) == []
    page.get_by_test_id("about").locator("summary").tap()
    send_files(page, (f"{'long' * 30}.txt", "text/plain", b"text"))
    expect(page.get_by_test_id("error")).to_be_visible()
    assert page.evaluate(FITS)


def test_the_keyboard_alone_does_everything(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = opened(open_shop)
    summary = page.get_by_test_id("summary")
    tab_to(page, "sample")
    page.keyboard.press("Enter")
    settled(page)
    expect(summary).to_be_focused()
    page.get_by_test_id("theme").focus()
    tab_to(page, "min-score")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("min-score-value")).to_contain_text("0.01")
    tab_to(page, "like")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("chip")).to_have_count(1)
    settled(page)
    assert page.evaluate(FOCUSED) in ("like", "summary")

    page.get_by_test_id("theme").focus()
    data = fake_shop.galleries["shop"][4].data
    with page.expect_file_chooser() as chooser:  # well before Enter: it takes a moment
        tab_to(page, "pick")
        page.keyboard.press("Enter")
    chooser.value.set_files({"name": "p.png", "mimeType": "image/png", "buffer": data})
    expect(page.get_by_test_id("query-name")).to_have_text("p.png")
    settled(page)
    page.get_by_role("link", name="Skip to results").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("results")).to_be_focused()
    tab_to(page, "card-search")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    expect(summary).to_be_focused()


def test_images_are_not_pasted_in_text_fields(results: Page, fake_shop: Shop) -> None:
    pasted = ("pasted.png", "image/png", fake_shop.galleries["shop"][1].data)
    results.get_by_test_id("filter").nth(2).evaluate("(node) => (node.open = true)")
    results.get_by_test_id("filter-from").focus()
    send_files(results, pasted, how="paste", where=":focus")
    results.get_by_role("checkbox", name="red").focus()
    expect(results.get_by_test_id("query-name")).to_have_text("mine-0.png")
    send_files(results, pasted, how="paste", where=":focus")
    expect(results.get_by_test_id("query-name")).to_have_text("pasted.png")
    settled(results)
    text = results.get_by_test_id("summary").inner_text()
    assert re.search(r"20 results, best \d+% sure", text)
    expect(results.get_by_test_id("live")).to_contain_text(text)


def test_the_focus_is_always_visible(results: Page) -> None:
    results.get_by_test_id("crop-add").click()
    settled(results)
    results.evaluate("document.activeElement.blur()")
    for _ in range(45):
        results.keyboard.press("Tab")
        if results.evaluate("document.activeElement !== document.body"):
            assert results.evaluate(UNSEEN_FOCUS) is None


def test_the_colours_follow_the_system_until_one_is_chosen(open_shop: OpenPage) -> None:
    page = opened(open_shop, color_scheme="dark")
    theme = page.locator("html")
    expect(theme).to_have_attribute("data-theme", "dark")
    dark = page.evaluate(BACKGROUND)
    page.emulate_media(color_scheme="light")
    expect(theme).to_have_attribute("data-theme", "light")
    assert page.evaluate(BACKGROUND) != dark
    page.get_by_test_id("theme").click()
    page.get_by_test_id("theme").click()
    expect(page.get_by_test_id("theme")).to_have_accessible_name("Colours: dark")
    expect(theme).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(theme).to_have_attribute("data-theme", "dark")
