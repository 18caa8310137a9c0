"""Which images make a batch: at random, m of each class, or the same classes drawn twice.

Every order depends on (seed, epoch) alone. In a run of several processes each of them computes the
same global batch and yields its own contiguous share, so the shares of ranks 0 .. world - 1, put
one after the other, are the batch of a run of one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from embedder.errors import JobError
from training.config.job import Job
from training.data.dataset import Index

Numbers = NDArray[np.int64]


def build_sampler(job: Job, labels: Numbers, rank: int = 0, world: int = 1) -> "BatchSampler":
    """The sampler that `job.sampling` names, over images with these labels (N,).

    Raises: JobError if the settings do not fit each other or the images.
    """
    size, limit, m = job.optimizer.batch_size, job.optimizer.steps_per_epoch, job.sampling.per_class
    if job.sampling.kind == "balanced":
        return BalancedBatches(labels, size, m, job.seed, limit, rank, world)
    if job.sampling.kind == "paired":
        kind = IndependentPairs if job.sampling.pairs == "independent" else PairedBatches
        return kind(labels, size, m, job.seed, limit, rank, world)
    return RandomBatches(len(labels), size, job.seed, limit, rank, world)


class BatchSampler(Sampler[list[Index]], ABC):
    """Lists of (epoch, image, draw): `draw` counts how often the epoch has used that image before.

    Set `epoch` before each pass. Without `limit` an epoch has size // batch_size batches, at least
    one; `limit` ends it early.

    Args:
        size: number of images N.
        batch_size: images in a batch of all processes together.
        seed: of the order.
        limit: most batches in an epoch.
        rank, world: number of this process and of all processes.

    Raises: JobError if the processes cannot share a batch equally.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, limit: int | None, rank: int, world: int
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of 0 .. {world - 1}")
        if batch_size < 1 or batch_size % world:
            raise JobError(
                f"optimizer.batch_size {batch_size} cannot be shared equally by {world} processes. "
                f"Use a multiple of {world}, such as {max(batch_size // world, 1) * world}, or "
                "start another number of processes."
            )
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.limit = limit
        self.rank = rank
        self.world = world
        self.epoch = 0

    def __len__(self) -> int:
        return self._whole if self.limit is None else min(self._whole, self.limit)

    def __iter__(self) -> Iterator[list[Index]]:
        epoch = self.epoch
        images = self._images(np.random.default_rng((self.seed, epoch)))  # (whole, batch_size)
        draws = _earlier(images.ravel()).reshape(images.shape)
        share = images.shape[1] // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        for batch in range(len(self)):
            pairs = zip(images[batch, mine].tolist(), draws[batch, mine].tolist(), strict=True)
            yield [(epoch, image, draw) for image, draw in pairs]

    @property
    def _whole(self) -> int:
        return max(self.size // self.batch_size, 1)

    @abstractmethod
    def _images(self, rng: np.random.Generator) -> Numbers:
        """The images of a whole epoch, whatever `limit` says: (batches, batch_size)."""


class RandomBatches(BatchSampler):
    """Batches of images in a random order, each image once.

    The last, incomplete batch is left out, unless it is the only one.

    Raises: JobError if the processes cannot share a batch equally.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(size, batch_size, seed, limit, rank, world)
        if size < batch_size and size % world:
            raise JobError(
                f"The only batch has all {size} images (optimizer.batch_size is {batch_size}), "
                f"which {world} processes cannot share equally. Set optimizer.batch_size to at "
                f"most {size} and a multiple of {world}, or start another number of processes."
            )

    def _images(self, rng: np.random.Generator) -> Numbers:
        order = rng.permutation(self.size)
        return order[: self._whole * self.batch_size].reshape(self._whole, -1)


class ClassBatches(BatchSampler):
    """Batches of whole classes: `draws` times per_class images of each; see its two kinds."""

    draws: int

    def __init__(
        self,
        labels: Numbers,
        batch_size: int,
        per_class: int,
        seed: int,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(len(labels), batch_size, seed, limit, rank, world)
        self.per_class = per_class
        self.classes_per_batch = _classes_per_batch(labels, batch_size, per_class, self.draws)
        self._labels = _numbered(labels)


class BalancedBatches(ClassBatches):
    """batch_size // per_class different classes with per_class images each, class after class.

    Every class comes once before any comes again, and so do the images of a class. A class with
    fewer than per_class images repeats them within a batch, as evenly as it can. An epoch has as
    many batches as without balance: small classes are seen more often, large ones not in full.

    Args:
        labels: class of each image (N,).
        batch_size: images in a batch of all processes together.
        per_class: m, images of a class in a batch.
        seed, limit, rank, world: see BatchSampler.

    Raises: JobError if the settings do not fit each other or the classes.
    """

    draws = 1

    def _images(self, rng: np.random.Generator) -> Numbers:
        classes = _class_order(self._labels, self.classes_per_batch, self._whole, rng)
        dealt = _deal(self._labels, classes, _earlier(classes), self.per_class, rng)
        return dealt.reshape(self._whole, self.batch_size)


class PairedBatches(ClassBatches):
    """The same classes drawn twice, for graph consistency: a batch is [first draw; second draw].

    Each draw has c = batch_size / (2 per_class) different classes with per_class images each, in
    the same order of classes. The two draws share no image of a class with at least 2 per_class
    images.

    **Reading.** In a smaller class a draw repeats an image only if the class has fewer than
    per_class, and then as evenly as it can; under that condition the two draws share as little as
    possible. The paper draws twice independently: IndependentPairs.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), section 3.3.
        https://ojs.aaai.org/index.php/AAAI/article/view/16182

    Args:
        labels: class of each image (N,).
        batch_size: images in both draws of all processes together, 2 c per_class.
        per_class: n, images of a class in one draw.
        seed, limit, rank, world: see BatchSampler.

    Raises: JobError if the settings do not fit each other or the classes.
    """

    draws = 2

    def _images(self, rng: np.random.Generator) -> Numbers:
        classes = _class_order(self._labels, self.classes_per_batch, self._whole, rng)
        visits = 2 * _earlier(classes)[:, None] + np.arange(2)  # (V, 2)
        dealt = _deal(self._labels, classes.repeat(2), visits.ravel(), self.per_class, rng)
        return self._in_pairs(dealt)

    def _in_pairs(self, images: Numbers) -> Numbers:
        """Two visits to each class, one after the other, to [first draw; second draw]."""
        by_class = images.reshape(self._whole, self.classes_per_batch, 2, self.per_class)
        return by_class.transpose(0, 2, 1, 3).reshape(self._whole, self.batch_size)


class IndependentPairs(PairedBatches):
    """As PairedBatches, but each draw of a class knows nothing of the others, as in the paper.

    A draw has no image twice unless the class has fewer than per_class; the two draws of a batch
    may share some, and an epoch leaves some out. A shared image gives two views.
    """

    def _images(self, rng: np.random.Generator) -> Numbers:
        classes = _class_order(self._labels, self.classes_per_batch, self._whole, rng)
        drawn = _draw(self._labels, classes.repeat(2), self.per_class, rng)
        return self._in_pairs(drawn)


def _classes_per_batch(labels: Numbers, batch_size: int, per_class: int, draws: int) -> int:
    """Raises: JobError if there is no such number, or if there are fewer classes."""
    each, twice = draws * per_class, "" if draws == 1 else "twice "
    if per_class < 1 or batch_size % each:
        fit = max(batch_size // each, 1) * each if per_class > 0 else batch_size
        raise JobError(
            f"optimizer.batch_size {batch_size} is not a multiple of {twice}sampling.per_class "
            f"{per_class}. Use batch sizes such as {fit}, or another per_class of at least 1."
        )
    wanted, present = batch_size // each, len(np.unique(labels))
    if wanted > present:
        raise JobError(
            f"A batch of {batch_size} images with {twice}{per_class} of each class needs {wanted} "
            f"classes; the training images have {present}. Lower optimizer.batch_size to at most "
            f"{present * each} or raise sampling.per_class."
        )
    return wanted


def _numbered(labels: Numbers) -> Numbers:
    """Labels (N,) as numbers from 0 without gaps."""
    numbers: Numbers = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    return numbers


def _earlier(items: Numbers) -> Numbers:
    """How often each item has occurred before: (V,) to (V,)."""
    order = np.argsort(items, kind="stable")
    counts = np.unique(items, return_counts=True)[1]
    ranks = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
    earlier = np.empty(len(items), np.int64)
    earlier[order] = ranks
    return earlier


def _class_order(labels: Numbers, width: int, batches: int, rng: np.random.Generator) -> Numbers:
    """Shuffled rounds through all classes, no class twice in a batch: (batches * width,)."""
    classes = int(labels.max()) + 1
    rounds, length = [rng.permutation(classes)], classes
    while length < batches * width:
        new = rng.permutation(classes)
        filled = length % width  # places of a batch that the last round has filled
        if filled:
            fresh = new[~np.isin(new, rounds[-1][-filled:])][: width - filled]
            new = np.concatenate([fresh, new[~np.isin(new, fresh)]])
        rounds.append(new)
        length += classes
    return np.concatenate(rounds)[: batches * width]


def _deal(
    labels: Numbers, classes: Numbers, visits: Numbers, count: int, rng: np.random.Generator
) -> Numbers:
    """`count` images for each visit to a class: classes (V,), visits (V,) to images (V, count).

    The images of a class are a shuffled deck of s cards dealt round and round: a visit gets the
    whole deck count // s times, and count % s cards that follow those of the visit before.
    """
    shuffled = rng.permutation(len(labels))
    decks = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class after class
    sizes = np.bincount(labels)
    size = sizes[classes][:, None]  # (V, 1)
    whole, rest = count // size * size, count % size
    card = np.arange(count)  # (count,)
    place = np.where(card < whole, card, visits[:, None] * rest + card - whole) % size
    first = (np.cumsum(sizes) - sizes)[classes][:, None]
    return rng.permuted(decks[first + place], axis=1)


def _draw(labels: Numbers, classes: Numbers, count: int, rng: np.random.Generator) -> Numbers:
    """`count` images for each visit to a class, drawn anew: classes (V,) to images (V, count).

    A class of s images gives all of them count // s times, and count % s more without repeats.
    """
    order, sizes = np.argsort(labels, kind="stable"), np.bincount(labels)
    first = np.cumsum(sizes) - sizes
    drawn = np.empty((len(classes), count), np.int64)
    for row, own in zip(drawn, classes, strict=True):
        rest = rng.choice(sizes[own], count % sizes[own], replace=False)
        whole = np.tile(np.arange(sizes[own]), count // sizes[own])
        row[:] = order[first[own] + np.append(whole, rest)]
    return rng.permuted(drawn, axis=1)
