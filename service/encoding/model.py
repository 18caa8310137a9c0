"""The models that are served: one session for each bundle, and the embedding of images."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from kinlens.embedder.errors import BundleError, SearchError
from kinlens.embedder.preprocess import Box
from kinlens.embedder.session import ModelFacts
from kinlens.embedder.types import Embed, Embeddings, Images
from kinlens.service.concurrency import BulkKind, SearchThreads, SingleFlight, in_thread
from kinlens.service.encoding.cache import (
    Cache,
    Lookup,
    decode_vector,
    embedding_keys,
    encode_vector,
)
from kinlens.service.encoding.workers import Vector, Workers
from kinlens.service.observe.tracing import span


@dataclass(frozen=True, slots=True)
class View:
    """An encoded image, or its part in `box`. `digest` is the sha256 of the image, and `number` its
    position among the images of a query, from 1.
    """

    data: bytes
    digest: str
    box: Box | None = None
    number: int = 1


Guard = Callable[[View], AbstractContextManager[object]]
"""A context manager around the work on a view, for checks before it or better errors."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds in each stage; 0 for a stage that a cached value replaced."""

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


class Batcher:
    """Batches the images of several threads for `embed`, which runs one call at a time.

    While it runs, threads queue their images. The next one embeds up to `batch_size` queued images
    in one call. A call that fails is repeated for each caller, so only the bad image fails.
    `on_batch` is called with the size of each call.
    """

    def __init__(
        self,
        embed: Callable[[Images], Embeddings],
        batch_size: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._embed = embed
        self._batch_size = batch_size
        self._on_batch = on_batch
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Images, Future[Embeddings]]] = deque()

    @property
    def waiting(self) -> int:
        """Number of queued callers."""
        return len(self._waiting)

    def embed(self, images: Images) -> Embeddings:
        """The vectors (N, D) of images (N, 3, S, S).

        Raises: BundleError, SearchError; what `embed` raises.
        """
        step = self._batch_size
        parts = [self._part(images[n : n + step]) for n in range(0, len(images), step)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, images: Images) -> Embeddings:
        mine: Future[Embeddings] = Future()
        with self._lock:
            self._waiting.append((images, mine))
        with self._turn:
            while not mine.done() and (batch := self._take()):
                self._run(batch)
        return mine.result()

    def _take(self) -> list[tuple[Images, Future[Embeddings]]]:
        batch = []
        with self._lock:
            free = self._batch_size
            while self._waiting and len(self._waiting[0][0]) <= free:
                batch.append(self._waiting.popleft())
                free -= len(batch[-1][0])
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
            # SystemExit and the like must not end more than this search.
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


@dataclass(frozen=True, slots=True)
class Backend:
    """What runs a bundle: its workers, which decode. They also embed, unless `embed` does that in
    this process, as it must on a GPU.
    """

    facts: ModelFacts
    workers: Workers
    embed: Embed | None = None


