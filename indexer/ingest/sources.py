"""What to index: a folder of images becomes a sorted list of records, read back file by file."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from embedder.errors import ImageTooManyBytesError, SourceError
from embedder.preprocess import ImageLimits
from embedder.types import AttributeValue
from indexer.catalog.attributes import Schema, is_printable
from indexer.catalog.entries import is_key, learn_kinds

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Names that a folder walk takes for images, in any case; the content decides in the end."""

ANY_SIZE = ImageLimits(max_bytes=2**30, max_megapixels=178.0, max_side_px=2**20)
"""For images that an embedder has accepted already, within whatever limits of its own."""


@dataclass(frozen=True, slots=True)
class Record:
    """One image to index; `path` is relative to the root of its source, with forward slashes."""

    key: str
    path: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Records sorted by key, each key once; all paths start from the absolute folder `root`.

    names: attributes that the source decides on, also where a record has no value for one.
    """

    root: Path
    records: tuple[Record, ...]
    description: str
    names: frozenset[str] = frozenset()


def folder_source(folder: Path | str, root: Path | str | None = None) -> Source:
    """Every image below `folder`; the key is the path relative to `root`, or else to the folder.

    Images in a sub-folder of the root get its relative name as attribute `class`. Hidden files and
    folders are left out, links to folders are not followed.

    Raises: SourceError for a missing folder, one without images, a folder that cannot be read, one
        outside `root`.
    """
    folder = existing_folder(folder)
    root = folder if root is None else existing_folder(root)
    if not folder.is_relative_to(root):
        raise SourceError(
            f"The folder {folder} is outside {root}, the image root of the gallery. Move or copy "
            "the images below that folder, or build a gallery of their own."
        )
    records = [
        _folder_record((folder / path).relative_to(root).as_posix()) for path in _walk(folder)
    ]
    if not records:
        raise SourceError(
            f"{folder} holds no images: looked for names ending in {', '.join(SUFFIXES)} in it and "
            "its sub-folders. Give another folder, or list the files with --csv."
        )
    unique = sorted_unique(enumerate(records, 1), folder)
    return Source(root, unique, f"folder {folder}", frozenset({"class"}))


def check_attributes(source: Source, schema: Schema) -> None:
    """Before any work: all values can be stored, and fit the attributes that a gallery has.

    Raises: InvalidParameterError naming attribute, value and key.
    """
    kinds = dict(schema)
    for record in source.records:
        learn_kinds(kinds, record.key, record.attributes)


def inside(root: Path, path: str) -> Path:
    """The real file behind `path`, links followed.

    Raises: SourceError if it lies outside `root`.
    """
    real = Path(os.path.realpath(root / path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise SourceError(
            f"{path} leads out of {root}. Copy the file into the folder, or give a root that "
            "holds both."
        )
    return real


def read_image(root: Path, path: str, max_bytes: int) -> bytes:
    """The bytes of one image of a source.

    Raises: SourceError if it is missing, not a regular file or outside `root`;
        ImageTooManyBytesError; OSError.
    """
    if not _is_unicode(path):
        raise SourceError("The name of the file is not valid UTF-8. Rename the file.")
    file = inside(root, path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path} below {root} is not a regular file. Put an image there.")
        if status.st_size > max_bytes:
            raise ImageTooManyBytesError(
                f"The image has {status.st_size:,} bytes; the limit is {max_bytes:,}. Resize or "
                "compress it."
            )
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            f"{path} is missing below {root}. Put it back, or leave it out."
        ) from error


def check_names(record: Record) -> None:
    """Raises: SourceError if the key or the path of a record cannot be stored."""
    if not (is_key(record.key) and is_printable(record.path)):
        raise SourceError(
            "Its name cannot be stored: it has control characters or is too long. Rename the file."
        )


def existing_folder(path: Path | str) -> Path:
    """The absolute path of a folder of images. Raises: SourceError if it is none."""
    path = Path(path)
    if path.is_file():
        raise SourceError(
            f"{path} is a file, not a folder of images. Give a list with --csv or --split."
        )
    if not path.is_dir():
        raise SourceError(f"There is no folder {path}. Check the name, or create it.")
    return path.resolve()


def sorted_unique(records: Iterable[tuple[int, Record]], place: Path) -> tuple[Record, ...]:
    """Records with their line numbers, sorted by key. Raises: SourceError for a key twice."""
    lines: dict[str, int] = {}
    unique = []
    for line, record in records:
        first = lines.setdefault(record.key, line)
        if first != line:
            raise SourceError(
                f"{place}: the key {record.key!r} is on line {first} and on line {line}. "
                "Give each image its own key."
            )
        unique.append(record)
    return tuple(sorted(unique, key=lambda record: record.key))


def _walk(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root, onerror=_refuse_unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise SourceError(
        f"The folder {error.filename} cannot be read: {error.strerror}. Allow this user to "
        "read it, or list the files to index with --csv."
    ) from error


def _folder_record(path: str) -> Record:
    key = _printable(path)
    subfolder = key.rpartition("/")[0]
    return Record(key, path, {"class": subfolder} if subfolder else {})


def _is_unicode(text: str) -> bool:
    return _printable(text) == text


def _printable(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")
