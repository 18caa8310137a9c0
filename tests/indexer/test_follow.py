"""A compaction brings the segment up to date, and its result equals a new build."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import flipped, generation_of, rows_of, segment_of
from tests.indexer.oracle import BUNDLE, clumped, units
from tests.support.recall import recall_at
from tests.support.waiting import until

N, DIM = 3000, 32
VECTORS = clumped(2 * N, DIM)
KEEP = 86_400.0


def made(number: int, price: float | None = None) -> Entry:
    """An item with a unique attribute, a common one, a rare one and a list."""
    attributes: dict[str, Any] = {
        "sku": f"sku-{number:05d}",
        "colour": ("red", "green", "blue")[number % 3],
        "price": number % 50 if price is None else price,
        "sizes": ["S", "M", "L"][: number % 4],
    }
    if number % 20 == 0:
        attributes["sale"] = number % 40 == 0
    return Entry(f"k{number}", VECTORS[number], f"{number:064x}", attributes)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A gallery with lists of codes, trained on all of it."""
    path = tmp_path_factory.mktemp("follow") / "shop"
    with closing(Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=DIM)) as gallery:
        gallery.add(made(number) for number in range(N))
        gallery.compact(IndexSettings(kind="ivf-pq", target_recall=0.95))
    return path


@pytest.fixture
def gallery(stored, tmp_path) -> Iterator[Gallery]:
    with closing(Gallery.open(shutil.copytree(stored, tmp_path / "shop"))) as gallery:
        yield gallery


def change(gallery: Gallery) -> None:
    """Items come, go, are replaced, and change; values come and go with them."""
    gallery.remove(f"k{number}" for number in range(0, N, 9))
    gallery.add(made(number) for number in range(N, N + 400))
    gallery.add(Entry(f"k{n}", VECTORS[n + N], f"{n + N:064x}", {"sku": "new"}) for n in (1, 2, 4))
    gallery.update({"k5": {"price": 7.5}, "k7": {"colour": None}, "k8": {"sizes": ["XL"]}})
    gallery.remove(["k10", f"k{N + 1}"])


def seen(gallery: Gallery) -> object:
    """What filters, facets and searches say."""
    found, _ = gallery.nearest(VECTORS[:50], 10, SearchOptions(exact=True))
    columns = {fact.name: fact for fact in gallery.attribute_facts()}
    return gallery.size, found.round(5).tolist(), columns, [i.key for i in gallery.items()]


def stored_rows(gallery: Gallery) -> int:
    """Rows of vectors on the disk, when those that nobody reads have gone."""
    folder = generation_of(gallery.path) / "vectors"
    until(lambda: len([*folder.iterdir()]) == 1)
    return rows_of(gallery.path).stat().st_size // (4 * DIM)


def recall(gallery: Gallery) -> float:
    queries = clumped(200, DIM, seed=9)
    truth = gallery.nearest(queries, 10, SearchOptions(exact=True))[1]
    return recall_at(gallery.nearest(queries, 10)[1], truth)


@pytest.mark.parametrize("keep_removed_s", [KEEP, 0.0])
def test_what_came_and_went_is_brought_into_the_index_with_its_old_centroids(
    gallery, keep_removed_s: float
) -> None:
    change(gallery)
    before = seen(gallery)
    manifest = gallery.compact(keep_removed_s=keep_removed_s).manifest
    assert (manifest.trained_on, manifest.items) == (N, gallery.size)
    assert seen(gallery) == before
    assert recall(gallery) >= 0.93
    check_files(gallery.path)
    rows = stored_rows(gallery)
    assert (rows == gallery.size) == (keep_removed_s == 0) == (manifest.gone == 0)
    change(gallery)  # once more, over rows with gaps or over numbers with gaps
    before = seen(gallery)
    gallery.compact(keep_removed_s=KEEP)
    assert seen(gallery) == before
    assert recall(gallery) >= 0.93
    check_files(gallery.path)
    gallery.compact(from_scratch=True)
    assert seen(gallery) == before


def test_vectors_of_removed_items_are_erased_by_a_compaction_that_keeps_nothing(gallery) -> None:
    def is_there() -> bool:
        files = [file for file in gallery.path.rglob("*") if file.is_file()]
        return any(VECTORS[9].tobytes() in file.read_bytes() for file in files)

    gallery.remove(["k9"])
    assert is_there()
    gallery.compact(keep_removed_s=KEEP)
    assert is_there()
    assert [item.key for item in gallery.restore(["k9"])] == ["k9"]
    gallery.remove(["k9"])
    gallery.compact()
    gallery.close()  # which writes the log of the catalogue back
    assert not is_there()


def test_vectors_are_rewritten_when_a_third_of_the_rows_cannot_be_restored(
    gallery, monkeypatch
) -> None:
    for part in (5, 4):
        gallery.remove([item.key for item in gallery.items() if item.id % part == 0])
        gallery.compact(keep_removed_s=KEEP)
    assert stored_rows(gallery) == 3000
    later = time.time() + KEEP + 1
    monkeypatch.setattr(time, "time", lambda: later)
    gallery.compact(keep_removed_s=KEEP)
    assert stored_rows(gallery) == gallery.size == 1800
    assert recall(gallery) >= 0.93


def test_an_index_that_finds_too_little_of_what_is_new_is_trained_again(gallery) -> None:
    """The old ones are in clumps, the new ones everywhere."""
    others = units(2000, 4, DIM)
    gallery.add(Entry(f"o{n}", row, f"{n + 9**9:064x}") for n, row in enumerate(others))
    manifest = gallery.compact(keep_removed_s=KEEP).manifest
    assert (manifest.trained_on, manifest.held_out) == (N + 2000, 500)
    assert recall(gallery) >= 0.93


def test_a_damaged_index_is_not_brought_up_to_date(gallery) -> None:
    flipped(segment_of(gallery.path) / "index.faiss")
    change(gallery)
    manifest = gallery.compact(keep_removed_s=KEEP).manifest
    assert manifest.trained_on == gallery.size - manifest.copies
    assert recall(gallery) >= 0.93


def test_a_damaged_file_of_row_ids_is_named(gallery) -> None:
    gallery.remove(["k9"])
    gallery.compact()
    gallery.close()
    flipped(rows_of(gallery.path).with_name("numbers.npy"))
    with pytest.raises(GalleryCorruptError, match=r"kinlens-index restore"):
        Gallery.open(gallery.path, verify_hashes=False)


def test_one_damaged_vector_is_named_and_its_item_can_be_removed(gallery, caplog) -> None:
    gallery.close()
    file = rows_of(gallery.path)
    data = bytearray(file.read_bytes())
    data[4 * DIM * 9 + 2] ^= 1
    file.write_bytes(data)
    with closing(Gallery.open(gallery.path)) as opened:
        assert "the vector of item 10 does not fit its checksum" in caplog.text
        assert opened.search(VECTORS[50:51], 1)[0][0].key == "k50"
        with pytest.raises(GalleryCorruptError, match="vector of item 10 "):
            opened.entries(["k9"])
        opened.remove(["k9"])
        opened.add([made(9)])
        opened.compact()
        check_files(opened.path)
