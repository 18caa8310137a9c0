"""Labelled images, the result of every data set loader, and the classes held out of a training.

The test classes are unchanged; validation classes are taken from the train classes.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 5 "Our setup": 10-fold cross validation and
    fixed validation with 90/10, 70/30, 80/20 and 95/5 of the classes.
"""

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.seen import Seen
from kinlens.embedder.sources.tables import check_separator, csv_rows
from kinlens.embedder.sources.walk import Omitted
from kinlens.training.config.settings import Protocol

_SHA256 = re.compile("[0-9a-f]{64}")

FEWEST = 2
"""Minimum number of classes in each part: with one class every answer would be right."""


SKIPPED = "skipped.txt"
"""The list of a run's damaged images, in its folder."""


class Record(NamedTuple):
    """An image in a list or folder: its path below the root; `part` may be empty."""

    path: str
    label: str
    part: str = ""


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes; `labels` (N,) index into `class_names`, from 0 without gaps."""

    root: Path
    paths: tuple[str, ...]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def some(self, count: int, seed: int = 0) -> "LabelledImages":
        """A random subset of at most `count` images, in their order; all classes are kept."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).permutation(len(self))[:count])
        return replace(self, paths=tuple(self.paths[i] for i in rows), labels=self.labels[rows])

    def copies(self) -> int:
        """The number of images that are a copy, byte for byte, of another of their class."""
        content = [content_digest(self.root / path) for path in self.paths]
        return len(self) - len(set(zip(content, self.labels.tolist(), strict=True)))

    def of_classes(self, classes: NDArray[np.int64]) -> "LabelledImages":
        """The images of `classes`, (c,) sorted, relabelled 0..c-1."""
        rows = np.flatnonzero(np.isin(self.labels, classes))
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows),
            labels=np.searchsorted(classes, self.labels[rows]).astype(np.int64),
            class_names=tuple(self.class_names[number] for number in classes),
        )

    def content_sha256(self) -> str:
        """Digest of paths, classes and files. Raises: DatasetError if a file cannot be read."""
        digest = hashlib.sha256(self.sha256().encode())
        for path in self.paths:
            digest.update(content_digest(self.root / path))
        return digest.hexdigest()

    def seen_by(self, seen: Seen) -> list[str]:
        """The classes that a model was trained on: on their name, or on one of their images."""
        if not len(seen.hashes):
            return []
        names = [self.class_names[label] for label in self.labels.tolist()]
        return sorted(
            {name for name in self.class_names if seen.has_class(name)}
            | {
                name
                for name, path in zip(names, self.paths, strict=True)
                if seen.has_image(content_digest(self.root / path).hex())
            }
        )

    def sha256(self) -> str:
        """Digest of the list of paths and classes (not of the pixels)."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            digest.update(f"{path}\t{self.class_names[label]}\n".encode())
        return digest.hexdigest()


class QueryImage(NamedTuple):
    """The image of a customer's query: its class, its name and its path."""

    label: str
    name: str
    path: Path


@dataclass(frozen=True)
class Feedback:
    """What customers reported about the images of a data set, see training.data.feedback.

    `unused` counts, by reason, the `rows` that are of no use.
    """

    rows: int
    images: tuple[QueryImage, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)

    def sha256(self) -> str:
        """Digest of all that a run learns from it, independent of its folder."""
        content = [(image.label, image.name) for image in self.images]
        return hashlib.sha256(repr(content).encode()).hexdigest()


