"""One image file, looked at: is it there, can it be decoded, what is it?"""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from embedder.errors import (
    EmptyImageError,
    ImageError,
    ImageTooLargeError,
    ImageTooManyBytesError,
    UnsupportedFormatError,
)
from embedder.preprocess import decode, read_header

GREY_MODES = frozenset(("1", "L", "LA", "La", "I;16", "I;16B", "I;16L"))
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a file.

    `fault` is empty for a good image, else one of: missing, unreadable, empty, not-an-image,
    too-large, damaged; `detail` says more. `mode` is Pillow's, sizes are in pixels as stored.
    """

    path: str
    fault: str = ""
    detail: str = ""
    sha256: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0


def look_at(root: Path, path: str, quick: bool) -> Look:
    """Read `root/path`; `quick` looks at the header alone and does not decode."""
    try:
        data = (root / path).read_bytes()
    except FileNotFoundError:
        return Look(path, "missing")
    except OSError as error:
        return Look(path, "unreadable", error.strerror or str(error))
    try:
        header = read_header(data)
        with Image.open(io.BytesIO(data)) as image:
            mode = image.mode
        if not quick:
            decode(data)
    except ImageError as error:
        return Look(path, _fault(error), str(error))
    digest = hashlib.sha256(data).hexdigest()
    return Look(path, "", "", digest, mode, header.width, header.height)


def look_at_all(
    root: Path, paths: Iterable[str], quick: bool, on_image: Callable[[], None]
) -> Iterator[Look]:
    """Look at each file, in order, with a thread for each processor; decoding frees the lock."""
    waiting = list(paths)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of Pillow, on oddities that do not spoil the picture
        for start in range(0, len(waiting), _AT_ONCE):
            batch = waiting[start : start + _AT_ONCE]
            for look in pool.map(lambda path: look_at(root, path, quick), batch):
                on_image()
                yield look


def _fault(error: ImageError) -> str:
    match error:
        case EmptyImageError():
            return "empty"
        case UnsupportedFormatError():
            return "not-an-image"
        case ImageTooLargeError() | ImageTooManyBytesError():
            return "too-large"
    return "damaged"
