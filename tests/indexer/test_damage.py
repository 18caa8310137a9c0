"""Damaged files, a disk that refuses: a gallery reports what it loses, and loses nothing else."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import GalleryCorruptError, GalleryError, GalleryWriteError
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.filters.tree import Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live import compaction
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import (
    catalog_of,
    fails_at,
    faults,
    flipped,
    generation_of,
    segment_of,
    small_files,
    truncated,
)
from tests.indexer.crasher import BUNDLE, DIM, entry, vector

COUNT = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A gallery with a segment, and some items after it, that no test changes."""
    folder = tmp_path_factory.mktemp("made") / "gallery"
    with closing(Gallery.create(folder, name="g", bundle_id=BUNDLE, dim=DIM)) as gallery:
        gallery.add(entry(f"k{n}", f"content {n}", n) for n in range(COUNT - 10))
        gallery.compact(IndexSettings(kind="hnsw"))
        gallery.add(entry(f"k{n}", f"content {n}", n) for n in range(COUNT - 10, COUNT))
    return folder


@pytest.fixture
def path(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "gallery"))


@pytest.fixture
def gallery(path) -> Iterator[Gallery]:
    with closing(Gallery.open(path)) as opened:
        yield opened


def check(gallery: Gallery) -> None:
    """Every item is there and finds itself."""
    assert gallery.size == COUNT
    texts = [f"content {n}" for n in range(0, COUNT, 7)]
    hits = gallery.search(np.stack([vector(text) for text in texts]), 1)
    assert [row[0].key for row in hits] == [f"k{n}" for n in range(0, COUNT, 7)]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("index.faiss", truncated),
        ("index.faiss", flipped),
        ("gone.bin", flipped),
        ("segment.json", truncated),
        (".", shutil.rmtree),
    ],
)
def test_a_damaged_segment_is_rebuilt_from_the_catalogue(
    path, name: str, damage: Callable[[Path], object]
) -> None:
    damaged = segment_of(path)
    damage(damaged / name)
    with closing(Gallery.open(path)) as gallery:
        check(gallery)
    assert segment_of(path) != damaged


def test_a_damaged_catalogue_is_a_named_error_or_harmless(path) -> None:
    def seen() -> list[object]:
        with closing(Gallery.open(path)) as gallery:
            entries = [entry for batch in gallery.scan() for entry in batch]
            queries = np.stack([vector(f"content {n}") for n in range(3)])
            hits = gallery.search(queries, 10, SearchOptions(where=Range("stock", at_least=100)))
        return [(e.key, e.vector.tobytes(), e.sha256, e.attributes) for e in entries] + hits

    catalog = catalog_of(path)
    expected, good = seen(), catalog.read_bytes()
    rng, noticed = np.random.default_rng(3), 0
    for place in rng.integers(100, len(good), 40):
        data = bytearray(good)
        data[place] ^= 1 << int(rng.integers(8))
        catalog.write_bytes(data)
        try:
            if seen() != expected:
                check_files(path)  # a wrong index of attributes is found there
                pytest.fail(f"byte {place}")
        except GalleryCorruptError:
            noticed += 1
    assert noticed > 3
    catalog.unlink()
    with pytest.raises(GalleryCorruptError, match=r"catalog\.sqlite"):
        Gallery.open(path)


def test_a_full_disk_refuses_a_change_and_a_compaction_and_loses_nothing(path, gallery) -> None:
    largest = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
    many = [entry(f"new{n}", f"new {n}", n) for n in range(5_000)]
    with small_files(largest + 50_000), pytest.raises(GalleryWriteError, match=r"[Ff]ree space"):
        gallery.add(many)
    check(gallery)
    before = segment_of(path)
    with small_files(1000), pytest.raises(GalleryWriteError, match="free space"):
        gallery.compact()
    check(gallery)
    assert segment_of(path) == before
    gallery.compact()
    assert gallery.facts().delta == 0
    check(gallery)
    gallery.add(many[:10])
    assert gallery.size == COUNT + 10


def test_an_error_at_any_step_leaves_the_state_before_or_after(gallery) -> None:
    """The same points at which the crash test kills, here with an error of the disk."""

    def change() -> None:
        gallery.compact()
        gallery.add([entry("new", "new", 1)])
        gallery.remove(["new"])

    points: list[str] = []
    with faults(points.append):
        change()
    first = {point.partition(" of ")[0]: n for n, point in reversed([*enumerate(points)])}
    assert {"segment: after rename", "adopt: before commit", "write: after commit"} <= first.keys()
    steps = ("segment", "adopt", "write")
    for number in (number for point, number in first.items() if point.startswith(steps)):
        with faults(fails_at(number)), pytest.raises((GalleryError, OSError)):
            change()
        gallery.remove(["new"])
        check(gallery)


def test_a_new_segment_stays_although_nobody_reads_it_yet(path, gallery) -> None:
    def collecting(point: str) -> None:
        if point in ("segment: after rename", "adopt: before commit"):
            compaction.collect(generation_of(path))

    with faults(collecting):
        gallery.compact()
    check(gallery)
