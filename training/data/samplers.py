"""Which images make a batch: at random, m of each class, or the same classes drawn twice.

Every order depends on (seed, epoch) alone. In a run of several processes each of them computes the
same global batch and yields its own contiguous share, so the shares of ranks 0 .. world - 1, put
one after the other, are the batch of a run of one process.

N images of C classes, B to a batch: c classes, drawn d times with m images each, so B = c d m.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from embedder.errors import JobError
from training.config.job import Job
from training.data.images import Index

Numbers = NDArray[np.int64]


def build_sampler(job: Job, labels: Numbers, rank: int = 0, world: int = 1) -> "BatchSampler":
    """The sampler that `job.sampling` names, over images with these labels (N,).

    Raises: JobError if the settings do not fit each other or the images.
    """
    sampling, size, limit = job.sampling, job.optimizer.batch_size, job.optimizer.steps_per_epoch
    if sampling.kind == "random":
        return RandomBatches(len(labels), size, job.seed, limit, rank, world)
    draws = 2 if sampling.kind == "paired" else 1
    independent = sampling.pairs == "independent"
    settings = (size, sampling.per_class, job.seed, draws, independent)
    return ClassBatches(labels, *settings, limit, rank, world)


class BatchSampler(Sampler[list[Index]], ABC):
    """Lists of (epoch, image, view): `view` counts how often the epoch has used that image before.

    Set `epoch` before each pass. Without `limit` an epoch has N // B batches, at least one; `limit`
    ends it early.

    Args:
        size: number of images N.
        batch_size: images in a batch of all processes together, B.
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
        self.batches = max(size // batch_size, 1)

    def __len__(self) -> int:
        return self.batches if self.limit is None else min(self.batches, self.limit)

    def __iter__(self) -> Iterator[list[Index]]:
        epoch = self.epoch
        images = self.order(np.random.default_rng((self.seed, epoch)))  # (batches, B)
        views = _times_before(images.ravel()).reshape(images.shape)
        share = images.shape[1] // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        for batch in range(len(self)):
            pairs = zip(images[batch, mine].tolist(), views[batch, mine].tolist(), strict=True)
            yield [(epoch, image, view) for image, view in pairs]

    @abstractmethod
    def order(self, rng: np.random.Generator) -> Numbers:
        """The images of a whole epoch, whatever `limit` says: (batches, B)."""


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

    def order(self, rng: np.random.Generator) -> Numbers:
        """Each image at most once: (batches, B), or (1, N) if B is larger than N."""
        order = rng.permutation(self.size)
        return order[: self.batches * self.batch_size].reshape(self.batches, -1)


class ClassBatches(BatchSampler):
    """Batches of c different classes, drawn once (balanced) or twice (paired), m images a draw.

    A batch is one draw after the other; all have the same classes in the same order, class after
    class. Every class comes once before any comes again, and so do the images of a class: a batch
    repeats an image only if its class has fewer than d m, a draw only if it has fewer than m, and
    then as evenly as it can. An epoch has as many batches as without balance: small classes are
    seen more often, large ones not in full.

    **Reading.** The two draws of graph consistency share no image of a class with at least 2 m, and
    of a smaller one as few as they can. With `independent`, as in the paper, a draw knows nothing
    of the others: it still repeats no image of a class with at least m, but two draws may share
    some, and an epoch leaves some out. A shared image gives two views.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), section 3.3.
        https://ojs.aaai.org/index.php/AAAI/article/view/16182

    Args:
        labels: class of each image (N,).
        batch_size: images in all draws of all processes together, B.
        per_class: m, images of a class in one draw.
        draws: d, 1 or 2.
        seed, limit, rank, world: see BatchSampler.

    Raises: JobError if the settings do not fit each other or the classes.
    """

    def __init__(
        self,
        labels: Numbers,
        batch_size: int,
        per_class: int,
        seed: int,
        draws: int = 1,
        independent: bool = False,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(len(labels), batch_size, seed, limit, rank, world)
        present, self.labels = np.unique(labels, return_inverse=True)  # from 0, without gaps
        self.classes = len(present)
        self.width = _classes_per_batch(self.classes, batch_size, per_class, draws)
        self.per_class = per_class
        self.draws = draws
        self.independent = independent

    def order(self, rng: np.random.Generator) -> Numbers:
        """One draw of a batch after the other, each class after class: (batches, d c m)."""
        classes = _class_order(self.classes, self.width, self.batches, rng)
        visits = self.draws * _times_before(classes)[:, None] + np.arange(self.draws)
        own = classes.repeat(self.draws)
        images = self._images(own, visits.ravel(), rng)  # (batches c d, m)
        grouped = images.reshape(self.batches, self.width, self.draws, self.per_class)
        return grouped.transpose(0, 2, 1, 3).reshape(self.batches, self.batch_size)

    def _images(self, classes: Numbers, visits: Numbers, rng: np.random.Generator) -> Numbers:
        """m images for each visit to a class: classes (V,) and their visits (V,) to (V, m).

        The s images of a class are a deck of cards, shuffled once an epoch. A visit gets the whole
        deck m // s times, and for the rest the cards that follow those of the visit before, round
        and round; or, if draws are independent, cards that are chosen anew.
        """
        shuffled = np.arange(self.size) if self.independent else rng.permutation(self.size)
        by_class = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        decks = np.split(by_class, np.cumsum(np.bincount(self.labels))[:-1])
        images = np.empty((len(classes), self.per_class), np.int64)
        for row, own, visit in zip(images, classes, visits, strict=True):
            deck = decks[own]
            times, rest = divmod(self.per_class, len(deck))
            if self.independent:
                cards = rng.choice(len(deck), rest, replace=False)
            else:
                cards = np.arange(visit * rest, (visit + 1) * rest) % len(deck)
            row[:] = np.concatenate([np.tile(deck, times), deck[cards]])
        return rng.permuted(images, axis=1)


def _classes_per_batch(classes: int, batch_size: int, per_class: int, draws: int) -> int:
    """Raises: JobError if there is no such number, or if there are fewer classes."""
    each, twice = draws * per_class, "" if draws == 1 else "twice "
    if per_class < 1 or batch_size % each:
        fit = max(batch_size // each, 1) * each if per_class > 0 else batch_size
        raise JobError(
            f"optimizer.batch_size {batch_size} is not a multiple of {twice}sampling.per_class "
            f"{per_class}. Use batch sizes such as {fit}, or another per_class of at least 1."
        )
    wanted = batch_size // each
    if wanted > classes:
        raise JobError(
            f"A batch of {batch_size} images with {twice}{per_class} of each class needs {wanted} "
            f"classes; the training images have {classes}. Lower optimizer.batch_size to at most "
            f"{classes * each} or raise sampling.per_class."
        )
    return wanted


def _class_order(classes: int, width: int, batches: int, rng: np.random.Generator) -> Numbers:
    """Shuffled rounds through all classes, no class twice in a batch: (batches * width,)."""
    rounds = [rng.permutation(classes)]
    while len(rounds) * classes < batches * width:
        begun = len(rounds) * classes % width  # places of the last batch that are filled
        taken = rounds[-1][classes - begun :]
        new = rng.permutation(classes)
        first = new[~np.isin(new, taken)][: width - begun]  # the rest of that batch
        rounds.append(np.concatenate([first, new[~np.isin(new, first)]]))
    return np.concatenate(rounds)[: batches * width]


def _times_before(items: Numbers) -> Numbers:
    """How often each item has occurred before: (V,) to (V,)."""
    counters: defaultdict[int, Iterator[int]] = defaultdict(count)
    return np.fromiter((next(counters[item]) for item in items.tolist()), np.int64, len(items))
