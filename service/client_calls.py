"""What the client sends: a call of the service as a value, with its images, filters and forms."""

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from embedder.types import AttributeValue
from service.api.models import ItemModel, ItemPage, Problem, PutAnswer, PutResult
from service.client_errors import (
    AnswerError,
    ArgumentError,
    GalleryReplacedError,
    ImageReadError,
    ProblemError,
    problem_error,
)

T = TypeVar("T")

Image = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO
"""The content of an image file, its path, or the open file."""

Images = Image | Sequence[Image]

Crop = tuple[float, float, float, float]
"""left, top, width, height as fractions of the upright image."""

Filter = str | Mapping[str, Any]
Attributes = Mapping[str, AttributeValue]

Part = tuple[str, tuple[str | None, bytes | str]]
"""A part of a form: its name, the name of the file if it is one, and the content."""

MAX_ITEMS = 256
"""Items in one request, as the service takes them unless it is set otherwise."""

_MAX_BYTES = 32 * 2**20  # of one request
_PART_BYTES = 200  # around the content of a part, at most
_OF_THE_ITEM = frozenset({413, 415, 422})
_PAGE = 200  # items, the most that the service gives
_SHOWN = 200
_PLAIN: dict[type, Callable[[httpx.Response], Any]] = {
    bytes: lambda response: response.content,
    str: lambda response: response.text,
    NoneType: lambda _: None,
}


class SearchOptions(TypedDict, total=False):
    """What every search can be given; docs/api.md explains each. None is as not given."""

    k: int | None
    offset: int | None
    min_score: float | None
    min_probability: float | None
    filter: Filter | None
    group_by: str | None
    group_score: Literal["best", "mean"] | None
    group_size: int | None
    distinct: bool | None
    exact: bool | None


class ImageSearchOptions(SearchOptions, total=False):
    """What a search with images can be given beside them. `crops` are of each image."""

    gallery: str | None
    crops: Sequence[Crop] | None
    positives: Sequence[str] | None
    negatives: Sequence[str] | None


class RebuildOptions(TypedDict, total=False):
    """How to rebuild a gallery with another bundle; docs/service-jobs.md explains each."""

    swap: Literal["auto", "never"]
    max_recall_loss: float
    class_attribute: str
    max_missing: float


class TrainOptions(TypedDict, total=False):
    """How to train and what the new gallery must reach; docs/service-jobs.md explains each."""

    data: str | None
    overrides: Mapping[str, bool | int | float | str | Sequence[bool | int | float | str]]
    gate: Mapping[str, float | None]
    swap: Literal["auto", "never"]
    class_attribute: str
    max_missing: float


@dataclass(frozen=True, slots=True)
class Query:
    """One search of a batch: `Query("shoe.jpg", {"k": 5})`."""

    images: Images = ()
    options: ImageSearchOptions | None = None


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item to be put: `NewItem("hats/1", "hat.jpg", {"price": 9.5})`."""

    key: str
    image: Image
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and what its answer is; `accepted` statuses beside 2xx are answers too.

    An `idempotent` one may be sent again when nobody knows whether it arrived.
    """

    method: str
    path: str
    result: type[T]
    query: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    parts: Sequence[Part] = ()
    idempotent: bool = True
    accepted: Sequence[int] = ()

    def options(self) -> dict[str, Any]:
        """The arguments of `httpx.Client.build_request`. Raises: ArgumentError."""
        options: dict[str, Any] = {"params": _fields(self.query)}
        if self.json is not None:
            options["content"] = _json(self.json).encode()
            options["headers"] = {"content-type": "application/json"}
        if self.parts:
            options["files"] = list(self.parts)
        return options

    def answer(self, response: httpx.Response) -> T:
        """The answer in a response. Raises: ProblemError, AnswerError."""
        if not response.is_success and response.status_code not in self.accepted:
            raise _error_of(response)
        if not issubclass(self.result, BaseModel):
            plain: T = _PLAIN[self.result](response)
            return plain
        try:
            return self.result.model_validate_json(response.content)
        except ValidationError as error:
            raise AnswerError(
                f"The answer of {self.method} {self.path} does not fit this client: "
                f"{error.errors()[0]['msg']}. Do both have the same version?"
            ) from error


