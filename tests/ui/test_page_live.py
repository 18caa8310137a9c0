"""The page and the real service together: filters, groups, parts, likes, links, keys."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from embedder.fake import FakeEmbedder
from tests.support.admin_page import CALIBRATION
from tests.support.page_browser import close_page, keys, open_page, send_bytes, settled
from tests.support.shops import Shop, start_shop

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def real_shop(
    tmp_path_factory: pytest.TempPathFactory, pictures: list[bytes]
) -> Iterator[tuple[Shop, list[bytes]]]:
    """Twelve items with attributes behind the real service."""
    shop = start_shop(tmp_path_factory.mktemp("state"), FakeEmbedder(calibration=CALIBRATION))
    for number, data in enumerate(pictures):
        colour = ("red", "green", "blue")[number % 3]
        shop.put({f"{colour}/{number:02d}.png": data}, colour=colour, price=number, sale=number < 6)
    yield shop, pictures
    shop.close()


@pytest.fixture
def page(browser: Browser, real_shop: tuple[Shop, list[bytes]]) -> Iterator[Page]:
    """The page with the results of the first item's picture; its console must stay clean."""
    shop, pictures = real_shop
    page, errors = open_page(browser, str(shop.client.base_url))
    expect(page.get_by_test_id("sample")).to_have_count(8)
    send_bytes(page, "drop", "mine.png", "image/png", pictures[0])
    settled(page)
    yield page
    assert errors == []
    close_page(page)


def test_filters_and_groups_of_the_real_service(page: Page) -> None:
    assert keys(page)[0] == "red/00.png"
    expect(page.get_by_test_id("probability").first).to_have_text(">99%")
    page.get_by_role("checkbox", name="red").check()
    expect(page.get_by_test_id("card")).to_have_count(4)
    page.get_by_role("checkbox", name="blue").check()
    expect(page.get_by_test_id("card")).to_have_count(8)
    page.get_by_test_id("group").select_option("colour")
    expect(page.get_by_test_id("group-value")).to_have_count(2)
    expect(page.get_by_test_id("group-count").first).to_have_text("4 pictures")


def test_numbers_and_yes_or_no_filter_the_real_service(page: Page) -> None:
    filters = page.get_by_test_id("filter")
    for number in range(3):
        filters.nth(number).evaluate("(node) => (node.open = true)")
    page.get_by_test_id("filter-from").fill("4")
    expect(page.get_by_test_id("card")).to_have_count(8)
    page.get_by_label("yes", exact=True).check()
    expect(page.get_by_test_id("card")).to_have_count(2)


def test_a_part_and_likes_reach_the_real_service(page: Page) -> None:
    before = keys(page)
    with page.expect_response("**/search") as answered:
        page.get_by_test_id("crop-add").click()
    assert answered.value.status == 200
    settled(page)
    with page.expect_response("**/search") as answered:
        page.get_by_test_id("like").nth(4).click()
    assert answered.value.status == 200
    settled(page)
    with page.expect_response("**/search") as answered:
        page.get_by_test_id("dislike").nth(5).click()
    assert answered.value.status == 200
    settled(page)
    assert keys(page) != before


def test_a_link_to_an_item_opens_the_same_view_of_the_real_service(
    page: Page, browser: Browser
) -> None:
    second = keys(page)[1]
    page.get_by_test_id("card-search").nth(1).click()
    expect(page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(page)
    assert second not in keys(page)
    page.get_by_test_id("group").select_option("colour")
    expect(page.get_by_test_id("group-value")).to_have_count(3)
    other, errors = open_page(browser, page.url)
    settled(other)
    assert keys(other) == keys(page)
    assert errors == []
    close_page(other)


def test_suggested_scores_of_the_real_service(page: Page) -> None:
    page.get_by_test_id("presets").locator("button").click()
    expect(page.get_by_test_id("min-score-value")).to_contain_text("0.60")
    assert 1 <= page.get_by_test_id("card").filter(visible=True).count() < 12


def test_a_key_opens_a_closed_service(browser: Browser, tmp_path: Path) -> None:
    shop = start_shop(tmp_path, anonymous_scopes=(), create=False)
    store = shop.running.runtime.keys
    assert store is not None
    secret = store.create("page", ("search",))
    page, _ = open_page(browser, str(shop.client.base_url))
    expect(page.get_by_test_id("error-title")).to_have_text("API key needed")
    page.get_by_test_id("key").fill(secret)
    with page.expect_response("**/galleries") as listed:
        page.get_by_test_id("key-save").click()
    assert listed.value.status == 200
    close_page(page)
    shop.close()
