"""Requests and responses of the client: images, options, forms and JSON; answers and problems."""

import base64
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Protocol, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from kinlens.errors import AnswerError, ArgumentError, ImageReadError, problem_error
from kinlens.models import Combine, Distinct, Problem, PutAnswer, PutResult
from kinlens.values import AUTO, AttributeInput, is_missing, plain

T = TypeVar("T")


class ImageArray(Protocol):
    """An image of Pillow, or an array uint8 (H, W) or (H, W, 3 or 4); it is sent as PNG."""

    def tobytes(self) -> bytes: ...


Image = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | ImageArray
"""The content of an image file, its path, the open file, or pixels."""

Images = Image | Sequence[Image]

Vector = Iterable[Any]
"""The numbers of a vector of norm 1: a list, an array of NumPy or a tensor of PyTorch."""


class QueryVector(TypedDict):
    """A vector of a search; `weight` is its part in the mean, in which an image has 1."""

    vector: Vector
    weight: NotRequired[float]


class QueryText(TypedDict):
    """Words of a search; `weight` is how far they move it, below 0 away from them."""

    text: str
    weight: NotRequired[float]


Crop = tuple[float, float, float, float]
"""Left, top, width and height as fractions of the upright image."""

Filter = str | Mapping[str, Any]
Attributes = Mapping[str, AttributeInput]

Part = tuple[str, tuple[str | None, bytes | str]]
"""A part of a form: its name, the file name or None, and the content."""

_MAX_BYTES = 32 * 2**20  # of one request
_PART_BYTES = 200  # upper bound of the headers and boundary of a part
_SHOWN = 200
_AS_JSON = ("facets", "fields", "vectors", "texts")


class SearchOptions(TypedDict, total=False):
    """Options of every search; docs/api.md describes each. None is the same as omitted."""

    k: int | None
    offset: int | None
    min_score: float | None
    min_probability: float | None
    filter: Filter | None
    group_by: str | None
    group_size: int | None
    distinct: Distinct | None
    exact: bool | None
    facets: Sequence[str] | None
    fields: Sequence[str] | None
    diversity: float | None
    boost: str | None
    sort_by: str | None


class ImageSearchOptions(SearchOptions, total=False):
    """Options of a search with images, `vectors`, `texts`, or several of these. `crops` apply to
    each image; "auto" are the whole image and parts of it, for busy photos. With `combine` "best",
    as with "auto", an item counts with the image, crop or vector that it is most similar to, its
    `view`. `guarantee` and `accept` need one whole image or vector, and labelled queries."""

    gallery: str | None
    vectors: Sequence[QueryVector] | None
    texts: Sequence[str | QueryText] | None
    crops: Sequence[Crop] | Literal["auto"] | None
    combine: Combine | None
    positives: Sequence[str] | None
    negatives: Sequence[str] | None
    guarantee: float | None
    accept: float | None


class SyncOptions(TypedDict, total=False):
    """Options of a sync with a folder; docs/nightly.md describes each."""

    folder: str | None
    max_removed: str
    uploads: bool
    checksum: bool
    dry_run: bool


class RebuildOptions(TypedDict, total=False):
    """Options of a rebuild with another bundle; docs/service-jobs.md describes each."""

    swap: Literal["auto", "never"]
    max_recall_loss: float
    class_attribute: str
    max_missing: float


class TrainOptions(TypedDict, total=False):
    """Options of a training job and its gate; docs/service-jobs.md describes each."""

    data: str | None
    overrides: Mapping[str, bool | int | float | str | Sequence[bool | int | float | str]]
    gate: Mapping[str, float | None]
    swap: Literal["auto", "never"]
    class_attribute: str
    max_missing: float
    feedback: bool


@dataclass(frozen=True, slots=True)
class Query:
    """One search of a batch: `Query("shoe.jpg", {"k": 5})`."""

    images: Images = ()
    options: ImageSearchOptions | None = None


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item to add or replace: `NewItem("hats/1", "hat.jpg", {"price": 9.5})`; or an item without
    image, `NewItem("hats/1", vector=vector)`.

    Attributes replace the stored ones of this key; None keeps them, {} clears them.
    """

    key: str
    image: Image | None = None
    attributes: Attributes | None = None
    vector: Vector | None = None


def item_path(item: int | str) -> tuple[int | str, ...]:
    """The path parts of an item, by its id or key."""
    return ("items", "by-key", item) if isinstance(item, str) else ("items", item)


def path_of(*parts: str | int) -> str:
    """The URL path of these parts, each quoted; "." and ".." are escaped too."""
    quoted = (quote(str(part), safe="") for part in parts)
    dots = {".": "%2E", "..": "%2E%2E"}
    return "/" + "/".join(dots.get(part, part) for part in quoted)


def fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of a form or query: without None, and mappings and some lists as JSON."""
    return {
        name: json_of(value) if isinstance(value, Mapping) or name in _AS_JSON else value
        for name, value in options.items()
        if value is not None
    }


