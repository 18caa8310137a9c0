"""kinlens-serve: help, one clear line per refusal, start and exit; its commands check and keys."""

import asyncio
import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.service.access.keys import FreshKeys
from kinlens.service.commands.program import app
from tests.support.own_process import own_process
from tests.support.seams import KeyStore
from tests.support.waiting import until
from tests.tiny import encoded, photo

CREATE = "keys create k --scope search --state STATE"
HANGING = """
import sys, threading
from kinlens.indexer.gallery import Gallery
from kinlens.service.commands.program import app

def item(self, item_id):
    print("reading", flush=True)
    threading.Event().wait()

Gallery.item = item
app(sys.argv[1:])
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_help_shows_every_option_and_an_example() -> None:
    text = call("--help").output
    options = ("--bundle", "--gallery", "--image-root", "--host", "--port", "--device")
    for option in (*options, "--redis-url", "--state", "--precision"):
        assert option in text
    for command in ("check", "keys", "work"):
        assert f"{command} " in text
    assert "Example: kinlens-serve --bundle" in text


@pytest.fixture(scope="module")
def places(
    tiny_bundle: Bundle,
    tiny_gallery: Path,
    make_tiny_bundle: Callable[..., Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """What can be served, and what cannot, by the word of a test for it."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("manifest.json", "keys.json"):
        (folder / name).write_text("{" * (name == "keys.json") or "{}")
    other, cut = make_tiny_bundle(seed=1), make_tiny_bundle()
    cut.model_path.write_bytes(cut.model_path.read_bytes()[:-10])
    shutil.copytree(tiny_gallery, folder / "broken", symlinks=True)
    (catalog,) = (folder / "broken").glob("versions/*/catalog.sqlite")
    catalog.write_bytes(bytes(catalog.stat().st_size))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "BUNDLE": tiny_bundle.path,
            "BUNDLEID": tiny_bundle.bundle_id[:12],
            "OTHER": other.path,
            "OTHERID": other.bundle_id[:12],
            "CUT": cut.path,
            "GALLERY": tiny_gallery,
            "BROKEN": folder / "broken",
            "DAMAGED": folder,
            "MANIFEST": folder / "manifest.json",
            "STATE": folder / "state",
            "NOWHERE": folder / "nowhere",
            "TAKEN": taken.getsockname()[1],
        }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["--bundle or KINLENS_BUNDLE"]),
        ("--bundle NOWHERE --gallery GALLERY", ["NOWHERE"]),
        ("--bundle CUT --gallery GALLERY", ["model.onnx", "sha256"]),
        ("--bundle OTHER --gallery GALLERY", ["BUNDLEID", "OTHERID"]),
        ("--bundle BUNDLE", ["--gallery or KINLENS_GALLERIES", "--state"]),
        ("--bundle BUNDLE --gallery NOWHERE", ["NOWHERE"]),
        ("--bundle BUNDLE --gallery BROKEN", ["catalog.sqlite"]),
        ("--bundle BUNDLE --gallery GALLERY --image-root shoes=/data", ["'shoes'", "shop"]),
        ("--bundle BUNDLE --gallery GALLERY --state DAMAGED", ["DAMAGED/keys.json"]),
        ("--bundle BUNDLE --state /proc/foo", ["state = /proc/foo cannot", "another folder"]),
        ("--bundle BUNDLE --state MANIFEST", ["state = MANIFEST is not a folder"]),
        ("work --once --state MANIFEST", ["state = MANIFEST is not a folder"]),
        ("--bundle BUNDLE --gallery GALLERY --port TAKEN", ["127.0.0.1:TAKEN"]),
        ("--port 9000 check", ["after the command"]),
        ("--port 99999", ["port = '99999' is too large; use 65,535 or less."]),
        ("--redis-url redis://user:hunter2@cache:abc/0", ["redis_url"]),
        (f"{CREATE} --gallery a/b", ["a/b"]),
        (f"{CREATE} --gallery a --filter 'a ='", ["cannot be parsed"]),
        (f"{CREATE} --rate often", ["600/minute"]),
        ("keys rotate nobody --state STATE", ["There is no key 'nobody'"]),
        ("keys create till --scope owner --state STATE", ["'owner' is unknown; use search"]),
        ("keys create 'no name' --scope search --state STATE", ["name = 'no name'"]),
    ],
)
def test_what_cannot_be_served_is_named(words, expected, places, monkeypatch) -> None:
    # The loggers of this process stay; the starts below test the real ones.
    monkeypatch.setattr("kinlens.service.commands.program.configure_logs", lambda *given: None)

    def placed(text: str) -> str:
        return re.sub(r"\b[A-Z]{3,}\b", lambda found: str(places.get(found[0], found[0])), text)

    result = call(*(placed(word) for word in shlex.split(words)))
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(placed(text) in line for text in expected), line
    assert "hunter2" not in line
    assert "Errno" not in line


