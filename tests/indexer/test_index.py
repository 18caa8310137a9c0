"""The index of each kind: its answers, the least effort that reaches the target, its plan."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import faiss
import numpy as np
import pytest

from kinlens.embedder.errors import GalleryCorruptError, PlanError, RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import faiss as engine
from kinlens.indexer.index import segment as segments
from kinlens.indexer.index.plan import IndexSettings, Plan
from kinlens.indexer.types import GalleryExport, Ids, Scores
from tests.indexer.conftest import segment_of
from tests.indexer.oracle import bitmap, clumped, entry, units
from tests.support.recall import recall_at
from tests.support.seams import (
    Effort,
    Segment,
    SegmentIndex,
    import_gallery,
    plan_index,
    tune,
)

KINDS = ("flat", "hnsw", "ivf-pq")
N, DIM = 3003, 32  # the last byte of a bitmap is not full
TARGET = 0.97


@pytest.fixture(autouse=True)
def _approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Galleries this small are searched as large ones, and many queries in several parts."""
    monkeypatch.setattr(engine, "EXACT_BELOW", 0)
    monkeypatch.setattr(engine, "CHUNK_BYTES", 12 * 4 * 300)
    monkeypatch.setattr(engine, "SCAN_EXACT_PART", 0.02)


def segment_at(path: Path, vectors: Embeddings, settings: IndexSettings) -> Path:
    """The folder of the segment of a gallery of these vectors."""
    facts = {"name": "shop", "bundle_id": "b" * 64, "dim": vectors.shape[1]}
    with closing(Gallery.create(path, **facts)) as gallery:
        gallery.add(entry(f"k{n}", row) for n, row in enumerate(vectors))
        gallery.compact(settings)
    return segment_of(path)


def built(kind: str, vectors: Embeddings) -> SegmentIndex:
    return SegmentIndex.build(plan_index(*vectors.shape, IndexSettings(kind, 1000)), vectors)


@pytest.fixture(scope="module")
def vectors() -> Embeddings:
    return clumped(N, DIM)


@pytest.fixture(scope="module")
def queries() -> Embeddings:
    return clumped(200, DIM, seed=9)


@pytest.fixture(scope="module", params=KINDS)
def segment(request, vectors, tmp_path_factory) -> Segment:
    settings = IndexSettings(kind=request.param, target_recall=TARGET)
    return Segment.open(segment_at(tmp_path_factory.mktemp("made") / "shop", vectors, settings))


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


