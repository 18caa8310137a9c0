"""The index of each kind, as a segment on the disk: right answers, also among some vectors,
with the least effort that reaches the target; checked, and refused where it is damaged."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import faiss
import numpy as np
import pytest

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.errors import GalleryCorruptError, RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.vectors import VectorFile
from kinlens.indexer.gallery import Gallery, current_generation
from kinlens.indexer.index import faiss as engine
from kinlens.indexer.index import segment as segments
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import SegmentManifest
from kinlens.indexer.types import Entry, GalleryExport, Ids, Scores
from tests.indexer.oracle import bitmap, clumped, units
from tests.support.seams import (
    Effort,
    Rows,
    Segment,
    SegmentIndex,
    import_gallery,
    plan_index,
    plans_for,
    recall_at,
    tune,
    write_segment,
)

KINDS = ("flat", "hnsw", "ivf-pq")
N, DIM = 3003, 32  # the last byte of a bitmap is not full
TARGET = 0.97
NAMES = ("half", "one in twenty", "one", "none", "every bit", "one side", "the first")


@pytest.fixture(autouse=True)
def _approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery this small would otherwise be compared with as a whole."""
    monkeypatch.setattr(engine, "EXACT_BELOW", 0)
    monkeypatch.setattr(engine, "SCAN_EXACT_PART", 0.02)


def ids_for(count: int) -> Ids:
    """Ascending numbers with gaps."""
    return np.cumsum(np.random.default_rng(1).integers(1, 5, count)).astype(np.int64)


def batches(ids: Ids, vectors: Embeddings, size: int = 300) -> Iterator:
    return (
        (ids[start : start + size], vectors[start : start + size])
        for start in range(0, len(ids), size)
    )


def written(
    folder: Path, vectors: Embeddings, settings: IndexSettings, **changes: object
) -> SegmentManifest:
    file = stored(folder, vectors)
    rows = Rows(file, len(vectors), np.zeros(len(vectors), np.bool_))
    plans = plans_for(*vectors.shape, settings)
    return write_segment(folder, 7, rows, (), settings, plans, **changes)


def stored(folder: Path, vectors: Embeddings) -> VectorFile:
    """A file of vectors for the segment in this folder, which is made."""
    folder.mkdir(parents=True)
    place = folder.parent.parent / "vectors" / uuid4().hex
    place.mkdir(parents=True)
    ids = ids_for(len(vectors))
    return VectorFile.rewrite(place, vectors.shape[1], ids, ids[-1], batches(ids, vectors))


def built(kind: str, vectors: Embeddings) -> SegmentIndex:
    return SegmentIndex.build(plan_index(*vectors.shape, IndexSettings(kind, 1000)), vectors)


@pytest.fixture(scope="module")
def vectors() -> Embeddings:
    return clumped(N, DIM)


@pytest.fixture(scope="module")
def queries() -> Embeddings:
    return clumped(200, DIM, seed=9)


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, vectors: Embeddings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("made") / "segments" / request.param
    written(folder, vectors, IndexSettings(kind=request.param, target_recall=TARGET))
    return folder


@pytest.fixture(scope="module")
def segment(folder: Path) -> Segment:
    return Segment.open(folder)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "segments" / "small"
    written(folder, clumped(200), IndexSettings(kind="hnsw", target_recall=0.9))
    return folder


# What a segment holds.


def test_a_segment_holds_every_item_with_its_exact_vector_and_no_other(
    segment: Segment, vectors: Embeddings
) -> None:
    ids = ids_for(N)
    assert np.array_equal(segment.row_ids.of(np.arange(segment.size)), ids)
    asked = np.random.default_rng(0).permutation(np.arange(-3, ids.max() + 4))
    positions = segment.positions_of(asked)
    assert ((positions >= 0) == np.isin(asked, ids)).all()
    assert (segment.row_ids.of(positions[positions >= 0]) == asked[positions >= 0]).all()
    assert (segment.index.vectors(segment.positions_of(ids)) == vectors).all()
    assert segment.positions_of(np.empty(0, np.int64)).shape == (0,)