def test_it_answers_logs_each_request_warns_and_ends_with_ctrl_c(
    tiny_bundle, tiny_gallery, tmp_path
) -> None:
    """One image of `shop` has changed; those of `other` are nowhere."""
    shutil.copytree(tiny_gallery.parent / "pictures", tmp_path / "moved")
    (tmp_path / "moved" / "0.png").write_bytes(b"changed")
    settings = {
        "bundle": tiny_bundle.path,
        "galleries": f"{tiny_gallery},other={tiny_gallery}",
        "image_roots": f"shop={tmp_path / 'moved'},other={tmp_path / 'missing'}",
        "log_level": "info",
    }
    with (
        own_process(tmp_path / "log", "--host", "0.0.0.0", **settings) as service,
        httpx.Client(base_url=service.url.replace("0.0.0.0", "127.0.0.1")) as client,
    ):
        for item, status in (("shop/items/1", 404), ("shop/items/2", 200), ("other/items/2", 404)):
            assert client.get(f"/galleries/{item}/image").status_code == status
        found = client.post("/search", files={"image": encoded(photo(3))}, data={"k": "1"})
        [hit] = found.json()["hits"]
        assert (hit["key"], hit["score"]) == ("3.png", pytest.approx(1, abs=1e-4))
    assert service.process.returncode == 0
    requests = service.events("request")
    assert len(requests) == 4
    assert all(event["request_id"] and event["level"] == "info" for event in requests)
    (event,) = service.events("image root is missing")
    assert "missing is not a folder" in event["detail"]
    assert f"Warning: {event['detail']}" in service.output.splitlines()
    hints = ("--image-root other=DIR", "KINLENS_RATE_LIMIT_PER_ADDRESS", "KINLENS_ALLOWED_HOSTS")
    assert all(hint in service.output for hint in hints)


def test_ctrl_c_ends_it_despite_a_hung_read_and_upload(tiny_settings, tmp_path) -> None:
    settings = tiny_settings | {"request_timeout_ms": 300, "shutdown_timeout_s": 1}
    with own_process(tmp_path / "log", code=["-c", HANGING], **settings) as service:
        photo_of = httpx.get(f"{service.url}/galleries/shop/items/1/image", timeout=20)
        stalled = socket.create_connection(service.address)
        stalled.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert httpx.get(f"{service.url}/ready").status_code == 200
    stalled.close()
    assert photo_of.status_code == 503
    assert photo_of.json()["type"] == "urn:kinlens:problem:deadline-exceeded"
    assert "Traceback" not in service.errors()


def test_accepted_requests_are_finished_until_a_second_signal(tiny_settings, tmp_path) -> None:
    limits = {"request_timeout_ms": 600_000, "shutdown_timeout_s": 600, "search_threads": 2}
    settings = tiny_settings | limits | {"may_be_killed": True}
    process = own_process(tmp_path / "log", code=["-c", HANGING], **settings)
    with process as service, ThreadPoolExecutor(1) as clients:
        held = clients.submit(httpx.get, f"{service.url}/galleries/shop/items/1/image", timeout=60)
        assert service.process.stdout.readline() == "reading\n"
        with service.accepted_search(encoded(photo(1))) as finish:
            service.process.terminate()
            until(lambda: not connects(service.address))
            assert finish() == 200
        assert service.process.poll() is None
        service.process.terminate()
        assert service.process.wait(timeout=20) == 130
        with pytest.raises(httpx.TransportError):
            held.result()


def connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def findings(*arguments: str, code: int) -> dict[str, dict[str, str]]:
    """The findings of `check --json`, by part."""
    result = call("check", "--json", "--port", "0", *arguments)
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert report["starts"] is (code == 0)
    return {finding["subject"]: finding for finding in report["findings"]}


@pytest.fixture
def paths(tiny_bundle: Bundle, tiny_gallery: Path) -> list[str]:
    return ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]


def test_a_set_up_that_would_start_exits_with_0_and_serves_nothing(paths, tmp_path) -> None:
    found = findings(*paths, "--state", str(tmp_path / "new"), code=0)
    parts = ["settings", "bundle", "gallery shop", "state", "keys", "decoder", "redis", "port"]
    assert list(found) == parts
    others = {finding["verdict"] for part, finding in found.items() if part != "decoder"}
    assert others == {"ok"}
    assert found["decoder"]["text"].startswith("sandbox: ")  # the layers depend on the kernel
    assert found["bundle"]["text"].endswith("on CPUExecutionProvider in fp32: asked for")
    assert "8 items" in found["gallery shop"]["text"]
    assert "results do not lead to your shop" in found["gallery shop"]["text"]
    assert list((tmp_path / "new").iterdir()) == []


def test_findings_as_json_are_all_that_is_printed(paths) -> None:
    command = [sys.executable, "-m", "kinlens.service", "check", "--json", "--port", "0", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["starts"] is True


def test_one_fault_does_not_hide_the_next(tmp_path) -> None:
    (tmp_path / "keys.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = ["--bundle", str(tmp_path / "nowhere"), "--port", str(taken.getsockname()[1])]
        wrong += ["--gallery", f"a={tmp_path / 'a'}", "--gallery", f"b={tmp_path / 'b'}"]
        faults = findings(*wrong, "--state", str(tmp_path), code=1)
    for part in ("bundle", "gallery a", "gallery b", "keys", "port"):
        assert faults[part]["verdict"] == "fault"
    assert str(tmp_path / "nowhere") in faults["bundle"]["text"]
    assert f"{tmp_path / 'a'} does not exist" in faults["gallery a"]["text"]


def test_a_redis_that_is_away_is_a_warning_that_hides_its_password(paths, redis_server) -> None:
    assert findings(*paths, "--redis-url", redis_server.url, code=0)["redis"]["text"] == "answers"
    redis_server.kill()
    url = redis_server.url.replace("redis://", "redis://user:hunter2@")
    found = findings(*paths, "--redis-url", url, code=0)
    assert found["redis"]["verdict"] == "warning"
    assert "hunter2" not in str(found)


def test_keys_are_created_listed_rotated_revoked_and_audited(tmp_path) -> None:
    state = ["--state", str(tmp_path)]
    bound = ["--gallery", "shop-7", "--gallery", "shop-8", "--filter", "tenant in (7, 8)"]
    limits = ["--rate", "600/minute", "--daily-units", "100000"]
    scopes = ["--scope", "search", "--scope", "write"]
    made = call("keys", "create", "shop7", *scopes, *bound, *limits, *state)
    assert made.exit_code == 0, made.output
    assert "not shown again" in made.stderr
    call("keys", "create", "office", "--scope", "admin", "--expires-days", "7", *state)
    rotated = call("keys", "rotate", "shop7", "--overlap-hours", "2", *state)
    assert "valid for 2 hours" in rotated.stderr
    fresh = FreshKeys(KeyStore(tmp_path / "keys.json"))
    first, second = (asyncio.run(fresh.known(one.stdout.strip())) for one in (made, rotated))
    assert first == second
    assert first.binding().where is not None
    listed = call("keys", "list", *state).stdout
    for shown in ("shop-7,shop-8", "tenant in (7, 8)", "600/minute; 100,000 units/day"):
        assert shown in listed
    assert "active, two secrets" in listed
    assert "revoked" in call("keys", "revoke", "shop7", *state).stdout
    shop7, office = (line.split() for line in call("keys", "list", *state).stdout.splitlines()[1:])
    assert shop7[:3] == ["shop7", "search,write", "revoked"]
    assert office[:3] == ["office", "admin", "active"]
    audit = call("audit", "--json", *state).stdout
    entries = [json.loads(line) for line in audit.splitlines()]
    changes = [("revoke", "shop7"), ("rotate", "shop7"), ("create", "office"), ("create", "shop7")]
    assert [(one["action"], one["target"]) for one in entries] == [
        (f"keys {action}", name) for action, name in changes
    ]
    assert {one["by"] for one in entries} == {"command line"}
    assert call("audit", "--limit", "1", *state).stdout.count("keys ") == 1
    for secret in (made.stdout, rotated.stdout):
        assert secret.strip().split("_")[2] not in audit + listed
    assert first.digest not in audit + listed


def test_an_unknown_folder_and_an_empty_list_are_failures(tmp_path) -> None:
    (tmp_path / "state").mkdir()
    for words, text in (
        (["keys", "list", "--state", "nowhere"], "nowhere is not a state folder"),
        (["audit", "--state", "nowhere"], "nowhere is not a state folder"),
        (["feedback", "show", "--state", "nowhere"], "nowhere is not a state folder"),
        (["feedback", "show", "--state", str(tmp_path / "state")], "no feedback yet"),
        (["keys", "list", "--state", str(tmp_path / "state")], "There are no keys"),
        (["audit", "--state", str(tmp_path / "state")], "is empty"),
        (["settings", "prefixes"], "No setting contains 'prefixes'"),
    ):
        result = call(*words)
        assert result.exit_code == 1, words
        assert result.stderr.startswith("error: ")
        assert text in result.stderr


@pytest.mark.parametrize("words", [["--nope"], ["keys", "lost"], ["audit", "--limit", "x"]])
def test_a_wrong_command_line_is_one_line_and_exits_with_2(words) -> None:
    result = call(*words)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Value error" not in line


def test_check_warns_where_callers_without_a_key_see_more_than_a_bound_key(paths, tmp_path) -> None:
    state = ["--state", str(tmp_path)]
    call("keys", "create", "shop7", "--scope", "search", "--gallery", "shop-7", *state)
    found = findings(*paths, *state, code=0)
    assert found["exposure"]["verdict"] == "warning"
    assert "KINLENS_ANONYMOUS_SCOPES" in str(found["exposure"])
    call("keys", "revoke", "shop7", *state)
    assert "exposure" not in findings(*paths, *state, code=0)


def test_check_warns_of_labelled_queries_that_guarantee_nothing(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    shop = shutil.copytree(tiny_gallery, tmp_path / "shop")
    paths = ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={shop}"]
    with contextlib.closing(kinlens.open_gallery(shop, bundle=tiny_bundle.path)) as gallery:
        keys = [item.key for item in gallery.each_item()]
        gallery.add_golden(encoded(photo(0), "JPEG"), keys=keys[:1])
        for work, reason in (
            (gallery.evaluate, "no attribute names the product"),
            (lambda: gallery.update({key: {"product": key} for key in keys}), "no attribute names"),
            (lambda: gallery.calibrate("product"), "it was not run"),
            (gallery.evaluate, "needs at least 19 labelled"),
        ):
            work()
            found = findings(*paths, code=0)["gallery shop"]
            assert found["verdict"] == "warning"
            assert reason in found["text"]
            assert "8 items" in found["text"]
        gallery.remove_golden(gallery.golden().queries[0].sha256)
    assert findings(*paths, code=0)["gallery shop"]["verdict"] == "ok"


def test_settings_that_exclude_each_other_are_named(monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_FEEDBACK", "pairs")
    refused = call("--bundle", "x")
    assert refused.exit_code == 1
    assert "settings: feedback = pairs needs a state folder" in refused.stderr
    assert "--state DIR or KINLENS_STATE" in refused.stderr
