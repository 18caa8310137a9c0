"""A segment on the disk: complete, exact, checked, and refused by name when it is damaged."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embedder.bundle import sha256_of
from embedder.errors import GalleryCorruptError, PlanError, RecallError
from embedder.types import Embeddings
from indexer.index import segment as segment_manifest
from indexer.index.plan import IndexSettings
from indexer.index.segment import HELD_OUT, SegmentManifest
from indexer.types import Ids
from tests.indexer.conftest import small_files
from tests.indexer.vectors import clumped, unit
from tests.support.seams import Segment, recall_at, write_segment, write_vectors

N, DIM = 2000, 32
KINDS = ("flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq")


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
    folder.mkdir()
    ids = ids_for(len(vectors))
    stored = write_vectors(folder, ids, batches(ids, vectors), settings)
    return write_segment(folder, 7, stored, settings, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vectors() -> Embeddings:
    return clumped(N, DIM)


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, vectors: Embeddings, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("segments") / request.param
    written(folder, vectors, IndexSettings(kind=request.param, target_recall=0.95))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    written(folder, clumped(200), IndexSettings(kind="hnsw", target_recall=0.9))
    return folder


def test_a_segment_holds_every_item_with_its_exact_vector(
    folder: Path, vectors: Embeddings
) -> None:
    segment, ids = Segment.open(folder), ids_for(N)
    assert np.array_equal(np.sort(segment.ids), ids)
    positions = segment.positions_of(ids)
    assert (segment.ids[positions] == ids).all()
    assert (segment.index.vectors(positions) == vectors).all()


def test_a_segment_finds_items_as_well_as_it_was_told_to(folder: Path) -> None:
    segment, queries = Segment.open(folder), clumped(200, DIM, seed=9)
    found = segment.index.search(queries, 10, segment.manifest.tuned)[1]
    assert recall_at(found, segment.index.exact(queries, 10)[1]) >= 0.94


def test_held_out_items_are_found_too(folder: Path) -> None:
    segment = Segment.open(folder)
    first = N - segment.manifest.held_out
    last = segment.index.vectors(np.arange(first, N))
    found = segment.index.search(last, 10, segment.manifest.tuned)[1]
    assert np.mean([p in row for p, row in zip(range(first, N), found, strict=True)]) >= 0.95


def test_the_manifest_tells_what_is_there(folder: Path) -> None:
    manifest = Segment.open(folder).manifest
    assert (manifest.seq, manifest.size, manifest.dim) == (7, N, DIM)
    assert manifest.kind == folder.name
    assert manifest.held_out == 200
    assert manifest.target_recall == 0.95 <= manifest.recall
    assert manifest.settings == IndexSettings(kind=folder.name, target_recall=0.95)
    assert {path.name for path in folder.iterdir()} == {"segment.json", *manifest.files}
    for name, facts in manifest.files.items():
        assert facts.bytes == (folder / name).stat().st_size
        assert facts.sha256 == sha256_of(folder / name)


def test_the_same_items_make_the_same_vectors_and_the_same_order(
    tmp_path: Path, vectors: Embeddings
) -> None:
    facts = [
        written(tmp_path / name, vectors, IndexSettings(kind="fp16")).files for name in ("a", "b")
    ]
    assert facts[0] == facts[1]


def test_positions_of_unknown_items_are_minus_one(folder: Path) -> None:
    segment = Segment.open(folder)
    known = set(segment.ids.tolist())
    asked = np.random.default_rng(0).permutation(np.arange(-3, max(known) + 4))
    positions = segment.positions_of(asked)
    assert ((positions >= 0) == np.isin(asked, list(known))).all()
    assert (segment.ids[positions[positions >= 0]] == asked[positions >= 0]).all()
    assert segment.positions_of(np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("count", [1, 2, 9, 63, 64, 65])
@pytest.mark.parametrize("kind", ["auto", "fp16", "hnsw"])
def test_small_segments_can_be_made(tmp_path: Path, count: int, kind: str) -> None:
    vectors = unit(count)
    manifest = written(tmp_path / "s", vectors, IndexSettings(kind=kind))
    segment = Segment.open(tmp_path / "s")
    assert manifest.held_out == (0 if count < 64 else 6)
    found = segment.index.search(vectors, 3, manifest.tuned)[1]
    assert recall_at(segment.ids[found[:, :1]], ids_for(count)[:, None]) >= 0.98


def test_no_more_than_a_thousand_vectors_are_held_out(tmp_path: Path) -> None:
    manifest = written(tmp_path / "s", unit(10 * HELD_OUT + 500, 4), IndexSettings())
    assert manifest.held_out == HELD_OUT


def test_progress_adds_up_to_the_number_of_vectors(tmp_path: Path, vectors: Embeddings) -> None:
    for kind in KINDS:
        steps: list[int] = []
        written(tmp_path / kind, vectors, IndexSettings(kind=kind), on_progress=steps.append)
        assert sum(steps) == N, kind


def test_a_catalogue_whose_vectors_do_not_follow_its_list_is_refused(tmp_path: Path) -> None:
    ids, vectors = ids_for(600), unit(600)
    wrong = {
        "fewer": batches(ids[:599], vectors[:599]),
        "more": batches(np.append(ids, 10**9), unit(601)),
        "other": batches(np.where(ids == ids[400], ids - 1, ids), vectors),
        "none": iter(()),
    }
    for name, source in wrong.items():
        (tmp_path / name).mkdir()
        with pytest.raises(GalleryCorruptError, match="kinlens-index restore"):
            write_vectors(tmp_path / name, ids, source, IndexSettings())


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, vectors: Embeddings
) -> None:
    with pytest.raises(PlanError, match="--memory-mb"):
        written(tmp_path / "s", vectors, IndexSettings(memory_mb=1))
    assert not list((tmp_path / "s").iterdir())


def test_a_missed_recall_is_refused(
    tmp_path: Path, vectors: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.index.kinds.IvfRabitq.k_factors", (1,))
    with pytest.raises(RecallError, match="--target-recall"):
        written(tmp_path / "s", vectors, IndexSettings(kind="ivf-rabitq", target_recall=0.99))


def test_a_full_disk_is_noticed(tmp_path: Path, vectors: Embeddings) -> None:
    for limit in (100, vectors.nbytes - 100):
        with small_files(limit), pytest.raises(OSError, match="too large"):
            written(tmp_path / str(limit), vectors, IndexSettings())


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy", "index.faiss"])
@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_is_refused_and_never_mapped(small: Path, name: str, keep: int) -> None:
    content = (small / name).read_bytes()
    (small / name).write_bytes(content[:keep])
    for verify in (True, False, None):
        with pytest.raises(
            GalleryCorruptError, match=rf"{name} has [\d,]+ bytes.*compact GALLERY --rebuild"
        ):
            Segment.open(small, verify_hashes=verify)


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy", "index.faiss"])
@pytest.mark.parametrize("place", [5, 0.5, -1])
def test_a_flipped_bit_is_refused(small: Path, name: str, place: float) -> None:
    content = bytearray((small / name).read_bytes())
    content[int(place * len(content)) if place == 0.5 else int(place)] ^= 1
    (small / name).write_bytes(content)
    with pytest.raises(GalleryCorruptError, match=rf"{name} has sha256 .*compact GALLERY"):
        Segment.open(small)


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy", "index.faiss", "segment.json"])
def test_a_missing_file_is_refused(small: Path, name: str) -> None:
    (small / name).unlink()
    with pytest.raises(GalleryCorruptError, match=rf"{name}.*compact GALLERY --rebuild"):
        Segment.open(small)


def test_hashes_of_large_files_are_read_only_when_asked_for(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_manifest, "HASHED_BELOW", 1000)
    content = bytearray((small / "vectors.npy").read_bytes())
    content[-1] ^= 1
    (small / "vectors.npy").write_bytes(content)
    Segment.open(small).close()
    Segment.open(small, verify_hashes=False).close()
    with pytest.raises(GalleryCorruptError, match=r"vectors\.npy has sha256"):
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
    ],
    ids=str,
)
def test_an_edited_manifest_is_refused(small: Path, change: dict[str, object]) -> None:
    path = small / "segment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(GalleryCorruptError, match=r"compact GALLERY --rebuild"):
        Segment.open(small)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_manifest_that_is_none_is_refused(small: Path, text: str) -> None:
    (small / "segment.json").write_text(text)
    with pytest.raises(GalleryCorruptError, match=r"segment\.json is not a segment manifest"):
        Segment.open(small)


def test_a_segment_that_is_open_outlives_the_removal_of_its_files(small: Path) -> None:
    segment = Segment.open(small)
    before = segment.index.search(unit(20), 5, segment.manifest.tuned)
    for path in small.iterdir():
        path.unlink()
    small.rmdir()
    after = segment.index.search(unit(20), 5, segment.manifest.tuned)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
