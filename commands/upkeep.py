"""kinlens-index compact, calibrate, plan, stats, verify: maintenance of galleries and plans."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer

from kinlens.commands import stores
from kinlens.commands.console import print_report, progress
from kinlens.commands.options import (
    GalleryArgument,
    ImageRootOption,
    IndexOptions,
    JsonOption,
    ModelOptions,
    RecallOption,
    StoreArgument,
    VectorTypeOption,
    grouped,
)
from kinlens.embedder.errors import PlanError
from kinlens.indexer.checks.stats import stats_of
from kinlens.indexer.checks.verify import (
    sample_size,
    size_of,
    verify_gallery,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import IndexKind
from kinlens.indexer.index.plan import IndexSettings, Plan, plan_index
from kinlens.indexer.ingest.foreign import read_vectors
from kinlens.indexer.live.compaction import CompactReport
from kinlens.indexer.types import VectorType
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet

app = typer.Typer()

_TABLES = ("formats", "attributes")
_COSTS = (
    *("memory_mb", "mapped_mb", "disk_mb", "build_memory_mb"),
    *("gpu_memory_mb", "gpu_free_mb", "expected_recall", "reason"),
)


@app.command(epilog="Example: kinlens-index compact galleries/shop --index hnsw")
@grouped
def compact(
    gallery: GalleryArgument,
    index: IndexOptions,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the index even if nothing has changed.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write added items to the index and erase removed ones, while the gallery is in use.

    Erased items cannot be restored. Index type, recall target and device are kept, unless an option
    changes them.
    """
    with contextlib.closing(Gallery.open(gallery)) as opened:
        facts = opened.facts()
        settings = index.over(opened.index_settings())
        has_changed = bool(facts.delta or facts.tombstones or opened.has_removed())
        if facts.segment is not None:  # a segment of an earlier version counts as changed
            has_changed |= facts.segment.gone > 0 or facts.segment.vectors is None
        if not (rebuild or index != IndexOptions() or has_changed):
            done = CompactReport(segment=None, manifest=None, elapsed_s=0.0)
            text = "Nothing has changed since the last compaction. To rebuild, use --rebuild."
            print_report(done, json, text)
            return
        if index.index_device and opened.size:  # fail early if it does not fit
            plan_index(opened.size, opened.dim, settings, opened.vector_type)
        with progress(facts.size, "Indexing") as advance:
            report = opened.compact(settings, wait=True, from_scratch=rebuild, on_progress=advance)
        Calibrator(opened).fit_if_outdated()
    print_report(report, json)


@app.command(epilog="Example: kinlens-index calibrate galleries/shop --product sku")
def calibrate(
    gallery: GalleryArgument,
    product: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Attribute that names the product; by default product, else class."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fit the probability that a hit is right, by searching for items of the gallery.

    Commands that change a gallery, and the service, do this when a fifth of the items has changed.
    `golden run` fits a more accurate curve.
    """
    with contextlib.closing(Gallery.open(gallery)) as opened:
        with progress(1000, "Searching") as advance:
            found = Calibrator(opened).fit(product, advance)
        print_report(found, json)


@app.command(epilog="Example: kinlens-index plan 1000000 128 --memory-mb 500")
@grouped
def plan(
    n: Annotated[int, typer.Argument(metavar="N", help="Number of vectors.")],
    dim: Annotated[int, typer.Argument(metavar="DIM", help="Dimension of a vector.")],
    index: IndexOptions,
    vector_type: VectorTypeOption = "fp32",
    everything: Annotated[bool, typer.Option("--all", help="Compare all index types.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the index type for N vectors and its cost, without building it."""
    settings = index.over(IndexSettings())
    if everything:
        kinds = get_args(IndexKind)
        plans = [_cost(n, dim, replace(settings, kind=kind), vector_type) for kind in kinds]
        lines = [*_table(plans)]
    else:
        chosen = plan_index(n, dim, settings, vector_type)
        plans, lines = [_cost_of(chosen)], chosen.lines()
    print_report({"n": n, "dim": dim, "device": settings.device, "plans": plans}, json, *lines)


@app.command(epilog="Example: kinlens-index stats galleries/shop --json")
def stats(gallery: StoreArgument, json: JsonOption = False) -> None:
    """Show facts about a gallery: size, index, disk and attributes."""
    with stores.opened(gallery) as store:
        facts = stats_of(store)
    lines = []
    for name, value in facts.items():
        shown = ", ".join(f"{k} {v:,}" for k, v in value.items()) if name in _TABLES else value
        lines.append(f"{name.replace('_', ' '):16} {'-' if shown is None else shown}")
    print_report(facts, json, *lines)


def _table(plans: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'index':11} {'memory':>10} {'mapped':>10} {'disk':>10}  recall@10"
    for plan in plans:
        if plan["refused"] is not None:
            yield f"{plan['kind']:11} {plan['refused']}"
            continue
        sizes = " ".join(f"{plan[name]:>7,.0f} MB" for name in _COSTS[:3])
        yield f"{plan['kind']:11} {sizes}  {plan['expected_recall']:.3f}"


def _cost(n: int, dim: int, settings: IndexSettings, vector_type: VectorType) -> dict[str, Any]:
    """The cost of an index, or the reason why it cannot be built."""
    try:
        return _cost_of(plan_index(n, dim, settings, vector_type))
    except PlanError as error:
        return {"kind": settings.kind, "refused": str(error), **dict.fromkeys(_COSTS)}


def _cost_of(plan: Plan) -> dict[str, Any]:
    return {"kind": plan.kind, "refused": None, **{name: getattr(plan, name) for name in _COSTS}}


@app.command(
    epilog="Example: kinlens-index verify galleries/shop --bundle bundles/shop --sample 500"
)
@grouped
def verify(
    gallery: GalleryArgument,
    model: ModelOptions,
    bundle: Annotated[
        Path | None, typer.Option(help="Embed the images again with this bundle and compare.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="Items to check; by default all up to 10,000, 1,000 of larger galleries."
        ),
    ] = None,
    image_root: ImageRootOption = None,
    queries: Annotated[
        Path | None, typer.Option(help="Vectors to measure recall with: .npy, (Q, D).")
    ] = None,
    target_recall: RecallOption = None,
    json: JsonOption = False,
) -> None:
    """Check files, items and recall; exits with status 1 if a check fails.

    All hashes and the catalogue are checked, each checked item must find itself, and searches must
    find the true neighbours. Without --bundle the stored vectors are the queries, so a vector
    stored for the wrong item is not detected. Without --queries recall is measured with stored
    vectors; pass vectors of your users' queries to measure the recall that they get.
    """
    embedder = model.open(bundle) if bundle else None
    vectors = None if queries is None else read_vectors(queries).astype(np.float32)
    GoldenSet(gallery).check()
    with progress(sample_size(size_of(gallery), sample), "Searching") as advance:
        report = verify_gallery(
            gallery,
            embedder,
            sample=sample,
            image_root=image_root,
            queries=vectors,
            target_recall=target_recall,
            on_progress=advance,
        )
    print_report(report, json)
    if not report.is_good:
        raise typer.Exit(1)
