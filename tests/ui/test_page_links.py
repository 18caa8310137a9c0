"""Links to views, Back and Forward, the history of this browser, the API key of this tab."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import (
    OpenPage,
    drop_item,
    intercept,
    judge,
    keys,
    received,
    search_with_card,
    searched,
    settled,
    until,
    violations,
)
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

BLOCKED = """for (const name of ["localStorage", "sessionStorage"]) {
    const get = () => { throw new DOMException("no", "SecurityError"); };
    Object.defineProperty(window, name, { get });
}"""
QUERY_SRC = "document.querySelector('[data-testid=query-image]').getAttribute('src')"


def test_a_copied_link_gives_the_same_view(open_shop: OpenPage, fake_shop: Shop) -> None:
    where = json.dumps({"colour": {"in": ["red", "blue"]}})
    link = f"/#gallery=shop&k=10&min=0.1&order=varied&filter={where}"
    link += "&like=jar/003.png&item=6&key=box/006.png"
    first = open_shop(link)
    settled(first)
    shown = keys(first)
    judge(first, "dislike", 2, chips=4)
    assert keys(first) != shown
    second = open_shop(f"/#{urlsplit(first.url).fragment}")
    settled(second)
    expect(second.get_by_test_id("chip")).to_have_count(4)
    expect(second.get_by_test_id("k")).to_have_value("10")
    expect(second.get_by_test_id("min-score-value")).to_contain_text("0.10")
    expect(second.get_by_test_id("query-name")).to_have_text("006.png")
    expect(second.get_by_test_id("order")).to_have_value("varied")
    assert fake_shop.asked[-1].diversity == 0.2
    assert keys(second) == keys(first)


def test_a_link_finds_its_item_after_a_rebuild(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = open_shop("/#gallery=shop&group=class&item=3&key=box/006.png&crop=0.1,0.1,0.5,0.5")
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text("006.png")
    expect(page.get_by_test_id("group-value")).to_have_count(4)
    expect(page.get_by_test_id("crop-frame")).to_have_count(1)
    assert fake_shop.asked[-1].crop == [[0.1, 0.1, 0.5, 0.5]]
    assert parse_qs(urlsplit(page.url).fragment)["item"] == ["6"]


def test_a_link_can_search_the_parts_of_an_item(open_shop: OpenPage, fake_shop: Shop) -> None:
    first = searched(open_shop, fake_shop)
    search_with_card(first, 3)
    first.get_by_test_id("crop-auto").check()
    expect(first.get_by_test_id("part-frame")).to_be_visible()
    settled(first)
    fragment = urlsplit(first.url).fragment
    assert parse_qs(fragment)["crop"] == ["auto"]
    second = open_shop(f"/#{fragment}&crop=0.1,0.1,0.5,0.5")  # which auto replaces
    settled(second)
    expect(second.get_by_test_id("crop-auto")).to_be_checked()
    expect(second.get_by_test_id("crop-frame")).to_have_count(0)
    assert fake_shop.asked[-1].crop == ["auto"]
    assert keys(second) == keys(first)


def test_a_link_to_a_removed_item_shows_a_message(open_shop: OpenPage, allowed: list[str]) -> None:
    allowed.append("404")
    page = open_shop("/#gallery=attic&item=99&key=none.png")
    expect(page.get_by_test_id("notice-text")).to_contain_text("no gallery attic")
    expect(page.get_by_test_id("error-title")).to_have_text("This item is no longer here")


def test_a_broken_link_opens_the_start(open_shop: OpenPage) -> None:
    page = open_shop("/#k=-1&min=x&filter=[1]&crop=2,2,2,2")
    expect(page.get_by_test_id("sample")).to_have_count(8)
    expect(page.get_by_test_id("k")).to_have_value("20")
    page.goto(f"{page.url.partition('#')[0]}#filter=%7B&item=1.5&k=1e99&&=%&like=&order=x")
    page.reload()
    expect(page.get_by_test_id("sample")).to_have_count(8)
    expect(page.get_by_test_id("k")).to_have_value("20")


def test_the_link_of_an_upload_has_no_photo(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = searched(open_shop, fake_shop, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_test_id("copy-link").click()
    expect(page.get_by_test_id("notice-text")).to_contain_text("stays in this browser")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url
    other = open_shop(f"/#{urlsplit(copied).fragment}")
    expect(other.get_by_test_id("notice-text")).to_contain_text("Choose a photo")
    expect(other.get_by_test_id("error")).to_be_hidden()


def test_back_forward_and_history_restore_views(results: Page, fake_shop: Shop) -> None:
    first = keys(results)
    search_with_card(results, 2)
    second, link = keys(results), results.url
    asked = len(fake_shop.asked)
    results.go_back()
    expect(results.get_by_test_id("query-name")).to_have_text("mine-0.png")
    assert keys(results) == first
    results.go_back()
    expect(results.locator("body")).to_have_attribute("data-state", "start")
    expect(results.get_by_test_id("card")).to_have_count(0)
    results.go_forward()
    results.go_forward()
    expect(results.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    assert keys(results) == second
    assert len(fake_shop.asked) == asked

    until(results, "JSON.parse(localStorage['kinlens.searches'] ?? '[]').length == 2")
    results.goto(link[: link.index("#")])
    entries = results.get_by_test_id("history-entry")
    results.get_by_test_id("history-open").click()
    expect(entries).to_have_count(2)
    assert violations(results, "dialog[open]") == []
    entries.first.click()
    settled(results)
    assert results.url == link
    results.get_by_test_id("history-open").click()
    entries.filter(has_text="mine-0.png").click()
    expect(results.get_by_test_id("notice-text")).to_contain_text("small copy")
    settled(results)
    assert keys(results)[0] == "mug/000.png"
    results.get_by_test_id("history-open").click()
    results.get_by_test_id("history-clear").click()
    expect(entries).to_have_count(0)
    assert results.evaluate("localStorage['kinlens.searches']") is None


def test_everything_works_where_storage_is_blocked(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = open_shop(before=lambda page: page.add_init_script(BLOCKED))
    expect(page.get_by_test_id("sample")).to_have_count(8)
    page.get_by_test_id("theme").click()
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("history-open").click()
    expect(page.get_by_test_id("history-entry")).to_have_count(1)


def test_a_key_is_kept_in_the_tab_and_sent_for_images(
    open_shop: OpenPage, fake_shop: Shop, allowed: list[str]
) -> None:
    fake_shop.key = "kl_1_secret"
    allowed.append("401")
    page = open_shop()
    expect(page.get_by_test_id("error-title")).to_have_text("This search needs a key")
    assert violations(page) == []
    page.get_by_test_id("key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("key")).to_have_value("")
    page.get_by_test_id("key").fill("kl_1_secret")
    page.get_by_test_id("key-save").click()
    expect(page.get_by_test_id("gallery-size")).to_have_text("24 items to search")
    expect(page.get_by_test_id("error")).to_be_hidden()
    drop_item(page, fake_shop, 0)
    until(page, "document.querySelector('[data-testid=card] img').naturalWidth > 0")
    assert page.evaluate("sessionStorage['kinlens.key']") == "kl_1_secret"
    assert page.evaluate("Object.values(localStorage).join().includes('secret')") is False
    assert "secret" not in page.url

    pending = intercept(page, "**/items/*/image?*")
    search_with_card(page, 1)
    assert page.evaluate(QUERY_SRC) is None  # not the image of the previous query
    received(page, pending, 1)
    drop_item(page, fake_shop, 2)
    newer = page.evaluate(QUERY_SRC)
    for route in pending:
        route.continue_()
    page.wait_for_timeout(500)
    assert page.evaluate(QUERY_SRC) == newer, "a late image does not replace it"
