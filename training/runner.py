"""A complete run: train, choose the model, test it once, write result and report."""

import hashlib
import shutil
import statistics
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from kinlens.embedder.bundle import MANIFEST, SEEN
from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.embedder.seen import Seen
from kinlens.training.checkpoint import FILE, Checkpoint, Epoch, Row, load_chosen, write_chosen
from kinlens.training.config.job import Job, expand_path
from kinlens.training.data.records import Split, content_digest
from kinlens.training.device import choose_device, tuned
from kinlens.training.distributed import is_main, wait_for_all
from kinlens.training.evaluation.evaluate import evaluate
from kinlens.training.folder import (
    LOCK,
    RESULT,
    UNTRAINED,
    Result,
    by_name,
    exclusive,
    finished_result,
    is_begun,
    replace_json,
    replacing,
    stamp,
)
from kinlens.training.report.log import Callback
from kinlens.training.report.notices import MAY_HAVE_SEEN, did_it_help, verdict_of
from kinlens.training.report.page import write_report
from kinlens.training.start import NOT_PROVEN, may_have_seen, seen_before, too_few
from kinlens.training.trainer import fit

_STAMP = "adapt.json"
_PACKAGES = ("torch", "torchvision", "numpy", "pillow")


def run_job(job: Job, split: Split, folder: Path, listener: Callback) -> Result:
    """Train or resume `job`, and test its chosen model. Raises: TrainingError, JobError."""
    with exclusive(folder) if is_main() else nullcontext():
        return _run(job, split, folder, listener)


def run_or_resume(job: Job, split: Split, folder: Path, digest: str, listener: Callback) -> Result:
    """`run_job` in the run folder of this `digest`, unless it is finished. Raises: KinlensError."""
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


def digest_of(job: Job, split: Split) -> str:
    """Of all that the result depends on: settings, lists, images and the weights of the start."""
    contents = [part.content_sha256() for part in split.parts.values()]
    contents += [split.joined().content_sha256(), split.learnt_sha256()]
    start = expand_path(job.model.weights, "model.weights")
    start = start / MANIFEST if start.is_dir() else start
    contents += [content_digest(start).hex()] if start.is_file() else []
    return hashlib.sha256(repr((by_name(job.as_dict()), contents)).encode()).hexdigest()


def _run(job: Job, split: Split, folder: Path, listener: Callback) -> Result:
    on_line = job.protocol.choose_by == "alpha"
    why_not = too_few(split) if on_line else ""
    trains = not why_not and job.protocol.trains
    _record_seen(job, split, folder)
    with tuned(choose_device(job.runtime)):
        history = fit(job, split, folder, listener, (folder / FILE).exists(), trains)
        if is_main() and on_line:
            write_chosen(folder, None if why_not else job.protocol.alpha)
        wait_for_all()
        chosen = load_chosen(folder)
        if chosen.trunk_alone:
            why_not = why_not or NOT_PROVEN
        if why_not:
            listener.note(why_not)
        figures = _test(job, split, chosen, history)
    result = Result(
        job=job.as_dict(),
        figures=figures,
        validation=(chosen.history[-1].figures if chosen.history else chosen.start).validation,
        best_epoch=chosen.epoch,
        chosen_by=job.protocol.choose_by,
        seconds_per_epoch=statistics.median([epoch.seconds for epoch in history] or [0.0]),
        split_sha256=split.sha256(),
        trunk=chosen.trunk.row(),
        began_with=chosen.began_with,
        versions={package: version(package) for package in _PACKAGES},
        choice=why_not,
        model=_model(job, chosen, not trains),
    )
    verdicts = [] if why_not or chosen.trunk_alone else [verdict_of(result, folder)]
    if may_have_seen(job, split):
        verdicts.append(MAY_HAVE_SEEN.format(job.model.weights))
        result = replace(result, model=f"{result.model}, which may have seen test classes")
    result = replace(result, verdict=" ".join(verdicts))
    for sentence in did_it_help(split, result):
        listener.note(sentence)
    if is_main():
        replace_json(folder / RESULT, asdict(result))  # a report that fails costs no training
        write_report(folder, job, split, history, result)
    wait_for_all()
    return result


def _record_seen(job: Job, split: Split, folder: Path) -> None:
    """Write what the model is trained on, unless it continues a bundle that does not say it."""
    path, before = folder / SEEN, seen_before(job)
    is_resumed = path.exists() and (folder / FILE).exists()  # its bundle may have changed since
    if is_resumed or not is_main():
        return
    path.unlink(missing_ok=True)
    if before is not None:
        with replacing(path) as file:
            np.save(file, (split.seen() | before).hashes)


def seen_in(folder: Path) -> Seen | None:
    """What the run in `folder` was trained on; None if it is not recorded. Raises: BundleError."""
    return Seen.load(folder / SEEN) if (folder / SEEN).is_file() else None


def _model(job: Job, chosen: Checkpoint, is_start: bool) -> str:
    if chosen.trunk_alone:
        return "the trunk itself"
    if not is_start:
        return "a trained head" if job.model.frozen_trunk else "a trained network"
    if chosen.began_with != UNTRAINED:
        return chosen.began_with
    if job.start.projection != "random":
        return "a whitened trunk"
    return "the trunk itself" if job.model.dim is None else "the trunk with a random head"


def require_fresh_or_resumable(folder: Path, resume: bool) -> None:
    if is_begun(folder) and not resume:
        raise JobError(
            f"{folder} has a run already. Pass --resume to continue it, or another --out."
        )
    if resume and not is_begun(folder):
        raise JobError(f"{folder} has no checkpoint to resume from. Start without --resume.")


def _test(job: Job, split: Split, chosen: Checkpoint, history: list[Epoch]) -> Row:
    if job.protocol.evaluate_test == "never":
        return {}
    start = chosen.trunk if chosen.trunk_alone else chosen.start
    figures = (history[-1].figures if history else start).test
    on_line = job.protocol.choose_by == "alpha"
    is_last = chosen.epoch == len(history) and not on_line
    if (is_last or not history) and all(f"R@{k}" in figures for k in job.recall_at):
        return figures
    _, net = chosen.network()
    net = net.to(choose_device(job.runtime))
    return evaluate(net, split.tested, job, full=not on_line, before=chosen.trunk_ranks.get("test"))
