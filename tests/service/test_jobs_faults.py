"""Jobs in a world that has changed since: nothing is lost in silence, and whoever looks goes on."""

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedder.bundle import Bundle
from indexer.types import Entry
from service.jobs.launch import Launcher
from service.jobs.tidy import KEPT_JOBS, tidy_bundles
from service.settings import Settings
from tests.service.job_shops import JobShop
from tests.support.seams import JobManager, run_worker

LONG_AGO = "2020-01-01T00:00:00.000+00:00"


@pytest.fixture
def shop(tmp_path: Path, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]) -> JobShop:
    return JobShop(tmp_path, tiny_bundle, make_tiny_bundle(seed=1))


def age(shop: JobShop) -> None:
    with sqlite3.connect(shop.state / "service.sqlite") as connection:
        connection.execute("UPDATE jobs SET ended_at = ? WHERE ended_at NOT NULL", (LONG_AGO,))
    connection.close()


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


def test_a_data_set_that_the_worker_does_not_know_fails_the_job_and_not_the_worker(
    shop: JobShop, tmp_path: Path
) -> None:
    shop.build("other")
    known = {"training_data": (f"cars={tmp_path}",), "jobs": "elsewhere"}
    manager = JobManager(shop.state, shop.settings.model_copy(update=known))
    job = manager.start("train", "shop", {"job": "shop", "data": "cars"}, "test")
    light = manager.start("compact", "other", {}, "test")
    run_worker(shop.settings, once=True)
    assert manager.get(job.id).state == "failed"
    assert "'cars' is unknown" in (manager.get(job.id).error or "")
    assert "KINLENS_TRAINING_DATA" in (manager.get(job.id).error or "")
    assert manager.get(light.id).state == "succeeded"


def test_what_nobody_foresaw_fails_its_job_alone_and_the_thread_goes_on(
    shop: JobShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.build("other")
    spawn = Launcher._spawn

    def broken(self: Launcher, folders: Any, lock: int) -> int:
        if folders.job_id == first.id:
            raise ZeroDivisionError("a secret of the machine")
        return spawn(self, folders, lock)

    elsewhere = shop.settings.model_copy(update={"jobs": "elsewhere"})
    first = JobManager(shop.state, elsewhere).start("compact", "shop", {}, "test")
    monkeypatch.setattr(Launcher, "_spawn", broken)
    manager = JobManager(shop.state, shop.settings)
    manager.open()
    shop.until(lambda: manager.get(first.id).state == "failed")
    assert "ZeroDivisionError" in (manager.get(first.id).error or "")
    second = manager.start("compact", "other", {}, "test")
    shop.until(lambda: manager.get(second.id).state == "succeeded")
    monkeypatch.setattr(Launcher, "tick", lambda _: 1 / 0)
    time.sleep(1.5)  # more than one look
    assert manager._thread is not None
    assert manager._thread.is_alive()
    manager.close()


def test_old_jobs_go_with_their_folders_and_the_newest_200_stay(shop: JobShop) -> None:
    store = shop.manager._store
    ids = []
    for number in range(KEPT_JOBS + 3):
        job = store.create("compact", f"g{number}", {}, "test")
        store.finish(job.id, "failed", "it did")
        ids.append(job.id)
    for name in ("jobs", "runs"):
        (shop.state / name / ids[0]).mkdir(parents=True)
        (shop.state / name / ids[-1]).mkdir(parents=True)
    shop.manager._tidy()
    assert len(store.newest(limit=1000)) == KEPT_JOBS + 3, "all are young"
    age(shop)
    shop.manager._tidy()
    assert [job.id for job in store.newest(limit=1000)] == ids[:2:-1]
    assert not (shop.state / "jobs" / ids[0]).exists()
    assert not (shop.state / "runs" / ids[0]).exists()
    assert (shop.state / "jobs" / ids[-1]).is_dir()


def test_a_bundle_goes_when_nothing_has_used_it_for_thirty_days(shop: JobShop) -> None:
    [folder] = (shop.state / "bundles").iterdir()
    os.utime(folder, (0, 0))  # as a copy that keeps its times
    store = shop.manager._store
    later = time.time() + 31 * 24 * 3600
    tidy_bundles(shop.state, shop.settings, store, time.time())
    assert folder.is_dir(), "it came today"
    job = store.create("compact", "shop", {}, "test")
    tidy_bundles(shop.state, shop.settings, store, later)
    assert folder.is_dir(), "a job may need it"
    store.finish(job.id, "failed")
    served = shop.settings.model_copy(update={"bundle": folder})
    tidy_bundles(shop.state, served, store, later)
    assert folder.is_dir(), "the settings name it"
    tidy_bundles(shop.state, shop.settings, store, later)
    assert list(folder.parent.iterdir()) == []


def test_a_bundle_in_use_is_marked_and_stays_a_month_after_it_was_swapped_out(
    shop: JobShop,
) -> None:
    done = shop.ended(shop.start("rebuild", bundle_id=shop.new.bundle_id).id)
    assert done.state == "succeeded", done
    [folder] = (shop.state / "bundles").iterdir()
    os.utime(folder, (0, 0))
    tidy_bundles(shop.state, shop.settings, shop.manager._store, time.time() + 31 * 24 * 3600)
    assert time.time() - folder.stat().st_mtime < 3600


def test_no_bundle_goes_while_a_gallery_cannot_be_read(shop: JobShop, tmp_path: Path) -> None:
    [folder] = (shop.state / "bundles").iterdir()
    away = Settings(**shop.settings.model_dump() | {"galleries": (f"away={tmp_path / 'away'}",)})
    tidy_bundles(shop.state, away, shop.manager._store, time.time() + 31 * 24 * 3600)
    assert folder.is_dir()
