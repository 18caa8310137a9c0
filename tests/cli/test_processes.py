"""Several processes at one address: they share the work, are replaced, and end together."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.own_process import (
    ROOT,
    SERVE,
    OwnProcess,
    command_of,
    environment,
    own_process,
)
from tests.support.seams import KeyStore
from tests.support.shops import start_shop
from tests.support.waiting import repeating, until
from tests.tiny import encoded, photo

THREADS = 4

HUNG_SOON = """
import sys
from kinlens.service.commands import processes
from kinlens.service.__main__ import app

processes.HUNG_S = 3.0
if __name__ == "__main__":
    app(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def two(tiny_settings: dict[str, Any], state: Path) -> Iterator[OwnProcess]:
    """Two processes that serve; the last test kills their parent."""
    settings = tiny_settings | {"state": state, "workers": 2, "may_be_killed": True}
    with own_process(state.parent / f"{state.name}.log", **settings) as started:
        yield started


def gone(process_ids: set[int]) -> bool:
    return not any("multiprocessing" in command_of(pid) for pid in process_ids)


def newest(started: OwnProcess) -> int:
    """By its start time, since process ids wrap around."""

    def start(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    return max(started.serving(), key=start)


def killed(started: OwnProcess) -> int:
    """The newest of the processes, which is killed."""
    victim = newest(started)
    os.kill(victim, signal.SIGKILL)
    return victim


@contextlib.contextmanager
def load(url: str) -> Iterator[list[int]]:
    """Searches one after the other in threads, each on a connection of its own; their statuses, or
    0 for one that broke.
    """
    statuses: list[int] = []

    def ask(_: int) -> None:
        files = {"image": encoded(photo(len(statuses) % 8))}
        try:
            statuses.append(httpx.post(f"{url}/search", files=files, timeout=30).status_code)
        except httpx.TransportError:
            statuses.append(0)

    with repeating(ask, THREADS):
        yield statuses


def test_both_processes_accept_and_any_of_them_is_ready(two) -> None:
    assert len(two.serving()) == 2
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=two.url)) for _ in range(24)]
        for client in clients:
            assert client.get("/ready", timeout=30).json()["status"] == "ready"
        held = {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in two.serving()}
    assert max(held.values()) - min(held.values()) < 24, f"one process took all: {held}"


def test_the_metrics_of_any_process_are_those_of_all(two) -> None:
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


def test_processes_with_one_state_agree_on_items_keys_and_jobs(two, state) -> None:
    store = KeyStore(state / "keys.json")
    admin = {"x-api-key": store.create("admin", ["admin"])}
    till = {"x-api-key": store.create("till", ["search"])}
    with contextlib.ExitStack() as stack:

        def connected(count: int) -> list[httpx.Client]:
            """Clients on connections of their own, which are of any of the processes."""
            made = [httpx.Client(base_url=two.url, timeout=60) for _ in range(count)]
            return [stack.enter_context(client) for client in made]

        first, *others = connected(20)
        first.post("/galleries", json={"name": "live"}, headers=admin).raise_for_status()
        parts = [("image", ("x", encoded(photo(50)))), ("key", (None, "new"))]
        first.put("/galleries/live/items", files=parts, headers=admin).raise_for_status()

        def keys_of(client: httpx.Client) -> list[str]:
            files = {"image": encoded(photo(50))}
            answer = client.post("/search", files=files, data={"gallery": "live"})
            return [hit["key"] for hit in answer.raise_for_status().json()["hits"]]

        assert [keys_of(client) for client in others] == [["new"]] * 19
        victim = killed(two)
        until(lambda: len(two.serving() - {victim}) == 2)
        others = connected(20)
        assert [keys_of(client) for client in others] == [["new"]] * 20

        def statuses() -> set[int]:
            return {one.get("/galleries", headers=till).status_code for one in others}

        assert statuses() == {200}
        store.revoke("till")
        until(lambda: statuses() <= {401, 429})  # after many wrong keys an address has to wait
        with ThreadPoolExecutor(8) as group:
            compact = partial(httpx.Client.post, url="/galleries/live/compact", headers=admin)
            answers = list(group.map(compact, others[:8]))
        assert {answer.status_code for answer in answers} <= {202, 409}
        made = [answer.json()["id"] for answer in answers if answer.status_code == 202]

        def jobs() -> dict[str, str]:
            listed = others[2].get("/jobs", headers=admin).json()["jobs"]
            return {job["id"]: job["state"] for job in listed}

        until(lambda: set(jobs().values()) == {"succeeded"})
        assert sorted(jobs()) == sorted(made), "a job is run once, by one of the processes"


