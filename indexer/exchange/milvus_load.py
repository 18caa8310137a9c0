"""Load rows into a new collection: with several processes, and resumable.

The entries are split into parts of equal size. A property of the collection stores the number of
loaded parts and their hash. A resumed load of the same content skips these parts and upserts the
others, because the interrupted load may have sent some of them.
"""

import hashlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import EngineUnavailableError, InvalidParameterError
from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.entries import checked_vectors, learn_types
from kinlens.indexer.exchange.milvus_collection import Collection, Connection, batches, row_of
from kinlens.indexer.exchange.milvus_index import HeldOut
from kinlens.indexer.types import Entry, Progress
from kinlens.values import AttributeType, AttributeValue

PART = 8_192
_PARALLEL_FROM = 4 * PART  # below this number of items, processes take longer to start than to load
_MAX_PROCESSES = 8
_QUEUED_PARTS = 2  # per process, which limits memory
_NOTED_S = 2.0


class StaleError(Exception):
    """An unfinished collection has other content."""


def refuse_lists(key: str, attributes: Mapping[str, object]) -> None:
    """Raise InvalidParameterError for list values, on which Milvus has no range filters."""
    for name, value in attributes.items():
        if isinstance(value, list | tuple):
            raise InvalidParameterError(
                f"Attribute {name!r} of {key!r:.200} has several values, which a gallery on Milvus "
                "does not store. Give it one value, or import the gallery into a folder."
            )


def load(
    made: Collection,
    entries: Iterable[Entry],
    held_out: HeldOut | None,
    token: str,
    processes: int,
    is_resumed: bool,
    on_progress: Progress,
) -> tuple[int, dict[str, AttributeType]]:
    """Insert all entries except the held-out ones into the collection `made`.

    Returns the number of entries and the types of attributes. `is_resumed` means that some rows may
    already be stored.

    Raises: StaleError if `made` has other content; InvalidParameterError for an invalid entry or a
        repeated key; EngineUnavailableError.
    """
    with ExitStack() as running:
        send = _sender(running, made, token, processes)
        work = _Load(made, held_out, send, processes * _QUEUED_PARTS + 1, is_resumed, on_progress)
        try:
            for part in batches(entries, PART):
                work.add(part)
            work.finish()
        except BrokenProcessPool as error:
            raise EngineUnavailableError(
                "A loading process was killed, perhaps for lack of memory. To resume, run the "
                "import again."
            ) from error
    return work.count, work.kinds


class _Load:
    """The load of a collection, part by part."""

    def __init__(
        self,
        made: Collection,
        held_out: HeldOut | None,
        send: "_Send",
        in_flight: int,
        is_resumed: bool,
        on_progress: Progress,
    ) -> None:
        # Two inserts with one key would create two rows.
        self._method = "upsert" if is_resumed else "insert"
        self.kinds: dict[str, AttributeType] = {}
        self._made, self._held_out, self._send = made, held_out, send
        self._in_flight, self._on_progress = in_flight, on_progress
        self._hashes: list[np.ndarray] = []
        excluded = sorted(held_out.keys) if held_out is not None else []
        self._digest = hashlib.sha256(repr(excluded).encode())
        self._done, self._begun = made.loaded()
        self._noted_at = time.monotonic()
        self._sent: deque[tuple[int, int, str, Future[None] | None]] = deque()
        self._number = 0

    @property
    def count(self) -> int:
        """The number of entries so far."""
        return sum(map(len, self._hashes))

    def add(self, part: Sequence[Entry]) -> None:
        """Check a part, and send it unless it is already loaded. Raises: StaleError."""
        vectors = self._checked(part)
        excluded = frozenset() if self._held_out is None else self._held_out.keys
        is_included = np.array([entry.key not in excluded for entry in part])
        if self._held_out is not None:
            self._held_out.see(vectors[is_included])
        number, state, future = self._number, self._digest.hexdigest(), None
        if number >= self._done:
            chosen = [
                entry for entry, is_chosen in zip(part, is_included, strict=True) if is_chosen
            ]
            future = self._send(chosen, vectors[is_included], self._method)
        elif number == self._done - 1 and state != self._begun:
            raise StaleError
        self._number += 1
        self._sent.append((number, len(part), state, future))
        if len(self._sent) >= self._in_flight:
            self._wait()

    def finish(self) -> None:
        """Wait for all parts. Raises: StaleError, InvalidParameterError."""
        while self._sent:
            self._wait()
        if self._number < self._done:
            raise StaleError
        found = np.concatenate([np.empty(0, np.int64), *self._hashes])
        if len(np.unique(found)) < len(found):
            raise InvalidParameterError("A key occurs twice. Give each item its own key.")

    def _checked(self, part: Sequence[Entry]) -> Embeddings:
        vectors = checked_vectors(part, self._made.facts.dim)
        for entry in part:
            refuse_lists(entry.key, entry.attributes)
            learn_types(self.kinds, entry.key, entry.attributes)
            facts = (entry.key, entry.sha256, entry.path, entry.format, dict(entry.attributes))
            self._digest.update(repr(facts).encode())
        self._digest.update(vectors.tobytes())
        self._hashes.append(np.array([hash(entry.key) for entry in part], np.int64))
        return vectors

    def _wait(self) -> None:
        number, rows, state, future = self._sent.popleft()
        if future is not None:
            future.result()
            if time.monotonic() - self._noted_at > _NOTED_S:
                self._made.note_loaded(number + 1, state)
                self._noted_at = time.monotonic()
                crash_point("milvus: part noted")
        self._on_progress(rows)


