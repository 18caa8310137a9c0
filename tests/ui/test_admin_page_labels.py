"""The admin page labels what visitors searched with, by clicks and by keys, each query once."""

import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support import admin_page
from tests.support.admin_page import AdminShop
from tests.support.page_browser import (
    FOCUSED,
    RUN_AXE,
    OpenPage,
    faults,
    intercept,
    received,
    send_image,
    settled,
)
from tests.support.seams import FeedbackStore
from tests.support.servers import render
from tests.support.shops import sha256
from tests.support.waiting import until
from tests.tiny import encoded

pytestmark = pytest.mark.browser

PRODUCTS = 30
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}


def photo(number: int, quality: int = 60) -> bytes:
    """A photo of product `number`, other bytes than the image of its item."""
    return encoded(render(number), "JPEG", quality=quality)


PHOTOS = {sha256(photo(number)): number for number in range(4)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminShop]:
    """A service that stores the photos of rated searches."""
    made = AdminShop(tmp_path_factory.mktemp("labels"), [], feedback="pictures")
    yield made
    made.shop.close()


@pytest.fixture
def stocked(shop: AdminShop) -> AdminShop:
    """A gallery of one image a product, and four photos of visitors."""
    shop.shop.client.delete("/galleries/shop")
    shop.shop.client.post("/galleries", json={"name": "shop"}).raise_for_status()
    numbers = range(PRODUCTS)
    texts = [json.dumps({"product": f"p{number}"}) for number in numbers]
    images = {f"i/{number}.png": encoded(render(number)) for number in numbers}
    shop.shop.put_form(images, texts).raise_for_status()
    # The service learns in the background which attribute names the product.
    until(lambda: shop.shop.client.get("/galleries/shop/golden/unlabelled").json()["product"])
    for number in PHOTOS.values():
        named = shop.shop.search(photo(number)).json()["answer_id"]
        sent = {"answer_id": named, "item": "i/9.png", "action": "wrong"}
        files = {"image": photo(number)}
        shop.shop.client.post("/feedback", data=sent, files=files).raise_for_status()
    return shop


class Labelling:
    """The view, with the sha256 of each query that was drawn."""

    def __init__(self, page: Page) -> None:
        self.page, self.drawn = page, list[str]()
        page.on("response", self._note)

    def _note(self, response: Any) -> None:
        if response.url.endswith("/golden/unlabelled"):
            self.drawn.append(response.json()["sha256"])

    def shows(self, left: int) -> int:
        """Wait for a query with its hits; the number of its product."""
        expect(self.page.get_by_test_id("label-left")).to_have_text(f"{left} to label")
        expect(self.page.get_by_test_id("label-hit")).to_have_count(9)
        return PHOTOS[self.drawn[-1]]


@pytest.fixture
def labelling(browser: Browser, stocked: AdminShop) -> Iterator[Labelling]:
    """The view of somebody whose key may change this gallery alone."""
    key = stocked.make_key(secrets.token_hex(4), "write", galleries=("shop",))
    with admin_page.opening(browser, stocked.url, key, ["404"]) as open_it:
        page = open_it("/admin?gallery=shop#items")
        labelling = Labelling(page)
        page.get_by_test_id("to-golden").click()
        yield labelling


def golden(shop: AdminShop) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shop.shop.client.get("/galleries/shop/golden").json()["queries"]
    return found


def test_clicks_and_keys_label_each_query_once(labelling: Labelling, stocked: AdminShop) -> None:
    page = labelling.page
    number = labelling.shows(4)
    hits = page.get_by_test_id("label-hit")
    expect(hits.first).to_have_text(f"1p{number}")
    expect(page.get_by_test_id("label-query").locator("img")).to_be_visible()
    assert faults(page) == []
    hits.filter(has_text=f"p{number}").first.click()
    second = labelling.shows(3)
    expect(page.get_by_test_id("golden-count")).to_have_text("1 labelled")
    assert page.evaluate(FOCUSED) == "label-title"
    [made] = golden(stocked)
    assert (made["attribute"], made["value"]) == ("product", f"p{number}")

    page.keyboard.press("2")
    third = labelling.shows(2)
    page.keyboard.press("0")
    fourth = labelling.shows(1)
    assert sorted((number, second, third, fourth)) == [0, 1, 2, 3]
    _, guessed, absent = golden(stocked)
    assert guessed["value"] not in (None, f"p{second}")
    assert absent["no_match"] is True
    page.keyboard.press("u")
    expect(page.get_by_test_id("golden-count")).to_have_text("2 labelled")
    expect(hits.first).to_have_text(f"1p{third}")
    page.keyboard.press("1")
    labelling.shows(1)
    assert golden(stocked)[-1]["value"] == f"p{third}"

    page.keyboard.press("s")
    expect(page.get_by_test_id("label-text")).to_contain_text("is left to label")
    expect(page.get_by_test_id("golden-count")).to_have_text("3 labelled")
    page.reload()
    expect(page.get_by_test_id("label-text")).to_contain_text("is left to label")


