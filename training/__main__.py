"""kinlens-train: fit, evaluate, export, data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from embedder.bundle import MANIFEST, Bundle
from embedder.errors import JobError, KinlensError
from training.config.data import Cars196Data
from training.config.job import Job, load_job, parse_job
from training.config.model import Input, Model
from training.console import ConsoleListener, console, progress_bar
from training.data.records import Split
from training.data.rendered import Catalogue, write_catalogue

app = typer.Typer(
    help="Train an embedding and export it as a model bundle.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Make and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting of the job: table.key=value. Repeatable."),
]


@app.command()
def fit(
    job: Annotated[str, typer.Argument(help="TOML file, or the name of a job in training/jobs.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Train a job; keep checkpoint, log, curves and report in a run folder.

    Example: kinlens-train fit cars196-half-detreg --out runs/cars --set optimizer.epochs=8
    """
    from training.report import write_report
    from training.trainer import fit as run_fit

    settings = load_job(job, overrides or ())
    folder = out or Path("runs") / settings.name
    _prepare(folder, resume)
    split = _load(settings)
    console.print(
        f"{settings.name}: {len(split.train):,} train images of {split.train.classes:,} classes, "
        f"{len(split.test):,} test images of {split.test.classes:,} others"
    )
    try:
        with ConsoleListener() as listener:
            history = run_fit(settings, split, folder, listener, resume)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished epochs are kept; go on with --out {folder} --resume.")
        raise typer.Exit(130) from None
    console.print(f"Report: {write_report(folder, settings, split, history)}")


@app.command()
def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a model bundle.")],
    overrides: Overrides = None,
) -> None:
    """Recall on the test images of the job that made a run or a bundle.

    Example: kinlens-train evaluate bundles/cars --set data.root=/data/cars196
    """
    from training.evaluation import recall_at
    from training.export import embed_with

    if (source / MANIFEST).is_file():
        job, split_sha256, function = _bundle_function(source)
    else:
        job, split_sha256, function = _run_function(source)
    job = _with(job, overrides or (), ("data.", "recall_at="))
    split = _load(job)
    split.require(split_sha256, str(source))
    test = split.test
    with progress_bar() as bar:
        task = bar.add_task("embed", total=len(test))
        vectors = embed_with(
            function, test, job.input.preprocessing(), lambda n: bar.advance(task, n)
        )
    recall = recall_at(vectors, test.labels, job.recall_at)
    for name, value in recall.as_dict().items():
        typer.echo(f"{name} {value:.2f}")
    typer.echo(f"{recall.queries} queries, {recall.without_positive} without a positive left out")


@app.command()
def export(
    run: Annotated[Path | None, typer.Argument(help="Run folder.")] = None,
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")] = Path("bundle"),
    overrides: Overrides = None,
    backbone: Annotated[
        str | None, typer.Option(help="Export this pretrained trunk alone, without a run.")
    ] = None,
    weights: Annotated[str, typer.Option(help="With --backbone: imagenet or a path.")] = "imagenet",
    size_px: Annotated[int, typer.Option(help="With --backbone: side of the input.")] = 224,
    resize_px: Annotated[
        int, typer.Option(help="With --backbone: shorter side before the crop.")
    ] = 256,
) -> None:
    """Write the model bundle of a run; refused unless ONNX and torch agree.

    Example: kinlens-train export runs/cars --out bundles/cars
    """
    from training import export as exporter
    from training.checkpoint import load_checkpoint

    if (run is None) == (backbone is None):
        raise typer.BadParameter("give a run folder or --backbone NAME, one of the two")
    if backbone is not None:
        model = _section(Model, backbone=backbone, weights=weights)
        spec = _section(Input, size_px=size_px, resize_px=resize_px)
        bundle = exporter.export_backbone(backbone, model, spec, out)
    else:
        assert run is not None
        checkpoint = load_checkpoint(run)
        job = _with(parse_job(checkpoint.job), overrides or (), ("data.",))
        split = _load(job)
        with progress_bar() as bar:
            task = bar.add_task("check recall", total=2 * len(split.test))
            bundle = exporter.export_checkpoint(
                checkpoint, split, out, lambda n: bar.advance(task, n)
            )
    _describe(bundle)