_Send = Callable[[Sequence[Entry], Embeddings, str], "Future[None]"]
"""Sends a part with the method insert or upsert."""


def _sender(running: ExitStack, made: Collection, token: str, processes: int) -> _Send:
    """A function that sends a part: in this process, or in a pool of `processes`."""
    page = made.page_rows
    if processes == 1:

        def send_now(part: Sequence[Entry], vectors: Embeddings, method: str) -> Future[None]:
            future: Future[None] = Future()
            _send(made.connection, made.collection, page, method, _columns(part), vectors)
            future.set_result(None)
            return future

        return send_now
    # gRPC does not survive a fork.
    pool = running.enter_context(
        ProcessPoolExecutor(
            processes,
            multiprocessing.get_context("spawn"),
            initializer=_connect,
            initargs=(made.connection.uri, token),
        )
    )
    running.callback(partial(pool.shutdown, wait=False, cancel_futures=True))

    def submit(part: Sequence[Entry], vectors: Embeddings, method: str) -> Future[None]:
        work = (made.collection, page, method, _columns(part), vectors)
        return pool.submit(_send_from_process, *work)

    return submit


def processes_for(count: int, uri: str) -> int:
    """The number of processes to load `count` items: one per core, up to 8. Only one for few items,
    or if the server is on this machine and needs the cores.
    """
    is_here = urlsplit(uri).hostname in ("localhost", "127.0.0.1", "::1")
    return 1 if count < _PARALLEL_FROM or is_here else max(1, min(_MAX_PROCESSES, core_count()))


_Columns = list[tuple[str, str, str, str, dict[str, AttributeValue]]]


def _columns(part: Sequence[Entry]) -> _Columns:
    return [(e.key, e.sha256, e.path, e.format, dict(e.attributes)) for e in part]


_connections: list[Connection] = []


def _connect(uri: str, token: str) -> None:
    _connections[:] = [Connection(uri, token, timeout_s=60.0)]


def _send_from_process(
    collection: str, page: int, method: str, columns: _Columns, vectors: Embeddings
) -> None:
    _send(_connections[0], collection, page, method, columns, vectors)


def _send(
    connection: Connection,
    collection: str,
    page: int,
    method: str,
    columns: _Columns,
    vectors: Embeddings,
) -> None:
    for start in range(0, len(columns), page):
        rows = [
            row_of(Entry(key, vector, sha256, attributes, path, kind), vector)
            for (key, sha256, path, kind, attributes), vector in zip(
                columns[start : start + page], vectors[start : start + page], strict=True
            )
        ]
        connection.call(method, collection, rows)


def check_count(made: Collection, count: int) -> None:
    """Raise EngineUnavailableError if the number of rows on the server is not `count`."""
    found = made.strong().count()
    if found != count:
        raise EngineUnavailableError(
            f"Milvus at {made.connection.uri} has {found:,} items, but {count:,} were sent. "
            "Run the import again."
        )
