"""The search page and the real service together."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.admin_page import FEW, AdminShop
from tests.support.page_browser import (
    OpenPage,
    intercept,
    judge,
    keys,
    received,
    search_with_card,
    send_files,
    send_image,
    settled,
)

pytestmark = pytest.mark.browser


@pytest.fixture
def page(open_admin: OpenPage, shop: AdminShop) -> Page:
    """The start, in a gallery of twelve items."""
    shop.stock()
    page = open_admin("/#gallery=shop")
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


def search(page: Page, shop: AdminShop) -> Any:
    """Drop the image of the first item; the service's answer, once it is shown."""
    with page.expect_response("**/search") as answered:
        send_image(page, shop.images[0])
    settled(page)
    return answered.value.json()


def test_a_link_shows_the_same_answer(page: Page, shop: AdminShop, open_admin: OpenPage) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_test_id("settings").locator("summary").first.click()
    page.get_by_test_id("k").select_option("10")
    answer = search(page, shop)
    expect(page.get_by_test_id("card")).to_have_count(answer["k"])
    expect(page.get_by_test_id("key")).to_be_hidden()  # which is requested only after a refusal
    assert answer["k"] == 10
    assert keys(page)[0] == "i/00.png"
    score = page.get_by_test_id("score").first
    expect(score).to_have_text("1.00")
    expect(score.locator("..")).to_contain_text("Similarity")  # not a share, so without a bar
    expect(page.get_by_test_id("probability")).to_have_count(0)  # no attribute names the product
    expect(page.get_by_test_id("chance")).to_be_hidden()
    first = page.get_by_test_id("card").first.locator("img")
    expect(first).to_have_js_property("complete", True)
    page.get_by_test_id("about").locator("summary").click()
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["gallery_version"])
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["bundle_id"])

    page.get_by_test_id("k").select_option("50")
    expect(page.get_by_test_id("card")).to_have_count(FEW)
    second = keys(page)[1]
    search_with_card(page, 1)
    expect(page.get_by_test_id("query-name")).to_have_text(second.split("/")[1])
    expect(page.get_by_test_id("card")).to_have_count(FEW - 1)
    assert second not in keys(page)
    page.get_by_test_id("group").select_option("colour")
    expect(page.get_by_test_id("group-value")).to_have_count(3)
    assert [url for url in asked if not url.startswith((shop.url, "blob:", "data:"))] == []

    other = open_admin(page.url.removeprefix(shop.url))
    settled(other)
    assert keys(other) == keys(page)


