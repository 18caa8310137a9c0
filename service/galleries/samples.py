"""Pictures that the page offers to search with: a folder that the operator chose."""

from dataclasses import dataclass
from pathlib import Path

from embedder.errors import ItemNotFoundError, SourceError

MAX_SAMPLES = 48
_MEDIA_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture; `name` is that of its file, without the suffix."""

    name: str
    path: Path

    @property
    def media_type(self) -> str:
        """By the suffix of the file."""
        return _MEDIA_TYPES[self.path.suffix.lower()]


class Samples:
    """The first `MAX_SAMPLES` pictures of a folder by name; they are asked for by number.

    Raises: SourceError if the folder cannot be read.
    """

    def __init__(self, folder: Path | None) -> None:
        try:
            paths = [] if folder is None else sorted(folder.iterdir())
        except OSError as error:
            raise SourceError(
                f"The folder of samples {folder} cannot be read: {error.strerror}. Name a "
                "folder of pictures with --samples or KINLENS_SAMPLES."
            ) from error
        known = [path for path in paths if path.suffix.lower() in _MEDIA_TYPES and path.is_file()]
        self._samples = [Sample(path.stem, path) for path in known[:MAX_SAMPLES]]

    def all(self) -> list[Sample]:
        """Every sample; empty without a folder."""
        return list(self._samples)

    def get(self, number: int) -> Sample:
        """A sample by its number. Raises: ItemNotFoundError."""
        if not 0 <= number < len(self._samples):
            raise ItemNotFoundError(
                f"There is no sample {number}; there are {len(self._samples)}. GET /samples lists "
                "them."
            )
        return self._samples[number]

    def read(self, number: int) -> bytes:
        """The bytes of a sample. Raises: ItemNotFoundError, also if its file is gone."""
        sample = self.get(number)
        try:
            return sample.path.read_bytes()
        except OSError as error:
            raise ItemNotFoundError(
                f"The file of sample {number} ({sample.name}) cannot be read any more. Restart the "
                "service to look at its folder again."
            ) from error
