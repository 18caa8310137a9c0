"""Jobs over HTTP: the addresses, their refusals, and a swap of the model under load."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embedder.bundle import Bundle
from service.app import create_app
from service.settings import Settings
from tests.support.job_shops import JobShop, processes_of
from tests.support.servers import Running, StartService, run
from tests.support.waiting import until

FIELDS = {
    *("id", "kind", "gallery", "state", "step", "done", "total", "created_at", "started_at"),
    *("ended_at", "by", "params", "error", "report"),
}


class Load:
    """Searches one after the other until it is stopped; `answers` are those of status 200."""

    def __init__(self, url: str, picture: bytes) -> None:
        self.answers: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self._url, self._picture = url, picture
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stopped.wait(0.1):
                answer = client.post("/search", files={"image": self._picture}, data={"k": "3"})
                if answer.status_code == 200:
                    self.answers.append(answer.json())
                else:
                    self.faults.append(answer.text)


@pytest.fixture
def shop(tmp_path: Path, make_tiny_bundle: Callable[..., Bundle], tiny_bundle: Bundle) -> JobShop:
    return JobShop(
        *(tmp_path, tiny_bundle, make_tiny_bundle(seed=1)),
        anonymous_scopes=("admin",),
        reload_interval_ms=50,
        decode_isolation=False,
        lanes=1,
        request_timeout_ms=60_000,
    )


@pytest.fixture
def served(shop: JobShop) -> Iterator[Running]:
    service = run(create_app(shop.settings))
    yield service
    service.close()


def ended(service: Running, job_id: str) -> dict[str, Any]:
    end = time.monotonic() + 600  # a hang, not a slow machine
    done = -1
    while True:
        job: dict[str, Any] = service.client.get(f"/jobs/{job_id}").raise_for_status().json()
        assert job["done"] >= done
        done = job["done"]
        if job["state"] not in ("queued", "running"):
            return job
        assert time.monotonic() < end, job
        time.sleep(0.1)


def query(shop: JobShop) -> bytes:
    return (shop.pictures / "class-2/1.png").read_bytes()


def test_a_model_is_swapped_under_load_without_an_error_or_a_mixed_answer(
    shop: JobShop, served: Running
) -> None:
    with Load(served.url, query(shop)) as load:
        body = {"bundle_id": shop.new.bundle_id, "swap": "auto", "max_recall_loss": 0.01}
        answer = served.client.post("/galleries/shop/rebuild", json=body)
        assert answer.status_code == 202, answer.text
        assert answer.headers["Location"] == f"/jobs/{answer.json()['id']}"
        assert set(answer.json()) == FIELDS
        job = ended(served, answer.json()["id"])
        assert job["state"] == "succeeded", job
        assert job["report"]["swapped"], job
        until(lambda: load.answers[-1]["bundle_id"] == shop.new.bundle_id)
    assert load.faults == []
    ids = [found["bundle_id"] for found in load.answers]
    assert set(ids) == {shop.old.bundle_id, shop.new.bundle_id}
    assert ids == sorted(ids, key=lambda one: one == shop.new.bundle_id)  # never back
    for found in load.answers:  # the vectors of one model find the picture itself
        assert found["hits"][0]["key"] == "class-2/1.png"
        assert found["hits"][0]["score"] > 0.999


def test_jobs_are_listed_read_and_cancelled(shop: JobShop, served: Running) -> None:
    client = served.client
    done = ended(served, client.post("/galleries/shop/compact").json()["id"])
    assert (done["state"], done["by"], done["kind"]) == ("succeeded", "anonymous", "compact")
    assert client.get("/jobs").json()["jobs"] == [done]
    assert client.get("/jobs", params={"state": "failed"}).json()["jobs"] == []
    log = client.get(f"/jobs/{done['id']}/log").json()
    assert set(log) == {"offset", "next_offset", "text"}
    again = client.post(f"/jobs/{done['id']}/cancel")
    assert (again.status_code, again.json()["type"].rpartition(":")[2]) == (409, "job-conflict")
    assert client.post(f"/jobs/{done['id']}/swap").status_code == 409
    assert client.post(f"/jobs/{done['id']}/resume").status_code == 409


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/jobs/000000000000", None, 404, "GET /jobs"),
        ("GET", "/jobs/..%2f..%2fetc/log", None, 404, ""),
        ("GET", "/jobs/x/log?offset=-1", None, 422, "offset"),
        ("GET", "/jobs?limit=0", None, 422, "limit"),
        ("GET", "/jobs?state=asleep", None, 422, "state"),
        ("POST", "/jobs/x/cancel", None, 404, "GET /jobs"),
        ("POST", "/galleries/nothing/compact", None, 404, "shop"),
        ("POST", "/galleries/shop/rebuild", {"bundle_id": "0" * 64}, 422, "Known are"),
        ("POST", "/galleries/shop/rebuild", {"bundle_id": "../x"}, 422, "bundle_id"),
        ("POST", "/galleries/shop/rebuild", {}, 422, "bundle_id"),
        ("POST", "/galleries/shop/swap", {"with": "../x"}, 422, "with"),
        ("POST", "/galleries/shop/swap", {"with": "nothing"}, 404, "shop"),
        ("POST", "/galleries/shop/swap", {"with": "shop"}, 409, "itself"),
        ("POST", "/jobs/train", {"job": "nothing", "gallery": "shop"}, 422, "cub-nir"),
        ("POST", "/jobs/train", {"job": "/etc/passwd", "gallery": "shop"}, 422, "job"),
        ("POST", "/jobs/train", {"job": "shop", "gallery": "shop", "data": "x"}, 422, "Known are"),
        (
            *("POST", "/jobs/train"),
            {"job": "shop", "gallery": "shop", "overrides": {"data.root": "/etc"}},
            *(422, "data.root"),
        ),
        ("POST", "/jobs/train", {"job": "shop", "gallery": "shop", "more": 1}, 422, "more"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_cure(
    served: Running, method: str, path: str, body: object, status: int, says: str
) -> None:
    answer = served.client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.text


def test_a_second_job_on_the_gallery_waits_for_nobody_and_is_refused(
    shop: JobShop, served: Running
) -> None:
    command = shop.trainer(seconds=36, epochs=100)
    slow = shop.settings.model_copy(update={"training_command": command})
    service = run(create_app(slow))
    first = service.client.post("/jobs/train", json={"job": "shop", "gallery": "shop"}).json()
    second = service.client.post("/galleries/shop/compact")
    assert second.status_code == 409
    assert first["id"] in second.json()["detail"]
    until(lambda: len(processes_of(first["id"])) >= 3)
    service.close()  # the job goes on, and every other service sees it
    assert processes_of(first["id"])
    assert served.client.get(f"/jobs/{first['id']}").json()["state"] == "running"
    assert served.client.post(f"/jobs/{first['id']}/cancel").status_code == 202
    assert ended(served, first["id"])["state"] == "cancelled"
    until(lambda: not processes_of(first["id"]))
    answer = served.client.post("/search", files={"image": query(shop)})
    assert answer.json()["bundle_id"] == shop.old.bundle_id


def test_without_a_state_folder_every_address_says_which_option_is_missing(
    start_service: StartService,
) -> None:
    service = start_service(anonymous_scopes=("admin",))
    for method, path in [("GET", "/jobs"), ("GET", "/jobs/x"), ("POST", "/galleries/shop/compact")]:
        answer = service.client.request(method, path)
        assert answer.status_code == 409, answer.text
        assert "--state" in answer.json()["detail"]


def test_a_missing_training_command_is_said_before_anything_starts(shop: JobShop) -> None:
    service = run(create_app(shop.settings.model_copy(update={"training_command": "no-such"})))
    answer = service.client.post("/jobs/train", json={"job": "shop", "gallery": "shop"})
    assert answer.status_code == 409
    assert "KINLENS_TRAINING_COMMAND" in answer.json()["detail"]
    assert service.client.get("/jobs").json()["jobs"] == []
    service.close()


@pytest.mark.timeout(900)
def test_a_real_training_gives_the_shop_its_own_model_under_load(shop: JobShop) -> None:
    pytest.importorskip("timm")
    settings = Settings(**shop.settings.model_dump() | {"training_command": "kinlens-train"})
    service = run(create_app(settings))
    body = {
        "job": "demo",
        "gallery": "shop",
        "gate": {"max_recall_loss": 1.0, "min_queries": 4},
        "overrides": {
            "optimizer.epochs": 1,
            "optimizer.batch_size": 4,
            "model.backbone": "timm:test_resnet",
            "model.dim": 16,
            "input.size_px": 32,
            "input.resize_px": 36,
            "recall_at": [1, 2],
            "runtime.workers": 0,
            "runtime.precision": "fp32",
            "runtime.device": "cpu",
        },
    }
    with Load(service.url, query(shop)) as load:
        answer = service.client.post("/jobs/train", json=body)
        assert answer.status_code == 202, answer.text
        job = ended(service, answer.json()["id"])
        log = service.client.get(f"/jobs/{job['id']}/log").json()["text"]
        assert job["state"] == "succeeded", (job, log)
        report = job["report"]
        assert report["swapped"], report
        assert report["training"]["epochs"] == [1, 1]
        made = report["new"]["bundle_id"]
        assert made not in (shop.old.bundle_id, shop.new.bundle_id)
        until(lambda: load.answers[-1]["bundle_id"] == made)
    assert load.faults == []
    assert {found["bundle_id"] for found in load.answers} == {shop.old.bundle_id, made}
    assert load.answers[-1]["hits"][0]["score"] > 0.99
    service.close()
