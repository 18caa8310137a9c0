"""Stream images through an embedder: read, preprocess and embed in threads, keep the vectors.

Each thread takes a batch from its files to its vectors, so all cores work with an embedder that
uses one thread a call, and memory holds a few batches whatever the number of images.
"""

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ImageError, SourceError
from embedder.preprocess import ImageLimits, read_header
from embedder.session import Embedder
from indexer.cores import core_count
from indexer.images import ANY_SIZE, Record, Source, read_image
from indexer.work import WorkFile

Progress = Callable[[int], None]
"""Called with the number of images that were finished since the last call."""

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


@dataclass(slots=True)
class _Batch:
    outcomes: list[Outcome] = field(default_factory=list)
    sha256s: list[str] = field(default_factory=list)
    tensors: list[NDArray[np.uint8]] = field(default_factory=list)


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
    claims = _Claims(work.known())
    outcomes: list[Outcome] = []

    def run(records: Sequence[Record]) -> tuple[list[Outcome], dict[str, NDArray[np.float32]]]:
        batch = _read_batch(source, records, embedder, claims, settings.max_bytes)
        if not batch.tensors:
            return batch.outcomes, {}
        vectors = embedder.embed(np.stack(batch.tensors))
        return batch.outcomes, dict(zip(batch.sha256s, vectors, strict=True))

    with contextlib.closing(_in_order(run, source.records, settings)) as results:
        for found, vectors in results:
            work.add(vectors)
            outcomes += found
            if on_progress is not None:
                on_progress(len(found))
    return _with_failures_of_copies(outcomes)


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
    for record in records:
        outcome = Outcome(record)
        try:
            data = read_image(source.root, record.path, max_bytes)
            outcome = replace(outcome, sha256=hashlib.sha256(data).hexdigest())
            if claims.take(outcome.sha256):
                batch.tensors.append(embedder.preprocess(data))
                batch.sha256s.append(outcome.sha256)
            outcome = replace(outcome, format=read_header(data, ANY_SIZE).format)
        except (ImageError, SourceError, OSError) as error:
            outcome = replace(outcome, failure=_reason(error))
        batch.outcomes.append(outcome)
    return batch


def _with_failures_of_copies(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Identical bytes are tried once; if that failed, every copy of them failed."""
    failures = {o.sha256: o.failure for o in outcomes if o.sha256 and o.failure}
    return [replace(o, failure=o.failure or failures.get(o.sha256)) for o in outcomes]


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _Claims:
    """Contents that are embedded or taken by a thread."""

    def __init__(self, known: set[str]) -> None:
        self._taken = known
        self._lock = threading.Lock()

    def take(self, sha256: str) -> bool:
        """Whether this caller is the first."""
        with self._lock:
            is_first = sha256 not in self._taken
            self._taken.add(sha256)
            return is_first
