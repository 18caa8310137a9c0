"""What is in a gallery."""

from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from indexer.gallery import Gallery
from indexer.layout import GalleryFolder
from indexer.version import read_report


class GalleryStats(BaseModel):
    """Facts about one gallery version; `attributes` holds the number of distinct values of each."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    bundle_id: str
    dim: int
    size: int
    distinct_images: int
    left_out: int
    created_at: str
    source: str
    source_root: str
    formats: dict[str, int]
    attributes: dict[str, int]
    disk_mb: float


def gallery_stats(path: Path | str) -> GalleryStats:
    """Open the gallery in folder `path`, hashes included, and count. Raises: GalleryError."""
    gallery = Gallery.open(path)
    try:
        formats: Counter[str] = Counter()
        contents: set[str] = set()
        values: dict[str, set[str]] = {}
        for item in gallery.items():
            formats[item.format] += 1
            contents.add(item.sha256)
            for name, value in item.attributes.items():
                values.setdefault(name, set()).add(value)
    finally:
        gallery.close()
    version = GalleryFolder(path).current()
    manifest = gallery.manifest
    return GalleryStats(
        **manifest.model_dump(include={"name", "version", "bundle_id", "dim", "size"}),
        **manifest.model_dump(include={"created_at", "source", "source_root"}),
        distinct_images=len(contents),
        left_out=len(read_report(version)["failures"]),
        formats=dict(sorted(formats.items())),
        attributes={name: len(found) for name, found in sorted(values.items())},
        disk_mb=round(sum(file.stat().st_size for file in version.iterdir()) / 1e6, 3),
    )
