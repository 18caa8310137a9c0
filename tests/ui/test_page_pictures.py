"""Pictures of the page: with a key the right one, however late; none is kept for nothing."""

import json

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.page_browser import OpenShop, drop_item, send_bytes, settled, until
from tests.support.page_shop import Shop, draw

pytestmark = pytest.mark.browser

KEY = "kl_1_secret"
COUNT_URLS = """(() => {
    window.made = new Set();
    const make = URL.createObjectURL, end = URL.revokeObjectURL;
    URL.createObjectURL = (blob) => { const url = make(blob); made.add(url); return url; };
    URL.revokeObjectURL = (url) => { made.delete(url); end(url); };
})()"""
QUERY_SRC = "document.querySelector('[data-testid=query-image]').getAttribute('src')"
SEARCHES = "JSON.parse(localStorage['kinlens.searches'] ?? '[]')"
LIKE_A_FILE = f"{QUERY_SRC}?.startsWith('blob:')"


@pytest.fixture
def keyed(open_shop: OpenShop, fake_shop: Shop) -> Page:
    """The results of the first item's picture in a shop that wants a key."""
    fake_shop.key = KEY
    page = open_shop("/live", allowed=("415", "500"))
    page.add_init_script(f"sessionStorage.setItem('kinlens.key', {json.dumps(KEY)})")
    page.add_init_script(COUNT_URLS)
    page.goto(page.url.removesuffix("live"))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    until(page, "made.size == 1")
    return page


def hold_pictures(page: Page) -> list[Route]:
    """From now on pictures of items stay unanswered; they are put into the list."""
    held: list[Route] = []
    page.route("**/items/*/image", lambda route: held.append(route))
    return held


def let_go(page: Page, held: list[Route]) -> None:
    for route in held:
        route.continue_()
    page.unroute("**/items/*/image")


def test_a_late_picture_does_not_replace_the_one_of_a_newer_query(
    keyed: Page, fake_shop: Shop
) -> None:
    held = hold_pictures(keyed)
    keyed.get_by_test_id("card-search").nth(1).click()
    expect(keyed.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(keyed)
    assert keyed.evaluate(QUERY_SRC) is None  # not the picture of the query before
    keyed.wait_for_timeout(300)
    assert held
    drop_item(keyed, fake_shop, 2)
    newer = keyed.evaluate(QUERY_SRC)
    let_go(keyed, held)
    keyed.wait_for_timeout(500)
    assert keyed.evaluate(QUERY_SRC) == newer
    until(keyed, "made.size == 2")


def test_the_history_waits_for_the_picture_of_its_query(keyed: Page, fake_shop: Shop) -> None:
    until(keyed, f"{SEARCHES}[0]?.thumb")
    [before] = keyed.evaluate(SEARCHES)
    held = hold_pictures(keyed)
    keyed.get_by_test_id("card-search").nth(1).click()
    settled(keyed)
    until(keyed, f"{SEARCHES}.length == 2")
    assert keyed.evaluate(SEARCHES)[0]["thumb"] == ""
    let_go(keyed, held)
    until(keyed, f"{SEARCHES}[0].thumb")
    newest, older = keyed.evaluate(SEARCHES)
    assert newest["kind"] == "item"
    assert newest["thumb"] != before["thumb"]
    assert older == before


def test_what_was_forgotten_meanwhile_stays_forgotten(keyed: Page) -> None:
    until(keyed, f"{SEARCHES}[0]?.thumb")
    held = hold_pictures(keyed)
    keyed.get_by_test_id("card-search").nth(1).click()
    settled(keyed)
    keyed.get_by_test_id("history-open").click()
    expect(keyed.get_by_test_id("history-entry")).to_have_count(2)
    keyed.get_by_test_id("history-clear").click()
    let_go(keyed, held)
    until(keyed, LIKE_A_FILE)
    keyed.wait_for_timeout(300)
    assert keyed.evaluate(SEARCHES) == []


def test_refused_uploads_and_shown_pictures_keep_no_memory(keyed: Page) -> None:
    for number in range(5):
        with keyed.expect_response("**/search"):
            send_bytes(keyed, "drop", f"{number}.png", "image/png", b"no image")
        expect(keyed.get_by_test_id("error")).to_be_visible()
        settled(keyed)
    until(keyed, "made.size == 1")  # the picture of the search that is shown
    assert keyed.evaluate(f"made.has({QUERY_SRC})")


def test_a_picture_that_cannot_be_shown_keeps_no_memory(keyed: Page) -> None:
    keyed.route("**/items/*/image", lambda route: route.fulfill(body="no image"))
    keyed.get_by_test_id("card-search").nth(1).click()
    expect(keyed.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(keyed)
    expect(keyed.locator("[data-testid=card] img.broken").first).to_be_visible()
    until(keyed, "made.size == 1")


def test_a_refused_upload_is_shown_again_when_it_is_tried_again(keyed: Page) -> None:
    keyed.route("**/search", lambda route: route.fulfill(status=500, json={"title": "Broken"}))
    send_bytes(keyed, "drop", "again.png", "image/png", draw((9, 90, 200), 77))
    expect(keyed.get_by_test_id("error-title")).to_have_text("Broken")
    keyed.unroute("**/search")
    keyed.get_by_test_id("error-retry").click()
    expect(keyed.get_by_test_id("query-name")).to_have_text("again.png")
    settled(keyed)
    until(keyed, "document.querySelector('[data-testid=query-image]').naturalWidth > 0")
    until(keyed, "made.size == 2")
