"""Jobs over HTTP: routes, refusals, and a swap of the model under load."""

import csv
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import csv_source
from kinlens.models import JobModel
from kinlens.service.jobs import params
from kinlens.service.settings import Settings
from tests.support.detectors import with_detector
from tests.support.job_shops import JobShop, processes_of
from tests.support.seams import store_bundle
from tests.support.servers import Running, create_app, run
from tests.support.waiting import repeating, until


@contextmanager
def load(url: str, gallery: str, photo: bytes, every_s: float = 0.1) -> Iterator[list[Any]]:
    """Searches at an interval, none of which may fail; their answers."""
    answers: list[dict[str, Any]] = []
    with httpx.Client(base_url=url, timeout=60) as client:

        def ask(_: int) -> None:
            time.sleep(every_s)
            fields = {"k": "3", "gallery": gallery}
            answer = client.post("/search", files={"image": photo}, data=fields)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())

        with repeating(ask):
            yield answers


@pytest.fixture(scope="module")
def shop(
    tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle, new_bundle: Bundle
) -> JobShop:
    """One for all tests; its galleries are changed by one of them each."""
    made = JobShop(
        *(tmp_path_factory.mktemp("jobs"), tiny_bundle, new_bundle),
        anonymous_scopes=("admin",),
        search_threads=1,
        request_timeout_ms=60_000,
    )
    made.build("busy")
    return made


@pytest.fixture(scope="module")
def served(shop: JobShop) -> Iterator[Running]:
    service = run(create_app(shop.settings))
    yield service
    service.close()


def ended(service: Running, job_id: str) -> dict[str, Any]:
    """The job, once it has ended; its progress never goes back."""
    end = time.monotonic() + 600  # a hang, not a slow machine
    done = -1
    while True:
        job: dict[str, Any] = service.client.get(f"/jobs/{job_id}").raise_for_status().json()
        assert job["done"] >= done
        done = job["done"]
        if job["state"] not in ("queued", "running"):
            return job
        assert time.monotonic() < end, job
        time.sleep(0.2)


def query(shop: JobShop) -> bytes:
    return (shop.photos / "class-2/1.png").read_bytes()


def test_a_rebuild_under_load_causes_no_error_or_mixed_answer(shop, served) -> None:
    with load(served.url, "shop", query(shop)) as answers:
        body = {"bundle_id": shop.new.bundle_id, "swap": "auto", "max_recall_loss": 0.01}
        answer = served.client.post("/galleries/shop/rebuild", json=body)
        assert answer.status_code == 202, answer.text
        assert answer.headers["Location"] == f"/jobs/{answer.json()['id']}"
        job = ended(served, answer.json()["id"])
        assert job["state"] == "succeeded", job
        report = job["report"]
        assert report["swapped"], job
        assert report["old"]["bundle_id"] == shop.old.bundle_id
        assert report["old"]["items"] == report["new"]["items"] == 24
        assert report["gate"]["passed"], report["gate"]
        until(lambda: answers[-1]["bundle_id"] == shop.new.bundle_id)
    ids = [found["bundle_id"] for found in answers]
    assert set(ids) == {shop.old.bundle_id, shop.new.bundle_id}
    assert ids == sorted(ids, key=lambda one: one == shop.new.bundle_id)  # never back
    for found in answers:  # the vectors of one model find the image itself
        assert found["hits"][0]["key"] == "class-2/1.png"
        assert found["hits"][0]["score"] > 0.999


def test_jobs_are_listed_read_and_cancelled(served) -> None:
    client = served.client
    done = ended(served, client.post("/galleries/shop/compact").json()["id"])
    assert (done["state"], done["by"], done["kind"]) == ("succeeded", "anonymous", "compact")
    assert client.get("/jobs", params={"limit": 1}).json()["jobs"] == [done]
    assert client.get("/jobs", params={"state": "failed"}).json()["jobs"] == []
    log = client.get(f"/jobs/{done['id']}/log").json()
    assert set(log) == {"offset", "next_offset", "text"}
    for change in ("cancel", "swap", "resume"):
        again = client.post(f"/jobs/{done['id']}/{change}")
        assert (again.status_code, again.json()["type"].rpartition(":")[2]) == (409, "job-conflict")


