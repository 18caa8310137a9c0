"""Several services with one state folder: they agree on items, keys and jobs, and one may die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.own_process import ROOT, SERVE, OwnProcess, own_process
from tests.support.seams import KeyStore
from tests.support.shops import start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo


@pytest.fixture
def replicas(tiny_settings: dict[str, Any], tmp_path: Path) -> Iterator[list[OwnProcess]]:
    """Two services with one state folder; the second may be killed."""
    settings = tiny_settings | {"state": tmp_path / "state"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(own_process(tmp_path / name, may_be_killed=killed, **settings))
            for name, killed in (("first", False), ("second", True))
        ]


def test_replicas_with_one_state_agree_on_items_keys_and_jobs(replicas, tmp_path) -> None:
    store = KeyStore(tmp_path / "state" / "keys.json")
    admin = {"x-api-key": store.create("admin", ["admin"])}
    till = {"x-api-key": store.create("till", ["search"])}
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=replica.url, timeout=60))
            for replica in replicas
        ]
        first, second = clients
        first.post("/galleries", json={"name": "live"}, headers=admin).raise_for_status()
        parts = [("image", ("x", encoded(photo(50)))), ("key", (None, "new"))]
        first.put("/galleries/live/items", files=parts, headers=admin).raise_for_status()

        def keys_of(client: httpx.Client) -> list[str]:
            files = {"image": encoded(photo(50))}
            answer = client.post("/search", files=files, data={"gallery": "live"})
            if answer.status_code == 404:
                return []  # the gallery is not open yet
            return [hit["key"] for hit in answer.raise_for_status().json()["hits"]]

        until(lambda: [keys_of(client) for client in clients] == [["new"]] * 2)

        def statuses() -> set[int]:
            return {client.get("/galleries", headers=till).status_code for client in clients}

        assert statuses() == {200}
        store.revoke("till")
        until(lambda: statuses() <= {401, 429})  # after many wrong keys an address has to wait
        with ThreadPoolExecutor(8) as group:
            compact = partial(httpx.Client.post, url="/galleries/live/compact", headers=admin)
            answers = list(group.map(compact, clients * 4))
        assert {answer.status_code for answer in answers} <= {202, 409}
        made = [answer.json()["id"] for answer in answers if answer.status_code == 202]

        def jobs(client: httpx.Client) -> dict[str, str]:
            listed = client.get("/jobs", headers=admin).json()["jobs"]
            return {job["id"]: job["state"] for job in listed}

        until(lambda: set(jobs(second).values()) == {"succeeded"})
        assert sorted(jobs(first)) == sorted(made), "a job is run once, by one of the replicas"
        os.kill(replicas[1].pid, signal.SIGKILL)
        replicas[1].process.wait()
        assert keys_of(first) == ["new"]


def test_work_runs_the_jobs_of_a_service_that_runs_none(tmp_path) -> None:
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
