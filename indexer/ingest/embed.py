"""Stream images through an embedder: read, preprocess and embed in threads, hand on the vectors."""

import contextlib
import hashlib
import json
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from embedder.errors import ImageError, SourceError
from embedder.preprocess import ImageLimits, read_header
from embedder.session import Embedder
from embedder.types import Embeddings
from indexer.folder.layout import disk_errors_explained
from indexer.index.machine import core_count
from indexer.ingest.sources import ANY_SIZE, Record, Source, check_names, read_image
from indexer.types import Progress

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS vectors (
    bundle_id TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    vector BLOB NOT NULL,
    PRIMARY KEY (bundle_id, sha256)
) STRICT, WITHOUT ROWID;
"""
_SELECT = """
SELECT sha256, vector FROM vectors
WHERE bundle_id = ? AND sha256 IN (SELECT value FROM json_each(?))
"""
_HAS_OTHERS = """
SELECT EXISTS (SELECT 1 FROM vectors WHERE bundle_id < ?1)
    OR EXISTS (SELECT 1 FROM vectors WHERE bundle_id > ?1)
"""

Known = Callable[[Sequence[str]], Collection[str]]
"""Of contents, by sha256, those whose vectors are kept already; called from many threads."""

_HELD_BYTES = 64 * 2**20  # of image files in one thread, until it is known which are new
_Result = TypeVar("_Result")

_EXAMPLES = 3


class WorkFile:
    """Vectors by the sha256 of the image, for one bundle; used from one thread.

    Raises: OSError, sqlite3.Error where nothing else is said.
    """

    def __init__(self, path: Path, bundle_id: str, dim: int) -> None:
        self._path = path
        self._bundle_id = bundle_id
        self._dim = dim
        self._connection = _connect(path)

    def known(self) -> set[str]:
        """sha256 of every image whose vector is there."""
        rows = self._connection.execute(
            "SELECT sha256 FROM vectors WHERE bundle_id = ? AND length(vector) = ?",
            (self._bundle_id, 4 * self._dim),
        )
        return {sha256 for (sha256,) in rows}

    def add(self, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        """Keep vectors (D,) under the sha256 of their images; they survive `kill -9`.

        Raises: GalleryError if they cannot be written.
        """
        rows = [(self._bundle_id, key, vector.tobytes()) for key, vector in vectors.items()]
        with disk_errors_explained(self._path.parent), self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)

    def vectors(self, sha256s: Sequence[str]) -> Embeddings:
        """The vectors (N, D) of known images, in the order asked for."""
        rows = self._connection.execute(_SELECT, (self._bundle_id, json.dumps(list(set(sha256s)))))
        found = dict(rows.fetchall())
        return np.stack([np.frombuffer(found[sha256], np.float32) for sha256 in sha256s])

    def close(self) -> None:
        """Close and keep the file."""
        self._connection.close()

    def remove(self) -> None:
        """Close and drop the vectors of this bundle, once they are published.

        The file goes too, unless it holds the vectors of a build with another bundle.
        """
        [(is_shared,)] = self._connection.execute(_HAS_OTHERS, (self._bundle_id,))
        if is_shared:
            with self._connection:
                self._connection.execute(
                    "DELETE FROM vectors WHERE bundle_id = ?", (self._bundle_id,)
                )
        self.close()
        if not is_shared:
            _delete(self._path)


def _connect(path: Path) -> sqlite3.Connection:
    connection = _opened(path)
    if connection is None:
        # The file only saves time: a damaged one is dropped and its images are embedded again.
        _delete(path)
        connection = sqlite3.connect(path)
        connection.executescript(_SCHEMA)
    return connection


def _opened(path: Path) -> sqlite3.Connection | None:
    connection = sqlite3.connect(path)
    try:
        connection.executescript(_SCHEMA)
        if connection.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return connection
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError:
        pass
    connection.close()
    return None


def _delete(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        with contextlib.suppress(FileNotFoundError):
            (path.parent / name).unlink()


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    """How a build uses the machine; `workers` = 0 takes every core it may use."""

    batch_size: int = 32
    workers: int = 0
    max_bytes: int = ImageLimits().max_bytes

    @property
    def worker_count(self) -> int:
        """The number of threads."""
        return self.workers or core_count()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one record: its content, or the reason why it cannot be used."""

    record: Record
    sha256: str = ""
    format: str = ""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """A batch: its outcomes, and the vectors (D,) that were made for it, by sha256.

    The vector of a copy may come in another batch, before this one or after it.
    """

    outcomes: Sequence[Outcome]
    vectors: Mapping[str, NDArray[np.float32]]


@dataclass(slots=True)
class _Batch:
    outcomes: list[Outcome] = field(default_factory=list)
    sha256s: list[str] = field(default_factory=list)
    tensors: list[NDArray[np.uint8]] = field(default_factory=list)


