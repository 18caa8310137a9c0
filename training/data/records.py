"""Labelled images: what every data set loader returns."""

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedder.errors import DatasetError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
)

FEWEST = 2
"""Classes in each part: in a part of one class every answer is right."""


class Record(NamedTuple):
    """An image as a list or a folder states it: its path below the root; `part` may be empty."""

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
        """Number of classes C."""
        return len(self.class_names)

    def some(self, count: int, seed: int = 0) -> "LabelledImages":
        """At most `count` of them, drawn at random, in their order; all classes are kept."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).permutation(len(self))[:count])
        return replace(self, paths=tuple(self.paths[i] for i in rows), labels=self.labels[rows])

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
        """Digest of paths, classes and the content of every file."""
        digest = hashlib.sha256(self.sha256().encode())
        for path in self.paths:
            digest.update(hashlib.sha256((self.root / path).read_bytes()).digest())
        return digest.hexdigest()

    def sha256(self) -> str:
        """Digest of the list of paths and classes (not of the pixels)."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            digest.update(f"{path}\t{self.class_names[label]}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Split:
    """Train, test and perhaps validation images; no class is in two of them.

    With a `gallery` the test images are queries and are searched for in it; without one each test
    image is searched for among the other test images.

    Raises: DatasetError if a class is in two of train, validation and test.
    """

    train: LabelledImages
    test: LabelledImages
    validation: LabelledImages | None = None
    gallery: LabelledImages | None = None

    def __post_init__(self) -> None:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        names = {part: set(images.class_names) for part, images in parts.items() if images}
        if self.gallery is not None:
            names["test"] |= set(self.gallery.class_names)
        for one, other in combinations(names, 2):
            both = names[one] & names[other]
            if both:
                raise DatasetError(
                    f"{len(both)} class(es) are in {one} and in {other}, for example "
                    f"{min(both)!r}. The classes of the parts must differ: the model is tested on "
                    "unseen classes."
                )

    @property
    def without_gallery(self) -> tuple[str, ...]:
        """Classes of queries that the gallery lacks: these queries have no right answer."""
        if self.gallery is None:
            return ()
        return tuple(sorted(set(self.test.class_names) - set(self.gallery.class_names)))

    def gallery_labels(self) -> NDArray[np.int64]:
        """Labels (G,) of the gallery in the numbering of `test`; other classes come after it.

        Without a gallery: the labels of `test`.
        """
        if self.gallery is None:
            return self.test.labels
        return labels_in(self.gallery, self.test.class_names)

    def sha256(self) -> str:
        """Digest of the lists; validation and gallery count where they exist."""
        content = self.train.sha256() + self.test.sha256()
        for part, images in (("validation", self.validation), ("gallery", self.gallery)):
            if images is not None:
                content += f"{part}{images.sha256()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def require(self, expected: str, user: str) -> None:
        """Raises: DatasetError unless this split is the one whose sha256 is `expected`."""
        if self.sha256() != expected:
            raise DatasetError(
                f"{user} was trained on another split of the images (sha256 {expected[:12]}, now "
                f"{self.sha256()[:12]}), so its test classes may have been trained on. Restore the "
                "images and the settings of the split, or train again."
            )


def labels_in(images: LabelledImages, class_names: tuple[str, ...]) -> NDArray[np.int64]:
    """Labels (N,) of `images` in another numbering of the classes; new classes come after it."""
    number = {name: index for index, name in enumerate(class_names)}
    table = [number.setdefault(name, len(number)) for name in images.class_names]
    return np.array(table, dtype=np.int64)[images.labels]


def labelled(root: Path, records: Iterable[Record | tuple[str, str]]) -> LabelledImages:
    """From (path relative to root, class name); classes are numbered in sorted order."""
    ordered = sorted((record[1], record[0]) for record in records)
    names, labels = np.unique([name for name, _ in ordered], return_inverse=True)
    paths = tuple(path for _, path in ordered)
    return LabelledImages(root, paths, labels.astype(np.int64), tuple(names.tolist()))


def write_table(path: Path, images: LabelledImages) -> None:
    """Write a list that the indexer reads: columns key, path, class; paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("key", "path", "class"))
        for image, label in zip(images.paths, images.labels, strict=True):
            writer.writerow((image, image, images.class_names[label]))
