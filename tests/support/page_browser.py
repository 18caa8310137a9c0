"""A real Chromium for tests of the pages: what people do in it, what axe-core finds wrong.

`$KINLENS_CHROMIUM` names the browser; otherwise the first of chromium-headless-shell, chromium,
chromium-browser and google-chrome on the path is used.
"""

import base64
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from tests.support.page_shop import Shop

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
RULES = {
    "light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}
if LONG:
    RULES["dark"] = ["color-contrast"]  # colours are all that the dark page has of its own
RUN_AXE = """async ([part, runOnly]) => (await axe.run(
        { include: part, exclude: "[data-testid=card]:nth-of-type(n+5)" },  // more of the same
        { runOnly, resultTypes: ["violations"], selectors: false })).violations
    .map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" | ")}`)"""
SMALL_TARGETS = """() => [...document.querySelectorAll(
        "button, a[href], select, summary, label.option, input")]
    .filter((node) => node.checkVisibility({ visibilityProperty: true }))
    .filter((node) => !node.matches(".skip, label input"))
    .map((node) => [node, node.getBoundingClientRect()])
    .filter(([, { width, height }]) => width > 1 && (width < 43.5 || height < 43.5))
    .map(([node, { width, height }]) => `${node.outerHTML.slice(0, 80)} ${width} x ${height}`)"""
FITS = "document.scrollingElement.scrollWidth <= innerWidth"
WIDTHS_PX = (320, 360, 768, 1024, 1920) if LONG else (320, 1024)
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}
FOCUSED = "document.activeElement?.dataset.testid"
SEND_FILES = """([how, where, files]) => {
    const transfer = new DataTransfer();
    for (const [name, type, base64] of files) {
        const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type }));
    }
    const options = { bubbles: true, cancelable: true };
    document.querySelector(where).dispatchEvent(how === "drop"
        ? new DragEvent("drop", { ...options, dataTransfer: transfer })
        : new ClipboardEvent("paste", { ...options, clipboardData: transfer }));
}"""
OPTIONS = [
    "--no-sandbox",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--process-per-site",
]
STILL: dict[str, Any] = {"reduced_motion": "reduce"}  # to draw motion takes much of a core
STOP_S = 20.0
WAIT_MS = 20_000
OpenPage = Callable[..., Page]


