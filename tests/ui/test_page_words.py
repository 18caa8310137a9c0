"""The box of words on the page: words alone, with a photo or an item, in links, and refused."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import folder_source
from tests.support.page_browser import (
    FITS,
    PHONE,
    SMALL_TARGETS,
    OpenPage,
    drop_item,
    drop_many,
    faults,
    judge,
    keys,
    opening,
    search_with_card,
    send_image,
    settled,
    tab_to,
    violations,
)
from tests.support.page_shop import Shop
from tests.support.servers import DEFAULTS, create_app, run, settings_of
from tests.support.words import with_tower
from tests.tiny import encoded, photo

pytestmark = pytest.mark.browser

SHORT = 4  # numbers of a vector in the short gallery


@pytest.fixture
def start(open_shop: OpenPage, fake_shop: Shop) -> Page:
    """The start of a shop that can be searched with words."""
    fake_shop.has_words = True
    page = open_shop()
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


def enter(page: Page, text: str) -> None:
    """Type words, press Enter and wait for the answer."""
    page.get_by_test_id("words").fill(text)
    with page.expect_response("**/search"):
        page.keyboard.press("Enter")
    settled(page)


def assert_no_probabilities(page: Page) -> None:
    expect(page.get_by_test_id("card").first).to_be_visible()
    expect(page.get_by_test_id("probability")).to_have_count(0)
    expect(page.locator(".score-bar")).to_have_count(0)
    expect(page.get_by_test_id("chance")).to_be_hidden()
    expect(page.get_by_test_id("presets")).to_be_hidden()
    expect(page.get_by_test_id("summary")).to_contain_text("best similarity")


def colours(page: Page, shop: Shop) -> list[str]:
    colour = {item.key: item.attributes["colour"] for item in shop.galleries["shop"]}
    return [colour[key] for key in keys(page)]


def test_a_gallery_without_words_has_no_box(
    shop_page: Page, fake_shop: Shop, open_shop: OpenPage
) -> None:
    expect(shop_page.get_by_test_id("words-form")).to_be_hidden()
    page = open_shop("/#text=green")
    expect(page.get_by_test_id("notice-text")).to_contain_text("cannot be searched with words")
    expect(page.get_by_test_id("sample")).to_have_count(8)
    assert fake_shop.asked == []


def test_words_alone_are_a_search(start: Page, fake_shop: Shop) -> None:
    assert faults(start) == []
    tab_to(start, "words")
    expect(start.get_by_test_id("words")).to_have_accessible_name("Words, alone or with a photo")
    enter(start, " green ")
    assert fake_shop.asked[-1].texts == ["green"]
    assert colours(start, fake_shop)[:8] == ["green"] * 8
    expect(start.get_by_test_id("words")).to_be_focused()
    expect(start.get_by_test_id("query-name")).to_have_text("“green”")
    expect(start.get_by_test_id("stage")).to_be_hidden()
    expect(start.get_by_test_id("where")).to_have_count(0)
    assert_no_probabilities(start)
    assert faults(start) == []
    start.get_by_test_id("group").select_option("class")
    expect(start.get_by_test_id("group-value")).to_have_count(4)
    assert_no_probabilities(start)

    start.get_by_test_id("words").fill("")
    start.get_by_test_id("words-search").click()
    expect(start.locator("body")).to_have_attribute("data-state", "start")


def test_a_finger_reaches_the_box(open_shop: OpenPage, fake_shop: Shop) -> None:
    fake_shop.has_words = True
    page = open_shop(**PHONE)
    page.get_by_test_id("words").tap()
    page.keyboard.type("red")
    page.get_by_test_id("words-search").tap()
    settled(page)
    assert fake_shop.asked[-1].texts == ["red"]
    assert page.evaluate(SMALL_TARGETS) == []
    assert page.evaluate(FITS)


def test_words_are_added_to_a_photo(start: Page, fake_shop: Shop) -> None:
    drop_item(start, fake_shop, 0)  # a red one
    expect(start.get_by_test_id("probability")).to_have_count(20)
    red = keys(start)
    enter(start, "green")
    assert fake_shop.asked[-1].texts == ["green"]
    expect(start.get_by_test_id("query-name")).to_have_text("mine-0.png")
    assert keys(start) != red
    assert_no_probabilities(start)
    expect(start.get_by_test_id("where")).to_have_count(0)
    start.get_by_test_id("crop-add").click()
    expect(start.get_by_test_id("crop-frame")).to_have_count(1)
    settled(start)
    assert (len(fake_shop.asked[-1].crop), fake_shop.asked[-1].texts) == (1, ["green"])
    start.get_by_test_id("crop-auto").check()
    expect(start.get_by_test_id("found-with").first).to_be_visible()
    assert (fake_shop.asked[-1].crop, fake_shop.asked[-1].texts) == (["auto"], ["green"])
    start.get_by_test_id("crop-auto").uncheck()
    expect(start.get_by_test_id("found-with")).to_have_count(0)
    enter(start, "")
    assert fake_shop.asked[-1].texts == []
    assert keys(start) == red
    expect(start.get_by_test_id("probability")).to_have_count(20)
    expect(start.get_by_test_id("presets")).to_be_visible()


def test_typed_words_count_with_the_photo_that_follows(start: Page, fake_shop: Shop) -> None:
    start.get_by_test_id("words").fill("blue")
    drop_item(start, fake_shop, 0)
    assert fake_shop.asked[-1].texts == ["blue"]
    drop_many(start, fake_shop, 2)
    expect(start.locator("[data-testid=batch] [data-state=done]")).to_have_count(2)
    assert [asked.texts for asked in fake_shop.asked] == [["blue"]] * 3


def test_likes_refine_words_and_items_start_without_them(start: Page, fake_shop: Shop) -> None:
    enter(start, "green")
    liked = keys(start)[3]
    judge(start, "like", 3, chips=1)
    assert (fake_shop.asked[-1].texts, fake_shop.asked[-1].positive) == (["green"], [liked])
    search_with_card(start, 1)
    expect(start.get_by_test_id("words")).to_have_value("")
    expect(start.get_by_test_id("probability").first).to_be_visible()
    asked = fake_shop.asked[-1]
    assert (asked.texts, asked.positive) == ([], [])
    enter(start, "red")  # added to the item
    assert (fake_shop.asked[-1].texts, len(fake_shop.asked[-1].positive)) == (["red"], 1)
    expect(start.get_by_test_id("query-kind")).to_have_text("Searching with the item")


def test_another_gallery_without_words_drops_them(start: Page, fake_shop: Shop) -> None:
    box, gallery = start.get_by_test_id("words-form"), start.get_by_test_id("gallery")
    enter(start, "green")
    gallery.select_option("depot")
    expect(box).to_be_hidden()
    expect(start.locator("body")).to_have_attribute("data-state", "start")
    expect(start.get_by_test_id("sample")).to_have_count(6)
    gallery.select_option("shop")
    expect(box).to_be_visible()
    expect(start.get_by_test_id("words")).to_have_value("")
    drop_item(start, fake_shop, 0)
    enter(start, "green")
    gallery.select_option("depot")
    expect(start.get_by_test_id("card")).to_have_count(6)
    assert (fake_shop.asked[-1].gallery, fake_shop.asked[-1].texts) == ("depot", [])


def test_words_are_in_links_in_back_and_in_the_history(
    start: Page, fake_shop: Shop, open_shop: OpenPage
) -> None:
    enter(start, "green")
    green = keys(start)
    fragment = urlsplit(start.url).fragment
    assert parse_qs(fragment) == {"gallery": ["shop"], "text": ["green"]}
    enter(start, "red")
    box = start.get_by_test_id("words")
    start.go_back()
    expect(box).to_have_value("green")
    assert keys(start) == green
    start.go_back()
    expect(box).to_have_value("")
    expect(start.locator("body")).to_have_attribute("data-state", "start")
    start.go_forward()
    expect(box).to_have_value("green")
    start.get_by_test_id("history-open").click()
    start.get_by_test_id("history-entry").filter(has_text="red").click()
    settled(start)
    expect(box).to_have_value("red")

    other = open_shop(f"/#{fragment}")
    settled(other)
    expect(other.get_by_test_id("words")).to_have_value("green")
    assert keys(other) == green
    item = open_shop("/#gallery=shop&text=red&item=6&key=box/006.png")
    settled(item)
    assert (fake_shop.asked[-1].texts, fake_shop.asked[-1].positive) == (["red"], ["box/006.png"])


@pytest.fixture(scope="module")
def service(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A real service with words, and with a gallery of short vectors."""
    pytest.importorskip("tokenizers", reason="needs kinlens[text]")
    folder = tmp_path_factory.mktemp("words")
    bundle = with_tower(tiny_bundle, folder, folder / "bundle").path
    source = folder_source(tiny_gallery.parent / "pictures")
    settings = BuildSettings(dims=SHORT)
    build_gallery(source, OnnxEmbedder.open(tiny_bundle), folder / "short", settings)
    galleries = f"shop={tiny_gallery}", f"short={folder / 'short'}"
    wanted: dict[str, Any] = {"bundle": bundle, "galleries": galleries}
    with closing(run(create_app(settings_of(**DEFAULTS | wanted)))) as running:
        yield running.url.rstrip("/")


def test_a_real_service_is_searched_with_words(browser: Browser, service: str) -> None:
    with opening(browser, service) as open_it:
        page = open_it("/#gallery=shop")
        enter(page, "green mug")
        assert_no_probabilities(page)
        alone = keys(page)
        judge(page, "like", 0, chips=1)
        assert alone[0] not in keys(page)
        send_image(page, encoded(photo(3)))
        settled(page)
        expect(page.get_by_test_id("words")).to_have_value("green mug")
        assert_no_probabilities(page)
        assert violations(page) == []


def test_the_reason_is_shown_if_words_and_items_cannot_be_combined(
    browser: Browser, service: str
) -> None:
    with opening(browser, service, ["422"]) as open_it:
        page = open_it("/#gallery=short")
        enter(page, "green mug")
        before = keys(page)
        page.get_by_test_id("like").first.click()
        expect(page.get_by_test_id("error-title")).to_have_text("These words cannot be used here")
        expect(page.get_by_test_id("error-detail")).to_contain_text("send an image of the item")
        settled(page)
        expect(page.get_by_test_id("chip")).to_have_count(0)
        assert keys(page) == before
        send_image(page, encoded(photo(3)))
        settled(page)
        expect(page.get_by_test_id("error")).to_be_hidden()
