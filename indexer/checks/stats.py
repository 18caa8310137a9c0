"""What is in a gallery."""

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
    """Facts about any gallery; `attributes` holds the number of distinct values of each."""

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
    """Facts about a gallery in a folder: the latest items are `delta`, not in the `index` yet.

    `removed` items wait in the index for the next compaction; `recall` was measured when it was
    made.
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
    """Count what is in a gallery, whatever its engine."""
    if isinstance(store, Gallery):  # without a look at each item, of which there may be many
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
    """Items by format, different contents, and different values by attribute."""
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
    """Open the gallery in folder `path` and count. Raises: GalleryError."""
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
    """Files of a compaction may go while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total
