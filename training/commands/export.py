"""kinlens-train export."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from kinlens.training.commands.jobs import (
    Overrides,
    load_images,
    require_run,
    section,
    with_settings,
)
from kinlens.training.report.log import note, progress_bar

if TYPE_CHECKING:
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.manifest import Precision

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
) -> None:
    """Write the model bundle of a run; fails unless ONNX and torch agree.

    Example: kinlens-train export runs/cars --out bundles/cars --precision int8
    """
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
        typer.echo(f"ONNX and torch differ by at most {manifest.parity.max_abs_difference:.1e}")
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
