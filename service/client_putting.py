"""Puts of the client: items as requests of a bounded size, and their answers as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from embedder.types import AttributeValue
from service.client_call import (
    Call,
    Image,
    Part,
    address,
    file_part,
    image_bytes,
    json_text,
    model,
    text_part,
)
from service.client_errors import ArgumentError, ProblemError
from service.schemas.galleries import GalleryDetail, PutAnswer, PutResult

Attributes = Mapping[str, AttributeValue]

PutProgress = Callable[[int, PutAnswer], None]
"""Told after each request how many items are done, and its answer."""

MAX_ITEMS = 256
"""Items in one request, as the service takes them unless it is set otherwise."""

_MAX_BYTES = 32 * 2**20  # of one request
_PART_BYTES = 200  # around the content of a part, at most
_OF_THE_ITEM = frozenset({413, 415, 422})


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item to be put: `NewItem("hats/1", "hat.jpg", {"price": 9.5})`."""

    key: str
    image: Image
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Parts:
    """An item as it is sent: its parts of the form, and their bytes together."""

    key: str
    parts: tuple[Part, Part, Part]
    size: int


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
        counts = {"added": 0, "replaced": 0, "updated": 0, "unchanged": 0, "failed": 1}
        return PutAnswer(**counts, items=[result], version="")


class PutSum:
    """The answers of requests, put together."""

    def __init__(self, on_progress: PutProgress | None) -> None:
        self._on_progress = on_progress
        self._answers: list[PutAnswer] = []
        self._count = 0

    def take(self, answer: PutAnswer) -> None:
        """Take in the next one."""
        self._answers.append(answer)
        self._count += len(answer.items)
        if self._on_progress is not None:
            self._on_progress(self._count, answer)

    @property
    def version(self) -> str:
        """The version of the gallery after the last request; empty if none told it."""
        return next((one.version for one in reversed(self._answers) if one.version), "")

    def answer(self, version: str) -> PutAnswer:
        """All as one, of this version of the gallery."""
        return PutAnswer(
            added=sum(one.added for one in self._answers),
            replaced=sum(one.replaced for one in self._answers),
            updated=sum(one.updated for one in self._answers),
            unchanged=sum(one.unchanged for one in self._answers),
            failed=sum(one.failed for one in self._answers),
            items=[item for one in self._answers for item in one.items],
            version=version,
        )


def put_one(gallery: str, item: NewItem) -> Call[PutAnswer]:
    """Puts an item. Raises: ArgumentError."""
    return _request(gallery, [_parts(item)]).call


def put_requests(gallery: str, items: Iterable[NewItem], count: int) -> Iterator[PutRequest]:
    """Requests with at most `count` items and 32 MiB each; a larger item goes alone. The images of
    a request are read when it is asked for. Raises: ArgumentError.
    """
    if count < 1:
        raise ArgumentError(f"per_request = {count} is outside its range; send 1 or more.")
    waiting: list[_Parts] = []
    size = 0
    for item in items:
        parts = _parts(item)
        if waiting and (len(waiting) == count or size + parts.size > _MAX_BYTES):
            yield _request(gallery, waiting)
            waiting, size = [], 0
        waiting.append(parts)
        size += parts.size
    if waiting:
        yield _request(gallery, waiting)


def version_of(gallery: str) -> Call[GalleryDetail]:
    """The gallery, for its version."""
    return Call("GET", address("galleries", gallery), model(GalleryDetail))


def _parts(item: NewItem) -> _Parts:
    data, text = image_bytes(item.image), json_text(dict(item.attributes))
    size = len(data) + 4 * (len(item.key) + len(text)) + 3 * _PART_BYTES
    parts = (
        file_part("image", data),
        text_part("key", item.key),
        text_part("attributes", text),
    )
    return _Parts(item.key, parts, size)


def _request(gallery: str, items: Sequence[_Parts]) -> PutRequest:
    parts = [part for item in items for part in item.parts]
    call = Call("PUT", address("galleries", gallery, "items"), model(PutAnswer), parts=parts)
    return PutRequest([item.key for item in items], call)
