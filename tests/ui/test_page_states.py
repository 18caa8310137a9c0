"""What the page shows while it waits, when nothing is there and when something fails."""

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.page_browser import (
    OpenPage,
    drop_item,
    judge,
    keys,
    send_files,
    send_image,
    settled,
)
from tests.support.page_shop import Shop, draw

pytestmark = pytest.mark.browser

IMAGE = draw((200, 40, 40), 0)  # of the first item


def test_a_search_can_be_cancelled_in_three_ways(shop_page: Page) -> None:
    results = shop_page.get_by_test_id("results")
    shop_page.route("**/search", lambda route: None)  # never answered
    for end in (
        lambda: shop_page.keyboard.press("Escape"),
        lambda: shop_page.get_by_test_id("cancel").click(),
    ):
        send_image(shop_page, IMAGE)
        expect(shop_page.locator(".placeholder")).to_have_count(12)
        expect(results).to_have_attribute("aria-busy", "true")
        expect(shop_page.get_by_test_id("live")).to_have_text("Searching")
        end()
        expect(shop_page.locator("body")).to_have_attribute("data-state", "start")
        expect(results).to_have_attribute("aria-busy", "false")
        expect(shop_page.get_by_test_id("card")).to_have_count(0)
        expect(shop_page.get_by_test_id("error")).to_be_hidden()

    shop_page.unroute("**/search")
    pending: list[Route] = []

    def hold_the_first(route: Route) -> None:
        if pending:
            route.continue_()
        pending.append(route)

    shop_page.route("**/search", hold_the_first)
    with shop_page.expect_event("requestfailed") as aborted:
        send_image(shop_page, IMAGE)
        expect(shop_page.get_by_test_id("progress")).to_be_visible()
        send_image(shop_page, IMAGE, "newer.png")
    assert aborted.value.failure == "net::ERR_ABORTED"
    expect(shop_page.get_by_test_id("query-name")).to_have_text("newer.png")
    settled(shop_page)

    shop_page.get_by_test_id("about").locator("summary").click()
    expect(shop_page.get_by_test_id("about")).to_contain_text("Answered in 16 ms")
    expect(shop_page.get_by_test_id("about-list")).to_contain_text("Embed")


def test_a_retry_after_is_counted_down(shop_page: Page, allowed: list[str]) -> None:
    allowed.append("429")
    content = {"title": "Too busy", "detail": "Others are searching.", "request_id": "r7"}

    def refuse(route: Route) -> None:
        route.fulfill(status=429, headers={"Retry-After": "2"}, json=content)

    shop_page.route("**/search", refuse)
    send_image(shop_page, IMAGE)
    retry = shop_page.get_by_test_id("error-retry")
    expect(retry).to_be_disabled()
    expect(retry).to_contain_text("Try again in")
    expect(shop_page.get_by_test_id("error-detail")).to_have_text("Others are searching.")
    expect(retry).to_have_text("Try again")
    shop_page.unroute("**/search")
    retry.click()
    settled(shop_page)
    expect(shop_page.get_by_test_id("card").first).to_be_visible()
    expect(shop_page.get_by_test_id("error")).to_be_hidden()


def test_offline_is_shown_and_the_answer_stays(results: Page, allowed: list[str]) -> None:
    allowed.append("ERR_INTERNET_DISCONNECTED")
    results.context.set_offline(True)
    expect(results.get_by_test_id("offline")).to_be_visible()
    results.get_by_test_id("k").select_option("10")
    expect(results.get_by_test_id("error-title")).to_have_text("You are offline")
    expect(results.get_by_test_id("card")).to_have_count(20)
    expect(results.get_by_test_id("k")).to_have_value("20")  # what is shown is what was asked
    with results.expect_event("requestfailed"):  # an image that fails as well hides no way on
        results.locator("#grid img").first.evaluate("image => { image.src += '&again' }")
    expect(results.get_by_test_id("error-title")).to_have_text("You are offline")
    results.context.set_offline(False)
    expect(results.get_by_test_id("offline")).to_be_hidden()
    results.get_by_test_id("error-retry").click()
    expect(results.get_by_test_id("card")).to_have_count(10)


