"""Names of files: one name in all Unicode forms, names that are not UTF-8, and a named image."""

import os
import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from kinlens.embedder.errors import ImageTooManyBytesError, SourceError

T = TypeVar("T")

NOT_UTF8 = (
    "The name is not UTF-8, as from an old archive or disk. Rename it, or convert all names of the "
    "folder, for example: convmv -r -f latin1 -t utf8 --notest FOLDER"
)


def composed(text: str) -> str:
    """`text` in the composed Unicode form (NFC), in which one name has one spelling."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def spellings(text: str) -> tuple[str, ...]:
    """`text` in its composed and decomposed Unicode form, and as it is; one if they are equal."""
    if text.isascii():
        return (text,)
    forms = composed(text), text, unicodedata.normalize("NFD", text)
    return tuple(dict.fromkeys(forms))


def by_key(keys: Iterable[str], stored: Mapping[str, T]) -> dict[str, T]:
    """The values of the `keys` that are `stored` in the same or another spelling."""
    found = {}
    for key in keys:
        for spelling in (key, *spellings(key)):
            if spelling in stored:
                found[key] = stored[spelling]
                break
    return found


def printable(path: str) -> str:
    """`path` with bytes that are not UTF-8 replaced by escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def existing(root: Path, path: str) -> str:
    """`path`, spelled as the file below `root` is; `path` itself if there is no such file.

    A name that was typed is composed, and the same name from a Mac is often decomposed.
    """
    for spelling in (path, *spellings(path)):
        if path.isascii() or os.path.lexists(root / spelling):
            return spelling
    spelled = ""
    for part in path.split("/"):  # in a mixture of forms
        place = root / spelled
        try:
            same = _spelled(place, place.stat().st_mtime_ns).get(composed(part))
        except OSError:
            return path
        if same is None:
            return path
        spelled = f"{spelled}/{same}" if spelled else same
    return spelled


@lru_cache(64)
def _spelled(folder: Path, _mtime_ns: int) -> dict[str, str]:
    """The names in a folder by their composed form. Kept, since lists name each file of a folder.

    Raises: OSError.
    """
    with os.scandir(folder) as entries:
        return {composed(name): name for name in sorted(entry.name for entry in entries)}


def read_file(path: Path | str, max_bytes: int) -> bytes:
    """The bytes of an image file.

    Raises: SourceError naming a file that does not exist or cannot be read;
        ImageTooManyBytesError.
    """
    file, name = Path(path), printable(str(path))
    try:
        if file.exists() and not file.is_file():
            kind = "folder" if file.is_dir() else "device or pipe"
            raise SourceError(f"{name} is a {kind}. Use an image file.")
        if (size := file.stat().st_size) > max_bytes:
            raise ImageTooManyBytesError(
                f"The image {name} has {size:,} bytes; the limit is {max_bytes:,}. Resize or "
                "compress it."
            )
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"{name} does not exist. Check the name of the image.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or "it has a zero byte"
        raise SourceError(f"{name} cannot be read: {reason}. Check the name and rights.") from error
