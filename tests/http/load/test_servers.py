"""The application on three servers: the same requests get the same answers."""

import gzip
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.framings import (
    LAST,
    READABLE,
    UNREADABLE,
    UPGRADES,
    answers,
    is_split,
    request,
    requests,
)
from tests.support.own_process import ROOT, SERVE, environment
from tests.support.seams import KeyStore, Limits
from tests.support.servers import WAIT_S, free_port
from tests.support.waiting import until
from tests.tiny import encoded, photo

APP = "kinlens.service.app:create_app"
# Where the package websockets is installed, uvicorn would never answer a POST with its upgrade.
PLAIN = ("--http", "h11", "--ws", "none", "--log-level", "warning")
SERVERS = {
    "kinlens-serve": SERVE,
    "uvicorn": ("-m", "uvicorn", "--factory", APP, *PLAIN),
    "granian": ("-m", "granian", "--factory", APP, "--interface", "asgi", "--no-ws", "--no-log"),
}
# kinlens-serve is uvicorn with a start of our own: alone it is tried at length.
NORMAL = [pytest.param(s, marks=pytest.mark.long) if s == "uvicorn" else s for s in SERVERS]
IMAGE = encoded(photo(3))
MIB = 2**20
PNG = {"Content-Type": "image/png"}
REQUESTS: tuple[tuple[int, str, str, dict[str, Any]], ...] = (
    (200, "GET", "/live", {}),
    (200, "HEAD", "/live", {}),
    (200, "GET", "/", {}),
    (200, "GET", "/galleries/shop/items/3/image", {}),
    (404, "GET", "/nowhere/%C3%A4?x=%20", {}),
    (405, "DELETE", "/search", {}),
    (200, "POST", "/search", {"files": {"image": IMAGE}, "data": {"k": "2"}}),
    (200, "POST", "/search", {"content": [IMAGE[:50], IMAGE[50:]], "headers": PNG}),
    (413, "POST", "/search", {"files": {"image": bytes(2 * MIB)}}),
    (422, "POST", "/search", {"json": {"k": 0}}),
    (431, "GET", "/live", {"headers": {"X-Filler": "a" * 17_000}}),
    (400, "GET", "/galleries", {"headers": {"Host": "elsewhere"}}),
)


@dataclass(frozen=True)
class Server:
    """A service that answers at `port`, and a key of the gallery `other`."""

    port: int
    key: str

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), WAIT_S)
        connection.sendall(sent)
        return connection


@pytest.fixture(scope="module", params=NORMAL)
def server(
    request: pytest.FixtureRequest,
    tiny_settings: dict[str, Any],
    tiny_gallery: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    port, state = free_port(), tmp_path_factory.mktemp("state")
    limits = Limits(galleries=("other",))
    key = KeyStore(state / "keys.json").create("mine", ["search"], limits=limits)
    command = [sys.executable, *SERVERS[request.param], "--port", str(port)]
    galleries = f"shop={tiny_gallery},other={tiny_gallery}"
    more = {"state": state, "galleries": galleries, "image_links": "signed"}
    more |= {"log_level": "warning", "max_upload_bytes": MIB}
    env = environment(**tiny_settings | more)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, "it has ended"
            try:
                return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready)
        yield Server(port, key)
    finally:
        process.terminate()
        process.wait(60)


def test_each_server_gives_the_same_answers(server) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        for expected, method, path, sent in REQUESTS:
            answer = client.request(method, path, **sent)
            assert answer.status_code == expected, (method, path, answer.text)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert len(answer.headers["x-request-id"]) > 8
            if expected >= 400:
                assert answer.json()["status"] == expected
            elif method == "POST":
                assert answer.json()["hits"][0]["key"] == "3.png"


@pytest.mark.parametrize("server", ["granian"], indirect=True)
def test_a_body_without_length_is_inflated_and_limited_in_http_2(server) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is needed")
    url = f"http://127.0.0.1:{server.port}/search?gallery=shop"
    send = [curl, "-s", "--http2-prior-knowledge", "-H", "Content-Type: image/png", "-T", "-"]
    send += ["-H", "Content-Encoding: gzip"]
    for body, expected in ((gzip.compress(IMAGE), b"200"), (gzip.compress(bytes(2 * MIB)), b"413")):
        shown = ["-o", os.devnull, "-w", "%{http_version} %{http_code}", "-X", "POST", url]
        answer = subprocess.run([*send, *shown], input=body, capture_output=True, timeout=WAIT_S)
        assert answer.stdout == b"2 " + expected, answer.stderr


def test_each_server_reads_the_body_of_a_request_to_its_end(server) -> None:
    image = request(UPGRADES[1], b"Content-Length: %d\r\n" % len(IMAGE), body=IMAGE)
    for parts in ([image + LAST], [image[: -len(IMAGE)], IMAGE, LAST]):
        assert answers(server, parts, 0.01).statuses == [200, 200]
    for sent in requests(READABLE, b"1.1"):
        assert answers(server, [sent + LAST]).statuses == [415, 200], sent
    for sent in requests(UNREADABLE, b"1.1"):
        assert not is_split(answers(server, [sent + LAST])), sent


def test_no_request_inherits_the_key_of_another_on_its_connection(server) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 400, 3), dtype=np.uint8)
    large = encoded(Image.fromarray(noise))
    assert len(large) > 2**17, "so large that a server stops reading, and resumes in the request"
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:

        def search(image: bytes, gallery: str, **headers: str) -> dict[str, Any]:
            sent = {"content": image, "params": {"gallery": gallery}, "headers": PNG | headers}
            answer: dict[str, Any] = client.post("/search", **sent).raise_for_status().json()
            return answer

        for _ in range(3):
            mine = search(large, "other", Authorization=f"Bearer {server.key}")
            assert "signed_by=" in mine["hits"][0]["image"]
            listed = client.get("/galleries").json()["galleries"]
            assert {gallery["name"] for gallery in listed} == {"shop", "other"}
            assert "signed_by" not in search(IMAGE, "shop")["hits"][0]["image"]
