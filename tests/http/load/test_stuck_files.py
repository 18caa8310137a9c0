"""Files that hang, such as those of an unreachable network disk: other routes answer, the stuck one
answers in time, and the service ends.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.service import concurrency
from kinlens.service.settings import Settings
from tests.support.routes import RIGHTS
from tests.support.servers import free_port
from tests.support.shops import Shop, base64_of, sha256, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

LIMIT_MS = 1_000
IN_MEMORY = {"GET /", "GET /admin", "GET /docs", "GET /docs/{path:path}", "GET /ui/{path:path}"}
IN_MEMORY |= {"GET /openapi.json"}
"""The pages and the document; they are not read per request."""

BACKGROUND = {"jobs", "compaction"}
"""Threads of the service that no request waits for."""

IMAGE = {"image": ("x.png", encoded(photo(90)), "image/png")}
BODIES: dict[str, dict[str, Any]] = {
    "POST /search": {"files": IMAGE},
    "POST /search/batch": {"files": IMAGE},
    "POST /boxes": {"files": IMAGE},
    "POST /galleries": {"json": {"name": "other"}},
    "PUT /galleries/{name}/items": {
        "json": {"items": [{"key": "new", "data": base64_of(encoded(photo(91)))}]}
    },
    "PATCH /galleries/{name}/items": {"json": {"filter": "price > 1", "set": {"price": 2}}},
    "DELETE /galleries/{name}/items": {"params": {"key": "a"}},
    "POST /galleries/{name}/items/delete": {"json": {"filter": "price > 1"}},
    "POST /galleries/{name}/items/restore": {"json": {"keys": ["a"]}},
    "PATCH /galleries/{name}/items/by-key/{key:path}": {"json": {"price": 1}},
    "POST /galleries/{name}/golden": {"files": IMAGE | {"label": (None, '{"no_match": true}')}},
    "POST /galleries/{name}/swap": {"json": {"with": "other"}},
    "POST /galleries/{name}/rebuild": {"json": {"bundle_id": "f" * 64}},
    "POST /jobs/train": {"json": {"gallery": "shop"}},
    "POST /keys": {"json": {"name": "k", "scopes": ["search"]}},
    "POST /galleries/{name}/items/{item_id}/explain": {"files": IMAGE},
    "POST /galleries/{name}/items/by-key/{key:path}/explain": {"files": IMAGE},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "ready_timeout_ms", LIMIT_MS)
        shop = start_shop(
            tmp_path_factory.mktemp("state"), feedback="pairs", request_timeout_ms=LIMIT_MS
        )
    shop.put({"a": encoded(photo(1)), "b": encoded(photo(2))}, price=5)
    yield shop
    shop.close()


def ask(client: httpx.Client, route: str) -> httpx.Response:
    method, template = route.split(" ")
    parts = {"name": "shop", "item_id": "0", "sha256": "0" * 64, "job_id": "0" * 12}
    path = re.sub(r"\{(\w+)[^}]*\}", lambda found: parts.get(found[1], "a"), template)
    body = dict(BODIES.get(route, {}))
    if route == "POST /feedback":
        body = {"json": {"answer_id": SIGNED[0], "item": "a", "action": "clicked"}}
    return client.request(method, path, **body)


SIGNED: list[str] = []


def test_no_route_touches_a_disk_outside_of_the_bounded_pools(shop: Shop) -> None:
    """In the event loop it would stop all requests, and in other threads the end of the process."""
    SIGNED[:] = [shop.running.search(encoded(photo(1))).json()["answer_id"]]
    touched: list[tuple[str, str, object]] = []
    route = ""
    watched = {"open", "sqlite3.connect", "os.scandir", "os.listdir", "subprocess.Popen"}
    state = str(shop.running.runtime.settings.state)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        name = threading.current_thread().name
        ours = name.startswith("kinlens-") or name in BACKGROUND
        if route and event in watched and not ours and state in str(arguments[0]):
            touched.append((route, name, arguments[0]))

    sys.addaudithook(watch)
    try:
        for route in sorted(RIGHTS.keys() - IN_MEMORY):
            answer = ask(shop.client, route)
            assert answer.status_code != 500, (route, answer.text)
    finally:
        route = ""
    assert touched == []


def test_every_route_answers_in_time_while_every_disk_hangs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call in a thread gets a result, so a route without a deadline would wait for ever."""
    SIGNED[:] = [shop.running.search(encoded(photo(1))).json()["answer_id"]]

    hanging: list[Any] = []

    def hang(*_: object, **__: object) -> Any:
        hanging.append(concurrency.Future())
        return hanging[-1]

    monkeypatch.setattr(concurrency.DaemonThreads, "submit", hang)
    monkeypatch.setattr(concurrency, "begin_in_thread", hang)
    late = {}

    def try_route(route: str) -> None:
        try:
            answer = ask(shop.client, route)
        except httpx.TimeoutException:
            late[route] = "no answer"
        else:
            if answer.status_code == 500:
                late[route] = answer.text

    with ThreadPoolExecutor(16) as callers:
        list(callers.map(try_route, sorted(RIGHTS.keys() - IN_MEMORY)))
    monkeypatch.undo()
    for future in hanging:  # those of other services in this process wait as well
        if future.set_running_or_notify_cancel():
            future.set_exception(OSError("the disk is away"))
    assert late == {}


