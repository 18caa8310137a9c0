"""kinlens-train evaluate and export: measure a model, and write its bundle."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from kinlens.embedder.errors import DatasetError, JobError
from kinlens.training.commands.jobs import (
    Overrides,
    load_images,
    require_run,
    section,
    shop_of,
    with_settings,
)
from kinlens.training.report.log import note, progress_bar

if TYPE_CHECKING:
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.manifest import Precision, Preprocessing
    from kinlens.embedder.seen import Seen
    from kinlens.training.config.job import Job
    from kinlens.training.data.records import LabelledImages

    Model = tuple[Any, Preprocessing, Job | None, str | None, Seen | None]
    """A network as a function of images, its input; if known, its job, the digest of its split, and
    what it was trained on."""

Precisions = Annotated[
    list[str] | None,
    typer.Option(help="Also in this precision: int8 or bf16 (CPU), fp16 (GPU). Repeatable."),
]
WithMap = Annotated[
    bool,
    typer.Option("--map", help="Also a map that shows where images match, as large as the model."),
]

KeepWeights = Annotated[
    bool,
    typer.Option(
        "--keep-weights", help="Also weights.safetensors, to continue the training of any network."
    ),
]


_OPEN_CLIP = "open_clip:"


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a model bundle.")],
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Other images: a folder of class folders, or a CSV (path,class)."),
    ] = None,
    full: Annotated[bool, typer.Option(help="Also NMI, F1 and structure measures.")] = False,
    precision: Annotated[
        str, typer.Option(help="For a bundle: fp32, bf16, int8, fp16, or auto to choose.")
    ] = "fp32",
    engine: Annotated[
        str, typer.Option(help="For a bundle: onnxruntime, openvino, or auto to choose.")
    ] = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw the embeddings in the plane (t-SNE): a .png, .svg or .pdf."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Recall@K and MAP@R of a run or bundle, on the test images of its job or on other images.

    With --data each image is searched for among the other images; a bundle then needs no job.

    Examples: kinlens-train evaluate bundles/cars --set data.root=/data/cars196 --full

    kinlens-train evaluate bundles/trunk --data /my/shop

    kinlens-train evaluate bundles/shop --precision bf16
    """
    require_run(source)
    from kinlens.training.evaluation.retrieval import with_interval

    figures, queries = figures_of(source, overrides, data, full, precision, engine, plot)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = with_interval(value, queries) if name.startswith("R@") else f"{value:.4g}"
        typer.echo(f"{name} {shown}")


def figures_of(
    source: Path,
    overrides: Sequence[str] | None = None,
    data: Path | None = None,
    full: bool = False,
    precision: str = "fp32",
    engine: str = "auto",
    plot: Path | None = None,
) -> tuple[dict[str, float], int]:
    """The figures of a run or bundle, as of the command `evaluate`, and the number of queries."""
    import torch

    from kinlens.embedder.bundle import MANIFEST
    from kinlens.training.config.settings import Runtime
    from kinlens.training.evaluation.evaluate import embed_with, evaluate_embeddings, searched
    from kinlens.training.evaluation.retrieval import queries_in
    from kinlens.training.evaluation.structure import require_distinct
    from kinlens.training.report.page import draw_embeddings, require_plot

    if plot is not None:
        require_plot(plot)
    if (source / MANIFEST).is_file():
        embed, spec, job, split_sha256, seen = _of_bundle(source, precision, engine)
    elif precision != "fp32" or engine != "auto":
        raise JobError(
            f"--precision and --engine need a bundle, and {source} is a run. Export it first: "
            "kinlens-train export."
        )
    else:
        embed, spec, job, split_sha256, seen = _of_run(source)
    if data is not None:
        if overrides:
            raise JobError("--set changes the job's own images; omit it with --data.")
        parts = [_images(data)]
    elif job is None or split_sha256 is None:
        raise JobError(
            f"The bundle {source} was made without a job, so it has no test images. Pass some: "
            "--data /my/shop, a folder of class folders."
        )
    else:
        job = with_settings(job, overrides, ("data.", "recall_at="))
        split = load_images(job, expected=split_sha256)
        split.require(split_sha256, str(source))
        parts = split.tested
    queries = queries_in(*parts)
    note(f"{len(parts[0]):,} images of {parts[0].classes:,} classes, {queries:,} queries")
    _warn_of_seen(parts[0], seen, is_own=data is None)
    runtime = Runtime() if job is None else job.runtime
    with progress_bar() as bar:
        task = bar.add_task("embed", total=sum(map(len, parts)))
        watch = partial(bar.advance, task)
        vectors = [embed_with({"": embed}, part, spec, runtime, watch)[""] for part in parts]
    settings: dict[str, Any] = {} if job is None else {"ks": job.recall_at, "seed": job.seed}
    require_distinct(torch.from_numpy(vectors[0]), parts[0].labels)
    figures = evaluate_embeddings(*searched(vectors, parts), full=full, **settings)
    if plot is not None:
        draw_embeddings(plot, vectors[0], parts[0], 0 if job is None else job.seed)
        note(f"Plot: {plot}")
    return figures, queries