def test_options_of_jobs_are_listed_by_name_alone(shop, tmp_path) -> None:
    named = {
        "training_data": (f"shoes={tmp_path}",),
        "training_weights": (f"mobilenet={tmp_path}/mobilenet.pth",),
        "training_command": "no-such",
    }
    service = run(create_app(shop.settings.model_copy(update=named)))
    answer = service.client.get("/jobs/options")
    service.close()
    found = answer.json()
    assert (found["data"], found["weights"][-1]) == (["shoes"], "mobilenet")
    assert {"shop", "cub-nir"} <= {*found["training_jobs"]}
    assert "KINLENS_TRAINING_COMMAND" in found["no_training"]
    ids = [bundle["bundle_id"] for bundle in found["bundles"]]
    assert sorted(ids) == sorted({shop.old.bundle_id, shop.new.bundle_id})
    assert found["bundles"][0]["backbone"] == shop.new.manifest.backbone
    assert str(tmp_path) not in answer.text


def test_a_rebuild_takes_the_ids_of_a_bundle_with_a_detector(shop, tmp_path) -> None:
    """That of galleries, which the options have, and that of its manifest."""
    made = with_detector(shop.new, tmp_path / "made")
    stored = tmp_path / "state" / "bundles" / "stored"
    shutil.copytree(made.path, stored)
    changes = {"state": tmp_path / "state", "galleries": (f"shop={shop.path}",)}
    settings = shop.settings.model_copy(update=changes)
    ids = {bundle.bundle_id for bundle in params.options_of(settings).bundles}
    assert ids == {shop.old.bundle_id, shop.new.bundle_id}
    for bundle_id in (shop.new.bundle_id, made.manifest.bundle_id[:16]):
        chosen = params.params_of("rebuild", {"bundle_id": bundle_id})
        assert params.plan_of(chosen, "shop", settings).bundle == stored


@pytest.mark.parametrize(
    ("command", "reason"), [("kinlens-train", "torch is not installed"), ('"', "cannot be read")]
)
def test_a_service_that_cannot_train_reports_why(shop, command, reason, monkeypatch) -> None:
    find, before = params.find_spec, shop.manager.store.newest()
    monkeypatch.setattr(params, "find_spec", lambda name: None if name == "torch" else find(name))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # another installation may have the command too
    service = run(create_app(shop.settings.model_copy(update={"training_command": command})))
    reported = service.client.get("/jobs/options").json()["no_training"]
    answer = service.client.post("/jobs/train", json=training())
    service.close()
    assert reason in reported
    assert (answer.status_code, answer.json()["detail"]) == (409, reported)
    assert shop.manager.store.newest() == before


OVERRIDES: dict[str, Any] = {
    "data.root": "/etc",
    "input.augment": "/tmp/parts.py:grey",
    "optimizer": 1,
    "input.size_px": [1, "a\nb"],
    "optimizer.epochs=1 --set data.root": 1,
    "loss.name": "os:system",
    "model.backbone": "timm:os:system",
}


def training(**given: object) -> dict[str, Any]:
    return {"job": "shop", "gallery": "shop", **given}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/jobs/000000000000", None, 404, "GET /jobs"),
        ("GET", "/jobs/..%2f..%2fetc/log", None, 404, ""),
        ("GET", "/jobs?state=asleep", None, 422, "state"),
        ("POST", "/galleries/nothing/compact", None, 404, "shop"),
        ("POST", "/galleries/shop/rebuild", {"bundle_id": "0" * 64}, 422, "Known are"),
        ("POST", "/galleries/shop/swap", {"with": "nothing"}, 404, "shop"),
        ("POST", "/galleries/shop/swap", {"with": "shop"}, 409, "itself"),
        ("POST", "/jobs/train", training(job="nothing"), 422, "cub-nir"),
        ("POST", "/jobs/train", training(job="/etc/passwd"), 422, "job"),
        *(
            ("POST", "/jobs/train", training(overrides={name: value}), 422, name.split("=")[0])
            for name, value in OVERRIDES.items()
        ),
    ],
)
def test_an_invalid_request_gets_a_cure(served, method, path, body, status, message) -> None:
    answer = served.client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert message in answer.text
    assert "Value error" not in answer.text


def test_jobs_outlive_their_service_and_are_visible_to_others(shop, served) -> None:
    command = shop.trainer(seconds=36, epochs=100)
    slow = run(create_app(shop.settings.model_copy(update={"training_command": command})))
    body = {"job": "shop", "gallery": "busy"}
    job = JobModel.model_validate(slow.client.post("/jobs/train", json=body).json())
    second = served.client.post("/galleries/busy/compact")
    assert second.status_code == 409
    assert job.id in second.json()["detail"]
    until(lambda: len(processes_of(job)) >= 3)
    slow.close()
    assert processes_of(job)
    assert served.client.get(f"/jobs/{job.id}").json()["state"] == "running"
    assert served.client.post(f"/jobs/{job.id}/cancel").status_code == 202
    assert ended(served, job.id)["state"] == "cancelled"
    until(lambda: not processes_of(job))
    fields = {"gallery": "busy"}
    answer = served.client.post("/search", files={"image": query(shop)}, data=fields)
    assert answer.json()["bundle_id"] == shop.old.bundle_id


