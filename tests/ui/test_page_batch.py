"""Many pictures at once, and the camera."""

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.page_browser import OpenShop, drop_many, keys, send_bytes, settled
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

NO_CAMERA = """Object.defineProperty(navigator, "mediaDevices", { value: {
    getUserMedia: async () => { throw new DOMException("blocked", "NotAllowedError"); },
} });"""
PLAIN_HTTP = "Object.defineProperty(navigator, 'mediaDevices', { value: undefined });"


def test_many_dropped_images_get_a_row_each_and_a_failure_stays_alone(
    open_shop: OpenShop, fake_shop: Shop
) -> None:
    page = open_shop(allowed=("415",))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_many(page, fake_shop, 6, broken=2)
    rows = page.get_by_test_id("batch-row")
    expect(page.get_by_test_id("summary")).to_have_text("6 images: 5 answered, 1 failed")
    expect(rows).to_have_count(6)
    expect(rows.nth(2)).to_have_attribute("data-state", "failed")
    expect(rows.nth(2)).to_contain_text("The bytes are no image")
    expect(rows.nth(0).locator(".batch-hit")).to_have_count(6)
    expect(page.get_by_test_id("live")).to_contain_text("5 answered")


def test_a_row_opens_its_results_and_back_returns_to_the_batch(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_many(shop_page, fake_shop, 3)
    expect(shop_page.get_by_test_id("summary")).to_have_text("3 images: 3 answered")
    asked = len(fake_shop.asked)
    shop_page.get_by_test_id("batch-open").nth(1).click()
    settled(shop_page)
    assert keys(shop_page)[0] == "mug/001.png"
    assert len(fake_shop.asked) == asked
    shop_page.go_back()
    expect(shop_page.get_by_test_id("batch-row").filter(visible=True)).to_have_count(3)


def test_a_batch_shows_its_progress_and_asks_four_at_a_time(
    shop_page: Page, fake_shop: Shop
) -> None:
    fake_shop.delay_s = 0.1
    drop_many(shop_page, fake_shop, 14)
    expect(shop_page.get_by_test_id("progress")).to_be_visible()
    expect(shop_page.get_by_test_id("summary")).to_contain_text("to go")
    expect(shop_page.get_by_test_id("summary")).to_have_text("14 images: 14 answered")
    expect(shop_page.get_by_test_id("progress")).to_be_hidden()
    assert 2 <= fake_shop.most_searches <= 4


def test_a_cancelled_batch_keeps_what_it_has_and_a_row_can_be_tried_again(
    shop_page: Page, fake_shop: Shop
) -> None:
    fake_shop.delay_s = 1.0
    drop_many(shop_page, fake_shop, 12)
    expect(shop_page.locator(".batch-row[data-state=done]").first).to_be_visible()
    shop_page.get_by_test_id("cancel").click()
    expect(shop_page.get_by_test_id("summary")).to_contain_text("failed")
    expect(shop_page.get_by_test_id("progress")).to_be_hidden()
    fake_shop.delay_s = 0
    before = shop_page.locator("[data-state=done]").count()
    shop_page.get_by_test_id("batch-again").first.click()
    expect(shop_page.locator("[data-state=done]")).to_have_count(before + 1)


def test_escape_on_an_opened_row_leaves_the_batch_at_work(shop_page: Page, fake_shop: Shop) -> None:
    fake_shop.delay_s = 0.5
    drop_many(shop_page, fake_shop, 9)
    shop_page.get_by_test_id("batch-open").first.click()
    settled(shop_page)
    shop_page.keyboard.press("Escape")
    shop_page.go_back()
    expect(shop_page.get_by_test_id("summary")).to_have_text("9 images: 9 answered")
    expect(shop_page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")


def test_a_second_batch_ends_the_first_whose_rows_can_be_tried_again(
    shop_page: Page, fake_shop: Shop
) -> None:
    fake_shop.delay_s = 1.0
    drop_many(shop_page, fake_shop, 9)
    expect(shop_page.locator(".batch-row[data-state=done]").first).to_be_visible()
    drop_many(shop_page, fake_shop, 2)
    expect(shop_page.get_by_test_id("summary")).to_have_text("2 images: 2 answered")
    shop_page.go_back()
    expect(shop_page.get_by_test_id("batch-row")).to_have_count(9)
    expect(shop_page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")
    ended = shop_page.locator(".batch-row[data-state=failed]")
    expect(ended.first).to_contain_text("Cancelled")
    before = ended.count()
    shop_page.get_by_test_id("batch-again").first.click()
    expect(ended).to_have_count(before - 1)


def test_escape_closes_a_message_before_it_ends_the_batch(shop_page: Page, fake_shop: Shop) -> None:
    fake_shop.delay_s = 1.5
    drop_many(shop_page, fake_shop, 5)
    send_bytes(shop_page, "drop", "notes.txt", "text/plain", b"text")
    expect(shop_page.get_by_test_id("error")).to_be_visible()
    shop_page.keyboard.press("Escape")
    expect(shop_page.get_by_test_id("error")).to_be_hidden()
    expect(shop_page.get_by_test_id("summary")).to_contain_text("to go")
    shop_page.keyboard.press("Escape")
    expect(shop_page.get_by_test_id("summary")).to_contain_text("failed")
    expect(shop_page.get_by_test_id("progress")).to_be_hidden()


def test_cancel_and_try_again_keep_the_focus_in_the_batch(shop_page: Page, fake_shop: Shop) -> None:
    fake_shop.delay_s = 1.0
    drop_many(shop_page, fake_shop, 5)
    shop_page.get_by_test_id("cancel").focus()
    shop_page.keyboard.press("Enter")
    expect(shop_page.get_by_test_id("summary")).to_be_focused()
    shop_page.get_by_test_id("batch-again").first.focus()
    shop_page.keyboard.press("Enter")
    expect(shop_page.get_by_test_id("summary")).to_be_focused()


def test_many_images_can_be_picked_and_filtered_together(shop_page: Page, fake_shop: Shop) -> None:
    stock = fake_shop.galleries["shop"]
    files = [
        {"name": f"{n}.png", "mimeType": "image/png", "buffer": stock[n].data} for n in range(2)
    ]
    shop_page.get_by_test_id("file").set_input_files(files)  # type: ignore[arg-type]
    expect(shop_page.get_by_test_id("summary")).to_have_text("2 images: 2 answered")
    shop_page.get_by_role("checkbox", name="jar").check()
    expect(shop_page.get_by_test_id("batch-row").first).to_contain_text("6 results")
    assert [w.where for w in fake_shop.asked[-2:]] == [{"class": {"in": ["jar"]}}] * 2


def test_a_busy_service_gets_the_patience_it_asks_for(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = open_shop(allowed=("503",))
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    refused: list[str] = []

    def refuse_twice(route: Route) -> None:
        if len(refused) >= 2:
            route.continue_()
            return
        refused.append(route.request.url)
        route.fulfill(status=503, headers={"retry-after": "1"}, json={"title": "Too busy"})

    page.route("**/search", refuse_twice)
    drop_many(page, fake_shop, 3)
    expect(page.get_by_test_id("summary")).to_have_text("3 images: 3 answered")
    assert len(refused) == 2


def test_the_camera_takes_a_picture_and_searches(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = open_shop(permissions=["camera"])
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    page.get_by_test_id("camera").click()
    expect(page.get_by_test_id("camera-dialog")).to_be_visible()
    expect(page.get_by_test_id("camera-shoot")).to_be_enabled()
    page.get_by_test_id("camera-shoot").click()
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text("photo.jpg")
    assert page.evaluate("document.getElementById('camera-video').srcObject") is None


def test_a_blocked_camera_says_why_and_offers_a_file(open_shop: OpenShop) -> None:
    page = open_shop("/live")
    page.add_init_script(NO_CAMERA)
    page.goto(page.url.removesuffix("live"))
    page.get_by_test_id("camera").click()
    expect(page.get_by_test_id("camera-text")).to_contain_text("The camera is blocked")
    expect(page.get_by_test_id("camera-shoot")).to_be_disabled()
    with page.expect_file_chooser():
        page.get_by_test_id("camera-file").click()
    expect(page.get_by_test_id("camera-dialog")).to_be_hidden()


def test_without_a_live_camera_the_capture_input_opens(open_shop: OpenShop) -> None:
    page = open_shop("/live")
    page.add_init_script(PLAIN_HTTP)
    page.goto(page.url.removesuffix("live"))
    with page.expect_file_chooser() as chooser:
        page.get_by_test_id("camera").click()
    assert chooser.value.element.get_attribute("capture") == "environment"
