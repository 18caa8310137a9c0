"""Class-disjoint splits: the model is tested on classes that it has never seen."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from embedder.errors import DatasetError
from training.data.records import Split, labelled

FEWEST = 2
"""Classes in each part: in a part of one class every answer is right."""

_WHY = (
    f"Each part needs {FEWEST} or more, since every answer is right where there is one class. Put "
    "the images of each class into a sub-folder of its own, 2 images or more, or do without a "
    "training: kinlens-train export --backbone mobilenet_v2."
)


def split_by_class(
    root: Path, records: Iterable[tuple[str, str]], train_fraction: float, seed: int
) -> Split:
    """Put a random part of the classes into train and the rest into test, at least 2 in each.

    Args:
        root: folder that the paths are relative to.
        records: (path, class name).
        train_fraction: part of the classes for training, between 0 and 1.
        seed: of the choice.

    Raises: DatasetError if there are fewer than 4 classes.
    """
    records = list(records)
    names = sorted({name for _, name in records})
    if len(names) < 2 * FEWEST:
        raise DatasetError(
            f"{root} has {len(names)} class(es) to train and test with; {2 * FEWEST} are needed, "
            f"{FEWEST} to train on and {FEWEST} others to test with. {_WHY}"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    chosen = min(max(round(len(names) * train_fraction), FEWEST), len(names) - FEWEST)
    train_names = {names[index] for index in order[:chosen]}
    return Split(
        train=labelled(root, [record for record in records if record[1] in train_names]),
        test=labelled(root, [record for record in records if record[1] not in train_names]),
    )


def require_classes(split: Split) -> None:
    """Raises: DatasetError if a part of a split that somebody else chose has a single class."""
    for part, images in (("train", split.train), ("test", split.test)):
        if images.classes < FEWEST:
            raise DatasetError(f"{images.root} has {images.classes} {part} class(es). {_WHY}")
