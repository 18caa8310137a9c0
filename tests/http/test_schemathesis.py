"""Every operation of the OpenAPI document, with valid and invalid input."""

import gzip
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from tests.support.market import attributes_of, text_of
from tests.support.own_process import ROOT, OwnProcess, own_process
from tests.support.seams import KeyStore
from tests.tiny import encoded, photo

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
PHASES = "examples,fuzzing" + (",coverage,stateful" if LONG else "")
EXAMPLES = 150 if LONG else 5
SEEDS = (5, 6, 7) if LONG else (5,)
PHOTO = encoded(photo(0))
# A schema cannot say which bytes are an image. Wrong keys are limited, and tested elsewhere.
UNCHECKED = "positive_data_acceptance,ignored_auth"


@dataclass(frozen=True)
class Target:
    """A service with a gallery of the settings (`shop`) and one that it made (`live`)."""

    process: OwnProcess
    key: str

    def send(self, method: str, path: str, **sent: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        url = self.process.url + path
        return httpx.request(method, url, headers=headers, timeout=60, **sent)


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle, tiny_gallery: Path
) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzzed")
    keys = KeyStore(folder / "state" / "keys.json")
    key = keys.create("fuzz", ["admin"])
    keys.create("spare", ["search"])
    items = [
        {"key": f"{n}.png", "data": text_of(encoded(photo(n))), "attributes": attributes_of(n)}
        for n in range(6)
    ]
    with own_process(
        folder / "log",
        bundle=tiny_bundle.path,
        galleries=f"shop={shutil.copytree(tiny_gallery, folder / 'shop')}",
        state=folder / "state",
        jobs="elsewhere",
        training_command="true",
    ) as process:
        target = Target(process, key)
        target.send("POST", "/galleries", json={"name": "live"}).raise_for_status()
        path = "/galleries/live/items"
        target.send("PUT", path, json={"items": items}).raise_for_status()
        yield target


@pytest.mark.parametrize("seed", SEEDS)
def test_every_operation_conforms_to_the_document(target, seed: int, tmp_path) -> None:
    """In a process of its own, since a model changes the floating-point mode of its thread."""
    command = [sys.executable, "-m", "schemathesis.cli", "run"]
    command += [f"{target.process.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {target.key}", "--phases", PHASES]
    # With one worker: `ast` of Python 3.11 is not made for two threads (SystemError).
    command += ["--seed", str(seed), "--max-examples", str(EXAMPLES), "--workers", "1"]
    command += ["--exclude-checks", UNCHECKED, "--generation-database", "none"]
    command += ["--warnings", "off", "--no-color", "--continue-on-failure"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.support.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | hooks, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert not target.process.faults()


def form(boundary: str = "b", tail: str = "--b--\r\n") -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    return head.encode() + PHOTO + b"\r\n" + tail.encode()


def chunked(data: bytes, size: str | None = None) -> bytes:
    return (size or f"{len(data):x}").encode() + b"\r\n" + data + b"\r\n0\r\n\r\n"


FORM = "Content-Type: multipart/form-data; boundary=b"
JSON = "Content-Type: application/json"
CHUNKED = "Transfer-Encoding: chunked"
SEARCH, ICON = "POST /search HTTP/1.1", "/ui/shared/icon.svg"
GOOD, BAD = {200}, {400, 408, 411, 413, 415, 422, 431, 501}
ODD: dict[str, tuple[str, list[str], bytes, set[int]]] = {
    "a form in chunks": (SEARCH, [FORM, CHUNKED], chunked(form()), GOOD),
    "a chunk of no size": (SEARCH, [FORM, CHUNKED], chunked(form(), "zz"), BAD),
    "two lengths": (SEARCH, [FORM, "Content-Length: 3", "Content-Length: 4"], b"abc", BAD),
    "a length and chunks": (SEARCH, [FORM, "Content-Length: 3", CHUNKED], b"0\r\n\r\n", BAD),
    "a negative length": (SEARCH, [FORM, "Content-Length: -1"], b"", BAD),
    "no end of the form": (SEARCH, [FORM], form(tail=""), BAD),
    "no content type": (SEARCH, [], form(), BAD),
    "a content type of no sense": (SEARCH, ["Content-Type: ;;;=\xff"], form(), BAD),
    "JSON of another encoding": (SEARCH, [JSON], '{"k": 1}'.encode("utf-16"), BAD),
    "JSON of a great number": (SEARCH, [JSON], b'{"k": ' + b"9" * 5_000 + b"}", BAD),
    "a packed body": (SEARCH, [FORM, "Content-Encoding: gzip"], gzip.compress(form()), GOOD),
    "a header without a colon": (SEARCH, [FORM, "nothing"], form(), BAD),
    "a zero byte in a header": (SEARCH, [FORM, "X-Odd: a\0b"], form(), BAD),
    "ranges": (f"GET {ICON} HTTP/1.1", ["Range: bytes=9-1,-5,a"], b"", {200, 206, 400, 416}),
    "an address of 100 KB": (f"GET /{'x' * 100_000} HTTP/1.1", [], b"", {404, 414} | BAD),
    "a line in the address": ("GET /galleries/a%0d%0aX:%20b HTTP/1.1", [], b"", {404} | BAD),
    "a way up": ("GET /ui/..%2f..%2fapp.py HTTP/1.1", [], b"", {404} | BAD),
    "a whole address": ("GET http://elsewhere/live HTTP/1.1", [], b"", {200, 404} | BAD),
    "a method of no sense": ("BREW /search HTTP/1.1", [], b"", {403, 405} | BAD),
    "a tunnel": ("CONNECT elsewhere:80 HTTP/1.1", [], b"", {404, 405} | BAD),
    "no protocol": ("hello", [], b"", BAD),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_request_gets_a_valid_status(target, what: str) -> None:
    line, headers, body, expected = ODD[what]
    status = answered(target, line, headers, body)
    assert status in expected, f"{what}: {status}"
    found = target.send("POST", "/search", files={"image": PHOTO}, data={"k": "1"})
    assert found.status_code == 200
    assert not target.process.faults()


def answered(target: Target, line: str, headers: list[str], body: bytes) -> int:
    """The status that these very bytes are answered with; 400 if only the connection ends."""
    address = urlsplit(target.process.url)
    sent = [line, f"Host: {address.netloc}", *headers]
    named = " ".join(headers).lower()
    if body and "content-length" not in named and "transfer-encoding" not in named:
        sent.append(f"Content-Length: {len(body)}")
    sent.append("Connection: close" if "Connection" not in " ".join(headers) else "X-Odd: 1")
    with closing(socket.create_connection((address.hostname, address.port), timeout=60)) as to:
        try:
            to.sendall("\r\n".join([*sent, "", ""]).encode("latin-1") + body)
            answer = to.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            return 400
    return int(answer.split(b" ", 2)[1]) if answer else 400
