"""Sources of images: a folder, a CSV file with typed columns, or a split list of a dataset."""

import csv
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from kinlens.embedder.errors import SourceError
from kinlens.embedder.formats import SUFFIXES
from kinlens.embedder.sources.names import composed
from kinlens.embedder.sources.walk import Omitted, fault_lines, read_failed, walk_images
from kinlens.indexer.attributes import Schema, is_printable
from kinlens.indexer.catalog.entries import MAX_KEY, is_key, learn_types
from kinlens.indexer.images import read_image
from kinlens.values import AttributeType, AttributeValue, Scalar, date_text

KINDS: tuple[AttributeType, ...] = get_args(AttributeType)
"""The attribute types, as written after the colon of a typed name."""

DATE = "date"
"""Type name of a date. It is stored as text in a format that sorts by time."""

_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DIGITS = 100  # including leading zeros
BOOLEANS = {"true": True, "false": False}

_NO_KINDS: Schema = {}


def parse_value(text: str, kind: str) -> Scalar:
    """Convert `text` to a value of type `kind`. Raises: ValueError with the expected format."""
    word = text.strip()
    if kind == "text":
        return text
    if kind == DATE:
        try:
            short = len(word) <= len("2026-11-25")
            return date_text((date if short else datetime).fromisoformat(word))
        except ValueError as error:
            raise ValueError("expected a date such as 2026-11-25 or 2026-11-25T10:30Z") from error
    if kind == "boolean":
        if word.lower() not in BOOLEANS:
            raise ValueError("expected true or false")
        return BOOLEANS[word.lower()]
    if _WHOLE.fullmatch(word):
        if len(word) > _DIGITS or not -(2**63) <= int(word) < 2**63:
            raise ValueError("expected a 64-bit integer, or a number with a point such as 1.5e20")
        return int(word)
    if not _DECIMAL.fullmatch(word) or not math.isfinite(float(word)):
        raise ValueError("expected a finite number such as 12 or 12.5, with a decimal point")
    return float(word)


def parse_values(text: str, kind: str) -> AttributeValue:
    """The values in `S|M|L`, or in a JSON list such as ["S", "M"]. Raises: ValueError."""
    if not text.strip():
        return ()
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
            is_text = kind in ("text", DATE)
            if is_text and not all(isinstance(one, str) for one in found):
                raise TypeError
            return tuple(parse_value(one if is_text else json.dumps(one), kind) for one in found)
        except (ValueError, TypeError) as error:
            raise ValueError('expected values such as S|M|L, or ["S", "M", "L"]') from error
    return tuple(parse_value(part.strip(), kind) for part in text.split("|") if part.strip())


class Typed(NamedTuple):
    """The type of a column (None if it is not given), and whether a cell has several values."""

    kind: AttributeType | None
    is_list: bool = False
    is_date: bool = False

    def value_of(self, text: str) -> AttributeValue:
        """The value of a cell. Raises: ValueError."""
        kind = DATE if self.is_date else self.kind or "text"
        return (parse_values if self.is_list else parse_value)(text, kind)


