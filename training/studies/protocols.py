"""Which classes choose a model, and which test it: fixed validation and cross validation.

The test classes stay as they are; validation classes are taken from the train classes.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 5 "Our setup": 10-fold cross validation and
    fixed validation with 90/10, 70/30, 80/20 and 95/5 of the classes.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.errors import DatasetError
from training.config.job import Job, parse_job
from training.config.protocol import Protocol
from training.data.records import LabelledImages, Split
from training.data.shop import FEWEST
from training.folder import replace_json, replace_text, stamp
from training.report.markdown import table
from training.result import Result, finished_result
from training.runner import run_job
from training.trainer import Listener

Runner = Callable[[Job, Split, Path, Listener], Result]


@dataclass(frozen=True)
class CrossValidation:
    """The results of all folds, in order."""

    folds: tuple[Result, ...]

    def scores(self) -> dict[str, tuple[float, float]]:
        """(mean, sample standard deviation) over the folds of each test figure."""
        found = {}
        for name in self.folds[0].figures:
            values = [fold.figures[name] for fold in self.folds if name in fold.figures]
            if len(values) == len(self.folds):
                found[name] = statistics.fmean(values), statistics.stdev(values)
        return found


def with_protocol(split: Split, protocol: Protocol) -> Split:
    """`split` with the validation classes that the job asks for. Raises: DatasetError."""
    if protocol.folds is not None and protocol.fold is not None:
        return folds(split, protocol.folds, protocol.validation_seed)[protocol.fold]
    if protocol.validation_fraction == 0:
        return split
    return hold_out(split, protocol.validation_fraction, protocol.validation_seed)


def hold_out(split: Split, fraction: float, seed: int = 0) -> Split:
    """Move a random `fraction` of the train classes, at least 2, to validation.

    Train labels are numbered from 0 again, in the old order. **Reading**: fraction * C is rounded
    to the nearest number of classes.

    Args:
        split: without validation classes of its own.
        fraction: between 0 and 1: 0.1 trains on 90 % of the classes.
        seed: of the choice.

    Raises: DatasetError if train or validation would have fewer than 2 classes, if no validation
        class has 2 images, or if there are validation classes already.
    """
    classes = split.train.classes
    count = max(round(classes * fraction), FEWEST)
    if classes - count < FEWEST:
        raise DatasetError(
            f"{split.train.root} has {classes} train classes; holding out {count} of them for "
            f"validation leaves {classes - count} to train on, at least {FEWEST} are needed. Add "
            "classes, hold out fewer, or none: protocol.validation_fraction = 0 with choose_by = "
            '"last".'
        )
    order = np.random.default_rng(seed).permutation(classes)
    return _validating(split, order[:count])


def folds(split: Split, count: int = 10, seed: int = 0) -> list[Split]:
    """Class cross validation: each train class is a validation class in exactly one fold.

    Classes are dealt at random, since neighbours in a list are often alike; the numbers of
    validation classes differ by at most one.

    Raises: DatasetError if there are fewer than 2 classes a fold, or if the validation classes of
        a fold all have a single image.
    """
    classes = split.train.classes
    if classes < FEWEST * count:
        raise DatasetError(
            f"{split.train.root} has {classes} train classes; {count} folds need at least "
            f"{FEWEST * count}, {FEWEST} to validate each. Use at most {classes // FEWEST} "
            "folds."
        )
    order = np.random.default_rng(seed).permutation(classes)
    return [_validating(split, held) for held in np.array_split(order, count)]


def without_test(split: Split) -> Split:
    """`split` without its test images: nothing that is given it can look at them."""
    return replace(split, test=_of_classes(split.test, np.array([], dtype=np.int64)), gallery=None)


def cross_validate(
    job: Job,
    split: Split,
    folder: Path,
    listener: Listener,
    count: int = 10,
    seed: int = 0,
    runner: Runner = run_job,
) -> CrossValidation:
    """Train `job` once a fold; folds that are finished in `folder` are not trained again.

    Every class of `split.train` is a validation class in one fold. A fold keeps the epoch with the
    best R@1 on its validation classes and is tested once, on the test classes.

    Args:
        job: its own `protocol` gives way to this one.
        split: without validation classes.
        folder: gets `fold-00`, ... and the report.
        listener: of the folds and their epochs.
        count: number of folds.
        seed: of the folds.
        runner: trains one run.

    Raises: JobError if the job does not measure R@1; TrainingError; finished folds are kept.
    """
    content = {"job": job.as_dict(), "split_sha256": split.sha256(), "folds": count, "seed": seed}
    protocol = {
        "folds": count,
        "validation_seed": seed,
        "choose_by": "validation",
        "evaluate_test": "end",
    }
    jobs = [parse_job(job.as_dict() | {"protocol": protocol | {"fold": n}}) for n in range(count)]
    parts = [with_protocol(split, one.protocol) for one in jobs]
    stamp(folder, "crossval.json", content)
    results = []
    for number, (one, part) in enumerate(zip(jobs, parts, strict=True)):
        place = folder / f"fold-{number:02d}"
        result = finished_result(one, place)
        state = "trains" if result is None else "finished before"
        listener.said(f"fold {number + 1} of {count}: {state}")
        results.append(result or runner(one, part, place, listener))
    found = CrossValidation(tuple(results))
    _write_report(folder, job, split, found)
    return found


def _write_report(folder: Path, job: Job, split: Split, found: CrossValidation) -> None:
    """Write `report.md` and `report.json`."""
    scores, count = found.scores(), len(found.folds)
    content = {
        "job": job.as_dict(),
        "split_sha256": split.sha256(),
        "folds": [{k: v for k, v in asdict(fold).items() if k != "job"} for fold in found.folds],
        "scores": {name: {"mean": mean, "std": std} for name, (mean, std) in scores.items()},
    }
    replace_json(folder / "report.json", content)
    rows = [
        [
            str(number),
            str(fold.best_epoch),
            f"{fold.validation['R@1']:.2f}",
            *(f"{fold.figures[name]:.2f}" for name in scores),
        ]
        for number, fold in enumerate(found.folds)
    ]
    rows.append(["mean ± std", "", "", *(f"{m:.2f} ± {std:.2f}" for m, std in scores.values())])
    lines = [
        f"# {job.name}: {count}-fold cross validation over classes",
        "",
        f"- train: {len(split.train):,} images of {split.train.classes:,} classes, "
        f"1/{count} of them held out in each fold; every class was held out once",
        f"- test: {len(split.test):,} images of {split.test.classes:,} other classes",
        f"- split sha256: `{split.sha256()[:16]}`",
        "- each fold keeps the epoch with the best R@1 on its validation classes; "
        "no epoch was chosen by test recall",
        f"- ± is the sample standard deviation over the {count} folds",
        "",
        *table(["fold", "best epoch", "validation R@1", *scores], rows),
    ]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")


def _validating(split: Split, held: NDArray[np.int64]) -> Split:
    if split.validation is not None:
        raise DatasetError(
            f"{split.train.root} comes with {split.validation.classes} validation classes. Use "
            "them, with validation_fraction = 0, or mark their images as train."
        )
    sizes = np.bincount(split.train.labels, minlength=split.train.classes)
    if sizes[held].max() < 2:
        raise DatasetError(
            f"None of the {len(held)} validation classes of {split.train.root} has 2 images, so "
            "recall is not defined on them. Hold out more classes, use fewer folds or another seed."
        )
    kept = np.setdiff1d(np.arange(split.train.classes), held)
    train, validation = _of_classes(split.train, kept), _of_classes(split.train, np.sort(held))
    return replace(split, train=train, validation=validation)


def _of_classes(images: LabelledImages, classes: NDArray[np.int64]) -> LabelledImages:
    """The images of `classes`, (c,) sorted, relabelled 0..c-1."""
    rows = np.flatnonzero(np.isin(images.labels, classes))
    return replace(
        images,
        paths=tuple(images.paths[row] for row in rows),
        labels=np.searchsorted(classes, images.labels[rows]).astype(np.int64),
        class_names=tuple(images.class_names[number] for number in classes),
    )
