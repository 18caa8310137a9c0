"""Backups: one state of a gallery in use, whole or refused, and back without a moment of danger."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.errors import (
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    GalleryWriteError,
)
from indexer.folder.backup import restore
from indexer.gallery import Gallery, copy_bytes, current_generation
from indexer.types import Entry
from tests.indexer.conftest import small_files
from tests.support.seams import backup, set_fault_hook

DIM = 8
ROOT = Path(__file__).parents[2]
QUERIES = np.eye(DIM, dtype=np.float32)


def entry(key: str, **attributes: Any) -> Entry:
    digest = hashlib.sha256(key.encode())
    rng = np.random.default_rng(list(digest.digest()[:8]))
    vector = rng.standard_normal(DIM).astype(np.float32)
    return Entry(key, vector / np.linalg.norm(vector), digest.hexdigest(), attributes)


def fill(path: Path, count: int = 200) -> Path:
    """A gallery with a segment, items behind it, and some that were removed from it."""
    gallery = Gallery.create(path, name="shop", bundle_id="b" * 64, dim=DIM, source_root="/shop")
    gallery.add([entry(f"item {n}", stock=n, sale=n % 2 == 0) for n in range(count)])
    gallery.compact()
    gallery.remove([f"item {n}" for n in range(0, count, 10)])
    gallery.add([entry(f"later {n}", price=n / 2) for n in range(20)])
    gallery.close()
    return path


def content(path: Path) -> dict[str, Any]:
    """Everything that a gallery says of itself, but its generation."""
    gallery = Gallery.open(path, verify_hashes=True)
    try:
        items = [
            (item, [type(value) for value in item.attributes.values()]) for item in gallery.items()
        ]
        vectors = gallery.vectors([item.id for item, _ in items])
        facts = gallery.facts().model_dump(exclude={"generation", "version"})
        answers = gallery.search(QUERIES, 10_000)
        return {
            "items": items,
            "vectors": vectors.tobytes(),
            "facts": facts,
            "answers": answers,
        }
    finally:
        gallery.close()


def keys(path: Path) -> set[str]:
    gallery = Gallery.open(path)
    try:
        found = {item.key for item in gallery.items()}
        [hits] = gallery.search(QUERIES[:1], 10_000)
        assert {hit.key for hit in hits} == found
        return found
    finally:
        gallery.close()


def generation(path: Path) -> Path:
    return path / "versions" / (path / "CURRENT").read_text().strip()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery that no test changes."""
    return fill(tmp_path_factory.mktemp("filled") / "shop")


@pytest.fixture
def shop(filled: Path, tmp_path: Path) -> Path:
    """A gallery of 200 items."""
    return Path(shutil.copytree(filled, tmp_path / "shop"))


@pytest.fixture
def saved(filled: Path, tmp_path: Path) -> Path:
    """Its backup."""
    backup(filled, tmp_path / "saved")
    return tmp_path / "saved"


def test_a_backup_opens_as_a_gallery_and_is_the_same(shop: Path, tmp_path: Path) -> None:
    report = backup(shop, tmp_path / "saved")
    assert content(tmp_path / "saved") == content(shop)
    assert (report.name, report.items) == ("shop", 200)
    assert report.source_generation == generation(shop).name
    assert report.generation == generation(tmp_path / "saved").name != generation(shop).name
    assert json.loads((tmp_path / "saved" / "backup.json").read_text()) == report.model_dump()


def test_a_restored_gallery_is_the_same_in_a_generation_of_its_own(
    filled: Path, saved: Path, tmp_path: Path
) -> None:
    assert content(saved) == content(filled)  # to look into a backup does not spoil it
    manifests = [restore(saved, tmp_path / name) for name in ("one", "two")]
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(filled)
    names = {generation(path).name for path in (filled, saved, tmp_path / "one", tmp_path / "two")}
    assert len(names) == 4
    assert manifests[0].generation == generation(tmp_path / "one").name


def test_versions_of_backup_and_gallery_differ_although_their_items_are_equal(
    filled: Path, saved: Path
) -> None:
    galleries = [Gallery.open(filled), Gallery.open(saved)]
    assert len({gallery.version for gallery in galleries}) == 2
    for gallery in galleries:
        gallery.close()


def test_what_is_changed_later_is_not_in_the_backup(shop: Path, tmp_path: Path) -> None:
    gallery = Gallery.open(shop)
    backup(shop, tmp_path / "saved")
    before = keys(shop)
    gallery.add([entry("new")])
    gallery.remove(["item 1"])
    gallery.compact()
    gallery.close()
    assert keys(tmp_path / "saved") == before
    restore(tmp_path / "saved", shop, replace=True)
    assert keys(shop) == before


def test_a_restored_gallery_can_be_changed_and_compacted(saved: Path, tmp_path: Path) -> None:
    restore(saved, tmp_path / "back")
    gallery = Gallery.open(tmp_path / "back")
    gallery.add([entry("new")])
    gallery.compact()
    gallery.close()
    assert "new" in keys(tmp_path / "back")
    assert "new" not in keys(saved)


