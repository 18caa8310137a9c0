"""The table of jobs, jobs after faults, and the deletion of old ones."""

import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest
import structlog

from kinlens.embedder.errors import JobConflictError
from kinlens.service.jobs import manager
from kinlens.service.jobs.manager import tidy
from tests.support.detectors import with_detector
from tests.support.job_shops import JobShop
from tests.support.seams import Job, JobStore
from tests.support.waiting import until

MONTH = timedelta(days=31)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def idle(shop: JobShop) -> JobShop:
    """A shop without a running job manager."""
    shop.manager.close()
    return shop


def test_watching_continues_when_the_table_is_back(shop) -> None:
    table, aside, broken = (shop.state / name for name in ("service.sqlite", "aside", "broken"))
    aside.hardlink_to(table)
    broken.symlink_to(shop.state)
    with structlog.testing.capture_logs() as events:
        broken.replace(table)  # in one step: a new table would be made where there is none
        until(lambda: any("cannot be watched" in event["event"] for event in events))
    aside.replace(table)
    shop.succeeded(shop.start("compact"))


def test_a_job_that_died_during_its_swap_names_the_check(idle, store) -> None:
    job = store.create("swap", "shop", {"with": "other"}, "test")
    assert store.begin(job.id)
    assert store.commit(job.id)
    idle.reopen()  # nobody holds the lock of the job
    assert "GET /galleries/shop" in idle.failed(job)


def ended(store: JobStore, gallery: str, fails: bool = False) -> Job:
    """A rebuild that has left a candidate and a run."""
    job = store.create("rebuild", gallery, {}, "test")
    assert store.begin(job.id)
    assert store.fail(job.id, "it did") if fails else store.succeed(job.id)
    return job


def test_old_jobs_are_deleted_with_their_folders(idle, store, monkeypatch) -> None:
    monkeypatch.setattr(manager, "KEPT_JOBS", 4)
    ids = [ended(store, f"g{number}").id for number in range(7)]
    kept = [idle.state / name / ids[-1] for name in ("jobs", "runs")]
    gone = [idle.state / name / ids[0] for name in ("jobs", "runs")]
    for folder in (*kept, *gone):
        folder.mkdir(parents=True)
    tidy(idle.settings, store)
    assert len(store.newest()) == 7, "all are young"
    assert all(folder.is_dir() for folder in (*kept, *gone))
    tidy(idle.settings, store, now() + MONTH)
    assert [job.id for job in store.newest()] == ids[:2:-1]
    assert not any(folder.exists() for folder in gone)
    assert [folder.is_dir() for folder in kept] == [True, False]


def test_the_newest_candidates_of_a_gallery_stay_for_a_week(idle, store) -> None:
    root = idle.state / "candidates"
    outcomes = [False, False, True, True]  # whether it fails, the oldest first
    ids = [ended(store, "shop", fails).id for fails in outcomes]
    for name in ids:
        (root / name).mkdir(parents=True)
    tidy(idle.settings, store)
    assert {path.name for path in root.iterdir()} == {ids[1], ids[3]}
    swap = store.create("swap", "shop", {"job": ids[1]}, "test")
    tidy(idle.settings, store, now() + timedelta(days=8))
    assert {path.name for path in root.iterdir()} == {ids[1], ids[3]}, "a job may need it"
    store.cancel(swap.id)
    tidy(idle.settings, store, now() + timedelta(days=8))
    assert list(root.iterdir()) == []
    with pytest.raises(JobConflictError):
        idle.manager.swap(ids[1], "test")


def test_a_bundle_unused_for_thirty_days_is_deleted(idle, store) -> None:
    [folder] = (idle.state / "bundles").iterdir()
    other = with_detector(idle.new, idle.state.parent / "other")
    shutil.copytree(other.path, folder.parent / "other")  # for the same galleries
    os.utime(folder, (0, 0))  # as a copy that keeps its times
    tidy(idle.settings, store)
    assert folder.is_dir(), "it came today"
    job = store.create("compact", "shop", {}, "test")
    tidy(idle.settings, store, now() + MONTH)
    assert folder.is_dir(), "a job may need it"
    store.cancel(job.id)
    tidy(idle.settings.model_copy(update={"bundle": folder}), store, now() + MONTH)
    assert folder.is_dir(), "the settings name it"
    away = f"away={idle.state / 'away'}"
    tidy(idle.settings.model_copy(update={"galleries": (away,)}), store, now() + MONTH)
    assert folder.is_dir(), "a gallery cannot be read"
    tidy(idle.settings, store, now() + MONTH)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (("compact", "x", {}), ("compact", "x", {}), True),
        (("compact", "x", {}), ("compact", "y", {}), False),
        (("swap", "x", {"with": "y"}), ("compact", "y", {}), True),
        (("swap", "x", {"with": "y"}), ("swap", "y", {"with": "x"}), True),
        (("swap", "x", {"with": "y"}), ("swap", "z", {"with": "y"}), False),  # both only read it
    ],
)
def test_jobs_on_one_gallery_exclude_each_other(tmp_path, one, other, meet) -> None:
    for first, second in ((one, other), (other, one)):
        table = JobStore(tmp_path / f"{first is one}.sqlite")
        job = table.create(*first, "test")
        if meet:
            with pytest.raises(JobConflictError, match=job.id):
                table.create(*second, "test")
        else:
            table.create(*second, "test")


def test_only_a_cancel_before_the_commit_is_accepted(tmp_path) -> None:
    table = JobStore(tmp_path / "state" / "service.sqlite")
    early, late = (table.create("compact", name, {}, "test") for name in ("early", "late"))
    assert table.begin(early.id)
    assert table.begin(late.id)
    assert table.cancel(early.id)
    assert not table.commit(early.id)
    table.fail(early.id, "why")
    assert (table.get(early.id).state, table.get(early.id).error) == ("cancelled", None)
    assert table.commit(late.id)
    assert not table.cancel(late.id)
    assert not table.get(late.id).cancel_requested
