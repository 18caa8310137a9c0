"""Images of the page: with a key the right one, however late; none is kept for nothing."""

import json

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.page_browser import (
    OpenPage,
    drop_item,
    search_with_card,
    searched,
    send_image,
    settled,
    until,
)
from tests.support.page_shop import Shop, draw
from tests.tiny import encoded, photo

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


def with_key(page: Page) -> None:
    page.add_init_script(f"sessionStorage.setItem('kinlens.key', {json.dumps(KEY)})")
    page.add_init_script(COUNT_URLS)


@pytest.fixture
def keyed(open_shop: OpenPage, fake_shop: Shop) -> Page:
    """The results of the first item's image in a shop that wants a key."""
    fake_shop.key = KEY
    page = searched(open_shop, fake_shop, before=with_key)
    until(page, "made.size == 1")
    return page


def intercept_images(page: Page) -> list[Route]:
    """Collects requests for images of items, unanswered."""
    pending: list[Route] = []
    page.route("**/items/*/image", lambda route: pending.append(route))
    return pending


def release(page: Page, pending: list[Route]) -> None:
    for route in pending:
        route.continue_()
    page.unroute("**/items/*/image")


def test_a_late_image_does_not_replace_a_newer_query(keyed: Page, fake_shop: Shop) -> None:
    pending = intercept_images(keyed)
    search_with_card(keyed, 1)
    assert keyed.evaluate(QUERY_SRC) is None  # not the image of the previous query
    while not pending:
        keyed.wait_for_timeout(50)
    drop_item(keyed, fake_shop, 2)
    newer = keyed.evaluate(QUERY_SRC)
    release(keyed, pending)
    keyed.wait_for_timeout(500)
    assert keyed.evaluate(QUERY_SRC) == newer
    until(keyed, "made.size == 2")


def test_the_history_waits_for_the_image_of_its_query_and_drops_it(keyed: Page) -> None:
    until(keyed, f"{SEARCHES}[0]?.thumb")
    [before] = keyed.evaluate(SEARCHES)
    pending = intercept_images(keyed)
    search_with_card(keyed, 1)
    until(keyed, f"{SEARCHES}.length == 2")
    assert keyed.evaluate(SEARCHES)[0]["thumb"] == ""
    release(keyed, pending)
    until(keyed, f"{SEARCHES}[0].thumb")
    newest, older = keyed.evaluate(SEARCHES)
    assert newest["kind"] == "item"
    assert newest["thumb"] != before["thumb"]
    assert older == before

    pending = intercept_images(keyed)
    search_with_card(keyed, 3)
    keyed.get_by_test_id("history-open").click()
    expect(keyed.get_by_test_id("history-entry")).to_have_count(3)
    keyed.get_by_test_id("history-clear").click()
    release(keyed, pending)
    until(keyed, f"{QUERY_SRC}?.startsWith('blob:')")
    keyed.wait_for_timeout(300)
    assert keyed.evaluate(SEARCHES) == []


def test_an_avif_is_shown_and_a_heic_is_searched_with_unseen(results: Page) -> None:
    send_image(results, encoded(photo(1), "AVIF"), "photo.avif")
    expect(results.get_by_test_id("query-name")).to_have_text("photo.avif")
    until(results, "document.querySelector('[data-testid=query-image]').naturalWidth > 0")
    send_image(results, encoded(photo(2), "HEIF"), "photo.heic")
    expect(results.get_by_test_id("query-name")).to_have_text("photo.heic")
    settled(results)
    expect(results.get_by_test_id("error")).to_be_hidden()
    expect(results.get_by_test_id("crops")).to_be_hidden()


def test_refused_uploads_and_broken_images_keep_no_memory(keyed: Page, allowed: list[str]) -> None:
    allowed += ["415", "500"]
    for number in range(3):
        with keyed.expect_response("**/search"):
            send_image(keyed, b"no image", f"{number}.png")
        expect(keyed.get_by_test_id("error")).to_be_visible()
        settled(keyed)
    until(keyed, "made.size == 1")  # the image of the current search
    assert keyed.evaluate(f"made.has({QUERY_SRC})")

    keyed.route("**/search", lambda route: route.fulfill(status=500, json={"title": "Broken"}))
    send_image(keyed, draw((9, 90, 200), 77), "again.png")
    expect(keyed.get_by_test_id("error-title")).to_have_text("Broken")
    keyed.unroute("**/search")
    keyed.get_by_test_id("error-retry").click()
    expect(keyed.get_by_test_id("query-name")).to_have_text("again.png")
    settled(keyed)
    until(keyed, "document.querySelector('[data-testid=query-image]').naturalWidth > 0")
    until(keyed, "made.size == 2")

    keyed.route("**/items/*/image", lambda route: route.fulfill(body="no image"))
    search_with_card(keyed, 1)
    expect(keyed.locator("[data-testid=card] img.broken").first).to_be_visible()
    until(keyed, "made.size == 2")  # those of the two uploads
