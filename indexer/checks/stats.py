"""Statistics of a gallery."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kinlens.indexer.folder.manifest import read_report
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.store import VectorStore
from kinlens.values import Scalar, values_in


def stats_of(store: VectorStore) -> dict[str, Any]:
    """Statistics of a gallery on any engine, and more of one in a folder. `attributes` has the
    number of distinct values of each.
    """
    if isinstance(store, Gallery):  # counts in the database instead of reading each item
        formats, distinct = store.counts()
        attributes = {name: store.distinct(name) for name in store.schema()}
    else:
        formats, distinct, attributes = _counted(store)
    found = {
        "name": store.name,
        "version": store.version,
        "bundle_id": store.bundle_id,
        "precision": store.precision,
        "dim": store.dim,
        "size": sum(formats.values()),
        "distinct_images": distinct,
        "formats": formats,
        "attributes": {name: count for name, count in attributes.items() if count},
    }
    return found | _of_folder(store) if isinstance(store, Gallery) else found


def stats_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """A line for each of the statistics of `stats_of`."""
    for name, value in facts.items():
        shown = value
        if isinstance(value, dict):
            shown = ", ".join(f"{each} {count:,}" for each, count in value.items())
        yield f"{name.replace('_', ' '):16} {'-' if shown is None else shown}"


def _of_folder(gallery: Gallery) -> dict[str, Any]:
    facts = gallery.facts()
    segment, generation = facts.segment, gallery.generation_folder
    return {
        **facts.model_dump(include={"generation", "created_at", "source", "source_root"}),
        "left_out": len(read_report(generation).get("failures", ())),  # images of the build
        "index": "" if segment is None else segment.kind,
        "recall": None if segment is None else segment.recall,
        "delta": facts.delta,
        "removed": facts.tombstones,
        "compaction_due": facts.compaction_due,
        "disk_mb": round(_bytes_in(generation) / 1e6, 3),
    }


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


def _bytes_in(folder: Path) -> int:
    """Total size of the files below `folder`. A compaction may remove files during the count."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total
