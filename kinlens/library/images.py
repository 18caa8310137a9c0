"""What a query and a source of images may be: files, bytes, pixels, vectors, folders and lists."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from kinlens.calls import QueryText, QueryVector, content_of
from kinlens.embedder.errors import InvalidParameterError, SourceError
from kinlens.embedder.preprocess import Box, check_box
from kinlens.embedder.session import Embedder, pixels_of
from kinlens.embedder.sources.names import printable, read_file
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.embedder.types import Embeddings
from kinlens.errors import ArgumentError
from kinlens.indexer.addresses import REMOTE, ImageAddress, ImageRoot
from kinlens.indexer.entries import Schema
from kinlens.indexer.exchange.parquet import load_pyarrow
from kinlens.indexer.ingest.sources import (
    NO_KINDS,
    ReadRows,
    Source,
    csv_source,
    rows_source,
    source_at,
    split_source,
)
from kinlens.indexer.ingest.tables import Row, split_kind
from kinlens.library.bundles import user_path
from kinlens.values import AUTO, AttributeValue, is_missing, plain

Crops = Sequence[Sequence[float]] | str | None
_FEW = Repr()
_FEW.maxstring = _FEW.maxother = 200
_FRAME = "the DataFrame"


@dataclass(frozen=True, slots=True)
class View:
    """The part of a query that found a hit: the position of its image, from 1, and its crop (None:
    the whole image); or the position of its vector.
    """

    image: int | None = None
    crop: Box | None = None
    vector: int | None = None


class CropError(InvalidParameterError, ValueError):
    """A text that is no crop."""


class BatchChoice(TypedDict, total=False):
    """How many images are embedded at a time (32), and by how many threads (0: one per core)."""

    batch_size: int
    workers: int


class NamedImage(NamedTuple):
    """The bytes of an image file, and its name for messages."""

    name: str
    data: bytes


def about(value: Any) -> str:
    """A value for a message: on one line, and of a long one the beginning and the end."""
    return " ".join(_FEW.repr(value).split())


def named_attributes(name: str, value: Any) -> Mapping[str, Any]:
    """The attributes that an argument or item has. Raises: InvalidParameterError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidParameterError(
            f'{name} = {about(value)} must be attributes by name, such as {{"price": 49.9}}.'
        )
    return value


def read_image(image: Any, max_bytes: int, number: int | None = None) -> NamedImage:
    """An image as the bytes of a file.

    Args:
        image: a path, the bytes of a file, an open file, an image of Pillow, or an array of pixels,
            uint8 (H, W), (H, W, 3), or (H, W, 4) with alpha.
        number: its position among several, from 1, for messages.

    Raises: SourceError naming a file that cannot be read; ImageTooManyBytesError;
        InvalidParameterError for anything else.
    """
    name = "image" if number is None else f"image {number}"
    if isinstance(image, str | os.PathLike):
        path = user_path(image)
        if not path or REMOTE in path or path.startswith("data:"):
            raise SourceError(
                f"{about(image)} is not the path of a file. Pass a path, or the bytes of the image."
            )
        return NamedImage(f"image {printable(path)}", read_file(path, max_bytes))
    if hasattr(image, "read") and hasattr(image, "name"):
        name = f"image {image.name}"
    try:
        return NamedImage(name, content_of(_array(image) if hasattr(image, "dtype") else image))
    except ArgumentError as error:
        subject = f"The {name}" if hasattr(image, "size") else about(image)
        raise InvalidParameterError(f"{subject} is not an image: {error}") from error


