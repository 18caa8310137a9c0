"""Narrowing a search on the page: parts, likes, filters, groups, the minimum score."""

import io
import re

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from tests.support.page_browser import (
    PHONE,
    OpenPage,
    judge,
    keys,
    search_with_card,
    searched,
    send_image,
    settled,
    violations,
)
from tests.support.page_shop import Shop
from tests.tiny import encoded

pytestmark = pytest.mark.browser


def box_of(locator: Locator) -> tuple[float, float, float, float]:
    box = locator.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


def option(page: Page, name: str) -> Locator:
    """The checkbox of a value in the filters."""
    return page.get_by_role("checkbox", name=name)


def wait_for_crops(page: Page, shop: Shop, *expected: list[float]) -> None:
    """Waits for a search with these boxes, each within 2% of the image."""
    for _ in range(100):
        crops = shop.asked[-1].crop
        if len(crops) == len(expected) and np.allclose(crops, expected, rtol=0, atol=0.02):
            settled(page)
            return
        page.wait_for_timeout(50)
    pytest.fail(f"no search with {expected} came; the last one had {shop.asked[-1].crop}")


def draw_with_mouse(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From one point of the query image to another, both in fractions of it."""
    left, top, width, height = box_of(page.get_by_test_id("stage"))
    page.mouse.move(left + start[0] * width, top + start[1] * height)
    page.mouse.down()
    page.mouse.move(left + 0.5 * width, top + 0.5 * height)
    page.mouse.move(left + end[0] * width, top + end[1] * height)
    page.mouse.up()


def test_the_mouse_draws_moves_and_removes_boxes(results: Page, fake_shop: Shop) -> None:
    draw_with_mouse(results, (0.1, 0.2), (0.6, 0.8))
    wait_for_crops(results, fake_shop, [0.1, 0.2, 0.5, 0.6])
    draw_with_mouse(results, (0.3, 0.4), (0.5, 0.5))  # from inside the box: it moves
    expect(results.get_by_test_id("crop-frame")).to_have_count(1)
    wait_for_crops(results, fake_shop, [0.3, 0.3, 0.5, 0.6])
    results.get_by_test_id("crop-clear").click()
    wait_for_crops(results, fake_shop)
    expect(results.get_by_test_id("crop-frame")).to_have_count(0)

    draw_with_mouse(results, (0.05, 0.05), (0.3, 0.3))
    draw_with_mouse(results, (0.9, 0.9), (0.6, 0.6))  # backwards
    wait_for_crops(results, fake_shop, [0.05, 0.05, 0.25, 0.25], [0.6, 0.6, 0.3, 0.3])


def test_the_keyboard_adds_moves_resizes_and_removes_a_box(results: Page, fake_shop: Shop) -> None:
    results.get_by_test_id("crop-add").focus()
    results.keyboard.press("Enter")
    frame = results.get_by_test_id("crop-frame")
    expect(frame).to_be_focused()
    wait_for_crops(results, fake_shop, [0.2, 0.2, 0.6, 0.6])

    results.keyboard.press("ArrowRight")
    results.keyboard.press("Shift+ArrowDown")
    expect(frame).to_have_attribute(
        "aria-label", "Part 1: 60% wide and 62% high, 22% from the left, 20% from the top"
    )
    results.keyboard.press("Tab")
    corner = results.get_by_test_id("crop-nw")
    expect(corner).to_be_focused()
    results.keyboard.press("ArrowLeft")
    expect(corner).to_have_attribute("aria-label", "Part 1, top left corner: 62% wide and 62% high")
    wait_for_crops(results, fake_shop, [0.2, 0.2, 0.62, 0.62])
    expect(corner).to_be_focused()

    results.keyboard.press("Escape")
    wait_for_crops(results, fake_shop)
    expect(results.get_by_test_id("crop-add")).to_be_focused()


def test_a_finger_draws_and_resizes_a_box(open_shop: OpenPage, fake_shop: Shop) -> None:
    page = searched(open_shop, fake_shop, **PHONE)
    page.get_by_test_id("crop-add").tap()
    wait_for_crops(page, fake_shop, [0.2, 0.2, 0.6, 0.6])
    x, y, width, height = box_of(page.get_by_test_id("crop-se"))
    _, _, stage_width, _ = box_of(page.get_by_test_id("stage"))
    assert min(width, height) >= 44
    session = page.context.new_cdp_session(page)
    for kind, dx in (("touchStart", 0.0), ("touchMove", -0.1), ("touchMove", -0.2)):
        point = {"x": x + width / 2 + dx * stage_width, "y": y + height / 2}
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [point]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    wait_for_crops(page, fake_shop, [0.2, 0.2, 0.4, 0.6])


def test_filters_are_the_attributes_of_a_gallery(results: Page, fake_shop: Shop) -> None:
    cards, chips = results.get_by_test_id("card"), results.get_by_test_id("chip")
    filters = results.get_by_test_id("filter")
    option(results, "red").focus()
    results.keyboard.press("Space")
    expect(cards).to_have_count(8)
    expect(option(results, "red")).to_be_focused()
    filters.nth(2).locator("summary").click()
    results.get_by_test_id("filter-to").fill("10")
    expect(cards).to_have_count(4)
    filters.nth(3).locator("summary").click()
    results.get_by_label("no", exact=True).check()
    expect(cards).to_have_count(2)
    where = {"colour": {"in": ["red"]}, "price": {"<=": 10}, "sale": False}
    assert fake_shop.asked[-1].filter == where
    expect(chips).to_have_text(["Colour: red", "Price up to 10", "Sale: no"])

    results.get_by_test_id("chip-remove").first.click()
    expect(option(results, "red")).not_to_be_checked()
    expect(cards).to_have_count(5)
    results.get_by_test_id("clear-all").click()
    expect(cards).to_have_count(20)
    asked = len(fake_shop.asked)
    results.get_by_test_id("presets").get_by_text("100").click()  # of the thresholds
    expect(results.get_by_test_id("min-score-value")).to_have_text("0.95")
    expect(cards.filter(visible=True)).to_have_count(1)
    assert len(fake_shop.asked) == asked, "a minimum score needs no request"
    results.get_by_test_id("min-score").fill("0")

    results.get_by_test_id("gallery").select_option("depot")
    expect(cards).to_have_count(6)
    expect(results.get_by_test_id("gallery-size")).to_have_text("6 items to search")
    assert fake_shop.asked[-1].gallery == "depot"


def test_absence_is_prominent_from_a_chance_of_half(open_shop: OpenPage, fake_shop: Shop) -> None:
    results = searched(open_shop, fake_shop)
    chance = results.get_by_test_id("chance")
    expect(chance).to_have_text("12% chance that none of the 20 results is right")
    expect(chance).not_to_have_class(re.compile("likely"))
    fake_shop.no_match = 0.62
    results.get_by_test_id("group").select_option("class")
    expected = "Probably not here: 62% chance that none of the 4 groups is right"
    expect(chance).to_have_text(expected)
    expect(chance).to_have_class(re.compile("likely"))
    assert violations(results) == []
    search_with_card(results, 0)  # which does not find itself, so all have a lower score
    results.get_by_test_id("min-score").fill("1")
    expect(results.get_by_test_id("empty")).to_be_visible()
    expect(chance).to_be_hidden()


def test_the_best_part_can_count(results: Page, fake_shop: Shop) -> None:
    draw_with_mouse(results, (0.05, 0.05), (0.4, 0.4))
    wait_for_crops(results, fake_shop, [0.05, 0.05, 0.35, 0.35])
    expect(results.get_by_test_id("combine-field")).to_be_hidden()
    draw_with_mouse(results, (0.6, 0.6), (0.9, 0.9))
    boxes = [0.05, 0.05, 0.35, 0.35], [0.6, 0.6, 0.3, 0.3]
    wait_for_crops(results, fake_shop, *boxes)
    judge(results, "like", 1, chips=1)
    with results.expect_response("**/search"):
        results.get_by_label("Several parts").select_option("best")
    settled(results)
    assert fake_shop.asked[-1].combine == "best"
    expect(results.get_by_test_id("notice")).to_contain_text("Likes, dislikes and the order")
    found = results.get_by_test_id("found-with")
    assert {*found.all_inner_texts()} <= {"Part 1", "Part 2"}
    results.get_by_test_id("where").first.click()  # of the part that it was found with
    expect(results.get_by_test_id("heat")).to_have_count(2)
    results.get_by_test_id("crop-clear").click()
    wait_for_crops(results, fake_shop)
    expect(found).to_have_count(0)


PLACES = {
    "Whole photo": (0, 0, 1, 1),
    "Top left part": (0, 0, 2 / 3, 2 / 3),
    "Top right part": (1 / 3, 0, 2 / 3, 2 / 3),
    "Bottom left part": (0, 1 / 3, 2 / 3, 2 / 3),
    "Bottom right part": (1 / 3, 1 / 3, 2 / 3, 2 / 3),
}


def busy_photo(shop: Shop, number: int) -> bytes:
    """The image of an item in the lower right of another image."""
    scene = Image.effect_noise((96, 96), 120).convert("RGB")
    with Image.open(io.BytesIO(shop.galleries["shop"][number].data)) as image:
        scene.paste(image, (32, 32))
    return encoded(scene)


def wait_for_frame(page: Page, place: str) -> None:
    frame, stage = page.get_by_test_id("part-frame"), page.get_by_test_id("stage")
    found: list[float] = []
    for _ in range(100):
        found = position(frame, stage) if frame.is_visible() else []
        if found and np.allclose(found, PLACES[place], rtol=0, atol=0.01):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"the frame is at {found}, not around the {place.lower()}")


def test_parts_of_a_busy_photo_are_searched_and_shown(shop_page: Page, fake_shop: Shop) -> None:
    page, wanted = shop_page, fake_shop.galleries["shop"][7].key
    send_image(page, busy_photo(fake_shop, 7), "street.png")
    settled(page)
    frame, notes = page.get_by_test_id("part-frame"), page.get_by_test_id("found-with")
    expect(frame).to_be_hidden()
    expect(notes).to_have_count(0)
    judge(page, "like", 1, chips=1)

    auto = page.get_by_label("The product fills only a part of the photo")
    auto.focus()
    with page.expect_response("**/search"):
        page.keyboard.press("Space")
    settled(page)
    assert (fake_shop.asked[-1].crop, fake_shop.asked[-1].positive) == (["auto"], [])
    expect(auto).to_be_checked()
    expect(page.get_by_test_id("notice")).to_contain_text("Likes, dislikes and the order")
    for hidden in ("like", "order-field", "combine-field", "crop-clear"):
        expect(page.get_by_test_id(hidden).filter(visible=True)).to_have_count(0)
    assert keys(page)[0] == wanted
    names = notes.all_inner_texts()
    assert names[0] == "Bottom right part"
    assert {*names} <= {*PLACES}
    wait_for_frame(page, names[0])
    assert violations(page) == []

    cards = page.get_by_test_id("card-search")
    expect(cards.first).to_have_accessible_name(re.compile("found with bottom right part"))
    other = next(number for number, name in enumerate(names) if name != names[0])
    cards.nth(other).hover()
    wait_for_frame(page, names[other])
    page.mouse.move(1, 1)
    wait_for_frame(page, names[0])
    cards.nth(other).focus()
    wait_for_frame(page, names[other])
    page.get_by_test_id("where").nth(other).click()  # of the part that it was found with
    expect(page.get_by_test_id("heat")).to_have_count(2)

    page.get_by_test_id("crop-add").click()  # a part that the user chooses instead
    wait_for_crops(page, fake_shop, [0.2, 0.2, 0.6, 0.6])
    expect(auto).not_to_be_checked()
    expect(frame).to_be_hidden()
    auto.check()
    wait_for_frame(page, names[0])
    expect(page.get_by_test_id("crop-frame")).to_have_count(0)
    auto.uncheck()
    wait_for_crops(page, fake_shop)
    expect(frame).to_be_hidden()


def test_groups_name_the_part_of_a_busy_photo(shop_page: Page, fake_shop: Shop) -> None:
    send_image(shop_page, busy_photo(fake_shop, 7))
    settled(shop_page)
    shop_page.get_by_test_id("crop-auto").check()
    expect(shop_page.get_by_test_id("found-with")).to_have_count(20)
    shop_page.get_by_test_id("group").select_option("class")
    expect(shop_page.get_by_test_id("found-with")).to_have_count(4)
    expect(shop_page.get_by_test_id("found-with").first).to_have_text("Bottom right part")
    wait_for_frame(shop_page, "Bottom right part")


def test_likes_and_dislikes_refine_and_are_undone(results: Page, fake_shop: Shop) -> None:
    before = keys(results)
    judge(results, "like", 5, chips=1)
    liked = keys(results)
    assert fake_shop.asked[-1].positive == [before[5]]
    assert liked.index(before[5]) < 5
    judge(results, "dislike", 3, chips=2)
    assert fake_shop.asked[-1].negative == [liked[3]]
    expect(results.locator(f'[data-key="{before[5]}"] [data-testid=like]')).to_have_attribute(
        "aria-pressed", "true"
    )
    for _ in range(2):
        results.get_by_test_id("chip-remove").first.click()
    expect(results.get_by_test_id("chip")).to_have_count(0)
    settled(results)
    assert keys(results) == before

    results.get_by_test_id("card-search").first.focus()
    results.keyboard.press("ArrowRight")
    liked_key = keys(results)[1]
    results.keyboard.press("l")
    expect(results.get_by_test_id("chip")).to_have_count(1)
    settled(results)
    assert fake_shop.asked[-1].positive == [liked_key]

    clicked = keys(results)[1]
    search_with_card(results, 1)
    expect(results.get_by_test_id("query-name")).to_have_text(clicked.split("/")[1])
    assert clicked not in keys(results)


def test_votes_are_feedback_if_wanted(open_shop: OpenPage, fake_shop: Shop) -> None:
    quiet = searched(open_shop, fake_shop)
    expect(quiet.get_by_test_id("feedback-note")).to_be_hidden()
    judge(quiet, "like", 5, chips=1)
    assert fake_shop.judged_items == []
    fake_shop.feedback = "pictures"
    page = searched(open_shop, fake_shop)
    note = page.get_by_test_id("feedback-note")
    expect(note).to_contain_text("sent to the shop with the photo")
    first, size = len(fake_shop.asked), str(len(fake_shop.galleries["shop"][0].data))
    liked = keys(page)[5]
    judge(page, "like", 5, chips=1)
    disliked = keys(page)[3]
    judge(page, "dislike", 3, chips=2)
    assert fake_shop.judged_items == [
        {"answer_id": f"answer-{number}", "item": item, "action": action, "image": size}
        for number, item, action in ((first, liked, "clicked"), (first + 1, disliked, "wrong"))
    ]


HEAT = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    return Array.from({ length: height }, (_, row) => Array.from({ length: width },
        (_, column) => data[4 * (row * width + column) + 3] > 0));
}"""
HIT = [[row > 1 and column > 1 for column in range(4)] for row in range(4)]
QUERY = [[row < 2 and column < 2 for column in range(4)] for row in range(4)]


def position(layer: Locator, over: Locator) -> list[float]:
    """left, top, width, height of a layer in fractions of the element below it."""
    x, y, width, height = box_of(layer)
    left, top, across, down = box_of(over)
    return [(x - left) / across, (y - top) / down, width / across, height / down]


def test_a_toggle_shows_the_regions_of_both_images_if_the_model_has_a_map(
    results: Page, open_shop: OpenPage, fake_shop: Shop
) -> None:
    toggles, stage = results.get_by_test_id("where"), results.locator("#stage canvas")
    toggles.first.click()
    first = results.get_by_test_id("card").first
    expect(first.locator("canvas")).to_have_count(1)
    expect(stage).to_have_count(1)
    expect(toggles.first).to_have_attribute("aria-pressed", "true")
    assert first.locator("canvas").evaluate(HEAT) == HIT
    assert stage.evaluate(HEAT) == QUERY
    # The model sees the middle: here 0.8 of each side.
    middle = pytest.approx([0.1, 0.1, 0.8, 0.8], abs=0.02)
    assert position(first.locator("canvas"), first.locator(".card-image")) == middle

    toggles.nth(2).click()
    expect(results.get_by_test_id("card").nth(2).locator("canvas")).to_have_count(1)
    expect(results.get_by_test_id("heat")).to_have_count(2)
    expect(toggles.first).to_have_attribute("aria-pressed", "false")
    toggles.nth(2).click()
    expect(results.get_by_test_id("heat")).to_have_count(0)

    search_with_card(results, 1)
    expect(results.get_by_test_id("heat")).to_have_count(0)
    results.get_by_test_id("where").first.click()  # sent with the image of the item
    expect(results.get_by_test_id("heat")).to_have_count(2)

    fake_shop.has_map = False
    page = searched(open_shop, fake_shop)
    expect(page.get_by_test_id("where")).to_have_count(0)
