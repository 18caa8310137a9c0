"""What a model was trained on, as hashes, so that two models can be judged on what neither knows.

A hash has 64 bits: 8 MB for 100,000 classes with 900,000 images. Names and images cannot be read
back from it, but whoever guesses a name can check it.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import BundleCorruptError


@dataclass(frozen=True, slots=True)
class Seen:
    """Classes and images that a model, or one that it continued, was trained on.

    `hashes` (N,) are sorted, without duplicates.
    """

    hashes: NDArray[np.uint64]

    @classmethod
    def of(cls, classes: Iterable[str] = (), images: Iterable[str] = ()) -> "Seen":
        """The record of these class names and of images with these sha256 (hex)."""
        found = {*map(_of_class, classes), *map(_of_image, images)}
        return cls(np.array(sorted(found), np.uint64))

    @classmethod
    def load(cls, path: Path) -> "Seen":
        """Raises: OSError; BundleCorruptError if the file is damaged."""
        try:
            return cls(np.load(path, allow_pickle=False).astype(np.uint64, casting="safe"))
        except (ValueError, TypeError, EOFError) as error:
            raise BundleCorruptError(f"{path} is damaged. Restore it from a copy.") from error

    def __or__(self, other: "Seen") -> "Seen":
        return Seen(np.union1d(self.hashes, other.hashes))

    def has_class(self, name: str) -> bool:
        return self._has(_of_class(name))

    def has_image(self, sha256: str) -> bool:
        """Whether the model was trained on the image file with this sha256 (hex)."""
        return self._has(_of_image(sha256))

    def _has(self, wanted: int) -> bool:
        place = int(np.searchsorted(self.hashes, np.uint64(wanted)))
        return place < len(self.hashes) and int(self.hashes[place]) == wanted


def _of_class(name: str) -> int:
    text = f"class {unicodedata.normalize('NFC', name)}"  # macOS decomposes names of folders
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8])


def _of_image(sha256: str) -> int:
    return int(sha256[:16], 16)
