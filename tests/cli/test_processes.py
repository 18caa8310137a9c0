"""Several processes behind one socket: they share the work, are replaced, and end together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

from embedder.bundle import Bundle
from service.http.processes import pause_after
from service.http.server import address_of
from tests.support.own_process import Group, command_of, environment, group
from tests.support.seams import KeyStore
from tests.support.shops import start_shop
from tests.tiny import encoded, picture

ROOT = Path(__file__).parents[2]
THIRD_START_FAILS = """
import sys
from multiprocessing.context import SpawnProcess
from service.__main__ import app

starts = 0
start = SpawnProcess.start

def start_but_once(self):
    global starts
    starts += 1
    if starts == 3:
        raise BlockingIOError(11, "no process left")
    start(self)

SpawnProcess.start = start_but_once
if __name__ == "__main__":
    app(sys.argv[1:])
"""
Until = Callable[[Callable[[], bool]], None]


@pytest.fixture(scope="module")
def two(tiny_bundle: Bundle, tiny_gallery: Path) -> Iterator[Group]:
    with group(tiny_bundle.path, tiny_gallery) as started:
        yield started


def gone(process_ids: set[int]) -> bool:
    return not any("multiprocessing" in command_of(pid) for pid in process_ids)


@dataclass
class Load:
    """Searches one after the other in `threads` threads, each on a connection of its own."""

    url: str
    threads: int = 4
    answered: int = 0
    broken: int = 0
    statuses: set[int] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._running = [threading.Thread(target=self._ask) for _ in range(self.threads)]
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._running:
            thread.join()

    def _ask(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            files = {"image": encoded(picture(number % 8))}
            try:
                answer = httpx.post(f"{self.url}/search", files=files, timeout=30)
            except httpx.TransportError:
                self.broken += 1
            else:
                self.answered += 1
                self.statuses.add(answer.status_code)


def test_both_processes_accept_and_any_of_them_is_ready(two: Group) -> None:
    assert len(two.serving()) == 2
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=two.url)) for _ in range(24)]
        for client in clients:
            assert client.get("/ready", timeout=30).json()["status"] == "ready"
        held = {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in two.serving()}
    assert max(held.values()) - min(held.values()) < 24, f"one process took all: {held}"


def test_the_metrics_of_any_process_are_those_of_all(two: Group) -> None:
    def value(text: str, sample: str) -> float:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, f"{sample} is not in\n{text}"
        return float(found[1])

    counter = 'kinlens_requests_total{method="GET",route="/live",status="200"}'
    for _ in range(20):
        httpx.get(f"{two.url}/live").raise_for_status()
    texts = [httpx.get(f"{two.url}/metrics").text for _ in range(8)]
    assert {value(text, counter) for text in texts} == {20}
    assert {value(text, "kinlens_redis_up") for text in texts} == {0}
    assert {value(text, "kinlens_queue_depth") for text in texts} == {0}
    assert "pid=" not in texts[0]
    assert 'provider="CPUExecutionProvider"' in texts[0]


def shares_of_files(process_id: int, folder: Path) -> tuple[int, int]:
    """Kilobytes that a process has mapped of the files in `folder`: resident, its share of them."""
    resident = share = 0
    inside = False
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = bool(rest) and rest[-1].startswith(str(folder))
        elif inside and name == "Rss:":
            resident += int(rest[0])
        elif inside and name == "Pss:":
            share += int(rest[0])
    return resident, share


def test_processes_share_the_pages_of_a_gallery(two: Group, tiny_gallery: Path) -> None:
    for _ in range(8):
        httpx.get(f"{two.url}/ready").raise_for_status()
    for process_id in two.serving():
        resident, share = shares_of_files(process_id, tiny_gallery)
        assert resident > 0, "nothing of the gallery is memory-mapped"
        assert share <= 0.6 * resident


def test_a_killed_process_is_replaced_while_requests_go_on(
    tiny_bundle: Bundle, tiny_gallery: Path, until: Until
) -> None:
    with group(tiny_bundle.path, tiny_gallery) as started:
        before = started.serving()
        with Load(started.url) as load:
            until(lambda: load.answered > 8)
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            after_kill = load.answered
            until(lambda: load.answered > after_kill + 8)
            until(lambda: len(started.serving() - {victim}) == 2)
        counted = httpx.get(f"{started.url}/metrics").text
    assert load.statuses == {200}
    # A request that breaks was held by the dead process, or by a connection that it had accepted.
    assert load.broken <= load.threads
    assert re.search(r"^kinlens_process_restarts_total 1\.0$", counted, re.MULTILINE)
    (event,) = started.events("process ended")
    assert event["process"] == victim
    assert "-9" in str(event["reason"])


def test_the_pause_has_a_longest_length_however_often_a_process_ended() -> None:
    pauses = [pause_after(failures) for failures in (0, 1, 5, 20, 1024, 10**6)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1 < pauses[-1] < 31


def test_a_process_that_cannot_be_started_for_now_is_started_later(
    tiny_bundle: Bundle, tiny_gallery: Path, until: Until
) -> None:
    with group(tiny_bundle.path, tiny_gallery, code=["-c", THIRD_START_FAILS]) as started:
        victim = min(started.serving())
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(started.serving() - {victim}) == 2)
        assert httpx.get(f"{started.url}/ready", timeout=30).status_code == 200
    killed, failed = started.events("process ended")
    assert killed["process"] == victim
    assert "no process left" in str(failed["reason"])


def test_a_process_that_keeps_ending_is_started_after_growing_pauses(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path, until: Until
) -> None:
    bundle = tmp_path / "bundle"
    bundle.symlink_to(tiny_bundle.path)
    with group(bundle, tiny_gallery) as started:
        bundle.unlink()
        victim = min(started.serving())
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(started.serving() - {victim}) == 2)
        until(lambda: len(started.serving()) == 1)
        assert httpx.get(f"{started.url}/ready", timeout=30).status_code == 200
        bundle.symlink_to(tiny_bundle.path)
        until(lambda: len(started.serving()) == 2)
    first, second, *_ = started.events("process ended")
    assert float(str(first["pause_s"])) < float(str(second["pause_s"]))
    assert str(bundle) in str(second["reason"])


def test_a_signal_ends_all_of_them_when_they_have_finished_what_they_accepted(
    tiny_bundle: Bundle, tiny_gallery: Path, until: Until
) -> None:
    files = {"image": encoded(picture(1))}
    built = httpx.Request("POST", "http://localhost/search", files=files)
    head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())
    request = f"POST /search HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n"
    with group(tiny_bundle.path, tiny_gallery) as started:
        children = started.serving()
        address = started.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=30) as client:
            client.sendall(request.encode())
            assert client.recv(64).startswith(b"HTTP/1.1 100 ")
            started.parent.send_signal(signal.SIGINT)
            until(lambda: len(started.serving()) == 1)  # the other one had nothing to finish
            client.sendall(built.read())
            answer = client.recv(64)
        assert started.parent.wait(timeout=40) == 0
        assert gone(children)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in started.errors


def test_processes_with_one_state_agree_on_items_keys_and_jobs(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path, until: Until
) -> None:
    store = KeyStore(tmp_path / "keys.json")
    admin = {"x-api-key": store.create("admin", ["admin"])}
    till = {"x-api-key": store.create("till", ["search"])}
    with (
        group(tiny_bundle.path, tiny_gallery, KINLENS_STATE=str(tmp_path)) as started,
        contextlib.ExitStack() as stack,
    ):

        def connected(count: int) -> list[httpx.Client]:
            """Clients on connections of their own, which are of any of the processes."""
            made = [httpx.Client(base_url=started.url, timeout=60) for _ in range(count)]
            return [stack.enter_context(client) for client in made]

        first, *others = connected(20)
        first.post("/galleries", json={"name": "live"}, headers=admin).raise_for_status()
        parts = [("image", ("x", encoded(picture(50)))), ("key", (None, "new"))]
        first.put("/galleries/live/items", files=parts, headers=admin).raise_for_status()

        def keys_of(client: httpx.Client) -> list[str]:
            files = {"image": encoded(picture(50))}
            answer = client.post("/search", files=files, data={"gallery": "live"})
            return [hit["key"] for hit in answer.raise_for_status().json()["hits"]]

        assert [keys_of(client) for client in others] == [["new"]] * 19
        victim = min(started.serving())
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(started.serving() - {victim}) == 2)
        others = connected(20)
        assert [keys_of(client) for client in others] == [["new"]] * 20
        assert {c.get("/galleries", headers=till).status_code for c in others} == {200}
        store.revoke("till")
        until(lambda: {c.get("/galleries", headers=till).status_code for c in others} == {401})
        with ThreadPoolExecutor(8) as crowd:
            compact = partial(httpx.Client.post, url="/galleries/live/compact", headers=admin)
            answers = list(crowd.map(compact, others[:8]))
        assert {answer.status_code for answer in answers} <= {202, 409}
        job = next(answer.json()["id"] for answer in answers if answer.status_code == 202)

        def state() -> str:
            return str(others[1].get(f"/jobs/{job}", headers=admin).json()["state"])

        until(lambda: state() == "succeeded")
        listed = others[2].get("/jobs", headers=admin).json()["jobs"]
        made = [answer for answer in answers if answer.status_code == 202]
        assert len(listed) == len(made), "a job is run once, by one of the processes"
        assert {one["state"] for one in listed} == {"succeeded"}


def test_work_runs_the_jobs_of_a_service_that_leaves_them_to_others(
    tmp_path: Path, until: Until
) -> None:
    shop = start_shop(tmp_path, jobs="elsewhere")
    job = shop.client.post("/galleries/shop/compact").raise_for_status().json()

    def state() -> str:
        return str(shop.client.get(f"/jobs/{job['id']}").json()["state"])

    assert state() == "queued"
    command = [sys.executable, "-m", "service", "work", "--state", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        until(lambda: state() == "succeeded")
        worker.send_signal(signal.SIGINT)
        _, errors = worker.communicate(timeout=60)
    shop.close()
    assert "Traceback" not in errors


def test_children_end_when_the_parent_is_killed(
    tiny_bundle: Bundle, tiny_gallery: Path, until: Until
) -> None:
    with group(tiny_bundle.path, tiny_gallery) as started:
        children = started.serving()
        folders = {
            entry.split("=", 1)[1]
            for entry in Path(f"/proc/{min(children)}/environ").read_text().split("\0")
            if entry.startswith("PROMETHEUS_MULTIPROC_DIR=")
        }
        started.parent.kill()
        started.parent.wait()
        until(lambda: gone(children))
    assert [Path(folder).exists() for folder in folders] == [False]


def test_a_child_that_cannot_start_ends_the_service_with_its_reason(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service", "--port", "0", "--workers", "2"],
        cwd=ROOT,
        env=environment(tiny_bundle.path, tmp_path / "nowhere"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kinlens-serve: ")
    assert str(tmp_path / "nowhere") in line
    assert done.stdout == ""


def _report_protocol(listener: socket.socket, answer: Connection) -> None:
    answer.send(listener.proto)


def test_a_spawned_process_keeps_the_protocol_that_switches_the_delay_off() -> None:
    mine, theirs = Pipe()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}/"
        child = get_context("spawn").Process(target=_report_protocol, args=(listener, theirs))
        child.start()
        assert mine.poll(60)
        assert mine.recv() == socket.IPPROTO_TCP
        child.join()
