"""Narrowing a search on the page: parts, likes, filters, groups, the minimum score."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.page_browser import (
    PHONE,
    OpenPage,
    faults,
    judge,
    keys,
    search_with_card,
    searched,
    settled,
    too_wide,
    violations,
)
from tests.support.page_shop import Shop
from tests.support.waiting import until

pytestmark = pytest.mark.browser


def box_of(locator: Locator) -> tuple[float, float, float, float]:
    box = locator.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


def option(page: Page, name: str) -> Locator:
    """The checkbox of a value in the filters."""
    return page.get_by_role("checkbox", name=name)


HEAR = """() => {
  const live = document.getElementById("live");
  window.heard = [];  // also what the next sentence has replaced
  new MutationObserver(() => heard.push(live.textContent)).observe(live, { childList: true });
}"""


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

    results.get_by_test_id("min-score").fill("1")
    expect(results.get_by_test_id("summary")).to_have_text("No match")
    expect(results.get_by_test_id("empty-text")).to_contain_text("The closest item has a score of")
    results.get_by_test_id("empty-min").click()
    expect(results.get_by_test_id("card").filter(visible=True)).to_have_count(20)


def test_the_keyboard_adds_moves_resizes_and_removes_a_box(results: Page, fake_shop: Shop) -> None:
    results.get_by_test_id("crop-add").focus()
    results.keyboard.press("Enter")
    frame = results.get_by_test_id("crop-frame")
    expect(frame).to_be_focused()
    wait_for_crops(results, fake_shop, [0.2, 0.2, 0.6, 0.6])

    results.evaluate(HEAR)
    results.keyboard.press("ArrowRight")
    results.keyboard.press("Shift+ArrowDown")
    expect(frame).to_have_attribute(
        "aria-label", "Part 1: 60% wide and 62% high, 22% from the left, 20% from the top"
    )
    until(lambda: "60% wide and 62% high" in str(results.evaluate("heard")))
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
    names = [found.get_attribute("data-name") for found in filters.all()]
    assert names == ["class", "colour", "price", "sale"]
    expect(filters.first.locator(".option").first).to_contain_text("6")
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
    expect(results.get_by_test_id("chips")).to_be_hidden()
    expect(cards).to_have_count(20)
    assert fake_shop.asked[-1].filter == {}

    results.get_by_test_id("gallery").select_option("depot")
    expect(cards).to_have_count(6)
    expect(results.get_by_test_id("gallery-size")).to_have_text("6 items to search")
    assert fake_shop.asked[-1].gallery == "depot"


def test_the_minimum_score_filters_without_a_request(results: Page, fake_shop: Shop) -> None:
    cards = results.get_by_test_id("card").filter(visible=True)
    before = len(fake_shop.asked)
    titles = [found.get_attribute("title") for found in results.get_by_test_id("score").all()]
    scores = [float(title.removeprefix("Similarity ")) for title in titles if title]
    sure = results.get_by_test_id("probability").first.inner_text()
    expected = sum(score >= 0.8 for score in scores)
    assert 0 < expected < len(scores)
    results.get_by_test_id("min-score").fill("0.8")
    expect(results.get_by_test_id("min-score-value")).to_have_text("0.80")
    expect(cards).to_have_count(expected)
    expect(results.get_by_test_id("probability").first).to_have_text(sure)
    results.get_by_test_id("presets").get_by_text("100").click()  # of the thresholds
    expect(results.get_by_test_id("min-score-value")).to_have_text("0.95")
    expect(cards).to_have_count(1)
    assert len(fake_shop.asked) == before


def test_without_calibration_there_are_only_scores(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.calibration = None
    page = searched(open_shop, fake_shop)
    expect(page.get_by_test_id("probability")).to_have_count(0)
    expect(page.locator(".score-bar")).to_have_count(0)  # a cosine is not a share
    expect(page.get_by_test_id("chance")).to_be_hidden()
    expect(page.get_by_test_id("presets")).to_contain_text("100")  # they are of the bundle
    expect(page.locator("main")).not_to_contain_text("%")


def test_absence_is_prominent_from_a_chance_of_half(open_shop: OpenPage, fake_shop: Shop) -> None:
    results = searched(open_shop, fake_shop, reduced_motion="reduce")
    chance = results.get_by_test_id("chance")
    expect(chance).to_have_text("12% chance that none of the 20 results is right")
    expect(chance).not_to_have_class(re.compile("likely"))
    fake_shop.no_match = 0.62
    results.get_by_test_id("group").select_option("class")
    expected = "Probably not here: 62% chance that none of the 4 groups is right"
    expect(chance).to_have_text(expected)
    expect(chance).to_have_class(re.compile("likely"))
    assert faults(results) == []
    search_with_card(results, 0)  # which does not find itself, so all have a lower score
    results.get_by_test_id("min-score").fill("1")
    expect(results.get_by_test_id("empty")).to_be_visible()
    expect(chance).to_be_hidden()


def test_groups_show_their_best_image_their_count_and_their_others(results: Page) -> None:
    results.get_by_test_id("group").select_option("class")
    expect(results.get_by_test_id("card")).to_have_count(4)
    expect(results.get_by_test_id("summary")).to_contain_text("4 groups")
    expect(results.get_by_test_id("group-value").first).to_have_text("mug")
    expect(results.get_by_test_id("group-count").first).to_have_text("6 photos")
    # Of the group and not of its best image, or disjoint groups would have more than 100 %.
    sure = [
        int(text.rstrip(" %")) for text in results.get_by_test_id("probability").all_inner_texts()
    ]
    assert len(sure) == 4
    assert sum(sure) <= 102
    others = results.get_by_test_id("group-others").first
    others.locator("summary").click()
    expect(others.locator("img")).to_have_count(5)
    others.locator("button").first.click()
    expect(results.get_by_test_id("query-kind")).to_have_text("Searching with the item")


def test_cards_show_currency_and_missing_groups(open_shop: OpenPage, fake_shop: Shop) -> None:
    stock = [
        replace(item, attributes={**item.attributes, "currency": "EUR", "unit_size": item.id % 12})
        for item in fake_shop.galleries["shop"]
    ]
    few = {"class": "mug", "price": 7.5, "currency": "coins"}
    fake_shop.galleries["shop"] = [*stock[:23], replace(stock[23], attributes=few)]
    page = searched(open_shop, fake_shop)
    first = page.locator('[data-key="mug/000.png"]')
    expect(first.locator(".key-folder")).to_have_text("mug · red · €1.00")
    first.locator("summary").click()
    expect(first.locator("dt")).to_contain_text(["Class", "Colour", "Price", "Sale", "Unit size"])
    page.get_by_label("Group by").select_option("Colour")
    expect(page.get_by_test_id("group-value")).to_have_count(4)
    lacking = page.get_by_test_id("card").filter(has_text="Without colour")
    expect(lacking).to_contain_text("mug · 7.5 coins")
    expect(lacking.get_by_test_id("group-count")).to_have_count(0)
    expect(page.get_by_test_id("group-count").first).to_have_text("7+ photos")
    expect(page.get_by_test_id("group-others").first.locator("summary")).to_contain_text("Next 6")


def test_long_lists_of_values_can_be_expanded(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.galleries["shop"] = [
        replace(item, attributes={"brand": f"brand {item.id % 12:02d}"})
        for item in fake_shop.galleries["shop"]
    ]
    chosen = json.dumps({"brand": {"in": ["brand 11"]}})
    page = searched(open_shop, fake_shop, f"/#filter={chosen}", reduced_motion="reduce")
    options = page.locator(".option").filter(visible=True)
    expect(options).to_have_count(9)  # eight and the chosen one
    more = page.get_by_test_id("filter-more")
    expect(more).to_have_text("Show 3 more")
    assert violations(page) == []
    page.get_by_label("Find a value of Brand").fill("09")
    expect(options).to_have_count(1)
    expect(more).to_be_hidden()
    page.get_by_label("Find a value of Brand").fill("")
    more.click()
    expect(options).to_have_count(12)
    expect(option(page, "brand 08")).to_be_focused()
    expect(more).to_be_hidden()


def test_products_are_results_with_their_views(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.galleries["shop"] = [
        replace(item, attributes={**item.attributes, "product": f"p-{item.id // 5}"})
        for item in fake_shop.galleries["shop"]
    ]
    page = searched(open_shop, fake_shop)
    page.get_by_label("Group by").select_option("Product (one result each)")
    expect(page.get_by_test_id("card")).to_have_count(5)
    expect(page.get_by_test_id("summary")).to_contain_text("5 products")
    expect(page.get_by_test_id("group-count").first).to_have_text("5 views")
    assert fake_shop.asked[-1].group_by == "product"
    page.locator('[data-testid=filter][data-name="product"] summary').click()
    option(page, "p-4").check()
    expect(page.get_by_test_id("card")).to_have_count(1)
    expect(page.get_by_test_id("group-count")).to_have_text("4 views")


def test_the_best_part_can_count(results: Page, fake_shop: Shop, open_shop: OpenPage) -> None:
    draw_with_mouse(results, (0.05, 0.05), (0.4, 0.4))
    wait_for_crops(results, fake_shop, [0.05, 0.05, 0.35, 0.35])
    expect(results.get_by_test_id("combine-field")).to_be_hidden()
    draw_with_mouse(results, (0.6, 0.6), (0.9, 0.9))
    boxes = [0.05, 0.05, 0.35, 0.35], [0.6, 0.6, 0.3, 0.3]
    wait_for_crops(results, fake_shop, *boxes)
    judge(results, "like", 1, chips=1)
    assert fake_shop.asked[-1].combine == "mean"
    with results.expect_response("**/search"):
        results.get_by_label("Several parts").select_option("best")
    settled(results)
    assert fake_shop.asked[-1].combine == "best"
    expect(results.get_by_test_id("chip")).to_have_count(0)
    expect(results.get_by_test_id("notice")).to_contain_text("Likes, dislikes and the order")
    found = results.get_by_test_id("found-with")
    expect(found).to_have_count(20)
    assert {*found.all_inner_texts()} <= {"Part 1", "Part 2"}
    results.get_by_test_id("where").first.click()  # of the part that it was found with
    expect(results.get_by_test_id("heat")).to_have_count(2)
    results.get_by_test_id("crop-clear").click()
    wait_for_crops(results, fake_shop)
    expect(found).to_have_count(0)
    expect(results.get_by_test_id("like")).to_have_count(20)
    expect(results.get_by_test_id("combine")).to_be_visible()  # to undo the choice

    item, parts = "item=6&key=box/006.png", "crop=0,0,0.5,1&crop=0.5,0,0.5,1"
    linked = open_shop(f"/#gallery=shop&combine=best&{item}&{parts}")
    settled(linked)
    expect(linked.get_by_test_id("found-with").first).to_be_visible()
    assert "combine=best" in linked.url


def test_the_order_is_in_the_link(results: Page, fake_shop: Shop, open_shop: OpenPage) -> None:
    order = results.get_by_test_id("order")
    expect(order).to_have_value("")
    assert fake_shop.asked[-1].diversity == 0
    for chosen, asked in (("varied", 0.2), ("", 0)):
        with results.expect_response("**/search"):
            order.select_option(chosen)
        settled(results)
        assert fake_shop.asked[-1].diversity == asked
    linked = open_shop("/#gallery=shop&order=varied&item=6&key=box/006.png")
    settled(linked)
    expect(linked.get_by_test_id("order")).to_have_value("varied")
    assert fake_shop.asked[-1].diversity == 0.2
    wrong = open_shop("/#order=upwards")
    expect(wrong.get_by_test_id("order")).to_have_value("")


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

    cards = results.get_by_test_id("card-search")
    cards.first.focus()
    results.keyboard.press("ArrowRight")
    expect(cards.nth(1)).to_be_focused()
    liked_key = keys(results)[1]
    results.keyboard.press("l")
    expect(results.get_by_test_id("chip")).to_have_count(1)
    settled(results)
    assert fake_shop.asked[-1].positive == [liked_key]
    assert results.evaluate("document.activeElement.closest('.card')?.dataset.key") == liked_key
    results.get_by_test_id("chip-remove").click()
    expect(results.get_by_test_id("chip")).to_have_count(0)
    settled(results)

    search_with_card(results, 1)
    expect(results.get_by_test_id("query-name")).to_have_text(before[1].split("/")[1])
    assert before[1] not in keys(results)
    judge(results, "like", 0, chips=1)
    assert fake_shop.asked[-1].positive[0] == before[1]


@pytest.mark.parametrize("mode", ["off", "pairs", "pictures"])
def test_votes_are_feedback_if_wanted(mode: str, open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.feedback = mode
    page = searched(open_shop, fake_shop)
    note = page.get_by_test_id("feedback-note")
    shown = {
        "off": "",
        "pairs": "sent to the shop, ",
        "pictures": "sent to the shop with the photo",
    }
    expect(note).to_contain_text(shown[mode])
    expect(note).to_be_visible(visible=mode != "off")
    liked, size = keys(page)[5], str(len(fake_shop.galleries["shop"][0].data))
    judge(page, "like", 5, chips=1)
    page.get_by_test_id("chip-remove").click()
    expect(page.get_by_test_id("chip")).to_have_count(0)
    settled(page)
    disliked = keys(page)[3]
    judge(page, "dislike", 3, chips=1)
    image = {"image": size} if mode == "pictures" else {}
    sent = [
        {"answer_id": "answer-1", "item": liked, "action": "clicked"} | image,
        {"answer_id": "answer-3", "item": disliked, "action": "wrong"} | image,
    ]
    assert fake_shop.judged_items == ([] if mode == "off" else sent)


@pytest.mark.parametrize("is_phone", [False, True])
@pytest.mark.parametrize("group", ["", "class"])
def test_what_a_card_unfolds_moves_and_stretches_no_card(
    open_shop: OpenPage, fake_shop: Shop, group: str, is_phone: bool
) -> None:
    page = searched(open_shop, fake_shop, **(PHONE if is_phone else {}))
    if group:
        if is_phone:
            page.get_by_test_id("settings").locator("summary").first.click()
        page.get_by_test_id("group").select_option(group)
        expect(page.get_by_test_id("group-value")).to_have_count(4)
    boxes = """() => [...document.querySelectorAll(".card, .card .score-bar, .card .vote")]
        .map((node) => node.getBoundingClientRect())
        .map(({ x, y, width, height }) => [x, y + scrollY, width, height])"""
    before = page.evaluate(boxes)
    assert len(before) > 8
    card = page.get_by_test_id("card").nth(1)
    for part in ("facts", "group-others") if group else ("facts",):
        card.locator(f".{part} > summary").click()
        opened = card.locator(f".{part} > :not(summary)")
        expect(opened).to_be_visible()
        assert page.evaluate(boxes) == before
    expect(card.locator("details[open]")).to_have_count(1)
    assert too_wide(page) == []
