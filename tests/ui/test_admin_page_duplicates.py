"""The admin page shows near-duplicates, and all but one of a group can be deleted there."""

import pytest
from playwright.sync_api import expect

from tests.support.admin_page import AdminShop
from tests.support.page_browser import OpenPage, faults
from tests.tiny import encoded, photo

pytestmark = pytest.mark.browser


def test_near_duplicates_are_shown_deleted_and_restored(
    open_admin: OpenPage, shop: AdminShop, allowed: list[str]
) -> None:
    allowed.append("404")  # the image of an item that was deleted while it was being fetched
    allowed.append("ERR_FAILED")
    shop.stock(count=0)
    products = {f"p{n}": encoded(photo(n)) for n in range(4)}
    again = encoded(photo(1), "JPEG", quality=70)
    shop.shop.put(products | {"p1 again": again, "p2 again": products["p2"]}, "shop", price=3)
    page = open_admin("/admin?gallery=shop#duplicates")
    groups, text = page.get_by_test_id("near-group"), page.get_by_test_id("duplicates-text")
    least = page.get_by_test_id("near-least")
    expect(least).to_be_empty()  # the gallery has a default
    page.get_by_test_id("near-find").click()
    expect(groups).to_have_count(2)
    expect(text).to_contain_text("2 groups with 4 items")
    expect(text).to_contain_text("the default of this gallery")
    newest = page.locator('[data-testid=near-item][data-key="p1 again"]')
    expect(newest).to_contain_text("Newest")
    expect(newest).to_contain_text("price 3")
    expect(groups.last).to_contain_text("same file as the first")
    assert faults(page) == []

    newest.get_by_test_id("near-delete").click()
    expect(page.get_by_test_id("confirm-title")).to_have_text("Delete 1 item?")
    expect(page.get_by_test_id("confirm-text")).to_contain_text("p1 again")
    expect(page.get_by_test_id("confirm-text")).to_contain_text("p1 stays")
    page.get_by_test_id("confirm-yes").click()
    expect(groups).to_have_count(1)
    expect(page.get_by_test_id("notice-text")).to_have_text("1 item deleted.")
    expect(page.get_by_test_id("gallery-size")).to_have_text("5 items")
    expect(page.locator("#duplicates-title")).to_be_focused()
    assert shop.keys() == ["p0", "p1", "p2", "p3", "p2 again"]

    page.get_by_test_id("undo").click()
    expect(page.get_by_test_id("notice-text")).to_have_text("1 item restored.")
    expect(groups).to_have_count(2)
    expect(page.get_by_test_id("gallery-size")).to_have_text("6 items")
    expect(page.get_by_test_id("undo")).to_have_count(0)
    assert shop.shop.client.get(shop.shop.link("p1 again")).content == again

    least.fill("-1")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("near-item")).to_have_count(6)
    expect(page.get_by_test_id("duplicates-warning")).to_contain_text("is below 0.95")
    expect(page.get_by_test_id("near-delete")).to_have_count(0)


def test_all_but_one_of_a_group_are_deleted_and_never_the_last_one(
    open_admin: OpenPage, shop: AdminShop, allowed: list[str]
) -> None:
    allowed += ["404", "409", "ERR_FAILED"]
    shop.stock(count=0)
    copies = {f"c{n}": encoded(photo(1), "JPEG", quality=95 - n) for n in range(4)}
    shop.shop.put(copies, "shop", product="c")
    shop.shop.put({"d0": encoded(photo(5)), "d1": encoded(photo(5))}, "shop", product="d")
    for product in "ab":
        shop.shop.put({f"shoe {product}": encoded(photo(2))}, "shop", product=product)
    page = open_admin("/admin?gallery=shop#duplicates")
    page.get_by_test_id("near-find").click()
    groups = page.get_by_test_id("near-group")
    expect(groups).to_have_count(3)
    mixed = groups.filter(has_text="These items have different values of product.")
    expect(mixed.get_by_test_id("near-delete")).to_have_count(2)
    expect(mixed.get_by_test_id("near-only")).to_have_count(0)
    pair = groups.filter(has_text="d0")
    expect(pair.get_by_test_id("near-only")).to_have_count(0)
    shop.shop.client.delete("/galleries/shop/items", params={"key": "d1"}).raise_for_status()
    pair.get_by_test_id("near-delete").first.click()  # of d0, whose copy was just deleted
    page.get_by_test_id("confirm-yes").click()
    expect(page.get_by_test_id("error")).to_contain_text("Nothing was removed")
    others = {"d0", "shoe a", "shoe b"}
    assert set(shop.keys()) == {*copies, *others}

    row = groups.first.locator('[data-key="c2"]')
    row.get_by_test_id("near-only").click()
    expect(page.get_by_test_id("confirm-title")).to_have_text("Delete 3 items?")
    expect(page.get_by_test_id("confirm-text")).to_contain_text("c2 stays")
    page.get_by_test_id("confirm-yes").click()
    expect(groups).to_have_count(2)
    assert set(shop.keys()) == {"c2", *others}
    page.get_by_test_id("undo").click()
    expect(page.get_by_test_id("notice-text")).to_have_text("3 items restored.")
    assert set(shop.keys()) == {*copies, *others}


def test_a_cluster_has_no_buttons(open_admin: OpenPage, shop: AdminShop) -> None:
    shop.stock(count=0)
    for start in range(0, 32, 8):
        same = {f"none-{n:02d}": encoded(photo(9)) for n in range(start, start + 8)}
        shop.shop.put(same, "shop")
    products = {f"p{n}": encoded(photo(n)) for n in range(4)}
    shop.shop.put(products | {"p1 again": products["p1"]}, "shop")
    page = open_admin("/admin?gallery=shop#duplicates")
    page.get_by_test_id("near-find").click()
    cluster = page.get_by_test_id("near-cluster")
    expect(cluster).to_contain_text("32 items, 86% of the gallery")
    expect(cluster.get_by_test_id("near-item")).to_have_count(6)
    expect(cluster.locator("button")).to_have_count(0)
    expect(page.get_by_test_id("near-delete")).to_have_count(2)
    assert faults(page) == []
