"""Care for galleries: compact and verify them, and plan their index."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike

from kinlens.embedder.errors import PlanError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.session import Embedder
from kinlens.indexer.checks.verify import VerifyReport, sample_size, size_of, verify_gallery
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import IndexKind
from kinlens.indexer.index.plan import IndexChoice, IndexSettings, Plan, plan_index
from kinlens.indexer.ingest.foreign import read_vectors
from kinlens.indexer.live.compaction import CompactReport
from kinlens.indexer.types import VectorType
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet
from kinlens.reports import Report

_SIZES = ("memory_mb", "mapped_mb", "disk_mb")
_COSTS = (*_SIZES, "build_memory_mb", "gpu_memory_mb", "gpu_free_mb", "expected_recall", "reason")


def compact(
    gallery: Gallery,
    *,
    rebuild: bool = False,
    progress: bool | None = None,
    **index: Unpack[IndexChoice],
) -> CompactReport:
    """Write added items to the index and erase removed ones, while the gallery is in use.

    Erased items cannot be restored. Nothing is done if nothing has changed, unless `rebuild` or a
    choice of the index is given. What is not chosen stays as it is.

    Raises: PlanError, RecallError, GalleryBusyError, GalleryConflictError, GalleryWriteError.
    """
    facts = gallery.facts()
    has_changed = bool(facts.delta or facts.tombstones or gallery.has_removed())
    if facts.segment is not None:  # a segment of an earlier version counts as changed
        has_changed |= facts.segment.gone > 0 or facts.segment.vectors is None
    is_chosen = any(value is not None for value in index.values())
    if not (rebuild or is_chosen or has_changed):
        return CompactReport(segment=None, manifest=None, elapsed_s=0.0, skipped=True)
    settings = gallery.index_settings().changed(**index)
    if index.get("index_device") and gallery.size:  # fail early if it does not fit
        plan_index(gallery.size, gallery.dim, settings, gallery.vector_type)
    with progress_bar(facts.size, "Indexing", shown=progress) as advance:
        report = gallery.compact(settings, wait=True, from_scratch=rebuild, on_progress=advance)
    Calibrator(gallery).fit_if_outdated()
    return report


def verify(
    path: Path | str,
    bundle: Embedder | None = None,
    *,
    sample: int | None = None,
    image_root: Path | str | None = None,
    queries: ArrayLike | Path | str | None = None,
    target_recall: float | None = None,
    progress: bool | None = None,
) -> VerifyReport:
    """Check the files of a gallery and its golden set, that items find themselves, and recall.

    Args:
        path: the folder of the gallery.
        bundle: embed the images again with it. Without it the stored vectors are the queries, so a
            vector that is stored for the wrong item is not detected.
        sample: number of items to check; None for all, or 1,000 of more than 10,000.
        image_root: folder or address of the images, if they were moved.
        queries: vectors (Q, D) of your users' queries, or a .npy file, to measure the recall that
            they get.
        target_recall: the recall that is required; None for that of the index.

    Returns:
        A report; `is_good` is whether all checks passed.

    Raises: GalleryCorruptError for a damaged file; GalleryError, InvalidParameterError.
    """
    if isinstance(queries, Path | str):
        queries = read_vectors(Path(queries))
    vectors = None if queries is None else np.asarray(queries, np.float32)
    GoldenSet(path).check()
    with progress_bar(sample_size(size_of(path), sample), "Searching", shown=progress) as advance:
        return verify_gallery(
            path,
            bundle,
            sample=sample,
            image_root=image_root,
            queries=vectors,
            target_recall=target_recall,
            on_progress=advance,
        )


def plan(
    n: int, dim: int, *, vector_type: VectorType = "fp32", **index: Unpack[IndexChoice]
) -> Plan:
    """The index for `n` vectors of length `dim` and its cost, without building it.

    Raises: PlanError for numbers out of range, or too little memory.

    Examples:
        >>> kinlens.plan(1_000_000, 128, memory_mb=500).kind
        'ivf-pq'
    """
    return plan_index(n, dim, IndexSettings().changed(**index), vector_type)


@dataclass(frozen=True)
class Plans(Report):
    """Index types for `n` vectors of length `dim`, each with its cost or why it is `refused`."""

    n: int
    dim: int
    device: str
    plans: list[dict[str, Any]]

    @classmethod
    def of(cls, chosen: Plan) -> "Plans":
        """The costs of one plan."""
        costs = {name: getattr(chosen, name) for name in _COSTS}
        plans = [{"kind": chosen.kind, "refused": None, **costs}]
        return cls(chosen.n, chosen.dim, chosen.device, plans)

    def lines(self) -> Iterator[str]:
        """A table of the costs."""
        yield f"{'index':11} {'memory':>10} {'mapped':>10} {'disk':>10}  recall@10"
        for one in self.plans:
            if one["refused"] is not None:
                yield f"{one['kind']:11} {one['refused']}"
                continue
            sizes = " ".join(f"{one[name]:>7,.0f} MB" for name in _SIZES)
            yield f"{one['kind']:11} {sizes}  {one['expected_recall']:.3f}"


def compare_plans(
    n: int, dim: int, *, vector_type: VectorType = "fp32", **index: Unpack[IndexChoice]
) -> Plans:
    """The costs of all index types for `n` vectors of length `dim`."""
    settings, plans = IndexSettings().changed(**index), []
    for kind in get_args(IndexKind):
        try:
            chosen = plan_index(n, dim, replace(settings, kind=kind), vector_type)
            plans += Plans.of(chosen).plans
        except PlanError as error:
            plans.append({"kind": kind, "refused": str(error), **dict.fromkeys(_COSTS)})
    return Plans(n, dim, settings.device, plans)
