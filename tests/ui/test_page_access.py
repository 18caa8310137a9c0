"""Everybody can use the page: axe-core, keyboard alone, any width, light and dark, no motion."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_access import PHONE, SMALL_TARGETS, too_wide, violations
from tests.support.page_browser import (
    FOCUSED,
    OpenShop,
    drop_item,
    drop_many,
    send_bytes,
    settled,
    tab_to,
    until,
)
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser


def opened(open_shop: OpenShop, *allowed: str, **settings: Any) -> Page:
    page = open_shop(allowed=allowed, reduced_motion="reduce", **settings)
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


def test_the_start_has_no_violation(open_shop: OpenShop) -> None:
    page = opened(open_shop)
    page.get_by_test_id("settings").locator("summary").first.click()
    assert violations(page) == []


def test_results_with_everything_in_use_have_no_violation(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = opened(open_shop)
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("crop-add").click()
    page.get_by_role("checkbox", name="red").check()
    page.get_by_test_id("like").nth(1).click()
    expect(page.get_by_test_id("chip")).to_have_count(2)
    settled(page)
    page.get_by_test_id("dislike").nth(3).click()
    expect(page.get_by_test_id("chip")).to_have_count(3)
    settled(page)
    page.get_by_test_id("card").first.locator("summary").click()
    page.get_by_test_id("about").locator("summary").click()
    assert violations(page) == []


def test_groups_and_no_match_have_no_violation(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop)
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("group").select_option("class")
    expect(page.get_by_test_id("card")).to_have_count(4)
    page.get_by_test_id("group-others").first.locator("summary").click()
    assert violations(page) == []
    page.get_by_role("checkbox", name="mug").check()
    page.get_by_test_id("filter").nth(2).locator("summary").click()
    page.get_by_test_id("filter-from").fill("23")
    expect(page.get_by_test_id("empty")).to_be_visible()
    assert violations(page) == []


def test_the_batch_and_the_dialogs_have_no_violation(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop, "415", permissions=["camera"])
    drop_many(page, fake_shop, 3, broken=1)
    expect(page.get_by_test_id("summary")).to_contain_text("1 failed")
    assert violations(page) == []
    page.get_by_test_id("batch-open").first.click()
    settled(page)
    until(page, "'kinlens.searches' in localStorage")
    page.get_by_test_id("history-open").click()
    expect(page.get_by_test_id("history-entry")).to_have_count(1)
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_test_id("camera").click()
    expect(page.get_by_test_id("camera-shoot")).to_be_enabled()
    assert violations(page) == []


def test_errors_and_the_key_form_have_no_violation(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop, "401", "503")
    headers = {"Retry-After": "30"}
    page.route("**/search", lambda route: route.fulfill(status=503, headers=headers))
    send_bytes(page, "drop", "query.png", "image/png", fake_shop.galleries["shop"][0].data)
    expect(page.get_by_test_id("error-retry")).to_be_disabled()
    assert violations(page) == []
    page.unroute("**/search")
    fake_shop.key = "kl_1_secret"
    send_bytes(page, "drop", "query.png", "image/png", fake_shop.galleries["shop"][0].data)
    expect(page.get_by_test_id("key")).to_be_visible()
    assert violations(page) == []


def test_the_phone_has_no_violation_and_large_targets(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop, **PHONE)
    assert page.evaluate(SMALL_TARGETS) == []
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("settings").locator("summary").first.tap()
    page.get_by_test_id("like").first.tap()
    expect(page.get_by_test_id("chip")).to_have_count(1)
    settled(page)
    assert page.evaluate(SMALL_TARGETS) == []
    assert violations(page) == []


def test_nothing_scrolls_sideways_at_any_width(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop, "415")
    assert too_wide(page) == []
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("like").first.click()
    expect(page.get_by_test_id("chip")).to_have_count(1)
    assert too_wide(page) == []
    drop_many(page, fake_shop, 3, broken=1)
    expect(page.get_by_test_id("summary")).to_contain_text("1 failed")
    assert too_wide(page) == []


def test_a_wide_screen_shows_more_columns_than_a_phone(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    columns = []
    for width_px in (360, 1280, 1920):
        page = opened(open_shop, viewport={"width": width_px, "height": 800})
        drop_item(page, fake_shop, 0)
        tracks = page.get_by_test_id("grid").evaluate(
            "(grid) => getComputedStyle(grid).gridTemplateColumns.split(' ').length"
        )
        columns.append(tracks)
    assert columns[0] == 2
    assert columns == sorted(set(columns))


def test_the_keyboard_alone_searches_narrows_likes_and_goes_back(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = opened(open_shop)
    tab_to(page, "sample")
    page.keyboard.press("Enter")
    settled(page)
    page.get_by_test_id("theme").focus()
    tab_to(page, "crop-add")
    tab_to(page, "min-score")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("min-score-value")).to_contain_text("0.01")
    tab_to(page, "card-search")
    tab_to(page, "like")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("chip")).to_have_count(1)
    settled(page)
    assert page.evaluate(FOCUSED) in ("like", "summary")


def test_the_focus_is_always_visible(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop)
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("crop-add").click()
    settled(page)
    unseen = """() => {
        const node = document.activeElement;
        const own = [node, node.closest(".card, .option, .batch-row"), node.nextElementSibling]
            .filter(Boolean).map((n) => getComputedStyle(n));
        const drawn = [...own, getComputedStyle(node, "::after")];
        return drawn.some((s) => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2)
            ? null : node.outerHTML.slice(0, 120);
    }"""
    page.evaluate("document.activeElement.blur()")
    for _ in range(45):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue
        assert page.evaluate(unseen) is None


def test_the_colours_follow_the_system_until_one_is_chosen(open_shop: OpenShop) -> None:
    page = opened(open_shop, color_scheme="dark")
    theme = page.locator("html")
    expect(theme).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(theme).to_have_attribute("data-theme", "light")
    page.get_by_test_id("theme").click()
    page.get_by_test_id("theme").click()
    expect(page.get_by_test_id("theme")).to_have_accessible_name("Colours: dark")
    expect(theme).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(theme).to_have_attribute("data-theme", "dark")
    page.get_by_test_id("theme").click()
    expect(theme).to_have_attribute("data-theme", "light")


def test_nothing_moves_for_those_who_want_no_motion(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop)
    page.route("**/search", lambda route: None)
    send_bytes(page, "drop", "query.png", "image/png", fake_shop.galleries["shop"][0].data)
    expect(page.get_by_test_id("progress")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0
