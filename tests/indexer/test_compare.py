"""Compare: what the answers of two models are worth, by a class attribute."""

from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry
from tests.support.seams import compare

DIM = 16


def gallery(path: Path, noise: float, each: int = 6) -> Gallery:
    """Ten clusters of `each` items; much noise mixes them up."""
    made = Gallery.create(path, name="shop", bundle_id=f"{noise}", dim=DIM)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, DIM))
    entries = []
    for n in range(10 * each):
        vector = centres[n % 10] + noise * rng.standard_normal(DIM)
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        entries.append(Entry(f"{n}", vector, f"{n:064x}", {"class": n % 10, "colour": f"{n}"}))
    made.add(entries)
    made.compact()
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gallery, Gallery]:
    """A good model and a bad one; do not change them."""
    folder = tmp_path_factory.mktemp("pair")
    return gallery(folder / "good", 0.01), gallery(folder / "bad", 3.0)


def test_equal_galleries_overlap_fully_and_a_worse_model_has_other_answers(
    pair: tuple[Gallery, Gallery], tmp_path: Path
) -> None:
    same, found = compare(pair[0], pair[0], k=5), compare(*pair, k=5)
    assert same.overlap_at_k == 1
    assert same.old.recall_at_1 == same.new.recall_at_1 == same.old.recall_at_k == 1
    assert (same.queries, same.judged, same.old.items) == (60, 60, 60)
    assert same.old.ms_per_query > 0
    assert found.old.recall_at_1 == 1
    assert found.new.recall_at_1 < 0.7
    assert found.new.recall_at_1 <= found.new.recall_at_k
    assert found.overlap_at_k < 0.8
    assert (found.old.bundle_id, found.new.bundle_id) == ("0.01", "3.0")
    empty = Gallery.create(tmp_path / "empty", name="shop", bundle_id="b", dim=DIM)
    nothing = compare(empty, empty)
    assert (nothing.queries, nothing.overlap_at_k, nothing.new.items) == (0, None, 0)


@pytest.mark.parametrize("attribute", ["brand", "colour"])
def test_without_others_of_its_class_nothing_is_judged(
    pair: tuple[Gallery, Gallery], attribute: str
) -> None:
    """The query itself is no answer."""
    found = compare(*pair, attribute)
    assert (found.queries, found.judged, found.new.recall_at_1) == (60, 0, None)


def test_a_sample_is_the_same_each_time_and_of_items_that_both_have(
    pair: tuple[Gallery, Gallery], tmp_path: Path
) -> None:
    fewer = gallery(tmp_path / "fewer", 2.0, each=3)
    found, again = (compare(pair[0], fewer, sample=20) for _ in range(2))
    assert found.queries == 20
    assert compare(pair[0], fewer, sample=1000).queries == 30
    assert again.new.recall_at_1 == found.new.recall_at_1
    assert again.overlap_at_k == found.overlap_at_k
