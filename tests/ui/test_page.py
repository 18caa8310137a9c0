"""The search page and the real service together."""

import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, Request, Route, expect

from tests.support.admin_page import FEW, AdminShop
from tests.support.page_browser import (
    PHONE,
    OpenPage,
    judge,
    keys,
    search_with_card,
    send_files,
    send_image,
    settled,
    until,
    violations,
)

pytestmark = pytest.mark.browser


@pytest.fixture
def page(open_admin: OpenPage, shop: AdminShop) -> Page:
    """The start, in a gallery of twelve items."""
    shop.stock()
    page = open_admin("/#gallery=shop")
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


def search(page: Page, shop: AdminShop) -> Any:
    """Drop the image of the first item; the service's answer, once it is shown."""
    with page.expect_response("**/search") as answered:
        send_image(page, shop.images[0])
    settled(page)
    return answered.value.json()


def test_a_link_shows_the_same_answer(page: Page, shop: AdminShop, open_admin: OpenPage) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_test_id("settings").locator("summary").first.click()
    page.get_by_test_id("k").select_option("10")
    answer = search(page, shop)
    expect(page.get_by_test_id("card")).to_have_count(answer["k"])
    expect(page.get_by_test_id("key")).to_be_hidden()  # which is requested only after a refusal
    assert answer["k"] == 10
    assert keys(page)[0] == "i/00.png"
    expect(page.get_by_test_id("score").first).to_have_text("1.00")
    expect(page.get_by_test_id("probability")).to_have_count(0)  # no attribute names the product
    page.get_by_test_id("about").locator("summary").click()
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["gallery_version"])
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["bundle_id"])

    page.get_by_test_id("k").select_option("50")
    expect(page.get_by_test_id("card")).to_have_count(FEW)
    second = keys(page)[1]
    search_with_card(page, 1)
    expect(page.get_by_test_id("query-name")).to_have_text(second.split("/")[1])
    expect(page.get_by_test_id("card")).to_have_count(FEW - 1)
    assert second not in keys(page)
    assert [url for url in asked if not url.startswith((shop.url, "blob:", "data:"))] == []

    other = open_admin(page.url.removeprefix(shop.url))
    settled(other)
    assert keys(other) == keys(page)


def test_filters_groups_parts_and_votes_narrow_the_answers_of_a_real_service(
    page: Page, shop: AdminShop
) -> None:
    """Of twelve items in three colours, every second on sale, with prices from 0 on."""
    search(page, shop)
    for found in page.get_by_test_id("filter").all():
        found.evaluate("(node) => (node.open = true)")
    colours = page.locator("[data-name=colour] .option-count")  # blue, green, red
    expect(colours).to_have_text(["4", "4", "4"])
    bars = page.get_by_test_id("filter-bars").locator("span")
    expect(bars).to_have_count(12)
    page.get_by_test_id("filter-from").fill("7")
    expect(colours).to_have_text(["2", "2", "1"])
    page.get_by_role("checkbox", name="red").check()
    expect(page.get_by_test_id("card")).to_have_count(1)
    yes, no = page.locator("[data-name=sale] .choice span").all()[1:]
    expect(yes).to_have_attribute("data-count", "0")
    expect(no).to_have_attribute("data-count", "1")
    expect(bars).to_have_count(4)  # all prices of red items
    expect(colours).to_have_text(["2", "2", "1"])  # what another colour would give
    page.get_by_test_id("clear-all").click()
    expect(colours).to_have_text(["4", "4", "4"])
    page.get_by_test_id("min-score").fill("0.99")
    expect(colours).to_have_text(["0", "0", "1"])
    expect(page.locator("[data-name=colour] .none")).to_have_count(2)

    page.get_by_test_id("min-score").fill("0")
    cards = page.get_by_test_id("card")
    page.get_by_test_id("presets").locator("button").click()
    expect(page.get_by_test_id("min-score-value")).to_contain_text("0.60")
    assert 1 <= cards.filter(visible=True).count() < FEW
    page.get_by_test_id("min-score").fill("0")
    for name in ("red", "blue"):
        page.get_by_role("checkbox", name=name).check()
    expect(cards).to_have_count(8)
    page.get_by_test_id("group").select_option("colour")
    expect(page.get_by_test_id("group-value")).to_have_count(2)
    expect(page.get_by_test_id("group-count").first).to_have_text("4 photos")
    page.get_by_test_id("clear-all").click()
    page.get_by_test_id("group").select_option("")

    with page.expect_response("**/search") as answered:
        page.get_by_test_id("crop-add").click()
    assert answered.value.status == 200
    settled(page)
    before = keys(page)
    judge(page, "like", 4, chips=1)
    judge(page, "dislike", 5, chips=2)
    assert keys(page) != before


