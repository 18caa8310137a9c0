"""The search page shows what an answer guarantees, in place of a second way next to it."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Request, expect

from tests.support.page_browser import (
    RUN_AXE,
    OpenPage,
    drop_item,
    drop_many,
    faults,
    judge,
    search_with_card,
    searched,
    settled,
)
from tests.support.page_shop import Shop

pytestmark = pytest.mark.browser


def promise(*values: str | None, cut: str | None = None, none: bool | None = None) -> Any:
    """What an answer guarantees, with a set of these products."""
    groups = [{"value": value, "key": f"{value}/0.png", "score": 0.9} for value in values]
    facts = {"queries": 300, "source": "golden", "product": "class", "level": 0.95}
    facts |= {"holds": cut is None, "cut": cut, "none": none, "groups": groups}
    return facts | {"accept": 0.99, "confidence": 0.95}


SET = "One of these 3 products (95 of 100 times): mug, jar, box"


PROMISES = {
    None: (
        (promise("mug", "jar", "box"), SET),
        (
            promise("mug", "jar", "box", "bag", none=True),
            "One of these 4 products, or none of them (95 of 100 times): mug, jar, box and 1 more",
        ),
        (promise("mug", none=False), "This product (95 of 100 times): mug"),
        (promise(none=True), "None of these products (95 of 100 times)"),
        (promise("mug", cut="k"), "More products may be right than fit into the results"),
    ),
    False: (
        (promise("mug", "jar", "box"), f"Not sure. {SET}"),
        (promise("mug", cut="filter"), "Not sure. The filters hide products that may be"),
    ),
    True: ((promise("mug"), "Accepted: mug. At most 1 of 100 accepted products is wrong"),),
}
"""What the page shows, by whether the answer is accepted, if that is decided."""


@pytest.mark.parametrize("accepted", PROMISES)
def test_the_page_says_what_holds(
    open_shop: OpenPage, fake_shop: Shop, accepted: bool | None
) -> None:
    fake_shop.guarantee, fake_shop.accepted = promise("mug"), accepted
    page = searched(open_shop, fake_shop)
    chance = page.get_by_test_id("chance")
    for number, (guarantee, text) in enumerate(PROMISES[accepted], 1):
        fake_shop.guarantee = guarantee
        drop_item(page, fake_shop, number)
        expect(chance).to_contain_text(text)
        expect(chance).not_to_contain_text("chance that none")
        asked = fake_shop.asked[-1]
        assert (asked.guarantee, asked.accept) == (0.95, None if accepted is None else 0.99)


def test_a_product_that_is_probably_absent_stays_prominent(
    open_shop: OpenPage, fake_shop: Shop
) -> None:
    fake_shop.guarantee, fake_shop.no_match = promise("mug", "jar", "box", none=True), 0.62
    chance = searched(open_shop, fake_shop).get_by_test_id("chance")
    expect(chance).to_contain_text("Probably not here: 62% chance")
    expect(chance).to_contain_text("or none of them (95 of 100 times)")


def test_only_a_whole_photo_is_asked_with(open_shop: OpenPage, fake_shop: Shop) -> None:
    """Guarantees are about queries like the labelled ones."""
    fake_shop.guarantee = promise("mug")
    page = searched(open_shop, fake_shop)
    assert fake_shop.asked[-1].guarantee == 0.95
    judge(page, "like", 1, 1)
    assert fake_shop.asked[-1].guarantee is None
    page.get_by_test_id("clear-all").click()
    expect(page.get_by_test_id("chance")).to_have_text("This product (95 of 100 times): mug")
    page.get_by_test_id("order").select_option("varied")
    expect(page.get_by_test_id("chance")).to_contain_text("chance that none")
    page.get_by_test_id("order").select_option("")
    page.get_by_test_id("crop-auto").check()
    expect(page.get_by_test_id("chance")).to_contain_text("chance that none")
    page.get_by_test_id("crop-auto").uncheck()
    expect(page.get_by_test_id("chance")).to_have_text("This product (95 of 100 times): mug")
    search_with_card(page, 0)
    expect(page.get_by_test_id("chance")).to_contain_text("chance that none")


def is_search(request: Request) -> bool:
    return request.url.endswith("/search")


def ended(page: Page) -> Locator:
    return page.get_by_test_id("chance").filter(has_text="No answer is guaranteed now")


def test_a_guarantee_that_ended_is_said_and_no_search_fails(
    open_shop: OpenPage, fake_shop: Shop, allowed: list[str]
) -> None:
    allowed.append("422")
    fake_shop.guarantee = promise("mug")
    page = searched(open_shop, fake_shop)
    fake_shop.guarantee, fake_shop.withdrawn = None, "Other queries came"
    sent: list[Request] = []
    page.on("request", lambda request: sent.append(request) if is_search(request) else None)
    with page.expect_response(re.compile("/galleries/shop$")):
        drop_item(page, fake_shop, 1)
    expect(ended(page)).to_contain_text("12% chance that none of the 20 results is right")
    expect(page.get_by_test_id("error")).to_be_hidden()
    assert len(sent) == 2
    drop_item(page, fake_shop, 2)
    expect(ended(page)).to_be_visible()
    assert len(sent) == 3, "the page asks for no guarantee since it knows"


def test_a_batch_says_which_photos_need_a_person(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.guarantee, fake_shop.accepted = promise("mug"), True
    page = open_shop()
    expect(page.get_by_test_id("sample")).to_have_count(8)
    drop_many(page, fake_shop, 2)
    states = page.get_by_test_id("batch-state")
    for number in range(2):
        expect(states.nth(number)).to_contain_text("Accepted. 20 results")
    page.get_by_test_id("batch-open").first.click()
    settled(page)
    expect(page.get_by_test_id("chance")).to_contain_text("At most 1 of 100")


def test_it_fits_a_phone(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.guarantee, fake_shop.accepted = promise("mug"), True
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    page = searched(open_shop, fake_shop, **phone)
    expect(page.get_by_test_id("chance")).to_contain_text("Accepted: mug")
    assert faults(page) == []
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(RUN_AXE, ["[data-testid=chance]", ["color-contrast"]]) == []