@contextmanager
def serving(state: Path, gallery: Path, bundle: Path, *arguments: str) -> Iterator[httpx.Client]:
    """`kinlens-serve` in a process of its own, which a SIGTERM must end at the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "kinlens.service", "--bundle", str(bundle), *arguments]
    command += ["--gallery", f"shop={gallery}", "--state", str(state), "--port", str(port)]
    settings = {"REQUEST_TIMEOUT_MS": "1500", "ANONYMOUS_SCOPES": "admin", "JOBS": "elsewhere"}
    settings |= {"SEARCH_THREADS": "2", "SHUTDOWN_TIMEOUT_S": "1", "FEEDBACK": "pairs"}
    environment = os.environ | {f"KINLENS_{name}": value for name, value in settings.items()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def is_ready() -> bool:
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    assert process.poll() is None, "it did not start"
                    return False

            until(is_ready)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_files_that_hang_stop_neither_other_routes_nor_the_end(
    tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    """A FIFO without a writer hangs each read of it, as a file of an unreachable disk does."""
    gallery = tmp_path / "shop"
    shutil.copytree(str(tiny_settings["galleries"]).partition("=")[2], gallery)
    state, bundle = tmp_path / "state", tiny_settings["bundle"]
    with serving(state, gallery, bundle) as client:
        job = client.post("/galleries/shop/compact").raise_for_status().json()["id"]
        put = {"image": ("x.png", encoded(photo(7)), "image/png"), "key": (None, "new")}
        item = client.put("/galleries/shop/items", files=put).raise_for_status().json()["items"][0]
        files = [path for path in gallery.rglob("*") if path.stem == sha256(encoded(photo(7)))]
        (state / "jobs" / job).mkdir(parents=True, exist_ok=True)
        stuck = {
            f"/jobs/{job}/log": state / "jobs" / job / "log.txt",
            f"/galleries/shop/items/{item['id']}/image": files[0],
            "/keys": state / "keys.json",
        }
        for path in stuck.values():
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        with ThreadPoolExecutor(45) as callers:
            asked = {
                route: [callers.submit(client.get, route) for _ in range(15)] for route in stuck
            }
            others = (
                "/jobs",
                f"/jobs/{job}",
                "/galleries",
                "/galleries/shop/items",
                "/audit",
                "/live",
            )
            for route in others:
                assert client.get(route).status_code == 200, route
            for route, answers in asked.items():
                statuses = {answer.result().status_code for answer in answers}
                assert statuses == {503}, route
        for route in others:
            assert client.get(route).status_code == 200, route
        found = client.get(f"/jobs/{job}/log").json()
        assert "has not answered" in found["detail"], "it is refused at once"
        search = {"image": ("x.png", encoded(photo(7)), "image/png")}
        assert client.post("/search", files=search).status_code == 200


@pytest.mark.parametrize(
    "place",
    [
        "shop/CURRENT",
        pytest.param("state/feedback.sqlite", marks=pytest.mark.long),
        pytest.param("state/audit.jsonl", marks=pytest.mark.long),
    ],
)
def test_every_route_answers_while_a_file_that_many_read_hangs(
    place: str, tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    gallery = tmp_path / "shop"
    shutil.copytree(str(tiny_settings["galleries"]).partition("=")[2], gallery)
    with serving(tmp_path / "state", gallery, tiny_settings["bundle"]) as client:
        SIGNED[:] = [ask(client, "POST /search").raise_for_status().json()["answer_id"]]
        ask(client, "POST /keys").raise_for_status()  # there are a log and a key before
        stuck = tmp_path / place
        stuck.unlink()
        os.mkfifo(stuck)
        routes = sorted(RIGHTS.keys() - IN_MEMORY)
        with ThreadPoolExecutor(16) as callers:
            answers = list(callers.map(partial(ask, client), routes))
        assert {
            route
            for route, answer in zip(routes, answers, strict=True)
            if answer.status_code == 500
        } == set()
        assert client.get("/live").status_code == 200


def test_a_queued_job_whose_gallery_hangs_stops_no_other_job(
    tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    """The service queues; a worker that starts later finds one CURRENT that hangs."""
    made = Path(str(tiny_settings["galleries"]).partition("=")[2])
    for name in ("shop", "other"):
        shutil.copytree(made, tmp_path / name)
    state, bundle = tmp_path / "state", tiny_settings["bundle"]
    other = ("--gallery", f"other={tmp_path / 'other'}")
    with serving(state, tmp_path / "shop", bundle, *other) as client:
        first, second = (
            client.post(f"/galleries/{name}/compact").raise_for_status().json()["id"]
            for name in ("shop", "other")
        )
        (tmp_path / "shop" / "CURRENT").unlink()
        os.mkfifo(tmp_path / "shop" / "CURRENT")
        galleries = f"shop={tmp_path / 'shop'},other={tmp_path / 'other'}"
        settings = {"GALLERIES": galleries, "BUNDLE": str(bundle), "REQUEST_TIMEOUT_MS": "5000"}
        command = [sys.executable, "-m", "kinlens.service", "work", "--once", "--state", str(state)]
        environment = os.environ | {f"KINLENS_{name}": text for name, text in settings.items()}
        subprocess.run(command, env=environment, check=True, timeout=100)
        failed, done = (client.get(f"/jobs/{job}").json() for job in (first, second))
    assert (failed["state"], done["state"]) == ("failed", "succeeded")
    assert "gallery 'shop'" in failed["error"]
    assert "Check its disk" in failed["error"]