def _error_of(response: httpx.Response) -> ProblemError | AnswerError:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return AnswerError(
            f"{response.request.method} {response.request.url.path} was answered with "
            f"{response.status_code} and no problem document: {response.text[:_SHOWN]!r}."
        )
    return problem_error(problem, retry_after_s(response))


def retry_after_s(response: httpx.Response) -> float | None:
    """When to ask again, if the response says so in seconds."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None


def address(*parts: str | int) -> str:
    """A path of these parts, each quoted; a part of dots does not lead to another path.

    Raises: ArgumentError.
    """
    try:
        quoted = [quote(str(part), safe="") for part in parts]
    except UnicodeError as error:
        raise ArgumentError(f"{parts!a} is not Unicode, and cannot be in an address.") from error
    return "/" + "/".join(
        part.replace(".", "%2E") if part in (".", "..") else part for part in quoted
    )


def _json(value: object) -> str:
    """JSON. Raises: ArgumentError for what has none."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain_mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{value!r:.{_SHOWN}} cannot be sent as JSON: {error}. Send texts, finite numbers, "
            "booleans, and lists and mappings of these."
        ) from error


def _plain_mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no JSON")


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of a form or an address: without None, mappings as JSON."""
    return {
        name: _json(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value is not None
    }


def search_form(images: Images, options: ImageSearchOptions) -> list[Part]:
    """A search as parts of a form. Raises: ImageReadError, ArgumentError."""
    fields = _fields(options)
    parts = [_file("image", image) for image in _listed(images)]
    parts += [_field("crop", ",".join(map(str, crop))) for crop in fields.pop("crops", ())]
    parts += [_field("positive", key) for key in fields.pop("positives", ())]
    parts += [_field("negative", key) for key in fields.pop("negatives", ())]
    return [*parts, *(_field(name, value) for name, value in fields.items())]


def batch_json(queries: Sequence[Query]) -> dict[str, Any]:
    """Searches as the JSON of a batch. Raises: ImageReadError, ArgumentError."""
    searches = []
    for query in queries:
        given = {name: value for name, value in (query.options or {}).items() if value is not None}
        crops: Any = given.pop("crops", ())
        images = [
            {"data": base64.b64encode(_content(image)).decode(), "crops": list(map(list, crops))}
            for image in _listed(query.images)
        ]
        searches.append({"images": images, **given})
    return {"queries": searches}


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Some items to be put in one request."""

    keys: Sequence[str]
    call: Call[PutAnswer]

    def refused(self, error: ProblemError) -> PutAnswer:
        """The answer if the only item failed, which is then told as the problem of the request.

        Raises: ProblemError if it is not of an item.
        """
        if len(self.keys) != 1 or error.status not in _OF_THE_ITEM:
            raise error
        result = PutResult(key=self.keys[0], status="failed", id=None, problem=error.problem)
        return PutAnswer(
            added=0, replaced=0, updated=0, unchanged=0, failed=1, items=[result], version=""
        )


def put_requests(
    gallery: str, items: Iterable[NewItem], count: int = MAX_ITEMS
) -> Iterator[PutRequest]:
    """Requests with at most `count` items and 32 MiB each; a larger item goes alone. The images of
    a request are read when it is asked for. Raises: ImageReadError, ArgumentError.
    """
    if count < 1:
        raise ArgumentError(f"per_request = {count} is outside its range; send 1 or more.")
    keys: list[str] = []
    parts: list[Part] = []
    size = 0

    def request() -> PutRequest:
        path = address("galleries", gallery, "items")
        return PutRequest(keys, Call("PUT", path, PutAnswer, parts=parts))

    for item in items:
        image, attributes = _file("image", item.image), _json(dict(item.attributes))
        texts = 4 * (len(item.key) + len(attributes))  # bytes of a character, at most
        added = len(image[1][1]) + texts + 3 * _PART_BYTES
        if keys and (len(keys) == count or size + added > _MAX_BYTES):
            yield request()
            keys, parts, size = [], [], 0
        keys.append(item.key)
        parts += [image, _field("key", item.key), _field("attributes", attributes)]
        size += added
    if keys:
        yield request()


