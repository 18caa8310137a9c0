"""Torch data sets over labelled images: augmented for training, as served for evaluation."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from embedder.errors import DatasetError, ImageError
from embedder.manifest import Preprocessing
from embedder.preprocess import decode, preprocess, to_chw
from training.config.model import Input
from training.data.augment import random_view
from training.data.records import LabelledImages

Item = tuple[Tensor, Tensor]
Index = tuple[int, int]


class TrainingImages(Dataset[Item]):
    """Augmented views. Indexed by (epoch, image), so a view depends on nothing but the seed.

    Gives uint8 (3, S, S) and the label.
    """

    def __init__(self, images: LabelledImages, spec: Input, seed: int) -> None:
        self.images = images
        self.spec = spec
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Index) -> Item:
        epoch, number = index
        rng = np.random.default_rng((self.seed, epoch, number))
        data = _read(self.images, number)
        try:
            image = decode(data, min_side_px=2 * self.spec.size_px)
        except ImageError as error:
            raise _named(self.images, number, error) from error
        view = to_chw(random_view(image, self.spec, rng))
        return torch.from_numpy(view), torch.tensor(self.images.labels[number])


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


class RandomBatches(Sampler[list[Index]]):
    """Batches of (epoch, image) in an order that depends on seed and epoch alone.

    The last, incomplete batch is left out, unless it is the only one; `limit` ends an epoch early.
    """

    def __init__(self, size: int, batch_size: int, seed: int, limit: int | None = None) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.limit = limit
        self.epoch = 0

    def __len__(self) -> int:
        whole = max(self.size // self.batch_size, 1)
        return whole if self.limit is None else min(whole, self.limit)

    def __iter__(self) -> Iterator[list[Index]]:
        order: Sequence[int] = (
            np.random.default_rng((self.seed, self.epoch)).permutation(self.size).tolist()
        )
        for batch in range(len(self)):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(self.epoch, number) for number in chosen]


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