def _of_bundle(source: Path, precision: str, engine: str) -> "Model":
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.engines.models import SessionSettings
    from kinlens.embedder.manifest import AskedEngine, AskedPrecision
    from kinlens.embedder.session import OnnxEmbedder
    from kinlens.training.config.job import parse_job

    asked: dict[str, Any] = {"precision": precision, "engine": engine}
    for kind, (name, value) in zip((AskedPrecision, AskedEngine), asked.items(), strict=True):
        if value not in get_args(kind):
            raise JobError(f"--{name} {value} is not one of {', '.join(get_args(kind))}.")
    bundle = Bundle.open(source)
    manifest = bundle.manifest
    job = parse_job(manifest.job) if manifest.job else None
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


def _images(data: Path) -> "LabelledImages":
    from kinlens.training.config.settings import MAX_DAMAGED
    from kinlens.training.data.load import read_folder, read_table, without_damaged
    from kinlens.training.data.records import labelled

    root, _, table = shop_of(data)
    given = f"--data {data}"
    records = read_table(root, table, given) if table else read_folder(root, given)
    records, damaged = without_damaged(root, records, MAX_DAMAGED)
    if damaged:
        note(f"{len(damaged):,} image(s) are damaged and skipped: {' '.join(damaged[:5])}")
    images = labelled(root, records)
    if images.classes < 2:
        raise DatasetError(
            f"{data} has one class, {images.class_names[0]!r}, so every answer would be right. "
            "Give images of 2 classes or more, each in a sub-folder of its own."
        )
    return images


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


def export(
    run: Annotated[Path | None, typer.Argument(help="Run folder.")] = None,
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")] = Path("bundle"),
    overrides: Overrides = None,
    precision: Precisions = None,
    skip_refused: Annotated[
        bool,
        typer.Option(
            "--skip-refused", help="Skip a precision that fails its gate, and print the reason."
        ),
    ] = False,
    trunk: Annotated[
        bool,
        typer.Option("--trunk", help="For a run: export the untrained trunk that it began with."),
    ] = False,
    backbone: Annotated[
        str | None, typer.Option(help="Export this pretrained trunk, without a run.")
    ] = None,
    weights: Annotated[str, typer.Option(help="With --backbone: imagenet or a path.")] = "imagenet",
    size_px: Annotated[int, typer.Option(help="With --backbone: side of the input.")] = 224,
    resize_px: Annotated[
        int, typer.Option(help="With --backbone: shorter side before the crop.")
    ] = 256,
    with_map: WithMap = False,
    keep_weights: KeepWeights = False,
    with_text: Annotated[
        bool,
        typer.Option("--text", help="With --backbone open_clip:NAME: also its text tower."),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --text: a tokenizer.json, as SigLIP 2 needs.")
    ] = None,
    licence: Annotated[
        str, typer.Option(help="With --text: licence of the weights.", metavar="NAME")
    ] = "unspecified",
) -> None:
    """Write the model bundle of a run; fails unless ONNX and torch agree.

    With --text it writes both towers of a model that was trained on images with texts, as OpenCLIP
    and SigLIP 2 were. Its galleries can be searched with words. It needs `kinlens[open-clip]` and
    the weights as a file.

    Examples: kinlens-train export runs/cars --out bundles/cars --precision int8

    \b
    kinlens-train export --backbone open_clip:ViT-B-16-SigLIP2 --text --out bundles/siglip2 \\
      --weights open_clip_model.safetensors --tokenizer tokenizer.json --licence Apache-2.0
    """
    if with_text or (backbone or "").startswith(_OPEN_CLIP):
        if not (with_text and backbone and backbone.startswith(_OPEN_CLIP)) or run is not None:
            raise typer.BadParameter(f"--text and --backbone {_OPEN_CLIP}NAME need each other")
        from kinlens.training.words.native import export_two_towers

        describe(export_two_towers(backbone, weights, out, tokenizer, licence))
        return
    if trunk and run is None:
        raise typer.BadParameter("--trunk needs a run; give its folder")
    if (run is None) == (backbone is None):
        raise typer.BadParameter("give either a run folder or --backbone NAME")
    precisions = precisions_of(precision)
    if backbone is not None:
        from kinlens.training.bundles.bundle import export_backbone
        from kinlens.training.config.settings import Input, Model

        if len(set(precisions)) > 1:
            raise typer.BadParameter(
                "--precision compares with fp32 on images, which --backbone lacks; give a run"
            )
        model = section(Model, backbone=backbone, weights=weights)
        spec = section(Input, size_px=size_px, resize_px=resize_px)
        describe(export_backbone(backbone, model, spec, out, with_map))
    if run is not None:
        bundle = export_run(
            run, out, overrides, precisions, skip_refused, trunk, with_map, keep_weights
        )
        describe(bundle)


