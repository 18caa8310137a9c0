"""kinlens-serve: help with an example, a clear line for each reason not to start, and a start."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from embedder.bundle import Bundle
from service.__main__ import app
from tests.support.seams import listen
from tests.support.waiting import until
from tests.tiny import encoded, picture

ROOT = Path(__file__).parents[2]
HANGING = """
import sys, threading
from indexer.gallery import Gallery
from service.__main__ import app

def item(self, item_id):
    print("reading", flush=True)
    threading.Event().wait()

Gallery.item = item
app(sys.argv[1:])
"""
SLOW = """
import sys, time
from embedder.session import OnnxEmbedder
from service.__main__ import app

embed = OnnxEmbedder.embed
OnnxEmbedder.embed = lambda self, images: (time.sleep(1.5), embed(self, images))[1]
app(sys.argv[1:])
"""


@dataclass
class Started:
    """A service in a process of its own; `output` and `errors` are what it said until its end."""

    process: subprocess.Popen[str]
    url: str
    output: str = ""
    errors: str = ""


@pytest.fixture(autouse=True)
def unchanged_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the loggers of this process; the start in a process of its own tests the real ones."""
    monkeypatch.setattr("service.commands.serve.configure_logs", lambda *given: None)


def refused(*arguments: str) -> str:
    """The one line that kinlens-serve ends with."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("kinlens-serve: ")
    return line


def test_help_shows_every_option_and_an_example() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    options = ("--bundle", "--gallery", "--image-root", "--host", "--port", "--device")
    for option in (*options, "--redis-url", "--state", "--workers", "--precision"):
        assert option in text
    for command in ("check", "keys", "work"):
        assert f"{command} " in text
    assert "Example: kinlens-serve --bundle" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["--bundle or KINLENS_BUNDLE"]),
        ("--bundle NOWHERE --gallery GALLERY", ["NOWHERE"]),
        ("--bundle DAMAGED --gallery GALLERY", ["DAMAGED/manifest.json"]),
        ("--bundle BUNDLE", ["--gallery or KINLENS_GALLERIES"]),
        ("--bundle BUNDLE --gallery NOWHERE", ["NOWHERE"]),
        ("--bundle BUNDLE --gallery shop=GALLERY --gallery shop=GALLERY", ["'shop'"]),
        ("--bundle BUNDLE --gallery GALLERY --image-root shoes=/data", ["'shoes'", "shop"]),
        ("--bundle BUNDLE --gallery GALLERY --state DAMAGED", ["DAMAGED/keys.json"]),
        ("--port 9000 check", ["after the command"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(
    words: str, expected: list[str], tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged").mkdir()
    for name in ("manifest.json", "keys.json"):
        (tmp_path / "damaged" / name).write_text("{" * (name == "keys.json") or "{}")
    places = {"BUNDLE": tiny_bundle.path, "GALLERY": tiny_gallery}
    places |= {name.upper(): tmp_path / name for name in ("damaged", "nowhere")}

    def placed(text: str) -> str:
        return re.sub(r"\b[A-Z]+\b", lambda found: str(places[found[0]]), text)

    line = refused(*(placed(word) for word in words.split()))
    assert all(placed(text) in line for text in expected), line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "99999"], "port: Input should be less than or equal to 65535"),
        (["--device", "tpu"], "device: Input should be 'cpu' or 'cuda'"),
        (["--redis-url", "http://user:hunter2@cache"], "redis_url"),
        (["--redis-url", "redis://user:hunter2@cache:abc/0"], "redis_url"),
        (["--redis-url", "redis://cache:hunter2"], "redis_url"),
        (["--image-root", "/data"], "image_roots"),
        (["--gallery", "no name=/a"], "gallery name 'no name' does not fit in a link"),
        (["--precision", "fp8"], "precision: Input should be"),
        (["--workers", "0"], "workers: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_option_is_refused_by_name_without_a_traceback(
    arguments: list[str], expected: str
) -> None:
    line = refused(*arguments)
    assert expected in line
    assert "hunter2" not in line


def test_a_changed_model_file_is_refused(
    make_tiny_bundle: Callable[..., Bundle], tiny_gallery: Path
) -> None:
    bundle = make_tiny_bundle()
    bundle.model_path.write_bytes(bundle.model_path.read_bytes()[:-10])
    line = refused("--bundle", str(bundle.path), "--gallery", str(tiny_gallery))
    assert "model.onnx" in line
    assert "sha256" in line


def test_a_gallery_of_another_bundle_is_refused_by_both_ids(
    make_tiny_bundle: Callable[..., Bundle], tiny_gallery: Path, tiny_bundle: Bundle
) -> None:
    other = make_tiny_bundle(seed=1)
    line = refused("--bundle", str(other.path), "--gallery", str(tiny_gallery))
    assert tiny_bundle.bundle_id[:12] in line
    assert other.bundle_id[:12] in line


def test_a_corrupt_catalogue_is_refused(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_gallery, copy, symlinks=True)
    (catalog,) = copy.glob("versions/*/catalog.sqlite")
    catalog.write_bytes(bytes(catalog.stat().st_size))
    line = refused("--bundle", str(tiny_bundle.path), "--gallery", str(copy))
    assert "catalog.sqlite" in line


def test_a_port_in_use_is_refused_by_its_number(tiny_bundle: Bundle, tiny_gallery: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        paths = ["--bundle", str(tiny_bundle.path), "--gallery", str(tiny_gallery)]
        assert f"127.0.0.1:{port}" in refused(*paths, "--port", port)


@contextlib.contextmanager
def started(code: list[str], *arguments: str, **environment: str) -> Iterator[Started]:
    """A service in a process of its own; it is stopped with Ctrl-C in the end."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *code, "--port", "0", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        service = Started(process, process.stdout.readline().split()[3].rstrip("/"))
        try:
            yield service
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            # Not by `communicate`: it loses what `readline` has read ahead.
            service.output = process.stdout.read()
            errors.seek(0)
            service.errors = errors.read()


