"""The admin page: who gets in, items found, changed and deleted, galleries made and deleted."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.admin_page import FEW, MANY, AdminShop, added, drop, fill_row, opening, row, rows
from tests.support.page_browser import FOCUSED, OpenPage, faults, intercept, received, violations
from tests.support.page_browser import until as page_until
from tests.support.page_shop import CALIBRATION
from tests.support.shops import start_shop
from tests.support.waiting import until

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
    searcher = shop.make_key("feed", "search")
    with opening(browser, shop.url, None, ["401", "403"]) as open_it:
        page = open_it("/admin?gallery=shop")
        expect(page.get_by_test_id("error-detail")).to_have_text(
            "This needs an API key with the scope admin."
        )
        assert page.evaluate(FOCUSED) == "key"
        for text, message in [("kl_no", "is unknown"), (searcher, "feed has the scopes search")]:
            page.get_by_test_id("key").fill(text)
            page.get_by_test_id("key-save").click()
            expect(page.get_by_test_id("error-detail")).to_contain_text(message)
            expect(page.locator("main")).to_be_hidden()
        assert violations(page) == []
        page.get_by_test_id("key").fill(shop.key)
        page.keyboard.press("Enter")
        expect(rows(page)).to_have_count(3)
        expect(page.get_by_test_id("error")).to_be_hidden()
        expect(page.locator("main")).to_be_focused()
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
        fields = {"label": json.dumps(label)} | ({"crop": "0,0,0.9,1"} if number == 1 else {})
        answer = shop.shop.client.post("/galleries/shop/golden", files=files, data=fields)
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
    expect(worst.filter(has_text="i/05.png")).to_contain_text("Asked: crop 0,0,0.9,1")
    expect(worst.locator("img.broken")).to_have_count(0)
    assert faults(page) == []


def test_the_page_shows_how_to_create_the_first_key(browser: Browser, tmp_path: Path) -> None:
    closed = start_shop(tmp_path, anonymous_scopes=("search",), create=False)
    with opening(browser, str(closed.client.base_url), None, ["403"]) as open_it:
        detail = open_it("/admin").get_by_test_id("error-detail")
        expect(detail).to_contain_text("no API key exists yet")
        expect(detail).to_contain_text("kinlens-serve keys create NAME --scope admin")
    closed.close()


VIEWS = ["items", "add", "duplicates", "status", "golden", "jobs", "galleries", "keys", "audit"]


@pytest.mark.parametrize(
    ("scope", "limits", "hidden"),
    [
        ("write", {}, "duplicates jobs galleries keys audit"),
        ("write", {"galleries": ("shop",)}, "duplicates jobs galleries keys audit"),
        ("admin", {"galleries": ("shop",)}, "keys audit"),
        (
            "admin",
            {"galleries": ("shop",), "filter": 'colour = "red"'},
            "duplicates golden jobs galleries keys audit",
        ),
    ],
)
def test_each_key_sees_its_part_and_no_refusal_throws_it_out(
    browser: Browser, shop: AdminShop, scope: Any, limits: dict[str, Any], hidden: str
) -> None:
    shop.stock()
    shop.stock("other", 0)
    key = shop.make_key(f"{scope}-{len(hidden)}-{len(limits)}", scope, **limits)
    with opening(browser, shop.url, key, ["403"]) as open_it:
        page = open_it("/admin?gallery=shop#keys")  # a view that it may not see
        expect(rows(page)).to_have_count(4 if "filter" in limits else FEW)
        for view in VIEWS:
            link = page.get_by_test_id(f"to-{view}")
            if view in hidden.split():
                expect(link).to_be_hidden()
                continue
            link.click()
            expect(link).to_have_attribute("aria-current", "page")
            expect(page.locator("main")).to_be_visible()
            expect(page.get_by_test_id("error")).to_be_hidden()
        if "jobs" not in hidden:
            page.get_by_test_id("to-jobs").click()
            expect(page.get_by_test_id("open-compact")).to_be_visible()
            expect(page.get_by_test_id("open-train")).to_have_count(0)
        page.route("**/galleries/shop/items?*", lambda route: route.fulfill(status=403))
        page.get_by_test_id("to-status").click()
        page.get_by_test_id("to-items").click()
        expect(page.get_by_test_id("error")).to_be_visible()
        expect(page.locator("main")).to_be_visible()
        expect(page.get_by_test_id("key")).to_be_hidden()


def test_keys_are_made_rotated_and_revoked_and_the_audit_log_shows_it(
    open_admin: OpenPage, shop: AdminShop, allowed: list[str]
) -> None:
    allowed.append("422")
    shop.stock()
    page = open_admin("/admin?gallery=shop#keys")
    page.get_by_test_id("key-name").fill("till")
    page.get_by_test_id("scope-write").check()
    page.get_by_test_id("key-galleries").select_option("shop")
    page.get_by_test_id("key-filter").fill("colour =")
    page.get_by_test_id("key-create").click()
    expect(page.get_by_test_id("new-key-error")).to_contain_text("filter")
    page.get_by_test_id("key-filter").fill('colour = "red"')
    page.get_by_test_id("key-rate").fill("600/minute")
    page.get_by_test_id("key-create").click()
    expect(page.get_by_test_id("secret-text")).to_contain_text("kl_")
    texts = [page.get_by_test_id("secret-text").inner_text()]
    made = page.locator("[data-testid=key-row][data-name=till]")
    expect(made).to_contain_text('search, write · only shop · items with colour = "red" · 600/min')
    made.get_by_test_id("key-rotate").click()
    page.get_by_test_id("confirm-yes").click()
    expect(page.get_by_test_id("secret-text")).not_to_have_text(texts[0])
    texts.append(page.get_by_test_id("secret-text").inner_text())
    assert faults(page) == []

    def may_search(text: str) -> bool:
        headers = {"Authorization": f"Bearer {text}"}
        return bool(shop.shop.client.get("/galleries/shop", headers=headers).status_code == 200)

    assert [may_search(text) for text in texts] == [True, True]  # the old one for a day
    page.get_by_test_id("to-audit").click()
    page.get_by_test_id("to-keys").click()
    expect(page.get_by_test_id("secret")).to_be_hidden()
    assert texts[1] not in page.content()
    made.get_by_test_id("key-revoke").click()
    page.get_by_test_id("confirm-yes").click()
    expect(made).to_contain_text("revoked")
    until(lambda: not any(may_search(text) for text in texts))

    for _ in range(101):  # more than a page
        shop.shop.client.patch("/galleries/shop/items", json={"changes": {"i/00.png": {"n": 1}}})
    page.get_by_test_id("to-audit").click()
    expect(page.get_by_test_id("audit-count")).to_have_text("100 entries")
    page.get_by_test_id("audit-older").click()
    page.get_by_test_id("audit-words").fill("till")
    lines = page.get_by_test_id("audit-table").locator("tbody tr")
    expect(lines).to_have_count(3)
    expect(lines.first).to_contain_text("DELETE /keys/{name}")
    assert faults(page) == []


def test_found_items_are_deleted_together(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("422")
    expect(page.get_by_test_id("filter-delete")).to_be_hidden()
    page.get_by_test_id("key-search").fill("i/0")
    page.get_by_test_id("filter").fill('colour = "red" and price < 3')
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(1)
    page.get_by_test_id("filter").fill("price <")
    page.get_by_test_id("find").click()
    expect(page.get_by_test_id("filter-error")).not_to_be_empty()
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


def test_a_selection_spans_pages(open_admin: OpenPage, shop: AdminShop, allowed: list[str]) -> None:
    shop.stock(count=MANY)
    allowed.append("404")
    page = open_admin("/admin?gallery=shop")
    expect(rows(page)).to_have_count(50)
    expect(page.get_by_test_id("items-count")).to_have_text("60 items")
    page_until(page, "document.querySelector('.thumb img').naturalWidth > 0")
    page.get_by_test_id("pick").nth(1).check()
    page.get_by_test_id("page-after").click()
    expect(rows(page)).to_have_count(10)
    expect(page.get_by_test_id("page-text")).to_have_text("51 – 60 of 60")
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
    summer = page.locator('[data-testid=gallery-row][data-name="summer"]')
    summer.get_by_test_id("gallery-delete").click()
    expect(page.get_by_test_id("confirm-yes")).to_be_disabled()
    page.get_by_test_id("confirm-typed").fill("summer")
    page.get_by_test_id("confirm-yes").click()
    expect(summer).to_have_count(0)
    assert shop.shop.client.get("/galleries/summer").status_code == 404


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


def test_the_status_says_that_a_guarantee_was_withdrawn(page: Page) -> None:
    page.get_by_test_id("to-status").click()
    expect(page.get_by_test_id("status-calibration")).to_be_visible()
    expect(page.get_by_test_id("status-guarantee")).to_have_count(0)

    def withdrawn(route: Route) -> None:
        why = "Queries that came until today differ from the labelled ones"
        route.fulfill(json=route.fetch().json() | {"guarantee_withdrawn": why})

    page.route("**/galleries/shop", withdrawn)
    page.get_by_test_id("status-refresh").click()
    found = page.get_by_test_id("status-guarantee")
    expect(found).to_contain_text("no longer guaranteed. Queries that came until today differ")


@pytest.fixture
def adding(open_admin: OpenPage, shop: AdminShop) -> Page:
    """The view for adding to a gallery of two items."""
    shop.stock(count=2)
    adding = open_admin("/admin?gallery=shop#add")
    expect(adding.get_by_test_id("gallery-size")).to_have_text("2 items")
    return adding


def send(adding: Page) -> list[str]:
    adding.get_by_test_id("queue-send").click()
    return added(adding)


def test_dropped_images_share_their_attributes(adding: Page, shop: AdminShop) -> None:
    adding.get_by_test_id("attributes-add-row").first.click()
    fill_row(adding, 0, "season", "text", "summer")
    adding.get_by_test_id("attributes-add-row").first.click()
    fill_row(adding, 1, "price", "number", "5")
    drop(adding, *((f"new-{n}.png", shop.images[n]) for n in (0, 1, 1)))
    expect(adding.get_by_test_id("queue-title")).to_have_text("3 images to add")
    adding.get_by_test_id("queue-send").click()
    expect(adding.get_by_test_id("queue-error")).to_contain_text("have the key new-1.png")
    assert adding.evaluate(FOCUSED) == "queue-key"
    adding.keyboard.press("End")
    adding.keyboard.type("2")
    assert send(adding) == ["Added"] * 3
    expect(adding.get_by_test_id("queue-title")).to_have_text("3 added")
    expect(adding.get_by_test_id("gallery-size")).to_have_text("5 items")
    assert shop.keys(key_prefix="new-") == ["new-0.png", "new-1.png", "new-1.png2"]
    assert shop.attributes("new-1.png2") == {"season": "summer", "price": 5}


def test_each_result_is_shown_and_only_the_broken_one_fails(adding: Page, shop: AdminShop) -> None:
    attributes = '{"colour": "red", "price": 0, "sale": true}'
    adding.get_by_test_id("attributes-json").first.click()
    adding.get_by_test_id("attributes-text").first.fill(attributes)
    drop(adding, ("0.png", shop.images[0]), ("1.png", shop.images[7]), ("x.png", b"no image"))
    drop(adding, ("new.png", shop.images[5]))
    adding.get_by_test_id("queue-key").nth(0).fill("i/00.png")
    adding.get_by_test_id("queue-key").nth(1).fill("i/01.png")
    states = send(adding)
    assert [states[0], states[1], states[3]] == ["Unchanged", "Replaced", "Added"]
    assert states[2].startswith("Failed: ")
    assert "not an image" in states[2]
    expect(adding.get_by_test_id("queue-title")).to_have_text(
        "1 added, 1 replaced, 1 unchanged, 1 failed"
    )
    expect(adding.get_by_test_id("queue-send")).to_have_text("Try the failed ones again")


def test_picked_images_have_attributes(adding: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("503")
    refusals = iter([503])

    def refuse_once(route: Route) -> None:
        if route.request.method == "PUT" and next(refusals, None):
            route.fulfill(status=503, headers={"Retry-After": "1"})
        else:
            route.continue_()

    adding.route("**/items", refuse_once)
    files: list[Any] = [
        {"name": f"own-{n}.png", "mimeType": "image/png", "buffer": shop.images[n]}
        for n in range(2)
    ]
    adding.get_by_test_id("add-files").set_input_files(files)
    adding.get_by_test_id("queue-edit").nth(1).click()
    adding.get_by_test_id("edit").get_by_test_id("attributes-add-row").click()
    fill_row(adding, 0, "season", "text", "winter")
    adding.get_by_test_id("edit-save").click()
    expect(adding.get_by_test_id("edit")).to_be_hidden()
    assert send(adding) == ["Added", "Added"]
    assert next(refusals, None) is None
    assert shop.attributes("own-0.png") == {}
    assert shop.attributes("own-1.png") == {"season": "winter"}


def test_many_images_are_sent_in_batches_and_can_be_stopped(adding: Page, shop: AdminShop) -> None:
    asked: list[Route] = []

    def hold_the_second(route: Route) -> None:
        if not asked:
            route.continue_()
        asked.append(route)

    adding.route("**/items", hold_the_second)
    drop(adding, *((f"many-{n:02d}.png", shop.images[n % 12]) for n in range(20)))
    adding.get_by_test_id("queue-send").click()
    expect(adding.get_by_test_id("queue-state").nth(7)).to_have_text("Added")
    adding.get_by_test_id("queue-stop").click()
    states = added(adding)
    assert states[:8] == ["Added"] * 8
    assert states[-1] == "Not sent yet"
    expect(adding.get_by_test_id("queue-send")).to_contain_text("Add ")
    adding.unroute("**/items")
    assert set(send(adding)) <= {"Added", "Unchanged"}
    assert len(shop.keys(key_prefix="many-")) == 20


def test_a_read_only_gallery_is_shown_as_such(adding: Page) -> None:
    closed = {"name": "shop", "size": 2, "bundle_id": "b", "writable": False, "managed": False}
    answer = {"bundle_id": "b", "galleries": [closed]}
    adding.route("**/galleries", lambda route: route.fulfill(json=answer))
    adding.reload()
    expect(adding.get_by_test_id("add-closed")).to_contain_text("shop is read-only")
    expect(adding.get_by_test_id("add-pick")).to_be_disabled()
