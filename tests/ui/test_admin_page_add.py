"""Adding items on the admin page: dropped and picked, keys and attributes, what became of each."""

from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.admin_page import AdminShop, added, drop, fill_row
from tests.support.page_browser import FOCUSED, OpenPage, intercept, received

pytestmark = pytest.mark.browser


@pytest.fixture
def page(open_admin: OpenPage, shop: AdminShop) -> Page:
    """The view for adding to a gallery of two items."""
    shop.stock(count=2)
    page = open_admin("/admin?gallery=shop#add")
    expect(page.get_by_test_id("gallery-size")).to_have_text("2 items")
    return page


def send(page: Page) -> list[str]:
    page.get_by_test_id("queue-send").click()
    return added(page)


def test_dropped_images_share_their_attributes(page: Page, shop: AdminShop) -> None:
    page.get_by_test_id("attributes-add-row").first.click()
    fill_row(page, 0, "season", "text", "summer")
    page.get_by_test_id("attributes-add-row").first.click()
    fill_row(page, 1, "price", "number", "5")
    drop(page, *((f"new-{n}.png", shop.images[n]) for n in (0, 1, 1)))
    expect(page.get_by_test_id("queue-title")).to_have_text("3 images to add")
    page.get_by_test_id("queue-send").click()
    expect(page.get_by_test_id("queue-error")).to_contain_text("have the key new-1.png")
    assert page.evaluate(FOCUSED) == "queue-key"
    page.keyboard.press("End")
    page.keyboard.type("2")
    assert send(page) == ["Added"] * 3
    expect(page.get_by_test_id("queue-title")).to_have_text("3 added")
    expect(page.get_by_test_id("gallery-size")).to_have_text("5 items")
    assert shop.keys(key_prefix="new-") == ["new-0.png", "new-1.png", "new-1.png2"]
    assert shop.attributes("new-1.png2") == {"season": "summer", "price": 5}


def test_each_result_is_shown_and_only_the_broken_image_fails(page: Page, shop: AdminShop) -> None:
    attributes = '{"colour": "red", "price": 0, "sale": true}'
    page.get_by_test_id("attributes-json").first.click()
    page.get_by_test_id("attributes-text").first.fill(attributes)
    drop(page, ("0.png", shop.images[0]), ("1.png", shop.images[7]), ("x.png", b"no image"))
    drop(page, ("new.png", shop.images[5]))
    page.get_by_test_id("queue-key").nth(0).fill("i/00.png")
    page.get_by_test_id("queue-key").nth(1).fill("i/01.png")
    states = send(page)
    assert [states[0], states[1], states[3]] == ["Unchanged", "Replaced", "Added"]
    assert states[2].startswith("Failed: ")
    assert "not an image" in states[2]
    expect(page.get_by_test_id("queue-title")).to_have_text(
        "1 added, 1 replaced, 1 unchanged, 1 failed"
    )
    expect(page.get_by_test_id("queue-send")).to_have_text("Try the failed ones again")
    page.get_by_test_id("queue-clear").click()
    expect(page.get_by_test_id("queue-row")).to_have_count(0)
    assert page.evaluate(FOCUSED) == "add-pick"


def test_picked_images_have_own_attributes(page: Page, shop: AdminShop, allowed: list[str]) -> None:
    allowed.append("503")
    refusals = iter([503])

    def refuse_once(route: Route) -> None:
        if route.request.method == "PUT" and next(refusals, None):
            route.fulfill(status=503, headers={"Retry-After": "1"})
        else:
            route.continue_()

    page.route("**/items", refuse_once)
    files: list[Any] = [
        {"name": f"own-{n}.png", "mimeType": "image/png", "buffer": shop.images[n]}
        for n in range(2)
    ]
    page.get_by_test_id("add-files").set_input_files(files)
    page.get_by_test_id("queue-edit").nth(1).click()
    page.get_by_test_id("edit").get_by_test_id("attributes-add-row").click()
    fill_row(page, 0, "season", "text", "winter")
    page.get_by_test_id("edit-save").click()
    expect(page.get_by_test_id("edit")).to_be_hidden()
    assert send(page) == ["Added", "Added"]
    assert next(refusals, None) is None
    assert shop.attributes("own-0.png") == {}
    assert shop.attributes("own-1.png") == {"season": "winter"}


def test_many_images_are_sent_in_batches_and_can_be_stopped(page: Page, shop: AdminShop) -> None:
    asked: list[Route] = []

    def hold_the_second(route: Route) -> None:
        if not asked:
            route.continue_()
        asked.append(route)

    page.route("**/items", hold_the_second)
    drop(page, *((f"many-{n:02d}.png", shop.images[n % 12]) for n in range(20)))
    page.get_by_test_id("queue-send").click()
    expect(page.get_by_test_id("queue-state").nth(7)).to_have_text("Added")
    page.get_by_test_id("queue-stop").click()
    states = added(page)
    assert states[:8] == ["Added"] * 8
    assert states[-1] == "Not sent yet"
    expect(page.get_by_test_id("queue-send")).to_contain_text("Add ")
    page.unroute("**/items")
    states = send(page)
    assert set(states) <= {"Added", "Unchanged"}
    assert len(shop.keys(key_prefix="many-")) == 20


def test_images_dropped_during_sending_stay_listed(page: Page, shop: AdminShop) -> None:
    pending = intercept(page, "**/galleries/shop/items", times=1)
    drop(page, ("n0.png", shop.images[0]))
    page.get_by_test_id("queue-send").click()
    expect(page.get_by_test_id("queue-stop")).to_be_visible()
    received(page, pending, 1)
    drop(page, ("n1.png", shop.images[1]))
    expect(page.get_by_test_id("queue-row")).to_have_count(2)
    pending[0].continue_()
    assert added(page)[0] in {"Added", "Unchanged"}
    assert send(page)[1] == "Added"
    assert shop.keys(key_prefix="n") == ["n0.png", "n1.png"]


def test_a_read_only_gallery_is_shown_as_such(page: Page) -> None:
    closed = {"name": "shop", "size": 2, "bundle_id": "b", "writable": False, "managed": False}
    answer = {"bundle_id": "b", "galleries": [closed]}
    page.route("**/galleries", lambda route: route.fulfill(json=answer))
    page.reload()
    expect(page.get_by_test_id("add-closed")).to_contain_text("shop is read-only")
    expect(page.get_by_test_id("add-pick")).to_be_disabled()