def test_the_manifest_describes_the_segment_and_its_files(folder: Path) -> None:
    manifest = Segment.open(folder).manifest
    assert (manifest.seq, manifest.size, manifest.dim) == (7, N, DIM)
    is_scan = folder.name == "flat"
    assert (manifest.kind, manifest.held_out) == (folder.name, 0 if is_scan else N // 10)
    assert manifest.target_recall == TARGET <= manifest.recall
    assert manifest.settings == IndexSettings(kind=folder.name, target_recall=TARGET)
    assert {path.name for path in folder.iterdir()} == {"segment.json", *manifest.files}
    for name, facts in manifest.files.items():
        assert facts.bytes == (folder / name).stat().st_size
        assert facts.sha256 == sha256_of(folder / name)


def test_the_same_items_make_the_same_files_and_progress_adds_up(
    tmp_path: Path, vectors: Embeddings
) -> None:
    steps: list[int] = []
    settings = IndexSettings(kind="hnsw")
    facts = [
        written(tmp_path / "segments" / name, vectors, settings, on_progress=steps.append).files
        for name in "ab"
    ]
    assert facts[0] == facts[1]
    assert sum(steps) == 2 * N


@pytest.mark.parametrize("count", [1, 2, 9, 63, 64, 65])
@pytest.mark.parametrize("kind", ["auto", "hnsw"])
def test_small_segments_can_be_made(tmp_path: Path, count: int, kind: str) -> None:
    vectors = units(count)
    folder = tmp_path / "segments" / "s"
    manifest = written(folder, vectors, IndexSettings(kind=kind))
    segment = Segment.open(folder)
    assert manifest.held_out == (6 if count >= 64 and kind == "hnsw" else 0)
    found = segment.index.search(vectors, 3, manifest.tuned)[1]
    assert recall_at(segment.row_ids.of(found[:, :1]), ids_for(count)[:, None]) >= 0.98


# What a search finds.


def test_answers_are_near_those_of_a_full_sort_with_the_scores_of_full_vectors(
    segment: Segment, queries: Embeddings
) -> None:
    """Of queries that the index was not tuned with, one by one as together."""
    index, effort = segment.index, segment.manifest.tuned
    products = queries @ index.vectors(np.arange(N)).T
    truth = np.argsort(-products, axis=1, kind="stable")[:, :10]
    scores, found = index.search(queries, 10, effort)
    assert recall_at(found, truth) >= (1 if index.kind == "flat" else TARGET - 0.01)
    np.testing.assert_allclose(scores, np.take_along_axis(products, found, axis=1), atol=2e-6)
    assert (np.diff(scores) <= 0).all()
    for row, query in enumerate(queries[:33]):
        single = index.search(query[None], 10, effort)
        np.testing.assert_allclose(single[0][0], scores[row], atol=2e-6)
        assert recall_at(single[1], found[row : row + 1]) == 1.0
    every = np.arange(N)  # also those that were held out
    found = index.search(index.vectors(every), 1, effort)[1][:, 0]
    assert (found == every).mean() >= 0.95


def bitmaps(vectors: Embeddings) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5).random(N)
    side = vectors @ units(1, 3, DIM)[0]
    chosen = {
        "half": draw < 0.5,
        "one in twenty": draw < 0.05,
        "one": np.arange(N) == 77,
        "none": np.zeros(N, bool),
        "one side": side > np.quantile(side, 0.8),
        "the first": np.arange(N) < N // 3,
    }
    bits = {name: bitmap(mask) for name, mask in chosen.items()}
    return bits | {"every bit": np.full((N + 7) // 8, 255, np.uint8)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 200])
def test_recall_stays_when_a_filter_leaves_only_some(
    segment: Segment, queries: Embeddings, name: str, rows: int
) -> None:
    index = segment.index
    bits = bitmaps(index.vectors(np.arange(N)))[name]
    allowed = np.unpackbits(bits, count=N, bitorder="little").astype(bool)
    truth = index.exact(queries, 10, bits)[1]
    parts = [
        index.search(queries[start : start + rows], 10, segment.manifest.tuned, bits)
        for start in range(0, len(queries), rows)
    ]
    scores, found = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert (allowed[found[found >= 0]]).all()
    assert (scores[found < 0] == -1).all()
    assert ((found >= 0).sum(axis=1) == min(10, allowed.sum())).all()
    assert recall_at(found, truth[truth >= 0].reshape(len(truth), -1)) >= TARGET - 0.01


def test_exact_compares_with_more_positions_than_fit_one_chunk(
    monkeypatch: pytest.MonkeyPatch, vectors: Embeddings
) -> None:
    monkeypatch.setattr(engine, "CHUNK", 100)
    chosen = np.sort(np.random.default_rng(0).permutation(N)[:730])
    queries = units(5, 8, DIM)
    allowed = bitmap(np.isin(np.arange(N), chosen))
    scores, found = built("flat", vectors).exact(queries, 25, allowed)
    products = queries @ vectors[chosen].T
    order = np.argsort(-products, axis=1, kind="stable")[:, :25]
    assert (found == chosen[order]).all()
    np.testing.assert_allclose(scores, np.take_along_axis(products, order, axis=1), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_are_ordered_by_position(kind: str, vectors: Embeddings) -> None:
    copies = np.random.default_rng(2).permutation(N)[:40]
    copied = vectors.copy()
    copied[copies] = units(1, 77, DIM)
    tied = built(kind, copied)
    scores, found = tied.search(units(1, 77, DIM), 60, Effort(4096, 64))
    assert found[0, :40].tolist() == sorted(copies.tolist())
    assert (scores[0, 40:] < scores[0, 39]).all()


def test_an_answer_is_full_whatever_is_asked_for(segment: Segment, queries: Embeddings) -> None:
    """More than there are, more than the effort finds, with an effort without bound, nothing."""
    index = segment.index
    scores, positions = index.search(queries[:2], 10 * N, segment.manifest.tuned)
    assert scores.shape == positions.shape == (2, N)
    assert (np.sort(positions, axis=1) == np.arange(N)).all()
    positions = index.search(queries, 200, Effort(1, 1))[1]
    assert (positions >= 0).all()
    assert all(len(set(row)) == 200 for row in positions.tolist())
    found = index.search(queries[:5], 3, Effort(99_999_999_999_999, 64))
    assert recall_at(found[1], index.exact(queries[:5], 3)[1]) == 1.0
    none = queries[:0]
    for allowed in (None, bitmap(np.ones(N, bool))):
        for answer in (
            index.search(none, 5, Effort(1), allowed),
            index.exact(none, 5, allowed),
        ):
            assert [part.shape for part in answer] == [(0, 5), (0, 5)]


def test_scores_stay_within_minus_one_and_one() -> None:
    vectors = units(500, dim=512)
    scores, positions = built("flat", np.concatenate([vectors, -vectors])).search(
        vectors, 1000, Effort(0)
    )
    assert -1.0 <= scores.min() <= scores.max() <= 1.0
    assert (positions[:, 0] == np.arange(500)).all()


def test_searches_at_once_with_different_parameters_give_the_same_answers(
    segment: Segment, queries: Embeddings
) -> None:
    half = np.arange(N) < N // 2
    asked = [
        (Effort(1 + 7 * (i % 5), 1 + i % 3), bitmap(np.roll(half, 200 * i)) if i % 2 else None)
        for i in range(100)
    ]

    def ask(number: int) -> list[int]:
        query, (effort, allowed) = queries[number : number + 1], asked[number]
        return list(segment.index.search(query, 10, effort, allowed)[1][0])

    alone = [ask(number) for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == alone


@pytest.mark.parametrize("has_one_level", [True, False])
def test_a_graph_of_the_gpu_answers_on_the_cpu_with_the_mapped_vectors(
    tmp_path: Path, vectors: Embeddings, queries: Embeddings, has_one_level: bool
) -> None:
    graph = faiss.IndexHNSWCagra(DIM, 16, faiss.METRIC_INNER_PRODUCT)
    graph.add(vectors)
    graph.base_level_only = has_one_level
    facts = SegmentIndex("cagra", vectors, graph).save(tmp_path / "index")
    assert facts.bytes < vectors.nbytes * 1.5  # the graph alone
    opened = SegmentIndex.open("cagra", vectors, tmp_path / "index")
    for allowed in (None, bitmap(np.arange(N) % 2 == 0)):
        found = opened.search(queries, 10, Effort(64), allowed)
        truth = opened.exact(queries, 10, allowed)
        assert recall_at(found[1], truth[1]) >= 0.97
        np.testing.assert_allclose(found[0][:, 0], truth[0][:, 0], atol=2e-6)


def test_lists_that_are_found_through_a_graph_answer_as_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vectors: Embeddings,
    queries: Embeddings,
) -> None:
    monkeypatch.setattr("kinlens.indexer.index.index_types.COARSE_HNSW_FROM", 16)
    built("ivf-pq", vectors).save(tmp_path / "index")
    opened = SegmentIndex.open("ivf-pq", vectors, tmp_path / "index")
    codes = faiss.read_index(str(tmp_path / "index"))
    assert isinstance(faiss.downcast_index(codes.quantizer), faiss.IndexHNSW)
    found = opened.search(queries, 10, Effort(32, 32))[1]
    assert recall_at(found, opened.exact(queries, 10)[1]) >= 0.97
    every = opened.search(queries[:3], N, Effort(32, 32))[1]
    assert (np.sort(every, axis=1) == np.arange(N)).all()


TORCH_HAS_CHANGED_FAISS = """
import faiss.contrib.torch_utils
import numpy as np
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.index_types import Effort
from kinlens.indexer.index.plan import IndexSettings, plan_index
vectors = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
for kind in ("flat", "hnsw", "ivf-pq"):
    plan = plan_index(2000, 16, IndexSettings(kind))
    index = SegmentIndex.build(plan, vectors)
    scores, positions = index.search(vectors[:30], 1, Effort(64, 8))
    assert (positions[:, 0] == np.arange(30)).mean() > 0.9, kind
    index.exact(vectors[:30], 5)
print("same answers")
"""


def test_an_index_answers_where_a_library_for_metric_learning_has_changed_faiss() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TORCH_HAS_CHANGED_FAISS], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "same answers"


# What a search costs.


@pytest.fixture(params=["hnsw", "ivf-pq"])
def coded(request: pytest.FixtureRequest, vectors: Embeddings) -> SegmentIndex:
    return built(request.param, vectors)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many queries FAISS was given at once, and for how many candidates of each."""
    calls: list[tuple[int, int]] = []
    search = faiss.IndexRefine.search_c

    def spy(index: faiss.Index, rows: int, queries: object, k: int, *places: object) -> None:
        calls.append((rows, k))
        search(index, rows, queries, k, *places)

    monkeypatch.setattr(faiss.IndexRefine, "search_c", spy)
    return calls


def test_a_search_with_more_candidates_than_allowed_rows_is_exact(
    coded: SegmentIndex, asked: list[tuple[int, int]]
) -> None:
    queries, some = units(20, 2, DIM), np.arange(N) % 40 == 0
    effort = Effort(16, 64)
    found = coded.search(queries, 70, effort, bitmap(some))
    assert (found[1] == coded.exact(queries, 70, bitmap(some))[1]).all()
    free = coded.search(queries, N // 60, effort)
    assert (free[1] == coded.exact(queries, N // 60)[1]).all()
    assert asked == []
    coded.search(queries, 1, Effort(16, 4))
    assert asked == [(20, 10)]


@pytest.mark.parametrize("share", [None, 0.5])
def test_queries_are_taken_in_parts_that_memory_holds(
    coded: SegmentIndex,
    asked: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
) -> None:
    queries, effort = clumped(50, DIM, seed=2), Effort(16, 4)
    allowed = None if share is None else bitmap(np.random.default_rng(0).random(N) < share)
    whole = coded.search(queries, 10, effort, allowed)
    asked.clear()
    monkeypatch.setattr(engine, "CHUNK_BYTES", 12 * 4 * 300)
    parts = coded.search(queries, 10, effort, allowed)
    assert (whole[1] == parts[1]).all()
    assert len(asked) > 1
    assert all(rows == 1 or rows * k <= 300 for rows, k in asked)


# Tuning.


class StepIndex:
    """Finds the truth from some effort on; before, misses one query in `missed`, by default all."""

    def __init__(self, kind: str, enough: int, k_factor: int = 0, missed: int = 1) -> None:
        self.kind, self.size, self.nlist, self.is_on_gpu = kind, 100_000, 64, False
        self._enough, self._k_factor, self._missed = enough, k_factor, missed
        self.asked: list[Effort] = []

    def exact(self, queries: Embeddings, k: int, allowed: object = None) -> tuple[Scores, Ids]:
        shape = (len(queries), k)
        return np.full(shape, 0.5, np.float32), np.zeros(shape, np.int64)

    def search(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        self.asked.append(effort)
        scores, ids = self.exact(queries, k)
        if effort.value < self._enough or effort.k_factor < self._k_factor:
            scores[:: self._missed] -= 1
        return scores, ids


@pytest.mark.parametrize("enough", [1, 16, 17, 100, 1000, 4096])
def test_no_much_smaller_effort_would_do(enough: int) -> None:
    tuned = tune(StepIndex("hnsw", enough), units(20), 0.9)
    assert enough <= tuned.effort.value <= max(16, enough * 9 // 8 + 1)


def test_a_greater_k_factor_is_tried_where_the_small_one_is_not_enough() -> None:
    tuned = tune(StepIndex("ivf-pq", 8, k_factor=32), units(20), 0.9)
    assert tuned.effort.value == 8
    assert tuned.effort.k_factor >= 32


def test_neighbours_that_are_missed_together_do_not_count_as_many_measurements() -> None:
    tuned = tune(StepIndex("hnsw", 64, missed=30), units(120), 0.96)
    assert (tuned.effort.value > 32, tuned.recall) == (True, 1.0)


def test_a_missed_target_is_refused_with_what_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = StepIndex("hnsw", 10**9)
    with pytest.raises(
        RecallError, match=r"hnsw has a recall of 0\.0000.*target is 0\.95.*--target-recall"
    ):
        tune(index, units(20), 0.95)
    assert max(effort.value for effort in index.asked) == 4096
    monkeypatch.setattr("kinlens.indexer.index.index_types.IvfPq.k_factors", (1,))
    with pytest.raises(RecallError, match=r"ivf-pq has a recall of 0\.\d{4}.*--index"):
        written(
            tmp_path / "segments" / "s",
            units(N),
            IndexSettings(kind="ivf-pq", target_recall=0.98),
        )


def test_equal_vectors_may_stand_for_each_other() -> None:
    index = built("hnsw", np.repeat(units(20), 100, axis=0))
    assert tune(index, units(20), 0.98).recall >= 0.98


# Damage. test_damage.py tests that a gallery rebuilds a damaged segment.


def test_a_catalogue_whose_vectors_do_not_follow_its_list_is_refused(tmp_path: Path) -> None:
    ids, vectors = ids_for(600), units(600)
    wrong = {
        "fewer": batches(ids[:599], vectors[:599]),
        "other": batches(np.where(ids == ids[400], ids - 1, ids), vectors),
        "none": iter(()),
    }
    for name, source in wrong.items():
        (tmp_path / name).mkdir()
        with pytest.raises(GalleryCorruptError, match="kinlens-index restore"):
            VectorFile.rewrite(tmp_path / name, vectors.shape[1], ids, ids[-1], source)


@pytest.mark.parametrize("name", ["gone.bin", "columns.bin", "index.faiss"])
def test_a_truncated_file_is_refused_and_never_mapped(small: Path, name: str) -> None:
    (small / name).write_bytes((small / name).read_bytes()[:-1])
    for verify in (True, False, None):
        with pytest.raises(
            GalleryCorruptError, match=rf"{name} has [\d,]+ bytes.*compact GALLERY --rebuild"
        ):
            Segment.open(small, verify_hashes=verify)


def test_hashes_of_large_files_are_read_only_when_asked_for(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray((small / "index.faiss").read_bytes())
    content[-1] ^= 1
    (small / "index.faiss").write_bytes(content)
    with pytest.raises(GalleryCorruptError, match=r"index\.faiss has sha256 .*compact GALLERY"):
        Segment.open(small)
    monkeypatch.setattr(segments, "HASHED_BELOW", 1000)
    Segment.open(small).close()
    Segment.open(small, verify_hashes=False).close()
    with pytest.raises(GalleryCorruptError, match=r"index\.faiss has sha256"):
        Segment.open(small, verify_hashes=True)


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 9},
        {"size": 0},
        {"size": 201},
        {"dim": 15},
        {"kind": "lsh"},
        {"kind": "flat"},
        {"kind": "ivf-pq"},
        {"extra": 1},
        {"files": {}},
        "",
        "[]",
        "null",
    ],
    ids=str,
)
def test_an_edited_manifest_is_refused(small: Path, change: dict[str, object] | str) -> None:
    path = small / "segment.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(change)
    with pytest.raises(GalleryCorruptError, match=r"compact GALLERY --rebuild|was truncated"):
        Segment.open(small)


def test_an_index_below_its_target_replaces_no_gallery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a new one in its folder nor its own compaction: recall is measured before."""
    path, facts = tmp_path / "shop", {"name": "shop", "bundle_id": "b" * 64}
    entries = [Entry(f"k{n}", row, f"{n:064x}") for n, row in enumerate(units(N, dim=DIM))]
    dump = GalleryExport(facts, DIM, N, lambda: iter(entries))
    coarse = IndexSettings(kind="ivf-pq", target_recall=0.98)
    monkeypatch.setattr("kinlens.indexer.index.index_types.IvfPq.k_factors", (1,))
    with pytest.raises(RecallError):
        import_gallery(dump, path, settings=coarse)
    assert not (path / "CURRENT").exists()
    import_gallery(dump, path, settings=IndexSettings(kind="flat"))
    with closing(Gallery.open(path)) as gallery:
        before = (current_generation(path), gallery.search(units(5, 3, DIM), 10))
    with pytest.raises(RecallError, match=r"target is 0\.98"):
        import_gallery(dump, path, settings=coarse)
    with closing(Gallery.open(path)) as gallery:
        with pytest.raises(RecallError, match=r"target is 0\.98"):
            gallery.compact(coarse)
        assert (current_generation(path), gallery.search(units(5, 3, DIM), 10)) == before
        assert gallery.index_settings().kind == "flat"