def json_of(value: object) -> str:
    """A value as JSON. Raises: ArgumentError if JSON cannot represent it."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{value!r:.{_SHOWN}} cannot be sent as JSON: {error}. Send strings, finite numbers, "
            "booleans, dates, and lists and mappings of these; omit missing values such as NaN."
        ) from error


def _plain(value: Any) -> Any:
    """Convert mappings other than dict, and what `json` does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    stored = plain(value)
    if stored is value:
        reason = "is a missing value" if is_missing(value) else f"is of type {type(value).__name__}"
        raise TypeError(f"{value!r:.{_SHOWN}} {reason}")
    return stored


def search_form(images: Images, options: ImageSearchOptions) -> list[Part]:
    """A search as parts of a form. Raises: ImageReadError, ArgumentError."""
    given: dict[str, Any] = {**options}
    single = fields({**given, "vectors": _vectors(given.get("vectors"))})
    parts = [_file(image) for image in _listed(images)]
    parts += [_field("crop", crop) for crop in _crops(single.pop("crops", ()))]
    for name in ("positives", "negatives"):
        parts += [_field(name.removesuffix("s"), key) for key in _keys(name, single.pop(name, ()))]
    return parts + [_field(name, value) for name, value in single.items()]


def _crops(crops: Any) -> list[str]:
    """Crops as texts. Raises: ArgumentError."""
    if isinstance(crops, str) and crops == AUTO:
        return [AUTO]
    try:
        if isinstance(crops, str):
            raise TypeError
        return [",".join(map(str, crop)) for crop in crops]
    except TypeError:
        raise ArgumentError(
            f'crops = {crops!r:.{_SHOWN}} must be "auto", or a list of (left, top, width, height).'
        ) from None


def _vectors(vectors: Any) -> list[dict[str, Any]] | None:
    """Vectors of a search, each as base64. Raises: ArgumentError."""
    if vectors is None:
        return None
    try:
        return [{**sent, "vector": vector_text(sent["vector"])} for sent in vectors]
    except (TypeError, KeyError):
        raise ArgumentError(
            f"vectors = {vectors!r:.{_SHOWN}} must be a list of mappings with a vector, such as "
            '[{"vector": [0.6, 0.8], "weight": 0.5}].'
        ) from None


def vector_text(vector: Vector) -> str:
    """A vector as base64 of little-endian float32 numbers. Raises: ArgumentError."""
    try:
        numbers = [float(number) for number in vector]
        return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ArgumentError(
            f"vector = {vector!r:.{_SHOWN}} is not a list of numbers: {error}."
        ) from error


def _keys(name: str, keys: Any) -> Sequence[str]:
    """Keys of items. Raises: ArgumentError for a single text, whose letters would be the keys."""
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ArgumentError(f"{name} = {keys!r:.{_SHOWN}} must be a list of keys, as strings.")
    return list(keys)


def feedback_form(answer_id: str, item: str, action: str, image: Image | None) -> list[Part]:
    """Feedback as parts of a form. Raises: ImageReadError, ArgumentError."""
    parts = [_field("answer_id", answer_id), _field("item", item), _field("action", action)]
    return parts if image is None else [*parts, _file(image)]


def batch_json(queries: Sequence[Query]) -> dict[str, Any]:
    """Searches as the JSON of a batch. Raises: ImageReadError, ArgumentError."""
    searches = []
    for query in queries:
        given = {name: value for name, value in (query.options or {}).items() if value is not None}
        if "vectors" in given:
            given["vectors"] = _vectors(given["vectors"])
        crops: Any = given.pop("crops", ())
        is_auto = _crops(crops) == [AUTO]
        images = [
            {
                "data": base64.b64encode(content_of(image)).decode(),
                "crops": AUTO if is_auto else list(map(list, crops)),
            }
            for image in _listed(query.images)
        ]
        searches.append({"images": images, **given})
    return {"queries": searches}


