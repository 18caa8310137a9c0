"""Find the images of a data set that cannot be decoded, before a training begins."""

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from kinlens.embedder.errors import DatasetError, ImageError
from kinlens.embedder.preprocess import decode
from kinlens.training.data.records import Record

_SMALLEST_PX = 32  # a JPEG is decoded whole, but at a reduced scale
_SHOWN = 5


def without_damaged(
    root: Path, records: Sequence[Record], max_damaged: float
) -> tuple[list[Record], tuple[str, ...]]:
    """The records with a readable image, and a line for each other one, with the reason.

    Raises: DatasetError if more than the share `max_damaged` is damaged.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about harmless oddities of files
        reasons = [*pool.map(lambda record: _fault(root / record.path), records)]
    damaged = tuple(
        f"{record.path}: {reason}"
        for record, reason in zip(records, reasons, strict=True)
        if reason
    )
    if len(damaged) > max_damaged * len(records):
        more = f" {len(damaged) - _SHOWN:,} more" if len(damaged) > _SHOWN else ""
        raise DatasetError(
            f"{len(damaged):,} of the {len(records):,} images in {root} cannot be read, above the "
            f"limit data.max_damaged = {max_damaged:g} of them: {' '.join(damaged[:_SHOWN])}{more} "
            "Replace or remove them, or raise the limit. `kinlens-train data doctor --all` lists "
            "all."
        )
    kept = [record for record, reason in zip(records, reasons, strict=True) if not reason]
    return kept, damaged


def _fault(path: Path) -> str:
    """Why an image cannot be used; empty if it can."""
    try:
        found = path.stat()
        return _fault_of(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        return f"it cannot be read: {error.strerror}."


@lru_cache(maxsize=1 << 20)
def _fault_of(path: Path, *_: int) -> str:
    """The fault of a file, found once for each modification time and size."""
    try:
        decode(path.read_bytes(), min_side_px=_SMALLEST_PX)
    except ImageError as error:
        return str(error)
    return ""
