"""Search parameters of a gallery, chosen for the queries of its users."""

from dataclasses import replace
from pathlib import Path

from embedder.durable import rename, staged, sync
from embedder.errors import InvalidParameterError
from embedder.types import Embeddings
from indexer.catalog.database import catalog_view
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.index.plan import check_target
from indexer.index.segment import MANIFEST, Segment, write_manifest
from indexer.index.tune import Tuned, tune
from indexer.live.compaction import CATALOG, SEGMENTS, alone
from indexer.live.ranking import check_search
from indexer.live.snapshot import open_segment
from indexer.types import SearchOptions

MIN_QUERIES = 100
"""Fewer say too little about the recall of others."""


def tune_gallery(path: Path | str, queries: Embeddings, target: float | None = None) -> Tuned:
    """Store the least effort that reaches the recall `target` at 10 of `queries` (Q, D).

    The queries must not be items of the gallery. Galleries that are open take the new parameters
    when they open the index again; the next compaction tunes anew, to the same target. No target:
    that of the index.

    Raises: RecallError, and then nothing was changed; InvalidParameterError for queries that do
        not fit or are fewer than MIN_QUERIES, or a gallery without an index; PlanError for a
        target that this index cannot have; GalleryError.
    """
    folder = GalleryFolder(path)
    generation = folder.current()
    with alone(generation, wait=True):
        place = generation / SEGMENTS / _segment_of(generation)
        segment = open_segment(place, "cpu", verify_hashes=None)
        manifest = segment.manifest
        queries = check_search(1, SearchOptions(), manifest.dim, queries)
        _check_count(len(queries))
        wanted = manifest.target_recall if target is None else target
        check_target(manifest.kind, wanted)
        tuned = tune(segment.index, queries, wanted)
        with folder.writing(generation.name):
            _store(place, segment, tuned, wanted)
    return tuned


def _check_count(queries: int) -> None:
    if queries < MIN_QUERIES:
        raise InvalidParameterError(
            f"{queries} queries are too few to tune with: recall measured with them says little "
            f"about others. Give at least {MIN_QUERIES}."
        )


def _segment_of(generation: Path) -> str:
    with catalog_view(generation / CATALOG) as view:
        segment = view.state().segment
    if segment is None:
        raise InvalidParameterError(
            f"The gallery {generation.parent.parent} has no index yet, so there is nothing to "
            "tune. Make one: kinlens-index compact."
        )
    return segment


def _store(place: Path, segment: Segment, tuned: Tuned, target: float) -> None:
    changed = segment.manifest.model_copy(
        update={
            "effort": tuned.effort.value,
            "k_factor": tuned.effort.k_factor,
            "recall": tuned.recall,
            "target_recall": target,
            "settings": replace(segment.settings, target_recall=target),
        }
    )
    # Beside the segment: the next compaction takes away what a kill leaves there.
    with disk_errors_explained(place), staged(place.parent) as aside:
        write_manifest(aside, changed)
        sync(aside / MANIFEST, "tuning")
        rename(aside / MANIFEST, place / MANIFEST, "tuning")
