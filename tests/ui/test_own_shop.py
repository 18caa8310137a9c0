"""A shop on another origin: the element and the JavaScript of docs/own-shop.md, in a browser."""

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.own_process import ROOT
from tests.support.page_browser import AXE, RUN_AXE, opening
from tests.support.seams import KeyStore
from tests.support.shops import start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

pytestmark = pytest.mark.browser

POLICY = "default-src 'none'; script-src 'self' {0}; connect-src {0}; img-src {0} data:"
LOADED = "(images) => images.every((image) => image.complete && image.naturalWidth > 0)"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A service that answers keys alone, and the web server of a shop with a strict policy."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", POLICY.format(made.url))
            super().end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    keys = KeyStore(tmp_path / "state" / "keys.json")
    admin, public = keys.create("owner", ["admin"]), keys.create("shop-page", ["search"])
    shop = start_shop(
        tmp_path / "state",
        create=False,
        anonymous_scopes=(),
        cors_origins=(origin,),
        image_links="signed",
        product_url="/p/{product}",
    )
    shop.client.headers["X-API-Key"] = admin
    shop.create("shop")
    for n in range(5):
        shop.put({f"{n}.png": encoded(photo(n))}, product=f"p {n}", title=f"Lamp {n}", price=2.5)
    made = SimpleNamespace(url=shop.running.url.rstrip("/"), origin=origin, key=public)
    made.folder, made.keys, made.shop = folder, keys, shop
    yield made
    shop.close()
    server.shutdown()
    server.server_close()


def write(world: SimpleNamespace, body: str, script: str = "") -> None:
    head = '<!doctype html><html lang="en"><title>Shop</title><link rel="icon" href="data:,">'
    (world.folder / "index.html").write_text(f"{head}<main><h1>Shop</h1>{body}</main>")
    (world.folder / "shop.js").write_text(script)


def choose(page: Page, data: bytes) -> None:
    page.locator("input[type=file]").set_input_files(
        {"name": "photo.png", "mimeType": "image/png", "buffer": data}
    )


def test_the_element_finds_products_of_a_photo_and_leads_to_the_shop(
    browser: Browser, world: SimpleNamespace
) -> None:
    tag = f'<kinlens-search key="{world.key}" gallery="shop" k="3" label="Foto suchen">'
    write(world, f'<script src="{world.url}/ui/widget.js"></script>{tag}</kinlens-search>')
    with opening(browser, world.origin, allowed=["415", "kinlens-search: "]) as open_it:
        page = open_it("/", locale="de-DE")
        expect(page.get_by_text("Foto suchen")).to_be_visible()
        choose(page, encoded(photo(2)))
        links = page.locator("kinlens-search a")
        expect(links).to_have_count(3)
        assert links.first.evaluate("(a) => a.href") == f"{world.origin}/p/p%202"
        expect(links.first).to_contain_text("Lamp 2")
        expect(links.first).to_contain_text("2,5")
        images = page.locator("kinlens-search img")
        images.last.scroll_into_view_if_needed()
        until(lambda: images.evaluate_all(LOADED))
        page.evaluate(AXE)
        assert page.evaluate(RUN_AXE, ["html", ["wcag2a", "wcag2aa", "best-practice"]]) == []
        choose(page, b"not an image")
        expect(page.get_by_role("status")).to_contain_text("cannot be read as a photo")
        expect(links).to_have_count(0)


