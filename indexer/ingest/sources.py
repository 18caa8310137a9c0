"""Sources of images: a folder, an address, a CSV file with typed columns, or a split list."""

import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.errors import SourceError
from kinlens.embedder.sources.names import composed, existing
from kinlens.embedder.sources.tables import PRODUCT, paths_in
from kinlens.embedder.sources.walk import (
    Fault,
    Omitted,
    fault_lines,
    is_omitted,
    read_failed,
    walk_images,
)
from kinlens.indexer.addresses import FileState, ImageAddress, ImageRoot, image_root_of
from kinlens.indexer.entries import MAX_KEY, AttributeTypes, Schema, is_key, is_printable
from kinlens.indexer.images import read_image, state_of
from kinlens.indexer.ingest.tables import Row, read_rows, read_table
from kinlens.indexer.store import VectorStore
from kinlens.values import AttributeValue

NO_KINDS: Schema = {}
LIST = "list"
"""The first word in the description of a source that is a list."""

ReadRows = Callable[[Sequence[str]], Iterator[Row]]
"""Returns the rows of a list, with these columns as cells."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class Record:
    """One image to index.

    Attributes:
        path: relative to the root of its source, with forward slashes.
        sha256: of its bytes, or "" if unknown. If set, other bytes are refused, and content that
            has a vector is not read.
        failure: why the image cannot be used, after it was read; else empty.
    """

    key: str
    path: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    sha256: str = ""
    format: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Images to index.

    Attributes:
        root: the absolute folder, or the address, that paths are relative to.
        records: returns a new iterator over all records; each key occurs once.
        count: number of records.
        names: attributes that the source defines, also for records without a value.
        read: reads the image of a record, of at most `max_bytes`; None to read its file.
        below: the folder, relative to the root, that all paths are in; "" for the root.
        states: what a listing of an address has reported of each image, by path.
        omitted: the files that are no images of the source, and those that cannot be used.
    """

    root: ImageRoot
    records: Callable[[], Iterator[Record]] = field(repr=False)
    count: int
    description: str
    names: frozenset[str] = frozenset()
    read: Callable[[Record, int], bytes] | None = field(default=None, repr=False)
    states: Mapping[str, FileState] = field(default_factory=dict, repr=False)
    omitted: Omitted = field(default_factory=Omitted, repr=False)
    below: str = ""

    def read_image(self, record: Record, max_bytes: int) -> bytes:
        """The image of a record. Raises: SourceError, ImageError, UnreachableError, OSError."""
        if self.read is not None:
            return self.read(record, max_bytes)
        return read_image(self.root, record.path, max_bytes)

    def state(self, record: Record) -> FileState:
        """The state of the file of a record. Raises: SourceError, UnreachableError, OSError."""
        listed = self.states.get(record.path)
        if listed is not None and listed.is_settled:
            return listed
        return state_of(self.root, record.path)


def source_at(place: ImageRoot | str, root: ImageRoot | str | None = None) -> Source:
    """All images of a folder or of an address, see `folder_source` and `address_source`."""
    given, base = image_root_of(place), None if root is None else image_root_of(root)
    if isinstance(given, ImageAddress):
        return address_source(given, base)
    if isinstance(base, ImageAddress):
        raise SourceError(_outside(place, base))
    return folder_source(given, base)


def address_source(address: ImageAddress, root: ImageRoot | None = None) -> Source:
    """All images below an address, in the order of their names, by one listing of it.

    The images stay where they are. The key is the path relative to `root`, by default the address;
    images in a folder below the root get its relative name as attribute `class`.

    Raises: SourceError for an address without images or outside of `root`; UnreachableError.
    """
    base = address if root is None else root
    if not isinstance(base, ImageAddress):
        raise SourceError(_outside(address, base))
    omitted, below = Omitted(), base.below(str(address))
    listed = [*base.images(omitted, below)]
    if not listed:
        faults = " ".join(fault_lines(omitted.faults)[:3])
        hint = faults or f"Image names end with {', '.join(SUFFIXES)}."
        raise SourceError(f"There are no images at {address}. {hint}")
    images = [image for image, _ in listed]
    return Source(
        base,
        lambda: (folder_record(*image) for image in images),
        len(images),
        f"address {address}",
        frozenset({"class"}),
        states={image.path: state for image, state in listed},
        omitted=omitted,
        below=below,
    )


def folder_source(folder: Path | str, root: Path | str | None = None) -> Source:
    """All images below `folder`. The key is the path relative to `root`, by default the folder.

    Images in a sub-folder of the root get its relative name as attribute `class`. Thumbnails, trash
    and hidden files are omitted, see `walk_images`.

    Raises: SourceError for a folder that is missing, unreadable, without images or outside `root`.
    """
    root = existing_folder(folder if root is None else root)
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


