"""What people complain about in other services, as far as no other test proves it.

docs/bar.md names the test of each line.
"""

import io
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.settings import Settings
from tests.support.odd_images import claiming
from tests.support.own_process import ROOT, OwnProcess, own_process
from tests.support.servers import DEFAULTS, Running, create_app, run
from tests.support.shops import Shop, base64_of, make_gallery, start_shop
from tests.tiny import encoded, photo

TIMES = 7
LARGE = (6000, 4000)  # 72 MB of pixels
LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
SECRET = "only the operator may read this"


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What another service on this machine was asked for, which nobody may be made to ask."""
    return []


@pytest.fixture(scope="module")
def canary(asked: list[str]) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_POST = do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/picture.png"
        assert httpx.get(url).status_code == 404
        assert asked.pop() == "/picture.png"
        yield url
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the state of the shop and a file that is no business of its clients."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "secret.png").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def shop(place: Path) -> Iterator[Shop]:
    found = start_shop(place / "state")
    found.put({f"{n}.png": encoded(photo(n)) for n in range(4)}, colour="red")
    yield found
    found.close()


def fields_of_text(text: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Every place of the interface that takes a text, with `text` in it."""
    good = base64_of(encoded(photo(0)))
    image = {"image": encoded(photo(0))}
    item = {"key": "k", "data": good, "attributes": {}}
    put, search = ("PUT", "/galleries/shop/items"), ("POST", "/search")
    return {
        "the body": (*search, {"content": text, "headers": {"Content-Type": "image/png"}}),
        "an image": (*search, {"data": {"image": text}}),
        "a file": (*search, {"files": {"image": text.encode()}}),
        "a file name": (*search, {"files": {"image": (text, text.encode(), "image/png")}}),
        "base64": (*search, {"json": {"images": [{"data": text}]}}),
        "a gallery": (*search, {"files": image, "data": {"gallery": text}}),
        "a like": (*search, {"data": {"positive": text}, "files": image}),
        "a dislike": (*search, {"data": {"negative": text}, "files": image}),
        "a filter": (*search, {"data": {"filter": text}, "files": image}),
        "a group": (*search, {"data": {"group_by": text}, "files": image}),
        "a crop": (*search, {"data": {"crop": text}, "files": image}),
        "a query string": (*search, {"params": {"image": text}, "content": b"x"}),
        "an item": (*put, {"json": {"items": [item | {"data": text}]}}),
        "an item as a file": (*put, {"files": {"image": text.encode()}, "data": {"key": "k"}}),
        "attributes": (*put, {"files": image, "data": {"key": "k", "attributes": text}}),
        "a patched key": ("PATCH", put[1], {"json": {"changes": {text: {"a": 1}}}}),
        "a new gallery": ("POST", "/galleries", {"json": {"name": text}}),
        "a bundle": ("POST", "/galleries", {"json": {"name": "new", "bundle_id": text}}),
        "a swap": ("POST", "/galleries/shop/swap", {"json": {"with": text}}),
        "a rebuild": ("POST", "/galleries/shop/rebuild", {"json": {"bundle_id": text}}),
        "data to train on": (
            *("POST", "/jobs/train", {"json": {"job": "shop", "gallery": "shop", "data": text}}),
        ),
        "a training": ("POST", "/jobs/train", {"json": {"job": text, "gallery": "shop"}}),
        "a job": ("GET", f"/jobs/{quote(text, safe='')}/log", {}),
    }


@pytest.mark.parametrize(
    "text",
    [
        "{url}",
        "{bare}",
        "file://{secret}",
        "{secret}",
        "../../../../../../../../../../../..{secret}",
        "..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2f{secret}",
    ],
)
def test_no_text_of_a_client_makes_the_service_ask_an_address_or_open_a_file(
    shop: Shop, canary: str, asked: list[str], place: Path, text: str
) -> None:
    before = sorted(path.name for path in place.iterdir())
    bare = canary.removeprefix("http:")
    text = text.format(url=canary, bare=bare, secret=place / "secret.png")
    for where, (method, path, sent) in fields_of_text(text).items():
        answer = shop.client.request(method, path, **sent)
        assert 400 <= answer.status_code < 500, f"{where}: {answer.status_code} {answer.text}"
        assert SECRET not in answer.text
    assert asked == []
    assert sorted(path.name for path in place.iterdir()) == before


def test_an_item_that_is_named_like_a_file_or_an_address_is_only_named_so(
    shop: Shop, canary: str, asked: list[str], place: Path
) -> None:
    secret = place / "secret.png"
    for key in (canary, secret.as_uri(), str(secret), f"../../{secret.name}"):
        answer = shop.put_json([{"key": key, "data": base64_of(encoded(photo(9)))}])
        if answer.status_code != 200:
            assert answer.status_code == 422
            continue
        found = shop.items(key_prefix=key)["items"][0]
        shown = shop.client.get(found["image"])
        assert shown.status_code == 200
        assert SECRET.encode() not in shown.content
        assert Image.open(io.BytesIO(shown.content)).size == photo(9).size
    assert asked == []


