"""The models that are served: a session for each bundle, and the way from images to vectors."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from kinlens.embedder.calibration import Calibration
from kinlens.embedder.errors import BundleError, SearchError
from kinlens.embedder.preprocess import Box
from kinlens.embedder.session import Embedder
from kinlens.embedder.types import Embeddings, Images
from kinlens.service.concurrency import SingleFlight
from kinlens.service.encoding.cache import (
    Cache,
    Lookup,
    decode_vector,
    embedding_key,
    encode_vector,
)
from kinlens.service.encoding.decoders import Decoder, NoProcessError, Vector
from kinlens.service.encoding.threads import BulkKind, SearchThreads
from kinlens.service.encoding.workers import Workers
from kinlens.service.observe.tracing import span


@dataclass(frozen=True, slots=True)
class View:
    """A part of an encoded image, the whole without `box`; `digest` is the sha256 of the image.

    `number` counts the images of a query, from 1.
    """

    data: bytes
    digest: str
    box: Box | None = None
    number: int = 1


Guard = Callable[[View], AbstractContextManager[object]]
"""A context for the work on a view, as for a check before it or a better error."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds in each stage; 0 for one that a cache made unnecessary."""

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


class Batcher:
    """Calls `embed` for several threads, at most `at_once` times at the same time.

    A thread that finds all calls taken waits; whoever comes next takes what waits, up to
    `batch_size` images, in one call. A call that fails is repeated for each of its callers, so
    that only the bad image fails. `on_batch` is told the size of each call.
    """

    def __init__(
        self,
        embed: Callable[[Images], Embeddings],
        batch_size: int,
        at_once: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._embed = embed
        self._batch_size = batch_size
        self._on_batch = on_batch
        self._calls = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Images, Future[Embeddings]]] = deque()

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return len(self._waiting)

    def embed(self, images: Images) -> Embeddings:
        """The vectors (N, D) of images (N, 3, S, S).

        Raises: BundleError, SearchError, whatever `embed` raises.
        """
        step = self._batch_size
        parts = [self._part(images[n : n + step]) for n in range(0, len(images), step)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, images: Images) -> Embeddings:
        mine: Future[Embeddings] = Future()
        with self._lock:
            self._waiting.append((images, mine))
        with self._calls:
            while not mine.done() and (batch := self._take()):
                self._run(batch)
        return mine.result()

    def _take(self) -> list[tuple[Images, Future[Embeddings]]]:
        batch = []
        with self._lock:
            room = self._batch_size
            while self._waiting and len(self._waiting[0][0]) <= room:
                batch.append(self._waiting.popleft())
                room -= len(batch[-1][0])
        return batch

    def _run(self, batch: Sequence[tuple[Images, Future[Embeddings]]]) -> None:
        try:
            vectors = self._checked([images for images, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:
                self._run([each])
        except BaseException as error:
            # Let through, SystemExit and its like would end more than this search.
            for _, future in batch:
                future.set_exception(SearchError(f"The model ended with {type(error).__name__}."))
        else:
            start = 0
            for images, future in batch:
                future.set_result(vectors[start : start + len(images)])
                start += len(images)

    def _checked(self, parts: list[Images]) -> Embeddings:
        images = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._on_batch(len(images))
        vectors = self._embed(images)
        if len(vectors) != len(images):
            raise BundleError(
                f"The model gave {len(vectors)} vectors for {len(images)} images. "
                "Export it again with a free batch dimension."
            )
        return vectors


class Encoder:
    """Turns images into vectors, and caches them.

    Where several calls run at once on a CPU, `workers` decode and embed. Otherwise the decoder of
    the search thread decodes and this process embeds. A GPU gets batches; a call that is alone on a
    CPU gets all cores. The arguments from `search_threads` to `workers` configure the `Batcher`.
    """

    def __init__(
        self,
        embedder: Embedder,
        cache: Cache,
        search_threads: SearchThreads,
        batch_size: int,
        at_once: int,
        on_batch: Callable[[int], None],
        workers: Workers | None = None,
    ) -> None:
        self._embedder = embedder
        self._cache = cache
        self._search_threads = search_threads
        self._workers = workers
        self._on_batch = on_batch

        def embed(images: Images) -> Embeddings:  # no method: a cycle would keep the session alive
            """With all cores where nothing else wants one."""
            return (embedder.embed_alone if search_threads.is_alone else embedder.embed)(images)

        self._batcher = Batcher(embed, batch_size, at_once, on_batch)

    def lookup(self, view: View) -> Lookup[Vector]:
        """Where a cache may have the vector of `view`."""
        embedder, dim = self._embedder, self._embedder.dim
        key = embedding_key(embedder.bundle_id, embedder.mode, view.digest, view.box)
        return Lookup("embedding", key, lambda value: decode_vector(value, dim))

    def decode(self, decoder: Decoder, view: View) -> NDArray[np.uint8]:
        """Its pixels (3, S, S). Raises: ImageError, InvalidParameterError, SearchError."""
        embedder = self._embedder
        return decoder.decode(view.data, embedder.preprocessing, embedder.limits, view.box)

    def compute(
        self, decoder: Decoder, views: Sequence[View], guard: Guard = nullcontext
    ) -> tuple[Embeddings, Stages]:
        """The vectors (N, D) of `views`, at least one, in this thread; a cache gets them. The
        work on each view is done in the context of `guard`.

        Raises: ImageError, SearchError, BundleError.
        """
        vectors, stages = self._computed_by_workers(decoder, views, guard) or self._computed_here(
            decoder, views, guard
        )
        for view, vector in zip(views, vectors, strict=True):
            self._cache.set(self.lookup(view).key, encode_vector(vector))
        return vectors, stages

    def start_workers(self, image: bytes, vector: Vector) -> None:
        """Start the workers, if there are to be any; the model gives `vector` for `image`."""
        if self._workers is not None:
            self._workers.start(image, vector, self._search_threads.layers)

    def _computed_by_workers(
        self, decoder: Decoder, views: Sequence[View], guard: Guard
    ) -> tuple[Embeddings, Stages] | None:
        """As `compute`; None where this process is the better one."""
        workers = self._workers
        if workers is None or not workers.is_ready:
            return None
        if workers.gains_alone and self._search_threads.is_alone:
            return None
        vectors, decode_ms, started = [], 0.0, time.perf_counter()
        with span("embed"):
            for view in views:
                try:
                    with guard(view):
                        vector, took_ms = workers.embed(view.data, view.box, decoder)
                except NoProcessError:
                    if workers.owns(decoder):
                        raise  # the search thread repeats the call with another decoder
                    return None
                vectors.append(vector)
                decode_ms += took_ms
                self._on_batch(1)
        total_ms = (time.perf_counter() - started) * 1e3
        return np.stack(vectors), Stages(decode_ms, total_ms - decode_ms)

    def _computed_here(
        self, decoder: Decoder, views: Sequence[View], guard: Guard
    ) -> tuple[Embeddings, Stages]:
        started = time.perf_counter()
        decoded_views = []
        with span("decode"):
            for view in views:
                with guard(view):
                    decoded_views.append(self.decode(decoder, view))
        images = np.stack(decoded_views)
        decoded = time.perf_counter()
        with span("embed"):
            vectors = self._batcher.embed(images)
        embedded = time.perf_counter()
        return vectors, Stages((decoded - started) * 1e3, (embedded - decoded) * 1e3)

    async def encode(self, data: bytes, digest: str, kind: BulkKind = "write") -> Vector:
        """The vector (D,) of the image `data` with sha256 `digest`, once a search thread is free.

        Calls share the bulk limit of their kind.

        Raises: ImageError, SearchError, BundleError.
        """
        view = View(data, digest)

        def work(decoder: Decoder) -> Vector:
            vector = self._cache.get(self.lookup(view))
            if vector is None:
                vector = self.compute(decoder, [view])[0][0]
            return vector

        async with self._search_threads.bulk_limit(kind):
            return await self._search_threads.run(work, patient=True)

    async def infer(self, data: bytes) -> Vector:
        """The vector (D,) of an image without any cache and ahead of all that waits."""

        def work(decoder: Decoder) -> Vector:
            image = self.decode(decoder, View(data, ""))
            vector: Vector = self._batcher.embed(image[np.newaxis])[0]
            return vector

        return await self._search_threads.run(work, urgent=True, patient=True)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A bundle that runs, and the image that it is checked with: its vector at the warm-up (D,)."""

    embedder: Embedder
    encoder: Encoder
    known_image: bytes = field(repr=False)
    known_vector: Vector = field(repr=False)

    @property
    def bundle_id(self) -> str:
        """The bundle that it runs."""
        return self.embedder.bundle_id

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.embedder.dim

    @property
    def provider(self) -> str:
        """What runs it."""
        return self.embedder.provider

    @property
    def calibration(self) -> Calibration | None:
        """From a score to a probability, if the bundle has it."""
        return self.embedder.calibration

    @property
    def no_calibration(self) -> str | None:
        """Why the bundle has none."""
        return self.embedder.no_calibration


class Models:
    """Opens a model when a gallery needs it, and lets go of it when none does any more."""

    def __init__(
        self, find: Callable[[str, str], Embedder], connect: Callable[[Embedder], Encoder]
    ) -> None:
        """`find` opens the embedder of a bundle for a gallery whose vectors have a precision; it
        may block. Raises: BundleError.
        """
        self._find = find
        self._connect = connect
        self._opened: dict[str, Embedder] = {}
        self._models: dict[str, Model] = {}
        self._flights: SingleFlight[Model] = SingleFlight()

    def running(self) -> list[Model]:
        """Every model that has been started."""
        return list(self._models.values())

    def open(self, bundle_id: str, precision: str = "fp32") -> Embedder:
        """Open the embedder of a bundle before the event loop runs; `get` starts it. `precision` is
        that of the gallery that will be searched with it.

        Raises: BundleNotFoundError, BundleError.
        """
        if bundle_id not in self._opened:
            self._opened[bundle_id] = self._find(bundle_id, precision)
        return self._opened[bundle_id]

    async def get(self, bundle_id: str, precision: str = "fp32") -> Model:
        """The model of a bundle, warm; it stays as long as a gallery uses it. `precision` is that
        of the first gallery.

        Raises: BundleNotFoundError, BundleError.
        """
        model = self._models.get(bundle_id)
        if model is None:
            start = partial(self._start, bundle_id, precision)
            model = await self._flights.run(bundle_id, start)
        return model

    async def keep(self, bundle_ids: Collection[str]) -> None:
        """Let go of every other model and its memory, once the last search in it has ended."""
        for bundle_id in self._models.keys() - set(bundle_ids):
            structlog.get_logger().info("model stopped", bundle_id=bundle_id)
        self._models = {n: model for n, model in self._models.items() if n in bundle_ids}

    async def _start(self, bundle_id: str, precision: str) -> Model:
        embedder = self._opened.pop(bundle_id, None)
        if embedder is None:
            embedder = await asyncio.to_thread(self._find, bundle_id, precision)
        encoder = self._connect(embedder)
        image = embedder.known_images()[0]
        model = Model(embedder, encoder, image, await encoder.infer(image))
        encoder.start_workers(image, model.known_vector)
        self._models[bundle_id] = model
        structlog.get_logger().info(
            "model started",
            bundle_id=bundle_id,
            provider=embedder.provider,
            engine=embedder.mode.engine,
            precision=embedder.mode.precision,
            precision_reason=embedder.precision_reason,
        )
        return model
