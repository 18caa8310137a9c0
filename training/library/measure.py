"""Measure a model, a run or a bundle, and write the bundle of a run or of a pretrained network."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kinlens.embedder.errors import DatasetError, JobError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.environment import TRAINING, needs
from kinlens.reports import Report
from kinlens.training.library.sources import (
    Images,
    load_images,
    require_run,
    shop_of,
    with_settings,
)
from kinlens.training.report.log import note

if TYPE_CHECKING:
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.manifest import Precision, Preprocessing
    from kinlens.embedder.seen import Seen
    from kinlens.training.config.job import Job
    from kinlens.training.data.records import LabelledImages

    Model = tuple[Any, Preprocessing, Job | None, str | None, Seen | None]
    """A network as a function of images, its input; if known, its job, the digest of its split, and
    what it was trained on."""


class Figures(Report, dict[str, float]):
    """Figures of a model by name; those of recall are in percent.

    Attributes:
        queries: the number of images that were searched for.
    """

    def __init__(self, figures: dict[str, float], queries: int) -> None:
        super().__init__(figures)
        self.queries = queries

    def lines(self) -> list[str]:
        """A line for each figure; recall has its interval of 95 %."""
        from kinlens.golden import with_interval

        return [
            f"{name} {with_interval(x, self.queries) if name.startswith('R@') else f'{x:.4g}'}"
            for name, x in self.items()
        ]


@needs("kinlens.training.evaluate", *TRAINING)
def evaluate(
    source: str | Path,
    images: Images | None = None,
    *,
    full: bool = False,
    precision: str = "fp32",
    engine: str = "auto",
    plot: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Figures:
    """R@K and MAP@R in percent of a run or bundle.

    Args:
        source: a run folder or a bundle.
        images: other images than the test classes of its job, each of which is searched for among
            the others.
        full: also NMI, F1 and structure measures, which take minutes.
        precision, engine: of a bundle; "auto" chooses the fastest one of this machine.
        plot: also draw the embeddings in the plane (t-SNE): a .png, .svg or .pdf.
        settings: changes to the images of its job, such as "data.root=/my/shop".

    Raises:
        EvaluationError: all embeddings are equal.
        CheckpointError, BundleError, DatasetError: what is read is missing or damaged.
    """
    source = Path(source)
    require_run(source)
    import torch

    from kinlens.embedder.bundle import MANIFEST
    from kinlens.training.config.settings import Runtime
    from kinlens.training.evaluation.evaluate import embed_with, evaluate_embeddings, searched
    from kinlens.training.evaluation.retrieval import queries_in
    from kinlens.training.evaluation.structure import require_distinct
    from kinlens.training.parts.own import forget_files
    from kinlens.training.report.plane import draw_embeddings, require_plot

    forget_files()
    if plot is not None:
        require_plot(Path(plot))
    if (source / MANIFEST).is_file():
        embed, spec, job, split_sha256, seen = _of_bundle(source, precision, engine)
    elif precision != "fp32" or engine != "auto":
        raise JobError(
            f"--precision and --engine need a bundle, and {source} is a run. Export it first: "
            "kinlens-train export."
        )
    else:
        embed, spec, job, split_sha256, seen = _of_run(source)
    if images is not None:
        if settings:
            raise JobError("--set changes the job's own images; omit it with --data.")
        parts = [_images(images)]
    elif job is None or split_sha256 is None:
        raise JobError(
            f"The bundle {source} was made without a job, so it has no test images. Pass some: "
            "--data /my/shop, a folder of class folders."
        )
    else:
        job = with_settings(job, settings, ("data.", "recall_at="))
        split = load_images(job, expected=split_sha256)
        split.require(split_sha256, str(source))
        parts = split.tested
    queries = queries_in(*parts)
    note(f"{len(parts[0]):,} images of {parts[0].classes:,} classes, {queries:,} queries")
    _warn_of_seen(parts[0], seen, is_own=images is None)
    runtime = Runtime() if job is None else job.runtime
    with progress_bar(sum(map(len, parts)), "embed", "images") as advance:
        vectors = [embed_with({"": embed}, part, spec, runtime, advance)[""] for part in parts]
    options: dict[str, Any] = {} if job is None else {"ks": job.recall_at, "seed": job.seed}
    require_distinct(torch.from_numpy(vectors[0]), parts[0].labels)
    figures = evaluate_embeddings(*searched(vectors, parts), full=full, **options)
    if plot is not None:
        classes = [parts[0].class_names[label] for label in parts[0].labels]
        draw_embeddings(Path(plot), vectors[0], classes, 0 if job is None else job.seed)
        note(f"Plot: {plot}")
    return Figures(figures, queries)


@needs("kinlens.training.export", *TRAINING)
def export(
    run: str | Path,
    out: str | Path,
    *,
    precisions: Sequence["Precision"] = (),
    keep_weights: bool = False,
    trunk: bool = False,
    with_map: bool = False,
    skip_refused: bool = False,
    settings: Sequence[str] = (),
) -> "Bundle":
    """Write the bundle of a run to the new folder `out`.

    Args:
        precisions: also "int8", "bf16" or "fp16".
        keep_weights: also write `weights.safetensors`, so that a job can continue the training of
            any network.
        trunk: write the untrained trunk that the run began with.
        with_map: also a map that shows where images match, as large as the model.
        skip_refused: omit a precision that fails its gate, and print the reason.
        settings: changes to the images of its job, such as "data.root=/my/shop".

    Raises:
        ExportError: the model differs from the trained network, or loses too much.
        EvaluationError: all embeddings are equal.
        BundleError: `out` exists.
    """
    run = Path(run)
    require_run(run)
    from kinlens.training.bundles.bundle import export_checkpoint, images_to_embed
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.config.job import stored_job
    from kinlens.training.parts.own import forget_files
    from kinlens.training.runner import seen_in

    forget_files()
    checkpoint = load_chosen(run)
    job = with_settings(stored_job(checkpoint.job, f"the job of {run}"), settings, ("data.",))
    split = load_images(job, expected=checkpoint.split_sha256)
    with progress_bar(images_to_embed(split), "check recall", "images") as advance:
        return export_checkpoint(
            checkpoint,
            split,
            Path(out),
            advance,
            precisions,
            (lambda _, reason: note(reason)) if skip_refused else None,
            trunk,
            with_map,
            seen_in(run),
            keep_weights,
        )


def _of_bundle(source: Path, precision: str, engine: str) -> "Model":
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.engines.models import SessionSettings
    from kinlens.embedder.manifest import AskedEngine, AskedPrecision
    from kinlens.embedder.session import OnnxEmbedder
    from kinlens.training.config.job import stored_job

    asked: dict[str, Any] = {"precision": precision, "engine": engine}
    for kind, (name, value) in zip((AskedPrecision, AskedEngine), asked.items(), strict=True):
        if value not in get_args(kind):
            raise JobError(f"--{name} {value} is not one of {', '.join(get_args(kind))}.")
    bundle = Bundle.open(source)
    manifest = bundle.manifest
    job = stored_job(manifest.job, f"the job of {source}") if manifest.job else None
    opened = OnnxEmbedder.open(bundle, SessionSettings(**asked))
    if precision != "fp32" or engine != "auto":
        note(f"in {opened.mode}: {opened.precision_reason}")
    return opened.embed, manifest.preprocessing, job, manifest.split_sha256, bundle.seen()


def _of_run(source: Path) -> "Model":
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.config.settings import Runtime
    from kinlens.training.device import choose_device
    from kinlens.training.models.embedding import torch_embed
    from kinlens.training.runner import seen_in

    checkpoint = load_chosen(source)
    job, net = checkpoint.network()
    embed = partial(torch_embed, net.to(choose_device(Runtime())))
    return embed, job.input.preprocessing(), job, checkpoint.split_sha256, seen_in(source)


def _images(images: Images) -> "LabelledImages":
    from kinlens.training.config.settings import MAX_DAMAGED
    from kinlens.training.data.load import read_folder, read_table, without_damaged
    from kinlens.training.data.records import labelled

    root, _, table = shop_of(images)
    given = table or str(images)
    records = read_table(root, table, given) if table else read_folder(root, given)
    records, damaged = without_damaged(root, records, MAX_DAMAGED)
    if damaged:
        note(f"{len(damaged):,} image(s) are damaged and skipped: {' '.join(damaged[:5])}")
    found = labelled(root, records)
    if found.classes < 2:
        raise DatasetError(
            f"{root} has one class, {found.class_names[0]!r}, so every answer would be right. "
            "Give images of 2 classes or more, each in a sub-folder of its own."
        )
    return found


def _warn_of_seen(images: "LabelledImages", seen: "Seen | None", *, is_own: bool) -> None:
    """Figures on classes that a model was trained on are not comparable with those of others."""
    if seen is None:
        if not is_own:
            note("If the model was trained on some of these images, the figures are too high.")
    elif known := images.seen_by(seen):
        note(
            f"The model was trained on {len(known):,} of these {images.classes:,} classes, such as "
            f"{known[0]!r}, so the figures are too high. Compare models on classes that neither of "
            "them was trained on."
        )


def facts(bundle: "Bundle") -> Iterator[str]:
    """What is known of a bundle, line by line: recall, precisions and calibration."""
    from kinlens.golden import with_interval

    manifest = bundle.manifest
    yield (
        f"bundle {bundle.bundle_id[:12]} in {bundle.path}: {manifest.dim}-d  "
        f"{_figures(manifest.recall)}"
    )
    if manifest.baseline is not None:
        queries, before = manifest.baseline.queries, manifest.baseline.recall["R@1"]
        yield (
            f"R@1 {with_interval(manifest.recall['R@1'], queries)} on {queries:,} test queries; "
            f"{manifest.baseline.model} {with_interval(before, queries)}"
        )
    if manifest.parity is not None:
        source = "the imported file" if manifest.backbone == "onnx" else "torch"
        yield f"ONNX and {source} differ by at most {manifest.parity.max_abs_difference:.1e}"
    if manifest.map is not None:
        yield f"map: sums to the embeddings to {manifest.map.sum_difference:.1e}"
    held_out = manifest.held_out
    if held_out is None:
        yield "no calibration: it was exported without held-out images"
        return
    yield f"on {held_out.images:,} {held_out.split} images: fp32 {_figures(held_out.recall)}"
    for mode in bundle.modes():
        if (compared := manifest.comparison(mode)) is not None:
            low, high = compared.recall_at_1_interval or (0.0, 0.0)
            yield (
                f"  {mode}: {_figures(compared.recall)}  R@1 lost {compared.recall_at_1_loss:.2f} "
                f"({low:.2f} to {high:.2f})  mean cosine {compared.held_out_cosine:.4f}"
            )
    if manifest.calibration is None:
        yield f"no calibration: {held_out.no_calibration}"
        return
    known = manifest.calibration
    views = ", ".join(str(one.views) for one in known.curves)
    yield (
        f"probabilities from {known.gallery_images:,} {known.split} images of {known.classes} "
        f"classes, for galleries with {views} images of each product"
    )
    for at in known.thresholds:
        yield (
            f"{at.false_matches:.0%} false matches: of pairs at {at.pair_score:.3f}, of searches "
            f"at {at.search_score:.3f}"
        )


def _figures(recall: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in recall.items())