def put_sum(answers: Sequence[PutAnswer], version: str) -> PutAnswer:
    """The answers of requests as one, of this version of the gallery."""
    return PutAnswer(
        added=sum(one.added for one in answers),
        replaced=sum(one.replaced for one in answers),
        updated=sum(one.updated for one in answers),
        unchanged=sum(one.unchanged for one in answers),
        failed=sum(one.failed for one in answers),
        items=[item for one in answers for item in one.items],
        version=version,
    )


class Listing:
    """The items of a gallery read page by page, until `ended`, while others change it.

    Numbers only grow, and a replaced item gets a new one. What comes above the last number of the
    first page's answer was put meanwhile: it is left out, or a caller that replaces each item
    would never come to an end.
    """

    def __init__(self, gallery: str, where: Filter | None, key_prefix: str) -> None:
        self.ended = False
        self._gallery = gallery
        self._query = {"limit": _PAGE, "filter": where, "key_prefix": key_prefix}
        self._after: int | None = None
        self._last: int | None = None
        self._generation: str | None = None

    def call(self) -> Call[ItemPage]:
        """Asks for the next page. Raises: ArgumentError."""
        query = self._query | {"after": self._after}
        return Call("GET", address("galleries", self._gallery, "items"), ItemPage, query=query)

    def take(self, page: ItemPage) -> Sequence[ItemModel]:
        """The items of the next page. Raises: GalleryReplacedError, AnswerError."""
        if self._after is None:
            self._last, self._generation = page.last, page.generation
        elif page.generation != self._generation:
            raise GalleryReplacedError(
                f"Gallery {self._gallery} was built again while its items were read, and their "
                "numbers are others now. Read them again."
            )
        elif page.items and page.items[0].id <= self._after:
            raise AnswerError(
                f"The items after {self._after} begin with {page.items[0].id}. Do the service and "
                "this client have the same version?"
            )
        last = self._last
        found = [item for item in page.items if last is None or item.id <= last]
        self.ended = len(found) < _PAGE or found[-1].id == last
        self._after = found[-1].id if found else self._after
        return found


def _content(image: Any) -> bytes:
    try:
        if isinstance(image, bytes | bytearray | memoryview):
            return bytes(image)
        if isinstance(image, str | os.PathLike):
            return Path(image).read_bytes()
        content = image.read() if hasattr(image, "read") else None
    except (OSError, ValueError) as error:  # ValueError: a closed file, a NUL in a path
        raise ImageReadError(
            f"The image {image!r:.{_SHOWN}} cannot be read: {error}. Send the path of a file that "
            "is there, its bytes, or a file opened with 'rb'."
        ) from error
    if not isinstance(content, bytes):
        raise ArgumentError(
            f"An image is a {type(image).__name__} that gives no bytes; send the path of a file, "
            "its bytes, or a file opened with 'rb'."
        )
    return content


def _listed(images: Any) -> Iterable[Image]:
    single = (bytes, bytearray, memoryview, str, os.PathLike)
    if isinstance(images, single) or hasattr(images, "read"):
        return [images]
    if not isinstance(images, Iterable):
        raise ArgumentError(f"A {type(images).__name__} is no image; send a path, bytes or a file.")
    return images


def _file(name: str, image: Image) -> Part:
    return name, ("image", _content(image))


def _field(name: str, value: object) -> Part:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return name, (None, text)
