"""Jobs run in processes of their own and always reach a final state.

What they do is tested in this process, where it is not their end that matters.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.bundle import MAP, Bundle, write_bundle
from kinlens.embedder.errors import InvalidParameterError, JobConflictError
from kinlens.embedder.manifest import MapFile
from kinlens.golden import Label
from kinlens.quality.golden import GoldenSet, NewQuery
from kinlens.service.jobs.manager import LOG_PAGE
from kinlens.service.jobs.params import options_of, params_of, plan_of
from tests.support.detectors import with_detector
from tests.support.job_shops import JobShop, processes_of, size_of, write_photos
from tests.support.seams import (
    FeedbackStore,
    GalleryFolder,
    Job,
    Question,
    known_bundles,
    store_bundle,
)
from tests.support.waiting import until
from tests.tiny import encoded, photo


def in_command(job: Job) -> Job:
    """A training in the middle of its command."""
    until(lambda: len(processes_of(job)) >= 3)
    return job


def record(shop: JobShop, job: Job, name: str) -> Any:
    """What the fake trainer wrote down."""
    return json.loads((shop.state / "runs" / job.id / f"{name}.json").read_text())


def first_process(job: Job) -> int:
    return os.getpgid(processes_of(job)[0])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("photo_count", "attribute"), [(2, "class"), (4, "brand")])
def test_a_golden_set_of_twenty_queries_decides(shop, photo_count: int, attribute: str) -> None:
    golden = GoldenSet(shop.path)
    new = []
    for number in range(6):
        label = Label(attribute="class", value=f"class-{number}")
        images = (encoded(photo(number), "JPEG", quality=80 + n) for n in range(photo_count))
        new += [NewQuery(image, label) for image in images]
    with contextlib.closing(shop.gallery()) as gallery:
        golden.add(new, gallery)
    queries = golden.queries()
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id, class_attribute=attribute)
    report = shop.succeeded(job)
    found, reason = report["golden"], report["gate"]["reason"]
    assert found["judged"] == found["old"]["judged"] == found["new"]["judged"] == len(new)
    assert found["labels"] == 6
    assert found["old"]["bundle_id"] == shop.old.bundle_id
    assert found["new"]["bundle_id"] == shop.new.bundle_id
    if photo_count == 4:
        assert reason.startswith(f"On the golden set: recall@1 {found['new_recall_at_1']:.4f}")
        assert "paired" in reason
        assert "The items would refuse it" in report["gate"]["note"]
        assert report["gate"]["by"] == "golden"
        assert "not measured" not in reason
    else:
        assert "The golden set did not decide: 12 of its queries" in report["gate"]["note"]
        assert report["gate"]["by"] == "items"
    assert report["swapped"]
    assert golden.queries() == queries


@pytest.mark.usefixtures("in_process")
def test_damaged_bundles_are_passed_over(shop) -> None:
    folder, _ = known_bundles(shop.state, None)[shop.new.bundle_id]
    damaged = folder.with_name("copy")
    shutil.copytree(folder, damaged)
    (damaged / "model.onnx").write_bytes(b"")
    os.utime(damaged / "manifest.json", (2**32, 2**32))  # the newest would be used
    unread = folder.with_name("unread")
    unread.mkdir()
    (unread / "manifest.json").write_text('{"bundle_id": ')
    listed = {bundle.bundle_id for bundle in options_of(shop.settings).bundles}
    assert listed == {shop.old.bundle_id, shop.new.bundle_id}
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id, class_attribute="class", swap="never")
    assert not shop.succeeded(job)["swapped"]
    shop.succeeded(shop.manager.swap(job.id, "test"))
    assert shop.bundle_id() == shop.new.bundle_id
    shutil.rmtree(damaged)
    (folder / "model.onnx").write_bytes(b"")
    store_bundle(shop.new.path, folder.parent)  # as after a training
    assert Bundle.open(folder).bundle_id == shop.new.bundle_id


@pytest.mark.usefixtures("in_process")
def test_a_refused_candidate_can_be_swapped_in_with_later_changes(shop) -> None:
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id[:12], class_attribute="brand")
    report = shop.succeeded(job)
    assert not report["gate"]["passed"]
    assert "'brand'" in report["gate"]["reason"]
    assert not report["swapped"]
    assert shop.bundle_id() == shop.old.bundle_id
    with contextlib.closing(shop.gallery()) as gallery:
        gallery.remove(["class-0/0.png"])
        gallery.update({"class-0/1.png": {"price": 5}})
    assert shop.succeeded(shop.manager.swap(job.id, "test"))["swapped"]
    assert shop.bundle_id() == shop.new.bundle_id
    found = shop.content()
    assert "class-0/0.png" not in found
    assert found["class-0/1.png"][1]["price"] == 5
    with pytest.raises(JobConflictError, match="no new gallery to swap in"):
        shop.manager.swap(job.id, "test")


@pytest.mark.usefixtures("in_process")
def test_the_limit_of_missing_images_holds_at_rebuild_and_swap(shop) -> None:
    (shop.photos / "class-0/0.png").unlink()
    rebuild = {"bundle_id": shop.new.bundle_id, "swap": "never"}
    error = shop.failed(shop.start("rebuild", **rebuild, max_missing=0))
    assert "1 of 24" in error
    assert "max_missing" in error
    job = shop.start("rebuild", **rebuild, max_missing=0.05)
    report = shop.succeeded(job)
    assert [failure["key"] for failure in report["rebuild"]["failures"]] == ["class-0/0.png"]
    with contextlib.closing(shop.gallery()) as gallery:  # two new items, whose images are nowhere
        gallery.add(
            replace(entry, key=f"other-{n}", sha256=f"{n + 1:064x}", path=f"no-{n}")
            for n, entry in enumerate(gallery.entries(["class-1/0.png", "class-1/1.png"]))
        )
    assert "2 of 26 items" in shop.failed(shop.manager.swap(job.id, "test"))
    assert shop.bundle_id() == shop.old.bundle_id
    with contextlib.closing(shop.gallery()) as gallery:
        gallery.remove(["other-1"])  # the cure; one more than before is within the limit
    report = shop.succeeded(shop.manager.swap(job.id, "test"))
    assert [failure["key"] for failure in report["missing_since"]["failures"]] == ["other-0"]
    assert len(shop.content()) == 23


def test_a_training_makes_a_bundle_and_tests_it_with_unseen_classes(shop) -> None:
    overrides = {"optimizer.epochs": 2, "model.dim": 8}
    job = shop.start("train", overrides=overrides, gate={"min_queries": 12})
    report = shop.succeeded(job)
    assert report["training"]["figures"] == {"R@1": 50.0}
    assert report["training"]["epochs"] == [2, 2]
    assert report["swapped"]
    # Of 6 classes with 4 images each, the trainer takes half.
    assert (report["judged"], report["classes"]) == (12, 3)
    assert "classes that neither model was trained on" in report["gate"]["reason"]
    assert shop.bundle_id() == shop.new.bundle_id
    text = shop.manager.log(job.id).text
    assert "epoch 2: grün" in text
    assert "optimizer.epochs=2" in text
    assert not (shop.state / "runs" / job.id / "data").exists()


def test_a_training_with_too_few_products_to_judge_by_waits_for_a_person(shop) -> None:
    job = shop.start("train")
    report = shop.succeeded(job)
    assert report["gate"]["passed"] is None
    assert "12 images of 3 classes" in report["gate"]["reason"]
    assert "50 images of 6 classes are needed" in report["gate"]["reason"]
    assert "swap it in by hand" in report["gate"]["reason"]
    assert not report["swapped"]
    assert shop.bundle_id() == shop.old.bundle_id
    assert "--map" not in record(shop, job, "exported")


def test_a_training_that_would_change_nothing_is_refused(
    tmp_path: Path, make_tiny_bundle: Callable[..., Bundle], new_bundle: Bundle
) -> None:
    current = {"model.weights": "current"}
    for trained in (False, True):
        old = make_tiny_bundle(job={"name": "shop"} if trained else {})
        shop = JobShop(tmp_path / str(trained), old, new_bundle)
        at_start = {**current, "protocol.alpha": 0.0}
        further = {**current, "protocol.alpha": 0.25}
        for job, overrides, is_idle in (
            ("adapt", current, True),
            ("shop", at_start, True),
            ("adapt", further, False),
            ("adapt", {}, False),
            ("shop", current, False),
        ):
            asked = params_of("train", {"job": job, "overrides": overrides})
            if trained and is_idle:
                with pytest.raises(InvalidParameterError, match=f"{job} trains no model further"):
                    plan_of(asked, "shop", shop.settings)
            else:  # a trunk may still be whitened
                assert plan_of(asked, "shop", shop.settings)


def test_a_training_of_the_current_model_gets_the_feedback_with_its_image_names(shop) -> None:
    with contextlib.closing(FeedbackStore(shop.state)) as store:
        query_photo = Question("shop", "v", image="a" * 64)
        store.add(query_photo, "class-1/0.png", "bought", b"jpeg")
        store.add(Question("shop", "v", item="class-1/0.png"), "class-2/3.png", "wrong")
        store.add(Question("shop", "v", item="class-1/0.png"), "gone.png", "wrong")
        store.add(Question("other", "v", item="class-1/0.png"), "class-2/3.png", "wrong")
    overrides = {"model.weights": "current"}
    job = shop.start("train", feedback=True, overrides=overrides, swap="never")
    assert shop.succeeded(job)["feedback"] == {"bought": 1, "wrong": 1}
    run = shop.state / "runs" / job.id
    folder = run / "feedback"
    words = record(shop, job, "words")
    assert f'data.feedback="{folder}"' in words
    assert f'model.weights="{shop.old.path}"' in words
    assert not folder.exists(), "pictures of customers stay in one place"
    seen = record(shop, job, "feedback")
    first, second = (line.split(",") for line in seen["pairs"][1:])
    assert first[0] == f"pictures/{'a' * 64}.jpg"
    assert second[1] == first[2]
    assert all(seen["there"]), "each name is a file of the data"
    # Folders depend on the value alone, so that the next training splits the classes alike.
    digests = {
        name: hashlib.sha256(repr(name).encode()).hexdigest()[:12]
        for name in ("class-1", "class-2")
    }
    folders = [f"{name}-{digest}" for name, digest in digests.items()]
    assert [first[2].split("/")[0], second[2].split("/")[0]] == folders


def test_a_training_that_fails_says_why(shop) -> None:
    error = shop.failed(shop.start("train", job="cub-nir"))
    assert "The data set is broken. Fix it." in error
    error = shop.failed(shop.start("train", class_attribute="brand"))
    assert "'brand'" in error
    assert shop.bundle_id() == shop.old.bundle_id


def test_a_training_uses_named_data_and_weights_and_has_a_map_and_a_detector_as_the_old_model(
    tmp_path: Path, tiny_bundle: Bundle, new_bundle: Bundle
) -> None:
    known = MapFile(sum_difference=0.0, difference=0.0)
    manifest, model = tiny_bundle.manifest.model_copy(update={"map": known}), tiny_bundle.model_path
    golden = (
        tiny_bundle.golden_images(),
        tiny_bundle.golden_inputs(),
        tiny_bundle.golden_vectors(),
    )
    mapped = write_bundle(tmp_path / "mapped", manifest, model, *golden, files={MAP: model})
    old = with_detector(mapped, tmp_path / "old")
    shop = JobShop(tmp_path / "shop", old, new_bundle)
    file, folder = tmp_path / "mobilenet.pth", tmp_path / "shoes"
    shop.reopen(training_weights=(f"mobilenet={file}",), training_data=(f"shoes={folder}",))

    overrides = {"model.weights": "mobilenet"}
    job = shop.start("train", overrides=overrides, data="shoes", swap="never")
    shop.succeeded(job)
    assert not (shop.state / "runs" / job.id / "data").exists()
    named = " ".join(record(shop, job, "words"))
    assert f'model.weights="{file}"' in named
    assert f'data.root="{folder}"' in named or f'root = "{folder}"' in named
    assert "--map" in record(shop, job, "exported")
    folder, _ = known_bundles(shop.state, None)[new_bundle.bundle_id]
    assert Bundle.open(folder).manifest.boxes == old.manifest.boxes
    with pytest.raises(InvalidParameterError, match=r"Known are: .*mobilenet.*TRAINING_WEIGHTS"):
        shop.start("train", overrides={"model.weights": "weights.pth"})
    shop.close()


def test_a_killed_training_resumes_from_its_checkpoint(slow) -> None:
    job = in_command(slow.start("train"))
    run = slow.state / "runs" / job.id
    os.kill(first_process(job), signal.SIGKILL)
    error = slow.failed(job)
    assert "killed" in error
    assert f"/jobs/{job.id}/resume" in error
    until(lambda: not processes_of(job))
    until(lambda: not (run / "data").exists())
    in_command(slow.manager.resume(job.id))
    (run / "checkpoint.pt").write_text("state")
    os.killpg(first_process(job), signal.SIGKILL)
    slow.failed(job)
    photos = sorted(str(path.relative_to(run / "data")) for path in run.glob("data/*/*"))
    slow.reopen(training_command=slow.trainer())
    with contextlib.closing(slow.gallery()) as gallery:
        gallery.remove([next(gallery.items()).key])
    assert slow.manager.resume(job.id).state == "queued"
    slow.succeeded(job)
    assert "--resume" in (run / "words.json").read_text()
    _, *rows = (run / "train.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == photos[: len(rows)], "as if nothing had changed"
    assert not (run / "data").exists()
    with pytest.raises(JobConflictError, match="succeeded"):
        slow.manager.resume(job.id)


def test_cancel_ends_all_processes_without_secrets(slow, monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://:hunter2@127.0.0.1/0")
    before, version = slow.content(), slow.gallery().version
    job = in_command(slow.start("train"))
    for pid in processes_of(job):
        assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
    for path in (slow.state / "jobs" / job.id).iterdir():
        assert b"hunter2" not in path.read_bytes()
    os.kill(first_process(job), signal.SIGSTOP)  # it does not even react
    slow.manager.cancel(job.id)
    done = slow.ended(job)
    assert (done.state, done.error) == ("cancelled", None)
    assert done.ended_at is not None
    until(lambda: not processes_of(job))
    assert slow.content() == before
    assert slow.gallery().version == version
    with pytest.raises(JobConflictError, match="cancelled"):
        slow.manager.cancel(job.id)


def test_a_killed_rebuild_resumes_without_embedding_again(shop) -> None:
    """The image of the last item keeps the job waiting, in the second batch of 32."""
    gallery = shop.gallery()
    [entry] = gallery.entries(["class-0/0.png"])
    contents = [encoded(photo(100 + number)) for number in range(16)]
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
    job = shop.start("rebuild", bundle_id=shop.new.bundle_id, max_recall_loss=1)
    candidate = shop.state / "candidates" / job.id
    until(lambda: candidate.is_dir() and size_of(candidate) == 32)
    os.kill(first_process(job), signal.SIGKILL)
    assert f"/jobs/{job.id}/resume" in shop.failed(job)
    uploads[-1].unlink()
    uploads[-1].write_bytes(contents[-1])
    report = shop.succeeded(shop.manager.resume(job.id))
    assert report["rebuild"]["embedded"] == 8  # of 40
    assert report["rebuild"]["items"] == 40
    assert report["swapped"]
    assert shop.content() == before
    assert not candidate.exists()


def test_one_heavy_job_runs_at_a_time(slow) -> None:
    slow.build("other")
    job = in_command(slow.start("train"))
    waits = slow.start("rebuild", "other", bundle_id=slow.new.bundle_id)
    light = slow.build("light")
    slow.succeeded(slow.start("compact", light.name))
    assert slow.manager.store.get(waits.id).state == "queued"
    slow.manager.cancel(job.id)
    slow.succeeded(waits)


def test_pages_of_a_log_are_bounded_and_join_to_the_whole(shop, store) -> None:
    job = store.create("compact", "nothing", {}, "test")
    assert "is unknown" in shop.failed(job)
    text = "grün, 猫 and more\n" * 9000
    log = shop.state / "jobs" / job.id / "log.txt"
    log.write_text(text, encoding="utf-8")
    assert shop.manager.log(job.id, 10**12).text == ""
    offset, pages = 0, []
    while (page := shop.manager.log(job.id, offset)).text:
        assert len(page.text.encode()) <= LOG_PAGE
        offset = page.next_offset
        pages.append(page.text)
    assert "".join(pages) == text
    assert len(pages) > 2


@pytest.mark.usefixtures("in_process")
def test_a_sync_makes_the_gallery_equal_to_its_folder_or_says_why_not(shop: JobShop) -> None:
    part = shop.photos / "class-1"
    shop.reopen(sync_folders=(f"part={part}", f"other={shop.state}"))
    before = shop.content()
    for file in (shop.photos / "class-0").iterdir():
        file.unlink()
    (part / "0.png").rename(part / "renamed.png")
    assert "4 of 24 items (16.7%) would be removed" in shop.failed(shop.start("sync"))
    assert "is outside" in shop.failed(shop.start("sync", folder="other"))
    planned = shop.succeeded(shop.start("sync", max_removed="4", dry_run=True))
    assert (planned["sync"]["renamed"], planned["sync"]["removed"]) == (1, 4)
    assert shop.content() == before
    done = shop.succeeded(shop.start("sync", folder="part"))
    assert (done["sync"]["renamed"], done["sync"]["embedded"], done["skipped"]) == (1, 0, 0)
    shop.succeeded(shop.start("sync", max_removed="20%"))
    files = {file.relative_to(shop.photos).as_posix() for file in shop.photos.rglob("*.png")}
    assert shop.content().keys() == files
    for params in ({"folder": "unknown"}, {"max_removed": "101%"}):
        with pytest.raises(InvalidParameterError, match=r"Known are: other, part|0% to 100%"):
            shop.start("sync", **params)


@pytest.mark.usefixtures("in_process")
def test_a_sync_that_failed_is_completed_when_it_is_resumed(shop: JobShop) -> None:
    write_photos(shop.photos / "more", classes=2)
    with GalleryFolder(shop.path).locked():
        job = shop.start("sync")
        assert "a change made now would be lost" in shop.failed(job)
    assert shop.succeeded(shop.manager.resume(job.id))["sync"]["added"] == 8
    assert len(shop.content()) == 24 + 8