def test_a_visitor_reads_no_sentence_for_operators(
    page: Page, shop: AdminShop, allowed: list[str]
) -> None:
    allowed += ["404", "415"]
    answer = search(page, shop)
    with page.expect_response("**/search") as refusal:
        send_files(page, ("renamed.jpg", "image/jpeg", b"text that was renamed"))
    problem = refusal.value.json()
    assert problem["status"] == 415
    error = page.get_by_test_id("error")
    expect(page.get_by_test_id("error-title")).to_contain_text("not a photo that can be read")
    expect(error).not_to_contain_text(problem["detail"])
    error.locator("summary").click()
    expect(page.get_by_test_id("error-request")).to_contain_text(problem["request_id"])
    assert keys(page) == [hit["key"] for hit in answer["hits"]]
    page.get_by_test_id("error-close").click()

    # A lost file, as of a gallery that was rebuilt, is a quiet placeholder.
    [hit, *_] = answer["hits"]
    hit["image"] = f"/galleries/shop/items/{hit['id']}/image?generation=000000000000"
    page.route("**/search", lambda route: route.fulfill(json=answer | {"hits": [hit]}))
    send_image(page, shop.images[1], "other.png")
    expect(page.get_by_test_id("query-name")).to_have_text("other.png")
    broken = page.get_by_test_id("card").locator("img.broken")
    expect(broken).to_have_css("visibility", "hidden")
    expect(page.locator(".card-image")).to_have_css("background-image", re.compile("^url"))
    expect(error).to_be_hidden()


NUMBERS = {
    "ean": 4006381333931,
    "weight": 123457.89,
    "sum": 0.1 + 0.2,
    "ratio": float(np.float32(2.3)),
    "code": 2**62 + 1,
    "price": 1234.5,
    "currency": "EUR",
}


@pytest.mark.parametrize(
    ("language", "shown"),
    [
        ("en-US", ["123457.89", "0.3", "2.3", "€1,234.50"]),
        ("de-DE", ["123457,89", "0,3", "2,3", "1.234,50\xa0€"]),
    ],
)
def test_numbers_are_shown_as_they_are_in_the_language_of_the_browser(
    open_admin: OpenPage, shop: AdminShop, language: str, shown: list[str]
) -> None:
    shop.stock("numbers", 0)
    shop.shop.put({"a.png": shop.images[0]}, "numbers", **NUMBERS)
    page = open_admin("/#gallery=numbers", locale=language)
    search(page, shop)
    page.get_by_test_id("card").locator("summary").click()
    values = page.get_by_test_id("card").locator("dd").all_text_contents()
    assert {*values} >= {*shown, "4006381333931", str(2**62 + 1)}


LINKS = {
    "https://shop.example/a?b=c&d": "https://shop.example/a?b=c&d",
    "/p/12": "{origin}/p/12",
    "//shop.example/x": "http://shop.example/x",
    "javascript:alert(1)": None,
    " JavaScript:alert(1)": None,
    "java\tscript:alert(1)": None,
    "data:text/html,x": None,
    "vbscript:x": None,
    "https://": None,
    "": None,
}


