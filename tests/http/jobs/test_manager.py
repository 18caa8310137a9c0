"""Jobs: processes of their own that end as something, whatever happens to them."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from embedder.bundle import Bundle
from embedder.errors import InvalidParameterError, JobConflictError
from service.jobs.manager import LOG_PAGE
from service.jobs.params import checked
from tests.support.job_shops import JobShop, processes_of
from tests.support.seams import JobStore, PictureFolder
from tests.support.waiting import until
from tests.tiny import encoded, picture


@pytest.fixture(scope="session")
def new_bundle(make_tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return make_tiny_bundle(seed=1)


@pytest.fixture
def shop(tmp_path: Path, tiny_bundle: Bundle, new_bundle: Bundle) -> Iterator[JobShop]:
    made = JobShop(tmp_path, tiny_bundle, new_bundle)
    made.reopen()
    yield made
    made.close()


@pytest.fixture
def slow(shop: JobShop) -> JobShop:
    """A shop whose training would take an hour."""
    shop.reopen(training_command=shop.trainer(seconds=36, epochs=100))
    return shop


def started(slow: JobShop) -> str:
    """A training in the middle of its command."""
    job = slow.start("train", job="shop")
    until(lambda: len(processes_of(job.id)) >= 3)
    return job.id


def test_a_rebuild_compares_swaps_and_says_so(shop: JobShop) -> None:
    before = shop.content()
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id)
    assert (job.kind, job.gallery, job.by) == ("rebuild", "shop", "test")
    done = shop.ended(job.id)
    assert done.state == "succeeded", done
    report = done.report
    assert report is not None
    assert report["old"]["bundle_id"] == shop.old.bundle_id
    assert report["new"]["bundle_id"] == shop.new.bundle_id
    assert report["old"]["items"] == report["new"]["items"] == 24
    assert 0 <= report["old"]["recall_at_1"] <= 1
    assert 0 <= report["overlap_at_k"] <= 1
    assert report["gate"]["passed"], report["gate"]
    assert report["swapped"]
    assert shop.bundle_id() == shop.new.bundle_id
    assert shop.content() == before
    assert (done.done, done.total, done.error) == (1000, 1000, None)
    assert not (shop.state / "candidates" / job.id).exists()
    assert (shop.state / "bundles" / shop.new.bundle_id[:16] / "manifest.json").is_file()
    assert (shop.state / "jobs" / job.id / "report.json").is_file()


def test_a_gate_that_is_not_passed_leaves_the_old_gallery_and_a_candidate(shop: JobShop) -> None:
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id[:12], class_attribute="brand")
    done = shop.ended(job.id)
    assert done.report is not None
    assert done.state == "succeeded"
    assert not done.report["gate"]["passed"]
    assert "'brand'" in done.report["gate"]["reason"]
    assert not done.report["swapped"]
    assert shop.bundle_id() == shop.old.bundle_id
    assert (shop.state / "candidates" / job.id).is_dir()


def test_a_candidate_is_swapped_in_later_with_what_changed_since(shop: JobShop) -> None:
    job = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id, swap="never").id)
    assert job.report is not None
    assert job.report["gate"]["passed"]
    assert shop.bundle_id() == shop.old.bundle_id
    gallery = shop.gallery()
    gallery.remove(["class-0/0.png"])
    gallery.update({"class-0/1.png": {"price": 5}})
    gallery.close()
    swapped = shop.ended(shop.manager.swap(job.id, "test").id)
    assert swapped.state == "succeeded", swapped
    assert swapped.report is not None
    assert swapped.report["swapped"]
    assert shop.bundle_id() == shop.new.bundle_id
    found = shop.content()
    assert "class-0/0.png" not in found
    assert found["class-0/1.png"][1]["price"] == 5
    with pytest.raises(JobConflictError, match="no gallery that waits"):
        shop.manager.swap(job.id, "test")


def test_pictures_come_from_the_image_root_and_from_the_uploads(shop: JobShop) -> None:
    gallery = shop.gallery()
    [entry] = gallery.entries(["class-0/0.png"])
    data = (shop.pictures / entry.path).read_bytes()
    with PictureFolder(gallery.path).keeping({entry.sha256: data}):
        gallery.add([replace(entry, path=""), replace(entry, key="other", path="")])
    gallery.close()
    (shop.pictures / entry.path).unlink()
    before = shop.content()
    done = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id, max_missing=0).id)
    assert done.state == "succeeded", done
    assert shop.content() == before


def test_missing_pictures_are_listed_and_the_limit_decides(shop: JobShop) -> None:
    (shop.pictures / "class-0/0.png").unlink()
    done = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id, max_missing=0).id)
    assert done.state == "failed"
    assert done.error is not None
    assert "1 of 24" in done.error
    assert "max_missing" in done.error
    assert shop.bundle_id() == shop.old.bundle_id
    done = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id, max_missing=0.1).id)
    assert done.state == "succeeded"
    assert done.report is not None
    assert [f["key"] for f in done.report["rebuild"]["failures"]] == ["class-0/0.png"]
    assert len(shop.content()) == 23


def test_a_training_goes_from_pictures_to_a_new_bundle_and_its_progress_forward_only(
    shop: JobShop,
) -> None:
    overrides = {"optimizer.epochs": 2, "model.dim": 8}
    job = shop.start("train", job="shop", overrides=overrides, gate={"min_queries": 12})
    seen, steps = [], set()
    while (now := shop.manager.get(job.id)).is_active:
        seen.append(now.done)
        steps.add(now.step.split(":")[0])
        time.sleep(0.02)
    done = shop.ended(job.id)
    assert seen == sorted(seen), "progress goes forward only"
    assert done.done == 1000
    assert "train" in steps
    assert done.state == "succeeded", (done, shop.manager.log(job.id).text)
    assert done.report is not None
    assert done.report["training"]["figures"] == {"R@1": 50.0}
    assert done.report["training"]["epochs"] == [2, 2]
    assert done.report["swapped"]
    # Of 6 classes with 4 pictures each, the trainer takes half.
    assert (done.report["judged"], done.report["classes"]) == (12, 3)
    assert "classes that the new model was not trained on" in done.report["gate"]["reason"]
    assert shop.bundle_id() == shop.new.bundle_id
    text = shop.manager.log(job.id).text
    assert "epoch 2: grün" in text
    assert "optimizer.epochs=2" in text
    assert not (shop.state / "runs" / job.id / "data").exists()


def test_a_model_is_not_put_in_place_by_too_few_photographs_that_it_did_not_see(
    shop: JobShop,
) -> None:
    done = shop.ended(shop.start("train", job="shop").id)
    assert done.state == "succeeded", done
    assert done.report is not None
    assert not done.report["swapped"]
    reason = done.report["gate"]["reason"]
    assert "12 photographs of 3 classes" in reason
    assert "the gate asks for 50" in reason
    assert shop.bundle_id() == shop.old.bundle_id


def test_a_command_that_fails_fails_the_job_with_its_last_words(shop: JobShop) -> None:
    done = shop.ended(shop.start("train", job="cub-nir").id)
    assert done.state == "failed"
    assert "The data set is broken. Mend it." in (done.error or "")
    assert shop.bundle_id() == shop.old.bundle_id


@pytest.mark.parametrize("victim", ["job", "all"])
def test_a_job_that_is_killed_has_failed_with_a_cure_and_leaves_no_process(
    slow: JobShop, victim: str
) -> None:
    job_id = started(slow)
    group = os.getpgid(processes_of(job_id)[0])  # its first process has this number
    if victim == "job":
        os.kill(group, signal.SIGKILL)
    else:
        os.killpg(group, signal.SIGKILL)
    done = slow.ended(job_id)
    assert done.state == "failed"
    assert "killed" in (done.error or "")
    assert f"/jobs/{job_id}/resume" in (done.error or "")
    until(lambda: not processes_of(job_id))
    until(lambda: not (slow.state / "runs" / job_id / "data").exists())


@pytest.mark.parametrize("reacts", [True, False])
def test_cancel_ends_all_processes_and_leaves_the_gallery_as_it_was(
    slow: JobShop, reacts: bool
) -> None:
    before, version = slow.content(), slow.gallery().version
    job_id = started(slow)
    if not reacts:
        os.kill(os.getpgid(processes_of(job_id)[0]), signal.SIGSTOP)
    slow.manager.cancel(job_id)
    done = slow.ended(job_id)
    assert (done.state, done.error) == ("cancelled", None)
    assert done.ended_at is not None
    until(lambda: not processes_of(job_id))
    assert slow.content() == before
    assert slow.gallery().version == version
    with pytest.raises(JobConflictError, match="cancelled"):
        slow.manager.cancel(job_id)


def test_a_cancelled_training_goes_on_from_its_checkpoint(slow: JobShop) -> None:
    job_id = started(slow)
    (slow.state / "runs" / job_id / "checkpoint.pt").write_text("state")
    slow.cancelled(job_id)
    slow.reopen(training_command=slow.trainer())
    assert slow.manager.resume(job_id).is_active
    done = slow.ended(job_id)
    assert done.state == "succeeded", done
    assert "--resume" in (slow.state / "runs" / job_id / "words.json").read_text()
    with pytest.raises(JobConflictError, match="succeeded"):
        slow.manager.resume(job_id)


def test_a_rebuild_that_was_killed_goes_on_without_embedding_again_what_it_has(
    shop: JobShop,
) -> None:
    """The picture of the last item keeps the job waiting, in the second batch of 32."""
    gallery = shop.gallery()
    [entry] = gallery.entries(["class-0/0.png"])
    contents = [encoded(picture(100 + number)) for number in range(16)]
    digests = [hashlib.sha256(data).hexdigest() for data in contents]
    gallery.add(replace(entry, key=digest, sha256=digest, path="") for digest in digests)
    gallery.close()
    before = shop.content()
    uploads = [shop.path / "pictures" / digest[:2] / digest for digest in digests]
    for path, data in zip(uploads, contents, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    uploads[-1].unlink()
    os.mkfifo(uploads[-1])
    job_id = shop.start("rebuild", bundle_id=shop.new.bundle_id, max_recall_loss=1).id
    candidate = shop.state / "candidates" / job_id
    until(lambda: candidate.is_dir() and shop.size_of(candidate) == 32)
    os.kill(os.getpgid(processes_of(job_id)[0]), signal.SIGKILL)
    died = shop.ended(job_id)
    assert died.state == "failed"
    assert f"/jobs/{job_id}/resume" in (died.error or "")
    uploads[-1].unlink()
    uploads[-1].write_bytes(contents[-1])
    shop.manager.resume(job_id)
    done = shop.ended(job_id)
    assert done.state == "succeeded", done
    assert done.report is not None
    assert done.report["rebuild"]["embedded"] == 8  # of 40
    assert done.report["rebuild"]["items"] == 40
    assert done.report["swapped"]
    assert shop.content() == before
    assert not candidate.exists()


def test_one_job_at_a_time_changes_a_gallery_and_others_go_on(slow: JobShop) -> None:
    slow.build("other")
    job_id = started(slow)
    for kind, params in [
        ("compact", {}),
        ("rebuild", {"bundle_id": slow.new.bundle_id}),
        ("swap", {"with": "other"}),
    ]:
        with pytest.raises(JobConflictError, match=job_id):
            slow.start(kind, **params)
    with pytest.raises(JobConflictError, match=job_id):
        slow.manager.start("swap", "other", {"with": "shop"}, "test")
    waits = slow.manager.start("rebuild", "other", {"bundle_id": slow.new.bundle_id}, "test")
    assert waits.state == "queued"  # it is heavy, and one of these runs already
    slow.cancelled(job_id)
    assert slow.ended(waits.id).state == "succeeded"
    assert slow.ended(slow.start("compact").id).state == "succeeded"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.root", "/etc"),
        ("data", "x"),
        ("model.weights", "/etc/passwd"),
        ("model.backbone", "../x"),
        ("loss.name", "a/b"),
        ("name", "x"),
        ("optimizer.epochs=1 --set data.root", 1),
        ("optimizer", 1),
        ("optimizer.lr_head", float("nan")),
        ("input.size_px", [1, "a\nb"]),
    ],
)
def test_overrides_change_settings_and_never_paths(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match="overrides"):
        checked("train", {"job": "shop", "overrides": {name: value}})


def test_too_few_classes_are_refused_with_the_attribute(shop: JobShop) -> None:
    done = shop.ended(shop.start("train", job="shop", class_attribute="brand").id)
    assert done.state == "failed"
    assert "'brand'" in (done.error or "")


def test_a_log_is_read_in_bounded_pages_that_join_to_the_whole(shop: JobShop) -> None:
    job = shop.ended(shop.start("compact").id)
    assert shop.manager.log(job.id, 10**12).text == ""
    text = "grün, 猫 and more\n" * 9000
    log = shop.state / "jobs" / job.id / "log.txt"
    log.write_text(text, encoding="utf-8")
    offset, pages = 0, []
    while page := shop.manager.log(job.id, offset).text:
        assert len(page.encode()) <= LOG_PAGE
        offset = shop.manager.log(job.id, offset).next_offset
        pages.append(page)
    assert "".join(pages) == text
    assert len(pages) > 2


def test_the_process_of_a_job_sees_no_setting_and_no_secret(
    slow: JobShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://:hunter2@127.0.0.1/0")
    job_id = started(slow)
    for pid in processes_of(job_id):
        assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
    for path in (slow.state / "jobs" / job_id).iterdir():
        assert b"hunter2" not in path.read_bytes()


def test_named_data_sets_are_trained_on_where_they_are(shop: JobShop, tmp_path: Path) -> None:
    shop.reopen(training_data=(f"shoes={tmp_path / 'shoes'}",))
    job = shop.ended(shop.start("train", job="shop", data="shoes").id)
    assert job.state == "succeeded", job
    words = (shop.state / "runs" / job.id / "words.json").read_text()
    assert "data.root=" in words
    assert str(tmp_path / "shoes") in words
    assert not (shop.state / "runs" / job.id / "data").exists()


def test_a_training_starts_from_named_weights_or_the_gallery_s_own_model(
    shop: JobShop, tmp_path: Path
) -> None:
    file = tmp_path / "mobilenet.pth"
    shop.reopen(training_weights=(f"mobilenet={file}",))
    for name, path in (("mobilenet", file), ("current", shop.old.path), ("none", None)):
        overrides = {"model.weights": name}
        job = shop.ended(shop.start("train", job="shop", overrides=overrides, swap="never").id)
        assert job.state == "succeeded", job
        words = json.loads((shop.state / "runs" / job.id / "words.json").read_text())
        assert f'model.weights="{path or name}"' in words
    for other, message in (
        (
            "weights.pth",
            r"model.weights = 'weights.pth' is unknown. Known are: .*mobilenet.*TRAINING_WEIGHTS",
        ),
        (str(file), "paths are not taken"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            shop.start("train", job="shop", overrides={"model.weights": other})


def test_a_job_that_died_while_it_swapped_says_how_to_find_out(shop: JobShop) -> None:
    shop.manager.close()
    store = JobStore(shop.state / "service.sqlite")
    job = store.create("swap", "shop", {"with": "other"}, "test")
    assert store.begin(job.id)
    assert store.commit(job.id)
    done = shop.manager.get(job.id)  # nobody holds its lock
    assert done.state == "failed"
    assert "GET /galleries/shop" in (done.error or "")
