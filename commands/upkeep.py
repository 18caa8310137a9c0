"""kinlens-index compact, calibrate, plan, stats, verify: maintenance of galleries and plans."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from kinlens.commands import options, stores
from kinlens.commands.console import SHOWN, errors_shown, print_report, progress
from kinlens.commands.options import (
    DeviceOption,
    EngineOption,
    FallbackOption,
    GalleryArgument,
    ImageRootOption,
    IndexDeviceOption,
    IndexOption,
    JsonOption,
    MemoryOption,
    PrecisionOption,
    RecallOption,
    StoreArgument,
    VectorTypeOption,
    given_settings,
)
from kinlens.embedder.errors import PlanError
from kinlens.embedder.types import SHORT
from kinlens.indexer.checks.stats import StoreStats, gallery_stats, store_stats
from kinlens.indexer.checks.verify import (
    VerifyReport,
    VerifySettings,
    sample_size,
    size_of,
    verify_gallery,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import IndexKind
from kinlens.indexer.index.plan import IndexSettings, Plan, plan_index
from kinlens.indexer.live.compaction import CompactReport
from kinlens.indexer.types import MILVUS, VectorType
from kinlens.quality.calibration import GalleryCalibration
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet

app = typer.Typer()

_TABLES = ("formats", "attributes")


@dataclass(frozen=True, slots=True)
class PlanShown:
    """The cost of an index, or the reason why it cannot be built."""

    kind: str
    refused: str | None = None
    memory_mb: float | None = None
    mapped_mb: float | None = None
    disk_mb: float | None = None
    build_memory_mb: float | None = None
    gpu_memory_mb: float | None = None
    gpu_free_mb: float | None = None
    expected_recall: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Plans:
    """The index for `n` vectors of dimension `dim`; with --all, one plan per index type."""

    n: int
    dim: int
    device: str
    plans: tuple[PlanShown, ...]


@app.command(epilog="Example: kinlens-index compact galleries/shop --index hnsw")
def compact(
    gallery: GalleryArgument,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the index even if nothing has changed.")
    ] = False,
    index: IndexOption = None,
    memory_mb: MemoryOption = None,
    target_recall: RecallOption = None,
    device: IndexDeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Write added items to the index and erase removed ones, while the gallery is in use.

    Erased items cannot be restored. Index type, recall target and device are kept, unless an option
    changes them.
    """
    with errors_shown():
        with contextlib.closing(Gallery.open(gallery)) as opened:
            facts = opened.facts()
            chosen = given_settings(index, memory_mb, target_recall, device)
            has_changed = bool(facts.delta or facts.tombstones or opened.has_removed())
            if facts.segment is not None:  # a segment of an earlier version counts as changed
                has_changed |= facts.segment.gone > 0 or facts.segment.vectors is None
            if not (rebuild or chosen or has_changed):
                done = CompactReport(segment=None, manifest=None, elapsed_s=0.0)
                text = "Nothing has changed since the last compaction. To rebuild, use --rebuild."
                print_report(done, json, text)
                return
            settings = replace(opened.index_settings(), **chosen) if chosen else None
            if settings is not None and device and opened.size:  # fail early if it does not fit
                plan_index(opened.size, opened.dim, settings, opened.vector_type)
            with progress(facts.size, "Indexing") as advance:
                report = opened.compact(
                    settings, wait=True, from_scratch=rebuild, on_progress=advance
                )
            Calibrator(opened).fit_if_outdated()
        print_report(report, json, _text(report))


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
    with errors_shown(), contextlib.closing(Gallery.open(gallery)) as opened:
        with progress(1000, "Searching") as advance:
            found = Calibrator(opened).fit(product, advance)
        print_report(found, json, *_calibration_lines(found))


def _calibration_lines(found: GalleryCalibration) -> Iterator[str]:
    if found.product is not None:
        yield (
            f"{found.products:,} products by the attribute {found.product}, with "
            f"{found.views:.1f} images of each; {found.labelled:,} of {found.items:,} items have it"
        )
    for source in ("gallery", "golden"):
        fit = getattr(found, source)
        if isinstance(fit, str):
            yield f"{source}: none. {fit}."
            continue
        off = ""
        if fit.errors is not None:
            off = f"; calibration error {fit.errors[0]:.3f} (best hit), {fit.errors[1]:.3f} (ten)"
        yield f"{source}: fitted to {fit.searches:,} searches{off}"