def test_it_prints_its_address_answers_logs_json_and_ends_with_ctrl_c(
    tiny_bundle: Bundle, tiny_gallery: Path
) -> None:
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    with started(["-m", "service"], *paths) as service:
        for number in range(4):
            files = {"image": encoded(picture(number))}
            answer = httpx.post(f"{service.url}/search", files=files, data={"k": "2"}).json()
            assert answer["hits"][0]["key"] == f"{number}.png"
            assert answer["hits"][0]["score"] == pytest.approx(1, abs=1e-4)
            shown = httpx.get(service.url + answer["hits"][0]["image"])
            assert shown.content == encoded(picture(number))
        assert httpx.get(f"{service.url}/ready").json()["provider"] == "CPUExecutionProvider"
    events = [json.loads(entry) for entry in service.errors.splitlines()]
    requests = [event for event in events if event["event"] == "request"]
    assert len(requests) == 9
    assert all(event["request_id"] and event["level"] == "info" for event in requests)
    assert service.output == ""
    assert service.process.returncode == 0


def test_images_that_moved_are_named_at_the_start_and_shown_from_their_new_root(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_gallery.parent / "pictures", moved)
    missing = tmp_path / "missing"
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", str(tiny_gallery)]  # named in itself
    paths += ["--gallery", f"other={tiny_gallery}", "--image-root", f"other={missing}"]
    (moved / "0.png").write_bytes(b"changed")  # tells the two folders apart
    with started(["-m", "service"], *paths, "--image-root", f"shop={moved}") as service:
        statuses = [
            httpx.get(f"{service.url}/galleries/{name}/items/{number}/image").status_code
            for name in ("shop", "other")
            for number in (1, 2)
        ]
        found = httpx.post(f"{service.url}/search", files={"image": encoded(picture(0))})
    assert statuses == [404, 200, 404, 404]
    assert found.status_code == 200
    (line,) = service.output.splitlines()
    assert line.startswith("Warning: ")
    assert f"{missing} is no folder" in line
    assert "--image-root other=DIR" in line
    events = [json.loads(entry) for entry in service.errors.splitlines()]
    (event,) = (event for event in events if event["event"] == "image root is missing")
    assert event["level"] == "warning"
    assert str(missing) in event["detail"]


