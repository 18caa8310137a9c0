"""What a gallery on Milvus knows about itself: one property of its collection.

Milvus has no transactions and no compare-and-set. So a gallery has one writer at a time: it leaves
its mark in the state before it changes anything and takes it away afterwards, and others are
refused meanwhile. A mark that was not renewed for `LEASE_S` is that of a writer that died. Two
writers that look at the state within the same few milliseconds can both pass: let one process
write.
"""

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from embedder.errors import EngineUnavailableError, GalleryBusyError, GalleryCorruptError
from indexer.catalog.attributes import AttributeKind
from indexer.exchange.milvus_connection import Connection

LEASE_S = 60.0
_PROPERTY = "kinlens.state"


class State(BaseModel):
    """The facts of a gallery, its attributes, and who is writing.

    next_id: the number of the next item; numbers below were given away, also those of items that
        are gone.
    nlist: clusters of the index, 0 for an exact one.
    change: replaced by every change.
    writer: the mark of who is writing since `since` (Unix time); it may be `changing` items.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    bundle_id: str
    dim: int
    created_at: str
    source: str = ""
    source_root: str = ""
    next_id: int = 1
    nlist: int = 0
    kinds: Mapping[str, AttributeKind] = {}
    change: str
    writer: str | None = None
    since: float = 0.0
    changing: bool = False

    @property
    def version(self) -> str:
        """sha256 (hex); another one at every look while items are changing."""
        change = new_mark() if self.changing else self.change
        return hashlib.sha256(change.encode()).hexdigest()

    @property
    def moment(self) -> tuple[str, float]:
        """Equal as long as no items are changed."""
        return self.change, self.since if self.changing else 0.0

    def is_held(self) -> bool:
        """Whether somebody is writing, and alive."""
        return self.writer is not None and time.time() - self.since < LEASE_S


def new_mark() -> str:
    """A text that was never there before."""
    return uuid.uuid4().hex


def read_state(connection: Connection, name: str) -> tuple[str, State]:
    """The collection behind a name or alias, and its state.

    Raises: EngineUnavailableError, GalleryNotFoundError, GalleryCorruptError.
    """
    facts = connection.call("describe_collection", name)
    text = facts.get("properties", {}).get(_PROPERTY)
    if text is None:
        raise GalleryCorruptError(
            f"{name} on Milvus at {connection.uri} is a collection of something else. Choose "
            "another name."
        )
    try:
        return facts["collection_name"], State.model_validate_json(text)
    except ValidationError as exc:
        raise GalleryCorruptError(
            f"The state of {name} on Milvus at {connection.uri} cannot be read: {exc}. Use the "
            "version of Kinlens that wrote it, or import the gallery again."
        ) from exc


def state_properties(state: State) -> dict[str, str]:
    """The properties of a collection with this state."""
    return {_PROPERTY: state.model_dump_json()}


def write_state(connection: Connection, collection: str, state: State) -> None:
    """Replace the state of a collection. Raises: EngineUnavailableError."""
    # Milvus 2.3 puts on disk what was there before an alteration, so it takes a second one for this
    # state to outlive the server.
    for _ in range(2):
        connection.call("alter_collection_properties", collection, state_properties(state))


class StateKeeper:
    """Lets threads of this process write one after the other, and refuses other processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._mark = new_mark()

    @contextlib.contextmanager
    def reading(self, alias: str) -> Iterator[tuple[str, State]]:
        """The state, while no other thread writes. Raises: GalleryBusyError, ..."""
        with self._lock:
            yield self._unclaimed(alias)

    @contextlib.contextmanager
    def writing(self, collection: str, before: State, during: State) -> Iterator[None]:
        """Leave our mark in the state, and take it away at the end.

        `during` is `before` with whatever the change adds to the state. Use inside `reading`.

        Raises: GalleryBusyError, if the state is no longer `before`.
        """
        marked = during.model_copy(update={"writer": self._mark, "since": time.time()})
        if self._unclaimed(collection)[1] != before:
            raise _busy(before.name)
        write_state(self._connection, collection, marked)
        if read_state(self._connection, collection)[1].writer != self._mark:
            raise _busy(before.name)
        changed = marked.changing or before.changing
        change = new_mark() if changed else marked.change
        free = {"writer": None, "changing": False, "change": change}
        try:
            with self._renewed(collection, marked):
                yield
        except BaseException:
            # The first error says more than a second one here.
            with contextlib.suppress(EngineUnavailableError):
                write_state(self._connection, collection, marked.model_copy(update=free))
            raise
        write_state(self._connection, collection, marked.model_copy(update=free))

    @contextlib.contextmanager
    def _renewed(self, collection: str, marked: State) -> Iterator[None]:
        done = threading.Event()

        def renew() -> None:
            while not done.wait(LEASE_S / 3):
                now = marked.model_copy(update={"since": time.time()})
                with contextlib.suppress(EngineUnavailableError):
                    write_state(self._connection, collection, now)

        thread = threading.Thread(target=renew, name="milvus-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _unclaimed(self, name: str) -> tuple[str, State]:
        collection, state = read_state(self._connection, name)
        # A mark of ours is left over, since no other thread of ours writes now.
        if state.is_held() and state.writer != self._mark:
            raise _busy(state.name)
        return collection, state


def _busy(name: str) -> GalleryBusyError:
    return GalleryBusyError(
        f"Another process is writing to gallery {name}. Try again when it has finished, at the "
        f"latest {LEASE_S:.0f} s after it was stopped."
    )