def test_an_empty_gallery_can_be_saved_and_restored(tmp_path: Path) -> None:
    Gallery.create(tmp_path / "empty", name="empty", bundle_id="b", dim=DIM).close()
    assert backup(tmp_path / "empty", tmp_path / "saved").items == 0
    restore(tmp_path / "saved", tmp_path / "back")
    assert keys(tmp_path / "back") == set()


def test_a_backup_taken_during_changes_is_one_state_with_all_that_was_acknowledged(
    shop: Path, tmp_path: Path
) -> None:
    """Each change adds a pair, takes an older pair away and compacts now and then."""
    stop, acknowledged = threading.Event(), 0
    faults: list[BaseException] = []

    def change() -> None:
        nonlocal acknowledged
        gallery = Gallery.open(shop)
        try:
            number = 0
            while not stop.is_set():
                gallery.add([entry(f"left {number}"), entry(f"right {number}")])
                acknowledged = number
                gallery.remove([f"left {number - 20}", f"right {number - 20}"])
                if number % 10 == 9:
                    gallery.compact(wait=True)
                number += 1
        except BaseException as error:
            faults.append(error)
        finally:
            gallery.close()

    writer = threading.Thread(target=change)
    writer.start()
    try:
        known, acks = [], []
        for number in range(8):
            acks.append(acknowledged)
            backup(shop, tmp_path / f"saved {number}")
    finally:
        stop.set()
        writer.join()
    assert not faults
    for number, last in enumerate(acks):
        known = keys(tmp_path / f"saved {number}")
        lefts = {int(key.split()[1]) for key in known if key.startswith("left")}
        rights = {int(key.split()[1]) for key in known if key.startswith("right")}
        assert lefts == rights
        if lefts:
            assert sorted(lefts) == list(range(min(lefts), max(lefts) + 1))
            assert len(lefts) <= 21
        assert last == 0 or max(lefts) >= last
    assert acks[-1] > 0


def test_only_what_belongs_to_a_segment_is_copied(shop: Path, tmp_path: Path) -> None:
    (segment,) = shop.glob("versions/*/segments/*")
    (segment / "tmp").mkdir()
    (segment / "notes.txt").write_text("foreign")
    backup(shop, tmp_path / "saved")
    (copy,) = (tmp_path / "saved").glob("versions/*/segments/*")
    assert {path.name for path in segment.iterdir()} - {path.name for path in copy.iterdir()} == {
        *("tmp", "notes.txt")
    }
    assert content(tmp_path / "saved") == content(shop)


