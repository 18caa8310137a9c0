"""Stream images through an embedder: threads read, preprocess and embed them in batches."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.errors import (
    GalleryError,
    ImageError,
    InvalidParameterError,
    SourceError,
    UnreachableError,
)
from kinlens.embedder.machine import core_count
from kinlens.embedder.preprocess import ImageLimits, read_header
from kinlens.embedder.session import Embedder
from kinlens.indexer.entries import Entry
from kinlens.indexer.images import ANY_SIZE
from kinlens.indexer.ingest.sources import Record, Source, check_names

Known = Callable[[Sequence[str]], Collection[str]]
"""Returns the contents, by sha256, that already have a vector. Called from several threads."""

_BUFFER_BYTES = 64 * 2**20  # image files per thread that wait for the lookup of known content
_EXAMPLES = 3
_PRINTED = 10


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    """Settings of a build; `workers` is the number of threads, 0 for one per available core."""

    batch_size: int = 32
    workers: int = 0
    max_bytes: int = ImageLimits().max_bytes

    def __post_init__(self) -> None:
        """Raises: InvalidParameterError."""
        limits: dict[str, tuple[Any, int]] = {
            "batch_size": (self.batch_size, 1),
            "workers": (self.workers, 0),
        }
        for name, (value, least) in limits.items():
            if not isinstance(value, int) or value < least:
                raise InvalidParameterError(
                    f"{name} = {value!r:.80} must be a whole number of at least {least}."
                )

    @property
    def worker_count(self) -> int:
        """The number of threads."""
        return self.workers or core_count()


@dataclass(frozen=True, slots=True)
class Batch:
    """Records with their hashes and formats, or failures, and the new vectors (D,) by sha256."""

    records: Sequence[Record]
    vectors: Mapping[str, NDArray[np.float32]]


def embedded_batches(
    source: Source, embedder: Embedder, known: Known, settings: EmbedSettings
) -> contextlib.closing[Generator[Batch, None, None]]:
    """Process all records of the source in order; threads work a limited number of batches ahead.

    Content that is `known` is not embedded again, but copies in concurrent batches may be. Use it
    as a context manager, which stops the threads. Iteration raises BundleError, UnreachableError
    and the errors of `known` and of the source.
    """

    def batches() -> Generator[Batch, None, None]:
        ahead = 2 * settings.worker_count
        records = source.records()
        pending: deque[Future[Batch]] = deque()
        pool = ThreadPoolExecutor(settings.worker_count, thread_name_prefix="embed")
        try:
            while part := list(islice(records, settings.batch_size)):
                pending.append(
                    pool.submit(embedded_batch, source, part, embedder, known, settings.max_bytes)
                )
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    return contextlib.closing(batches())


def embedded_batch(
    source: Source,
    records: Sequence[Record],
    embedder: Embedder,
    known: Known,
    max_bytes: int = ImageLimits().max_bytes,
) -> Batch:
    """Process records as one batch.

    Raises: BundleError, UnreachableError, and the errors of `known`.
    """
    read: list[Record] = []
    tensors: dict[str, NDArray[np.uint8]] = {}
    for files in _files(source, records, known, max_bytes):
        new = {record.sha256 for record, _ in files if not record.failure} - tensors.keys()
        new.difference_update(known(sorted(new)))
        for record, data in files:
            if not record.failure:
                try:
                    if record.sha256 in new and record.sha256 not in tensors:
                        tensors[record.sha256] = embedder.preprocess(data)
                    if not record.format:
                        record = replace(record, format=read_header(data, ANY_SIZE).format)
                except ImageError as error:
                    record = replace(record, failure=str(error))
            read.append(record)
    if not tensors:
        return Batch(read, {})
    made = embedder.embed(np.stack([*tensors.values()]))
    vectors = dict(zip(tensors, made, strict=True))
    # A missing image is not a failure if another record has the same content.
    read = [replace(one, failure="") if one.sha256 in vectors else one for one in read]
    return Batch(read, vectors)


def _files(
    source: Source, records: Sequence[Record], known: Known, max_bytes: int
) -> Iterator[list[tuple[Record, bytes]]]:
    """Records and their content, in portions of about `_BUFFER_BYTES`."""
    reusable = known([record.sha256 for record in records if record.sha256])
    files: list[tuple[Record, bytes]] = []
    buffered_bytes = 0
    for record in records:
        if record.sha256 and record.sha256 in reusable:
            files.append((record, b""))
        else:
            files.append(_file(source, record, max_bytes))
        buffered_bytes += len(files[-1][1])
        if buffered_bytes >= _BUFFER_BYTES:
            yield files
            files, buffered_bytes = [], 0
    yield files


def _file(source: Source, record: Record, max_bytes: int) -> tuple[Record, bytes]:
    try:
        check_names(record)
        data = source.read_image(record, max_bytes)
        sha256 = hashlib.sha256(data).hexdigest()
        if record.sha256 not in ("", sha256):
            raise SourceError("The image was changed after it was indexed. Add it again.")
    except UnreachableError:
        raise  # no image is at fault: a gallery without the others would look complete
    except (ImageError, GalleryError, OSError) as error:
        return replace(record, failure=reason_of(error)), b""
    return replace(record, sha256=sha256), data


def reason_of(error: Exception) -> str:
    """Why an image cannot be used."""
    return getattr(error, "strerror", None) or str(error)


class Failure(BaseModel, frozen=True):
    """An image that was skipped, and why."""

    key: str
    path: str
    reason: str


def failure_of(record: Record) -> Failure:
    """The report of a record that cannot be used."""
    path = record.path.encode("utf-8", "backslashreplace").decode()
    return Failure(key=record.key, path=path, reason=record.failure)


def faults_of(source: Source) -> tuple[Failure, ...]:
    """The files that a source omits although they should be images."""
    return tuple(
        Failure(key=fault.path, path=fault.path, reason=fault.reason)
        for fault in source.omitted.faults
    )


def entry_of(record: Record, vector: NDArray[np.float32]) -> Entry:
    """The item to store for a usable record."""
    return Entry(record.key, vector, record.sha256, record.attributes, record.path, record.format)


def failure_lines(
    failures: Sequence[Failure], found: int, where: str = "(--json lists all of them)"
) -> Iterator[str]:
    """The first failures on one line each; `where` describes the location of the full list."""
    if not failures:
        return
    yield f"Skipped {len(failures):,} of {found:,} images:"
    for failure in failures[:_PRINTED]:
        yield f"  {failure.key}: {failure.reason}"
    if len(failures) > _PRINTED:
        yield f"  ... and {len(failures) - _PRINTED:,} more {where}"


def refuse_unreadable(description: str, found: int, failures: Sequence[Failure]) -> None:
    """Raise SourceError if all `found` records of the source failed."""
    if len(failures) < found:
        return
    examples = "; ".join(f"{f.key}: {f.reason}" for f in failures[:_EXAMPLES])
    raise SourceError(
        f"None of the {len(failures):,} images of the {description} can be read. "
        f"The first failures: {examples} Check the folder and the paths in the list."
    )
