"""Labelled images: what every data set loader returns."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.errors import DatasetError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
)


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
        return LabelledImages(
            self.root, tuple(self.paths[i] for i in rows), self.labels[rows], self.class_names
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


def labelled(root: Path, records: Iterable[tuple[str, str]]) -> LabelledImages:
    """From (path relative to root, class name); classes are numbered in sorted order."""
    ordered = sorted(records, key=lambda record: (record[1], record[0]))
    names = sorted({name for _, name in ordered})
    number = {name: index for index, name in enumerate(names)}
    labels = np.array([number[name] for _, name in ordered], dtype=np.int64)
    return LabelledImages(root, tuple(path for path, _ in ordered), labels, tuple(names))
