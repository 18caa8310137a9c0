"""Find the images of a data set that are missing or damaged, before a training begins."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from kinlens.embedder.errors import DatasetError, ImageError, TrainingError
from kinlens.embedder.machine import cache_folder
from kinlens.embedder.preprocess import decode
from kinlens.training.data.records import Record
from kinlens.training.folder import replacing

_SMALLEST_PX = 32  # a JPEG is decoded whole, but at a reduced scale
_DIGEST = 16  # bytes
_SHOWN = 5


def without_damaged(
    root: Path, records: Sequence[Record], max_damaged: float
) -> tuple[list[Record], tuple[str, ...]]:
    """The records with a readable image, and a line for each other one, with the reason.

    A readable image is not decoded again until its file changes.

    Raises: DatasetError if more than the share `max_damaged` is missing or damaged.
    """
    readable = _Readable(root)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about harmless oddities of files
        reasons = [*pool.map(lambda record: readable.fault(root / record.path), records)]
    readable.save()
    damaged = tuple(
        f"{record.path}: {reason}"
        for record, reason in zip(records, reasons, strict=True)
        if reason
    )
    if len(damaged) > max_damaged * len(records):
        more = f" {len(damaged) - _SHOWN:,} more" if len(damaged) > _SHOWN else ""
        raise DatasetError(
            f"{len(damaged):,} of the {len(records):,} images in {root} are missing or damaged, "
            f"above the limit data.max_damaged = {max_damaged:g} of them: "
            f"{' '.join(damaged[:_SHOWN])}{more} Restore or remove them, or raise the limit. "
            "`kinlens-train data doctor --all` lists all."
        )
    kept = [record for record, reason in zip(records, reasons, strict=True) if not reason]
    return kept, damaged


class _Readable:
    """The files of a data set that were readable, by path, size and modification time."""

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self.path = cache_folder() / "readable" / name
        self.decoder = version("pillow")
        self.before: set[bytes] = set()
        self.now: set[bytes] = set()
        with suppress(OSError):
            data = self.path.read_bytes()
            self.before = {data[at : at + _DIGEST] for at in range(0, len(data), _DIGEST)}

    def fault(self, path: Path) -> str:
        """Why an image cannot be used; empty if it can."""
        try:
            status = path.stat()
            state = f"{self.decoder} {path!a} {status.st_size} {status.st_mtime_ns}"
            digest = hashlib.sha256(state.encode()).digest()[:_DIGEST]
            if digest not in self.before:
                decode(path.read_bytes(), min_side_px=_SMALLEST_PX)
        except FileNotFoundError:
            return "The file is missing."
        except IsADirectoryError:
            return "The folder has no images."
        except OSError as error:
            return f"The file cannot be read: {error.strerror}."
        except ImageError as error:
            return str(error)
        self.now.add(digest)
        return ""

    def save(self) -> None:
        """Add the readable files; without a cache folder they are decoded each time."""
        if not self.now <= self.before:
            with suppress(TrainingError), replacing(self.path) as file:
                file.write(b"".join(self.before | self.now))
