"""Links to views, Back and Forward, the history of this browser, the API key of this tab."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import OpenShop, drop_item, keys, settled, until
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

BLOCKED = """for (const name of ["localStorage", "sessionStorage"]) {
    const get = () => { throw new DOMException("no", "SecurityError"); };
    Object.defineProperty(window, name, { get });
}"""


def fields(page: Page) -> dict[str, list[str]]:
    """What the address says after #."""
    return parse_qs(urlsplit(page.url).fragment)


def test_a_copied_link_gives_the_same_view(open_shop: OpenShop, fake_shop: Shop) -> None:
    where = json.dumps({"colour": {"in": ["red", "blue"]}})
    link = f"/#gallery=shop&k=10&min=0.1&filter={where}&like=jar/003.png&item=6&key=box/006.png"
    first = open_shop(link)
    settled(first)
    shown = keys(first)
    first.get_by_test_id("dislike").nth(2).click()
    expect(first.get_by_test_id("chip")).to_have_count(4)
    settled(first)
    changed = keys(first)
    assert changed != shown
    second = open_shop(first.url.removeprefix(first.url.split("/#")[0]))
    settled(second)
    expect(second.get_by_test_id("chip")).to_have_count(4)
    expect(second.get_by_test_id("k")).to_have_value("10")
    expect(second.get_by_test_id("min-score-value")).to_contain_text("0.10")
    assert keys(second) == changed
    expect(second.get_by_test_id("query-name")).to_have_text("006.png")


def test_a_group_and_a_part_are_in_the_link(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = open_shop("/#gallery=shop&group=class&item=0&key=mug/000.png&crop=0.1,0.1,0.5,0.5")
    settled(page)
    expect(page.get_by_test_id("group-value")).to_have_count(4)
    expect(page.get_by_test_id("crop-frame")).to_have_count(1)
    assert fake_shop.asked[-1].crops == [[0.1, 0.1, 0.5, 0.5]]


def test_a_link_finds_its_item_by_the_key_after_a_rebuild(open_shop: OpenShop) -> None:
    page = open_shop("/#gallery=shop&item=3&key=box/006.png")
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text("006.png")
    assert fields(page)["item"] == ["6"]


def test_a_link_to_what_is_gone_says_so(open_shop: OpenShop) -> None:
    page = open_shop("/#gallery=attic&item=99&key=none.png", allowed=("404",))
    expect(page.get_by_test_id("notice-text")).to_contain_text("no gallery attic here")
    expect(page.get_by_test_id("error-title")).to_have_text("The item of this link is gone")


@pytest.mark.parametrize(
    "text", ["k=-1&min=x&filter=[1]&crop=2,2,2,2", "filter=%7B&item=1.5&k=1e99", "&&=%&like="]
)
def test_a_broken_link_opens_the_start(open_shop: OpenShop, text: str) -> None:
    page = open_shop(f"/#{text}")
    expect(page.get_by_test_id("sample")).to_have_count(8)
    expect(page.get_by_test_id("k")).to_have_value("20")


def test_the_link_of_an_upload_says_gently_what_it_cannot_hold(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = open_shop(permissions=["clipboard-read", "clipboard-write"])
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("copy-link").click()
    expect(page.get_by_test_id("notice-text")).to_contain_text("Your picture stays in this browser")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url
    other = open_shop("/" + copied[copied.index("#") :])
    expect(other.get_by_test_id("notice-text")).to_contain_text("choose a picture")
    expect(other.get_by_test_id("error")).to_be_hidden()


def test_back_and_forward_walk_the_views(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    first = keys(shop_page)
    shop_page.get_by_test_id("card-search").nth(2).click()
    expect(shop_page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(shop_page)
    second = keys(shop_page)
    asked = len(fake_shop.asked)
    shop_page.go_back()
    expect(shop_page.get_by_test_id("query-name")).to_have_text("mine-0.png")
    assert keys(shop_page) == first
    shop_page.go_back()
    expect(shop_page.locator("body")).to_have_attribute("data-state", "start")
    shop_page.go_forward()
    shop_page.go_forward()
    expect(shop_page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    assert keys(shop_page) == second
    assert len(fake_shop.asked) == asked


def test_the_history_keeps_small_pictures_and_forgets_them(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("card-search").nth(2).click()
    expect(shop_page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(shop_page)
    until(shop_page, "JSON.parse(localStorage['kinlens.searches'] ?? '[]').length == 2")
    shop_page.reload()
    shop_page.get_by_test_id("history-open").click()
    entries = shop_page.get_by_test_id("history-entry")
    expect(entries).to_have_count(2)
    expect(entries.nth(1)).to_contain_text("mine-0.png")
    entries.nth(1).click()
    expect(shop_page.get_by_test_id("notice-text")).to_contain_text("small copy")
    settled(shop_page)
    assert keys(shop_page)[0] == "mug/000.png"
    shop_page.get_by_test_id("history-open").click()
    shop_page.get_by_test_id("history-clear").click()
    expect(entries).to_have_count(0)
    assert shop_page.evaluate("localStorage['kinlens.searches']") is None


def test_the_history_is_bounded(shop_page: Page) -> None:
    many = [
        {"hash": "#", "name": str(n), "kind": "item", "thumb": "", "time": n} for n in range(99)
    ]
    shop_page.evaluate("(many) => (localStorage['kinlens.searches'] = many)", json.dumps(many))
    shop_page.get_by_test_id("sample").first.click()
    until(shop_page, "JSON.parse(localStorage['kinlens.searches']).length == 24")


def test_the_history_entry_of_an_item_opens_its_view(shop_page: Page) -> None:
    shop_page.get_by_test_id("sample").first.click()
    settled(shop_page)
    link = shop_page.url
    until(shop_page, "'kinlens.searches' in localStorage")
    shop_page.go_back()
    shop_page.get_by_test_id("history-open").click()
    shop_page.get_by_test_id("history-entry").first.click()
    settled(shop_page)
    assert shop_page.url == link


def test_everything_works_where_storage_is_blocked(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = open_shop("/live")
    page.add_init_script(BLOCKED)
    page.goto(page.url.removesuffix("live"))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    page.get_by_test_id("theme").click()
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("history-open").click()
    expect(page.get_by_test_id("history-entry")).to_have_count(1)


def test_a_key_is_asked_for_once_kept_in_the_tab_and_sent_with_everything(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    fake_shop.key = "kl_1_secret"
    page = open_shop(allowed=("401",))
    expect(page.get_by_test_id("error-title")).to_have_text("API key needed")
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


def test_without_a_refusal_no_key_is_asked_for(shop_page: Page) -> None:
    expect(shop_page.get_by_test_id("key")).to_be_hidden()
