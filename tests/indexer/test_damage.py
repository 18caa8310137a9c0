"""Damaged files, a disk that refuses: what a gallery loses is told, and it loses nothing else."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from embedder import durable
from embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryWriteError,
    InvalidParameterError,
)
from indexer.filters.tree import Range
from indexer.folder.backup import restore
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.live import compaction
from indexer.types import SearchOptions
from tests.indexer.conftest import as_nobody, small_files
from tests.indexer.crasher import BUNDLE, DIM, entry, vector
from tests.support.seams import Catalog, GalleryFolder, backup

COUNT = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A gallery with a segment, and some items after it."""
    folder = tmp_path / "gallery"
    gallery = Gallery.create(folder, name="g", bundle_id=BUNDLE, dim=DIM)
    gallery.add(entry(f"k{n}", f"content {n}", n) for n in range(COUNT - 10))
    gallery.compact(IndexSettings(kind="fp16"))
    gallery.add(entry(f"k{n}", f"content {n}", n) for n in range(COUNT - 10, COUNT))
    gallery.close()
    return folder


def segment(path: Path) -> Path:
    [found] = (GalleryFolder(path).current() / "segments").iterdir()
    return found


def check(gallery: Gallery) -> None:
    """Every item is there and finds itself."""
    assert gallery.size == COUNT
    texts = [f"content {n}" for n in range(0, COUNT, 7)]
    hits = gallery.search(np.stack([vector(text) for text in texts]), 1)
    assert [row[0].key for row in hits] == [f"k{n}" for n in range(0, COUNT, 7)]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x55
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["vectors.npy", "index.faiss", "ids.npy", "segment.json"])
@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
def test_a_damaged_segment_is_made_again_from_the_catalogue(
    path: Path, name: str, damage: object
) -> None:
    damaged = segment(path)
    damage(damaged / name)  # type: ignore[operator]
    gallery = Gallery.open(path)
    check(gallery)
    gallery.close()
    assert segment(path) != damaged
    again = Gallery.open(path)
    check(again)
    again.close()


def test_a_segment_that_is_gone_is_made_again_from_the_catalogue(path: Path) -> None:
    shutil.rmtree(segment(path))
    gallery = Gallery.open(path)
    check(gallery)
    gallery.close()