def test_a_result_leads_to_the_shop_and_never_runs_a_script(
    open_admin: OpenPage, shop: AdminShop
) -> None:
    shop.stock("linked", 0)
    texts = [json.dumps({"url": text, "title": str(n)}) for n, text in enumerate(LINKS)]
    images = {f"{n}.png": shop.images[n % len(shop.images)] + bytes([n]) for n in range(len(LINKS))}
    assert shop.shop.put_form(images, texts, "linked").json()["added"] == len(LINKS)
    page = open_admin("/#gallery=linked")
    held: list[
        Route
    ] = []  # the list of galleries, which knows where cards lead, arrives after the answer
    page.route(re.compile("/galleries$"), lambda route: held.append(route))
    page.reload()
    search(page, shop)
    expect(page.get_by_test_id("card-link")).to_have_count(0)
    held.pop().continue_()
    page.unroute_all()
    for number, link in enumerate(LINKS.values()):
        card = page.locator(f'[data-testid=card][data-key="{number}.png"]')
        found = card.get_by_test_id("card-link")
        if link is None:
            expect(found).to_have_count(0)
        else:
            expect(found).to_have_attribute("href", link.format(origin=shop.url))
            expect(found).to_have_attribute("rel", "noopener noreferrer")
            expect(found.locator("img")).to_have_count(1)
        expect(card.get_by_test_id("card-search")).to_have_count(1)
    assert violations(page) == []
    first = page.locator("[data-testid=card]:has(a)").first
    first.get_by_test_id("card-link").focus()
    page.keyboard.press("s")
    expect(page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(page)

    facts = {"gallery": "linked", "product_url": "https://shop.example/{title}/{n o}?{title}"}
    attributes = {"title": "a/b ü", "n o": 5}
    listed = shop.shop.client.get("/galleries/linked").json() | facts
    page.route("**/galleries/linked", lambda route: route.fulfill(json=listed))
    answer = shop.shop.running.search(shop.images[0], gallery="linked").json()
    whole, lacking = (hit | {"attributes": attributes} for hit in answer["hits"][:2])
    lacking["attributes"] = {"title": "a"}
    answer |= {"hits": [whole, lacking]}
    page.route("**/search", lambda route: route.fulfill(json=answer))
    page.reload()
    settled(page)
    send_image(page, shop.images[1])
    expect(page.get_by_test_id("card")).to_have_count(2)
    target = "https://shop.example/a%2Fb%20%C3%BC/5?a%2Fb%20%C3%BC"
    expect(page.get_by_test_id("card-link")).to_have_attribute("href", target)


def phone_photo() -> bytes:
    """A detailed photo of 1600 x 1200 pixels and as many bytes as that of a phone."""
    rng = np.random.default_rng(7)
    pixels = np.zeros((1200, 1600, 3), dtype=np.float32)
    for side, share in ((8, 0.4), (40, 0.3), (300, 0.2), (1500, 0.1)):
        noise = rng.integers(0, 255, (side * 3 // 4, side, 3), dtype=np.uint8)
        pixels += share * np.asarray(Image.fromarray(noise).resize((1600, 1200)))
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


def test_forty_phone_photos_cost_at_most_one_and_a_half_megabytes_once(
    open_admin: OpenPage, shop: AdminShop
) -> None:
    photo, count = phone_photo(), 40
    assert len(photo) > 1_500_000
    shop.stock("phones", 0)
    for first in range(0, count, 8):  # bytes after the end of a JPEG are not shown
        images = {f"{n}.jpg": photo + bytes([n]) for n in range(first, first + 8)}
        shop.shop.put(images, "phones")
    page = open_admin("/#gallery=phones&k=50", before=None, device_scale_factor=3, **PHONE)
    finished: list[Request] = []
    page.on("requestfinished", lambda request: finished.append(request))
    page.reload()
    expect(page.get_by_test_id("sample")).to_have_count(8)

    def show_all(name: str) -> None:
        send_image(page, shop.images[0], name)
        expect(page.get_by_test_id("query-name")).to_have_text(name)
        settled(page)
        expect(page.get_by_test_id("card")).to_have_count(count)
        page.evaluate("""async () => {
            for (let y = 0; y <= document.body.scrollHeight; y += 400) {
                scrollTo(0, y);
                await new Promise(requestAnimationFrame);
            }
        }""")
        until(page, "[...document.querySelectorAll('.card img')].every((i) => i.naturalWidth > 0)")

    show_all("first.png")
    shown = [request for request in finished if "/items/" in request.url]
    assert len(shown) >= count
    assert all("size=" in request.url for request in shown if "/image" in request.url)
    assert sum(request.sizes()["responseBodySize"] for request in finished) <= 1_500_000
    finished.clear()
    show_all("second.png")
    assert not [request for request in finished if "/image" in request.url]