def test_the_element_shows_products_and_names_what_is_wrong_with_it(
    browser: Browser, world: SimpleNamespace
) -> None:
    photos = {f"2-{n}.png": encoded(photo(2).rotate(n)) for n in (1, 2)}
    world.shop.put(photos, product="p 2", title=" ")
    world.shop.put({"none.png": encoded(photo(7))}, product=" ", title="")
    tag = f'<kinlens-search key="{world.key}" gallery="shop" k="5"></kinlens-search>'
    write(world, f'<script src="{world.url}/ui/widget.js"></script>{tag}')
    with opening(
        browser, world.origin, allowed=["400", "404", "422", "kinlens-search: "]
    ) as open_it:
        page = open_it("/")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        element, status = page.locator("kinlens-search"), page.get_by_role("status")
        results = element.locator("li")

        def search(data: bytes, **attributes: str) -> None:
            for name, value in attributes.items():
                arguments = [name.replace("_", "-"), value]
                element.evaluate("(e, [name, value]) => e.setAttribute(name, value)", arguments)
            choose(page, data)

        search(encoded(photo(2)))
        expect(results).to_have_count(5)
        links = element.locator("a").evaluate_all("(all) => all.map((a) => a.href)")
        assert len(set(links)) == len(links)  # one for each product
        search(encoded(photo(7)), k="1")
        expect(results).to_have_text("none.png")
        expect(element.locator("a")).to_have_count(0)
        assert len([url for url in asked if url.endswith("/galleries/shop")]) == 1
        search(encoded(photo(2)), k="3", group_by="")
        expect(element.locator("a[href$='p%202']")).to_have_count(3)
        search(encoded(photo(2)), k="10", group_by="price")
        expect(results).to_have_count(4)  # one price, and three without one
        for wrong in ({"group_by": "nope"}, {"group_by": "", "filter": "price <"}, {"k": "many"}):
            search(encoded(photo(2)), **wrong)
            expect(status).to_contain_text("Please tell the shop")
            search(encoded(photo(2)), k="1", filter="price = 2.5", group_by="")
            expect(results).to_have_count(1)
        search(b"")
        expect(status).to_contain_text("cannot be read as a photo")
        search(encoded(photo(2)), gallery="gone")
        expect(status).to_contain_text("Please tell the shop")


def test_the_element_of_a_module_needs_the_address_and_explains_error_pages(
    browser: Browser, world: SimpleNamespace
) -> None:
    world.shop.put(
        {"9.png": encoded(photo(9))}, product="9", cost_price="4 francs", Price="9 francs"
    )
    tag = f'<kinlens-search key="{world.key}" gallery="shop" service="{world.url}">'
    script = '<script src="/shop.js"></script>'
    script += f'<script type="module" src="{world.url}/ui/widget.js"></script>'
    listen = "addEventListener('kinlens-error', (event) => { window.problem = event.detail; });"
    write(world, f"{script}{tag}</kinlens-search>", listen)
    with opening(browser, world.origin, allowed=["502", "kinlens-search: "]) as open_it:
        page = open_it("/")
        choose(page, encoded(photo(9)))
        expect(page.locator("kinlens-search a").first).to_contain_text("9 francs")
        expect(page.locator("kinlens-search")).not_to_contain_text("4 francs")
        headers = {"Access-Control-Allow-Origin": "*"}
        answer = {"status": 502, "headers": headers, "body": "<h1>Bad gateway</h1>"}
        page.route("**/search", lambda route: route.fulfill(**answer))
        choose(page, encoded(photo(9)))
        expect(page.get_by_role("status")).to_contain_text("does not work right now")
        problem = page.evaluate("problem")
        assert problem["status"] == 502
        assert "is not JSON" in problem["detail"]


def test_the_javascript_of_the_page_shows_results_until_the_key_is_revoked(
    browser: Browser, world: SimpleNamespace
) -> None:
    text = (ROOT / "docs" / "own-shop.md").read_text(encoding="utf-8")
    script = text.split("```js\n")[1].split("```")[0]
    script = script.replace("https://search.example", world.url).replace("kl_...", world.key)
    assert world.key in script
    write(world, '<label>Photo <input type="file"></label><div id="results"></div>', script)
    page_text = (world.folder / "index.html").read_text()
    (world.folder / "index.html").write_text(f'{page_text}<script src="shop.js"></script>')
    with opening(browser, world.origin) as open_it:
        page = open_it()
        choose(page, encoded(photo(1)))
        images = page.locator("#results img")
        expect(images).to_have_count(5)
        until(lambda: images.evaluate_all(LOADED))
        link = images.first.evaluate("(image) => image.src")
        assert page.locator("#results a").first.get_attribute("href") == "/p/p%201"
    shop = world.shop
    del shop.client.headers["X-API-Key"]
    path = link.removeprefix(world.url)
    assert shop.client.get(path).status_code == 200
    world.keys.revoke("shop-page")
    until(lambda: shop.client.get(path).status_code == 401)
