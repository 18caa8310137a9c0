"""Verification finds what is wrong and accepts what only looks alike; statistics."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts
from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryCorruptError,
)
from kinlens.indexer.checks.stats import gallery_stats, store_stats
from kinlens.indexer.checks.verify import (
    VerifySettings,
    measured_recall,
    own_recall,
    sampled,
    verify_gallery,
)
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import read_manifest, write_manifest
from kinlens.indexer.ingest.build import BuildReport
from tests.indexer.conftest import (
    CountingEmbedder,
    catalog_of,
    flipped,
    generation_of,
    rows_of,
    segment_of,
    truncated,
)
from tests.indexer.oracle import DIM, entry, units
from tests.tiny import encoded, photo


@pytest.fixture(scope="module")
def random_gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 random vectors with an approximate index that has not to try hard; do not change."""
    path = tmp_path_factory.mktemp("random") / "large"
    with closing(Gallery.create(path, name="large", bundle_id="b" * 64, dim=DIM)) as gallery:
        gallery.add(entry(f"item-{n}", vector) for n, vector in enumerate(units(1000)))
        gallery.compact(IndexSettings(kind="hnsw", target_recall=0.5))
    return path


@pytest.fixture
def large(random_gallery: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_gallery, tmp_path / "large"))


@pytest.mark.parametrize("with_images", [False, True])
def test_a_good_gallery_has_no_problems_nor_have_copies_and_equal_pixels(
    shop: Path,
    build: Callable[[], BuildReport],
    out: Path,
    embedder: CountingEmbedder,
    with_images: bool,
) -> None:
    (shop / "a-copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "z.bmp").write_bytes(encoded(photo(1), "BMP"))
    build()
    seen: list[int] = []
    report = verify_gallery(out, embedder if with_images else None, on_progress=seen.append)
    assert (report.size, report.checked, report.problems) == (8, 8, ())
    assert report.from_images == with_images
    assert (report.recall, report.index, report.is_good) == (1.0, "flat", True)
    assert sum(seen) == 8


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


def test_a_column_that_does_not_say_what_its_items_say_is_found(built: Path) -> None:
    segment = segment_of(built)
    data = (segment / "columns.bin").read_bytes()
    restamped(segment, "columns.bin", data.replace(b"cuphat", b"cuphut"))
    with pytest.raises(GalleryCorruptError, match=r"column 'class'.*'hut'.*'hat'.*--rebuild"):
        verify_gallery(built)
    assert Gallery.open(built).page(0, 9, Equals("class", "hut")).total == 3
    with closing(Gallery.open(built)) as gallery:
        gallery.compact(from_scratch=True)
    assert verify_gallery(built).problems == ()


def restamped(segment: Path, name: str, data: np.ndarray | bytes) -> None:
    """Write other data into a file of a segment, with a hash that fits."""
    if isinstance(data, bytes):
        (segment / name).write_bytes(data)
    else:
        np.save(segment / name, data)
    manifest = read_manifest(segment)
    file = segment / name
    facts = FileFacts(bytes=file.stat().st_size, sha256=sha256_of(file))
    write_manifest(segment, manifest.model_copy(update={"files": {**manifest.files, name: facts}}))


def test_images_that_are_gone_changed_or_moved_are_named(
    built: Path, shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    moved = shop.rename(tmp_path / "moved")
    assert len(verify_gallery(built, embedder).problems) == 6
    settings = VerifySettings(image_root=moved)
    assert verify_gallery(built, embedder, settings).problems == ()
    (moved / "f.gif").unlink()
    (moved / "cup" / "a.png").write_bytes(encoded(photo(77)))
    report = verify_gallery(built, embedder, settings)
    assert {problem.key for problem in report.problems} == {"f.gif", "cup/a.png"}
    assert verify_gallery(built).problems == ()
    with pytest.raises(BundleMismatchError):
        verify_gallery(built, CountingEmbedder(bundle_id="c" * 64))


def test_damaged_files_are_found_and_not_repaired_silently(built: Path) -> None:
    for name, damage, message in (
        ("columns.bin", flipped, r"columns\.bin has sha256 .*compact GALLERY --rebuild"),
        ("gone.bin", Path.unlink, r"compact GALLERY --rebuild"),
        ("rows.f32", flipped, r"vector of item 4 does not fit its checksum.*kinlens-index restore"),
        ("rows.f32", truncated, r"rows\.f32 has 3 vectors.* truncated.*kinlens-index restore"),
        ("rows.f32", Path.unlink, r"kinlens-index restore"),
    ):
        file = rows_of(built) if name == "rows.f32" else segment_of(built) / name
        good = file.read_bytes()
        damage(file)
        with pytest.raises(GalleryCorruptError, match=message):
            verify_gallery(built)
        assert not file.exists() or file.read_bytes() != good
        file.write_bytes(good)
    assert verify_gallery(built).is_good
    truncated(catalog_of(built))
    with pytest.raises(GalleryCorruptError):
        verify_gallery(built)


def test_a_sample_is_the_same_each_time_and_within_the_gallery(large: Path) -> None:
    sample = sampled(np.arange(1_000_000)).tolist()
    assert sample == sampled(np.arange(1_000_000)).tolist() == sorted(set(sample))
    assert len(sample) == 1000
    assert verify_gallery(large, settings=VerifySettings(sample=2)).checked == 2


def test_items_that_are_removed_while_they_are_checked_are_no_problem(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.checks.verify.CHUNK", 64)
    other = Gallery.open(large)

    def remove_all(count: int) -> None:
        other.remove([item.key for item in other.items()][:500])

    report = verify_gallery(large, on_progress=remove_all)
    other.close()
    assert report.problems == ()
    assert 64 <= report.checked < 1000


def test_recall_is_that_of_a_comparison_by_hand_and_below_the_target_not_good(large: Path) -> None:
    queries = units(50, 1)
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
    report = verify_gallery(large)
    assert 0.5 <= report.recall < 1.0
    assert (report.index, report.recall_queries, report.is_good) == ("hnsw", 1000, True)
    strict = verify_gallery(large, settings=VerifySettings(target_recall=0.9999))
    assert (strict.problems, strict.is_good) == ((), False)


def test_a_gallery_of_no_or_one_item_has_nothing_to_recall(tmp_path: Path) -> None:
    path = tmp_path / "one"
    gallery = Gallery.create(path, name="one", bundle_id="b", dim=16)
    stats = gallery_stats(path)
    assert (stats.size, stats.formats, stats.index, stats.recall) == (0, {}, "", None)
    assert verify_gallery(path).recall is None
    gallery.add([entry("item", units(1)[0])])
    gallery.close()
    report = verify_gallery(path)
    assert (report.checked, report.recall, report.is_good) == (1, None, True)


# The facts about a gallery.


def test_stats_count_what_was_indexed_and_what_was_changed_since(
    shop: Path, build: Callable[[], BuildReport], out: Path
) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "text.jpg").write_text("not an image")
    report = build()
    stats = gallery_stats(out)
    assert (stats.size, stats.distinct_images, stats.left_out) == (7, 6, 1)
    assert stats.formats == {"BMP": 1, "GIF": 2, "JPEG": 1, "PNG": 1, "TIFF": 1, "WEBP": 1}
    assert stats.attributes == {"class": 2}
    assert (stats.name, stats.generation) == ("gallery", report.generation)
    assert stats.source_root == str(shop.resolve())
    assert (stats.index, stats.recall, stats.compaction_due) == ("flat", 1.0, None)
    size_mb = sum(f.stat().st_size for f in generation_of(out).rglob("*") if f.is_file()) / 1e6
    assert stats.disk_mb == pytest.approx(size_mb, abs=0.2)
    with closing(Gallery.open(out)) as gallery:
        gallery.update({"f.gif": {"price": 5, "sale": True}, "cup/a.png": {"price": 5.0}})
        gallery.remove(["hat/c.webp"])
        assert store_stats(gallery).attributes == {"class": 2, "price": 1, "sale": 1}
        stats = gallery_stats(out)
        assert (stats.size, stats.removed, stats.delta) == (6, 1, 0)
        assert stats.version == gallery.version