def test_a_damaged_segment_that_cannot_be_made_again_is_named_with_the_cure(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(segment(path) / "index.faiss")

    def refuse(*_: object, **__: object) -> None:
        raise GalleryWriteError("read-only")

    monkeypatch.setattr("indexer.gallery.compact", refuse)
    with pytest.raises(GalleryCorruptError, match=r"index\.faiss.*compact GALLERY --rebuild"):
        Gallery.open(path)


def test_a_damaged_page_of_the_catalogue_is_a_named_error_and_never_a_wrong_answer(
    path: Path,
) -> None:
    catalog = GalleryFolder(path).current() / "catalog.sqlite"
    with sqlite3.connect(catalog) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(catalog.read_bytes())
    page = int.from_bytes(data[16:18], "big") or 65536
    for start in range(page, len(data) - page, page):
        data[start : start + 64] = b"\xff" * 64
    catalog.write_bytes(data)
    with pytest.raises(GalleryCorruptError, match=r"catalog\.sqlite.*kinlens-index restore"):
        check(Gallery.open(path))


def test_a_flipped_bit_of_the_catalogue_is_a_named_error_or_harmless(path: Path) -> None:
    def seen() -> list[object]:
        gallery = Gallery.open(path)
        try:
            entries = [entry for batch in gallery.scan() for entry in batch]
            queries = np.stack([vector(f"content {n}") for n in range(3)])
            hits = gallery.search(queries, 10, SearchOptions(where=Range("stock", at_least=100)))
            return [(e.key, e.vector.tobytes(), e.sha256, e.attributes) for e in entries] + hits
        finally:
            gallery.close()

    catalog = GalleryFolder(path).current() / "catalog.sqlite"
    expected, good = seen(), catalog.read_bytes()
    rng, noticed = np.random.default_rng(3), 0
    for place in rng.integers(100, len(good), 60):
        data = bytearray(good)
        data[place] ^= 1 << int(rng.integers(8))
        catalog.write_bytes(data)
        try:
            if seen() != expected:
                checked(catalog)  # a wrong index of attributes is found there
                pytest.fail(f"byte {place}")
        except GalleryCorruptError:
            noticed += 1
    assert noticed > 3


def checked(path: Path) -> None:
    catalog = Catalog.open(path)
    with contextlib.closing(catalog), catalog.reading() as view:
        view.check()


READS_AND_WRITES = """
import sys
from indexer.gallery import Gallery
from indexer.live import compaction
from tests.indexer.crasher import entry
gallery = Gallery.open(sys.argv[1])
gallery.add([entry("other", "other", 1)])
gallery.close()
"""


def test_a_backup_that_is_open_as_a_gallery_keeps_its_locks_while_it_is_restored(
    path: Path, tmp_path: Path
) -> None:
    backup(path, tmp_path / "saved")
    gallery = Gallery.open(tmp_path / "saved")
    gallery.add([entry("one", "one", 1)])
    restore(tmp_path / "saved", tmp_path / "back")
    command = [sys.executable, "-c", READS_AND_WRITES, str(tmp_path / "saved")]
    subprocess.run(command, check=True)
    log = GalleryFolder(tmp_path / "saved").current() / "catalog.sqlite-wal"
    assert log.stat().st_size > 0
    gallery.add([entry("three", "three", 1)])
    gallery.close()
    again = Gallery.open(tmp_path / "saved")
    assert again.stored(["one", "other", "three"]).keys() == {"one", "other", "three"}
    again.close()


@pytest.mark.parametrize("damage", [empty, Path.unlink])
def test_a_catalogue_that_is_gone_is_a_named_error(path: Path, damage: object) -> None:
    catalog = GalleryFolder(path).current() / "catalog.sqlite"
    damage(catalog)  # type: ignore[operator]
    with pytest.raises(GalleryCorruptError, match=r"catalog\.sqlite"):
        Gallery.open(path)


def test_a_full_disk_refuses_a_change_and_loses_nothing(path: Path) -> None:
    gallery = Gallery.open(path)
    largest = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
    many = [entry(f"new{n}", f"new {n}", n) for n in range(20_000)]
    with small_files(largest + 50_000), pytest.raises(GalleryWriteError, match=r"[Ff]ree space"):
        gallery.add(many)
    check(gallery)
    gallery.add(many[:10])
    assert gallery.size == COUNT + 10
    gallery.close()


def test_a_full_disk_refuses_a_compaction_and_loses_nothing(path: Path) -> None:
    gallery = Gallery.open(path)
    before = segment(path)
    with small_files(1000), pytest.raises(GalleryWriteError, match="free space"):
        gallery.compact()
    check(gallery)
    assert segment(path) == before
    gallery.compact()
    assert gallery.facts().delta == 0
    check(gallery)
    gallery.close()


@pytest.mark.parametrize("step", ["segment", "adopt", "write"])
def test_an_error_at_any_step_leaves_the_state_before_or_after(path: Path, step: str) -> None:
    """The same points at which the crash test kills, here with an error of the disk."""
    gallery = Gallery.open(path)

    def change() -> None:
        gallery.compact()
        gallery.add([entry("new", "new", 1)])
        gallery.remove(["new"])

    points: list[str] = []
    durable.set_fault_hook(points.append)
    try:
        change()
    finally:
        durable.set_fault_hook(None)
    numbers = [n for n, point in enumerate(points) if point.startswith(step)]
    assert numbers
    for number in numbers:
        durable.set_fault_hook(_Fails(number))
        try:
            with pytest.raises((GalleryError, OSError)):
                change()
        finally:
            durable.set_fault_hook(None)
        gallery.remove(["new"])
        check(gallery)
    gallery.close()


class _Fails:
    """Raises what a broken disk raises, at the point with this number."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, point: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(5, "Input/output error")


def test_a_folder_that_may_not_be_written_is_searched_and_refuses_changes(path: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(shutil.copytree(path, Path(parent) / "gallery"))
        for part in [folder, *folder.rglob("*")]:
            part.chmod(0o555 if part.is_dir() else 0o444)
        with as_nobody():
            gallery = Gallery.open(folder)
            check(gallery)
            with pytest.raises(GalleryWriteError, match="may write there"):
                gallery.remove(["k1"])
            with pytest.raises(GalleryWriteError, match="permissions"):
                gallery.compact()
            check(gallery)
            gallery.close()
        for part in [folder, *folder.rglob("*")]:
            part.chmod(0o755)


def test_a_folder_that_may_not_be_read_is_a_named_error(path: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(shutil.copytree(path, Path(parent) / "gallery"))
        (folder / "versions").chmod(0o000)
        with as_nobody(), pytest.raises(GalleryError, match=r"[Pp]ermission"):
            Gallery.open(folder)
        (folder / "versions").chmod(0o755)


def test_writers_at_once_lose_nothing(path: Path) -> None:
    one, other = Gallery.open(path), Gallery.open(path)
    for number in range(20):
        one.add([entry(f"one{number}", f"one {number}", 1)])
        other.add([entry(f"other{number}", f"other {number}", 2)])
    assert one.size == other.size == COUNT + 40
    one.close()
    other.close()


def test_a_bad_entry_among_good_ones_leaves_nothing_of_them(path: Path) -> None:
    gallery = Gallery.open(path)
    good = entry("good", "good", 1)
    for bad in (
        [good, good],
        [good, entry("k1", "other", 1).__class__("bad", np.zeros(DIM, np.float32), "0" * 64)],
    ):
        with pytest.raises(InvalidParameterError):
            gallery.add(bad)
    check(gallery)
    gallery.close()


def test_a_build_refuses_writes_and_a_write_does_not_harm_it(path: Path) -> None:
    gallery = Gallery.open(path)
    with GalleryFolder(path).locked(), pytest.raises(GalleryBusyError):
        gallery.remove(["k1"])
    check(gallery)
    gallery.close()


def test_old_segments_are_removed_without_a_word_to_compactions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that lets go of a segment must not make a compaction believe that another runs."""
    generation = GalleryFolder(path).current()
    looked: list[Path] = []

    def in_use(folder: Path) -> bool:
        with compaction.alone(generation, wait=False):
            looked.append(folder)
        return durable.in_use(folder)

    monkeypatch.setattr(compaction, "in_use", in_use)
    compaction.collect(generation)
    assert looked == [segment(path)]


@pytest.mark.parametrize("moment", ["segment: after rename", "adopt: before commit"])
def test_a_new_segment_stays_although_nobody_reads_it_yet(path: Path, moment: str) -> None:
    def collecting(point: str) -> None:
        if point == moment:
            compaction.collect(GalleryFolder(path).current())

    with contextlib.closing(Gallery.open(path)) as gallery:
        durable.set_fault_hook(collecting)
        try:
            gallery.compact()
        finally:
            durable.set_fault_hook(None)
        check(gallery)
    with contextlib.closing(Gallery.open(path)) as gallery:
        check(gallery)
