"""The admin page: who gets in, items found, changed and deleted, galleries made and deleted."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.admin_page import FEW, MANY, AdminShop, fill_row, opening, row, rows
from tests.support.page_browser import (
    FOCUSED,
    PHONE,
    OpenPage,
    faults,
    intercept,
    received,
    too_wide,
    violations,
)
from tests.support.page_browser import until as page_until
from tests.support.page_shop import CALIBRATION
from tests.support.shops import start_shop

pytestmark = pytest.mark.browser


@pytest.fixture
def page(open_admin: OpenPage, shop: AdminShop, allowed: list[str]) -> Page:
    """The items of a gallery of twelve."""
    shop.stock()
    allowed.append("404")  # the image of an item that was deleted while it was being fetched
    page = open_admin("/admin?gallery=shop")
    expect(rows(page)).to_have_count(FEW)
    return page


def test_the_page_asks_for_a_key_with_the_right_scope(browser: Browser, shop: AdminShop) -> None:
    shop.stock(count=3)
    writer = shop.make_key("feed", "write")
    with opening(browser, shop.url, None, ["401", "403"]) as open_it:
        page = open_it("/admin?gallery=shop")
        expect(page.get_by_test_id("error-detail")).to_have_text(
            "This needs an API key with the scope admin."
        )
        assert page.evaluate(FOCUSED) == "key"
        for text, message in [("kl_no", "is unknown"), (writer, "feed has the scopes write")]:
            page.get_by_test_id("key").fill(text)
            page.get_by_test_id("key-save").click()
            expect(page.get_by_test_id("error-detail")).to_contain_text(message)
            expect(page.locator("main")).to_be_hidden()
        page.get_by_test_id("key").fill(shop.key)
        page.keyboard.press("Enter")
        expect(rows(page)).to_have_count(3)
        expect(page.get_by_test_id("error")).to_be_hidden()
        expect(page.locator("main")).to_be_focused()
        expect(page.locator("main")).to_have_css("outline-style", "none")
        assert page.evaluate("sessionStorage.getItem('kinlens.key')") == shop.key
        assert page.evaluate("Object.keys(localStorage)") == []
        page.get_by_test_id("forget-key").click()
        expect(page.get_by_test_id("key")).to_be_visible()
        assert page.evaluate("sessionStorage.getItem('kinlens.key')") is None


def test_the_golden_set_shows_its_worst_answers(open_admin: OpenPage, shop: AdminShop) -> None:
    shop.stock()
    page = open_admin("/admin?gallery=shop#golden")
    expect(page.get_by_test_id("golden-empty")).to_contain_text("no labelled queries yet")
    expect(page.get_by_test_id("golden-run")).to_be_disabled()
    labels = ({"keys": ["i/00.png"]}, {"keys": ["i/05.png"]}, {"no_match": True})
    for number, label in enumerate(labels):
        files = {"image": ("q.png", shop.images[number])}
        answer = shop.shop.client.post(
            "/galleries/shop/golden", files=files, data={"label": json.dumps(label)}
        )
        answer.raise_for_status()
    page.reload()
    expect(page.get_by_test_id("golden-count")).to_have_text("3 labelled")
    for times in (1, 2):
        page.get_by_test_id("golden-run").click()
        expect(page.get_by_test_id("golden-runs").locator("tbody tr")).to_have_count(times)
    expect(page.get_by_test_id("golden-runs")).to_contain_text("50.0%")
    worst = page.get_by_test_id("golden-worst")
    expect(worst).to_have_count(2)
    expect(page.get_by_test_id("golden-report")).to_contain_text("Wanted: i/05.png")
    expect(worst.locator("img.broken")).to_have_count(0)
    expect(worst.first.locator("img")).to_have_count(2)
    assert faults(page) == []


def test_the_page_shows_how_to_create_the_first_key(browser: Browser, tmp_path: Path) -> None:
    closed = start_shop(tmp_path, anonymous_scopes=("search",), create=False)
    with opening(browser, str(closed.client.base_url), None, ["403"]) as open_it:
        page = open_it("/admin")
        expect(page.get_by_test_id("error-detail")).to_contain_text("no API key exists yet")
        expect(page.get_by_test_id("error-detail")).to_contain_text(
            "kinlens-serve keys create NAME --scope admin"
        )
    closed.close()


def test_a_key_that_is_revoked_brings_the_form_back(
    browser: Browser, shop: AdminShop, until: Callable[[Callable[[], bool]], None]
) -> None:
    shop.stock(count=3)
    secret = shop.make_key("leaver", "admin")
    store = shop.shop.running.runtime.keys
    assert store is not None
    with opening(browser, shop.url, secret, ["401"]) as open_it:
        page = open_it("/admin?gallery=shop")
        row(page, "i/00.png").get_by_test_id("edit-item").click()
        fill_row(page, 1, "price", "number", "99")
        store.revoke("leaver")
        sent = {"X-API-Key": secret}  # keys are read once a second
        until(lambda: httpx.get(f"{shop.url}/galleries", headers=sent).status_code == 401)
        page.get_by_test_id("edit-save").click()
        expect(page.get_by_test_id("edit")).to_be_hidden()
        expect(page.get_by_test_id("error-detail")).to_contain_text("revoked")
        page.get_by_test_id("key").fill(shop.key)
        page.get_by_test_id("key-save").click()
        expect(rows(page)).to_have_count(3)
    assert shop.attributes("i/00.png")["price"] == 0


def test_found_items_are_deleted_together(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("422")
    expect(page.get_by_test_id("filter-delete")).to_be_hidden()
    page.get_by_test_id("key-search").fill("i/0")
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(10)
    page.get_by_test_id("filter").fill('colour = "red" and price < 3')
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(1)
    page.get_by_test_id("filter").fill("price <")
    page.get_by_test_id("find").click()
    expect(page.get_by_test_id("filter-error")).not_to_be_empty()
    page.get_by_test_id("filter").fill("price > 1000")
    page.get_by_test_id("find").click()
    expect(page.get_by_test_id("items-empty")).to_contain_text("No matching items")

    page.get_by_test_id("key-search").fill("")
    page.get_by_test_id("filter").fill('colour = "red"')
    page.get_by_test_id("find").click()
    expect(rows(page)).to_have_count(4)
    shop.shop.client.delete("/galleries/shop/items", params={"key": "i/00.png"})
    page.get_by_test_id("filter-delete").click()
    expect(page.get_by_test_id("confirm-title")).to_have_text("Delete 3 items?")
    expect(page.get_by_test_id("confirm-text")).to_contain_text('colour = "red"')
    page.get_by_test_id("confirm-yes").click()
    expect(page.get_by_test_id("items-empty")).to_be_visible()
    assert len(shop.keys()) == 8


def test_an_item_is_edited_deleted_and_restored(page: Page, shop: AdminShop) -> None:
    row(page, "i/00.png").get_by_test_id("edit-item").click()
    expect(page.get_by_test_id("edit-title")).to_have_text("i/00.png")
    fill_row(page, 1, "price", "number", "12.5")
    page.get_by_label("Remove this attribute").nth(2).click()
    page.get_by_test_id("edit").get_by_test_id("attributes-add-row").click()
    fill_row(page, 2, "new", "boolean", "true")
    page.get_by_test_id("edit-save").click()
    expect(row(page, "i/00.png")).to_contain_text("price 12.5")
    assert shop.attributes("i/00.png") == {"colour": "red", "price": 12.5, "new": True}
    assert page.evaluate(FOCUSED) == "edit-item"
    row(page, "i/00.png").get_by_test_id("edit-item").click()
    edit = page.get_by_test_id("edit")
    edit.get_by_test_id("attributes-json").click()
    edit.locator("textarea").fill('{"colour": {"red": 1}}')
    page.get_by_test_id("edit-save").click()
    expect(page.get_by_test_id("edit-error")).to_contain_text("colour must be a string")
    edit.locator("textarea").fill('{"colour": "pink"}')
    page.get_by_test_id("edit-save").click()
    expect(row(page, "i/00.png")).to_contain_text("colour pink")
    assert shop.attributes("i/00.png") == {"colour": "pink"}

    delete = row(page, "i/03.png").get_by_test_id("delete-item")
    delete.click()
    expect(page.get_by_test_id("confirm-title")).to_have_text("Delete 1 item?")
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("confirm")).to_be_hidden()
    assert len(shop.keys()) == FEW
    delete.click()
    page.get_by_test_id("confirm-yes").click()
    expect(page.get_by_test_id("notice-text")).to_have_text("1 item deleted.")
    expect(page.get_by_test_id("items-count")).to_have_text("11 items")
    expect(page.get_by_test_id("gallery-size")).to_have_text("11 items")
    assert shop.keys(key_prefix="i/03") == []
    page.get_by_test_id("undo").click()
    expect(page.get_by_test_id("notice-text")).to_have_text("1 item restored.")
    expect(row(page, "i/03.png")).to_contain_text("price 3")
    expect(page.get_by_test_id("gallery-size")).to_have_text("12 items")


def test_a_late_count_does_not_change_a_question(page: Page, shop: AdminShop) -> None:
    """The count of "all that fit" comes while another item is asked about, and deletes nothing."""
    page.get_by_test_id("filter").fill("price >= 0")
    page.keyboard.press("Enter")
    pending = intercept(page, "**/items?*limit=1&*")
    page.get_by_test_id("filter-delete").click()
    row(page, "i/03.png").get_by_test_id("delete-item").click()
    received(page, pending, 1)
    with page.expect_response("**/items?*limit=1&*"):
        pending[0].continue_()
    expect(page.get_by_test_id("filter-delete")).to_be_enabled()
    expect(page.locator("#confirm-title")).to_have_text("Delete 1 item?")
    page.get_by_test_id("confirm-yes").click()
    expect(rows(page)).to_have_count(FEW - 1)
    assert len(shop.keys()) == FEW - 1


def test_an_answer_about_one_gallery_opens_nothing_in_another(page: Page, shop: AdminShop) -> None:
    shop.stock("zdepot", count=3)
    page.reload()
    pending = intercept(page, "**/galleries/shop")
    row(page, "i/00.png").get_by_test_id("edit-item").dblclick()
    received(page, pending, 2)
    pending[0].continue_()
    expect(page.get_by_test_id("edit")).to_be_visible()
    fill_row(page, 1, "price", "number", "77")
    with page.expect_response("**/galleries/shop"):
        pending[1].continue_()
    expect(page.locator(".attribute-row").nth(1).get_by_label("Value")).to_have_value("77")
    page.get_by_test_id("edit-cancel").click()
    row(page, "i/01.png").get_by_test_id("edit-item").click()
    received(page, pending, 3)
    page.get_by_test_id("gallery").select_option("zdepot")
    expect(rows(page)).to_have_count(3)
    with page.expect_response("**/galleries/shop"):
        pending[2].continue_()
    expect(page.get_by_test_id("edit")).to_be_hidden()
    shop.shop.client.delete("/galleries/zdepot")


def test_odd_attributes_are_edited_as_json(page: Page, shop: AdminShop) -> None:
    odd = {"text": "one\ntwo", " odd ": "x", "price": 3}
    changes = {"changes": {"i/00.png": odd}}
    shop.shop.client.patch("/galleries/shop/items", json=changes).raise_for_status()
    page.reload()
    row(page, "i/00.png").get_by_test_id("edit-item").click()
    dialog = page.get_by_test_id("edit")
    text = dialog.get_by_test_id("attributes-text")
    dialog.get_by_test_id("attributes-json").click()
    expect(dialog.get_by_role("alert").first).to_contain_text("only be written as JSON")
    text.fill(text.input_value().replace('"price": 3', '"price": 4'))
    page.get_by_test_id("edit-save").click()
    expect(dialog).to_be_hidden()
    assert shop.attributes("i/00.png").items() >= (odd | {"price": 4}).items()


def test_a_selection_spans_pages(open_admin: OpenPage, shop: AdminShop, allowed: list[str]) -> None:
    shop.stock(count=MANY)
    allowed.append("404")
    page = open_admin("/admin?gallery=shop")
    expect(rows(page)).to_have_count(50)
    expect(page.get_by_test_id("items-count")).to_have_text("60 items")
    expect(row(page, "i/01.png")).to_contain_text("colour green")
    expect(row(page, "i/01.png")).to_contain_text("sale no")
    page_until(page, "document.querySelector('.thumb img').naturalWidth > 0")
    expect(page.get_by_test_id("page-before")).to_be_disabled()
    page.get_by_test_id("pick").nth(1).check()
    page.get_by_test_id("page-after").click()
    expect(rows(page)).to_have_count(10)
    expect(page.get_by_test_id("page-text")).to_have_text("51 – 60 of 60")
    expect(page.get_by_test_id("page-after")).to_be_disabled()
    page.get_by_test_id("pick-all").check()
    expect(page.get_by_test_id("bulk")).to_contain_text("11 items selected")
    page.get_by_test_id("bulk-delete").click()
    expect(page.get_by_test_id("confirm-title")).to_have_text("Delete 11 items?")
    page.get_by_test_id("confirm-yes").click()
    expect(page.get_by_test_id("items-count")).to_have_text("49 items")
    assert shop.keys() == [f"i/{n:02d}.png" for n in range(50) if n != 1]


def test_galleries_are_made_and_deleted(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("409")
    page.get_by_test_id("to-galleries").click()
    page.get_by_test_id("gallery-name").fill("shop")
    page.get_by_test_id("gallery-create").click()
    expect(page.get_by_test_id("error-title")).to_have_text("Conflict with the gallery")
    page.get_by_test_id("gallery-name").fill("summer")
    page.get_by_test_id("gallery-create").click()
    expect(page.get_by_test_id("gallery")).to_have_value("summer")
    page.get_by_test_id("to-items").click()
    expect(page.get_by_test_id("items-empty")).to_contain_text("This gallery is empty")
    page.get_by_test_id("gallery").select_option("shop")
    expect(rows(page)).to_have_count(FEW)
    page.get_by_test_id("to-galleries").click()
    summer = page.locator('[data-testid=gallery-row][data-name="summer"]')
    summer.get_by_test_id("gallery-delete").click()
    expect(page.get_by_test_id("confirm-yes")).to_be_disabled()
    page.get_by_test_id("confirm-typed").fill("summe")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("confirm-yes")).to_be_disabled()
    page.get_by_test_id("confirm-typed").fill("summer")
    page.get_by_test_id("confirm-yes").click()
    expect(summer).to_have_count(0)
    assert shop.shop.client.get("/galleries/summer").status_code == 404


def test_an_answer_that_fails_can_be_asked_for_again(page: Page, allowed: list[str]) -> None:
    allowed.append("ERR_FAILED")
    page.get_by_test_id("to-status").click()
    expect(page.get_by_test_id("status-index")).to_be_visible()
    page.route("**/items?*", lambda route: route.abort())
    page.get_by_test_id("to-items").click()
    expect(page.get_by_test_id("error-title")).to_have_text("The service cannot be reached")
    page.unroute("**/items?*")
    page.get_by_test_id("error-retry").click()
    expect(rows(page)).to_have_count(FEW)
    expect(page.get_by_test_id("error")).to_be_hidden()


def test_the_status_shows_where_probabilities_come_from_or_why_there_are_none(page: Page) -> None:
    page.get_by_test_id("to-status").click()
    found = page.get_by_test_id("status-calibration")
    expect(found).to_contain_text("Give items an attribute `product` or `class`")
    expect(page.get_by_test_id("status-model").locator("thead th")).to_have_count(2)

    def calibrated(route: Route) -> None:
        described = route.fetch().json()
        route.fulfill(json=described | {"calibration": CALIBRATION, "no_calibration": None})

    page.route("**/galleries/shop", calibrated)
    page.get_by_test_id("status-refresh").click()
    expect(found).to_contain_text("the items of the gallery, each searched among the others")
    expect(found).to_contain_text("120 searches with 400 wrong hits")
    expect(found).to_contain_text("3.00%")
    expect(found).to_contain_text("The gallery has no golden set")
    assert violations(page) == []
    page.set_viewport_size(PHONE["viewport"])
    assert too_wide(page) == []
