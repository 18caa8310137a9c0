"""Verification finds what is wrong and accepts what only looks alike; statistics."""

import json
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import BundleMismatchError, GalleryCorruptError
from kinlens.indexer.checks.verify import measured_recall, verify_gallery
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from tests.indexer.conftest import (
    CountingEmbedder,
    catalog_of,
    flipped,
    rows_of,
    segment_of,
    truncated,
)
from tests.indexer.oracle import entry, units
from tests.tiny import encoded, photo


def test_a_good_gallery_has_no_problems_nor_have_copies_and_equal_pixels(
    shop, build, out, embedder
) -> None:
    (shop / "a-copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "z.bmp").write_bytes(encoded(photo(1), "BMP"))
    build()
    for model in (None, embedder):
        report = verify_gallery(out, model)
        assert (report.size, report.checked, report.problems) == (8, 8, ())
        assert report.from_images == (model is not None)
        assert (report.recall, report.index, report.is_good) == (1.0, "flat", True)


def test_vectors_under_the_wrong_items_are_found_with_the_images_only(built, embedder) -> None:
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


def test_a_column_that_does_not_say_what_its_items_say_is_found(built) -> None:
    with closing(Gallery.open(built)) as gallery:
        gallery.update({"cup/a.png": {"class": "other"}})
        gallery.update({"cup/a.png": {"class": "cup"}})
        gallery.compact()
        [file] = gallery.generation_folder.glob("columns/*.bin")
    data = file.read_bytes().replace(b"cuphat", b"cuphut")
    crc = zlib.crc32(data[: data.index(b'{"seq"')])
    length = int.from_bytes(data[-16:-8], "little")
    text = json.dumps(json.loads(data[-16 - length : -16]) | {"crc": crc}).encode()
    ends = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little")
    file.write_bytes(data[: -16 - length] + text + ends)  # gets a checksum that fits
    with pytest.raises(GalleryCorruptError, match=r"column 'class'.*'hut'.*'hat'.*--rebuild"):
        verify_gallery(built)
    with closing(Gallery.open(built)) as gallery:
        gallery.compact(from_scratch=True)
    assert verify_gallery(built).problems == ()


def test_images_that_are_gone_changed_or_moved_are_named(built, shop, tmp_path, embedder) -> None:
    moved = shop.rename(tmp_path / "moved")
    assert len(verify_gallery(built, embedder).problems) == 6
    assert verify_gallery(built, embedder, image_root=moved).problems == ()
    (moved / "f.gif").unlink()
    (moved / "cup" / "a.png").write_bytes(encoded(photo(77)))
    report = verify_gallery(built, embedder, image_root=moved)
    assert {problem.key for problem in report.problems} == {"f.gif", "cup/a.png"}
    assert verify_gallery(built).problems == ()
    with pytest.raises(BundleMismatchError):
        verify_gallery(built, CountingEmbedder(bundle_id="c" * 64))


def test_damaged_files_are_found_and_not_repaired_silently(built) -> None:
    for name, damage, message in (
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


def test_recall_is_that_of_a_comparison_by_hand_and_below_the_target_not_good(
    gallery, run, tmp_path
) -> None:
    queries = units(50, 1)
    gallery.add(entry(f"item-{n}", vector) for n, vector in enumerate(units(1000)))
    gallery.compact(IndexSettings(kind="hnsw", target_recall=0.5))
    ids = gallery.ids()
    truth = ids[np.argsort(-queries @ gallery.items_at(ids.tolist())[1].T, axis=1)[:, :10]]
    _, found = gallery.nearest(queries, 10)
    hits = sum(len(set(row) & set(answer)) for row, answer in zip(truth, found, strict=True))
    assert hits < 500
    assert measured_recall(gallery, queries) == pytest.approx(hits / 500)
    report = verify_gallery(gallery.path)
    assert 0.5 <= report.recall < 1.0
    assert (report.index, report.recall_queries, report.is_good) == ("hnsw", 1000, True)
    np.save(tmp_path / "queries.npy", queries)
    ask = ("verify", gallery.path, "--queries", tmp_path / "queries.npy")
    shown = run(*ask)
    assert shown.exit_code == 0
    value = f"{hits / 500:.4f}"
    assert f"recall@10 {value} of 50 queries, target 0.5 (index hnsw)" in shown.stdout
    low = run(*ask, "--target-recall", "0.9999", "--json")
    report = json.loads(low.stdout)
    assert (low.exit_code, report["problems"], report["recall"]) == (1, [], hits / 500)
