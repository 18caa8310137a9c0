"""What to index: a folder, a CSV file or a data set split becomes a sorted list of records."""

import csv
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from embedder.errors import ImageTooManyBytesError, SourceError
from embedder.preprocess import ImageLimits

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Names that a folder walk takes for images, in any case; the content decides in the end."""

ANY_SIZE = ImageLimits(max_bytes=2**30, max_megapixels=178.0, max_side_px=2**20)
"""For images that an embedder has accepted already, within whatever limits of its own."""

_COLUMNS = ("key", "path")


@dataclass(frozen=True, slots=True)
class Record:
    """One image to index; `path` is relative to the root of its source, with forward slashes."""

    key: str
    path: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Records sorted by key, each key once; all paths start from the absolute folder `root`."""

    root: Path
    records: tuple[Record, ...]
    description: str


def folder_source(root: Path | str) -> Source:
    """Every image below `root`; the key is the relative path.

    Images in a sub-folder get its relative name as attribute `class`. Hidden files and folders are
    left out, links to folders are not followed.

    Raises: SourceError for a missing folder, one without images, a folder that cannot be read.
    """
    root = _existing_folder(root)
    records = [_folder_record(path) for path in _walk(root)]
    if not records:
        raise SourceError(
            f"{root} holds no images: looked for names ending in {', '.join(SUFFIXES)} in it and "
            "its sub-folders. Give another folder, or list the files with --csv."
        )
    return Source(root, _sorted_unique(enumerate(records, 1), root), f"folder {root}")


def csv_source(file: Path | str, root: Path | str | None = None) -> Source:
    """The rows of a CSV file: columns `key` and `path`, any further column is an attribute.

    Paths start from `root`, or from the folder of the file.

    Raises: SourceError for a missing file, column, value or row, a repeated key, a path that
        leaves the root.
    """
    file = Path(file)
    base = _existing_folder(file.parent if root is None else root)
    rows = _read_rows(file)
    header = _checked_header(rows, file)
    records = [(line, _csv_record(header, row, base, f"{file}:{line}")) for line, row in rows]
    return _listed_source(base, records, file)


def split_source(file: Path | str, root: Path | str | None = None) -> Source:
    """The lines `relative/path.jpg, class, ...` of a data set's list file; the key is the path.

    The second field becomes the attribute `class`, further ones `class_2`, `class_3`, ... Paths
    start from `root`, or from the folder of the file.

    Raises: as `csv_source`.
    """
    file = Path(file)
    base = _existing_folder(file.parent if root is None else root)
    records = [(line, _split_record(row, base, f"{file}:{line}")) for line, row in _read_rows(file)]
    return _listed_source(base, records, file)


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


def _csv_record(header: list[str], row: list[str], root: Path, place: str) -> Record:
    if len(row) != len(header):
        raise SourceError(
            f"{place} has {len(row)} values for {len(header)} columns. Put values that contain a "
            "comma into double quotes."
        )
    values = dict(zip(header, row, strict=True))
    key, path = (values.pop(name).strip() for name in _COLUMNS)
    return Record(_checked_key(key, place), _relative(path, root, place), values)


def _split_record(row: list[str], root: Path, place: str) -> Record:
    path, *labels = (value.strip() for value in row)
    names = ["class", *(f"class_{n}" for n in range(2, len(labels) + 1))]
    relative = _relative(path, root, place)
    return Record(relative, relative, dict(zip(names, labels, strict=False)))


def _checked_key(key: str, place: str) -> str:
    if not key or ".." in key.split("/") or not key.isprintable():
        raise SourceError(
            f"{place}: the key {key!r} cannot be used. Give a name that is not empty, has no "
            "control characters and no '..' as a part."
        )
    return key


def _relative(path: str, root: Path, place: str) -> str:
    if not path or "\0" in path:
        raise SourceError(f"{place}: the path {path!r} is not the name of a file.")
    relative = os.path.relpath(root / path, root)
    if relative == ".." or relative.startswith("../"):
        raise SourceError(
            f"{place}: the path {path!r} leads out of {root}. Keep the images below one folder "
            "and name it as the root."
        )
    return relative


def _read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not empty, each with the number of its last line."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, skipinitialspace=True, strict=True)
            yield from ((reader.line_num, row) for row in reader if row)
    except OSError as error:
        raise SourceError(f"Cannot read the list {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{file} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    except csv.Error as error:
        raise SourceError(f"{file} is not a valid CSV file: {error}. Check its quotes.") from error


def _checked_header(rows: Iterator[tuple[int, list[str]]], file: Path) -> list[str]:
    _, first = next(rows, (0, []))
    header = [name.strip() for name in first]
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise SourceError(
            f"{file} has no column {' and no column '.join(missing)}; its first line names "
            f"{header}. Begin the file with a line such as key,path,colour (commas between)."
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated or "" in header:
        raise SourceError(
            f"{file} names a column twice or not at all: {header}. Give each column its own name."
        )
    return header


def _listed_source(root: Path, records: list[tuple[int, Record]], file: Path) -> Source:
    if not records:
        raise SourceError(f"{file} lists no images. Add one line per image.")
    return Source(root, _sorted_unique(records, file), f"list {file.resolve()}")


def _sorted_unique(records: Iterable[tuple[int, Record]], place: Path) -> tuple[Record, ...]:
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


def _existing_folder(path: Path | str) -> Path:
    path = Path(path)
    if path.is_file():
        raise SourceError(
            f"{path} is a file, not a folder of images. Give a list with --csv or --split."
        )
    if not path.is_dir():
        raise SourceError(f"There is no folder {path}. Check the name, or create it.")
    return path.resolve()


def _is_unicode(text: str) -> bool:
    return _printable(text) == text


def _printable(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")
