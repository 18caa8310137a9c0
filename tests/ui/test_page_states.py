"""What the page shows while it waits, when nothing is there and when something fails."""

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.page_browser import (
    OpenPage,
    keys,
    send_files,
    send_image,
    settled,
    until,
    violations,
)
from tests.support.page_shop import Shop, draw
from tests.tiny import encoded, photo

pytestmark = pytest.mark.browser

IMAGE = draw((200, 40, 40), 0)  # of the first item


def test_a_search_can_be_cancelled_and_a_newer_one_cancels_it(shop_page: Page) -> None:
    results = shop_page.get_by_test_id("results")
    shop_page.route("**/search", lambda route: None)  # never answered
    send_image(shop_page, IMAGE)
    expect(shop_page.locator(".placeholder")).to_have_count(12)
    expect(results).to_have_attribute("aria-busy", "true")
    expect(shop_page.get_by_test_id("live")).to_have_text("Searching")
    shop_page.keyboard.press("Escape")
    expect(shop_page.locator("body")).to_have_attribute("data-state", "start")
    expect(results).to_have_attribute("aria-busy", "false")
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


def test_a_retry_after_is_counted_down(shop_page: Page, allowed: list[str]) -> None:
    allowed.append("429")
    content = {"title": "Too busy", "detail": "64 searches wait, the limit.", "request_id": "r7"}

    def refuse(route: Route) -> None:
        route.fulfill(status=429, headers={"Retry-After": "2"}, json=content)

    shop_page.route("**/search", refuse)
    send_image(shop_page, IMAGE)
    retry = shop_page.get_by_test_id("error-retry")
    expect(retry).to_be_disabled()
    expect(retry).to_contain_text("Try again in")
    expect(shop_page.get_by_test_id("error")).not_to_contain_text("64 searches")
    expect(shop_page.get_by_test_id("error-request")).to_be_hidden()
    shop_page.get_by_test_id("error").locator("summary").click()
    expect(shop_page.get_by_test_id("error-request")).to_have_text("Request r7")
    assert violations(shop_page) == []
    expect(retry).to_have_text("Try again")
    shop_page.unroute("**/search")
    retry.focus()
    shop_page.keyboard.press("Enter")
    expect(shop_page.get_by_test_id("summary")).to_be_focused()  # its button vanishes
    settled(shop_page)
    expect(shop_page.get_by_test_id("error")).to_be_hidden()


def test_offline_is_shown_and_the_answer_stays(results: Page, allowed: list[str]) -> None:
    allowed.append("ERR_INTERNET_DISCONNECTED")
    results.context.set_offline(True)
    expect(results.get_by_test_id("offline")).to_be_visible()
    results.get_by_test_id("k").select_option("10")
    expect(results.get_by_test_id("error-title")).to_have_text("You are offline")
    expect(results.get_by_test_id("card")).to_have_count(20)
    expect(results.get_by_test_id("k")).to_have_value("20")  # what is shown is what was asked
    results.context.set_offline(False)
    expect(results.get_by_test_id("offline")).to_be_hidden()
    results.get_by_test_id("error-retry").click()
    expect(results.get_by_test_id("card")).to_have_count(10)


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
    page = open_shop()
    expect(page.get_by_test_id("samples")).to_contain_text("Please come back later")
    expect(page.get_by_test_id("sample")).to_have_count(0)


def test_odd_files_and_hostile_markup_are_harmless(results: Page) -> None:
    before = keys(results)
    send_files(results, ("notes.txt", "text/plain", b"not an image"))
    expect(results.get_by_test_id("error-title")).to_have_text("“notes.txt” is not a photo")
    assert keys(results) == before
    good = ("photo.png", "image/png", IMAGE)
    send_files(results, good, ("list.csv", "text/csv", b"a;b"), (".DS_Store", "", b"\0"))
    notice = results.get_by_test_id("notice-text")
    expect(notice).to_have_text("2 of 3 files are not photos: list.csv, .DS_Store")
    expect(results.get_by_test_id("query-name")).to_have_text("photo.png")
    settled(results)

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


def test_an_avif_is_shown_and_a_heic_is_searched_with_unseen(results: Page) -> None:
    send_image(results, encoded(photo(1), "AVIF"), "photo.avif")
    expect(results.get_by_test_id("query-name")).to_have_text("photo.avif")
    until(results, "document.querySelector('[data-testid=query-image]').naturalWidth > 0")
    send_image(results, encoded(photo(2), "HEIF"), "photo.heic")
    expect(results.get_by_test_id("query-name")).to_have_text("photo.heic")
    settled(results)
    expect(results.get_by_test_id("error")).to_be_hidden()
    expect(results.get_by_test_id("crops")).to_be_hidden()