def test_a_file_that_claims_65535_px_is_refused_as_fast_as_a_small_image_is_found(
    shop: Shop,
) -> None:
    bombs = [claiming(65_535, 65_535) + bytes([n]) for n in range(TIMES)]
    small = [encoded(photo(100 + n)) for n in range(TIMES)]
    calls = [
        [timed(lambda data=data: shop.running.search(data)) for data in pair]
        for pair in zip(bombs, small, strict=True)
    ]
    refused, found = zip(*calls, strict=True)
    assert {answer.status_code for _, answer in refused} == {413}
    assert {answer.status_code for _, answer in found} == {200}
    fastest = min(seconds for seconds, _ in refused)  # other work makes some of both slow
    assert fastest < 3 * median(found)


def timed(call: Callable[[], httpx.Response]) -> tuple[float, httpx.Response]:
    started = time.perf_counter()
    answer = call()
    return time.perf_counter() - started, answer


def median(calls: list[tuple[float, httpx.Response]]) -> float:
    return statistics.median(seconds for seconds, _ in calls)


def test_a_service_that_was_restarted_answers_as_before(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    answers = []
    for _ in range(2):
        settings = {"bundle": tiny_bundle.path, "state": tmp_path, "anonymous_scopes": ("admin",)}
        shop = Shop(run(create_app(Settings(**DEFAULTS | settings))), tmp_path)
        if not answers:
            shop.client.post("/galleries", json={"name": "shop"}).raise_for_status()
            shop.put({f"{n}.png": encoded(photo(n)) for n in range(6)}, colour="red")
            shop.client.delete("/galleries/shop/items", params={"key": "5.png"})
        found = shop.running.search(encoded(photo(3)), k=10).json()
        answers.append((found["gallery_version"], found["bundle_id"], found["hits"]))
        shop.close()
    assert answers[0] == answers[1]
    assert len(answers[0][2]) == 5


@pytest.fixture(scope="module")
def process(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnProcess]:
    log = tmp_path_factory.mktemp("process") / "log"
    with own_process(log, bundle=tiny_bundle.path, galleries=f"shop={tiny_gallery}") as process:
        yield process


def test_large_images_leave_no_memory_behind(process: OwnProcess) -> None:
    """All of them leave less than half of one."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    large = encoded(Image.fromarray(noise).resize(LARGE), "JPEG", quality=60)

    def search(number: int) -> None:
        # Cropped, it is decoded in full.
        data = {"crop": "0.1,0.1,0.01,0.01"}
        files = {"image": large + number.to_bytes(4, "big")}
        httpx.post(f"{process.url}/search", files=files, data=data, timeout=60).raise_for_status()

    for number in range(4):
        search(number)
    before = process.memory_mb()
    for number in range(4, 34 if LONG else 14):
        search(number)
    assert process.memory_mb() - before < LARGE[0] * LARGE[1] * 3 / 1e6 / 2


def test_a_second_crowd_starts_no_further_thread(process: OwnProcess) -> None:
    def clients(first: int) -> int:
        files = [{"image": encoded(photo(first + n))} for n in range(48)]
        with httpx.Client(timeout=60) as client, ThreadPoolExecutor(48) as threads:
            url = f"{process.url}/search"
            calls = [threads.submit(client.post, url, files=file) for file in files]
            assert {call.result().status_code for call in calls} == {200}
        return process.threads()

    before = clients(0)
    assert clients(1000) <= before + 2
    assert before < 100


@pytest.fixture
def long_shop(tmp_path: Path) -> Iterator[Running]:
    """A gallery of 4,000 items."""
    make_gallery(tmp_path / "shop", "item", count=4_000)
    settings = Settings(**DEFAULTS, galleries=(f"shop={tmp_path / 'shop'}",))
    service = run(create_app(settings, FakeEmbedder(dim=32)))
    yield service
    service.close()


def test_a_hit_of_a_long_answer_costs_no_more_than_one_of_a_short_answer(
    long_shop: Running,
) -> None:
    calls: dict[int, list[tuple[float, httpx.Response]]] = {10: [], 4_000: []}
    for number in range(TIMES):
        for k, found in calls.items():
            data = encoded(photo(number * 2 + (k > 10)))
            found.append(timed(lambda data=data, k=k: long_shop.search(data, k=k)))
    for k, found in calls.items():
        assert {answer.json()["count"] for _, answer in found} == {k}
    assert median(calls[4_000]) / 4_000 < median(calls[10]) / 10


def test_every_proof_and_benchmark_that_a_page_names_is_there() -> None:
    page = (ROOT / "docs" / "bar.md").read_text("utf-8")
    rows = re.findall(r"^\| (?!line|complaint)([A-Z0-9`].+?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 30
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    benchmarks = set(re.findall(r"benchmarks/[\w/]+\.py", text))
    assert [name for name in sorted(benchmarks) if not (ROOT / name).is_file()] == []
    for line, proof in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", proof)
        assert named or "make " in proof, line
        assert [name for name in named if not (ROOT / name).is_file()] == [], line


def test_make_bench_runs_every_benchmark() -> None:
    listed = (ROOT / "benchmarks" / "__main__.py").read_text("utf-8")
    scripts = {path.name for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    scripts -= {"clustered.py", "harness.py", "load.py"}  # they are imported
    assert [name for name in sorted(scripts) if f'"{name}' not in listed] == []
    command = [sys.executable, ROOT / "benchmarks", "mistyped.py"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "mistyped.py: no such benchmark; there are additions.py, clutter.py" in refused.stderr
