"""Statistics of a gallery."""

import contextlib
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import read_report
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import VectorStore
from kinlens.values import Scalar, values_in


class StoreStats(BaseModel, frozen=True):
    """Statistics of any gallery; `attributes` has the number of distinct values of each."""

    name: str
    version: str
    bundle_id: str
    precision: str
    dim: int
    size: int
    distinct_images: int
    formats: dict[str, int]
    attributes: dict[str, int]


class GalleryStats(StoreStats):
    """Statistics of a gallery in a folder.

    Attributes:
        left_out: number of images that the build skipped.
        recall: measured when the index was built.
        delta: number of items that are not in the index yet.
        removed: number of tombstones in the index, until the next compaction.
    """

    generation: str
    created_at: str
    source: str
    source_root: str
    left_out: int
    index: str
    recall: float | None
    delta: int
    removed: int
    compaction_due: str | None
    disk_mb: float


def store_stats(store: VectorStore) -> StoreStats:
    """Statistics of a gallery on any engine."""
    if isinstance(store, Gallery):  # counts in the database instead of reading each item
        formats, distinct = store.counts()
        attributes = {name: store.distinct(name) for name in store.schema()}
    else:
        formats, distinct, attributes = _counted(store)
    return StoreStats(
        name=store.name,
        version=store.version,
        bundle_id=store.bundle_id,
        precision=store.precision,
        dim=store.dim,
        size=sum(formats.values()),
        distinct_images=distinct,
        formats=formats,
        attributes={name: count for name, count in attributes.items() if count},
    )


def _counted(store: VectorStore) -> tuple[dict[str, int], int, dict[str, int]]:
    """Items by format, number of contents, and number of values by attribute."""
    formats: Counter[str] = Counter()
    contents: set[str] = set()
    values: dict[str, set[Scalar]] = {}
    for item in store.items():
        formats[item.format] += 1
        contents.add(item.sha256)
        for name, value in item.attributes.items():
            values.setdefault(name, set()).update(values_in(value))
    counts = {name: len(found) for name, found in sorted(values.items())}
    return dict(sorted(formats.items())), len(contents), counts


def gallery_stats(path: Path | str) -> GalleryStats:
    """Statistics of the gallery in folder `path`. Raises: GalleryError."""
    with contextlib.closing(Gallery.open(path)) as gallery:
        counts = store_stats(gallery)
        facts = gallery.facts()
    generation = GalleryFolder(path).current().with_name(facts.generation)
    segment = facts.segment
    return GalleryStats(
        **counts.model_dump(),
        **facts.model_dump(include={"generation", "created_at", "source", "source_root"}),
        left_out=len(read_report(generation).get("failures", ())),
        index="" if segment is None else segment.kind,
        recall=None if segment is None else segment.recall,
        delta=facts.delta,
        removed=facts.tombstones,
        compaction_due=facts.compaction_due,
        disk_mb=round(_bytes_in(generation) / 1e6, 3),
    )


def _bytes_in(folder: Path) -> int:
    """Total size of the files below `folder`. A compaction may remove files during the count."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total