@dataclass(frozen=True)
class Split:
    """Train, test and perhaps validation images, with disjoint classes.

    With a `gallery` the test images are queries and are searched for in it. Only `feedback` on
    train classes is used, and a model is tested and exported without it.

    Raises: DatasetError if a class is in two of train, validation and test.
    """

    train: LabelledImages
    test: LabelledImages
    validation: LabelledImages | None = None
    gallery: LabelledImages | None = None
    feedback: Feedback | None = None
    dropped_classes: tuple[str, ...] = ()
    """Names of classes of one image, which were dropped as they have no pair."""
    damaged: tuple[str, ...] = ()
    """The images that are skipped because they cannot be read, each with the reason."""
    omitted: Omitted = field(default_factory=Omitted)
    """What is in the folder and not in the split."""

    def __post_init__(self) -> None:
        names = {part: set(images.class_names) for part, images in self.parts.items()}
        names["test"] |= names.pop("gallery", set())
        for one, other in combinations(names, 2):
            both = names[one] & names[other]
            if both:
                raise DatasetError(
                    f"{len(both)} class(es) are in {one} and in {other}, for example "
                    f"{min(both)!r}. The parts must differ: a model is tested on unseen classes."
                )

    @property
    def parts(self) -> dict[str, LabelledImages]:
        names = ("train", "validation", "test", "gallery")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def tested(self) -> list[LabelledImages]:
        """The test images and, if there is one, the gallery in which they are searched for."""
        return [self.test] if self.gallery is None else [self.test, self.gallery]

    @property
    def without_gallery(self) -> tuple[str, ...]:
        """Classes of queries that the gallery lacks: these queries have no right answer."""
        if self.gallery is None:
            return ()
        return tuple(sorted(set(self.test.class_names) - set(self.gallery.class_names)))

    def joined(self) -> LabelledImages:
        """The query images of the feedback whose class is trained on, labelled as in `train`."""
        number = {name: index for index, name in enumerate(self.train.class_names)}
        images = self.feedback.images if self.feedback else ()
        found = [image for image in images if image.label in number]
        labels = np.array([number[image.label] for image in found], dtype=np.int64)
        paths = tuple(str(image.path) for image in found)
        return replace(self.train, paths=paths, labels=labels)

    def to_learn(self) -> LabelledImages:
        """The train images, then the query images that join them, at absolute paths."""
        joined = self.joined()
        labels = np.concatenate([self.train.labels, joined.labels])
        return replace(self.train, paths=self.train.paths + joined.paths, labels=labels)

    def sha256(self) -> str:
        """Digest of the lists; validation and gallery count if they exist."""
        content = self.train.sha256() + self.test.sha256()
        for part, images in self.parts.items():
            if part in ("validation", "gallery"):
                content += f"{part}{images.sha256()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def seen(self) -> Seen:
        """The record of all that a run learns from. Raises: DatasetError if an image is gone."""
        images = self.to_learn()
        contents = [content_digest(images.root / path).hex() for path in images.paths]
        # The image of a customer's query is named by the sha256 of the original, which was larger.
        stems = (Path(path).stem for path in self.joined().paths)
        return Seen.of(images.class_names, contents + [x for x in stems if _SHA256.fullmatch(x)])

    def learnt_sha256(self) -> str:
        """Digest of all that a run learns from: the lists, and the feedback if there is any."""
        if self.feedback is None:
            return self.sha256()
        return hashlib.sha256(f"{self.sha256()}{self.feedback.sha256()}".encode()).hexdigest()

    def require(self, expected: str, user: str) -> None:
        """Raises: DatasetError if `expected` is not the sha256 of this split."""
        if self.sha256() != expected:
            raise DatasetError(
                f"{user} was trained on another split of the images (sha256 {expected[:12]}, now "
                f"{self.sha256()[:12]}), so its test classes may have been trained on. Restore the "
                "images and the settings of the split, or train again."
            )


def content_digest(path: Path) -> bytes:
    """SHA-256 of the content of an image. Raises: DatasetError if it cannot be read."""
    try:
        found = path.stat()
        return _file_digest(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        raise DatasetError(f"The image {path} cannot be read: {error.strerror}.") from error


@lru_cache(maxsize=1 << 20)
def _file_digest(path: Path, *_: int) -> bytes:
    """Digest of a file's content, computed once for each modification time and size."""
    return hashlib.sha256(path.read_bytes()).digest()


def labels_in(images: LabelledImages, class_names: tuple[str, ...]) -> NDArray[np.int64]:
    """Labels (N,) of `images` in the numbering of `class_names`; new classes follow it."""
    number = {name: index for index, name in enumerate(class_names)}
    table = [number.setdefault(name, len(number)) for name in images.class_names]
    return np.array(table, dtype=np.int64)[images.labels]


def labelled(root: Path, records: Iterable[Record | tuple[str, str]]) -> LabelledImages:
    """Images from pairs (path relative to root, class); classes are numbered in sorted order."""
    ordered = sorted((record[1], record[0]) for record in records)
    names, labels = np.unique([name for name, _ in ordered], return_inverse=True)
    paths = tuple(path for _, path in ordered)
    return LabelledImages(root, paths, labels.astype(np.int64), tuple(names.tolist()))


def read_rows(path: Path, *columns: str, cure: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and row of a CSV; of a column "a|b" one is enough. Raises: DatasetError.

    A type of the indexer, as in `price:number`, is no part of a name.
    """
    try:
        rows = csv_rows(path)
        _, header = next(rows, (0, []))
        check_separator(path, header)
        names = [name.partition(":")[0].strip().lower() for name in header]
        if not all(set(column.split("|")) & set(names) for column in columns):
            raise DatasetError(
                f"The first line of {path} must name the columns "
                f"{', '.join(columns).replace('|', ' or ')}; it names "
                f"{', '.join(names) or 'none'}."
            )
        for line, row in rows:
            if len(row) > len(names):  # else "Mug, blue" and "Mug, red" were one class
                raise DatasetError(
                    f"{path}, line {line}: it has more fields than the first line. "
                    'Put a value with a comma into quotes: "Mug, blue".'
                )
            yield line, dict(zip_longest(names, row, fillvalue=""))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}. {cure}") from error
    except ValueError as error:
        raise DatasetError(str(error)) from error


def write_table(path: Path, images: LabelledImages) -> None:
    """Write a list for the indexer: columns key, path, class; paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("key", "path", "class"))
        for image, label in zip(images.paths, images.labels, strict=True):
            writer.writerow((image, image, images.class_names[label]))


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


def folds(split: Split, count: int, seed: int = 0) -> list[Split]:
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
