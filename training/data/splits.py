"""Class-disjoint splits: the model is tested on classes that it has never seen."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from embedder.errors import DatasetError
from training.data.records import Split, labelled


def split_by_class(
    root: Path, records: Iterable[tuple[str, str]], train_fraction: float, seed: int
) -> Split:
    """Put a random part of the classes into train and the rest into test, at least one in each.

    Args:
        root: folder that the paths are relative to.
        records: (path, class name).
        train_fraction: part of the classes for training, between 0 and 1.
        seed: of the choice.

    Raises: DatasetError if there are fewer than 2 classes.
    """
    records = list(records)
    names = sorted({name for _, name in records})
    if len(names) < 2:
        raise DatasetError(
            f"{root} has {len(names)} class(es); a class-disjoint split needs at least 2. "
            "Put the images of each class into a sub-folder of its own."
        )
    order = np.random.default_rng(seed).permutation(len(names))
    chosen = min(max(round(len(names) * train_fraction), 1), len(names) - 1)
    train_names = {names[index] for index in order[:chosen]}
    return Split(
        train=labelled(root, [record for record in records if record[1] in train_names]),
        test=labelled(root, [record for record in records if record[1] not in train_names]),
    )