@pytest.mark.parametrize("rows", [1, 200])
def test_recall_stays_when_a_filter_leaves_only_some(segment, queries, rows: int) -> None:
    index = segment.index
    draw = np.random.default_rng(5).random(N)
    side = index.vectors(np.arange(N)) @ units(1, 3, DIM)[0]
    chosen = {
        "half": draw < 0.5,
        "one in twenty": draw < 0.05,
        "one": np.arange(N) == 77,
        "none": np.zeros(N, bool),
        "one side": side > np.quantile(side, 0.8),
        "the first": np.arange(N) < N // 3,
    }
    bits = {name: bitmap(mask) for name, mask in chosen.items()}
    bits["every bit"] = np.full((N + 7) // 8, 255, np.uint8)
    asked = queries[:60] if rows == 1 else queries
    for name, allowed in bits.items():
        parts = [
            index.search(asked[start : start + rows], 10, segment.manifest.tuned, allowed)
            for start in range(0, len(asked), rows)
        ]
        scores, found = (np.concatenate(part) for part in zip(*parts, strict=True))
        mask = np.unpackbits(allowed, count=N, bitorder="little").astype(bool)
        assert mask[found[found >= 0]].all(), name
        assert (scores[found < 0] == -1).all(), name
        assert ((found >= 0).sum(axis=1) == min(10, mask.sum())).all(), name
        truth = index.exact(asked, 10, allowed)[1]
        truth = truth[truth >= 0].reshape(len(truth), -1)
        assert recall_at(found, truth) >= TARGET - 0.01, name


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
        for answer in (index.search(none, 5, Effort(1), allowed), index.exact(none, 5, allowed)):
            assert [part.shape for part in answer] == [(0, 5), (0, 5)]


def test_searches_at_once_with_different_parameters_give_the_same_answers(segment, queries) -> None:
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


def test_lists_that_are_found_through_a_graph_answer_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: Embeddings, queries: Embeddings
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


class StepIndex:
    """Finds the truth from some effort on; before, misses one query in `missed`, by default all."""

    def __init__(self, kind: str, enough: int, k_factor: int = 0, missed: int = 1) -> None:
        self.kind, self.size, self.nlist, self.is_on_gpu = kind, 100_000, 64, False
        self._enough, self._k_factor, self._missed = enough, k_factor, missed

    def exact(self, queries: Embeddings, k: int, allowed: object = None) -> tuple[Scores, Ids]:
        shape = (len(queries), k)
        return np.full(shape, 0.5, np.float32), np.zeros(shape, np.int64)

    def search(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        scores, ids = self.exact(queries, k)
        if effort.value < self._enough or effort.k_factor < self._k_factor:
            scores[:: self._missed] -= 1
        return scores, ids


@pytest.mark.parametrize(
    ("kind", "enough", "k_factor", "missed"),
    [
        ("hnsw", 1, 0, 1),
        ("hnsw", 17, 0, 1),
        ("hnsw", 1000, 0, 1),
        ("ivf-pq", 8, 32, 1),
        ("hnsw", 64, 0, 30),  # queries that are missed together are one measurement
    ],
)
def test_no_much_smaller_effort_would_do(
    kind: str, enough: int, k_factor: int, missed: int
) -> None:
    tuned = tune(StepIndex(kind, enough, k_factor, missed), units(120), 0.96)
    assert enough <= tuned.effort.value <= max(16, enough * 9 // 8 + 1)
    assert tuned.effort.k_factor >= k_factor
    assert tuned.recall == 1.0


def test_equal_vectors_may_stand_for_each_other() -> None:
    index = built("hnsw", np.repeat(units(20), 30, axis=0))
    assert tune(index, units(20), 0.98).recall >= 0.98


# Damage. test_damage.py tests that a gallery rebuilds a damaged segment.


def test_hashes_of_large_files_are_read_only_when_asked_for(tmp_path, monkeypatch) -> None:
    settings = IndexSettings(kind="hnsw", target_recall=0.9)
    small = segment_at(tmp_path / "shop", clumped(200), settings)
    file = small / "index.faiss"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(GalleryCorruptError, match=r"index\.faiss has sha256 .*compact GALLERY"):
        Segment.open(small)
    monkeypatch.setattr(segments, "HASHED_BELOW", 1000)
    Segment.open(small).close()
    Segment.open(small, verify_hashes=False).close()
    with pytest.raises(GalleryCorruptError, match=r"index\.faiss has sha256"):
        Segment.open(small, verify_hashes=True)


def test_an_index_below_its_target_replaces_no_gallery(tmp_path, monkeypatch) -> None:
    """Neither a new one in its folder nor its own compaction: recall is measured before."""
    path, facts = tmp_path / "shop", {"name": "shop", "bundle_id": "b" * 64}
    entries = [entry(f"k{n}", row) for n, row in enumerate(units(N, dim=DIM))]
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


def planned(n: int, dim: int = 128, **changes: object) -> Plan:
    return plan_index(n, dim, IndexSettings(**{"memory_mb": 1e6, **changes}))


@pytest.mark.parametrize(
    ("n", "dim", "kind"),
    [
        (1, 128, "flat"),
        (390_000, 128, "flat"),
        (97_000, 512, "flat"),
        (400_000, 128, "hnsw"),
        (500_000, 256, "hnsw"),
        (500_001, 256, "ivf-pq"),
        (10_000_000, 128, "ivf-pq"),
    ],
)
def test_auto_takes_the_kind_that_suits_the_size(n: int, dim: int, kind: str) -> None:
    plan = planned(n, dim)
    assert (plan.kind, plan.n, plan.dim, plan.device) == (kind, n, dim, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "0 vectors.*1 to"),
        ({"dim": 8193}, "dimension 8,193 .*8,192"),
        ({"kind": "lsh"}, "Unknown index 'lsh'.*--index auto, flat, hnsw"),
        ({"kind": "cagra"}, "Unknown index 'cagra'.*--index auto, flat, hnsw"),
        ({"device": "tpu"}, "Unknown device 'tpu'.*--index-device cpu or cuda"),
        ({"target_recall": 0.0}, "at most 1, not 0.0.*--target-recall"),
        ({"memory_mb": 0}, "--memory-mb must be above 0, not 0"),
        ({"kind": "ivf-pq", "n": 623}, "623 vectors are too few.*624.*--index flat"),
        (
            {"n": 10**6, "kind": "hnsw", "memory_mb": 100},
            r"hnsw for 1,000,000 vectors.*needs \d+ MB.*only 100 MB.*--memory-mb",
        ),
        ({"n": 10**7, "memory_mb": 101}, r"only 101 MB.*--memory-mb"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**{"n": 1000, **changes})


@pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
def test_a_plan_says_the_memory_of_its_index_and_promises_no_more_than_it_can(
    tmp_path, kind: str
) -> None:
    vectors = clumped(8_000, 32)
    plan = planned(*vectors.shape, kind=kind, target_recall=0.9994)
    facts = SegmentIndex.build(plan, vectors).save(tmp_path / "index")
    assert plan.memory_mb * 2**20 == pytest.approx(facts.bytes, rel=0.15)
    with pytest.raises(PlanError, match=rf"{kind} is approx.*--index flat.*--target-recall"):
        planned(8_000, kind=kind, target_recall=1.0)
    exact = planned(3_000_000, target_recall=1)
    assert (exact.kind, exact.expected_recall) == ("flat", 1.0)


def test_rows_added_after_others_were_removed_are_found_as_often(tmp_path, vectors) -> None:
    old, new = np.arange(2500), np.arange(2500, N)
    plan = plan_index(len(old), DIM, IndexSettings("ivf-pq", 1000))
    index = SegmentIndex.build(plan, vectors, old)
    index.save(tmp_path / "index.faiss")
    moved = np.where(old % 3 == 0, -1, old)
    updated = SegmentIndex.updated("ivf-pq", tmp_path / "index.faiss", vectors, len(old), moved)
    updated = updated.extended(new)
    every = Effort(updated.nlist, 1)
    shares = []
    for rows in (old[old % 3 > 0], new):
        _, found = updated.search(vectors[rows], 10, every)
        shares.append((found == rows[:, None]).any(axis=1).mean())
    assert shares[1] > 0.9 * shares[0]


HOST = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np

faiss.omp_set_num_threads(3)
faiss.cvar.distance_compute_blas_query_bs = 512
faiss.cvar.distance_compute_blas_database_bs = 2048


def settings(_=None):
    sizes = faiss.cvar.distance_compute_blas_query_bs, faiss.cvar.distance_compute_blas_database_bs
    return faiss.omp_get_max_threads(), *sizes


mine = settings()
import kinlens.indexer.index.faiss as engine
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import SearchOptions
from tests.indexer.oracle import BUNDLE, clumped, entry

engine.EXACT_BELOW, engine._PARALLEL_FROM = 0, 100
engine.core_count = lambda: 2
seen, compare = set(), engine.found_by


def found_by(*arguments):
    seen.add(settings())
    return compare(*arguments)


engine.found_by = found_by
rows = clumped(1500, 16)
gallery = Gallery.create(Path(sys.argv[1]), name="shop", bundle_id=BUNDLE, dim=16)
gallery.add(entry(f"k{n}", row, {"n": n}) for n, row in enumerate(rows[:1400]))
for kind in ("flat", "hnsw", "ivf-pq"):
    gallery.compact(IndexSettings(kind, target_recall=0.5))
    assert settings() == mine, (kind, settings())
    gallery.add([entry(f"{kind}{n}", row) for n, row in enumerate(rows[1400:1410])])
    for count in (1, 40):
        for options in ({}, {"exact": True}, {"where": "n < 900"}, {"min_score": 0.9}):
            gallery.search(rows[:count], 5, SearchOptions(**options))
            assert settings() == mine, (kind, count, options, settings())
    gallery.facets(["n"], rows[:1], SearchOptions(min_score=0.9))
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda n: gallery.search(rows[: n % 9], 5), range(400)):
            pass
    try:
        gallery.search(rows[:40, :3], 5)
    except Exception:
        pass
    assert settings() == mine, (kind, settings())
assert {(1, 512, 2048), (2, 1024, 16384)} <= seen, seen
"""


def test_a_program_that_uses_faiss_itself_finds_its_own_settings_again(tmp_path: Path) -> None:
    """The threads are those of a thread, the sizes of blocks those of the process."""
    subprocess.run([sys.executable, "-c", HOST, tmp_path / "shop"], timeout=120, check=True)
