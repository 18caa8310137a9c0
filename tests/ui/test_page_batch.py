"""Batches of images, and the camera."""

import pytest
from playwright.sync_api import Page, expect

from tests.support.page_browser import OpenPage, drop_many, faults, keys, settled, violations
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser

NO_CAMERA = """Object.defineProperty(navigator, "mediaDevices", { value: {
    getUserMedia: async () => { throw new DOMException("blocked", "NotAllowedError"); },
} });"""
PLAIN_HTTP = "Object.defineProperty(navigator, 'mediaDevices', { value: undefined });"


def test_each_image_has_its_own_row(shop_page: Page, fake_shop: Shop, allowed: list[str]) -> None:
    allowed.append("415")
    drop_many(shop_page, fake_shop, 6, broken=2)
    rows = shop_page.get_by_test_id("batch-row")
    expect(shop_page.get_by_test_id("summary")).to_have_text("6 photos: 5 answered, 1 failed")
    expect(rows).to_have_count(6)
    expect(rows.nth(2)).to_have_attribute("data-state", "failed")
    expect(rows.nth(2)).to_contain_text("not a photo that can be read")
    expect(rows.nth(0).locator(".batch-hit")).to_have_count(6)
    expect(shop_page.get_by_test_id("live")).to_contain_text("5 answered")
    assert faults(shop_page) == []

    asked = len(fake_shop.asked)
    shop_page.get_by_test_id("batch-open").nth(1).click()
    settled(shop_page)
    assert keys(shop_page)[0] == "mug/001.png"
    assert len(fake_shop.asked) == asked
    shop_page.go_back()
    expect(rows.filter(visible=True)).to_have_count(6)
    shop_page.get_by_role("checkbox", name="jar").check()
    expect(rows.nth(0)).to_contain_text("6 results")
    assert fake_shop.asked[-1].filter == {"class": {"in": ["jar"]}}


def test_a_batch_goes_on_behind_an_opened_row_and_keeps_its_answers_when_cancelled(
    shop_page: Page, fake_shop: Shop
) -> None:
    fake_shop.delay_s = 0.3
    drop_many(shop_page, fake_shop, 14)
    expect(shop_page.get_by_test_id("progress")).to_be_visible()
    expect(shop_page.get_by_test_id("summary")).to_contain_text("to go")
    shop_page.get_by_test_id("batch-open").first.click()
    settled(shop_page)
    shop_page.keyboard.press("Escape")
    shop_page.go_back()
    expect(shop_page.get_by_test_id("summary")).to_have_text("14 photos: 14 answered")
    expect(shop_page.get_by_test_id("progress")).to_be_hidden()
    assert 2 <= fake_shop.most_searches <= 4

    fake_shop.delay_s = 1.0
    drop_many(shop_page, fake_shop, 12)
    done = shop_page.locator(".batch-row[data-state=done]").filter(visible=True)
    expect(done.first).to_be_visible()
    shop_page.get_by_test_id("cancel").click()
    expect(shop_page.get_by_test_id("summary")).to_contain_text("failed")
    fake_shop.delay_s = 0
    before = done.count()
    shop_page.get_by_test_id("batch-again").filter(visible=True).first.click()
    expect(done).to_have_count(before + 1)


def test_several_images_can_be_one_search(shop_page: Page, fake_shop: Shop) -> None:
    field = shop_page.get_by_test_id("combine-field")
    expect(field).to_be_hidden()
    drop_many(shop_page, fake_shop, 3)
    expect(shop_page.get_by_test_id("summary")).to_have_text("3 photos: 3 answered")
    shop_page.get_by_label("Several photos").select_option("best")
    settled(shop_page)
    assert fake_shop.asked[-1].combine == "best"
    names, found = keys(shop_page)[:3], shop_page.get_by_test_id("found-with")
    assert sorted(names) == ["mug/000.png", "mug/001.png", "mug/002.png"]
    assert found.all_inner_texts()[:3] == [f"Photo {int(name[4:7]) + 1}" for name in names]
    expect(found).to_have_count(20)
    # The service takes neither votes nor another order with it.
    expect(shop_page.get_by_test_id("like")).to_have_count(0)
    expect(shop_page.get_by_test_id("order-field")).to_be_hidden()
    shop_page.get_by_test_id("where").first.click()
    number = int(names[0][4:7])
    expect(shop_page.locator("#query-images li").nth(number).locator("canvas")).to_have_count(1)
    expect(shop_page.get_by_test_id("heat")).to_have_count(2)

    shop_page.go_back()
    expect(shop_page.get_by_test_id("batch-row").filter(visible=True)).to_have_count(3)
    expect(shop_page.get_by_test_id("combine")).to_have_value("")
    shop_page.get_by_test_id("batch-open").first.click()
    settled(shop_page)
    expect(field).to_be_hidden()
    expect(shop_page.get_by_test_id("like")).to_have_count(20)


def test_the_camera_takes_a_photo_and_searches(open_shop: OpenPage) -> None:
    page = open_shop(permissions=["camera"])
    expect(page.get_by_test_id("sample")).to_have_count(8)  # the button no longer moves
    page.get_by_test_id("camera").click()
    expect(page.get_by_test_id("camera-shoot")).to_be_enabled()
    assert violations(page, "dialog[open]") == []
    page.get_by_test_id("camera-shoot").click()
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text("photo.jpg")
    assert page.evaluate("document.getElementById('camera-video').srcObject") is None


def test_a_blocked_camera_shows_why_and_offers_a_file(open_shop: OpenPage) -> None:
    page = open_shop(before=lambda page: page.add_init_script(NO_CAMERA))
    expect(page.get_by_test_id("sample")).to_have_count(8)  # the button no longer moves
    page.get_by_test_id("camera").click()
    expect(page.get_by_test_id("camera-text")).to_contain_text("The camera is blocked")
    with page.expect_file_chooser():
        page.get_by_test_id("camera-file").click()


def test_without_a_live_camera_the_capture_input_opens(open_shop: OpenPage) -> None:
    page = open_shop(before=lambda page: page.add_init_script(PLAIN_HTTP))
    expect(page.get_by_test_id("sample")).to_have_count(8)  # the button no longer moves
    with page.expect_file_chooser() as chooser:
        page.get_by_test_id("camera").click()
    assert chooser.value.element.get_attribute("capture") == "environment"