def test_a_query_of_an_undo_is_drawn_again_after_a_reload(
    labelling: Labelling, stocked: AdminShop
) -> None:
    """Of a label and of a skip: people undo hard queries most, and all must be as likely."""
    page = labelling.page
    for key in ("1", "s"):
        labelling.shows(4)
        page.get_by_test_id("label-title").focus()
        page.keyboard.press(key)
        labelling.shows(3)
        page.keyboard.press("u")
        expect(page.get_by_test_id("label-left")).to_have_text("4 to label")
        expect(page.get_by_test_id("label-hit")).to_have_count(9)
        page.reload()
        labelling.shows(4)
    assert golden(stocked) == []


def test_a_query_that_a_colleague_labelled_keeps_this_label(
    labelling: Labelling, stocked: AdminShop
) -> None:
    """Both see the same one. Neither a label nor an undo of the slower one changes it."""
    page, client = labelling.page, stocked.shop.client
    for key, left in (("0", 3), ("s", 2)):
        labelling.shows(left + 1)
        sha = labelling.drawn[-1]
        url = f"/galleries/shop/golden/unlabelled/{sha}"
        files = {"image": ("q.jpg", client.get(url).content, "image/jpeg")}
        client.delete(url).raise_for_status()
        label = {"label": json.dumps({"attribute": "product", "value": f"p{PHOTOS[sha]}"})}
        client.post("/galleries/shop/golden", files=files, data=label).raise_for_status()
        page.get_by_test_id("label-title").focus()
        page.keyboard.press(key)
        labelling.shows(left)
        expect(page.get_by_test_id("label-undo")).to_be_hidden()
        assert golden(stocked)[-1]["value"] == f"p{PHOTOS[sha]}"
    assert len(golden(stocked)) == 2


def test_a_query_whose_label_fails_is_left_to_label(
    labelling: Labelling, stocked: AdminShop
) -> None:
    labelling.shows(4)
    page = labelling.page
    page.route("**/galleries/shop/golden", lambda route: route.fulfill(status=404), times=1)
    page.get_by_test_id("label-hit").first.click()
    expect(page.get_by_test_id("error-title")).to_be_visible()
    assert stocked.shop.client.get("/galleries/shop/golden/unlabelled").json()["left"] == 4
    page.get_by_test_id("label-hit").first.click()
    labelling.shows(3)
    assert len(golden(stocked)) == 1


def test_a_label_that_ends_in_another_gallery_does_not_count_there(
    open_admin: OpenPage, stocked: AdminShop
) -> None:
    page, client = open_admin("/admin?gallery=shop#golden"), stocked.shop.client
    client.post("/galleries", json={"name": "other"}).raise_for_status()
    page.reload()
    expect(page.get_by_test_id("label-hit")).to_have_count(9)
    pending = intercept(page, "**/galleries/shop/golden", times=1)
    page.get_by_test_id("label-hit").first.click()
    received(page, pending, 1)
    page.get_by_test_id("gallery").select_option("other")
    expect(page.get_by_test_id("label-text")).to_contain_text("is left to label")
    pending[0].continue_()
    until(lambda: golden(stocked))
    expect(page.get_by_test_id("label-box")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_test_id("golden-count")).to_have_text("")
    expect(page.get_by_test_id("label-undo")).to_be_hidden()
    client.delete("/galleries/other").raise_for_status()


def test_keys_work_only_within_the_labels(labelling: Labelling, stocked: AdminShop) -> None:
    """A letter that is meant for a screen reader or a field labels nothing."""
    labelling.shows(4)
    page = labelling.page
    page.locator("#golden-title").focus()
    for key in ("1", "0", "s", "Control+0"):
        page.keyboard.press(key)
    page.get_by_test_id("label-title").focus()
    page.keyboard.press("Control+1")
    page.keyboard.press("m")
    expect(page.get_by_test_id("label-hit")).to_have_count(PRODUCTS)
    expect(page.get_by_test_id("label-more")).to_be_hidden()
    expect(page.get_by_test_id("label-left")).to_have_text("4 to label")
    assert golden(stocked) == []