def folder_below(root: Path, folder: Path | str) -> str:
    """The path of a folder below `root`, "" for the root itself, as a walk of the root names it.

    Raises: SourceError for a folder that is missing or outside `root`.
    """
    real = existing_folder(folder)
    if not real.is_relative_to(root):
        raise SourceError(
            f"The folder {real} is outside {root}, the image root of the gallery. Move or copy "
            "the images below that folder, set the current folder of the images with "
            "--image-root, or build a separate gallery."
        )
    if real != root and is_omitted(real.relative_to(root).as_posix()):
        place = Path(folder).absolute()  # a link, which the walk follows under its own name
        for parent in place.parents:
            if parent.resolve() == root:
                return place.relative_to(parent).as_posix()
    return "" if real == root else real.relative_to(root).as_posix()


def folder_records(root: Path, below: str, omitted: Omitted) -> Iterator[Record]:
    """The records of the images in a folder. Raises: SourceError if it cannot be read."""
    try:
        yield from (folder_record(*image) for image in walk_images(root, omitted, below))
    except OSError as error:
        raise SourceError(read_failed(error)) from error


def check_attributes(source: Source, store: VectorStore | None = None) -> None:
    """Check, before any work, that all attributes can be stored and match the types in a gallery.

    Raises: InvalidParameterError naming attribute, value and key.
    """
    types = AttributeTypes({})
    if store is not None:
        types = AttributeTypes(store.schema(), store.has_attribute)
    for record in source.records():
        types.check(record.key, record.attributes)


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
    file: Path | str,
    root: ImageRoot | str | None = None,
    kinds: Schema = NO_KINDS,
    folder: ImageRoot | str | None = None,
) -> Source:
    """The rows of a CSV file with the columns `key` and `path`; other columns are attributes.

    A column `price:number` or `sale:boolean` has that type, a column `sizes:text[]` several values
    per cell, such as S|M|L. Others have the type in `kinds`, or are text. An empty number or
    boolean omits the attribute. Paths are relative to `folder`, by default to `root`, by default
    the folder of the file.

    In a row per product, `path` is a folder of images, or several files as `a.jpg|b.jpg` or as a
    JSON list. Each image is an item with the key KEY/FILE, the attributes of the row and the
    attribute `product`, by default the key. A column `product` may take the place of `key`.

    With an address as `root`, `path` names files below it, also by their whole addresses.

    Raises: SourceError for a missing file, column, value or row, a value of another type, a
        repeated key, or a path that leads out of the root.
    """
    file = _regular(file)
    return rows_source(
        lambda required: read_table(file, required, kinds),
        _key_column(file),
        file.parent,
        str(file),
        str(file.resolve()),
        root,
        folder,
    )


def rows_source(
    read: ReadRows,
    key: str,
    here: Path,
    name: str,
    description: str,
    root: ImageRoot | str | None = None,
    folder: ImageRoot | str | None = None,
) -> Source:
    """The rows of a list, as in `csv_source`.

    Args:
        read: returns a new iterator over the rows, with the given columns as cells.
        key: the column of the keys, `key` or `product`.
        here: the folder that paths are relative to if no other is given.
        name: of the list, for messages.
        description: of the list, for the gallery.

    Raises: the errors of `csv_source`.
    """
    if (remote := _address_of(root, folder)) is not None:
        base = existing_folder(here)
        rows = _ListRows(read, key, base, base, remote)
        return relocated(_listed_source(base, rows.records, name, description, rows.names), *remote)
    base = existing_folder(here) if root is None else _local(root)
    rows = _ListRows(read, key, base, base if folder is None else _local(folder))
    return _listed_source(base, rows.records, name, description, rows.names)


def _address_of(
    root: ImageRoot | str | None, folder: ImageRoot | str | None
) -> tuple[ImageAddress, str] | None:
    """The address of the images of a list, and the folder below it that paths are relative to; None
    if they are in a folder.

    Raises: SourceError if `folder` is outside of `root`.
    """
    places = [image_root_of(place) for place in (root, folder) if place is not None]
    if not any(isinstance(place, ImageAddress) for place in places):
        return None
    base, place = places[0], places[-1]
    if not isinstance(base, ImageAddress) or not isinstance(place, ImageAddress):
        raise SourceError(_outside(place, base))
    return base, base.below(str(place))


def _local(place: ImageRoot | str) -> Path:
    """The absolute path of a folder that exists. Raises: SourceError."""
    return existing_folder(str(image_root_of(place)))


