"""Jobs in a world that has changed since: nothing is lost in silence, and whoever looks goes on."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog

from embedder.bundle import Bundle
from embedder.errors import JobConflictError
from indexer.types import Entry
from service.jobs.tidy import KEPT_JOBS, tidy
from tests.support.job_shops import JobShop
from tests.support.seams import Job, JobManager, JobStore
from tests.support.waiting import until

MONTH = timedelta(days=31)


@pytest.fixture
def shop(
    tmp_path: Path, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> Iterator[JobShop]:
    """One whose manager starts jobs, and watches them only when a test opens it again."""
    made = JobShop(tmp_path, tiny_bundle, make_tiny_bundle(seed=1))
    yield made
    made.close()


@pytest.fixture
def store(shop: JobShop) -> JobStore:
    return JobStore(shop.state / "service.sqlite")


def now() -> datetime:
    return datetime.now(UTC)


def test_a_candidate_is_refused_where_pictures_are_missing_since_and_keeps_its_own_limit(
    shop: JobShop,
) -> None:
    (shop.pictures / "class-0/0.png").rename(shop.pictures / "gone")
    allowed = {"swap": "never", "max_missing": 0.05}  # of 24
    job = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id, **allowed).id)
    assert job.state == "succeeded", job
    before = shop.content()
    gallery = shop.gallery()
    entries = gallery.entries(["class-1/0.png", "class-1/1.png"])
    gallery.add(_as_other(entry, number) for number, entry in enumerate(entries))
    gallery.close()
    refused = shop.ended(shop.manager.swap(job.id, "test").id)
    assert refused.state == "failed"
    assert "2 of 26 items" in (refused.error or "")
    assert "rebuild with a greater max_missing" in (refused.error or "")
    assert refused.report is not None
    assert refused.report["missing_since"]["count"] == 2
    assert shop.bundle_id() == shop.old.bundle_id
    assert len(shop.content()) == len(before) + 2
    gallery = shop.gallery()
    gallery.remove(["other-1"])  # the cure; one more than before is within the limit
    gallery.close()
    swapped = shop.ended(shop.manager.swap(job.id, "test").id)
    assert swapped.state == "succeeded", swapped
    assert swapped.report is not None
    found = [failure["key"] for failure in swapped.report["missing_since"]["failures"]]
    assert found == ["other-0"]
    assert shop.content() == {key: before[key] for key in before if key != "class-0/0.png"}


def _as_other(entry: Entry, number: int) -> Entry:
    """An item with a content of its own, whose picture is nowhere."""
    return replace(entry, key=f"other-{number}", sha256=f"{number + 1:064x}", path=f"no-{number}")


def test_a_worker_does_what_a_service_elsewhere_takes_and_fails_what_it_does_not_know(
    shop: JobShop, tmp_path: Path
) -> None:
    for name in ("light", "heavy"):
        shop.build(name)
    taking = {
        "training_data": (f"cars={tmp_path}",),
        "training_command": "not-here",
        "jobs": "elsewhere",
    }
    manager = JobManager(shop.settings.model_copy(update=taking))
    manager.open()
    unknown = manager.start("train", "shop", {"job": "shop", "data": "cars"}, "test")
    light = manager.start("compact", "light", {}, "test")
    heavy = manager.start("rebuild", "heavy", {"bundle_id": shop.new.bundle_id}, "test")
    assert manager.get(light.id).state == "queued"
    shop.manager.work(once=True)
    assert manager.get(unknown.id).state == "failed"
    assert "'cars' is unknown" in (manager.get(unknown.id).error or "")
    assert "KINLENS_TRAINING_DATA" in (manager.get(unknown.id).error or "")
    assert manager.get(light.id).state == "succeeded"
    assert manager.get(heavy.id).state == "succeeded"
    manager.close()


def test_whoever_looks_goes_on_when_the_table_is_there_again(
    shop: JobShop, store: JobStore
) -> None:
    job = store.create("compact", "shop", {}, "test")
    table, aside = shop.state / "service.sqlite", shop.state / "aside"
    table.rename(aside)
    table.mkdir()
    with structlog.testing.capture_logs() as events:
        shop.manager.open()
        until(lambda: any("looked after" in event["event"] for event in events))
    table.rmdir()
    aside.rename(table)
    assert shop.ended(job.id).state == "succeeded"


def test_closing_does_not_wait_for_a_disk_that_does_not_answer(
    shop: JobShop, store: JobStore
) -> None:
    """The manifest of a bundle is a pipe that nobody writes, so that a look at it never ends."""
    pipe = shop.state / "bundles" / "dead" / "manifest.json"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    job = store.create("rebuild", "shop", {"bundle_id": shop.new.bundle_id}, "test")
    shop.manager.open()
    until(lambda: store.get(job.id).state == "running")
    with structlog.testing.capture_logs() as events:
        closing = threading.Thread(target=shop.manager.close, daemon=True)
        closing.start()
        closing.join(30)
        has_ended = not closing.is_alive()
    pipe.write_text("{}")  # the look goes on
    assert has_ended
    assert "a look at the jobs does not end" in [event["event"] for event in events]
    assert shop.ended(job.id).state == "succeeded"


def ended(store: JobStore, gallery: str, fails: bool = False) -> Job:
    """A rebuild that has left a candidate and a run."""
    job = store.create("rebuild", gallery, {}, "test")
    assert store.begin(job.id)
    assert store.fail(job.id, "it did") if fails else store.succeed(job.id)
    return job


def test_old_jobs_go_with_their_folders_and_the_newest_200_stay(
    shop: JobShop, store: JobStore
) -> None:
    ids = [ended(store, f"g{number}").id for number in range(KEPT_JOBS + 3)]
    kept = [shop.state / name / ids[-1] for name in ("jobs", "runs")]
    gone = [shop.state / name / ids[0] for name in ("jobs", "runs")]
    for folder in (*kept, *gone):
        folder.mkdir(parents=True)
    tidy(shop.settings, store)
    assert len(store.newest(limit=1000)) == KEPT_JOBS + 3, "all are young"
    assert all(folder.is_dir() for folder in (*kept, *gone))
    tidy(shop.settings, store, now() + MONTH)
    assert [job.id for job in store.newest(limit=1000)] == ids[:2:-1]
    assert not any(folder.exists() for folder in gone)
    assert [folder.is_dir() for folder in kept] == [True, False]


def test_of_each_gallery_the_newest_candidate_that_waits_and_what_can_go_on_stay_for_a_week(
    shop: JobShop, store: JobStore
) -> None:
    root = shop.state / "candidates"
    outcomes = [False, False, True, True]  # whether it fails, the oldest first
    ids = [ended(store, "shop", fails).id for fails in outcomes]
    for name in (*ids, "nobody"):
        (root / name).mkdir(parents=True)
    tidy(shop.settings, store)
    assert {path.name for path in root.iterdir()} == {ids[1], ids[3]}
    ended(store, "shop")  # takes the place of the one that failed, and left no candidate
    tidy(shop.settings, store)
    assert {path.name for path in root.iterdir()} == {ids[1]}
    tidy(shop.settings, store, now() + timedelta(days=8))
    assert list(root.iterdir()) == []
    with pytest.raises(JobConflictError):
        shop.manager.swap(ids[1], "test")


def test_a_bundle_goes_when_nothing_has_used_it_for_thirty_days(
    shop: JobShop, store: JobStore
) -> None:
    [folder] = (shop.state / "bundles").iterdir()
    os.utime(folder, (0, 0))  # as a copy that keeps its times
    tidy(shop.settings, store)
    assert folder.is_dir(), "it came today"
    job = store.create("compact", "shop", {}, "test")
    tidy(shop.settings, store, now() + MONTH)
    assert folder.is_dir(), "a job may need it"
    store.cancel(job.id)
    tidy(shop.settings.model_copy(update={"bundle": folder}), store, now() + MONTH)
    assert folder.is_dir(), "the settings name it"
    away = f"away={shop.state / 'away'}"
    tidy(shop.settings.model_copy(update={"galleries": (away,)}), store, now() + MONTH)
    assert folder.is_dir(), "a gallery cannot be read"
    tidy(shop.settings, store, now() + MONTH)
    assert list(folder.parent.iterdir()) == []


def test_a_bundle_in_use_is_marked_and_stays_a_month_after_it_was_swapped_out(
    shop: JobShop, store: JobStore
) -> None:
    done = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id).id)
    assert done.state == "succeeded", done
    [folder] = (shop.state / "bundles").iterdir()
    os.utime(folder, (0, 0))
    tidy(shop.settings, store, now() + MONTH)
    assert now().timestamp() - folder.stat().st_mtime < 3600
