"""Verification: finds what is wrong and accepts what only looks alike."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embedder.bundle import sha256_of
from embedder.errors import (
    BundleMismatchError,
    GalleryCorruptError,
    InvalidParameterError,
    PlanError,
)
from indexer.checks.retune import tune_gallery
from indexer.checks.verify import (
    VerifySettings,
    measured_recall,
    own_recall,
    sampled,
    verify_gallery,
)
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.ingest.build import BuildReport
from tests.indexer.conftest import CountingEmbedder
from tests.support.seams import GalleryFolder
from tests.tiny import encoded, picture


def segment_of(gallery: Path) -> Path:
    """The folder of the one segment."""
    [segment] = (GalleryFolder(gallery).current() / "segments").iterdir()
    return segment


def units(rng: np.random.Generator, count: int, dim: int = 16) -> np.ndarray:
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def large(tmp_path: Path, entries_of: Callable[[np.ndarray], list]) -> Path:
    """A gallery of 1,000 random vectors with an approximate index that has not to try hard."""
    path = tmp_path / "large"
    gallery = Gallery.create(path, name="large", bundle_id="b" * 64, dim=16)
    gallery.add(entries_of(units(np.random.default_rng(0), 1000)))
    gallery.compact(IndexSettings(kind="hnsw", target_recall=0.5))
    gallery.close()
    return path


@pytest.mark.parametrize("with_images", [False, True])
def test_a_good_gallery_has_no_problems(
    built: Path, embedder: CountingEmbedder, with_images: bool
) -> None:
    seen: list[int] = []
    report = verify_gallery(built, embedder if with_images else None, on_progress=seen.append)
    assert (report.size, report.checked, report.problems) == (6, 6, ())
    assert report.from_images == with_images
    assert (report.recall, report.index, report.is_good) == (1.0, "flat", True)
    assert sum(seen) == 6


@pytest.mark.parametrize("with_images", [False, True])
def test_copies_and_equal_pixels_in_other_files_are_no_problem(
    shop: Path,
    build: Callable[[], BuildReport],
    out: Path,
    embedder: CountingEmbedder,
    with_images: bool,
) -> None:
    (shop / "a-copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "z.bmp").write_bytes(encoded(picture(1), "BMP"))
    build()
    report = verify_gallery(out, embedder if with_images else None)
    assert (report.checked, report.problems) == (8, ())


def test_vectors_under_the_wrong_items_are_found_with_the_images_only(
    built: Path, embedder: CountingEmbedder
) -> None:
    gallery = Gallery.open(built)
    first, second = gallery.entries(["cup/a.png", "cup/b.jpg"])
    gallery.remove([first.key, second.key])
    gallery.add([replace(first, vector=second.vector), replace(second, vector=first.vector)])
    gallery.close()
    report = verify_gallery(built, embedder)
    assert [problem.key for problem in report.problems] == ["cup/a.png", "cup/b.jpg"]
    assert "cosine" in report.problems[0].reason
    assert not report.is_good
    assert verify_gallery(built).problems == ()


def test_an_index_that_holds_other_vectors_than_the_catalogue_is_found(built: Path) -> None:
    segment = segment_of(built)
    vectors = np.load(segment / "vectors.npy")
    ids = np.load(segment / "ids.npy").tolist()
    gallery = Gallery.open(built)
    swapped = [ids.index(gallery.stored([key])[key].id) for key in ("hat/c.webp", "f.gif")]
    gallery.close()
    vectors[swapped] = vectors[swapped[::-1]]
    restamped(segment, "vectors.npy", vectors)
    report = verify_gallery(built)
    assert sorted(problem.key for problem in report.problems) == ["f.gif", "hat/c.webp"]
    assert "but the stored vectors give" in report.problems[0].reason


def test_an_item_that_the_index_does_not_hold_is_found(built: Path) -> None:
    segment = segment_of(built)
    ids = np.load(segment / "ids.npy")
    vectors = np.load(segment / "vectors.npy")
    ids[0], vectors[0] = 1000, -vectors[0]
    restamped(segment, "ids.npy", np.sort(ids))
    restamped(segment, "vectors.npy", np.roll(vectors, -1, axis=0))
    [problem] = verify_gallery(built).problems
    assert problem.key == "cup/a.png"
    assert "in place of itself" in problem.reason


def restamped(segment: Path, name: str, rows: np.ndarray) -> None:
    """Write other rows into a file of a segment, with a hash that fits."""
    np.save(segment / name, rows)
    manifest = json.loads((segment / "segment.json").read_text())
    manifest["files"][name] = {
        "bytes": (segment / name).stat().st_size,
        "sha256": sha256_of(segment / name),
    }
    (segment / "segment.json").write_text(json.dumps(manifest))


def test_images_that_are_gone_changed_or_damaged_are_named(
    built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_bytes(encoded(picture(77)))
    report = verify_gallery(built, embedder)
    assert {problem.key for problem in report.problems} == {"f.gif", "cup/a.png"}
    assert verify_gallery(built).problems == ()


def test_moved_images_are_found_below_their_new_root(
    built: Path, shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    shop.rename(tmp_path / "moved")
    assert len(verify_gallery(built, embedder).problems) == 6
    settings = VerifySettings(image_root=tmp_path / "moved")
    assert verify_gallery(built, embedder, settings).problems == ()


def test_another_bundle_is_refused(built: Path) -> None:
    with pytest.raises(BundleMismatchError):
        verify_gallery(built, CountingEmbedder(bundle_id="c" * 64))


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy"])
def test_one_changed_byte_of_the_index_is_found_and_not_mended_in_silence(
    built: Path, name: str
) -> None:
    file = segment_of(built) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        GalleryCorruptError, match=rf"{name} has sha256 .*compact GALLERY --rebuild"
    ):
        verify_gallery(built)
    assert file.read_bytes() == data


def test_an_index_that_is_gone_is_found(built: Path) -> None:
    segment = segment_of(built)
    segment.rename(built.parent / "elsewhere")
    with pytest.raises(GalleryCorruptError, match=r"compact GALLERY --rebuild"):
        verify_gallery(built)


def test_a_damaged_catalogue_is_found(built: Path) -> None:
    catalog = GalleryFolder(built).current() / "catalog.sqlite"
    data = bytearray(catalog.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = b"\xff" * 4096
    catalog.write_bytes(data)
    with pytest.raises(GalleryCorruptError):
        verify_gallery(built)


def test_a_sample_is_the_same_each_time_and_within_the_gallery(built: Path) -> None:
    ids = np.array([3, 5, 8])
    assert sampled(ids).tolist() == sampled(ids, 100).tolist() == [3, 5, 8]
    assert not len(sampled(ids[:0]))
    many = np.arange(1_000_000)
    sample = sampled(many).tolist()
    assert sample == sampled(many).tolist() == sorted(set(sample))
    assert len(sample) == 1000
    assert verify_gallery(built, settings=VerifySettings(sample=2)).checked == 2


def test_items_that_are_removed_while_they_are_checked_are_no_problem(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.checks.verify.CHUNK", 64)
    other = Gallery.open(large)

    def remove_all(count: int) -> None:
        other.remove([item.key for item in other.items()][:500])

    report = verify_gallery(large, on_progress=remove_all)
    other.close()
    assert report.problems == ()
    assert 64 <= report.checked < 1000


def test_recall_below_the_target_is_not_good(large: Path) -> None:
    report = verify_gallery(large)
    assert report.recall is not None
    assert 0.5 <= report.recall < 1.0
    assert (report.index, report.recall_queries, report.is_good) == ("hnsw", 1000, True)
    strict = verify_gallery(large, settings=VerifySettings(target_recall=0.9999))
    assert (strict.problems, strict.is_good) == ((), False)


def test_recall_agrees_with_a_comparison_by_hand(large: Path) -> None:
    queries = units(np.random.default_rng(1), 50)
    gallery = Gallery.open(large)
    ids = np.array([item.id for item in gallery.items()])
    matrix = gallery.vectors(ids.tolist())
    truth = ids[np.argsort(-queries @ matrix.T, axis=1)[:, :10]]
    _, found = gallery.nearest(queries, 10)
    hits = sum(len(set(row) & set(answer)) for row, answer in zip(truth, found, strict=True))
    assert hits < 500
    assert measured_recall(gallery, queries).value == pytest.approx(hits / 500)
    assert 0.5 <= own_recall(gallery, ids[:100].tolist(), matrix[:100]).value <= 1.0
    gallery.close()


def test_a_gallery_of_one_item_has_nothing_to_recall(
    tmp_path: Path, entries_of: Callable[[np.ndarray], list]
) -> None:
    path = tmp_path / "one"
    gallery = Gallery.create(path, name="one", bundle_id="b", dim=16)
    assert verify_gallery(path).recall is None
    gallery.add(entries_of(units(np.random.default_rng(0), 1)))
    gallery.close()
    report = verify_gallery(path)
    assert (report.checked, report.recall, report.is_good) == (1, None, True)


def test_tuning_stores_parameters_that_reach_the_target_of_the_queries(large: Path) -> None:
    queries = units(np.random.default_rng(1), 200)
    settings = VerifySettings(queries=queries, target_recall=0.99)
    assert not verify_gallery(large, settings=settings).is_good
    tuned = tune_gallery(large, queries, 0.99)
    report = verify_gallery(large, settings=settings)
    assert report.is_good
    assert report.recall == pytest.approx(tuned.recall, abs=0.005)
    assert verify_gallery(large).target_recall == 0.99


def test_a_gallery_without_an_index_and_queries_that_do_not_fit_are_refused(
    large: Path, tmp_path: Path
) -> None:
    Gallery.create(tmp_path / "empty", name="empty", bundle_id="b", dim=16).close()
    queries = units(np.random.default_rng(1), 20)
    with pytest.raises(InvalidParameterError, match=r"has no index yet.*kinlens-index compact"):
        tune_gallery(tmp_path / "empty", queries)
    with pytest.raises(InvalidParameterError, match=r"dimension 16"):
        tune_gallery(large, queries[:, :8])
    with pytest.raises(InvalidParameterError, match=r"dimension 16"):
        verify_gallery(large, settings=VerifySettings(queries=queries[:, :8]))


def test_a_compaction_keeps_the_target_that_was_tuned_for(large: Path) -> None:
    tune_gallery(large, units(np.random.default_rng(1), 200), 0.9)
    gallery = Gallery.open(large)
    gallery.compact()
    segment = gallery.facts().segment
    gallery.close()
    assert segment is not None
    assert (segment.kind, segment.target_recall) == ("hnsw", 0.9)
    assert segment.recall >= 0.9


def test_too_few_queries_and_targets_that_no_graph_promises_are_refused(large: Path) -> None:
    queries = units(np.random.default_rng(1), 100)
    with pytest.raises(InvalidParameterError, match=r"99 queries are too few.*at least 100"):
        tune_gallery(large, queries[:99], 0.9)
    for target in (1.0, 0.0, -0.5, 2.0):
        with pytest.raises(PlanError, match="--target-recall"):
            tune_gallery(large, queries, target)
    assert verify_gallery(large).target_recall == 0.5
