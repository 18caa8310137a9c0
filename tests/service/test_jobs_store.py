"""The table of jobs: laws that hold for any number of processes."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from embedder.errors import JobConflictError, JobNotFoundError, StateError
from service.jobs.steps import JobCancelledError, Steps
from tests.support.seams import Job, JobStore

ROOT = Path(__file__).parents[2]
CREATE = """
import sys
from pathlib import Path
from embedder.errors import JobConflictError
from service.jobs.store import JobStore
store = JobStore(Path(sys.argv[1]))
for number in range(10):
    store.create("compact", f"{sys.argv[2]}-{number}", {}, "test")
try:
    store.create("compact", "the only one", {}, "test")
    print("mine")
except JobConflictError:
    print("taken")
"""


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "state" / "service.sqlite")


def running(store: JobStore, kind: str = "compact", gallery: str = "shop") -> Job:
    job = store.create(kind, gallery, {"n": 1}, "test")  # type: ignore[arg-type]
    assert store.begin(job.id, 1)
    return store.get(job.id)


def test_a_job_is_read_as_it_was_written(store: JobStore) -> None:
    job = running(store)
    assert (job.kind, job.gallery, job.by, job.params) == ("compact", "shop", "test", {"n": 1})
    assert (job.state, job.done, job.total, job.ended_at) == ("running", 0, 1000, None)
    assert job.started_at is not None
    assert store.newest() == store.active() == store.newest("running") == [job]
    assert store.newest("failed") == []
    with pytest.raises(JobNotFoundError, match="GET /jobs"):
        store.get("nothing")


def test_the_newest_come_first_and_no_more_than_asked_for(store: JobStore) -> None:
    ids = [store.create("compact", f"g{n}", {}, "test").id for n in range(5)]
    assert [job.id for job in store.newest(limit=3)] == ids[:1:-1]
    assert [job.id for job in store.active()] == ids


def test_done_never_goes_back_and_never_beyond_the_whole(store: JobStore) -> None:
    job = running(store)
    for told, seen in [(10, 10), (5, 10), (400, 400), (10**9, 1000), (1, 1000)]:
        store.progress(job.id, f"told {told}", told)
        assert store.get(job.id).done == seen
        assert store.get(job.id).step == f"told {told}"


def test_a_job_ends_once(store: JobStore) -> None:
    job = running(store)
    assert store.finish(job.id, "failed", "why")
    assert not store.finish(job.id, "succeeded")
    store.progress(job.id, "more", 900)
    found = store.get(job.id)
    assert (found.state, found.error, found.done) == ("failed", "why", 0)
    assert not store.begin(job.id, 1)
    assert not store.cancel(job.id)


def test_a_job_is_begun_by_one(store: JobStore) -> None:
    job = store.create("compact", "shop", {}, "test")
    assert [store.begin(job.id, 1) for _ in range(3)] == [True, False, False]


def test_one_heavy_job_runs_at_a_time(store: JobStore) -> None:
    first = running(store, "train", "a")
    second = store.create("rebuild", "b", {}, "test")
    assert not store.begin(second.id, 1)
    running(store, "compact", "c")
    store.finish(first.id, "failed")
    assert store.begin(second.id, 1)


def test_a_cancel_before_the_commit_keeps_the_gallery_and_one_after_it_is_refused(
    store: JobStore,
) -> None:
    early = running(store, gallery="early")
    assert store.cancel(early.id)
    with pytest.raises(JobCancelledError):
        Steps(store, early.id).commit()
    late = running(store, gallery="late")
    Steps(store, late.id).commit()
    assert not store.cancel(late.id)
    assert not store.get(late.id).cancel_requested


def test_a_job_that_waits_is_cancelled_at_once(store: JobStore) -> None:
    job = store.create("compact", "shop", {}, "test")
    assert store.cancel(job.id)
    found = store.get(job.id)
    assert found.state == "cancelled"
    assert found.ended_at is not None
    store.create("compact", "shop", {}, "test")  # the gallery is free again


def test_only_what_did_not_succeed_is_renewed_and_only_while_the_gallery_is_free(
    store: JobStore,
) -> None:
    job = running(store, "train")
    with pytest.raises(JobConflictError):
        store.renew(job.id)
    store.finish(job.id, "failed", "why")
    other = running(store)
    with pytest.raises(JobConflictError, match=other.id):
        store.renew(job.id)
    store.finish(other.id, "succeeded")
    renewed = store.renew(job.id)
    assert (renewed.state, renewed.error, renewed.ended_at) == ("queued", None, None)
    store.cancel(renewed.id)
    with pytest.raises(JobConflictError, match="succeeded"):
        store.renew(other.id)


def test_steps_tell_a_part_of_the_whole(store: JobStore) -> None:
    job = running(store)
    steps = Steps(store, job.id)
    more = steps.enter("embed", 0.2, 0.6, units=1000)
    assert store.get(job.id).done == 200
    more(1000)
    assert (store.get(job.id).done, store.get(job.id).step) == (600, "embed 1,000 of 1,000")
    more(5000)
    assert store.get(job.id).done == 600


def test_many_processes_write_at_once_and_one_gets_the_gallery(tmp_path: Path) -> None:
    path = tmp_path / "service.sqlite"
    command = [sys.executable, "-c", CREATE, str(path)]
    processes = [
        subprocess.Popen([*command, str(n)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(said) == ["mine", "taken", "taken", "taken"]
    assert len(JobStore(path).newest()) == 41


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "service.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match=r"service\.sqlite"):
        JobStore(path)
    assert sqlite3.sqlite_version_info >= (3, 37)  # STRICT tables
