"""A process that changes a gallery is killed at any moment; an oracle outside knows what must be
there."""

import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from tests.indexer import crasher
from tests.indexer.crasher import BUNDLE, DIM, Model
from tests.support.seams import set_fault_hook

KILLS = 200
SEED = 20_261_121

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.indexer.crasher"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty gallery that knows the attribute `stock`."""
    path = tmp_path / "gallery"
    gallery = Gallery.create(path, name="g", bundle_id=BUNDLE, dim=DIM)
    gallery.add([crasher.entry("first", "first", 1)])
    gallery.remove(["first"])
    gallery.close()
    return path


def killed(target: object, *arguments: object) -> int | None:
    """How a process ended that runs this function."""
    process = forks.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def wait_for(log: Path, timeout_s: float = 30.0) -> None:
    """Until the process has begun to work."""
    deadline = time.monotonic() + timeout_s
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.timeout(600)
def test_no_acknowledged_change_is_lost_in_200_kills_and_nothing_removed_returns(
    folder: Path, tmp_path: Path
) -> None:
    """Odd processes die at a fault point, the others at a random moment; every fourth has a second
    process beside it that does nothing but compact, and is killed too."""
    rng = np.random.default_rng(SEED)
    model: Model = {}
    finished = 0
    died_at: set[str] = set()
    for seed in range(KILLS):
        log, last = tmp_path / f"{seed}.log", tmp_path / f"{seed}.last"
        dies_at = seed // 2 % 40 if seed % 2 else None
        process = forks.Process(target=crasher.change, args=(folder, log, seed, dies_at, last))
        process.start()
        beside = forks.Process(target=crasher.compact, args=(folder,))
        if seed % 4 == 0:
            beside.start()
        if dies_at is None:
            wait_for(log)
            time.sleep(float(rng.uniform(0, 0.06)))
            process.kill()
        process.join(60)
        assert process.exitcode == -9, f"seed {seed} ended by itself: {process.exitcode}"
        if seed % 4 == 0:
            time.sleep(float(rng.uniform(0, 0.02)))
            beside.kill()
            beside.join()
        died_at |= {last.read_text()} if last.exists() else set()
        models = crasher.possible(model, log, seed)
        gallery = Gallery.open(folder)
        model = crasher.check(gallery, models)
        gallery.close()
        finished += log.read_text().count("done")
        log.unlink()
    assert finished > KILLS  # the processes did get to work
    assert died_at == points_of(folder)


def points_of(path: Path) -> set[str]:
    """Every fault point of changes and compactions."""
    points: list[str] = []
    gallery = Gallery.open(path)
    set_fault_hook(points.append)
    try:
        gallery.add([crasher.entry("last", "last", 1)])
        gallery.compact(IndexSettings(kind="flat"))
    finally:
        set_fault_hook(None)
    gallery.close()
    return {crasher.named(point) for point in points}


def test_a_build_that_dies_at_any_step_leaves_the_old_gallery_or_the_new_one(
    folder: Path,
) -> None:
    first = Gallery.open(folder)
    first.add([crasher.entry("old", "old content", 1)])
    first.close()
    steps: list[str] = []
    scratch = folder.parent / "scratch"
    (scratch / "versions").mkdir(parents=True)  # `folder` is there as well, so no step makes it
    set_fault_hook(steps.append)
    try:
        crasher.build(scratch, 30)
    finally:
        set_fault_hook(None)
    assert {step.split(":")[0] for step in steps} >= {"segment", "adopt", "generation", "current"}
    seen = set()
    for number in range(len(steps)):
        place = folder.parent / f"dies-at-{number}"
        shutil.copytree(folder, place)
        assert killed(crasher.build, place, 30, number) == -9
        gallery = Gallery.open(place)
        keys = {item.key for item in gallery.items()}
        gallery.close()
        assert keys in ({"old"}, {f"new-{n}" for n in range(30)}), steps[number]
        seen.add(len(keys))
        if number % 4 == 0:
            crasher.build(place, 30)  # what was left over is in nobody's way
            assert not list((place / "versions").glob(".*"))
        shutil.rmtree(place)
    assert seen == {1, 30}