SMALL = {
    "optimizer.epochs": 1,
    "optimizer.batch_size": 4,
    "recall_at": [1, 2],
    "model.backbone": "timm:test_resnet",
    "model.dim": 16,
    "runtime.workers": 0,
    "input.size_px": 32,
    "input.resize_px": 36,
    "runtime.device": "cpu",
    "runtime.precision": "fp32",
}


def adapted(listed: Path, folder: Path) -> tuple[Bundle, set[str]]:
    """A model adapted on the command line to a list of products, and the products it knows."""
    run, out = folder / "run", folder / "bundle"
    settings = {
        **SMALL,
        "input.test_px": 32,
        "optimizer.min_steps": 2,
        "protocol.choose_by": "last",
    }
    words = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    words += ["--data", str(listed), "--out", str(out), "--run", str(run), "--weights", "none"]
    command = Path(sys.executable).with_name("kinlens-train")
    subprocess.run([command, "adapt", *words], check=True, stdout=subprocess.DEVNULL)
    with (run / "train.csv").open(encoding="utf-8") as stream:
        return Bundle.open(out), {row["class"] for row in csv.DictReader(stream)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["trained", pytest.param("adapted", marks=pytest.mark.long)])
def test_a_real_training_swaps_in_a_model_under_load(shop, tmp_path, name: str) -> None:
    """Without an attribute `class`; at length in the order of the tutorial: adapt, serve, feedback,
    train.
    """
    pytest.importorskip("timm")
    photos = shutil.copytree(shop.photos, tmp_path / "photos")
    rows = [f"Shop/{path.name.replace('-', ' ')},{path.name}" for path in shop.photos.iterdir()]
    listed = photos / "products.csv"
    listed.write_text("\n".join(["product,path", *rows]), encoding="utf-8")
    old, known = adapted(listed, tmp_path) if name == "adapted" else (shop.old, None)
    state = tmp_path / "state"  # of its own: another service would start the job as it is set
    store_bundle(old.path, state / "bundles")
    path, settings = state / "galleries" / name, BuildSettings(name=name)
    build_gallery(csv_source(listed), OnnxEmbedder.open(old), path, settings)
    more = {"state": state, "training_command": "kinlens-train", "feedback": "pictures"}
    service = run(create_app(Settings(**shop.settings.model_dump() | more)))
    asked = ("query.png", query(shop))
    found = service.client.post("/search", files={"image": asked}, data={"gallery": name})
    judged = {"item": found.json()["hits"][0]["key"], "action": "clicked"}
    judged |= {"answer_id": found.json()["answer_id"]}
    service.client.post("/feedback", files={"image": asked}, data=judged).raise_for_status()
    body = {
        "job": "demo",
        "gallery": name,
        "feedback": True,
        "gate": {"max_recall_loss": 1.0, "min_queries": 4},
        "overrides": SMALL,
    }
    with load(service.url, name, query(shop), every_s=0.5) as answers:
        answer = service.client.post("/jobs/train", json=body)
        assert answer.status_code == 202, answer.text
        job = ended(service, answer.json()["id"])
        log = service.client.get(f"/jobs/{job['id']}/log").json()["text"]
        assert job["state"] == "succeeded", (job, log)
        assert "feedback: 1 query image(s) join 1 train class(es)" in log, log
        report = job["report"]
        assert (report["swapped"], report["training"]["epochs"]) == (True, [1, 1]), report
        assert (report["classes"], report["judged"]) == (3, 12)
        made = report["new"]["bundle_id"]
        assert report["old"]["bundle_id"] == old.bundle_id != made
        until(lambda: answers[-1]["bundle_id"] == made)
    assert {found["bundle_id"] for found in answers} == {old.bundle_id, made}
    assert answers[-1]["hits"][0]["score"] > 0.99
    record = Bundle.open(state / "bundles" / made[:16]).seen()
    learnt = {f"Shop/class {n}" for n in range(6) if record.has_class(f"Shop/class {n}")}
    assert len(learnt) == 3
    assert known in (None, learnt), "both split the classes alike"
    assert record.has_image(hashlib.sha256(query(shop)).hexdigest())
    service.close()


def test_without_a_state_folder_jobs_are_409_with_the_cure(start_service) -> None:
    service = start_service(anonymous_scopes=("admin",))
    for method, path in [("GET", "/jobs"), ("GET", "/jobs/x"), ("POST", "/galleries/shop/compact")]:
        answer = service.client.request(method, path)
        assert answer.status_code == 409, answer.text
        assert "--state" in answer.json()["detail"]
