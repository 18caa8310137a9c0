"""What the page shows while it waits, when nothing is there and when something fails."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import OpenShop, drop_item, send_bytes, settled
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser


def refuse(page: Page, status: int, **headers: str) -> None:
    content = {"title": "Too busy", "detail": "Others are searching.", "request_id": "r7"}
    page.route(
        "**/search", lambda route: route.fulfill(status=status, headers=headers, json=content)
    )


def opened(open_shop: OpenShop, *allowed: str, **settings: Any) -> Page:
    page = open_shop(allowed=allowed, **settings)
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    return page


def drop_anything(page: Page, shop: Shop) -> None:
    send_bytes(page, "drop", "query.png", "image/png", shop.galleries["shop"][0].data)


def test_a_first_search_shows_a_skeleton(shop_page: Page, fake_shop: Shop) -> None:
    shop_page.route("**/search", lambda route: None)  # never answered
    drop_anything(shop_page, fake_shop)
    expect(shop_page.locator(".placeholder")).to_have_count(12)
    expect(shop_page.get_by_test_id("results")).to_have_attribute("aria-busy", "true")
    expect(shop_page.get_by_test_id("live")).to_have_text("Searching")
    shop_page.keyboard.press("Escape")
    expect(shop_page.locator("body")).to_have_attribute("data-state", "start")


@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_the_service_asks_for_is_counted_down(
    open_shop: OpenShop, fake_shop: Shop, status: int
) -> None:
    page = opened(open_shop, str(status))
    refuse(page, status, **{"Retry-After": "2"})
    drop_anything(page, fake_shop)
    retry = page.get_by_test_id("error-retry")
    expect(retry).to_be_disabled()
    expect(retry).to_contain_text("Try again in")
    expect(page.get_by_test_id("error-detail")).to_have_text("Others are searching.")
    expect(retry).to_have_text("Try again", timeout=10_000)
    page.unroute("**/search")
    retry.click()
    settled(page)
    expect(page.get_by_test_id("card").first).to_be_visible()
    expect(page.get_by_test_id("error")).to_be_hidden()


def test_offline_is_said_and_the_answer_stays(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = opened(open_shop, "ERR_INTERNET_DISCONNECTED")
    drop_item(page, fake_shop, 0)
    page.context.set_offline(True)
    expect(page.get_by_test_id("offline")).to_be_visible()
    page.get_by_test_id("k").select_option("10")
    expect(page.get_by_test_id("error-title")).to_have_text("You are offline")
    expect(page.get_by_test_id("card")).to_have_count(20)
    expect(page.get_by_test_id("k")).to_have_value("20")  # what is shown is what was asked
    page.context.set_offline(False)
    expect(page.get_by_test_id("offline")).to_be_hidden()
    page.get_by_test_id("error-retry").click()
    expect(page.get_by_test_id("card")).to_have_count(10)


def test_a_service_that_is_gone_can_be_tried_again_from_the_start(
    open_shop: OpenShop,
) -> None:
    page = open_shop("/live", allowed=("ERR_FAILED",))
    page.route("**/galleries", lambda route: route.abort())
    page.goto(page.url.removesuffix("live"))
    expect(page.get_by_test_id("error-title")).to_have_text("The service cannot be reached")
    page.unroute("**/galleries")
    page.get_by_test_id("error-retry").click()
    expect(page.get_by_test_id("gallery-size")).to_have_text("24 items to search")


def test_an_empty_gallery_and_filters_without_items_are_told_apart(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_role("checkbox", name="mug").check()
    shop_page.get_by_test_id("filter").nth(2).locator("summary").click()
    shop_page.get_by_test_id("filter-from").fill("23")
    expect(shop_page.get_by_test_id("empty-text")).to_contain_text("No item passes the filters")
    shop_page.get_by_test_id("empty-filter").click()
    expect(shop_page.get_by_test_id("card")).to_have_count(20)
    fake_shop.galleries["shop"] = []
    shop_page.get_by_test_id("k").select_option("50")
    expect(shop_page.get_by_test_id("empty-title")).to_have_text("Nothing to search in")


def test_a_gallery_without_a_description_can_still_be_searched(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = open_shop("/live", allowed=("500",))
    page.route("**/galleries/shop", lambda route: route.fulfill(status=500))
    page.goto(page.url.removesuffix("live"))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    expect(page.get_by_test_id("card")).to_have_count(20)
    expect(page.get_by_test_id("filters")).to_be_hidden()


def test_the_times_of_the_stages_are_a_bar_and_a_list(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("about").locator("summary").click()
    expect(shop_page.get_by_test_id("about")).to_contain_text("Answered in 16 ms")
    parts = shop_page.get_by_test_id("timing-bar").locator("span")
    widths = [part.bounding_box() for part in parts.all()]
    assert len(widths) == 4
    embed, decode = widths[1], widths[0]
    assert embed is not None
    assert decode is not None
    assert embed["width"] > 3 * decode["width"]
    expect(shop_page.get_by_test_id("about-list")).to_contain_text("Embed")


def test_an_image_that_the_browser_cannot_show_is_searched_all_the_same(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = opened(open_shop)
    answer = fake_shop.galleries["shop"][0]
    page.route(
        "**/search",
        lambda route: route.fulfill(
            json={
                "gallery": "shop",
                "hits": [fake_shop.entry("shop", answer) | {"score": 0.5, "probability": None}],
                "groups": None,
                "timings_ms": {},
                "cached": True,
            }
        ),
    )
    send_bytes(page, "drop", "scan.tif", "image/tiff", b"II*")
    settled(page)
    expect(page.get_by_test_id("card")).to_have_count(1)
    expect(page.get_by_test_id("crops")).to_be_hidden()


def test_samples_of_the_service_come_first_and_can_be_linked(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = open_shop("/live")
    data = fake_shop.galleries["shop"][4].data
    samples = [{"name": "04-jar", "image": "/samples/0"}]
    page.route("**/samples", lambda route: route.fulfill(json={"samples": samples}))
    page.route("**/samples/0", lambda route: route.fulfill(body=data, content_type="image/png"))
    page.goto(page.url.removesuffix("live"))
    page.get_by_test_id("sample").click()
    settled(page)
    expect(page.get_by_test_id("card").first).to_have_attribute("data-key", "jar/004.png")
    assert "sample=0" in page.url
    page.reload()
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text("04-jar")