def test_a_click_survives_a_rebuild(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("404")  # images of the previous version
    search(page, shop)
    clicked = keys(page)[1]
    shop.stock(step=-1)
    search_with_card(page, 1)
    expect(page.get_by_test_id("card")).to_have_count(FEW - 1)
    assert clicked not in keys(page)


def test_an_early_image_searches_the_linked_gallery(page: Page, shop: AdminShop) -> None:
    shop.stock("aisle", count=0)  # the first of the list
    pending = intercept(page, "**/galleries", times=1)
    page.reload()
    received(page, pending, 1)
    search(page, shop)
    expect(page.get_by_test_id("card")).to_have_count(12)
    pending[0].continue_()
    expect(page.get_by_test_id("gallery")).to_have_value("shop")
    expect(page.get_by_test_id("gallery-size")).to_have_text("12 items to search")
    shop.shop.client.delete("/galleries/aisle")


def test_a_click_searches_with_the_item_shown(page: Page, shop: AdminShop) -> None:
    shop.stock("zdepot")
    page.reload()
    search(page, shop)
    expect(page.get_by_test_id("card").nth(1)).to_be_visible()
    clicked = keys(page)[1]
    pending = intercept(page, "**/search", times=1)
    page.get_by_test_id("gallery").select_option("zdepot")
    received(page, pending, 1)
    search_with_card(page, 1)
    expect(page.get_by_test_id("query-name")).to_have_text(clicked.split("/")[1])
    expect(page.get_by_test_id("score").first).to_have_text(re.compile(r"^(1\.00|0\.99)"))
    assert clicked in keys(page), "it is not excluded, since it belongs to the other gallery"
    shop.shop.client.delete("/galleries/zdepot")


def test_filter_counts_follow_the_other_filters(page: Page, shop: AdminShop) -> None:
    """Of twelve items in three colours, every second on sale, with prices from 0 on."""
    search(page, shop)
    for found in page.get_by_test_id("filter").all():
        found.evaluate("(node) => (node.open = true)")
    colours = page.locator("[data-name=colour] .option-count")  # blue, green, red
    expect(colours).to_have_text(["4", "4", "4"])
    bars = page.get_by_test_id("filter-bars").locator("span")
    expect(bars).to_have_count(12)
    page.get_by_test_id("filter-from").fill("7")
    expect(colours).to_have_text(["2", "2", "1"])
    page.get_by_role("checkbox", name="red").check()
    expect(page.get_by_test_id("card")).to_have_count(1)
    yes, no = page.locator("[data-name=sale] .choice span").all()[1:]
    expect(yes).to_have_attribute("data-count", "0")
    expect(no).to_have_attribute("data-count", "1")
    expect(bars).to_have_count(4)  # all prices of red items
    expect(colours).to_have_text(["2", "2", "1"])  # what another colour would give
    page.get_by_test_id("clear-all").click()
    expect(colours).to_have_text(["4", "4", "4"])
    page.get_by_test_id("min-score").fill("0.99")
    expect(colours).to_have_text(["0", "0", "1"])
    expect(page.locator("[data-name=colour] .none")).to_have_count(2)


def test_a_real_service_narrows_its_answers(page: Page, shop: AdminShop) -> None:
    search(page, shop)
    cards = page.get_by_test_id("card")
    page.get_by_test_id("presets").locator("button").click()
    expect(page.get_by_test_id("min-score-value")).to_contain_text("0.60")
    assert 1 <= cards.filter(visible=True).count() < FEW
    page.get_by_test_id("min-score").fill("0")
    page.get_by_role("checkbox", name="red").check()
    expect(cards).to_have_count(4)
    page.get_by_role("checkbox", name="blue").check()
    expect(cards).to_have_count(8)
    page.get_by_test_id("group").select_option("colour")
    expect(page.get_by_test_id("group-value")).to_have_count(2)
    expect(page.get_by_test_id("group-count").first).to_have_text("4 photos")
    page.get_by_test_id("clear-all").click()
    page.get_by_test_id("group").select_option("")

    for found in page.get_by_test_id("filter").all():
        found.evaluate("(node) => (node.open = true)")
    page.get_by_test_id("filter-from").fill("4")
    expect(cards).to_have_count(8)
    page.get_by_label("yes", exact=True).check()
    expect(cards).to_have_count(4)
    page.get_by_test_id("clear-all").click()
    expect(cards).to_have_count(FEW)

    with page.expect_response("**/search") as answered:
        page.get_by_test_id("crop-add").click()
    assert answered.value.status == 200
    settled(page)
    before = keys(page)
    judge(page, "like", 4, chips=1)
    judge(page, "dislike", 5, chips=2)
    assert keys(page) != before


def test_refusals_are_explained(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed += ["404", "415"]
    answer = search(page, shop)
    with page.expect_response("**/search") as refusal:
        send_files(page, ("renamed.jpg", "image/jpeg", b"text that was renamed"))
    problem = refusal.value.json()
    assert problem["status"] == 415
    expect(page.get_by_test_id("error-title")).to_have_text(problem["title"])
    expect(page.get_by_test_id("error-detail")).to_have_text(problem["detail"])
    assert keys(page) == [hit["key"] for hit in answer["hits"]]

    answer["hits"] = answer["hits"][:3]
    for hit in answer[
        "hits"
    ]:  # as if the gallery had been rebuilt before the images were requested
        hit["image"] = f"/galleries/shop/items/{hit['id']}/image?version=000000000000"
    page.route("**/search", lambda route: route.fulfill(json=answer))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    send_image(page, shop.images[1])
    expect(page.get_by_test_id("card").locator("img.broken")).to_have_count(3)
    detail = page.get_by_test_id("error-detail")
    expect(detail).to_contain_text("This link is from version 000000000000 of gallery shop")
    assert sum("version=000000000000" in url for url in asked) == 4  # three and one to ask why
    page.get_by_test_id("error-close").click()
    expect(page.get_by_test_id("error")).to_be_hidden()