def _array(value: Any) -> NDArray[Any]:
    """Raises: InvalidParameterError for a value that NumPy cannot read."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # such as a tensor with gradients
        raise InvalidParameterError(
            f"{about(value)} is no array of numbers: {str(error).rstrip('.')}. Pass an array of "
            "NumPy, in which vectors have the same length."
        ) from error


def is_pixels(value: Any) -> bool:
    """Whether a value is an image of Pillow, or an array of bytes with two or three axes."""
    if isinstance(value, Pillow.Image):
        return True
    kind = str(getattr(value, "dtype", ""))  # that of torch is torch.uint8
    return kind.endswith("uint8") and getattr(value, "ndim", 0) in (2, 3)


def vectors_in(value: Any) -> NDArray[np.float32] | None:
    """The vectors (D,) or (Q, D) in an array, in a list of numbers or arrays, or in a column of
    pandas or Arrow; None for anything else.

    Raises: InvalidParameterError for vectors that differ in length.
    """
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if is_pixels(first) or not (hasattr(first, "__array__") or isinstance(first, int | float)):
        return None
    found = _array(value)
    if found.dtype.kind == "O" and found.ndim == 1 and len(found):
        found = _array([*found])
    if found.dtype.kind not in "fiu" or found.ndim not in (1, 2):
        return None
    return found.astype(np.float32, copy=False)


def listed_images(value: Any) -> list[Any]:
    """One image or several as a list."""
    if value is None:
        return []
    is_file = hasattr(value, "read")  # which is an iterator of lines
    return [*value] if isinstance(value, list | tuple | Iterator) and not is_file else [value]


class Viewer:
    """Turns images into views of a query, by one model."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def views(self, images: Sequence[Any], crops: Crops) -> tuple[list[View], Embeddings]:
        """A view for each image or crop of it, and their vectors (V, D).

        Raises: the errors of `read_image`; ImageError naming the image; InvalidParameterError for a
            crop that is not in the image; BundleError.
        """
        embedder = self._embedder
        views: list[View] = []
        pixels: list[NDArray[np.uint8]] = []
        for number, image in enumerate(images, 1):
            position = number if len(images) > 1 else None
            try:
                named = read_image(image, embedder.limits.max_bytes, position)
            except SourceError as error:
                if isinstance(image, str) and not Path(image).suffix:
                    raise SourceError(f"{error} Words are searched with text=.") from error
                raise
            if crops == AUTO:
                pixels_of(named.data, named.name, embedder)  # which names a damaged image
            boxes = self._boxes(named.data, crops)
            pixels.append(pixels_of(named.data, named.name, embedder, boxes))
            views += [View(number, box) for box in boxes]
        return views, embedder.embed(np.concatenate(pixels))

    def _boxes(self, data: bytes, crops: Crops) -> Sequence[Box | None]:
        if crops == AUTO:
            return self._embedder.parts(data)
        try:
            if isinstance(crops, str):
                raise TypeError
            return [check_box(crop) for crop in crops or ()] or [None]
        except TypeError:
            raise InvalidParameterError(
                f'crops = {about(crops)} must be "auto", or a list of (left, top, width, '
                "height) as fractions of the image."
            ) from None


def crop_of(text: str) -> Box | Literal["auto"]:
    """The crop in a text, "auto" or left,top,width,height.

    Raises: CropError for another text; InvalidParameterError for a crop beyond the image.
    """
    if text == AUTO:
        return AUTO
    try:
        sides = [float(side) for side in text.split(",")]
    except ValueError as error:
        raise CropError(
            f"The crop {text!r:.80} is neither auto nor left,top,width,height as fractions of the "
            "image, such as 0.1,0.2,0.5,0.5."
        ) from error
    return check_box(sides)


def weighted_vectors(
    vectors: Sequence[QueryVector | NDArray[np.float32]], dim: int
) -> tuple[list[NDArray[np.float32]], list[float]]:
    """The vectors (D,) of a query with norm 1, and their weights. Raises: InvalidParameterError."""
    found, weights = [], []
    for sent in vectors:
        given: Any = sent if isinstance(sent, Mapping) else {"vector": sent}
        vector = vectors_in(given.get("vector"))
        if vector is None or vector.ndim != 1:
            raise InvalidParameterError(
                f"vectors has {about(sent)}; pass mappings with a vector, such as "
                '[{"vector": [0.6, 0.8], "weight": 0.5}].'
            )
        if len(vector) != dim:
            raise InvalidParameterError(
                f"A vector of the search has {len(vector):,} numbers, and this gallery takes "
                f"{dim:,}. Pass vectors of its model."
            )
        found.append(vector)
        weights.append(float(given.get("weight", 1.0)))
    return found, weights


