"""Torch data sets over labelled images: augmented for training, as served for evaluation."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from embedder.errors import DatasetError, ImageError
from embedder.manifest import Preprocessing
from embedder.preprocess import preprocess, to_chw
from training.config.model import Input
from training.data.augment import random_view
from training.data.records import LabelledImages

Item = tuple[Tensor, Tensor]
Index = tuple[int, int, int]
"""(epoch, image, draw): `draw` is 0 at the first use of an image in an epoch, then 1, 2, ..."""


class TrainingImages(Dataset[Item]):
    """Augmented views. Indexed by (epoch, image, draw): on these and the seed alone a view depends.

    An image that an epoch uses twice gives two views. Gives uint8 (3, S, S) and the label.
    """

    def __init__(self, images: LabelledImages, spec: Input, seed: int) -> None:
        self.images = images
        self.spec = spec
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Index) -> Item:
        epoch, number, draw = index
        repeat = (draw,) if draw else ()
        rng = np.random.default_rng((self.seed, epoch, number, *repeat))
        data = _read(self.images, number)
        try:
            view = random_view(data, self.spec, rng)
        except ImageError as error:
            raise _named(self.images, number, error) from error
        return torch.from_numpy(to_chw(view)), torch.tensor(self.images.labels[number])


class EvaluationImages(Dataset[Item]):
    """Images as the service preprocesses them: uint8 (3, S, S) and the label."""

    def __init__(self, images: LabelledImages, spec: Preprocessing) -> None:
        self.images = images
        self.spec = spec

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Item:
        try:
            view = preprocess(_read(self.images, number), self.spec)
        except ImageError as error:
            raise _named(self.images, number, error) from error
        return torch.from_numpy(view), torch.tensor(self.images.labels[number])


def _read(images: LabelledImages, number: int) -> bytes:
    path = images.root / images.paths[number]
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"The image {path} cannot be read: {error.strerror}.") from error


def _named(images: LabelledImages, number: int, error: ImageError) -> DatasetError:
    return DatasetError(
        f"{images.root / images.paths[number]}: {error} Mend the file and go on with --resume, or "
        "remove it and start a new run."
    )