def _outside(place: object, root: object) -> str:
    return (
        f"{place} is outside of {root}, the image root of the gallery. Pass a place below it, set "
        "the current place of the images with --image-root, or build a separate gallery."
    )


def relocated(source: Source, root: ImageRoot, below: str) -> Source:
    """The source with paths relative to another root, in which its own is the folder `below`."""

    def records() -> Iterator[Record]:
        for record in source.records():
            yield replace(record, path=f"{below}/{record.path}") if below else record

    return replace(source, root=root, records=records, below=below)


class _ListRows:
    """The rows of a CSV list of images.

    Paths are relative to `folder` and must not lead out of `root`. Paths that begin with the
    address and folder of `remote` are relative to that.
    """

    def __init__(
        self,
        read: ReadRows,
        key: str,
        root: Path,
        folder: Path,
        remote: tuple[ImageAddress, str] | None = None,
    ) -> None:
        self.root, self.folder, self.key = root, folder, key
        self.read = partial(read, (key, "path"))
        self.shortened = None if remote is None else partial(remote[0].relative, remote[1])
        # One product of several images is enough: the others are products as well.
        self.is_of_products = self.key == PRODUCT
        columns: frozenset[str] = frozenset()
        for row in self.read():
            columns = frozenset(row.attributes)
            if self.is_of_products or self._is_several(row):
                self.is_of_products = True
                break
        self.names = columns | {PRODUCT} if self.is_of_products else columns

    def records(self, omitted: Omitted) -> Iterator[tuple[int, Record]]:
        """The records of each row, with its line. Raises: SourceError."""
        for row in self.read():
            key = _checked_key(row.cells[self.key], row.position)
            values = {name: value for name, value in row.attributes.items() if value is not None}
            if self.is_of_products and values.get(PRODUCT, "") == "":
                values[PRODUCT] = key
            for name, path in self._images(row, omitted):
                yield row.line, Record(f"{key}/{name}" if name else key, path, values)

    def _is_several(self, row: Row) -> bool:
        path = row.cells["path"]
        if path.lower().endswith(SUFFIXES) and not {"|", "["} & set(path):
            return False
        files = self._files(row)
        return len(files) > 1 or self._place(files[0]).is_dir()

    def _images(self, row: Row, omitted: Omitted) -> list[tuple[str, str]]:
        """The name within its product and the path of each image of a row; no name for the only
        image of a key.
        """
        files = self._files(row)
        paths = [existing(self.root, self._relative(file, row.position)) for file in files]
        if len(paths) == 1 and self.key == "key" and not self._is_folder(paths[0]):
            return [("", paths[0])]
        images: list[tuple[str, str]] = []
        for path in dict.fromkeys(paths):
            images += (
                self._in_folder(path, row, omitted)
                if self._is_folder(path)
                else [(composed(path).rpartition("/")[2], path)]
            )
        if len({name for name, _ in images}) < len(images):  # of two folders
            return [(composed(path), path) for _, path in images]
        return images

    def _in_folder(self, path: str, row: Row, omitted: Omitted) -> list[tuple[str, str]]:
        below = "" if path == "." else path
        try:
            found = [*walk_images(self.root, omitted, below)]
        except OSError as error:
            raise SourceError(f"{row.position}: {read_failed(error)}") from error
        if not found:
            omitted.faults.append(
                Fault(
                    composed(path),
                    f"{row.position}: the folder {path} has no images. Add some, or remove the "
                    "line.",
                )
            )
        start = len(composed(below)) + 1 if below else 0
        return [(image.name[start:], image.path) for image in found]

    def _files(self, row: Row) -> list[str]:
        """The files or folders in the cell `path`. Raises: SourceError."""
        try:
            paths = paths_in(row.cells["path"], self.folder)
        except ValueError as error:
            raise SourceError(f"{row.position}: {error}") from error
        return paths if self.shortened is None else [*map(self.shortened, paths)]

    def _relative(self, path: str, position: str) -> str:
        """The path below the root. Raises: SourceError."""
        return _relative(path, self.root, position, self.folder)

    def _place(self, path: str) -> Path:
        return self.folder / path.replace("\0", "")

    def _is_folder(self, path: str) -> bool:
        is_image = path.lower().endswith(SUFFIXES)
        return not is_image and (self.root / path).is_dir()