def weighted_texts(
    texts: str | Sequence[str | QueryText] | None,
) -> tuple[list[str], list[float]]:
    """The texts of a query and their weights. Raises: InvalidParameterError."""
    several = [texts] if isinstance(texts, str) else texts or ()
    sent: list[QueryText] = [{"text": t} if isinstance(t, str) else t for t in several]
    try:
        return [one["text"] for one in sent], [float(one.get("weight", 1.0)) for one in sent]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise InvalidParameterError(
            f"texts = {about(texts)} must be a text, or a list of texts and of mappings such "
            'as {"text": "green", "weight": 0.5}.'
        ) from None


def is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame of pandas."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def table_in(value: Any) -> Any:
    """A DataFrame of pandas as it is; what has the interface of Arrow, such as its tables, batches
    and readers, as a table of Arrow; None for anything else.
    """
    if is_frame(value):
        return value
    is_arrow = hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")
    return load_pyarrow().table(value) if is_arrow and hasattr(value, "schema") else None


def columns_of(table: Any) -> list[str]:
    """The names of the columns of a table."""
    return [str(name) for name in (table.columns if is_frame(table) else table.column_names)]


def key_in(value: Any) -> str | None:
    """A text, path or whole number as a key; None for anything else."""
    if isinstance(value, str | os.PathLike):
        return os.fsdecode(value)
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return str(int(value)) if is_number else None


def source_of(
    images: Any,
    *,
    csv: Path | str | None = None,
    split: Path | str | None = None,
    root: ImageRoot | str | None = None,
    kinds: Schema = NO_KINDS,
) -> Source:
    """The images to put into a gallery.

    Args:
        images: a folder, an address such as s3://shop/photos, a CSV list, any number of paths, a
            table with the columns of a list, or a source. None with `csv` or `split`.
        csv, split: a list whose paths are relative to `images`, by default to `root`, by default to
            the folder of the list.
        root: the image root of the gallery; None for a new one.
        kinds: the types of attributes in the gallery.

    Raises: SourceError, UnreachableError.
    """
    if isinstance(images, Source):
        return images
    if isinstance(images, str | os.PathLike):
        images = user_path(images)
        if not images:
            raise SourceError("images is an empty text. Pass the path of a folder or list.")
    if csv is not None:
        return csv_source(user_path(csv), root or images, kinds, images)
    if split is not None:
        return split_source(user_path(split), root or images, images)
    if (table := table_in(images)) is not None:
        return _of_table(table, root, kinds)
    if not isinstance(images, str | ImageAddress):
        if isinstance(images, bytes | Mapping) or not isinstance(images, Iterable):
            raise SourceError(
                f"{about(images)} is no source of images. Pass a folder, a CSV list, a list of "
                "paths, or a DataFrame with the columns key and path."
            )
        return _of_paths([*images], root)
    place = str(images)
    if REMOTE not in place and place.lower().endswith(".csv") and Path(place).is_file():
        return csv_source(place, root, kinds)
    return source_at(place, root)


def _of_paths(paths: Sequence[Any], root: ImageRoot | str | None) -> Source:
    """Image files, whose keys are their paths below the root: by default their common folder."""
    if not paths:
        raise SourceError("The list of images is empty. Pass at least one path.")
    files = [_real(path) for path in paths]
    base = Path(os.path.commonpath([file.parent for file in files])) if root is None else root
    rows = [{"key": _below(file, base), "path": str(file)} for file in files]
    return _listed(rows, "key", "the list of paths", "of paths", base)


def _real(path: Any) -> Path:
    """An absolute path in its real folder. Raises: SourceError."""
    try:
        file = Path(user_path(path))
    except TypeError:
        raise SourceError(
            f"The list of images has {about(path)}, which is no path. Put other images with "
            "put_many."
        ) from None
    return file.parent.resolve() / file.name


def _below(file: Path, root: ImageRoot | str) -> str:
    return Path(os.path.relpath(file, os.path.realpath(str(root)))).as_posix()