@data_app.command()
def render(
    out: Annotated[Path, typer.Argument(help="Folder to fill.")],
    products: Annotated[int, typer.Option(help="Number of products.")] = 90,
    views: Annotated[int, typer.Option(help="Views of each product.")] = 16,
    size_px: Annotated[int, typer.Option(help="Side of an image.")] = 160,
    seed: Annotated[int, typer.Option(help="Another seed gives other products.")] = 0,
) -> None:
    """Draw a catalogue of products: a data set for demos and tests, without a download.

    Example: kinlens-train data render /tmp/shop --products 90
    """
    _render(out, Catalogue(products, views, size_px, seed))
    typer.echo(f"{products * views} images in {out}")


def main() -> None:
    """Run the command line; an error of ours is one clear line and exit code 1."""
    try:
        app()
    except KinlensError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise SystemExit(1) from error


def _prepare(folder: Path, resume: bool) -> None:
    from training.checkpoint import FILE

    if (folder / FILE).exists() and not resume:
        raise JobError(
            f"{folder} holds a run already. Pass --resume to go on with it, or another --out."
        )
    if resume and not (folder / FILE).exists():
        raise JobError(f"{folder} has no checkpoint to resume from. Start without --resume.")
    folder.mkdir(parents=True, exist_ok=True)


def _load(job: Job) -> Split:
    from training.config.data import RenderedData
    from training.data.load import load_split

    if isinstance(job.data, RenderedData):
        with progress_bar() as bar:
            task = bar.add_task("render products", total=job.data.products * job.data.views)
            return load_split(job.data, lambda: bar.advance(task))
    if isinstance(job.data, Cars196Data) and job.data.allow_partial:
        console.print("Cars196: allow_partial is set, the official counts are not asserted")
    return load_split(job.data)


def _render(root: Path, catalogue: Catalogue) -> None:
    with progress_bar() as bar:
        task = bar.add_task("render products", total=catalogue.products * catalogue.views)
        write_catalogue(root, catalogue, lambda: bar.advance(task))


def _with(job: Job, overrides: Sequence[str], allowed: tuple[str, ...]) -> Job:
    from training.config.job import apply_override

    content = job.as_dict()
    for override in overrides:
        if not override.startswith(allowed):
            raise JobError(
                f"--set {override}: a trained model keeps its settings; here only "
                f"{' and '.join(allowed)}... can be changed."
            )
        apply_override(content, override)
    return parse_job(content)


def _section(kind: type[Any], **values: Any) -> Any:
    from pydantic import ValidationError

    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise JobError(f"{first['loc'][0]} = {first['input']!r}: {first['msg']}") from error


def _bundle_function(source: Path) -> tuple[Job, str, Any]:
    from embedder.session import OnnxEmbedder

    bundle = Bundle.open(source)
    manifest = bundle.manifest
    if not manifest.job or manifest.split_sha256 is None:
        raise JobError(f"The bundle {source} was made without a job; it has no test images.")
    return parse_job(manifest.job), manifest.split_sha256, OnnxEmbedder.open(bundle).embed


def _run_function(source: Path) -> tuple[Job, str, Any]:
    import torch

    from training.checkpoint import load_checkpoint
    from training.export import network_of

    checkpoint = load_checkpoint(source)
    job, net = network_of(checkpoint)

    def function(images: Any) -> Any:
        with torch.inference_mode():
            return net(torch.from_numpy(images)).numpy()

    return job, checkpoint.split_sha256, function


def _describe(bundle: Bundle) -> None:
    manifest = bundle.manifest
    recalls = "  ".join(f"{name} {value:.2f}" for name, value in manifest.recall.items())
    typer.echo(f"bundle {bundle.bundle_id[:12]} in {bundle.path}: {manifest.dim}-d  {recalls}")
    if manifest.parity is not None:
        typer.echo(f"ONNX and torch differ by at most {manifest.parity.max_abs_difference:.1e}")


if __name__ == "__main__":
    main()
