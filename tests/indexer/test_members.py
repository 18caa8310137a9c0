"""Large groups: few rows are read for them, and a search ends as soon as it is cancelled."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry, Grouping, SearchOptions
from tests.support.seams import CatalogView

COUNT, DIM = 20_000, 32
CLASS = Grouping("class")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """One class, three quarters of it in a segment; some items are removed."""
    made = Gallery.create(tmp_path_factory.mktemp("one") / "g", name="g", bundle_id="a", dim=DIM)
    vectors = np.random.default_rng(0).standard_normal((COUNT, DIM)).astype("f4")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [
        Entry(
            f"k{n}",
            v,
            f"{n % 15_000:064x}",
            {"class": "shoes", "price": n, "tenth": n % 10, "pair": n // 2},
        )
        for n, v in enumerate(vectors)
    ]
    made.add(entries[: COUNT * 3 // 4])
    made.compact(wait=True)
    made.add(entries[COUNT * 3 // 4 :])
    made.remove([f"k{n}" for n in range(100, 200)])
    return made


def query_of(gallery: Gallery) -> np.ndarray:
    [entry] = gallery.entries(["k7"])
    return np.asarray(entry.vector)


@pytest.mark.parametrize(
    ("grouping", "k", "rows"),
    [
        (CLASS, 5, 100),
        (Grouping("tenth", size=3), 5, 100),  # as many of a group as it shows
        (Grouping("pair"), 5, 1000),
        (Grouping("tenth"), 50, 1000),  # groups that are not there are not sought in every item
    ],
)
def test_groups_read_few_rows(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, grouping: Grouping, k: int, rows: int
) -> None:
    read: list[int] = []
    rows_of = CatalogView.rows

    def counted(self: CatalogView, ids, seq):
        read.append(len(ids))
        return rows_of(self, ids, seq)

    monkeypatch.setattr(CatalogView, "rows", counted)
    [groups] = gallery.search_groups(query_of(gallery)[None], k, grouping)
    assert groups
    assert 0 < sum(read) < rows


@pytest.mark.parametrize("distinct", [False, True])
def test_a_search_ends_at_the_first_checkpoint_that_raises(
    gallery: Gallery, distinct: bool
) -> None:
    query, calls = query_of(gallery)[None], 0

    class OverError(Exception):
        pass

    def checkpoint(last: float) -> None:
        nonlocal calls
        calls += 1
        if calls > last:
            raise OverError

    options = SearchOptions(distinct=distinct, checkpoint=lambda: checkpoint(math.inf))
    gallery.search_groups(query, 5, CLASS, options)
    needed = calls
    assert needed
    for last in range(needed):
        calls = 0
        options = replace(options, checkpoint=lambda last=last: checkpoint(last))
        with pytest.raises(OverError):
            gallery.search_groups(query, 5, CLASS, options)
        assert calls == last + 1
