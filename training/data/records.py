"""Labelled images: what every data set loader returns."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.errors import DatasetError

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"))


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
    """Train and test images; in the class-disjoint protocol no class is in both."""

    train: LabelledImages
    test: LabelledImages

    def sha256(self) -> str:
        """Digest of both lists."""
        return hashlib.sha256((self.train.sha256() + self.test.sha256()).encode()).hexdigest()

    def require(self, expected: str, user: str) -> None:
        """Raises: DatasetError unless this split is the one whose sha256 is `expected`."""
        if self.sha256() != expected:
            raise DatasetError(
                f"{user} was trained on another split of the images (sha256 {expected[:12]}, now "
                f"{self.sha256()[:12]}), so its test classes may have been trained on. Restore the "
                "images and the settings of the split, or train again."
            )


def labelled(root: Path, records: Iterable[tuple[str, str]]) -> LabelledImages:
    """From (path relative to root, class name); classes are numbered in sorted order."""
    ordered = sorted(records, key=lambda record: (record[1], record[0]))
    names = sorted({name for _, name in ordered})
    number = {name: index for index, name in enumerate(names)}
    labels = np.array([number[name] for _, name in ordered], dtype=np.int64)
    return LabelledImages(root, tuple(path for path, _ in ordered), labels, tuple(names))


def without_small_classes(
    root: Path, records: Iterable[tuple[str, str]], policy: str
) -> list[tuple[str, str]]:
    """Apply `small_classes`: a class with one image has no positive pair.

    Raises: DatasetError under "refuse" if there is such a class, or if nothing is left.
    """
    records = list(records)
    counts = Counter(name for _, name in records)
    small = sorted(name for name, count in counts.items() if count < 2)
    if small and policy == "refuse":
        shown = ", ".join(repr(name) for name in small[:5]) + (", ..." if len(small) > 5 else "")
        raise DatasetError(
            f"{len(small)} of the {len(counts)} classes in {root} have only one image ({shown}); "
            "a class needs at least 2 to have a pair. Add images, remove these classes, or set "
            'data.small_classes = "drop".'
        )
    kept = [record for record in records if counts[record[1]] >= 2]
    if len({name for _, name in kept}) < 2:
        raise DatasetError(
            f"{root} has fewer than 2 classes with at least 2 images. Put the images of each class "
            "into a sub-folder of its own."
        )
    return kept