def test_nobody_denies_products_that_are_not_shown_yet(
    labelling: Labelling, stocked: AdminShop
) -> None:
    labelling.shows(4)
    page = labelling.page
    page.get_by_test_id("to-items").click()
    pending = intercept(page, "**/search")
    page.get_by_test_id("to-golden").click()
    received(page, pending, 1)
    expect(page.get_by_test_id("label-none")).to_be_disabled()
    page.get_by_test_id("label-title").focus()
    page.keyboard.press("0")
    pending[0].continue_()
    labelling.shows(4)
    expect(page.get_by_test_id("label-none")).to_be_enabled()
    assert golden(stocked) == []


def test_a_photo_that_was_deleted_vanishes_and_is_not_labelled(
    labelling: Labelling, stocked: AdminShop
) -> None:
    labelling.shows(4)
    with contextlib.closing(FeedbackStore(stocked.shop.state)) as store:
        store.clear("shop")
    labelling.page.get_by_test_id("label-hit").first.click()
    expect(labelling.page.get_by_test_id("label-text")).to_contain_text("is left to label")
    expect(labelling.page.get_by_test_id("label-query")).to_be_hidden()
    assert golden(stocked) == []


def test_words_are_labelled_as_words(labelling: Labelling) -> None:
    labelling.shows(4)
    page, sent = labelling.page, list[str]()
    page.get_by_test_id("to-items").click()
    drawn = {"left": 1, "sha256": "a" * 64, "text": "green mug", "product": "product"}
    hit = {"key": "i/3.png", "score": 0.4, "image": "galleries/shop/items/3/image"}
    answer = {"hits": [], "groups": [{"value": "p3", "score": 0.4, "hits": [hit]}]}

    def labelled(route: Route) -> None:
        if route.request.method != "POST":
            return route.fallback()
        sent.append(route.request.post_data or "")
        page.unroute("**/golden/unlabelled")
        return route.fulfill(json={"sha256": "b" * 64})

    page.route("**/golden/unlabelled", lambda route: route.fulfill(json=drawn))
    page.route("**/golden/unlabelled/*", lambda route: route.fulfill(status=204), times=1)
    page.route("**/search", lambda route: route.fulfill(json=answer), times=1)
    page.route("**/galleries/shop/golden", labelled)
    page.get_by_test_id("to-golden").click()
    expect(page.get_by_test_id("label-query")).to_have_text("“green mug”")
    page.get_by_test_id("label-hit").click()
    labelling.shows(4)
    assert '["green mug"]' in sent[0]
    assert '{"attribute":"product","value":"p3"}' in sent[0]


def test_it_fits_a_phone_in_light_and_dark(browser: Browser, stocked: AdminShop) -> None:
    with admin_page.opening(browser, stocked.url, stocked.key) as open_it:
        page = open_it("/admin?gallery=shop#golden", **PHONE)
        expect(page.get_by_test_id("label-hit")).to_have_count(9)
        assert faults(page) == []
        page.emulate_media(color_scheme="dark")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert page.evaluate(RUN_AXE, ["[data-testid=label-box]", ["color-contrast"]]) == []


def test_labels_of_the_page_guarantee_answers(
    browser: Browser, open_admin: OpenPage, stocked: AdminShop
) -> None:
    """Labelled here, run here, and the search page names the products of which one is right."""
    for number in range(4, 22):
        files = {"image": ("q.jpg", photo(number), "image/jpeg")}
        label = {"label": json.dumps({"attribute": "product", "value": f"p{number}"})}
        answer = stocked.shop.client.post("/galleries/shop/golden", files=files, data=label)
        answer.raise_for_status()
    page = open_admin("/admin?gallery=shop#golden")
    for left in (4, 3):
        expect(page.get_by_test_id("label-left")).to_have_text(f"{left} to label")
        page.get_by_test_id("label-hit").first.click()
    expect(page.get_by_test_id("golden-count")).to_have_text("20 labelled")
    page.get_by_test_id("golden-run").click()
    expect(page.get_by_test_id("golden-runs").locator("tbody tr")).to_have_count(1)
    page.goto(f"{stocked.url}/?gallery=shop")
    expect(page.get_by_test_id("sample").first).to_be_visible()
    send_image(page, photo(25))
    settled(page)
    expect(page.get_by_test_id("chance")).to_contain_text("This product (95 of 100 times): p25")
