"""The table of jobs: laws that hold for any number of processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import JobConflictError, StateError
from kinlens.models import JobKind
from kinlens.service.jobs.store import JobFolders
from tests.support.seams import Job, JobStore

ROOT = Path(__file__).parents[2]
Start = tuple[JobKind, str, dict[str, Any]]
CREATE = """
import sys
from pathlib import Path
from kinlens.embedder.errors import JobConflictError
from kinlens.service.jobs.store import JobStore
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


def running(store: JobStore, kind: JobKind = "compact", gallery: str = "shop") -> Job:
    job = store.create(kind, gallery, {"n": 1}, "test")
    assert store.begin(job.id)
    return store.get(job.id)


def test_a_job_begins_once_and_ends_once(store) -> None:
    job = store.create("compact", "shop", {}, "test")
    assert [store.begin(job.id) for _ in range(3)] == [True, False, False]
    assert store.fail(job.id, "why")
    assert not store.succeed(job.id)
    store.progress(job.id, "more", 900)
    found = store.get(job.id)
    assert (found.state, found.error, found.done) == ("failed", "why", 0)
    assert not store.begin(job.id)
    assert not store.cancel(job.id)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (("compact", "x", {}), ("compact", "x", {}), True),
        (("compact", "x", {}), ("compact", "y", {}), False),
        (("swap", "x", {"with": "y"}), ("compact", "y", {}), True),
        (("swap", "x", {"with": "y"}), ("compact", "x", {}), True),
        (("swap", "x", {"with": "y"}), ("swap", "y", {"with": "x"}), True),
        (("swap", "x", {"with": "y"}), ("swap", "z", {"with": "y"}), False),  # both only read it
        (("swap", "x", {"with": "y"}), ("swap", "y", {"with": "z"}), True),
        (("swap", "x", {"with": "y"}), ("compact", "z", {}), False),
    ],
)
def test_jobs_on_one_gallery_exclude_each_other(store, one, other, meet, is_turned) -> None:
    first, second = (other, one) if is_turned else (one, other)
    job = store.create(*first, "test")
    if meet:
        with pytest.raises(JobConflictError, match=job.id):
            store.create(*second, "test")
    else:
        store.create(*second, "test")


def test_only_a_cancel_before_the_commit_is_accepted(store) -> None:
    early = running(store, gallery="early")
    assert store.cancel(early.id)
    assert not store.commit(early.id)
    store.fail(early.id, "why")
    assert (store.get(early.id).state, store.get(early.id).error) == ("cancelled", None)
    late = running(store, gallery="late")
    assert store.commit(late.id)
    assert not store.cancel(late.id)
    assert not store.get(late.id).cancel_requested


def test_only_a_failed_job_of_a_free_gallery_is_renewed(store) -> None:
    job = running(store, "train")
    with pytest.raises(JobConflictError, match="running"):
        store.renew(job.id)
    store.fail(job.id, "why")
    other = store.create("swap", "else", {"with": "shop"}, "test")
    with pytest.raises(JobConflictError, match=other.id):
        store.renew(job.id)
    assert store.begin(other.id)
    assert store.succeed(other.id)
    renewed = store.renew(job.id)
    assert (renewed.state, renewed.error, renewed.ended_at) == ("queued", None, None)
    store.cancel(renewed.id)
    with pytest.raises(JobConflictError, match="succeeded"):
        store.renew(other.id)


def test_of_concurrent_processes_one_gets_the_gallery(tmp_path) -> None:
    path = tmp_path / "service.sqlite"
    command = [sys.executable, "-c", CREATE, str(path)]
    processes = [
        subprocess.Popen([*command, str(n)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    reported = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(reported) == ["mine", "taken", "taken", "taken"]
    assert len(JobStore(path).newest()) == 41


def test_a_damaged_file_is_an_error_that_names_it(tmp_path) -> None:
    path = tmp_path / "service.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match=r"service\.sqlite"):
        JobStore(path)


@pytest.mark.parametrize("begun", ["checkpoint.pt", "fold-00/log.jsonl", None])
def test_the_images_of_a_training_stay_while_it_can_resume(tmp_path, begun: str | None) -> None:
    folders = JobFolders(tmp_path, "j1")
    folders.data.mkdir(parents=True)
    if begun is not None:
        file = folders.run / begun
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    folders.drop_images()
    assert folders.data.is_dir() == (begun is not None)