def table_items(table: Any) -> Iterator[tuple[str, str, Mapping[str, AttributeValue]]]:
    """The key, image file and attributes of each row of a table. Raises: SourceError."""
    key, rows = _rows_of(table)
    for row in _reader(rows, _FRAME, NO_KINDS)((key, "path")):
        values = {name: value for name, value in row.attributes.items() if value is not None}
        yield row.cells[key], row.cells["path"], values


def _rows_of(table: Any) -> tuple[str, list[dict[str, Any]]]:
    """The column of the keys, and the rows by column. Raises: SourceError."""
    columns = columns_of(table)
    if "path" not in columns:
        raise SourceError(
            f"The DataFrame has {_listing_of(columns)}; it needs path, the image files, and key or "
            "product, unless the path is the key."
        )
    found = table.to_dict("records") if is_frame(table) else table.to_pylist()
    rows = [{str(name): value for name, value in row.items()} for row in found]
    key = next((name for name in ("key", PRODUCT) if name in columns), "key")
    return key, rows if key in columns else [{"key": row["path"], **row} for row in rows]


def _listing_of(columns: Sequence[str]) -> str:
    return f"the columns {', '.join(columns)}" if columns else "no columns"


def _of_table(table: Any, root: ImageRoot | str | None, kinds: Schema) -> Source:
    key, rows = _rows_of(table)
    if root is None and rows:
        # Relative paths are those of this process, and the root is what all have in common.
        rows = [
            {**row, "path": [str(_real(path)) for path in _listed_paths(row["path"])]}
            for row in rows
        ]
        root = os.path.commonpath([Path(path).parent for row in rows for path in row["path"]])
    elif not isinstance(root, ImageAddress):
        rows = [
            {**row, "path": [_without_links(path) for path in _listed_paths(row["path"])]}
            for row in rows
        ]
    return _listed(rows, key, _FRAME, "in a DataFrame", root, kinds)


def _without_links(path: Any) -> Any:
    """A path, in its real folder if it is absolute, since the root is a real folder, too."""
    is_absolute = isinstance(path, str | os.PathLike) and Path(path).is_absolute()
    return str(_real(path)) if is_absolute else path


def _listed_paths(cell: Any) -> Sequence[Any]:
    return cell if isinstance(cell, list | tuple) else [cell]


def _listed(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    name: str,
    description: str,
    root: ImageRoot | str | None,
    kinds: Schema = NO_KINDS,
) -> Source:
    return rows_source(_reader(rows, name, kinds), key, Path(), name, description, root)


def _reader(rows: Sequence[Mapping[str, Any]], name: str, kinds: Schema) -> ReadRows:
    """Reads the rows of a table as those of a list."""

    def read(required: Sequence[str]) -> Iterator[Row]:
        for number, row in enumerate(rows, 1):
            position = f"row {number} of {name}"
            cells = {column: _cell(row.get(column), column, position) for column in required}
            values = dict(
                _attribute(typed, value, kinds, position)
                for typed, value in row.items()
                if typed not in required
            )
            yield Row(number, position, cells, values)

    return read


def _cell(value: Any, name: str, position: str) -> str:
    if isinstance(value, list | tuple) and len(value) == 1:
        [value] = value
    if isinstance(value, list | tuple):
        return json.dumps([*map(os.fsdecode, value)])
    if value is None or is_missing(value) or not str(value).strip():
        raise SourceError(f"{position} has no {name}. Give it one, or drop the row.")
    text = key_in(value)
    if text is None:  # such as 7.0: a column of whole numbers with a gap has decimals
        raise SourceError(
            f"{position}: {name} = {about(value)} is neither a text nor a whole number. Convert it."
        )
    return text.strip()


def _attribute(
    typed: str, value: Any, kinds: Schema, position: str
) -> tuple[str, AttributeValue | None]:
    """Name and value of an attribute; a text in a column such as `price:number` is converted."""
    try:
        name, kind = split_kind(typed)
        if value is None or is_missing(value):
            return name, None
        if isinstance(value, str) and (wanted := kind.kind or kinds.get(name)):
            return name, kind._replace(kind=wanted).value_of(value)
        return name, plain(value)
    except ValueError as error:
        raise SourceError(f"{position}: {typed} = {value!r:.80}: {error}.") from error