def test_an_unreachable_service_can_be_tried_again(
    open_shop: OpenPage, fake_shop: Shop, allowed: list[str]
) -> None:
    allowed += ["ERR_FAILED", "500"]

    def unreachable(page: Page) -> None:
        page.route("**/galleries", lambda route: route.abort())
        page.route("**/galleries/shop", lambda route: route.fulfill(status=500))

    page = open_shop(before=unreachable)
    expect(page.get_by_test_id("error-title")).to_have_text("The service cannot be reached")
    page.unroute("**/galleries")
    page.get_by_test_id("error-retry").click()
    expect(page.get_by_test_id("gallery-size")).to_have_text("24 items to search")
    drop_item(page, fake_shop, 0)
    expect(page.get_by_test_id("card")).to_have_count(20)
    expect(page.get_by_test_id("filters")).to_be_hidden()


def test_empty_answers_name_the_cause(results: Page, fake_shop: Shop, open_shop: OpenPage) -> None:
    results.get_by_role("checkbox", name="mug").check()
    results.get_by_test_id("filter").nth(2).locator("summary").click()
    results.get_by_test_id("filter-from").fill("23")
    expect(results.get_by_test_id("summary")).to_have_text("No match")
    expect(results.get_by_test_id("empty")).not_to_contain_text("No match")
    expect(results.get_by_test_id("empty-text")).to_contain_text("No item passes the filters")
    results.get_by_test_id("empty-filter").click()
    expect(results.get_by_test_id("card")).to_have_count(20)
    fake_shop.galleries["shop"] = []
    results.get_by_test_id("k").select_option("50")
    expect(results.get_by_test_id("summary")).to_have_text("This gallery is empty")
    expect(results.get_by_test_id("empty-text")).to_contain_text("kinlens-index add")
    page = open_shop()
    expect(page.get_by_test_id("samples")).to_contain_text("This gallery is empty")
    expect(page.get_by_test_id("sample")).to_have_count(0)


def test_odd_files_and_hostile_markup_are_harmless(results: Page) -> None:
    before = keys(results)
    send_files(results, ("notes.txt", "text/plain", b"not an image"))
    expect(results.get_by_test_id("error-title")).to_have_text("“notes.txt” is not a photo")
    assert keys(results) == before

    hostile = "<img src=x onerror=document.body.remove()>"
    hit = {"id": 0, "key": hostile, "score": 0.5, "probability": None}
    hit |= {"attributes": {hostile: hostile}, "image": "/ui/shared/icon.svg"}
    answer = {"gallery": "shop", "hits": [hit], "groups": None, "timings_ms": {}, "cached": True}
    results.route("**/search", lambda route: route.fulfill(json=answer))
    send_files(results, ("scan.tif", "image/tiff", b"II*"))
    card = results.get_by_test_id("card")
    expect(card).to_have_count(1)
    expect(card).to_have_attribute("data-key", hostile)
    settled(results)
    expect(results.get_by_test_id("error")).to_be_hidden()
    expect(results.get_by_test_id("crops")).to_be_hidden()
    card.locator("summary").click()
    expect(card.locator("dd")).to_have_text(hostile)
    expect(card.locator("img")).to_have_count(1)


def test_buttons_that_vanish_hand_the_focus_on(results: Page, allowed: list[str]) -> None:
    allowed.append("503")
    summary = results.get_by_test_id("summary")

    def press(button: str) -> None:
        expect(results.get_by_test_id(button)).to_be_visible()  # a hidden button takes no focus
        results.get_by_test_id(button).focus()
        results.keyboard.press("Enter")
        expect(summary).to_be_focused()
        expect(results.get_by_test_id("results")).to_have_attribute("aria-busy", "false")

    results.route("**/search", lambda route: route.fulfill(status=503, json={"title": "Busy"}))
    for button in ("error-retry", "error-close"):
        results.get_by_test_id("like").nth(2).click()
        press(button)
    expect(results.get_by_test_id("error")).to_be_hidden()
    results.get_by_test_id("like").nth(2).click()
    expect(results.get_by_test_id("error-retry")).to_be_visible()
    results.unroute("**/search")
    press("error-retry")
    expect(results.get_by_test_id("chip")).to_have_count(1)
    judge(results, "dislike", 5, chips=2)
    results.get_by_test_id("min-score").fill("1")
    press("empty-min")
    expect(results.get_by_test_id("card").first).to_be_visible()
