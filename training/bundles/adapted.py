"""The run of `adapt`: its folder, its training, and the bundle of its model."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kinlens.embedder.bundle import MANIFEST, SEEN, Bundle
from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.embedder.manifest import OtherPrecision
from kinlens.training.bundles.bundle import export_checkpoint
from kinlens.training.bundles.precisions import OnRefusal
from kinlens.training.checkpoint import load_chosen
from kinlens.training.config.job import Job, expand_path
from kinlens.training.data.records import Split, content_digest
from kinlens.training.folder import LOCK, Result, by_name, finished_result, stamp
from kinlens.training.report.log import Callback
from kinlens.training.runner import run_job, seen_in

_STAMP = "adapt.json"


def digest_of(job: Job, split: Split) -> str:
    """Of all that the result depends on: settings, lists, images and the weights of the start."""
    contents = [part.content_sha256() for part in split.parts.values()]
    contents += [split.joined().content_sha256(), split.learnt_sha256()]
    start = expand_path(job.model.weights, "model.weights")
    start = start / MANIFEST if start.is_dir() else start
    contents += [content_digest(start).hex()] if start.is_file() else []
    return hashlib.sha256(repr((by_name(job.as_dict()), contents)).encode()).hexdigest()


def train(job: Job, split: Split, folder: Path, digest: str, listener: Callback) -> Result:
    """Run in the run folder of this `digest`, unless it is finished. Raises: KinlensError."""
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
    try:
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


def write(
    folder: Path,
    split: Split,
    out: Path,
    precisions: Sequence[OtherPrecision],
    on_refusal: OnRefusal,
    with_map: bool,
) -> Bundle:
    """The bundle of the run in `folder`; a precision that fails its gate is omitted.

    Raises: ExportError, EvaluationError, BundleError.
    """
    return export_checkpoint(
        load_chosen(folder),
        split,
        out,
        precisions=precisions,
        on_refusal=on_refusal,
        with_map=with_map,
        seen=seen_in(folder),
    )
