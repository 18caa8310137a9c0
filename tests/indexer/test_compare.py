"""Compare: what the answers of two models are worth, by a class attribute."""

from pathlib import Path

import numpy as np

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry
from tests.support.seams import compare

DIM = 16


def gallery(path: Path, noise: float) -> Gallery:
    """Ten clusters of six items; much noise mixes them up."""
    made = Gallery.create(path, name="shop", bundle_id=f"{noise}", dim=DIM)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, DIM))
    entries = []
    for n in range(60):
        vector = centres[n % 10] + noise * rng.standard_normal(DIM)
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        entries.append(Entry(f"{n}", vector, f"{n:064x}", {"class": n % 10, "colour": f"{n}"}))
    made.add(entries)
    made.compact()
    return made


def test_equal_galleries_overlap_fully_and_a_worse_model_has_other_answers(tmp_path) -> None:
    pair = gallery(tmp_path / "good", 0.01), gallery(tmp_path / "bad", 3.0)
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
    unjudged = compare(*pair, "colour")  # each has its own; the query itself is no answer
    assert (unjudged.queries, unjudged.judged, unjudged.new.recall_at_1) == (60, 0, None)
    sampled, again = (compare(*pair, sample=20) for _ in range(2))
    assert sampled.queries == 20
    assert sampled.overlap_at_k == again.overlap_at_k
    empty = Gallery.create(tmp_path / "empty", name="shop", bundle_id="b", dim=DIM)
    nothing = compare(empty, empty)
    assert (nothing.queries, nothing.overlap_at_k, nothing.new.items) == (0, None, 0)
