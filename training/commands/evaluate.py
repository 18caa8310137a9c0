"""kinlens-train evaluate and report: measure a model, and compare methods over seeds."""

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kinlens.embedder.bundle import MANIFEST
from kinlens.embedder.errors import DatasetError, JobError
from kinlens.embedder.manifest import AskedEngine, AskedPrecision, Preprocessing
from kinlens.training.commands.jobs import Overrides, load_images, with_settings
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Runtime
from kinlens.training.data.records import LabelledImages, labelled
from kinlens.training.folder import replace_json
from kinlens.training.report.log import note, progress_bar


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a model bundle.")],
    overrides: Overrides = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Other images: a folder of class folders, or a CSV (path,class)."),
    ] = None,
    full: Annotated[bool, typer.Option(help="Also NMI, F1 and structure measures.")] = False,
    precision: Annotated[
        AskedPrecision, typer.Option(help="For a bundle: precision of the model.")
    ] = "fp32",
    engine: Annotated[AskedEngine, typer.Option(help="For a bundle: inference engine.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Recall@K and MAP@R of a run or bundle, on the test images of its job or on other images.

    With --data each image is searched for among the other images; a bundle then needs no job.

    Examples: kinlens-train evaluate bundles/cars --set data.root=/data/cars196 --full

    kinlens-train evaluate bundles/trunk --data /my/shop

    kinlens-train evaluate bundles/shop --precision bf16
    """
    from kinlens.training.evaluation.retrieval import queries_in, with_interval

    if (source / MANIFEST).is_file():
        model = _of_bundle(source, precision, engine)
    elif precision != "fp32" or engine != "auto":
        raise JobError(
            f"--precision and --engine need a bundle, and {source} is a run. Export it first: "
            "kinlens-train export."
        )
    else:
        model = _of_run(source)
    if data is None:
        model, parts = _with_test_images(source, model, overrides)
    else:
        if overrides:
            raise JobError("--set changes the job's own images; omit it with --data.")
        parts = [_images(data)]
    queries = queries_in(*parts)
    note(f"{len(parts[0]):,} images of {parts[0].classes:,} classes, {queries:,} queries")
    figures = _figures(model, parts, full)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = with_interval(value, queries) if name.startswith("R@") else f"{value:.4g}"
        typer.echo(f"{name} {shown}")


def report(
    study: Annotated[Path, typer.Argument(help="JSON file of the study; created if missing.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Finished run folders to add, or JSON files of peers."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Method that others are compared with, seed by seed; METHOD=OTHER for a single "
            "method. Repeatable, stored in the study."
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Setting that names the method, e.g. loss.name; default: folder.")
    ] = "",
    page: Annotated[
        Path | None,
        typer.Option(help="Page whose block `<!-- NAME OF THE STUDY -->` gets the table."),
    ] = None,
) -> None:
    """Compare methods over seeds: store the figures of runs, print or write their table.

    Examples:

    kinlens-train report docs/results/cars.json runs/cars/*/seed-* --against recipe

    kinlens-train report docs/results/cars.json --page docs/results.md

    kinlens-train report losses.json runs/losses/runs/*/*/*/seed-* --by loss.name
    """
    from kinlens.training.report import tables

    known = tables.read_study(study)
    pairs = (text.rpartition("=") for text in against or ())
    others = {method: other for method, _, other in pairs}
    if runs or others:
        known = known.merged(tables.records_of(runs or (), by), others)
        replace_json(study, asdict(known))
    if not known.records:
        raise JobError(f"{study} has no runs. Pass finished run folders to add.")
    lines = tables.methods(known)
    if page is None:
        typer.echo("\n".join(lines))
    else:
        tables.replace_block(page, study.stem, lines)


@dataclass(frozen=True)
class _Model:
    """A network as a function of images, and its origin, if known."""

    embed: Any
    spec: Preprocessing
    job: Job | None
    split_sha256: str | None


def _of_bundle(source: Path, precision: AskedPrecision, engine: AskedEngine) -> _Model:
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.engines.models import SessionSettings
    from kinlens.embedder.session import OnnxEmbedder

    bundle = Bundle.open(source)
    manifest = bundle.manifest
    job = parse_job(manifest.job) if manifest.job else None
    opened = OnnxEmbedder.open(bundle, SessionSettings(precision=precision, engine=engine))
    if precision != "fp32" or engine != "auto":
        note(f"in {opened.mode}: {opened.precision_reason}")
    return _Model(opened.embed, manifest.preprocessing, job, manifest.split_sha256)


def _of_run(source: Path) -> _Model:
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.device import choose_device
    from kinlens.training.models.embedding import torch_embed

    checkpoint = load_chosen(source)
    job, net = checkpoint.network()
    embed = partial(torch_embed, net.to(choose_device(Runtime())))
    return _Model(embed, job.input.preprocessing(), job, checkpoint.split_sha256)


def _with_test_images(
    source: Path, model: _Model, overrides: list[str] | None
) -> tuple[_Model, list[LabelledImages]]:
    """The model under the settings of the command, its test images and, perhaps, a gallery."""
    if model.job is None or model.split_sha256 is None:
        raise JobError(
            f"The bundle {source} was made without a job, so it has no test images. Pass some: "
            "--data /my/shop, a folder of class folders."
        )
    job = with_settings(model.job, overrides, ("data.", "recall_at="))
    split = load_images(job)
    split.require(model.split_sha256, str(source))
    return replace(model, job=job), split.tested


def _images(data: Path) -> LabelledImages:
    from kinlens.training.data.load import TABLE, read_folder, read_table

    data = data / TABLE if (data / TABLE).is_file() else data
    if not data.exists():
        raise DatasetError(f"--data {data}: there is no such folder or CSV.")
    root = data if data.is_dir() else data.parent
    given = f"--data {data}"
    records = read_folder(root, given) if data.is_dir() else read_table(root, data.name, given)
    images = labelled(root, records)
    if images.classes < 2:
        raise DatasetError(
            f"{data} has one class, {images.class_names[0]!r}, so every answer would be right. "
            "Give images of 2 classes or more, each in a sub-folder of its own."
        )
    note("If the model was trained on some of these images, the figures are too high.")
    return images


def _figures(model: _Model, parts: list[LabelledImages], full: bool) -> dict[str, float]:
    from kinlens.training.evaluation.evaluate import embed_with, evaluate_embeddings, searched

    runtime = Runtime() if model.job is None else model.job.runtime
    with progress_bar() as bar:
        task = bar.add_task("embed", total=sum(map(len, parts)))
        watch = partial(bar.advance, task)
        vectors = [
            embed_with({"": model.embed}, part, model.spec, runtime, watch)[""] for part in parts
        ]
    job, settings = model.job, dict[str, Any]()
    if job is not None:
        settings = {"ks": job.recall_at, "seed": job.seed}
    return evaluate_embeddings(*searched(vectors, parts), full=full, **settings)
