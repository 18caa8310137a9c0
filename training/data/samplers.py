"""Batch composition: random, m images of each class, or the same classes drawn twice.

Every order depends on (seed, epoch) only. In a run of several processes each of them computes the
same global batch and yields its own contiguous share, so the concatenated shares of ranks
0 .. world - 1 are the batch of a run of one process.

N images of C classes, batch size B: c classes, drawn d times with m images each, so B = c d m.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job
from kinlens.training.data.images import Index
from kinlens.training.parts.own import is_own, own_part

Numbers = NDArray[np.int64]


class BatchSampler(Sampler[list[Index]]):
    """Lists of (epoch, image, view): `view` counts how often the epoch has used that image before.

    Set `epoch` before each pass. An epoch has N // B batches, at least one;
    `optimizer.steps_per_epoch` ends it early. The `sampling` of the job is one of

    - "random": each image once; the last, incomplete batch is dropped, unless it is the only one.
    - "balanced": batches of c different classes, m images of each, grouped by class. Every class
      comes once before any class repeats, and so do the images of a class: a batch repeats an image
      only if its class has fewer than m, and then as evenly as possible.
    - "paired": d = 2 such draws after each other, of the same classes in the same order.
    - the import path of a function of labels (N,), B and a generator of NumPy, which returns the
      images of an epoch, (N // B, B).

    **Reading.** The two draws of graph consistency share no image of a class with at least 2 m, and
    as few as possible of a smaller one. With `pairs` = "independent", as in the paper, two draws
    may share images, which then have two views, and an epoch misses some.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), section 3.3.
        https://ojs.aaai.org/index.php/AAAI/article/view/16182

    Args:
        job: with its `sampling`, `seed` and sizes.
        labels: class of each image (N,).
        rank, world: number of this process, and how many processes share each batch.

    Raises: JobError if the settings are inconsistent with each other, the classes or the processes.
    """

    def __init__(self, job: Job, labels: Numbers, rank: int = 0, world: int = 1) -> None:
        self.sampling, self.seed, self.rank, self.world = job.sampling, job.seed, rank, world
        _, self.labels = np.unique(labels, return_inverse=True)  # from 0, without gaps
        self.batches = max(len(labels) // job.optimizer.batch_size, 1)
        self.limit = job.optimizer.steps_per_epoch
        self.epoch = 0
        self.batch_size = job.optimizer.batch_size
        if self.sampling.kind == "random" or is_own(self.sampling.kind):
            if len(labels) < self.batch_size:
                self.batch_size = len(labels) - len(labels) % world
        else:
            self.draws = 2 if self.sampling.kind == "paired" else 1
            self.width = self._classes_per_batch()
        if self.batch_size % world or self.batch_size < world:
            raise JobError(
                f"A batch of {self.batch_size} images cannot be shared equally by {world} "
                "processes. Set optimizer.batch_size to a multiple of their number."
            )

    def _classes_per_batch(self) -> int:
        """c. Raises: JobError if it is not a whole number, or if there are fewer classes."""
        per_class, classes = self.sampling.per_class, int(self.labels.max()) + 1
        each, twice = self.draws * per_class, "" if self.draws == 1 else "twice "
        wanted, rest = divmod(self.batch_size, each)
        if rest:
            raise JobError(
                f"optimizer.batch_size {self.batch_size} is not a multiple of {twice}"
                f"sampling.per_class {per_class}. Use batch sizes such as {max(wanted, 1) * each}."
            )
        if wanted > classes:
            raise JobError(
                f"A batch of {self.batch_size} images with {twice}{per_class} of each class needs "
                f"{wanted} classes; the training images have {classes}. Lower optimizer.batch_size "
                f"to at most {classes * each} or raise sampling.per_class."
            )
        return wanted

    def __len__(self) -> int:
        return self.batches if self.limit is None else min(self.batches, self.limit)

    def __iter__(self) -> Iterator[list[Index]]:
        epoch = self.epoch
        rng = np.random.default_rng((self.seed, epoch))
        if is_own(self.sampling.kind):
            images = self._of_own(rng)
        elif self.sampling.kind == "random":
            images = rng.permutation(len(self.labels))[: self.batches * self.batch_size]
        else:
            images = self._of_classes(rng)
        views = times_before(images)
        shares = (self.batches, self.world, -1)
        images, views = images.reshape(shares)[:, self.rank], views.reshape(shares)[:, self.rank]
        for batch in range(len(self)):
            pairs = zip(images[batch].tolist(), views[batch].tolist(), strict=True)
            yield [(epoch, image, view) for image, view in pairs]

    def _of_own(self, rng: np.random.Generator) -> Numbers:
        """The images of a user's function of labels, batch size and generator: (batches * B,)."""
        made = own_part(self.sampling.kind)(self.labels, self.batch_size, rng)
        images = np.asarray(made, dtype=np.int64)
        wanted = (self.batches, self.batch_size)
        if images.shape != wanted or images.min() < 0 or images.max() >= len(self.labels):
            raise JobError(
                f"{self.sampling.kind} gave an array of shape {images.shape}, from "
                f"{images.min(initial=0)} to {images.max(initial=0)}. It must have the shape "
                f"{wanted}, of numbers from 0 to {len(self.labels) - 1}."
            )
        return images.ravel()

    def _of_classes(self, rng: np.random.Generator) -> Numbers:
        """The images of one draw after the other, grouped by class: (batches * B,)."""
        classes = _class_order(int(self.labels.max()) + 1, self.width, self.batches, rng)
        visits = self.draws * times_before(classes)[:, None] + np.arange(self.draws)
        images = self._visit(classes.repeat(self.draws), visits.ravel(), rng)  # (batches c d, m)
        grouped = images.reshape(self.batches, self.width, self.draws, self.sampling.per_class)
        return grouped.transpose(0, 2, 1, 3).ravel()

    def _visit(self, classes: Numbers, visits: Numbers, rng: np.random.Generator) -> Numbers:
        """m images for each visit to a class: classes (V,) and their visits (V,) to (V, m).

        The s images of a class are a deck of cards, shuffled once per epoch. A visit gets the whole
        deck m // s times, and then the cards that follow those of the previous visit, cyclically.
        If draws are independent, these cards are drawn at random instead.
        """
        independent = self.sampling.kind == "paired" and self.sampling.pairs == "independent"
        shuffled = np.arange(len(self.labels)) if independent else rng.permutation(len(self.labels))
        by_class = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        decks = np.split(by_class, np.cumsum(np.bincount(self.labels))[:-1])
        images = np.empty((len(classes), self.sampling.per_class), np.int64)
        for row, own, visit in zip(images, classes, visits, strict=True):
            deck = decks[own]
            times, rest = divmod(self.sampling.per_class, len(deck))
            if independent:
                cards = rng.choice(len(deck), rest, replace=False)
            else:
                cards = np.arange(visit * rest, (visit + 1) * rest) % len(deck)
            row[:] = np.concatenate([np.tile(deck, times), deck[cards]])
        return rng.permuted(images, axis=1)


def _class_order(classes: int, width: int, batches: int, rng: np.random.Generator) -> Numbers:
    """Shuffled rounds over all classes, without repeats in a batch: (batches * width,)."""
    rounds = [rng.permutation(classes)]
    while len(rounds) * classes < batches * width:
        begun = len(rounds) * classes % width  # filled slots of the last batch
        taken = rounds[-1][classes - begun :]
        new = rng.permutation(classes)
        first = new[~np.isin(new, taken)][: width - begun]  # the rest of that batch
        rounds.append(np.concatenate([first, new[~np.isin(new, first)]]))
    return np.concatenate(rounds)[: batches * width]


def times_before(items: Numbers) -> Numbers:
    """The number of earlier occurrences of each item: (V,) to (V,)."""
    counters: defaultdict[int, Iterator[int]] = defaultdict(count)
    return np.fromiter((next(counters[item]) for item in items.tolist()), np.int64, len(items))