def find_chromium() -> str | None:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    found = (path for name in names if (path := shutil.which(name)))
    return os.environ.get("KINLENS_CHROMIUM") or next(found, None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a folder. Its event loop ends with them: others run their own.

    A page without settings of its own lives in the browser's first context, where one page stays
    open and with it a process: to start these takes longer than most tests.
    """
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install one or name it in KINLENS_CHROMIUM")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        browser.new_context(**STILL).new_page()
        yield browser
        browser.close()


@contextmanager
def opening(
    browser: Browser,
    url: str,
    allowed: Sequence[str] = (),
    before: Callable[[Page], None] | None = None,
) -> Iterator[OpenPage]:
    """Opens pages below `url` with nothing stored; `before` prepares them.

    Consoles may log only errors that contain a text of `allowed`.
    """
    shared = browser.contexts[0]
    opened: list[Page] = []
    errors: list[str] = []

    def note_error(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    def open_it(
        path: str = "/",
        before: Callable[[Page], None] | None = before,
        color_scheme: Any = None,
        reduced_motion: Any = None,
        **settings: Any,
    ) -> Page:
        page = (browser.new_context(**STILL | settings) if settings else shared).new_page()
        opened.append(page)
        page.set_default_timeout(WAIT_MS)
        if color_scheme or reduced_motion:
            page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", note_error)
        if before is not None:
            before(page)
        page.goto(url + path)
        return page

    yield open_it
    for page in opened:
        if page.context == shared:
            origin = {"origin": page.evaluate("origin"), "storageTypes": "all"}
            shared.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
            page.close()
        else:
            page.context.close()
    shared.set_offline(False)
    unexpected = [error for error in errors if not any(part in error for part in allowed)]
    assert not unexpected, unexpected


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


def send_files(
    page: Page, *files: tuple[str, str, bytes], how: str = "drop", where: str = "[data-testid=drop]"
) -> None:
    """Drop or paste files, each (name, media type, bytes)."""
    coded = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    page.evaluate(SEND_FILES, [how, where, coded])


def send_image(page: Page, data: bytes, name: str = "query.png", how: str = "drop") -> None:
    send_files(page, (name, "image/png", data), how=how)


def drop_item(page: Page, shop: Shop, number: int) -> None:
    """Drop the image of an item and wait for the answer."""
    send_image(page, shop.galleries["shop"][number].data, f"mine-{number}.png")
    settled(page)
    expect(page.get_by_test_id("query-name")).to_have_text(f"mine-{number}.png")


def searched(open_page: OpenPage, shop: Shop, path: str = "/", **settings: Any) -> Page:
    """Open the start and drop the image of the first item."""
    page = open_page(path, **settings)
    expect(page.get_by_test_id("sample")).to_have_count(8)
    drop_item(page, shop, 0)
    return page


def drop_many(page: Page, shop: Shop, count: int, broken: int | None = None) -> None:
    """Drop the images 0.png, 1.png .. of the first items. The file `broken` is not an image."""
    stock = shop.galleries["shop"]
    data = [b"no image" if n == broken else stock[n % 24].data for n in range(count)]
    send_files(page, *((f"{n}.png", "image/png", d) for n, d in enumerate(data)))


def settled(page: Page) -> None:
    """Waits until no search runs and the results are shown."""
    expect(page.locator("body")).to_have_attribute("data-state", "results")
    expect(page.get_by_test_id("results")).to_have_attribute("aria-busy", "false")


def search_with_card(page: Page, number: int) -> None:
    """Search with the item of a card."""
    page.get_by_test_id("card-search").nth(number).click()
    expect(page.get_by_test_id("query-kind")).to_have_text("Searching with the item")
    settled(page)


def judge(page: Page, verdict: str, number: int, chips: int) -> None:
    """Like or dislike a card; wait until that many chips are there and the answer has come."""
    page.get_by_test_id(verdict).nth(number).click()
    expect(page.get_by_test_id("chip")).to_have_count(chips)
    settled(page)


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


def intercept(page: Page, pattern: str, times: int | None = None) -> list[Route]:
    """The next requests to matching URLs, which wait until the test continues them."""
    pending: list[Route] = []

    def collect(route: Route) -> None:
        pending.append(route)

    page.route(pattern, collect, times=times)
    return pending


def received(page: Page, pending: Sequence[Route], count: int) -> None:
    """Wait until `count` requests were intercepted."""
    for _ in range(WAIT_MS // 50):
        if len(pending) >= count:
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{len(pending)} requests came, not {count}")


def tab_to(page: Page, test_id: str, limit: int = 40) -> None:
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == test_id:
            return
    pytest.fail(f"{test_id} was not reached with {limit} presses of Tab")


def violations(page: Page, part: str = "html") -> list[str]:
    """What axe-core finds wrong with the page, or a part, as it is now, in light, and in a long run
    also in dark; without motion, since it would meet colours on their way.
    """
    found: list[str] = []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        found += page.evaluate(RUN_AXE, [part, rules])
    page.emulate_media(color_scheme="light")
    return found


def faults(page: Page) -> list[object]:
    """What axe-core finds wrong with the page, and the widths at which it scrolls sideways."""
    return [*violations(page), *too_wide(page)]


def too_wide(page: Page) -> list[int]:
    """The widths at which the page as it is now scrolls sideways."""
    found, before = [], page.viewport_size
    for width_px in WIDTHS_PX:
        page.set_viewport_size({"width": width_px, "height": 800})
        if not page.evaluate(FITS):
            found.append(width_px)
    if before:
        page.set_viewport_size(before)
    return found
