"""The page keeps the focus where the reader works, and the keys do what they say."""

import base64

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import OpenShop, drop_item, keys, settled
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

PASTE = """(coded) => {
    const bytes = Uint8Array.from(atob(coded), (letter) => letter.charCodeAt(0));
    const clipboardData = new DataTransfer();
    clipboardData.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
    const options = { bubbles: true, cancelable: true, clipboardData };
    document.activeElement.dispatchEvent(new ClipboardEvent("paste", options));
}"""


def paste_into_focus(page: Page, shop: Shop, number: int) -> None:
    data = shop.galleries["shop"][number].data
    page.evaluate(PASTE, base64.b64encode(data).decode())


def test_the_skip_link_goes_to_the_results_and_leaves_them(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    before, address = keys(shop_page), shop_page.url
    shop_page.get_by_role("link", name="Skip to results").focus()
    shop_page.keyboard.press("Enter")
    expect(shop_page.get_by_test_id("results")).to_be_focused()
    settled(shop_page)
    assert keys(shop_page) == before
    assert shop_page.url == address


def test_try_again_and_dismiss_hand_the_focus_to_the_results(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = open_shop(allowed=("503",))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    page.route("**/search", lambda route: route.fulfill(status=503, json={"title": "Busy"}))
    for button in ("error-retry", "error-close"):
        page.get_by_test_id("like").nth(2).click()
        page.get_by_test_id(button).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("summary")).to_be_focused()
        expect(page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")
    page.get_by_test_id("like").nth(2).click()
    expect(page.get_by_test_id("error-retry")).to_be_visible()
    page.unroute("**/search")
    page.get_by_test_id("error-retry").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("chip")).to_have_count(1)
    expect(page.get_by_test_id("summary")).to_be_focused()


def test_the_way_out_of_no_match_hands_the_focus_to_the_results(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("card-search").nth(1).click()
    expect(shop_page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(shop_page)
    shop_page.get_by_test_id("min-score").fill("1")
    shop_page.get_by_test_id("empty-min").focus()
    shop_page.keyboard.press("Enter")
    expect(shop_page.get_by_test_id("summary")).to_be_focused()
    expect(shop_page.get_by_test_id("card").first).to_be_visible()


def test_a_sample_taken_with_the_keyboard_hands_the_focus_to_the_results(shop_page: Page) -> None:
    shop_page.get_by_test_id("sample").first.focus()
    shop_page.keyboard.press("Enter")
    settled(shop_page)
    expect(shop_page.get_by_test_id("summary")).to_be_focused()


def test_a_picture_is_pasted_from_a_checkbox_but_not_from_a_text_field(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("filter").nth(2).evaluate("(node) => (node.open = true)")
    shop_page.get_by_test_id("filter-from").focus()
    paste_into_focus(shop_page, fake_shop, 1)
    shop_page.get_by_role("checkbox", name="red").focus()
    expect(shop_page.get_by_test_id("query-name")).to_have_text("mine-0.png")
    paste_into_focus(shop_page, fake_shop, 1)
    expect(shop_page.get_by_test_id("query-name")).to_have_text("pasted.png")
    settled(shop_page)
