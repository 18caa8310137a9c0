"""What a publication writes at its address: snapshots, their deltas, and how they are read."""

import contextlib
import time
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.durable import FileFacts
from kinlens.embedder.errors import GalleryCorruptError, GalleryNotFoundError
from kinlens.indexer.catalog.replay import NameRows
from kinlens.indexer.exchange.objects import ObjectFolder, store_errors_explained
from kinlens.indexer.folder.manifest import CALIBRATION, PRECISIONS, REPORT, GalleryManifest
from kinlens.indexer.index.segment import brief

SNAPSHOT = "snapshot.json"
OBJECTS = "objects"

RETIRED_S = 3600.0
"""Grace period before an object that no snapshot names is deleted, for slow followers. The time of
a whole copy at 4 MB/s is added to it."""

_SLOWEST = 4e6  # bytes per second
LAYOUT = 2  # 0.2 has written 1
FILES = (REPORT, CALIBRATION, PRECISIONS)
"""Other files of a generation that are published: not manifest, catalogue, vectors or segments."""


# Names become paths on every following host, so they are restricted.
_SEGMENT = r"^[0-9]{12}-[0-9a-f]{8}$"
_VECTORS = r"^[0-9a-f]{8}$"
_FILE = r"^[a-z]+\.[a-z]+$"


class PublishedPart(FileFacts, frozen=True, extra="forbid"):
    """An object with items, in the format of `kinlens.indexer.catalog.replay`.

    first, last: the lowest and the highest of their ids.
    """

    first: int = Field(ge=0)
    last: int = Field(ge=0)


class PublishedDelta(BaseModel, frozen=True, extra="forbid"):
    """The changes after the write `since`, up to the write `until`.

    removed: an object with the writes that removed items, then the ids of these items (`packed`);
        None if there are none. Those that a compaction has forgotten are not in it.
    """

    since: int = Field(ge=0)
    until: int = Field(ge=0)
    items: int = Field(ge=0)
    parts: tuple[PublishedPart, ...]
    removed: FileFacts | None = None

    @property
    def objects(self) -> list[FileFacts]:
        """All objects of the delta."""
        return [*self.parts, *([] if self.removed is None else [self.removed])]


class Owner(BaseModel, frozen=True):
    """The origin of a snapshot of any layout.

    publisher: id of the folder that owns the address.
    """

    schema_version: int = Field(ge=1)
    published_at: str
    publisher: str
    gallery: GalleryManifest
    pictures: bool = False


_Kind = TypeVar("_Kind", bound=Owner)


class PublishedSnapshot(Owner, frozen=True, extra="forbid"):
    """One state of a gallery, and its objects.

    Attributes:
        seq, size, segment, segment_seq, numbers: the state of the catalogue.
        last_given: the highest item id that was ever assigned.
        names: the rows of the attribute names.
        live: an object with the ids of all items of the segment and later ones, and the highest id
            that was assigned when it was written (`packed`).
        vectors: the name of the vector file. The vectors themselves are in the deltas.
        row_numbers: an object with the item id of each row of the vector file, and its checksum.
        files: other files of the generation.
        retired: objects of earlier snapshots, with the time when they were last in use (seconds
            since 1970).
    """

    schema_version: Literal[2] = 2
    seq: int = Field(ge=0)
    size: int = Field(ge=0)
    segment: str | None = Field(pattern=_SEGMENT)
    segment_seq: int = Field(ge=0)
    numbers: int
    last_given: int = Field(ge=0)
    names: NameRows
    deltas: tuple[PublishedDelta, ...]
    live: FileFacts
    vectors: str = Field(pattern=_VECTORS)
    row_numbers: FileFacts
    segment_files: dict[Annotated[str, Field(pattern=_FILE)], FileFacts]
    files: dict[str, FileFacts]
    retired: dict[str, float] = {}

    @property
    def base(self) -> tuple[str | None, int, str]:
        """The segment, the last write that it contains, and the vector file."""
        return self.segment, self.segment_seq, self.vectors

    @property
    def expired(self) -> list[str]:
        """The retired objects that followers do not need any more."""
        oldest = time.time() - RETIRED_S - sum(facts.bytes for facts in self._facts()) / _SLOWEST
        return [name for name, at in self.retired.items() if at < oldest]

    def equals(self, other: "PublishedSnapshot") -> bool:
        """Whether both are equal to a follower."""
        times = {"published_at": other.published_at, "retired": other.retired}
        return self.model_copy(update=times) == other

    def objects(self) -> set[str]:
        """The sha256 of each object of the snapshot."""
        return {facts.sha256 for facts in self._facts()}

    def _facts(self) -> list[FileFacts]:
        files = [*self.segment_files.values(), *self.files.values(), self.row_numbers, self.live]
        return [*files, *(facts for delta in self.deltas for facts in delta.objects)]


def read_as(store: ObjectFolder, kind: type[_Kind]) -> _Kind | None:
    """The current snapshot at an address; None if there is none.

    Raises: GalleryCorruptError if it is damaged or from another version.
    """
    try:
        return kind.model_validate_json(store.read(SNAPSHOT))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise GalleryCorruptError(
            f"{store.address}/{SNAPSHOT} is not a snapshot that this version can read: "
            f"{brief(error)}. If a newer version published it, update Kinlens on this host. "
            "Otherwise publish the gallery again with this version and --take-over."
        ) from error


def snapshot_at(address: str) -> PublishedSnapshot:
    """The current snapshot at an address.

    Raises: GalleryNotFoundError, GalleryCorruptError, GalleryError, EngineUnavailableError.
    """
    with reading(address):
        found = read_as(ObjectFolder(address), PublishedSnapshot)
    if found is None:
        raise GalleryNotFoundError(
            f"No snapshot at {address}: {SNAPSHOT} is missing. Publish the gallery with "
            "kinlens-index publish GALLERY ADDRESS."
        )
    return found


def reading(address: str) -> contextlib.AbstractContextManager[None]:
    """Translates the errors of the store at an address."""
    return store_errors_explained(
        f"The snapshot at {address} cannot be read",
        "Check the address, its permissions and the network.",
    )
