"""The facts about a gallery."""

from collections.abc import Callable
from pathlib import Path

import pytest

from embedder.errors import GalleryNotFoundError
from indexer.build import BuildReport
from indexer.stats import gallery_stats


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
    assert (stats.name, stats.version) == ("gallery", report.version)
    assert stats.source_root == str(shop.resolve())
    files = (out / "versions" / report.version[:12]).iterdir()
    assert stats.disk_mb == pytest.approx(sum(f.stat().st_size for f in files) / 1e6, abs=1e-3)


def test_stats_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GalleryNotFoundError):
        gallery_stats(tmp_path)