def split_source(
    file: Path | str,
    root: ImageRoot | str | None = None,
    folder: ImageRoot | str | None = None,
) -> Source:
    """The lines `relative/path.jpg, class, ...` of a dataset's split file; the key is the path.

    The second field becomes the attribute `class`, further ones `class_2`, `class_3`, ... Paths
    are relative to `folder`, by default to `root`, by default the folder of the file.

    Raises: the errors of `csv_source`.
    """
    file = _regular(file)
    if (remote := _address_of(root, folder)) is not None:
        return relocated(split_source(file), *remote)
    base = existing_folder(file.parent) if root is None else _local(root)
    below = base if folder is None else _local(folder)

    def records() -> Iterator[tuple[int, Record]]:
        for line, row in read_rows(file):
            yield line, _split_record(row, base, f"{file}:{line}", below)

    names = frozenset(name for _, record in records() for name in record.attributes)
    return _listed_source(base, lambda _: records(), str(file), str(file.resolve()), names)


def csv_changes(
    file: Path | str, kinds: Schema = NO_KINDS
) -> tuple[str, dict[str, Mapping[str, AttributeValue | None]]]:
    """Attribute changes from a CSV file with the column `key`, or `product`; other columns are
    attributes. Returns the name of that column, and the changes by its values.

    Columns are typed as in `csv_source`. An empty number or boolean removes the attribute.

    Raises: the errors of `csv_source`.
    """
    file = Path(file)
    column = _key_column(file)
    changes: dict[str, Mapping[str, AttributeValue | None]] = {}
    lines: dict[str, int] = {}
    for row in read_table(file, (column,), kinds):
        key = composed(row.cells[column])
        if key in changes:
            raise SourceError(
                f"{file}: the {column} {key!r} is on line {lines[key]} and on line {row.line}. "
                "Give it one line."
            )
        changes[key], lines[key] = row.attributes, row.line
    if not changes:
        raise SourceError(f"{file} lists no changes. Add one line per item.")
    return column, changes


def _key_column(file: Path) -> str:
    """The column of the keys: a list without one may name its products instead."""
    _, header = next(read_rows(file), (0, []))
    names = [name.partition(":")[0].strip().lower() for name in header]
    return PRODUCT if "key" not in names and PRODUCT in names else "key"


def _split_record(row: list[str], root: Path, position: str, folder: Path) -> Record:
    path, *labels = (value.strip() for value in row)
    names = ["class", *(f"class_{n}" for n in range(2, len(labels) + 1))]
    relative = existing(root, _relative(path, root, position, folder))
    return Record(composed(relative), relative, dict(zip(names, labels, strict=False)))


def _checked_key(key: str, position: str) -> str:
    if not is_key(key):
        raise SourceError(
            f"{position}: the key {key!r} is not valid. Use up to {MAX_KEY:,} characters, without "
            "control characters and without '..' as a part."
        )
    return composed(key)


def _relative(path: str, root: Path, position: str, folder: Path | None = None) -> str:
    """A path relative to `folder`, by default the root, as one relative to the root.

    Raises: SourceError.
    """
    place = (folder or root) / path
    if not path or "\0" in path:
        raise SourceError(f"{position}: the path {path!r} is not the name of a file.")
    if _ADDRESS.match(path):
        raise SourceError(
            f"{position}: the path {path!r} is a URL outside of the image root. Download the "
            "images and write their paths, or pass the address that all are below as IMAGES."
        )
    if "\\" in path and not os.path.lexists(place):
        raise SourceError(
            f"{position}: the path {path!r} has backslashes. Write it with slashes and relative to "
            f"{folder or root}, such as mug/1.jpg."
        )
    relative = os.path.relpath(place, root)
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
    records: Callable[[Omitted], Iterator[tuple[int, Record]]],
    name: str,
    description: str,
    names: frozenset[str],
) -> Source:
    """A source over a list, which is read and checked now and read again while it is indexed."""
    omitted = Omitted()
    hashes = array("q", (hash(record.key) for _, record in records(omitted)))  # 8 bytes per key
    if not hashes:
        faults = " ".join(fault_lines(omitted.faults)[:3])
        raise SourceError(f"{name} lists no images. {faults or 'Add one line per image.'}")
    different, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    if len(different) < len(hashes):
        _refuse_twice(records(Omitted()), {*different[counts > 1].tolist()}, name)
    return Source(
        root,
        lambda: (record for _, record in records(Omitted())),
        len(hashes),
        f"{LIST} {description}",
        names,
        omitted=omitted,
    )


def _refuse_twice(records: Iterator[tuple[int, Record]], hashes: Set[int], name: str) -> None:
    """Raise SourceError if a key with one of these hashes occurs twice."""
    lines: dict[str, int] = {}
    for line, record in records:
        if hash(record.key) in hashes:
            first = lines.setdefault(record.key, line)
            if first != line:
                raise SourceError(
                    f"{name}: the key {record.key!r} is on line {first} and on line {line}. "
                    "Give each image its own key."
                )
