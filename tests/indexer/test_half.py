"""Galleries that keep their vectors in half precision: half the disk, the same answers."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.checks.verify import check_files, verify_gallery
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live.backup import restore_backup
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import generation_of, printed
from tests.indexer.oracle import BUNDLE, clumped
from tests.support.recall import recall_at
from tests.support.seams import write_backup

N, DIM = 3000, 64
VECTORS = clumped(N + 600, DIM)
QUERIES = clumped(200, DIM, seed=9)


def item(number: int) -> Entry:
    return Entry(f"k{number}", VECTORS[number], f"{number:064x}", {"even": not number % 2})


@pytest.fixture
def gallery(tmp_path) -> Iterator[Gallery]:
    named = {"name": "shop", "bundle_id": BUNDLE, "dim": DIM}
    made = Gallery.create(tmp_path / "shop", vector_type="fp16", **named)
    with closing(made):
        made.add(item(number) for number in range(N))
        yield made


def truth_of(gallery: Gallery) -> list[list[str]]:
    """The keys that the vectors themselves, not rounded, find among the items of the gallery."""
    numbers = np.array(sorted(int(one.key[1:]) for one in gallery.items()))
    best = np.argsort(-(QUERIES @ VECTORS[numbers].T), axis=1)[:, :10]
    return [[f"k{numbers[place]}" for place in row] for row in best]


def recall_of(gallery: Gallery, **options: object) -> float:
    hits = gallery.search(QUERIES, 10, SearchOptions(**options))
    found = [[hit.key for hit in row] for row in hits]
    pairs = zip(found, truth_of(gallery), strict=True)
    return sum(len({*mine} & {*theirs}) for mine, theirs in pairs) / (10 * len(QUERIES))


def rows_file(gallery: Gallery) -> Path:
    [file] = generation_of(gallery.path).glob("vectors/*/rows.*")
    return file


@pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
def test_every_kind_reaches_its_target_with_vectors_that_were_not_rounded(
    gallery, kind: str
) -> None:
    assert recall_of(gallery) >= 0.99  # before there is an index
    gallery.compact(IndexSettings(kind, target_recall=0.98))
    assert recall_of(gallery) >= 0.975
    assert recall_of(gallery, exact=True) >= 0.99
    assert rows_file(gallery).name == "rows.f16"
    assert rows_file(gallery).stat().st_size == 2 * N * DIM


@pytest.mark.parametrize("keep_removed_s", [86_400.0, 0.0])
def test_a_gallery_in_half_precision_is_changed_compacted_verified_and_restored(
    gallery, keep_removed_s: float, tmp_path
) -> None:
    gallery.compact(IndexSettings("ivf-pq", target_recall=0.98))
    gallery.remove(f"k{number}" for number in range(0, N, 7))
    gallery.add(item(number) for number in range(N, N + 500))
    gallery.add([Entry("k1", VECTORS[N + 500], f"{N + 500:064x}", {})])
    gallery.restore(["k7"])
    gallery.compact(keep_removed_s=keep_removed_s)
    assert rows_file(gallery).name == "rows.f16"
    [[hit]] = gallery.search(VECTORS[N + 500 : N + 501], 1)
    assert (hit.key, round(hit.score, 3)) == ("k1", 1.0)
    check_files(gallery.path)
    assert verify_gallery(gallery.path).problems == ()
    write_backup(gallery.path, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "again")
    with closing(Gallery.open(tmp_path / "again", verify_hashes=True)) as again:
        assert again.vector_type == "fp16"
        options = SearchOptions(where=Equals("even", True))
        mine, theirs = (one.nearest(QUERIES, 10, options) for one in (again, gallery))
        assert recall_at(mine[1], theirs[1]) == 1.0


def test_the_command_line_makes_one_and_an_import_turns_one_into_the_other(
    run, shop, tmp_path
) -> None:
    words = ("--bundle", "b", "--vector-type", "fp16", "--json")
    printed(run("build", shop, "--out", tmp_path / "half", *words))
    printed(run("import", tmp_path / "half", "--out", tmp_path / "whole", "--json"))
    words = ("--out", tmp_path / "again", "--vector-type", "fp16", "--json")
    printed(run("import", tmp_path / "whole", *words))
    sizes = []
    for name in ("half", "whole", "again"):
        with closing(Gallery.open(tmp_path / name)) as made:
            sizes.append(rows_file(made).stat().st_size)
    assert sizes == [sizes[0], 2 * sizes[0], sizes[0]]
    for words in ((), ("--vector-type", "fp16")):
        [plan] = printed(run("plan", 10**6, 512, "--json", *words))["plans"]
        assert round(plan["mapped_mb"]) == (977 if words else 1953)