def export_run(
    run: Path,
    out: Path,
    overrides: Sequence[str] | None = None,
    precisions: Sequence["Precision"] = ("fp32",),
    skip_refused: bool = False,
    trunk: bool = False,
    with_map: bool = False,
    keep_weights: bool = False,
) -> "Bundle":
    """The bundle of a run in the new folder `out`. Raises: ExportError, BundleError."""
    require_run(run)
    from kinlens.training.bundles.bundle import export_checkpoint, images_to_embed
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.config.job import parse_job
    from kinlens.training.runner import seen_in

    checkpoint = load_chosen(run)
    job = with_settings(parse_job(checkpoint.job), overrides, ("data.",))
    split = load_images(job, expected=checkpoint.split_sha256)
    with progress_bar() as bar:
        refused = note if skip_refused else None
        task = bar.add_task("check recall", total=images_to_embed(split))
        watch = partial(bar.advance, task)
        return export_checkpoint(
            checkpoint,
            split,
            out,
            watch,
            precisions,
            refused,
            trunk,
            with_map,
            seen_in(run),
            keep_weights,
        )


def precisions_of(given: list[str] | None) -> tuple["Precision", ...]:
    from kinlens.embedder.manifest import OtherPrecision

    unknown = set(given or ()) - set(get_args(OtherPrecision))
    if unknown:
        known = ", ".join(get_args(OtherPrecision))
        raise typer.BadParameter(f"--precision {min(unknown)} is not one of {known}")
    return cast(tuple["Precision", ...], ("fp32", *(given or ())))


def describe(bundle: "Bundle") -> None:
    from kinlens.training.evaluation.retrieval import with_interval

    manifest = bundle.manifest
    typer.echo(
        f"bundle {bundle.bundle_id[:12]} in {bundle.path}: {manifest.dim}-d  "
        f"{_figures(manifest.recall)}"
    )
    if manifest.baseline is not None:
        queries, before = manifest.baseline.queries, manifest.baseline.recall["R@1"]
        typer.echo(
            f"R@1 {with_interval(manifest.recall['R@1'], queries)} on {queries:,} test queries; "
            f"{manifest.baseline.model} {with_interval(before, queries)}"
        )
    if manifest.parity is not None:
        source = "the imported file" if manifest.backbone == "onnx" else "torch"
        typer.echo(f"ONNX and {source} differ by at most {manifest.parity.max_abs_difference:.1e}")
    if manifest.map is not None:
        typer.echo(f"map: sums to the embeddings to {manifest.map.sum_difference:.1e}")
    held_out = manifest.held_out
    if held_out is None:
        typer.echo("no calibration: it was exported without held-out images")
        return
    typer.echo(f"on {held_out.images:,} {held_out.split} images: fp32 {_figures(held_out.recall)}")
    for mode in bundle.modes():
        if (compared := manifest.comparison(mode)) is not None:
            low, high = compared.recall_at_1_interval or (0.0, 0.0)
            typer.echo(
                f"  {mode}: {_figures(compared.recall)}  R@1 lost {compared.recall_at_1_loss:.2f} "
                f"({low:.2f} to {high:.2f})  mean cosine {compared.held_out_cosine:.4f}"
            )
    if manifest.calibration is None:
        typer.echo(f"no calibration: {held_out.no_calibration}")
        return
    known = manifest.calibration
    views = ", ".join(str(one.views) for one in known.curves)
    typer.echo(
        f"probabilities from {known.gallery_images:,} {known.split} images of {known.classes} "
        f"classes, for galleries with {views} images of each product"
    )
    for at in known.thresholds:
        typer.echo(
            f"{at.false_matches:.0%} false matches: of pairs at {at.pair_score:.3f}, of searches "
            f"at {at.search_score:.3f}"
        )


def _figures(recall: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in recall.items())
