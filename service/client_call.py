"""One call of the service as a value: what is sent, and how the answer is read."""

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from service.client_errors import (
    AnswerError,
    ArgumentError,
    ImageReadError,
    ProblemError,
    problem_error,
)
from service.schemas.problems import Problem

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Image = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO
"""The content of an image file, its path, or the open file."""

Part = tuple[str, tuple[str | None, bytes | str]]
"""A part of a form: its name, the name of the file if it is one, and the content."""

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the reading of its answer; `accepted` statuses beside 2xx are answers too.

    An `idempotent` one may be sent again when nobody knows whether it arrived.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    parts: Sequence[Part] = ()
    idempotent: bool = True
    accepted: frozenset[int] = frozenset()

    def options(self) -> dict[str, Any]:
        """The arguments of `httpx.Client.build_request`. Raises: ArgumentError."""
        options: dict[str, Any] = {"params": {k: v for k, v in self.query.items() if v is not None}}
        if self.json is not None:
            options["content"] = json_text(self.json).encode()
            options["headers"] = {"content-type": "application/json"}
        if self.parts:
            options["files"] = list(self.parts)
        return options

    def answer(self, response: httpx.Response) -> T:
        """The answer in a response. Raises: ProblemError, AnswerError."""
        if not response.is_success and response.status_code not in self.accepted:
            raise error_of(response)
        try:
            return self.read(response)
        except ValidationError as error:
            raise AnswerError(
                f"The answer of {self.method} {self.path} does not fit this client: "
                f"{error.errors()[0]['msg']}. Do both have the same version?"
            ) from error


def model(cls: type[M]) -> Callable[[httpx.Response], M]:
    """Reads an answer as the JSON of `cls`."""
    return lambda response: cls.model_validate_json(response.content)


def content(response: httpx.Response) -> bytes:
    """The answer as it is."""
    return response.content


def nothing(response: httpx.Response) -> None:
    """No answer."""


def error_of(response: httpx.Response) -> ProblemError | AnswerError:
    """The error that a response tells."""
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


def image_bytes(image: Image) -> bytes:
    """The content of an image. Raises: ImageReadError, ArgumentError."""
    try:
        content = _content(image)
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


def _content(image: Any) -> object:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    return image.read() if hasattr(image, "read") else None


def json_text(value: object) -> str:
    """JSON. Raises: ArgumentError for what has none."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{value!r:.{_SHOWN}} cannot be sent as JSON: {error}. Send texts, finite numbers, "
            "booleans, and lists and mappings of these."
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no JSON")


def file_part(name: str, data: bytes) -> Part:
    """A file in a form; its name says nothing."""
    return name, ("image", data)


def text_part(name: str, value: object) -> Part:
    """A field of a form."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return name, (None, text)


def is_image(value: object) -> bool:
    """Whether this is one image, and not several."""
    single = (bytes, bytearray, memoryview, str, os.PathLike, io.IOBase)
    return isinstance(value, single) or hasattr(value, "read")
