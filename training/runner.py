"""A complete run: train, choose the model, test it once, write result and report."""

import statistics
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from kinlens.embedder.errors import JobError
from kinlens.training.checkpoint import (
    BEST,
    FILE,
    Checkpoint,
    load_checkpoint,
    load_chosen,
    save_checkpoint,
)
from kinlens.training.config.job import Job
from kinlens.training.data.records import Split
from kinlens.training.device import choose_device, tuned
from kinlens.training.distributed import is_main, wait_for_all
from kinlens.training.evaluation.choice import choose, too_few, write_chosen
from kinlens.training.evaluation.evaluate import evaluate
from kinlens.training.folder import RESULT, UNTRAINED, Result, exclusive, is_begun, replace_json
from kinlens.training.report.notices import SEEN, did_it_help, verdict_of
from kinlens.training.report.page import write_report
from kinlens.training.start import may_have_seen
from kinlens.training.state import OF_TERMS, RESUMABLE, VALIDATION, Row, on_validation, require_same
from kinlens.training.trainer import Listener, fit

_PACKAGES = ("torch", "torchvision", "numpy", "pillow")
_OF_TRAINING = (VALIDATION, *OF_TERMS, "epoch", "loss", "seconds", "images_per_s")


def run_job(job: Job, split: Split, folder: Path, listener: Listener) -> Result:
    """Train or resume `job`, and test its chosen model. Raises: TrainingError, JobError."""
    with exclusive(folder) if is_main() else nullcontext():
        return _run(job, split, folder, listener)


def _run(job: Job, split: Split, folder: Path, listener: Listener) -> Result:
    on_folds = job.protocol.choose_by == "folds"
    why_not = too_few(split) if on_folds else ""
    choice = None

    if (folder / FILE).exists():  # before the folds; `min_steps` may have raised the epochs
        free = RESUMABLE | {"optimizer.epochs"}
        require_same(load_checkpoint(folder), job, split, folder / FILE, free)

    def train(one: Job, part: Split, run_folder: Path, trains: bool = True) -> list[Row]:
        run_folder.mkdir(parents=True, exist_ok=True)
        return fit(one, part, run_folder, listener, (run_folder / FILE).exists(), trains)

    def train_fold(one: Job, part: Split, run_folder: Path) -> None:
        listener.note(f"fold {(one.protocol.fold or 0) + 1} of {one.protocol.folds}")
        train(one, part, run_folder)

    with tuned(choose_device(job.runtime)):
        if why_not:
            listener.note(why_not)
        elif on_folds:
            choice = choose(job, split, folder, train_fold)
            listener.note(f"{choice.sentence()}; now the whole run")
        history = train(job, split, folder, trains=not why_not)
        if is_main() and choice is not None:
            write_chosen(folder, choice)
        elif is_main() and why_not:
            last = load_checkpoint(folder)
            trunk_alone = last.began_with == UNTRAINED
            save_checkpoint(folder / BEST, replace(last, trunk_alone=trunk_alone))
        wait_for_all()
        chosen = load_chosen(folder)
        figures = _test(job, split, chosen, history)
    result = Result(
        job=job.as_dict(),
        figures=figures,
        validation=on_validation((chosen.history or [chosen.start])[-1]),
        best_epoch=chosen.epoch,
        chosen_by=job.protocol.choose_by,
        seconds_per_epoch=statistics.median([row["seconds"] for row in history] or [0.0]),
        split_sha256=split.sha256(),
        trunk=chosen.trunk,
        began_with=chosen.began_with,
        versions={package: version(package) for package in _PACKAGES},
        choice=why_not or ("" if choice is None else choice.sentence()),
    )
    kept = why_not or (choice is not None and choice.alpha is None)
    verdicts = [] if kept else [verdict_of(result)]
    verdicts += [SEEN.format(job.model.weights)] if may_have_seen(job, split) else []
    result = replace(result, verdict=" ".join(verdicts))
    for sentence in did_it_help(split, result):
        listener.note(sentence)
    if is_main():
        replace_json(folder / RESULT, asdict(result))  # a report that fails costs no training
        write_report(folder, job, split, history, result)
    wait_for_all()
    return result


def require_fresh_or_resumable(folder: Path, resume: bool) -> None:
    if is_begun(folder) and not resume:
        raise JobError(
            f"{folder} has a run already. Pass --resume to continue it, or another --out."
        )
    if resume and not is_begun(folder):
        raise JobError(f"{folder} has no checkpoint to resume from. Start without --resume.")


def _test(job: Job, split: Split, chosen: Checkpoint, history: list[Row]) -> Row:
    if job.protocol.evaluate_test == "never":
        return {}
    row = history[-1] if history else {}
    is_last = chosen.epoch == len(history) and job.protocol.choose_by != "folds"
    if is_last and all(f"R@{k}" in row for k in job.recall_at):
        return {name: value for name, value in row.items() if not name.startswith(_OF_TRAINING)}
    _, net = chosen.network()
    net = net.to(choose_device(job.runtime))
    return evaluate(net, split.tested, job, full=True, before=chosen.trunk_ranks.get(""))
