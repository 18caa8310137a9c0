"""Stream images through an embedder: read, preprocess and embed in threads, hand on the vectors.

Each thread takes a batch from its files to its vectors, so all cores work with an embedder that
uses one thread a call, and memory holds a few batches whatever the number of images.
"""

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ImageError, SourceError
from embedder.preprocess import ImageLimits, read_header
from embedder.session import Embedder
from indexer.index.cores import core_count
from indexer.ingest.sources import ANY_SIZE, Record, Source, check_names, read_image
from indexer.ingest.work import WorkFile
from indexer.types import Progress

Known = Callable[[Sequence[str]], Collection[str]]
"""Of contents, by sha256, those whose vectors are kept already; called from many threads."""

_HELD_BYTES = 64 * 2**20  # of image files in one thread, until it is known which are new
_Result = TypeVar("_Result")


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
