"""Narrowing a search on the page: parts, likes, filters, groups, the minimum score."""

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.page_browser import OpenShop, drop_item, keys, settled
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser


def box_of(locator: Locator) -> tuple[float, float, float, float]:
    box = locator.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


def option(page: Page, name: str) -> Locator:
    """The checkbox of a value in the filters."""
    return page.get_by_role("checkbox", name=name)


def wait_for_crops(page: Page, shop: Shop, count: int) -> list[list[float]]:
    """The boxes of the last search, when it has that many."""
    for _ in range(100):
        if shop.asked and len(shop.asked[-1].crops) == count:
            settled(page)
            return shop.asked[-1].crops
        page.wait_for_timeout(50)
    pytest.fail(f"no search with {count} boxes came")


def wait_for_crop(page: Page, shop: Shop, expected: list[float]) -> None:
    """Waits for a search with this one box, within 2% of the picture."""
    for _ in range(100):
        crops = shop.asked[-1].crops
        if len(crops) == 1 and crops[0] == pytest.approx(expected, abs=0.02):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"no search with {expected} came; the last one had {shop.asked[-1].crops}")


def draw_with_mouse(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From one place of the query picture to another, both in fractions of it."""
    left, top, width, height = box_of(page.get_by_test_id("stage"))
    page.mouse.move(left + start[0] * width, top + start[1] * height)
    page.mouse.down()
    page.mouse.move(left + 0.5 * width, top + 0.5 * height)
    page.mouse.move(left + end[0] * width, top + end[1] * height)
    page.mouse.up()


def test_a_box_drawn_with_the_mouse_is_searched_moved_and_removed(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    draw_with_mouse(shop_page, (0.1, 0.2), (0.6, 0.8))
    [crop] = wait_for_crops(shop_page, fake_shop, 1)
    assert crop == pytest.approx([0.1, 0.2, 0.5, 0.6], abs=0.02)

    draw_with_mouse(shop_page, (0.3, 0.4), (0.5, 0.5))  # from inside the box: it moves
    expect(shop_page.get_by_test_id("crop-frame")).to_have_count(1)
    wait_for_crop(shop_page, fake_shop, [0.3, 0.3, 0.5, 0.6])

    shop_page.get_by_test_id("crop-clear").click()
    wait_for_crops(shop_page, fake_shop, 0)
    expect(shop_page.get_by_test_id("crop-frame")).to_have_count(0)


def test_several_boxes_are_one_search(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    draw_with_mouse(shop_page, (0.05, 0.05), (0.3, 0.3))
    wait_for_crops(shop_page, fake_shop, 1)
    draw_with_mouse(shop_page, (0.9, 0.9), (0.6, 0.6))  # backwards
    crops = wait_for_crops(shop_page, fake_shop, 2)
    assert crops[1] == pytest.approx([0.6, 0.6, 0.3, 0.3], abs=0.02)


def test_the_keyboard_adds_moves_resizes_and_removes_a_box(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("crop-add").focus()
    shop_page.keyboard.press("Enter")
    frame = shop_page.get_by_test_id("crop-frame")
    expect(frame).to_be_focused()
    assert wait_for_crops(shop_page, fake_shop, 1) == [[0.2, 0.2, 0.6, 0.6]]

    shop_page.keyboard.press("ArrowRight")
    shop_page.keyboard.press("Shift+ArrowDown")
    expect(frame).to_have_attribute(
        "aria-label", "Part 1: 60% wide and 62% high, 22% from the left, 20% from the top"
    )
    expect(shop_page.get_by_test_id("live")).to_contain_text("60% wide and 62% high")
    shop_page.keyboard.press("Tab")
    corner = shop_page.get_by_test_id("crop-nw")
    expect(corner).to_be_focused()
    shop_page.keyboard.press("ArrowLeft")
    expect(corner).to_have_attribute("aria-label", "Part 1, top left corner: 62% wide and 62% high")
    wait_for_crop(shop_page, fake_shop, [0.2, 0.2, 0.62, 0.62])
    expect(corner).to_be_focused()

    shop_page.keyboard.press("Escape")
    wait_for_crops(shop_page, fake_shop, 0)
    expect(shop_page.get_by_test_id("crop-add")).to_be_focused()


def test_a_finger_draws_and_resizes_a_box(open_shop: OpenShop, fake_shop: Shop) -> None:
    page = open_shop(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("crop-add").tap()
    wait_for_crops(page, fake_shop, 1)
    x, y, width, height = box_of(page.get_by_test_id("crop-se"))
    _, _, stage_width, _ = box_of(page.get_by_test_id("stage"))
    assert min(width, height) >= 44
    session = page.context.new_cdp_session(page)
    for kind, dx in (("touchStart", 0.0), ("touchMove", -0.1), ("touchMove", -0.2)):
        point = {"x": x + width / 2 + dx * stage_width, "y": y + height / 2}
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [point]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    wait_for_crop(page, fake_shop, [0.2, 0.2, 0.4, 0.6])


def test_the_gallery_chooser_searches_the_other_gallery(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("gallery").select_option("depot")
    expect(shop_page.get_by_test_id("card")).to_have_count(6)
    expect(shop_page.get_by_test_id("gallery-size")).to_have_text("6 items to search")
    assert fake_shop.asked[-1].gallery == "depot"


def test_filters_come_from_the_attributes_and_are_shown_as_chips(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    filters = shop_page.get_by_test_id("filter")
    assert [f.get_attribute("data-name") for f in filters.all()] == [
        "class",
        "colour",
        "price",
        "sale",
    ]
    expect(filters.first.locator(".option").first).to_contain_text("6")
    option(shop_page, "red").check()
    expect(shop_page.get_by_test_id("card")).to_have_count(8)
    filters.nth(2).locator("summary").click()
    shop_page.get_by_test_id("filter-to").fill("10")
    expect(shop_page.get_by_test_id("card")).to_have_count(4)
    filters.nth(3).locator("summary").click()
    shop_page.get_by_label("no", exact=True).check()
    expect(shop_page.get_by_test_id("card")).to_have_count(2)
    assert fake_shop.asked[-1].where == {
        "colour": {"in": ["red"]},
        "price": {"<=": 10},
        "sale": False,
    }
    chips = shop_page.get_by_test_id("chip")
    expect(chips).to_have_text(["colour: red", "price up to 10", "sale: no"])


def test_a_chip_is_removed_and_clear_all_removes_the_rest(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    option(shop_page, "red").check()
    option(shop_page, "blue").check()
    expect(shop_page.get_by_test_id("chip")).to_have_count(2)
    shop_page.get_by_test_id("chip-remove").first.click()
    expect(option(shop_page, "red")).not_to_be_checked()
    expect(option(shop_page, "blue")).to_be_checked()
    expect(shop_page.get_by_test_id("card")).to_have_count(8)
    shop_page.get_by_test_id("clear-all").click()
    expect(shop_page.get_by_test_id("chips")).to_be_hidden()
    expect(shop_page.get_by_test_id("card")).to_have_count(20)
    assert fake_shop.asked[-1].where == {}


def test_a_checkbox_keeps_the_focus_through_its_search(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    option(shop_page, "red").focus()
    shop_page.keyboard.press("Space")
    expect(shop_page.get_by_test_id("card")).to_have_count(8)
    expect(option(shop_page, "red")).to_be_focused()


def test_the_minimum_score_filters_without_a_request(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    before = len(fake_shop.asked)
    scores = [float(text) for text in shop_page.get_by_test_id("score").all_inner_texts()]
    expected = sum(score >= 0.8 for score in scores)
    shop_page.get_by_test_id("min-score").fill("0.8")
    expect(shop_page.get_by_test_id("min-score-value")).to_have_text("0.80")
    expect(shop_page.get_by_test_id("card").filter(visible=True)).to_have_count(expected)
    assert 0 < expected < len(scores)
    assert len(fake_shop.asked) == before
    expect(shop_page.get_by_test_id("probability").first).to_have_text("98%")


def test_suggested_minimum_scores_come_from_the_calibration(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("presets").get_by_text("100").click()
    expect(shop_page.get_by_test_id("min-score-value")).to_have_text("0.95")
    expect(shop_page.get_by_test_id("card").filter(visible=True)).to_have_count(1)


def test_without_calibration_there_are_scores_alone(open_shop: OpenShop, fake_shop: Shop) -> None:
    fake_shop.calibration = None
    page = open_shop()
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    drop_item(page, fake_shop, 0)
    page.get_by_test_id("min-score").fill("0.8")
    expect(page.get_by_test_id("min-score-value")).to_have_text("0.80")
    expect(page.get_by_test_id("probability")).to_have_count(0)
    expect(page.get_by_test_id("presets")).to_be_hidden()
    expect(page.locator("main")).not_to_contain_text("%")


def test_no_match_is_said_with_the_closest_score_and_a_way_out(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    draw_with_mouse(shop_page, (0.05, 0.05), (0.3, 0.3))
    wait_for_crops(shop_page, fake_shop, 1)
    shop_page.get_by_test_id("min-score").fill("1")
    expect(shop_page.get_by_test_id("empty-title")).to_have_text("No match")
    expect(shop_page.get_by_test_id("empty-text")).to_contain_text(
        "The closest item has a score of"
    )
    shop_page.get_by_test_id("empty-min").click()
    expect(shop_page.get_by_test_id("card").filter(visible=True)).to_have_count(20)


def test_groups_show_their_best_picture_their_count_and_their_others(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    shop_page.get_by_test_id("group").select_option("class")
    expect(shop_page.get_by_test_id("card")).to_have_count(4)
    expect(shop_page.get_by_test_id("summary")).to_contain_text("4 groups")
    expect(shop_page.get_by_test_id("group-value").first).to_have_text("mug")
    expect(shop_page.get_by_test_id("group-count").first).to_have_text("6 pictures")
    others = shop_page.get_by_test_id("group-others").first
    others.locator("summary").click()
    expect(others.locator("img")).to_have_count(5)
    others.locator("button").first.click()
    expect(shop_page.get_by_test_id("query-kind")).to_have_text("Searching with the item")


def test_like_and_dislike_refine_and_their_chips_undo_them(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    before = keys(shop_page)
    shop_page.get_by_test_id("like").nth(5).click()
    expect(shop_page.get_by_test_id("chip")).to_have_count(1)
    settled(shop_page)
    liked = keys(shop_page)
    assert fake_shop.asked[-1].positives == [before[5]]
    assert liked.index(before[5]) < 5
    shop_page.get_by_test_id("dislike").nth(3).click()
    expect(shop_page.get_by_test_id("chip")).to_have_count(2)
    settled(shop_page)
    assert fake_shop.asked[-1].negatives == [liked[3]]
    expect(shop_page.locator(f'[data-key="{before[5]}"] [data-testid=like]')).to_have_attribute(
        "aria-pressed", "true"
    )
    for _ in range(2):
        shop_page.get_by_test_id("chip-remove").first.click()
    expect(shop_page.get_by_test_id("chip")).to_have_count(0)
    settled(shop_page)
    assert keys(shop_page) == before


def test_a_click_searches_with_an_item_and_a_like_then_joins_it(
    shop_page: Page, fake_shop: Shop
) -> None:
    drop_item(shop_page, fake_shop, 0)
    second = keys(shop_page)[1]
    shop_page.get_by_test_id("card-search").nth(1).click()
    expect(shop_page.get_by_test_id("query-name")).to_have_text(second.split("/")[1])
    settled(shop_page)
    assert second not in keys(shop_page)
    shop_page.get_by_test_id("like").first.click()
    expect(shop_page.get_by_test_id("chip")).to_have_count(1)
    settled(shop_page)
    assert fake_shop.asked[-1].positives[0] == second


def test_arrow_keys_walk_the_cards_and_l_likes(shop_page: Page, fake_shop: Shop) -> None:
    drop_item(shop_page, fake_shop, 0)
    cards = shop_page.get_by_test_id("card-search")
    cards.first.focus()
    shop_page.keyboard.press("ArrowRight")
    expect(cards.nth(1)).to_be_focused()
    liked = keys(shop_page)[1]
    shop_page.keyboard.press("l")
    expect(shop_page.get_by_test_id("chip")).to_have_count(1)
    settled(shop_page)
    assert fake_shop.asked[-1].positives == [liked]
    focused = "document.activeElement.closest('.card')?.dataset.key"
    assert shop_page.evaluate(focused) == liked
