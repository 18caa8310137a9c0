"""A process is killed at any moment; an oracle outside knows what must be there."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from tests.indexer import crasher
from tests.indexer.conftest import faults
from tests.indexer.crasher import BUNDLE, DIM, Model, forks
from tests.support.waiting import until

KILLS = 200 if os.environ.get("KINLENS_LONG_TESTS") else 100
SEED = 20_261_121


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty gallery that knows the attribute `stock`."""
    path = tmp_path / "gallery"
    gallery = Gallery.create(path, name="g", bundle_id=BUNDLE, dim=DIM)
    gallery.add([crasher.entry("first", "first", 1)])
    gallery.remove(["first"])
    gallery.close()
    return path


@pytest.mark.timeout(600)
def test_no_acknowledged_change_is_lost_in_any_kill_and_nothing_removed_returns(
    folder, tmp_path
) -> None:
    """Odd processes die at a fault point, each in turn, the others at a random moment; every fourth
    has a second process that does nothing but compact, and is killed too."""
    rng = np.random.default_rng(SEED)
    points = points_of(Path(shutil.copytree(folder, tmp_path / "other")))
    assert 2 * len(points) <= KILLS
    model: Model = {}
    finished = 0
    for seed in range(KILLS):
        log = tmp_path / f"{seed}.log"
        time_of_point, point = divmod(seed // 2, len(points))
        dies_at = (points[point], time_of_point) if seed % 2 else None
        process = forks.Process(target=crasher.change, args=(folder, log, seed, dies_at))
        process.start()
        other = forks.Process(target=crasher.compact, args=(folder,))
        if seed % 4 == 0:
            other.start()
        if dies_at is None:
            until(log.exists)
            time.sleep(float(rng.uniform(0, 0.06)))
            process.kill()
        process.join(60)
        assert process.exitcode == -9, f"seed {seed} ended too early: {process.exitcode}"
        if seed % 4 == 0:
            time.sleep(float(rng.uniform(0, 0.02)))
            other.kill()
            other.join()
        models = crasher.possible(model, log, seed)
        gallery = Gallery.open(folder)
        model = crasher.check(gallery, models)
        gallery.close()
        finished += log.read_text().count("done")
    assert finished > KILLS  # the processes did get to work


def points_of(path: Path) -> list[str]:
    points: list[str] = []
    with contextlib.closing(Gallery.open(path)) as gallery, faults(points.append):
        gallery.add([crasher.entry("last", "last", 1)])
        gallery.compact(IndexSettings(kind="flat"))
    return sorted({crasher.named(point) for point in points})


# What a step was, does not matter to these: whoever looks finds the gallery of before or of after.


@pytest.fixture
def place(tmp_path) -> Path:
    """Two galleries, a backup, and space for what a test makes of them."""
    place = tmp_path / "place"
    crasher.build(place / "target", 6)
    with contextlib.closing(Gallery.open(place / "target")) as target:
        target.remove(["new-3"])
    crasher.build(place / "source", 9)
    with contextlib.closing(Gallery.open(place / "source")) as source:
        source.add([crasher.entry("later", "later", 1)])
    crasher.save(place)
    return place


def dying(work: Callable[[Path], object], place: Path) -> Iterator[tuple[int, Path]]:
    """`place` as a kill at each fault point of `work` leaves it: as other processes see it then.

    Another process copies it, since SQLite loses its locks where its own one closes the file.
    """
    running = Path(shutil.copytree(place, place.parent / "running"))
    copies: list[Path] = []

    def copy(_: str) -> None:
        copies.append(place.parent / f"died at {len(copies)}")
        subprocess.run(["cp", "-a", running, copies[-1]], check=True)

    with faults(copy):
        work(running)
    yield from enumerate(copies)


@pytest.mark.parametrize("work", [crasher.rebuild, crasher.adopt_source, crasher.restore_saved])
def test_a_gallery_is_replaced_or_stays_although_the_process_dies_at_any_step(
    place, work: Callable[[Path], object]
) -> None:
    finished = Path(shutil.copytree(place, place.parent / "finished"))
    work(finished)
    old, new = (crasher.contents(folder / "target") for folder in (place, finished))
    seen = []
    for point, copy in dying(work, place):
        found = crasher.contents(copy / "target")
        assert found in (old, new), point
        seen.append(found == new)
        if point % 10 == 0:
            work(copy)  # what was left over is in nobody's way
            assert crasher.contents(copy / "target") == new
            assert not list((copy / "target" / "versions").glob(".*"))
    assert seen == sorted(seen)
    assert not seen[0]
    assert seen[-1]
    assert len(seen) > 10


def test_a_removal_and_its_undo_that_die_at_any_step_are_whole_and_can_be_undone(place) -> None:
    before = crasher.contents(place / "target")
    less = {key: one for key, one in before.items() if key not in ("new-1", "new-4")}
    seen = []
    for point, copy in dying(crasher.remove_and_restore, place):
        found = crasher.contents(copy / "target")
        assert found in (before, less), point
        seen.append(found == before)
        with contextlib.closing(Gallery.open(copy / "target")) as gallery:
            back = gallery.restore(["new-1", "new-4"])
        assert {item.key for item in back} == before.keys() - found.keys()
        assert crasher.contents(copy / "target") == before
    changes = [one for n, one in enumerate(seen) if n == 0 or seen[n - 1] != one]
    assert changes == [True, False, True]