class Encoder:
    """Turns images into vectors, and caches the vectors.

    `batch_size` bounds the batches of a model in this process, and `on_batch` is called with the
    size of each call of the model.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        search_threads: SearchThreads,
        batch_size: int,
        on_batch: Callable[[int], None],
    ) -> None:
        self.facts = backend.facts
        self.workers = backend.workers
        self._cache = cache
        self._search_threads = search_threads
        self._on_batch = on_batch
        self._key = embedding_keys(backend.facts.bundle_id, backend.facts.mode)
        self._decode_vector = partial(decode_vector, dim=backend.facts.dim)
        self._batcher: Batcher | None = None
        if backend.embed is not None:
            self._batcher = Batcher(backend.embed, batch_size, on_batch)

    def lookup(self, view: View) -> Lookup[Vector]:
        """The cache lookup for the vector of `view`."""
        return Lookup("embedding", self._key(view.digest, view.box), self._decode_vector)

    def decode(self, view: View) -> NDArray[np.uint8]:
        """The pixels (3, S, S) of `view`.

        Raises: ImageError, InvalidParameterError, SearchError.
        """
        facts = self.facts
        return self.workers.decode(view.data, facts.preprocessing, facts.limits, view.box)

    def compute(
        self, views: Sequence[View], guard: Guard = nullcontext
    ) -> tuple[Embeddings, Stages]:
        """Compute the vectors (N, D) of N > 0 `views`, several at the same time, and cache them.
        Each view is processed in the context of `guard`.

        Raises: ImageError, SearchError, BundleError.
        """
        vectors, stages = self._computed(views, guard)
        for view, vector in zip(views, vectors, strict=True):
            self._cache.set(self._key(view.digest, view.box), encode_vector(vector))
        return vectors, stages

    def _computed(self, views: Sequence[View], guard: Guard) -> tuple[Embeddings, Stages]:
        if self._batcher is None:
            return self._computed_by_workers(views, guard)
        started = time.perf_counter()

        def decode(view: View) -> NDArray[np.uint8]:
            with guard(view):
                return self.decode(view)

        with span("decode"):
            images = np.stack(self._search_threads.each(decode, views))
        decoded = time.perf_counter()
        with span("embed"):
            vectors = self._batcher.embed(images)
        embedded = time.perf_counter()
        return vectors, Stages((decoded - started) * 1e3, (embedded - decoded) * 1e3)

    def _computed_by_workers(
        self, views: Sequence[View], guard: Guard
    ) -> tuple[Embeddings, Stages]:
        facts, started, decode_ms = self.facts, time.perf_counter(), 0.0

        def embed(view: View) -> tuple[Vector, float]:
            with guard(view):
                return self.workers.embed(
                    view.data, facts.preprocessing, facts.limits, view.box, facts.dim
                )

        vectors = []
        with span("embed"):
            for vector, took_ms in self._search_threads.each(embed, views):
                vectors.append(vector)
                decode_ms += took_ms
                self._on_batch(1)
        total_ms = (time.perf_counter() - started) * 1e3
        decode_ms = min(decode_ms, total_ms)  # several images are decoded at the same time
        return np.stack(vectors), Stages(decode_ms, total_ms - decode_ms)

    async def encode(self, data: bytes, digest: str, kind: BulkKind = "write") -> Vector:
        """The vector (D,) of the image `data` with sha256 `digest`, as a bulk call of this `kind`.

        Raises: ImageError, SearchError, BundleError.
        """
        view = View(data, digest)

        def work() -> Vector:
            vector = self._cache.get(self.lookup(view))
            if vector is None:
                vector = self.compute([view])[0][0]
            return vector

        async with self._search_threads.bulk_limit(kind):
            return await self._search_threads.run(work, bulk=True)

    async def infer(self, data: bytes) -> Vector:
        """The vector (D,) of an image, computed without a cache and before all queued calls."""

        def work() -> Vector:
            vector: Vector = self._computed([View(data, "")], nullcontext)[0][0]
            return vector

        return await self._search_threads.run(work, urgent=True, bulk=True)


class Model:
    """A running bundle. `reference_vector` (D,) is the vector of `reference_image` at the warm-up;
    health checks compare with it.
    """

    def __init__(self, encoder: Encoder, reference_image: bytes, reference_vector: Vector) -> None:
        self.encoder = encoder
        self.reference_image = reference_image
        self.reference_vector = reference_vector
        self.embedder = encoder.facts
        self.bundle_id = encoder.facts.bundle_id
        self.dim = encoder.facts.dim
        self.provider = encoder.facts.provider
        self.calibration = encoder.facts.calibration
        self.no_calibration = encoder.facts.no_calibration


class Models:
    """Opens a model when a gallery needs it, and drops it when no gallery does."""

    def __init__(
        self, find: Callable[[str, str], Backend], connect: Callable[[Backend], Encoder]
    ) -> None:
        """`find` opens a bundle for galleries of a precision, and may block. `connect` makes its
        encoder.
        """
        self._find = find
        self._connect = connect
        self._opened: dict[str, Backend] = {}
        self._models: dict[str, Model] = {}
        self._flights: SingleFlight[Model] = SingleFlight()

    def running(self) -> list[Model]:
        """Every model that has been started."""
        return list(self._models.values())

    def workers(self) -> list[Workers]:
        """The workers of every model that has been started."""
        return [model.encoder.workers for model in self.running()]

    def open(self, bundle_id: str, precision: str = "fp32") -> ModelFacts:
        """Open a bundle before the event loop runs; `get` starts its model. `precision` is the
        precision of the gallery to search with it.

        Raises: BundleNotFoundError, BundleError, SearchError.
        """
        if bundle_id not in self._opened:
            self._opened[bundle_id] = self._find(bundle_id, precision)
        return self._opened[bundle_id].facts

    def close(self) -> None:
        """Drop all models and end their workers, also in the middle of an image."""
        backends = list(self._opened.values())
        ending = [*self.workers(), *(backend.workers for backend in backends)]
        self._opened, self._models = {}, {}
        for workers in ending:
            workers.close()

    async def get(self, bundle_id: str, precision: str = "fp32") -> Model:
        """The warmed-up model of a bundle. `precision` is the precision of the first gallery that
        uses it.

        Raises: BundleNotFoundError, BundleError.
        """
        model = self._models.get(bundle_id)
        if model is None:
            start = partial(self._start, bundle_id, precision)
            model = await self._flights.run(bundle_id, start)
        return model

    async def keep(self, bundle_ids: Collection[str]) -> None:
        """Drop every other model; its memory is freed once its last search has ended."""
        for bundle_id in self._models.keys() - set(bundle_ids):
            structlog.get_logger().info("model stopped", bundle_id=bundle_id)
        self._models = {n: model for n, model in self._models.items() if n in bundle_ids}

    async def _start(self, bundle_id: str, precision: str) -> Model:
        backend = self._opened.pop(bundle_id, None)
        if backend is None:
            backend = await in_thread(partial(self._find, bundle_id, precision))
        encoder, embedder = self._connect(backend), backend.facts
        image = embedder.known_images()[0]
        model = Model(encoder, image, await encoder.infer(image))
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