def test_a_dead_process_is_replaced_while_one_answers(tiny_settings, tmp_path) -> None:
    bundle = tmp_path / "bundle"
    bundle.symlink_to(tiny_settings["bundle"])
    settings = tiny_settings | {"bundle": bundle, "workers": 2}
    with own_process(tmp_path / "log", **settings) as started:
        with load(started.url) as statuses:
            until(lambda: statuses.count(200) > 8)
            bundle.unlink()  # before a replacement looks for it
            victim = killed(started)
            until(lambda: len(started.events("process ended")) >= 2)
            after_kill = statuses.count(200)
            until(lambda: statuses.count(200) > after_kill + 8)
            bundle.symlink_to(tiny_settings["bundle"])
            until(lambda: len(started.serving() - {victim}) == 2)
        until(lambda: httpx.get(f"{started.url}/ready", timeout=30).status_code == 200)
        text = httpx.get(f"{started.url}/metrics").text
        assert re.search(r"^kinlens_process_restarts_total [1-4]\.0$", text, re.MULTILINE)
        children = started.serving()
        with started.accepted_search(encoded(photo(1))) as finish:
            started.process.send_signal(signal.SIGINT)
            until(lambda: len(started.serving()) == 1)  # the other one had nothing to finish
            assert finish() == 200
        assert started.process.wait(timeout=40) == 0
        assert gone(children)
    assert set(statuses) <= {0, 200}
    # A request that breaks was held by the dead process, or by a connection that it had accepted.
    assert statuses.count(0) <= THREADS
    first, *waited = started.events("process ended")
    assert (first["process"], "-9" in str(first["reason"])) == (victim, True)
    assert all(str(bundle) in str(event["reason"]) for event in waited)
    pauses = [float(event["pause_s"]) for event in (first, *waited)]
    assert pauses == sorted(set(pauses))
    assert "Traceback" not in started.errors()


@pytest.mark.long
def test_a_child_that_cannot_start_ends_the_service_with_its_reason(tiny_bundle, tmp_path) -> None:
    nowhere = tmp_path / "nowhere"
    done = subprocess.run(
        [sys.executable, *SERVE, "--port", "0", "--workers", "2"],
        cwd=ROOT,
        env=environment(bundle=tiny_bundle.path, galleries=f"shop={nowhere}"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(nowhere) in line
    assert done.stdout == ""


@pytest.mark.long
def test_a_process_that_hangs_is_killed_and_replaced(tiny_settings, tmp_path) -> None:
    log = tmp_path / "log"
    with own_process(log, code=["-c", HUNG_SOON], workers=2, **tiny_settings) as started:
        victim = newest(started)
        os.kill(victim, signal.SIGSTOP)
        until(lambda: len(started.serving() - {victim}) == 2)
        until(lambda: httpx.get(f"{started.url}/ready", timeout=30).status_code == 200)
        assert victim not in started.serving()
    [ended] = started.events("process ended")
    assert ended["process"] == victim
    assert "did not respond for 3 s" in str(ended["reason"])


def test_children_end_when_the_parent_is_killed(two) -> None:
    children = two.serving()
    folders = {
        entry.split("=", 1)[1]
        for entry in Path(f"/proc/{min(children)}/environ").read_text().split("\0")
        if entry.startswith("PROMETHEUS_MULTIPROC_DIR=")
    }
    two.process.kill()
    two.process.wait()
    until(lambda: gone(children))
    assert [Path(folder).exists() for folder in folders] == [False]


def test_work_runs_the_jobs_of_a_service_without_workers(tmp_path) -> None:
    shop = start_shop(tmp_path, jobs="elsewhere")
    job = shop.client.post("/galleries/shop/compact").raise_for_status().json()

    def state() -> str:
        return str(shop.client.get(f"/jobs/{job['id']}").json()["state"])

    assert state() == "queued"
    command = [sys.executable, *SERVE, "work", "--state", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        until(lambda: state() == "succeeded")
        worker.send_signal(signal.SIGINT)
        _, errors = worker.communicate(timeout=60)
    shop.close()
    assert "Traceback" not in errors
