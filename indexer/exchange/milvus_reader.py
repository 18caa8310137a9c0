"""A gallery on Milvus, opened for reading: nothing here changes it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.errors import (
    BundleMismatchError,
    EngineUnavailableError,
    GalleryBusyError,
    GalleryNotFoundError,
    ItemNotFoundError,
)
from embedder.types import Embeddings, Hit, ItemId
from indexer.catalog.attributes import Schema
from indexer.exchange import milvus_search
from indexer.exchange.milvus_connection import Connection
from indexer.exchange.milvus_generation import check_name, load
from indexer.exchange.milvus_schema import ENTRY_FIELDS, ITEM_FIELDS, Row, entry_of, item_of
from indexer.exchange.milvus_state import State, read_state
from indexer.exchange.milvus_view import MilvusView
from indexer.folder.manifest import SHORT
from indexer.ingest.pictures import ItemImage, item_image
from indexer.live.ranking import check_options, check_search
from indexer.types import Entry, Group, Grouping, Item, SearchOptions

T = TypeVar("T")


class MilvusReader:
    """A gallery in a Milvus server, searched while others change it. Thread safe.

    Milvus changes row by row: a search during a change can see a part of it, and for a moment both
    the old and the new content of a key. A new generation is seen at once.

    With consistency "Strong" a search sees every change that was finished before it, and waits for
    the server's clock, 200 ms by default (`proxy.timeTickInterval`). With "Bounded" it does not
    wait, and may miss what was changed in the last seconds.
    """

    def __init__(
        self, connection: Connection, state: State, consistency: str, image_root: Path | None
    ) -> None:
        self._connection = connection
        self._facts = state
        self._consistency = consistency
        self._image_root = image_root or Path(state.source_root)

    @classmethod
    def open(
        cls,
        uri: str,
        name: str,
        *,
        expected_bundle_id: str | None = None,
        image_root: Path | None = None,
        token: str = "",
        timeout_s: float = 10.0,
        consistency: str = "Strong",
    ) -> Self:
        """Open gallery `name` on the server at `uri`; a request may take `timeout_s`.

        Waits until the server has loaded it, which takes long after it was restarted.

        Raises: EngineUnavailableError, GalleryNotFoundError, GalleryCorruptError,
            BundleMismatchError.
        """
        check_name(name)
        connection = Connection(uri, token, timeout_s)
        try:
            collection, state = read_state(connection, name)
            _check_bundle(state, expected_bundle_id)
            load(connection, collection)
        except BaseException:
            connection.close()
            raise
        return cls(connection, state, consistency, image_root)

    @property
    def name(self) -> str:
        """The name in addresses, and of the alias on the server."""
        return self._facts.name

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._facts.dim

    @property
    def bundle_id(self) -> str:
        """The bundle that made the vectors."""
        return self._facts.bundle_id

    @property
    def created_at(self) -> str:
        """When the gallery was created: ISO 8601, UTC."""
        return self._facts.created_at

    @property
    def image_root(self) -> Path:
        """The folder that paths of items start from; it may be missing."""
        return self._image_root

    @property
    def size(self) -> int:
        """Number of items."""
        return self._read(MilvusView.count)

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change; another one at every look during one."""
        return self._view().state.version

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""
        return self._view().state.kinds

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number, of one state.

        Raises: GalleryBusyError, if the gallery is changed meanwhile.
        """
        for page in self._pages(ITEM_FIELDS):
            yield from map(item_of, page)

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        """Every item with its vector, in the order of its number, of one state.

        Raises: GalleryBusyError, if the gallery is changed meanwhile.
        """
        waiting: list[Entry] = []
        for page in self._pages(ENTRY_FIELDS):
            waiting += map(entry_of, page)
            while len(waiting) >= batch_size:
                yield waiting[:batch_size]
                waiting = waiting[batch_size:]
        if waiting:
            yield waiting

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""

        def read(view: MilvusView) -> list[Entry]:
            items = view.known(keys)
            vectors = view.vectors([item.id for item in items])
            return [
                Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
                for item, vector in zip(items, vectors, strict=True)
            ]

        return self._read(read)

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""
        found = self._read(lambda view: view.by_key(keys))
        return {key: items[-1] for key, items in found.items()}

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""
        found = self._read(lambda view: view.of_contents(sha256s))
        return {content: np.asarray(row["vector"], np.float32) for content, row in found.items()}

    def item(self, item_id: ItemId) -> Item:
        """What is known about an item. Raises: ItemNotFoundError."""
        found = self._read(lambda view: view.get([item_id])) if 0 <= item_id < 2**63 else []
        if not found:
            raise ItemNotFoundError(
                f"Gallery {self.name} has no item {item_id}; it may have been removed. Take the "
                "number from the answer of a search."
            )
        return found[0]

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed bytes of an item, read from the image root; BMP and TIFF become JPEG.

        Raises: ItemNotFoundError for an unknown number, or if the file is gone, was changed or lies
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """For each query (Q, D) its `k` best items: best first, equal scores by number.

        Raises: InvalidParameterError, FilterError, EngineUnavailableError.
        """
        asked = options or SearchOptions()
        checked = check_search(k, asked, self.dim, queries)
        return self._read(lambda view: milvus_search.search(view, checked, k, asked))

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        """For each query its `k` best groups, exactly k if there are as many.

        Raises: as `search`.
        """
        asked = options or SearchOptions()
        checked = check_search(k, asked, self.dim, queries)
        return self._read(
            lambda view: milvus_search.search_groups(view, checked, k, grouping, asked)
        )

    def search_like(
        self,
        liked: Sequence[str],
        disliked: Sequence[str],
        k: int,
        options: SearchOptions | None = None,
    ) -> list[Hit]:
        """The `k` items most like the items with keys `liked` and least like `disliked`, without
        these. Raises: ItemNotFoundError, InvalidParameterError, FilterError, ...
        """
        asked = options or SearchOptions()
        check_options(k, asked)
        return self._read(lambda view: milvus_search.search_like(view, liked, disliked, k, asked))

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _view(self) -> MilvusView:
        collection, state = read_state(self._connection, self.name)
        return MilvusView(self._connection, collection, state, self._consistency)

    def _read(self, work: Callable[[MilvusView], T]) -> T:
        """Work on the current generation, and once more if it is not the current one afterwards.

        A collection that is being dropped gives errors, or answers without some of its rows.
        """
        view = self._view()
        while True:
            try:
                answer = work(view)
            except (EngineUnavailableError, GalleryNotFoundError):
                last, view = view, self._view()
                if view.collection == last.collection:
                    raise
            else:
                last, view = view, self._view()
                if view.collection == last.collection:
                    return answer

    def _pages(self, fields: Sequence[str]) -> Iterator[list[Row]]:
        view = self._view()
        for page in view.matching((), fields):
            now = self._view().state
            if now.moment != view.state.moment or (now.changing and now.is_held()):
                raise GalleryBusyError(
                    f"Gallery {self.name} was changed while it was read, and Milvus cannot hold on "
                    "to a state. Read it again when nobody writes."
                )
            yield page


def _check_bundle(state: State, expected_id: str | None) -> None:
    if expected_id is not None and state.bundle_id != expected_id:
        raise BundleMismatchError(
            f"Gallery {state.name} was made with bundle {state.bundle_id[:SHORT]}, but the bundle "
            f"in use is {expected_id[:SHORT]}: their vectors cannot be compared. Import it again "
            "with vectors of the bundle in use, or use the bundle that it was made with."
        )
