"""The search page in a real Chromium, against the real service: the ways in and the errors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.page_browser import (
    FITS,
    close_page,
    open_page,
    send,
    send_bytes,
    settled,
    tab_to,
)
from tests.support.shops import start_shop

pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Running:
    """Where the service listens, and the pictures of its gallery."""

    url: str
    images: list[Path]


@pytest.fixture(scope="module")
def running_service(
    tmp_path_factory: pytest.TempPathFactory, pictures: list[bytes]
) -> Iterator[Running]:
    """Twelve items without attributes behind the real service."""
    folder = tmp_path_factory.mktemp("catalogue")
    shop = start_shop(tmp_path_factory.mktemp("state"))
    paths = [folder / f"{number:03d}.png" for number in range(len(pictures))]
    for path, data in zip(paths, pictures, strict=True):
        path.write_bytes(data)
    shop.put({path.name: path.read_bytes() for path in paths})
    yield Running(str(shop.client.base_url).rstrip("/"), paths)
    shop.close()


@pytest.fixture
def opened(browser: Browser, running_service: Running) -> Iterator[tuple[Page, list[str]]]:
    page, errors = open_page(browser, running_service.url)
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    yield page, errors
    close_page(page)


@pytest.fixture
def page(opened: tuple[Page, list[str]]) -> Iterator[Page]:
    """A page that must end without an error in its console."""
    yield opened[0]
    assert opened[1] == []


def expect_first(page: Page, name: str) -> None:
    """Waits until the best result is `name`, found with a score of about 1."""
    settled(page)
    first = page.get_by_test_id("card").first
    expect(first.locator(".key-name")).to_have_text(name)
    assert float(first.get_by_test_id("score").inner_text()) == pytest.approx(1, abs=2e-3)


def search(page: Page, image: Path) -> None:
    """Drops an image of the gallery and waits until it has found itself."""
    send(page, image)
    expect_first(page, image.name)


def file_name(page: Page, rank: int) -> str:
    key = page.get_by_test_id("card").nth(rank).get_attribute("data-key")
    assert key is not None
    return Path(key).name


def test_a_dropped_image_finds_itself_and_a_click_searches_with_a_result(
    page: Page, running_service: Running
) -> None:
    dropped = running_service.images[0]
    search(page, dropped)
    expect(page.get_by_test_id("card").first.locator("img")).to_have_js_property("complete", True)
    second = file_name(page, 1)

    page.get_by_test_id("card-search").nth(1).click()
    expect(page.get_by_test_id("query-name")).to_have_text(second)
    expect(page.get_by_test_id("card")).to_have_count(len(running_service.images) - 1)
    assert page.locator(f'[data-testid=card][data-key="{second}"]').count() == 0

    page.go_back()
    expect_first(page, dropped.name)
    page.go_back()
    expect(page.get_by_test_id("card")).to_have_count(0)
    page.go_forward()
    expect_first(page, dropped.name)


def test_a_pasted_image_is_found_and_announced(page: Page, running_service: Running) -> None:
    pasted = running_service.images[-1]
    send(page, pasted, "paste")
    expect_first(page, pasted.name)
    expect(page.get_by_test_id("live")).to_contain_text("best 1.00")
    expect(page.get_by_test_id("live")).to_have_text(page.get_by_test_id("summary").inner_text())


def test_the_keyboard_alone_picks_and_searches(page: Page, running_service: Running) -> None:
    picked = running_service.images[1]
    with page.expect_file_chooser() as chooser:  # well before Enter: it takes a moment
        tab_to(page, "pick")
        page.keyboard.press("Enter")
    chooser.value.set_files(picked)
    expect_first(page, picked.name)

    tab_to(page, "card-search")
    link = page.get_by_test_id("card").first.locator("img").get_attribute("src")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    expect(page.get_by_test_id("summary")).to_be_focused()
    settled(page)
    assert link is not None
    expect(page.get_by_test_id("query-image")).to_have_attribute("src", link)


@pytest.mark.parametrize("width_px", [320, 360])
def test_a_phone_shows_everything_without_sideways_scrolling(
    browser: Browser, running_service: Running, width_px: int
) -> None:
    viewport = {"width": width_px, "height": 700}
    page, errors = open_page(
        browser, running_service.url, viewport=viewport, has_touch=True, is_mobile=True
    )
    expect(page.get_by_test_id("camera")).to_be_visible()
    assert page.evaluate(FITS)
    search(page, running_service.images[0])
    page.get_by_test_id("about").locator("summary").click()
    send_bytes(page, "drop", f"{'long' * 30}.txt", "text/plain", b"text")
    expect(page.get_by_test_id("error")).to_be_visible()
    assert page.evaluate(FITS)
    assert errors == []
    close_page(page)


def test_light_and_dark_differ_in_background(browser: Browser, running_service: Running) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, errors = open_page(browser, running_service.url, color_scheme=scheme)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert errors == []
        close_page(page)
    assert len(backgrounds) == 2


def test_a_text_file_is_refused_and_the_next_works(page: Page, running_service: Running) -> None:
    send_bytes(page, "drop", "notes.txt", "text/plain", b"not an image")
    expect(page.get_by_test_id("error-title")).to_have_text("“notes.txt” is not an image")
    search(page, running_service.images[0])
    expect(page.get_by_test_id("error")).to_be_hidden()


def test_what_the_service_refuses_is_explained_in_its_words_and_the_answer_stays(
    opened: tuple[Page, list[str]], running_service: Running
) -> None:
    page, errors = opened
    search(page, running_service.images[0])
    with page.expect_response("**/search") as refusal:
        send_bytes(page, "drop", "renamed.jpg", "image/jpeg", b"text that was renamed")
    problem = refusal.value.json()
    expect(page.get_by_test_id("error-title")).to_have_text(problem["title"])
    expect(page.get_by_test_id("error-detail")).to_have_text(problem["detail"])
    expect_first(page, running_service.images[0].name)
    assert refusal.value.status == 415
    assert all("415" in error for error in errors)


def test_the_minimum_score_filters_without_a_request(page: Page, running_service: Running) -> None:
    search(page, running_service.images[0])
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.method))
    scores = [float(text) for text in page.get_by_test_id("score").all_inner_texts()]
    minimum = (int(max(min(scores), 0) * 100) + 1) / 100  # one step of the slider above the worst
    expected = sum(score >= minimum for score in scores)

    page.get_by_test_id("min-score").fill(str(minimum))
    expect(page.get_by_test_id("card").filter(visible=True)).to_have_count(expected)
    page.get_by_test_id("min-score").fill("0")
    expect(page.get_by_test_id("card").filter(visible=True)).to_have_count(len(scores))
    assert expected < len(scores)
    assert "POST" not in requests


def test_nothing_above_the_minimum_says_what_to_do(page: Page) -> None:
    answer_with(page, [{"key": "a/b.jpg", "score": 0.5}])
    send_bytes(page, "drop", "query.png", "image/png", b"any")
    expect(page.get_by_test_id("card")).to_have_count(1)
    page.get_by_test_id("min-score").fill("0.8")
    expect(page.get_by_test_id("empty-text")).to_contain_text(
        "The closest item has a score of 0.50, below the minimum of 0.80. Lower the minimum score"
    )


def test_markup_in_keys_and_attributes_stays_text(page: Page) -> None:
    hostile = "<img src=x onerror=document.body.remove()>"
    answer_with(page, [{"key": hostile, "score": 0.5, "attributes": {hostile: hostile}}])
    send_bytes(page, "drop", "query.png", "image/png", b"any")
    expect(page.get_by_test_id("card")).to_have_attribute("data-key", hostile)
    page.get_by_test_id("card").locator("summary").click()
    expect(page.get_by_test_id("card").locator("dd")).to_have_text(hostile)
    expect(page.get_by_test_id("card").locator("img")).to_have_count(1)


def answer_with(page: Page, hits: list[dict[str, Any]]) -> None:
    """Replaces the service's answer; each hit is shown with the page's own icon."""
    plain = {"attributes": {}, "image": "/ui/shared/icon.svg", "probability": None}
    filled = [{"id": n} | plain | hit for n, hit in enumerate(hits)]
    answer = {"gallery": "", "hits": filled, "timings_ms": {"total": 1.5}, "cached": False}
    page.route("**/search", lambda route: route.fulfill(json=answer))


def test_links_of_another_gallery_version_are_explained_by_the_service(
    opened: tuple[Page, list[str]],
) -> None:
    page, errors = opened
    link = "/galleries/shop/items/{}/image?version=000000000000"
    answer_with(page, [{"key": f"{n}", "score": 0.5, "image": link.format(n)} for n in range(3)])
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    send_bytes(page, "drop", "query.png", "image/png", b"any")
    expect(page.get_by_test_id("card").locator("img.broken")).to_have_count(3)
    detail = page.get_by_test_id("error-detail")
    expect(detail).to_contain_text("This link is from version 000000000000 of gallery shop")
    expect(detail).to_contain_text("Search again")
    assert sum("version=000000000000" in url for url in requests) == 4  # three and one to ask why
    page.get_by_test_id("error-close").click()
    expect(page.get_by_test_id("error")).to_be_hidden()
    assert errors
    assert all("404" in error for error in errors)


def test_a_cancelled_search_leaves_the_page_as_is(page: Page, running_service: Running) -> None:
    page.route("**/search", lambda route: None)  # never answered
    send(page, running_service.images[0])
    page.get_by_test_id("cancel").click()
    expect(page.get_by_test_id("card")).to_have_count(0)
    expect(page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_test_id("error")).to_be_hidden()


def test_a_new_search_ends_the_one_under_way(page: Page, running_service: Running) -> None:
    held: list[Route] = []

    def hold_the_first(route: Route) -> None:
        if held:
            route.continue_()
        held.append(route)

    page.route("**/search", hold_the_first)
    with page.expect_event("requestfailed") as aborted:
        send(page, running_service.images[0])
        expect(page.get_by_test_id("progress")).to_be_visible()
        send(page, running_service.images[1])
    assert aborted.value.failure == "net::ERR_ABORTED"
    expect_first(page, running_service.images[1].name)


def test_the_number_of_results_is_sent_and_the_small_print_names_the_versions(
    page: Page, running_service: Running
) -> None:
    page.get_by_test_id("settings").locator("summary").first.click()
    page.get_by_test_id("k").select_option("10")
    with page.expect_response("**/search") as answered:
        send(page, running_service.images[0])
    answer = answered.value.json()
    expect(page.get_by_test_id("card")).to_have_count(min(10, len(running_service.images)))
    page.get_by_test_id("about").locator("summary").click()
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["gallery_version"])
    expect(page.get_by_test_id("about-list")).to_contain_text(answer["bundle_id"])
    assert answer["k"] == 10


def test_nothing_is_asked_of_another_host(browser: Browser, running_service: Running) -> None:
    page, _ = open_page(browser, f"{running_service.url}/live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(running_service.url)
    search(page, running_service.images[0])
    local = (running_service.url, "blob:", "data:")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(local)] == []
    close_page(page)
