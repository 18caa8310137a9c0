"""The facts about a gallery."""

from collections.abc import Callable
from pathlib import Path

import pytest

from embedder.errors import GalleryNotFoundError
from indexer.checks.stats import gallery_stats, store_stats
from indexer.gallery import Gallery
from indexer.ingest.build import BuildReport


def test_stats_count_what_was_indexed(
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
    files = (out / "versions" / report.generation).rglob("*")
    size_mb = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    assert stats.disk_mb == pytest.approx(size_mb, abs=0.2)


def test_stats_count_what_was_changed_since(built: Path) -> None:
    gallery = Gallery.open(built)
    gallery.update({"f.gif": {"price": 5, "sale": True}, "cup/a.png": {"price": 5.0}})
    gallery.remove(["hat/c.webp"])
    version = gallery.version
    assert store_stats(gallery).attributes == {"class": 2, "price": 1, "sale": 1}
    gallery.close()
    stats = gallery_stats(built)
    assert (stats.size, stats.removed, stats.delta, stats.version) == (5, 1, 0, version)


def test_stats_of_an_empty_gallery_are_zero(tmp_path: Path) -> None:
    Gallery.create(tmp_path / "empty", name="empty", bundle_id="b", dim=4).close()
    stats = gallery_stats(tmp_path / "empty")
    assert (stats.size, stats.formats, stats.index, stats.recall) == (0, {}, "", None)


def test_stats_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GalleryNotFoundError):
        gallery_stats(tmp_path)
