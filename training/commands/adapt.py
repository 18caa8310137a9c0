"""kinlens-train adapt."""

import hashlib
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.training.commands.jobs import (
    TRAIN_IT,
    Data,
    Overrides,
    Verbose,
    input_settings,
    load_images,
    note_untrained,
    shop_job,
    shop_of,
    stoppable,
    summary,
)
from kinlens.training.commands.models import Precisions, WithMap, describe, precisions_of
from kinlens.training.config.layers import names_of
from kinlens.training.report.log import console_listener, note

if TYPE_CHECKING:
    from kinlens.training.config.job import Job
    from kinlens.training.data.records import Split
    from kinlens.training.folder import Result

_STAMP = "adapt.json"


def adapt(
    data: Data,
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    backbone: Annotated[
        str, typer.Option(help="Network, also timm:NAME; its weights do not change.")
    ] = "mobilenet_v2",
    weights: Annotated[
        str, typer.Option(help='"imagenet", the path of a weight file, or of a bundle.')
    ] = "imagenet",
    bundle: Annotated[
        Path | None,
        typer.Option(help="Adapt this bundle, also one of `import`: with its network and sizes."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder with the report; default runs/adapt-NAME-DIGEST."),
    ] = None,
    overrides: Overrides = None,
    precision: Precisions = None,
    with_map: WithMap = False,
    verbose: Verbose = False,
) -> None:
    """Adapt a pretrained network to your images in about a minute, and export the bundle.

    Half of your products are learnt and the others test the result. If what is learnt is not proven
    to help other products, the bundle is the network as it is. Products with one photo are
    omitted. Run the same command again to resume. With --verbose it prints all figures.

    Examples:

    kinlens-train adapt --data /my/shop --out bundles/shop

    kinlens-train adapt --bundle bundles/imported --data /my/shop --out bundles/shop

    \b
    kinlens-train adapt --data /my/shop --out bundles/siglip \\
      --backbone timm:vit_base_patch32_siglip_256.v2_webli \\
      --set input.size_px=256 --set input.resize_px=288 --set input.test_px=256
    """
    precisions = precisions_of(precision)
    settings, options = _start(backbone, weights, bundle)
    root, name, table = shop_of(data)
    # Imported after the folder is found, as torch takes seconds.
    from kinlens.embedder.bundle import MANIFEST, make_room
    from kinlens.training.bundles.bundle import export_checkpoint
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.config.job import expand_path
    from kinlens.training.data.records import content_digest, read_rows
    from kinlens.training.folder import by_name
    from kinlens.training.runner import seen_in
    from kinlens.training.start import continues_model

    make_room(out)
    job = shop_job(data, settings, options, overrides or ())
    note_untrained(job, "adapt", names_of(overrides or ()))
    if continues_model(job) and not job.protocol.trains:
        fact = "is trained already, and adapt does not change it"
        note(f"The model of {job.model.weights} {fact}. {TRAIN_IT}")
    split = load_images(job)
    counts = [len(part) for part in split.parts.values()]
    products = [part.classes for part in split.parts.values()]
    note(
        f"{name}: {sum(counts):,} photos of {sum(products):,} products; {products[0]:,} are "
        "learnt, the others test the result"
    )
    if verbose:
        note(summary(split))
    if copies := sum(part.copies() for part in split.parts.values()):
        note(
            f"{copies} image(s) are copies within their class. They find each other, so the "
            "figures are too high. `kinlens-train data doctor` lists them."
        )
    contents = [part.content_sha256() for part in split.parts.values()]
    contents += [split.joined().content_sha256(), split.learnt_sha256()]
    start = expand_path(job.model.weights, "model.weights")
    start = start / MANIFEST if start.is_dir() else start
    contents += [content_digest(start).hex()] if start.is_file() else []
    digest = hashlib.sha256(repr((by_name(job.as_dict()), contents)).encode()).hexdigest()
    folder = run or Path("runs") / f"adapt-{name}-{digest[:8]}"
    result = _train(job, split, folder, digest, verbose)
    written = export_checkpoint(
        load_chosen(folder),
        split,
        out,
        precisions=precisions,
        on_refusal=note,
        with_map=with_map,
        seen=seen_in(folder),
    )
    if verbose:
        describe(written)
    note(_outcome(result))
    note(f"Report: {folder / 'report.md'}")
    note(f"Bundle {written.bundle_id[:12]}: {out}")
    words = ["kinlens-index", "build", str(data if data.is_dir() else data.parent)]
    # Another list names no items, while a folder names the product of each image.
    if table and {"key", PRODUCT} & next(read_rows(root / table, cure=""))[1].keys():
        words += ["--csv", str(root / table)]
    words += ["--bundle", str(out), "--out", f"galleries/{name}"]
    note(f"Next: {shlex.join(words)}")


def _start(
    backbone: str, weights: str, bundle: Path | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a job from the options, and the options by setting. Raises: BundleError."""
    given = {"model.backbone": f"--backbone {backbone}", "model.weights": f"--weights {weights}"}
    if bundle is None:
        return {"model.backbone": backbone, "model.weights": weights}, given
    if (backbone, weights) != ("mobilenet_v2", "imagenet"):
        raise typer.BadParameter(
            f"--bundle has a network and its weights; omit {' and '.join(given.values())}"
        )
    from kinlens.embedder.bundle import Bundle

    manifest = Bundle.open(bundle).manifest
    settings = {
        "model.backbone": manifest.backbone,
        "model.weights": str(bundle),
        "licence": manifest.licence,
        **input_settings(manifest.preprocessing),
    }
    return settings, dict.fromkeys(settings, f"--bundle {bundle}")


def _train(job: "Job", split: "Split", folder: Path, digest: str, verbose: bool) -> "Result":
    """Run in the run folder of this `digest`, unless it is finished. Raises: KinlensError."""
    from kinlens.embedder.bundle import SEEN
    from kinlens.training.folder import LOCK, finished_result, stamp
    from kinlens.training.runner import run_job

    early = (_STAMP, SEEN, LOCK)  # what a run writes before it trains
    is_new = not folder.exists()
    files = [path for path in (folder / name for name in early) if not path.exists()]
    try:
        stamp(folder, _STAMP, {"digest": digest})
    except (JobError, CheckpointError) as error:
        raise JobError(
            f"{folder} belongs to other images or settings. Give another --run, or "
            "delete that folder."
        ) from error
    if (result := finished_result(job, folder)) is not None:
        return result
    resume_it = "Run the same command again to resume."
    try:
        with stoppable(resume_it), console_listener(verbose, brief=not verbose) as listener:
            return run_job(job, split, folder, listener)
    except BaseException:
        if not any(folder.rglob("*.pt")):  # computed features are in the cache
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            elif folder / _STAMP in files:  # a folder of the user keeps its other files
                for path in files:
                    with suppress(OSError):
                        path.unlink()
        raise


def _outcome(result: "Result") -> str:
    """How often the right product is found first, in the words of a shop."""
    if "R@1" not in result.figures:
        return "The result was not tested, as protocol.evaluate_test is never"
    after, before = result.figures["R@1"], result.trunk["R@1"]
    changed = f"({before:.0f} before)"
    if result.choice:  # why the trunk is left alone
        changed = "with the network as it is: what was learnt is not proven to help other products"
    return (
        f"For {after:.0f} of 100 photos of products that were not learnt, the first answer is "
        f"right {changed}"
    )
