"""The service below a path prefix: every address in an answer begins with it."""

import re
from base64 import b64encode
from urllib.parse import urljoin

import httpx
import pytest

from kinlens.client import Client
from kinlens.service.settings import Settings
from tests.support.routes import rights_of
from tests.support.servers import Running
from tests.support.shops import Shop, start_shop

PROXY = {"trusted_proxies": ("127.0.0.1",)}
SET, SENT = {"prefix": "/visual/"}, {"X-Forwarded-Prefix": "/visual"}


def get(service: Running, path: str, headers: dict[str, str]) -> httpx.Response:
    return service.client.get(path, headers=headers)


def linked(page: str) -> list[str]:
    """The addresses in a page, as a browser at /visual/... resolves them."""
    found = re.findall(r'(?:href|src)="([^"#][^"]*)"', page)
    return [urljoin("/visual/docs", link) for link in found]


@pytest.mark.parametrize(
    ("settings", "headers", "strips"), [(SET, {}, True), (SET, {}, False), (PROXY, SENT, True)]
)
def test_every_address_begins_with_the_prefix(tmp_path, closes, photos, settings, headers, strips):
    shop: Shop = closes(start_shop(tmp_path / "state", **settings))
    shop.put({"a.png": photos[0]})
    inside = "" if strips else "/visual"

    def fetch(link: str) -> httpx.Response:
        assert link.startswith("/visual/"), link
        return get(shop.running, link.removeprefix("/visual") if strips else link, headers)

    for name in ("/", "/admin", "/docs"):
        page = get(shop.running, inside + name, headers)
        links = linked(page.text)
        assert len(links) > 2
        for link in links:
            assert fetch(link).status_code == 200, link
        if name != "/":
            slashed = get(shop.running, f"{inside}{name}/?a=%20b", headers)
            assert slashed.status_code == 308
            target = urljoin(f"/visual{name}/", slashed.headers["location"])
            assert target == f"/visual{name}?a=%20b"
            assert fetch(target).text == page.text
    files = {"image": photos[0]}
    for _ in range(2):  # the second answer comes from the cache
        answer = shop.client.post(f"{inside}/search", files=files, headers=headers)
        assert fetch(answer.json()["hits"][0]["image"]).headers["content-type"] == "image/png"
    items = get(shop.running, f"{inside}/galleries/shop/items", headers).json()["items"]
    assert fetch(items[0]["image"]).status_code == 200
    document = get(shop.running, f"{inside}/openapi.json", headers).json()
    assert document["servers"] == [{"url": "/visual"}]
    made = shop.client.post(f"{inside}/galleries", json={"name": "spring"}, headers=headers)
    assert made.headers["location"] == "/visual/galleries/spring"
    assert fetch(made.headers["location"]).json()["name"] == "spring"
    started = shop.client.post(f"{inside}/galleries/shop/compact", json={}, headers=headers)
    assert fetch(started.headers["location"]).status_code == 200
    assert get(shop.running, f"{inside}/nowhere", headers).status_code == 404
    if not strips:
        bare = get(shop.running, "/visual", headers)
        assert (bare.status_code, bare.headers["location"]) == (308, "/visual/")
        with Client(f"{shop.running.url}/visual", transport=None) as client:
            assert client.search(photos[0]).hits[0].key == "a.png"


def test_answers_below_two_prefixes_are_not_mixed_up(start_service, photos) -> None:
    service = start_service(**PROXY)

    def link(*prefixes: str) -> str:
        headers = [("X-Forwarded-Prefix", prefix) for prefix in prefixes]
        sent = service.client.post("/search", files={"image": photos[0]}, headers=headers)
        return str(sent.json()["hits"][0]["image"])

    assert link("/a").startswith("/a/galleries/")
    assert link().startswith("/galleries/")
    assert link("/a, /b").startswith("/a/b/galleries/")
    for bad in ("//evil.example", "/a/../b", "https://evil.example", "/a b", '/"', "/", "/x" * 200):
        assert link(bad).startswith("/galleries/"), bad


def test_only_a_trusted_proxy_sets_the_prefix(start_service, photos) -> None:
    headers = {"X-Forwarded-Prefix": "/sent"}
    for settings, expected in (
        ({"prefix": "/visual"}, "/visual/galleries/"),
        ({"trusted_proxies": ("10.0.0.1",)}, "/galleries/"),
        ({}, "/sent/galleries/"),  # from this machine
    ):
        service = start_service(**settings)
        answer = service.client.post("/search", files={"image": photos[0]}, headers=headers)
        assert answer.json()["hits"][0]["image"].startswith(expected)