@app.command(epilog="Example: kinlens-index plan 1000000 128 --memory-mb 500")
def plan(
    n: Annotated[int, typer.Argument(metavar="N", help="Number of vectors.")],
    dim: Annotated[int, typer.Argument(metavar="DIM", help="Dimension of a vector.")],
    index: IndexOption = None,
    memory_mb: MemoryOption = None,
    target_recall: RecallOption = None,
    device: IndexDeviceOption = None,
    vector_type: VectorTypeOption = "fp32",
    everything: Annotated[bool, typer.Option("--all", help="Compare all index types.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the index type for N vectors and its cost, without building it."""
    with errors_shown():
        settings = IndexSettings(**given_settings(index, memory_mb, target_recall, device))
        if everything:
            kinds = get_args(IndexKind)
            rows = tuple(_row(n, dim, kind, settings, vector_type) for kind in kinds)
            lines = [*_table(rows)]
        else:
            chosen = plan_index(n, dim, settings, vector_type)
            rows, lines = (_shown_plan(chosen),), chosen.lines()
        print_report(Plans(n=n, dim=dim, device=settings.device, plans=rows), json, *lines)


@app.command(epilog="Example: kinlens-index stats galleries/shop --json")
def stats(gallery: StoreArgument, json: JsonOption = False) -> None:
    """Show facts about a gallery: size, index, disk and attributes."""
    with errors_shown():
        facts: StoreStats
        if gallery.startswith(MILVUS):
            with stores.opened(gallery) as store:
                facts = store_stats(store)
        else:
            facts = gallery_stats(gallery)
    lines = []
    for name, value in facts.model_dump().items():
        shown = ", ".join(f"{k} {v:,}" for k, v in value.items()) if name in _TABLES else value
        lines.append(f"{name.replace('_', ' '):16} {'-' if shown is None else shown}")
    print_report(facts, json, *lines)


def _text(report: CompactReport) -> str:
    made = report.manifest
    if made is None:
        return "The gallery is empty, so it has no index."
    return (
        f"Index {made.kind} of {made.size:,} items in {report.elapsed_s:.1f} s, "
        f"recall@10 {made.recall:.4f} (target {made.target_recall})."
    )


def _table(rows: Sequence[PlanShown]) -> Iterator[str]:
    yield f"{'index':11} {'memory':>10} {'mapped':>10} {'disk':>10}  recall@10"
    for row in rows:
        if row.refused is not None:
            yield f"{row.kind:11} {row.refused}"
            continue
        yield (
            f"{row.kind:11} {row.memory_mb:>7,.0f} MB {row.mapped_mb:>7,.0f} MB "
            f"{row.disk_mb:>7,.0f} MB  {row.expected_recall:.3f}"
        )


def _row(
    n: int, dim: int, kind: str, settings: IndexSettings, vector_type: VectorType
) -> PlanShown:
    try:
        return _shown_plan(plan_index(n, dim, replace(settings, kind=kind), vector_type))
    except PlanError as error:
        return PlanShown(kind=kind, refused=str(error))


def _shown_plan(plan: Plan) -> PlanShown:
    facts = asdict(plan)
    return PlanShown(
        **{one.name: facts[one.name] for one in fields(PlanShown) if one.name in facts}
    )


@app.command(
    epilog="Example: kinlens-index verify galleries/shop --bundle bundles/shop --sample 500"
)
def verify(
    gallery: GalleryArgument,
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
    device: DeviceOption = "cpu",
    allow_cpu_fallback: FallbackOption = False,
    precision: PrecisionOption = "fp32",
    engine: EngineOption = "auto",
    json: JsonOption = False,
) -> None:
    """Check files, items and recall; exits with status 1 if a check fails.

    All hashes and the catalogue are checked, each checked item must find itself, and searches must
    find the true neighbours. Without --bundle the stored vectors are the queries, so a vector
    stored for the wrong item is not detected. Without --queries recall is measured with stored
    vectors; pass vectors of your users' queries to measure the recall that they get.
    """
    with errors_shown():
        embedder = (
            options.open_embedder(bundle, device, allow_cpu_fallback, precision, engine)
            if bundle
            else None
        )
        vectors = None if queries is None else options.read_vectors(queries)
        settings = VerifySettings(sample, image_root, vectors, target_recall)
        GoldenSet(gallery).check()
        with progress(sample_size(size_of(gallery), sample), "Searching") as advance:
            report = verify_gallery(gallery, embedder, settings, advance)
        print_report(report, json, *_verified(report))
    if not report.is_good:
        raise typer.Exit(1)


def _verified(report: VerifyReport) -> Iterator[str]:
    for problem in report.problems[:SHOWN]:
        yield f"{problem.key}: {problem.reason}"
    yield (
        f"Gallery {report.name}, version {report.version[:SHORT]}: files are intact, "
        f"{report.checked - len(report.problems):,} of {report.checked:,} checked items "
        f"({report.size:,} in all) find themselves."
    )
    if report.recall is not None:
        yield (
            f"recall@10 {report.recall:.4f} of {report.recall_queries:,} queries, "
            f"target {report.target_recall} (index {report.index or 'none'})."
        )