def put_bodies(
    items: Iterable[NewItem], count: int, keep: bool = True
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Keys and bodies of puts with up to `count` items and 32 MiB each; a larger item has its own.
    Images are sent as a form, and are read just before it is yielded; vectors are sent as JSON.
    Without `keep`, the service does not store the images.

    Raises: ImageReadError, ArgumentError.
    """
    if count < 1:
        raise ArgumentError(f"per_request = {count} is outside its range; use 1 or more.")
    whole = [] if keep else [_field("keep", "false")]
    keys: list[str] = []
    parts: list[Part] = [*whole]
    vectors: list[dict[str, Any]] = []
    size = 0
    for item in items:
        given = None if item.attributes is None else dict(item.attributes)
        _keys("keys", [item.key])
        if (item.image is None) == (item.vector is None):
            raise ArgumentError(f"Item {item.key!r:.{_SHOWN}} needs either an image or a vector.")
        attributes = json_of(given)
        more: list[Part] = []
        entries: list[dict[str, Any]] = []
        if item.image is not None:
            image = _file(item.image)
            more = [image, _field("key", item.key), _field("attributes", attributes)]
            content = image[1][1]
        else:
            content = vector_text(() if item.vector is None else item.vector)
            entries = [{"key": item.key, "vector": content, "attributes": given}]
        texts = 4 * (len(item.key) + len(attributes))  # UTF-8 uses up to 4 bytes per character
        added = len(content) + texts + 3 * _PART_BYTES
        is_other = bool(vectors) == bool(more)
        if keys and (is_other or len(keys) == count or size + added > _MAX_BYTES):
            yield keys, {"json": {"items": vectors}} if vectors else {"parts": parts}
            keys, parts, vectors, size = [], [*whole], [], 0
        keys.append(item.key)
        parts += more
        vectors += entries
        size += added
    if keys:
        yield keys, {"json": {"items": vectors}} if vectors else {"parts": parts}


def embedding_json(images: Images, model: str | None, dimensions: int | None) -> dict[str, Any]:
    """Images to embed as JSON. Raises: ImageReadError, ArgumentError."""
    sent = [f"data:;base64,{base64.b64encode(content_of(one)).decode()}" for one in _listed(images)]
    return {"input": sent, "model": model, "dimensions": dimensions}


def golden_form(
    image: Image | None, label: Mapping[str, Any], name: str, crop: Any, texts: Sequence[Any]
) -> list[Part]:
    """A labelled query as parts of a form. Raises: ImageReadError, ArgumentError."""
    parts = [] if image is None else [_file(image)]
    parts += [_field("label", json_of(label)), _field("name", name)]
    if crop is not None:
        parts += [_field("crop", part) for part in _crops(crop if crop == AUTO else [crop])]
    return [*parts, _field("texts", json.dumps(list(texts)))] if texts else parts


def failed_put(key: str, problem: Problem) -> PutAnswer:
    """The answer for a single item whose request failed with this problem."""
    item = PutResult(key=key, status="failed", id=None, problem=problem)
    counts = {"added": 0, "replaced": 0, "updated": 0, "unchanged": 0, "failed": 1}
    return PutAnswer(**counts, items=[item], version="")


def merged_puts(answers: Sequence[PutAnswer], version: str) -> PutAnswer:
    """The answers to several puts merged into one, with this version of the gallery."""
    names = ("added", "replaced", "updated", "unchanged", "failed")
    counts = {name: sum(getattr(one, name) for one in answers) for name in names}
    items = [item for one in answers for item in one.items]
    return PutAnswer(**counts, items=items, version=version)


def answer_of(response: httpx.Response, result: type[T], accepted: Sequence[int] = ()) -> T:
    """The answer in a response, as a model or as bytes.

    `accepted` statuses count as answers, in addition to 2xx. Raises: ProblemError, AnswerError.
    """
    request = f"{response.request.method} {response.request.url.path}"
    if not response.is_success and response.status_code not in accepted:
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            to = response.headers.get("location")
            raise AnswerError(
                f"{request} returned {response.status_code} without a problem document: "
                f"{f'a redirect to {to}' if to else repr(response.text[:_SHOWN])}. Check that the "
                "URL is that of a Kinlens service, and that no proxy or login page answers for it."
            ) from None
        raise problem_error(problem, retry_after_s(response))
    type_ = response.headers.get("content-type", "")
    if "html" in type_:
        raise AnswerError(
            f"The answer to {request} is not one of Kinlens, but {type_}. Check that the URL is "
            "that of a Kinlens service, and that no proxy or login page answers for it."
        )
    if not issubclass(result, BaseModel):
        content: Any = response.content
        return content  # type: ignore[no-any-return]
    try:
        return result.model_validate_json(response.content)
    except ValidationError as error:
        raise AnswerError(
            f"The answer to {request} does not match this client: {_fault(error)}. Check that "
            "client and service have the same version."
        ) from error


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return "it is not valid JSON"
    return f"its field {'.'.join(map(str, first['loc']))!r} is missing or has another type"


def retry_after_s(response: httpx.Response) -> float | None:
    """The seconds to wait before a retry, if the response has them in Retry-After."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None


def _listed(images: Any) -> Iterable[Image]:
    is_one = isinstance(images, str | bytes | bytearray | memoryview)
    is_one = is_one or hasattr(images, "read") or hasattr(images, "tobytes")
    return images if isinstance(images, Iterable) and not is_one else [images]


def content_of(image: Any) -> bytes:
    """An image as the bytes of a file. Raises: ArgumentError, ImageReadError."""
    content = image
    try:
        if isinstance(image, str | os.PathLike):
            return _file_content(os.fsdecode(image))
        if hasattr(image, "read"):
            content = image.read()
        elif hasattr(image, "tobytes") and not isinstance(image, memoryview):
            content = _png_of(image)
    except (OSError, ValueError) as error:  # ValueError: a closed file
        reason = getattr(error, "strerror", None) or error
        raise ImageReadError(
            f"The image {image!r:.{_SHOWN}} cannot be read: {reason}. Send the path of a file, its "
            "bytes, or a file opened with 'rb'."
        ) from error
    if not isinstance(content, bytes | bytearray | memoryview):
        raise ArgumentError(
            f"An image must be a path, bytes, a binary file, an image of Pillow or an array (got "
            f"{type(image).__name__} without bytes). Send the path of a file, its bytes, or a file "
            "opened with 'rb'."
        )
    return bytes(content)


def _file_content(path: str) -> bytes:
    """Raises: ImageReadError naming a path that does not exist, is a folder or cannot be read."""
    try:
        if path:
            return Path(path).read_bytes()
        fault = "has an empty path"
    except (FileNotFoundError, NotADirectoryError):
        fault = "does not exist"
    except IsADirectoryError:
        fault = "is a folder"
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        fault = f"cannot be read: {getattr(error, 'strerror', None) or 'its path has a zero byte'}"
    raise ImageReadError(f"The image {path!r:.{_SHOWN}} {fault}. Send the path of an image file.")


def _png_of(image: Any) -> bytes:
    """An image of Pillow, or an array uint8 (H, W) or (H, W, 3 or 4), as a PNG file.

    Raises: ArgumentError.
    """
    try:
        import PIL.Image
    except ModuleNotFoundError:
        raise ArgumentError(
            f"A {type(image).__name__} as an image needs Pillow: pip install pillow. Or send the "
            "path of a file, or its bytes."
        ) from None
    if not isinstance(image, PIL.Image.Image):
        shape: tuple[int, ...] = tuple(getattr(image, "shape", ()))
        kind = str(getattr(image, "dtype", "unknown"))
        if kind != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
            raise ArgumentError(
                f"An array as an image must be uint8 (H, W) or (H, W, 3), not {kind} "
                f"{shape}. Convert it, or send the path of a file."
            )
        image = PIL.Image.fromarray(image)
    buffer = io.BytesIO()
    try:
        for mode, wanted in (("I;16B", "I"), ("I;16L", "I"), ("I", "I;16"), ("La", "LA")):
            if image.mode == mode:  # PNG has 16 bits, in one order of bytes
                image = image.convert(wanted)
        if image.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):  # what PNG can hold
            image = image.convert("RGB")
        image.save(buffer, "PNG", exif=image.getexif())  # the exif has the orientation
    except (OSError, SyntaxError, ValueError) as error:  # truncated, damaged, closed or empty
        raise ArgumentError(
            f"The image of Pillow cannot be read: {error}. Open it again, or send the path of the "
            "file."
        ) from error
    return buffer.getvalue()


def _file(image: Image) -> Part:
    return "image", ("image", content_of(image))


def _field(name: str, value: object) -> Part:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return name, (None, text)