def test_a_prefix_of_a_header_is_not_removed_from_a_path(start_service) -> None:
    """A proxy that blocks /metrics passes on /x/metrics, with a header of its client."""
    for settings in ({}, PROXY, SET | PROXY):
        service = start_service(**settings)
        for prefix in ("/x", "/ui/x", "/x/y"):
            headers = {"X-Forwarded-Prefix": prefix}
            for path in ("/metrics", "/ready", "/live", ""):
                assert get(service, prefix + path, headers).status_code == 404, prefix + path


@pytest.mark.parametrize(
    "text", ["visual", "/a b", "//a", "/a/../b", "https://a", "/ui", "/x" * 200]
)
def test_another_prefix_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(ValueError, match="such as /visual"):
        Settings(prefix=text)


def test_only_a_forwarded_prefix_may_begin_like_a_route(start_service, photos) -> None:
    """A path could be a route or begin with the prefix; the forwarded one only changes links."""
    service = start_service()
    words = {route.split("/")[1] for route in rights_of(service.app)}
    assert {"search", "ui", "openapi.json"} <= words
    for word in words - {""}:
        for prefix in (f"/{word}", f"/{word}/shop"):
            with pytest.raises(ValueError, match="such as /visual"):
                Settings(prefix=prefix)
        assert Settings(prefix=f"/shop/{word}").prefix == f"/shop/{word}"
    headers = {"X-Forwarded-Prefix": "/search"}
    answer = service.client.post("/search", files={"image": photos[0]}, headers=headers)
    assert answer.json()["hits"][0]["image"].startswith("/search/galleries/")


def test_files_are_compressed_and_kept_for_ever_below_their_checksum(running_service) -> None:
    client = running_service.client
    page = client.get("/", headers={"Accept-Encoding": "identity"})
    assert page.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"If-None-Match": page.headers["etag"], "Accept-Encoding": ""})
    assert (again.status_code, again.content) == (304, b"")
    [app] = re.findall(r'<script type="module" src="([^"]+)"', page.text)
    early = re.findall(r'rel="modulepreload" href="([^"]+)"', page.text)
    todo, modules = [app], set()
    while todo:  # what a browser loads
        module = todo.pop()
        if module in modules:
            continue
        modules.add(module)
        script = client.get(f"/{module}")
        assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert (script.headers.get("content-encoding") == "gzip") is (len(script.content) >= 500)
        assert script.headers["vary"] == "Accept-Encoding"
        names = re.findall(r'^import [^;]*?"([^"]+)";', script.text, re.MULTILINE)
        todo += [urljoin(module, name) for name in names]
    assert modules - {app} == set(early)
    stable = client.get("/ui/search/app.js")
    assert stable.content == client.get(f"/{app}").content
    assert stable.headers["cache-control"] == "no-cache"
    for old in ("/ui/0123456789ab/search/app.js", "/ui/search/app.js"):
        assert client.get(old).headers["cache-control"] == "no-cache"
    for refused in ("gzip;q=0", "gzip; q=0.0, identity", "br", "*;q=0", ""):
        plain = client.get("/ui/search/app.js", headers={"Accept-Encoding": refused})
        assert "content-encoding" not in plain.headers, refused
        assert plain.headers["etag"] != stable.headers["etag"]
    for path in ("/docs", "/openapi.json"):
        assert client.get(path).headers["content-encoding"] == "gzip"


def test_long_texts_are_compressed_for_clients_that_accept_it(running_service, photos) -> None:
    client = running_service.client
    query = {"images": [{"data": b64encode(photos[0]).decode()}]}

    def batch(accepted: str) -> httpx.Response:
        headers = {"Accept-Encoding": accepted}
        return client.post("/search/batch", json={"queries": [query] * 9}, headers=headers)

    for accepted in ("gzip", "br, GZip;q=0.5", "*"):
        answer = batch(accepted)
        assert answer.headers["content-encoding"] == "gzip", accepted
        assert "Accept-Encoding" in answer.headers["vary"]
        assert len(answer.json()["answers"]) == 9
    for refused in ("gzip;q=0", "br", "identity", "gzip; q=0.000, *"):
        plain = batch(refused)
        assert "content-encoding" not in plain.headers, refused
        assert "Accept-Encoding" in plain.headers["vary"], refused
    for path in ("/live", "/galleries/shop/items/0/image"):  # short, an image
        assert "content-encoding" not in client.get(path).headers


def test_a_page_of_another_origin_can_read_an_unexpected_error(
    start_service, gallery, photos, monkeypatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(gallery, "search", fail)
    service = start_service(cors_origins=("https://shop.example",))
    headers = {"Origin": "https://shop.example"}
    answer = service.client.post("/search", files={"image": photos[0]}, headers=headers)
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == "https://shop.example"
