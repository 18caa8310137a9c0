"""A real Chromium for tests of the page, and what people do in it.

`$KINLENS_CHROMIUM` names the browser; otherwise the first of chromium, chromium-browser and
google-chrome on the path is used.
"""

import base64
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.support.page_shop import Shop

SEND_FILES = """([how, files]) => {
    const transfer = new DataTransfer();
    for (const [name, type, base64] of files) {
        const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type }));
    }
    const target = document.querySelector("[data-testid=drop]");
    const options = { bubbles: true, cancelable: true };
    target.dispatchEvent(how === "drop"
        ? new DragEvent("drop", { ...options, dataTransfer: transfer })
        : new ClipboardEvent("paste", { ...options, clipboardData: transfer }));
}"""
FITS = "document.scrollingElement.scrollWidth <= innerWidth"
FOCUSED = "document.activeElement?.dataset.testid"
MEDIA_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}
OPTIONS = [
    "--no-sandbox",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--process-per-site",
]
STOP_S = 20.0
WAIT_MS = 20_000
OpenPage = Callable[..., Page]
OpenShop = OpenPage


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = (path for name in names if (path := shutil.which(name)))
    return os.environ.get("KINLENS_CHROMIUM") or next(found, None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install one or name it in KINLENS_CHROMIUM")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        browser.new_context()
        yield browser
        browser.close()


def error_text(message: ConsoleMessage) -> list[str]:
    return [message.text] if message.type == "error" else []


def open_page(
    browser: Browser,
    url: str,
    script: str | None = None,
    color_scheme: Any = None,
    reduced_motion: Any = None,
    **settings: Any,
) -> tuple[Page, list[str]]:
    """A page with nothing stored, and what its console says of errors; `script` runs before it.

    Pages without further settings share a context and, as one of them stays open, a process: to
    start these takes longer than most tests.
    """
    context = browser.new_context(**settings) if settings else browser.contexts[0]
    if not settings and not context.pages:
        context.new_page().goto(urljoin(url, "/live"))
    page = context.new_page()
    if color_scheme or reduced_motion:
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
    if script is not None:
        page.add_init_script(script)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.extend(error_text(message)))
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    return page, errors


def close_page(page: Page) -> None:
    """Close it, and forget what it has stored."""
    context, browser = page.context, page.context.browser
    assert browser is not None
    if context != browser.contexts[0]:
        context.close()
        return
    origin = {"origin": page.evaluate("origin"), "storageTypes": "all"}
    context.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
    context.set_offline(False)
    page.close()


@contextmanager
def opening(browser: Browser, url: str, script: str | None = None) -> Iterator[OpenPage]:
    """Opens pages below `url`; what a test does not name in `allowed` must not be in a console."""
    opened: list[tuple[Page, list[str], tuple[str, ...]]] = []

    def open_it(path: str = "/", allowed: tuple[str, ...] = (), **settings: Any) -> Page:
        page, errors = open_page(browser, url + path, script, **settings)
        opened.append((page, errors, allowed))
        return page

    yield open_it
    for page, _, _ in opened:
        close_page(page)
    unexpected = [
        error
        for _, errors, allowed in opened
        for error in errors
        if not any(part in error for part in allowed)
    ]
    assert unexpected == []


@contextmanager
def served(shop: Shop) -> Iterator[str]:
    """The address of a shop that answers in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(shop.app(), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(STOP_S)


@pytest.fixture(scope="module")
def shop_server() -> Iterator[tuple[Shop, str]]:
    shop = Shop()
    with served(shop) as url:
        yield shop, url


@pytest.fixture
def fake_shop(shop_server: tuple[Shop, str]) -> Shop:
    """The shop behind `shop_page`, as if new."""
    shop = shop_server[0]
    shop.reset()
    return shop


@pytest.fixture
def open_shop(
    browser: Browser, fake_shop: Shop, shop_server: tuple[Shop, str]
) -> Iterator[OpenShop]:
    """Opens the shop's page."""
    with opening(browser, shop_server[1]) as open_it:
        yield open_it


@pytest.fixture
def shop_page(open_shop: OpenShop) -> Page:
    """The start of the shop's page."""
    page = open_shop()
    expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
    return page


def send_files(page: Page, how: str, *files: tuple[str, str, bytes]) -> None:
    """Drop or paste files, each (name, media type, bytes)."""
    coded = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    page.evaluate(SEND_FILES, [how, coded])


def send_bytes(page: Page, how: str, name: str, media_type: str, data: bytes) -> None:
    send_files(page, how, (name, media_type, data))


def send(page: Page, image: Path, how: str = "drop") -> None:
    send_bytes(page, how, image.name, MEDIA_TYPES[image.suffix.lower()], image.read_bytes())


def drop_item(page: Page, shop: Shop, number: int) -> None:
    """Drop the picture of an item and wait for the answer."""
    item = shop.galleries["shop"][number]
    send_bytes(page, "drop", f"mine-{number}.png", "image/png", item.data)
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text(f"mine-{number}.png")


def settled(page: Page) -> None:
    """Waits until nothing is under way and results are there."""
    expect(page.locator("body")).to_have_attribute("data-state", "results")
    expect(page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")


def keys(page: Page) -> list[str]:
    """The keys of the cards that are shown, best first."""
    cards = page.get_by_test_id("card").filter(visible=True).all()
    return [card.get_attribute("data-key") or "" for card in cards]


def until(page: Page, expression: str) -> None:
    """Polls from outside: what Playwright would poll with inside, the page's rules forbid."""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def tab_to(page: Page, test_id: str, limit: int = 40) -> None:
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == test_id:
            return
    pytest.fail(f"{test_id} was not reached with {limit} presses of Tab")


def drop_many(page: Page, shop: Shop, count: int, broken: int | None = None) -> None:
    """Drop pictures 0.png, 1.png .. of the first items; one of them may be no image."""
    stock = shop.galleries["shop"]
    data = [b"no image" if n == broken else stock[n % 24].data for n in range(count)]
    send_files(page, "drop", *((f"{n}.png", "image/png", d) for n, d in enumerate(data)))