def split_kind(typed: str) -> tuple[str, Typed]:
    """Split `price:number`, or `sizes:text[]` for several values, into the name and the type.

    Raises: ValueError for an unknown type.
    """
    name, colon, kind = (part.strip() for part in typed.rpartition(":"))
    if not colon:
        return typed.strip(), Typed(None)
    for known in KINDS:
        if kind in (known, f"{known}[]"):
            return name, Typed(known, kind != known)
    if kind in (DATE, f"{DATE}[]"):
        return name, Typed("text", kind != DATE, is_date=True)
    raise ValueError(
        f"{typed!r} names the type {kind!r}; the types are {', '.join((*KINDS, DATE))}, each also "
        f"with [] for a list. If the colon is part of the name, write {typed}:text"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file.

    Attributes:
        position: file and line, for messages.
        cells: the text of the required columns.
        attributes: the values of the other columns; None for an empty number or boolean.
    """

    line: int
    position: str
    cells: Mapping[str, str]
    attributes: Mapping[str, AttributeValue | None]


def read_table(file: Path, required: Sequence[str], kinds: Schema) -> Iterator[Row]:
    """The rows below the header of `file`. The columns in `required` are text.

    A column `price:number` has that type, a column `sizes:text[]` several values per cell, such as
    S|M|L. A plain `price` has the type in `kinds`, or is text. The words true and false in an
    untyped column are refused, because a boolean was probably meant.

    Raises: SourceError for a missing file, column or value, or a value of another type.
    """
    rows = read_rows(file)
    columns = _checked_columns(file, next(rows, (0, []))[1], required, kinds)
    for line, row in rows:
        yield _row(file, line, row, columns, required)


def read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the number of its last line. Raises: SourceError."""
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


def _row(
    file: Path,
    line: int,
    row: list[str],
    columns: Mapping[str, Typed],
    required: Sequence[str],
) -> Row:
    position = f"{file}:{line}"
    if len(row) != len(columns):
        raise SourceError(
            f"{position} has {len(row)} values for {len(columns)} columns. Put values that contain "
            "a comma into double quotes."
        )
    texts = dict(zip(columns, row, strict=True))
    cells = {name: texts.pop(name).strip() for name in required}
    values = {name: _value(text, name, columns[name], position) for name, text in texts.items()}
    return Row(line, position, cells, values)


def _value(text: str, name: str, typed: Typed, position: str) -> AttributeValue | None:
    kind = typed.kind
    if (typed.is_list or typed.is_date or kind not in ("text", None)) and not text.strip():
        return None
    if kind is None and text.strip().lower() in BOOLEANS:
        raise SourceError(
            f"{position}: column {name} has {text!r} and no type. Name the column {name}:boolean, "
            f"or {name}:text to keep the word."
        )
    try:
        return typed.value_of(text)
    except ValueError as error:
        raise SourceError(
            f"{position}: column {name} has {text!r}, {error}. Correct the value, clear the cell, "
            f"or name the column {name}:text."
        ) from error


def _checked_columns(
    file: Path, header: Sequence[str], required: Sequence[str], kinds: Schema
) -> dict[str, Typed]:
    """The type of each column by name, in the order of the header."""
    columns = [_column(file, typed, required, kinds) for typed in header]
    names = [name for name, _ in columns]
    missing = [name for name in required if name not in names]
    if missing:
        raise SourceError(
            f"{file} has no column {' and no column '.join(missing)}; its first line has the "
            f"columns {names}. Start the file with a line such as {','.join(required)},colour, "
            "separated by commas."
        )
    if len(set(names)) < len(names) or "" in names:
        raise SourceError(
            f"{file} has columns with the same name or without a name: {names}. Give each column "
            "its own name."
        )
    return dict(columns)


def _column(file: Path, typed: str, required: Sequence[str], kinds: Schema) -> tuple[str, Typed]:
    if typed.strip() in required:
        return typed.strip(), Typed("text")
    try:
        name, found = split_kind(typed)
    except ValueError as error:
        raise SourceError(f"{file}: the column {error}.") from error
    known = kinds.get(name)
    if found.kind and known and found.kind != known:
        raise SourceError(
            f"{file}: the column {typed.strip()} conflicts with the gallery, where {name} has the "
            f"type {known}. Name the column {name}, or give the attribute another name."
        )
    return name, found._replace(kind=found.kind or known)


@dataclass(frozen=True, slots=True)
class Record:
    """One image to index.

    Attributes:
        path: relative to the root of its source, with forward slashes.
        sha256: of its bytes, or "" if unknown. If set, other bytes are refused, and content that
            has a vector is not read.
    """

    key: str
    path: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    sha256: str = ""
    format: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Images to index.

    Attributes:
        root: the absolute folder that paths are relative to.
        records: returns a new iterator over all records; each key occurs once.
        count: number of records.
        names: attributes that the source defines, also for records without a value.
        read: reads the image of a record, of at most `max_bytes`; None to read its file.
        below: the folder, relative to the root, that all paths are in; "" for the root.
        remote: the address of fsspec that paths are relative to, if it is not a folder.
        omitted: the files that are no images of the source, and those that cannot be used.
    """

    root: Path
    records: Callable[[], Iterator[Record]] = field(repr=False)
    count: int
    description: str
    names: frozenset[str] = frozenset()
    read: Callable[[Record, int], bytes] | None = field(default=None, repr=False)
    remote: str = ""
    omitted: Omitted = field(default_factory=Omitted, repr=False)
    below: str = ""

    @property
    def address(self) -> str:
        """The address or folder that paths are relative to."""
        return self.remote or str(self.root)

    def read_image(self, record: Record, max_bytes: int) -> bytes:
        """The image of a record. Raises: SourceError, ImageError, OSError."""
        if self.read is not None:
            return self.read(record, max_bytes)
        return read_image(self.root, record.path, max_bytes)


def folder_source(folder: Path | str, root: Path | str | None = None) -> Source:
    """All images below `folder`. The key is the path relative to `root`, by default the folder.

    Images in a sub-folder of the root get its relative name as attribute `class`. Thumbnails, trash
    and hidden files are omitted, see `walk_images`.

    Raises: SourceError for a folder that is missing, unreadable, without images or outside `root`.
    """
    folder = existing_folder(folder)
    root = folder if root is None else existing_folder(root)
    if not folder.is_relative_to(root):
        raise SourceError(
            f"The folder {folder} is outside {root}, the image root of the gallery. Move or copy "
            "the images below that folder, or build a separate gallery."
        )
    below, omitted = folder_below(root, folder), Omitted()
    count = sum(1 for _ in folder_records(root, below, omitted))
    if not count:
        faults = fault_lines(omitted.faults)
        raise SourceError(
            f"{folder} and its sub-folders have no images that can be used. {' '.join(faults[:3])}"
            if faults
            else f"{folder} and its sub-folders have no images: no name ends with "
            f"{', '.join(SUFFIXES)}. Use another folder, or list the files with --csv."
        )
    return Source(
        root,
        lambda: folder_records(root, below, Omitted()),
        count,
        f"folder {folder}",
        frozenset({"class"}),
        omitted=omitted,
    )


def folder_below(root: Path, folder: Path) -> str:
    """The path of a folder below `root`, "" for the root itself."""
    return "" if folder == root else folder.relative_to(root).as_posix()


def folder_records(root: Path, below: str, omitted: Omitted) -> Iterator[Record]:
    """The records of the images in a folder. Raises: SourceError if it cannot be read."""
    try:
        yield from (folder_record(*image) for image in walk_images(root, omitted, below))
    except OSError as error:
        raise SourceError(read_failed(error)) from error


def check_attributes(source: Source, schema: Schema) -> None:
    """Check, before any work, that all attributes can be stored and match the types in `schema`.

    Raises: InvalidParameterError naming attribute, value and key.
    """
    kinds = dict(schema)
    for record in source.records():
        learn_types(kinds, record.key, record.attributes)


def check_names(record: Record) -> None:
    """Check that key and path of a record can be stored. Raises: SourceError."""
    if not (is_key(record.key) and is_printable(record.path)):
        raise SourceError(
            "The file name cannot be stored: it has control characters or is too long. Rename the "
            "file."
        )


def existing_folder(path: Path | str) -> Path:
    """The absolute path of a folder of images. Raises: SourceError if it is not a folder."""
    path = Path(path)
    if path.is_file():
        raise SourceError(
            f"{path} is a file, not a folder of images. Pass a list with --csv or --split."
        )
    if not path.is_dir():
        raise SourceError(f"There is no folder {path}. Check the name, or create it.")
    return path.resolve()


def folder_record(path: str, name: str = "") -> Record:
    """The record of an image in a folder, whose key is its composed `name`; the attribute `class`
    is its sub-folder.
    """
    key = name or composed(path)
    subfolder = key.rpartition("/")[0]
    return Record(key, path, {"class": subfolder} if subfolder else {})


def csv_source(
    file: Path | str, root: Path | str | None = None, kinds: Schema = _NO_KINDS
) -> Source:
    """The rows of a CSV file with the columns `key` and `path`; other columns are attributes.

    A column `price:number` or `sale:boolean` has that type, a column `sizes:text[]` several values
    per cell, such as S|M|L. Others have the type in `kinds`, or are text. An empty number or
    boolean omits the attribute. Paths are relative to `root`, by default the folder of the file.

    Raises: SourceError for a missing file, column, value or row, a value of another type, a
        repeated key, or a path that leads out of the root.
    """
    file = _regular(file)
    base = existing_folder(file.parent if root is None else root)

    def records() -> Iterator[tuple[int, Record]]:
        for row in read_table(file, ("key", "path"), kinds):
            yield row.line, _csv_record(row, base)

    names = next((row.attributes for row in read_table(file, ("key", "path"), kinds)), ())
    return _listed_source(base, records, file, frozenset(names))


def split_source(file: Path | str, root: Path | str | None = None) -> Source:
    """The lines `relative/path.jpg, class, ...` of a dataset's split file; the key is the path.

    The second field becomes the attribute `class`, further ones `class_2`, `class_3`, ... Paths
    are relative to `root`, by default the folder of the file.

    Raises: the errors of `csv_source`.
    """
    file = _regular(file)
    base = existing_folder(file.parent if root is None else root)

    def records() -> Iterator[tuple[int, Record]]:
        for line, row in read_rows(file):
            yield line, _split_record(row, base, f"{file}:{line}")

    names = frozenset(name for _, record in records() for name in record.attributes)
    return _listed_source(base, records, file, names)


def csv_changes(
    file: Path | str, kinds: Schema = _NO_KINDS
) -> dict[str, Mapping[str, AttributeValue | None]]:
    """Attribute changes by key, from a CSV file with the column `key`; other columns are
    attributes.

    Columns are typed as in `csv_source`. An empty number or boolean removes the attribute.

    Raises: the errors of `csv_source`.
    """
    file = Path(file)
    changes: dict[str, Mapping[str, AttributeValue | None]] = {}
    lines: dict[str, int] = {}
    for row in read_table(file, ("key",), kinds):
        key = row.cells["key"]
        if key in changes:
            raise SourceError(
                f"{file}: the key {key!r} is on line {lines[key]} and on line {row.line}. "
                "Give each item one line."
            )
        changes[key], lines[key] = row.attributes, row.line
    if not changes:
        raise SourceError(f"{file} lists no changes. Add one line per item.")
    return changes


def _csv_record(row: Row, root: Path) -> Record:
    values = {name: value for name, value in row.attributes.items() if value is not None}
    path = _relative(row.cells["path"], root, row.position)
    return Record(_checked_key(row.cells["key"], row.position), path, values)


def _split_record(row: list[str], root: Path, position: str) -> Record:
    path, *labels = (value.strip() for value in row)
    names = ["class", *(f"class_{n}" for n in range(2, len(labels) + 1))]
    relative = _relative(path, root, position)
    return Record(relative, relative, dict(zip(names, labels, strict=False)))


def _checked_key(key: str, position: str) -> str:
    if not is_key(key):
        raise SourceError(
            f"{position}: the key {key!r} is not valid. Use up to {MAX_KEY:,} characters, without "
            "control characters and without '..' as a part."
        )
    return key


def _relative(path: str, root: Path, position: str) -> str:
    if not path or "\0" in path:
        raise SourceError(f"{position}: the path {path!r} is not the name of a file.")
    relative = os.path.relpath(root / path, root)
    if relative == ".." or relative.startswith("../"):
        raise SourceError(
            f"{position}: the path {path!r} leads out of {root}. Keep the images below one folder "
            "and name it as the root."
        )
    return relative


def _regular(file: Path | str) -> Path:
    """Check that `file` can be read twice. Raises: SourceError for a pipe or other special file."""
    file = Path(file)
    if file.exists() and not file.is_file():
        raise SourceError(
            f"{file} is not a regular file, and a list is read more than once. Write it to a file "
            "first."
        )
    return file


def _listed_source(
    root: Path,
    records: Callable[[], Iterator[tuple[int, Record]]],
    file: Path,
    names: frozenset[str],
) -> Source:
    """A source over a list, which is read and checked now and read again while it is indexed."""
    hashes = array("q", (hash(record.key) for _, record in records()))  # 8 bytes per key
    if not hashes:
        raise SourceError(f"{file} lists no images. Add one line per image.")
    different, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    if len(different) < len(hashes):
        _refuse_twice(records(), {*different[counts > 1].tolist()}, file)
    return Source(
        root,
        lambda: (record for _, record in records()),
        len(hashes),
        f"list {file.resolve()}",
        names,
    )


def _refuse_twice(records: Iterator[tuple[int, Record]], hashes: Set[int], file: Path) -> None:
    """Raise SourceError if a key with one of these hashes occurs twice."""
    lines: dict[str, int] = {}
    for line, record in records:
        if hash(record.key) in hashes:
            first = lines.setdefault(record.key, line)
            if first != line:
                raise SourceError(
                    f"{file}: the key {record.key!r} is on line {first} and on line {line}. "
                    "Give each image its own key."
                )
