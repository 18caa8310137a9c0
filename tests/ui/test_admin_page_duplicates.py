"""The admin page shows near-duplicates, and one of them can be deleted there."""

import pytest
from playwright.sync_api import expect

from tests.support.admin_page import AdminShop
from tests.support.page_browser import PHONE, OpenPage, too_wide, violations
from tests.tiny import encoded, picture

pytestmark = pytest.mark.browser


def test_groups_are_shown_and_one_of_each_is_deleted_after_a_question(
    open_admin: OpenPage, shop: AdminShop, allowed: list[str]
) -> None:
    allowed.append("404")  # the picture of an item that was deleted while it was being fetched
    allowed.append("ERR_FAILED")
    shop.stock(count=0)
    products = {f"p{n}": encoded(picture(n)) for n in range(4)}
    again = encoded(picture(1), "JPEG", quality=70)
    shop.shop.put(products | {"p1 again": again, "p2 again": products["p2"]}, "shop", price=3)
    page = open_admin("/admin?gallery=shop#duplicates", reduced_motion="reduce")
    groups, text = page.get_by_test_id("near-group"), page.get_by_test_id("duplicates-text")
    assert violations(page) == []
    least = page.get_by_test_id("near-least")
    expect(least).to_be_empty()  # the rule of the command: 0.99, or the cosine of copies
    page.get_by_test_id("near-look").click()
    expect(groups).to_have_count(2)
    expect(text).to_contain_text("2 groups with 4 items")
    newest = page.locator('[data-testid=near-item][data-key="p1 again"]')
    expect(newest).to_contain_text("Newest")
    expect(newest).to_contain_text("price 3")
    expect(groups.last).to_contain_text("same file as the first")
    assert violations(page) == []
    assert too_wide(page) == []

    newest.get_by_test_id("near-delete").click()
    expect(page.get_by_test_id("confirm-text")).to_contain_text("p1 again")
    page.get_by_test_id("confirm-yes").click()
    expect(groups).to_have_count(1)
    expect(page.get_by_test_id("notice-text")).to_have_text("p1 again is deleted.")
    expect(page.get_by_test_id("gallery-size")).to_have_text("5 items")
    expect(page.locator("#duplicates-title")).to_be_focused()
    assert shop.keys() == ["p0", "p1", "p2", "p3", "p2 again"]

    page.get_by_test_id("near-kind").select_option("min_score")
    expect(least).to_have_value("0.95")
    least.fill("-1")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("near-item")).to_have_count(5)
    page.get_by_test_id("near-kind").select_option("min_probability")
    page.route("**/duplicates?*", lambda route: route.abort())
    page.get_by_test_id("near-look").click()
    expect(page.get_by_test_id("error")).to_be_visible()
    expect(text).to_be_empty()
    page.set_viewport_size(PHONE["viewport"])
    assert too_wide(page) == []
