"""kinlens-train evaluate."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from embedder.bundle import MANIFEST
from embedder.errors import JobError
from training.commands.jobs import Overrides, load_images, with_settings
from training.config.job import Job, parse_job
from training.console import progress_bar


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a model bundle.")],
    overrides: Overrides = None,
    full: Annotated[
        bool, typer.Option(help="Also NMI, F1 and the structure of the embedding.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Recall@K and MAP@R on the test images of the job that made a run or a bundle.

    Example: kinlens-train evaluate bundles/cars --set data.root=/data/cars196 --full
    """
    from training.distributed import require_alone
    from training.export import embed_with
    from training.inference import figures_of

    require_alone()
    is_bundle = (source / MANIFEST).is_file()
    job, split_sha256, function = _of_bundle(source) if is_bundle else _of_run(source)
    job = with_settings(job, overrides or (), ("data.", "recall_at="))
    split = load_images(job)
    split.require(split_sha256, str(source))
    parts = [split.test] if split.gallery is None else [split.test, split.gallery]
    spec = job.input.preprocessing()
    with progress_bar() as bar:
        task = bar.add_task("embed", total=sum(map(len, parts)))
        vectors = [embed_with(function, p, spec, lambda n: bar.advance(task, n)) for p in parts]
    figures = figures_of(vectors, parts, job, full=full)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name} {value:.2f}" if "@" in name else f"{name} {value:.4g}")


def _of_bundle(source: Path) -> tuple[Job, str, Any]:
    from embedder.bundle import Bundle
    from embedder.session import OnnxEmbedder

    bundle = Bundle.open(source)
    manifest = bundle.manifest
    if not manifest.job or manifest.split_sha256 is None:
        raise JobError(f"The bundle {source} was made without a job; it has no test images.")
    return parse_job(manifest.job), manifest.split_sha256, OnnxEmbedder.open(bundle).embed


def _of_run(source: Path) -> tuple[Job, str, Any]:
    import torch

    from training.network import network_of
    from training.runner import load_chosen

    checkpoint = load_chosen(source)
    job, net = network_of(checkpoint)

    def function(images: Any) -> Any:
        with torch.inference_mode():
            return net(torch.from_numpy(images)).numpy()

    return job, checkpoint.split_sha256, function