@pytest.mark.parametrize("name", ["ids.npy", "segment.json"])
def test_a_segment_that_lacks_a_file_is_refused_by_its_name(
    shop: Path, tmp_path: Path, name: str
) -> None:
    (segment,) = shop.glob("versions/*/segments/*")
    (segment / name).unlink()
    with pytest.raises(GalleryCorruptError, match=rf"{segment / name}"):
        backup(shop, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


TUNED = """
import os, signal, sys
import numpy as np
from embedder.durable import set_fault_hook
from indexer.checks.retune import tune_gallery

def hook(point):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

set_fault_hook(hook)
tune_gallery(sys.argv[1], np.tile(np.eye(8, dtype=np.float32), (13, 1)), 0.5)
"""


@pytest.mark.parametrize("point", ["before sync of segment.json", "before rename", "after rename"])
def test_a_tuning_killed_at_any_step_leaves_a_gallery_that_can_be_saved_and_compacted(
    shop: Path, tmp_path: Path, point: str
) -> None:
    (segment,) = shop.glob("versions/*/segments/*")
    before = {path.name for path in segment.iterdir()}
    command = [sys.executable, "-c", TUNED, str(shop), f"tuning: {point}"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert {path.name for path in segment.iterdir()} == before
    backup(shop, tmp_path / "saved")
    assert content(tmp_path / "saved") == content(shop)
    gallery = Gallery.open(shop)
    gallery.compact()
    gallery.close()
    (left,) = shop.glob("versions/*/segments/*")
    assert left != segment


def test_the_folders_above_a_new_backup_are_brought_to_the_disk(
    filled: Path, tmp_path: Path
) -> None:
    synced: list[str] = []
    set_fault_hook(lambda step: synced.append(step.rpartition("after sync of ")[2]))
    try:
        backup(filled, tmp_path / "daily" / "monday" / "saved")
    finally:
        set_fault_hook(None)
    assert [name for name in synced if name in (tmp_path.name, "daily", "monday")] == [
        *(tmp_path.name, "daily"),  # before anything is copied
        "monday",
    ]


def test_progress_counts_about_what_was_foretold(shop: Path, tmp_path: Path) -> None:
    copied: list[int] = []
    report = backup(shop, tmp_path / "saved", copied.append)
    assert all(count >= 0 for count in copied)
    assert sum(copied) == pytest.approx(report.bytes, rel=0.1)
    assert copy_bytes(shop) == sum(copied)
    copied.clear()
    restore(tmp_path / "saved", tmp_path / "back", on_progress=copied.append)
    assert sum(copied) == pytest.approx(report.bytes, rel=0.1)


def test_progress_counts_what_stands_in_the_log_alone(shop: Path, tmp_path: Path) -> None:
    gallery, copied = Gallery.open(shop), list[int]()
    try:
        gallery.add([entry(f"many {n}", text=f"{n}" * 100) for n in range(500)])
        expected = copy_bytes(shop)
        backup(shop, tmp_path / "saved", copied.append)
    finally:
        gallery.close()
    assert sum(copied) == expected


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["changed", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["catalog.sqlite", "manifest.json", "report.json", "vectors.npy", "ids.npy"]
)
def test_a_damaged_backup_is_refused_by_the_name_of_the_file_and_nothing_is_touched(
    shop: Path, saved: Path, name: str, how: str
) -> None:
    (file,) = saved.rglob(name)
    damage(file, how)
    before = content(shop)
    with pytest.raises(GalleryCorruptError, match=name.replace(".", r"\.")):
        restore(saved, shop, replace=True)
    with pytest.raises(GalleryCorruptError):
        restore(saved, saved.parent / "nowhere")
    assert current_generation(saved.parent / "nowhere") is None
    assert content(shop) == before


def test_a_catalogue_that_does_not_hold_together_is_refused(saved: Path, tmp_path: Path) -> None:
    file = generation(saved) / "catalog.sqlite"
    data = bytearray(file.read_bytes())
    page = 16_384
    data[2 * page : 3 * page] = data[3 * page : 4 * page]
    file.write_bytes(data)
    with pytest.raises(GalleryCorruptError, match=r"catalog\.sqlite"):
        restore(saved, tmp_path / "back")


def test_a_backup_that_was_opened_and_changed_is_restored_as_it_is_now(
    saved: Path, tmp_path: Path
) -> None:
    gallery = Gallery.open(saved)
    gallery.add([entry("new")])
    restore(saved, tmp_path / "back")
    gallery.close()
    assert "new" in keys(tmp_path / "back")


def test_what_is_no_backup_is_refused(shop: Path, tmp_path: Path) -> None:
    for path in (shop, tmp_path / "nowhere"):
        with pytest.raises(GalleryNotFoundError, match=r"backup\.json is missing"):
            restore(path, tmp_path / "back")
    with pytest.raises(GalleryNotFoundError, match="nowhere"):
        backup(tmp_path / "nowhere", tmp_path / "saved")


def test_a_gallery_is_replaced_only_when_that_is_said(shop: Path, saved: Path) -> None:
    gallery = Gallery.open(shop)
    gallery.add([entry("new")])
    with pytest.raises(GalleryError, match="--replace"):
        restore(saved, shop)
    assert "new" in keys(shop)
    restore(saved, shop, replace=True)
    assert "new" not in keys(shop)
    assert gallery.search(entry("new").vector[None], 1)[0][0].key == "new"  # what is open stays
    gallery.close()


def test_a_backup_is_never_written_over_something(shop: Path, saved: Path) -> None:
    before = sorted(saved.rglob("*"))
    with pytest.raises(GalleryError, match="is there already"):
        backup(shop, saved)
    assert sorted(saved.rglob("*")) == before


def test_a_full_disk_leaves_no_half_backup_and_the_old_gallery(
    shop: Path, saved: Path, tmp_path: Path
) -> None:
    before = content(shop)
    with small_files(40_000), pytest.raises(GalleryWriteError, match="Cannot write"):
        backup(shop, tmp_path / "other")
    with small_files(40_000), pytest.raises(GalleryWriteError, match="Cannot write"):
        restore(saved, shop, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "shop"]
    assert content(shop) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from indexer.folder.backup import backup, restore
from embedder.durable import set_fault_hook
from tests.indexer.test_backup import keys

shop, saved = Path(sys.argv[1]), Path(sys.argv[2])

def dies_at(point, work):
    '''In a process of its own; whether it came that far.'''
    child = os.fork()
    if child == 0:
        left = point
        def hook(_):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        set_fault_hook(hook)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

old, new = keys(shop), keys(saved)
point, seen = 0, []
while dies_at(point, lambda: restore(saved, shop, replace=True)):
    seen.append(keys(shop) == new)
    assert keys(shop) in (old, new), point
    point += 1
assert keys(shop) == new
assert seen == sorted(seen) and not seen[0] and seen[-1], seen

point, other = 0, shop.parent / "other"
while dies_at(point, lambda: backup(shop, other)):
    if other.exists():  # under its name it is whole
        assert keys(other) == new
        other.rename(shop.parent / f"whole {point}")
    point += 1
assert keys(other) == new
assert point > 5
"""


def test_a_restore_killed_at_any_step_leaves_the_old_gallery_or_the_new_one(
    shop: Path, saved: Path
) -> None:
    gallery = Gallery.open(shop)
    gallery.add([entry("new")])
    gallery.close()
    subprocess.run([sys.executable, "-c", KILLED, str(shop), str(saved)], cwd=ROOT, check=True)
    left = [path.name for path in shop.parent.iterdir() if path.name.startswith(".")]
    assert left == []  # the last backup took away what the killed ones left