def test_ctrl_c_ends_it_although_a_read_hangs_and_an_upload_stalls(
    tiny_bundle: Bundle, tiny_gallery: Path
) -> None:
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    limits = {"KINLENS_REQUEST_TIMEOUT_MS": "300", "KINLENS_SHUTDOWN_TIMEOUT_S": "1"}
    with started(["-c", HANGING], *paths, **limits) as service:
        address = ("127.0.0.1", int(service.url.rsplit(":", 1)[1]))
        picture_of = httpx.get(f"{service.url}/galleries/shop/items/1/image", timeout=20)
        stalled = socket.create_connection(address)
        stalled.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert httpx.get(f"{service.url}/ready").status_code == 200
    stalled.close()
    assert picture_of.status_code == 503
    assert picture_of.json()["type"] == "urn:kinlens:problem:deadline-exceeded"
    assert service.process.returncode == 0
    assert "Traceback" not in service.errors


def test_a_public_address_with_open_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINLENS_ANONYMOUS_SCOPES", "search,write")
    line = refused("--host", "0.0.0.0")
    assert "anonymous_scopes" in line
    assert "keys create" in line


def test_what_is_open_to_the_network_is_said_at_the_start(
    tiny_bundle: Bundle, tiny_gallery: Path
) -> None:
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    with started(["-m", "service"], *paths, "--host", "0.0.0.0") as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/live").status_code == 200
    lines = service.output.splitlines()
    assert all(line.startswith("Warning: ") for line in lines)
    assert "KINLENS_RATE_LIMIT_PER_ADDRESS" in service.output
    assert "KINLENS_ALLOWED_HOSTS" in service.output


def test_what_was_accepted_is_finished_and_nothing_new_is_taken(
    tiny_bundle: Bundle, tiny_gallery: Path
) -> None:
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    limits = {"KINLENS_SHUTDOWN_TIMEOUT_S": "30", "KINLENS_LANES": "8"}
    with started(["-c", SLOW], *paths, **limits) as service, ThreadPoolExecutor(8) as clients:
        address = ("127.0.0.1", int(service.url.rsplit(":", 1)[1]))

        def search(number: int) -> int:
            files = {"image": encoded(picture(number))}
            return httpx.post(f"{service.url}/search", files=files, timeout=60).status_code

        held = [clients.submit(search, number) for number in range(8)]
        until(lambda: _in_flight(service.url) == 8)
        service.process.terminate()
        until(lambda: not _connects(address))
        assert not any(call.done() for call in held)
        assert [call.result() for call in held] == [200] * 8
        assert service.process.wait(timeout=20) == 0
    assert "Traceback" not in service.errors


def test_a_second_signal_ends_it_at_once(tiny_bundle: Bundle, tiny_gallery: Path) -> None:
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    limits = {"KINLENS_REQUEST_TIMEOUT_MS": "600000", "KINLENS_SHUTDOWN_TIMEOUT_S": "600"}
    with started(["-c", HANGING], *paths, **limits) as service, ThreadPoolExecutor(1) as clients:
        address = ("127.0.0.1", int(service.url.rsplit(":", 1)[1]))
        url = f"{service.url}/galleries/shop/items/1/image"
        held = clients.submit(httpx.get, url, timeout=60)
        assert service.process.stdout is not None
        assert service.process.stdout.readline() == "reading\n"
        service.process.terminate()
        until(lambda: not _connects(address))
        assert service.process.poll() is None
        service.process.terminate()
        assert service.process.wait(timeout=20) != 0
        with pytest.raises(httpx.TransportError):
            held.result()


def _in_flight(url: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("kinlens_searches_in_flight "):
            return float(line.split()[1])
    return 0.0


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def test_connections_send_answers_without_delay() -> None:
    async def nodelay_of_a_connection() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            seen.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            value = await asyncio.wait_for(seen, 10)
            writer.close()
            await writer.wait_closed()
        return value

    assert asyncio.run(nodelay_of_a_connection()) != 0
