"""Class-wise validation: a fixed part of the train classes, or cross validation.

The test classes are unchanged; validation classes are taken from the train classes.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 5 "Our setup": 10-fold cross validation and
    fixed validation with 90/10, 70/30, 80/20 and 95/5 of the classes.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import DatasetError
from kinlens.training.config.settings import Protocol
from kinlens.training.data.records import FEWEST, Split


def with_protocol(split: Split, protocol: Protocol) -> Split:
    """`split` with the validation classes of the job. Raises: DatasetError."""
    if protocol.folds is not None and protocol.fold is not None:
        return folds(split, protocol.folds, protocol.validation_seed)[protocol.fold]
    if protocol.validation_fraction == 0:
        return split
    return hold_out(split, protocol.validation_fraction, protocol.validation_seed)


def hold_out(split: Split, fraction: float, seed: int = 0) -> Split:
    """Move a random `fraction` of the train classes, rounded but at least 2, to validation.

    Raises: DatasetError if fewer than 2 would be left to train on.
    """
    classes = split.train.classes
    count = max(round(classes * fraction), FEWEST)
    if classes - count < FEWEST:
        raise DatasetError(
            f"{split.train.root} has {classes} train classes; holding out {count} leaves "
            f"{classes - count} to train on, at least {FEWEST} are needed. Add classes, or hold "
            'out none: protocol.validation_fraction = 0 with choose_by = "last".'
        )
    order = np.random.default_rng(seed).permutation(classes)
    return _validating(split, order[:count])


def folds(split: Split, count: int = 10, seed: int = 0) -> list[Split]:
    """Cross validation: each train class validates in one fold, at random. Raises: DatasetError."""
    classes = split.train.classes
    if classes < FEWEST * count:
        raise DatasetError(
            f"{split.train.root} has {classes} train classes; {count} folds need at least "
            f"{FEWEST * count}, {FEWEST} to validate each. Use at most {classes // FEWEST} folds."
        )
    order = np.random.default_rng(seed).permutation(classes)
    return [_validating(split, held_out) for held_out in np.array_split(order, count)]


def without_test(split: Split) -> Split:
    """`split` without its test images, so that nothing downstream can use them."""
    return replace(split, test=split.test.of_classes(np.array([], dtype=np.int64)), gallery=None)


def _validating(split: Split, held_out: NDArray[np.int64]) -> Split:
    sizes = np.bincount(split.train.labels, minlength=split.train.classes)
    if sizes[held_out].max() < 2:
        raise DatasetError(
            f"None of the {len(held_out)} validation classes of {split.train.root} has 2 images: "
            "recall is not defined on them. Hold out more classes, use fewer folds or another seed."
        )
    kept = np.setdiff1d(np.arange(split.train.classes), held_out)
    train, validation = split.train.of_classes(kept), split.train.of_classes(np.sort(held_out))
    return replace(split, train=train, validation=validation)