def embedded_batches(
    source: Source, embedder: Embedder, known: Known, settings: EmbedSettings
) -> contextlib.closing[Generator[Embedded, None, None]]:
    """Every record of the source, in its order; no content is embedded twice, none that is known.

    Close it, as a context manager, to stop the threads. Raises, while it is read: BundleError, and
    what `known` raises.
    """
    claims = _Claims(known)

    def run(records: Sequence[Record]) -> Embedded:
        batch = _read_batch(source, records, embedder, claims, settings.max_bytes)
        if not batch.tensors:
            return Embedded(batch.outcomes, {})
        vectors = embedder.embed(np.stack(batch.tensors))
        return Embedded(batch.outcomes, dict(zip(batch.sha256s, vectors, strict=True)))

    return contextlib.closing(_in_order(run, source.records, settings))


def embed_source(
    source: Source,
    embedder: Embedder,
    work: WorkFile,
    settings: EmbedSettings,
    on_progress: Progress | None = None,
) -> list[Outcome]:
    """Put the vector of every readable image into `work`; outcomes come in the source's order.

    Images whose content is in `work` already, or came before, are not embedded again.

    Raises: BundleError, GalleryError.
    """
    outcomes: list[Outcome] = []
    with embedded_batches(source, embedder, work.known().intersection, settings) as batches:
        for batch in batches:
            work.add(batch.vectors)
            outcomes += batch.outcomes
            if on_progress is not None:
                on_progress(len(batch.outcomes))
    return _with_failures_of_copies(outcomes)


def _with_failures_of_copies(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Identical bytes are tried once; if that failed, every copy of them failed."""
    failures = {o.sha256: o.failure for o in outcomes if o.sha256 and o.failure}
    return [replace(o, failure=o.failure or failures.get(o.sha256)) for o in outcomes]


def _in_order(
    run: Callable[[Sequence[Record]], _Result], records: Sequence[Record], settings: EmbedSettings
) -> Generator[_Result, None, None]:
    """`run` on each batch of records in threads; results in order, a bounded number ahead."""
    pool = ThreadPoolExecutor(settings.worker_count, thread_name_prefix="embed")
    pending: deque[Future[_Result]] = deque()
    try:
        for start in range(0, len(records), settings.batch_size):
            pending.append(pool.submit(run, records[start : start + settings.batch_size]))
            if len(pending) > 2 * settings.worker_count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_batch(
    source: Source,
    records: Sequence[Record],
    embedder: Embedder,
    claims: "_Claims",
    max_bytes: int,
) -> _Batch:
    batch = _Batch()
    for files in _files(source, records, max_bytes):
        fresh = claims.take([outcome.sha256 for outcome, _ in files if outcome.sha256])
        for outcome, data in files:
            if outcome.failure is None:
                try:
                    if outcome.sha256 in fresh:
                        fresh.remove(outcome.sha256)  # a copy in the same batch
                        batch.tensors.append(embedder.preprocess(data))
                        batch.sha256s.append(outcome.sha256)
                    outcome = replace(outcome, format=read_header(data, ANY_SIZE).format)
                except ImageError as error:
                    outcome = replace(outcome, failure=str(error))
            batch.outcomes.append(outcome)
    return batch


def _files(
    source: Source, records: Sequence[Record], max_bytes: int
) -> Iterator[list[tuple[Outcome, bytes]]]:
    """Records and their content, in portions of a bounded size."""
    files: list[tuple[Outcome, bytes]] = []
    held_bytes = 0
    for record in records:
        files.append(_file(source, record, max_bytes))
        held_bytes += len(files[-1][1])
        if held_bytes >= _HELD_BYTES:
            yield files
            files, held_bytes = [], 0
    yield files


def _file(source: Source, record: Record, max_bytes: int) -> tuple[Outcome, bytes]:
    try:
        check_names(record)
        data = read_image(source.root, record.path, max_bytes)
    except (ImageError, SourceError, OSError) as error:
        return Outcome(record, failure=_reason(error)), b""
    return Outcome(record, sha256=hashlib.sha256(data).hexdigest()), data


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _Claims:
    """Contents that are known or taken by a thread."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    def take(self, sha256s: Sequence[str]) -> set[str]:
        """Those that this caller is the first to take, and that are not known."""
        with self._lock:
            fresh = set(sha256s) - self._taken
            self._taken |= fresh
        return fresh.difference(self._known(sorted(fresh))) if fresh else fresh


class Failure(BaseModel):
    """An image that was left out, and why."""

    model_config = ConfigDict(frozen=True)

    key: str
    path: str
    reason: str


def failures_of(outcomes: Iterable[Outcome]) -> tuple[Failure, ...]:
    """One for each record that cannot be used."""
    return tuple(
        Failure(key=o.record.key, path=_shown(o.record.path), reason=o.failure)
        for o in outcomes
        if o.failure is not None
    )


def refuse_unreadable(source: Source, failures: Sequence[Failure]) -> None:
    """Raises: SourceError if not one record of the source could be used."""
    if len(failures) < len(source.records):
        return
    examples = "; ".join(f"{f.key}: {f.reason}" for f in failures[:_EXAMPLES])
    raise SourceError(
        f"None of the {len(failures):,} images of the {source.description} can be read. "
        f"The first of them: {examples} Check the folder and the paths in the list."
    )


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()
