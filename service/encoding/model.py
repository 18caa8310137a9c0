"""The models that are served: one session for each bundle, and the embedding of images."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from kinlens.embedder.errors import BundleError, ImageError, InvalidParameterError, SearchError
from kinlens.embedder.manifest import TextTower
from kinlens.embedder.preprocess import Box
from kinlens.embedder.session import ModelFacts
from kinlens.embedder.types import SHORT, Embed, Embeddings, Images, first_numbers
from kinlens.embedder.views.boxes import MOST_BOXES, FoundBox
from kinlens.embedder.views.text import cleaned_text
from kinlens.service.concurrency import BulkKind, SearchThreads, SingleFlight, in_thread
from kinlens.service.encoding.cache import (
    Cache,
    Lookup,
    answer_keys,
    boxes_key,
    decode_boxes,
    decode_vector,
    embedding_keys,
    encode_boxes,
    encode_vector,
    text_key,
)
from kinlens.service.encoding.workers import Vector, Workers
from kinlens.service.observe.metrics import span

T = TypeVar("T")

Known = dict[tuple[str, Box | None], Vector]
"""Vectors by the digest of an image and its part."""

_PARTS = 5
"""Parts of an image that one worker decodes and embeds at once: more would hold one core while
others are idle, and could exceed the time and memory of a worker.
"""


@dataclass(frozen=True, slots=True)
class View:
    """An encoded image, or its part in `box`. `digest` is the sha256 of the image, and `number` its
    position among the images of a query, from 1. `is_auto` is whether the box is a window, in place
    of which a detector may find boxes.
    """

    data: bytes
    digest: str
    box: Box | None = None
    number: int = 1
    is_auto: bool = False

    weight: ClassVar[float] = 1.0
    """Its part in the mean of all views of a query."""

    @property
    def identity(self) -> str:
        """Equal for equal views of queries."""
        return f"{self.digest}:{self.box or ''}"

    def described(self) -> dict[str, Any]:
        """The view that found a hit, in an answer."""
        return {"image": self.number, "crop": self.box}


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
    in one call. A call that fails is repeated for each image, so only the bad image fails.
    `on_batch` is called with the size of each call.
    """

    def __init__(
        self,
        embed: Embed,
        batch_size: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._embed = embed
        self._batch_size = batch_size
        self._on_batch = on_batch
        self._turn = threading.Lock()
        self._waiting: deque[tuple[NDArray[np.uint8], Future[Vector]]] = deque()

    @property
    def waiting(self) -> int:
        """Number of queued images."""
        return len(self._waiting)

    def embed(self, images: Images) -> Embeddings:
        """The vectors (N, D) of N > 0 images (N, 3, S, S).

        Raises: BundleError; what `embed` raises.
        """
        vectors: list[Future[Vector]] = [Future() for _ in images]
        self._waiting.extend(zip(images, vectors, strict=True))
        with self._turn:  # only its holder takes images, from the oldest on
            while not vectors[-1].done():
                count = min(len(self._waiting), self._batch_size)
                self._run([self._waiting.popleft() for _ in range(count)])
        return np.stack([vector.result() for vector in vectors])

    def _run(self, batch: Sequence[tuple[NDArray[np.uint8], Future[Vector]]]) -> None:
        self._on_batch(len(batch))
        try:
            vectors = self._embed(np.stack([image for image, _ in batch]))
            if len(vectors) != len(batch):
                raise BundleError(
                    f"The model gave {len(vectors)} vectors for {len(batch)} images. "
                    "Export it again with a free batch dimension."
                )
        except BaseException as error:  # SystemExit must not end more than this search either
            if len(batch) > 1:
                for queued in batch:
                    self._run([queued])
            elif isinstance(error, Exception):
                batch[0][1].set_exception(error)
            else:
                text = f"The model ended with {type(error).__name__}."
                batch[0][1].set_exception(SearchError(text))
        else:
            for (_, future), vector in zip(batch, vectors, strict=True):
                future.set_result(vector)


@dataclass(frozen=True, slots=True)
class Backend:
    """What runs a bundle: its workers, which decode. They also embed, unless `embed` does that in
    this process, as it must on a GPU.
    """

    facts: ModelFacts
    workers: Workers
    embed: Embed | None = None


class Model:
    """A running bundle: turns images into vectors, and caches the vectors.

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
        self.embedder = self._facts = facts = backend.facts
        self._whole: Model | None = None
        self.bundle_id = facts.bundle_id
        self.dim = facts.dim
        self.workers = backend.workers
        self._cache = cache
        self._search_threads = search_threads
        self._on_batch = on_batch
        self._key = embedding_keys(facts.bundle_id, facts.mode)
        self.answer_key = answer_keys(facts.bundle_id, facts.mode)
        self._detector = "" if facts.boxes is None else facts.boxes.id
        self._reference_image = facts.known_images()[0]
        self.reference_vector: Vector
        self._batcher: Batcher | None = None
        if backend.embed is not None:
            self._batcher = Batcher(backend.embed, batch_size, on_batch)

    def first(self, n: int) -> "Model":
        """This model for a gallery of the first `n` numbers of each vector; it shares the workers,
        and the cache of whole vectors.
        """
        if n == self.dim:
            return self
        short = copy.copy(self)
        short._whole = self
        short.embedder, short.dim = self.embedder.first(n), n
        short.reference_vector = first_numbers(self.reference_vector, n)
        return short

    @property
    def whole(self) -> "Model":
        """The model of whole vectors."""
        return self._whole or self

    async def warm_up(self) -> None:
        """Embed a known image, whose vector (D,) is `reference_vector` from then on.

        Raises: ImageError, SearchError, BundleError.
        """
        self.reference_vector = await self._infer()

    async def check(self) -> float:
        """Embed the known image again, before all queued calls and without a cache; the cosine with
        its first vector. Raises: ImageError, SearchError, BundleError.
        """
        return float(await self._infer() @ self.reference_vector)

    def lookup(self, view: View) -> Lookup[Vector]:
        """The cache lookup for the vector of `view`."""

        def vector_of(payload: bytes) -> Vector:
            return first_numbers(decode_vector(payload, self._facts.dim), self.dim)

        return Lookup("embedding", self._key(view.digest, view.box), vector_of)

    def decode(self, view: View) -> NDArray[np.uint8]:
        """The pixels (3, S, S) of `view`.

        Raises: ImageError, InvalidParameterError, SearchError.
        """
        pixels: NDArray[np.uint8] = self._decode([view])[0]
        return pixels

    def boxes_lookup(self, view: View) -> Lookup[list[FoundBox]]:
        """The cache lookup for the boxes in the image of `view`. The model must have a detector."""
        return Lookup("boxes", boxes_key(self._detector, view.digest), decode_boxes)

    def boxes(self, view: View) -> list[FoundBox]:
        """The boxes in the image of `view`, from the cache if it has them. The model must have a
        detector. Raises: ImageError, SearchError, BundleError.
        """
        cached = self._cache.get(self.boxes_lookup(view))
        found = self.find([view])[0][0] if cached is None else cached
        if found is None:
            raise ImageError(
                "The detector of the model failed on this image. Send crops of your own, or "
                "crops = auto, which then searches with windows."
            )
        return found

    def find(
        self,
        views: Sequence[View],
        parts: int = 0,
        check: Callable[[], object] = lambda: None,
        *,
        is_numbered: bool = False,
    ) -> tuple[list[list[FoundBox] | None], Known, Stages]:
        """Find and cache the boxes in the images of `views`, several at the same time; None for an
        image on which the detector failed. If workers embed, they embed each whole image and up to
        `parts` of its boxes on the way, without decoding it again; these vectors are cached and
        returned. The model must have a detector.

        Raises: ImageError, SearchError, BundleError, what `check` raises.
        """
        started = time.perf_counter()
        facts = self._facts
        dim = facts.dim if parts and self._batcher is None else 0

        def work(group: Sequence[View]) -> tuple[list[FoundBox] | None, Embeddings, float]:
            spec, limits = facts.preprocessing, facts.limits
            return self.workers.find(group[0].data, spec, limits, MOST_BOXES, dim, parts)

        with span("boxes"):
            answers = self._each(work, [[view] for view in views], check, is_numbered)
        known: Known = {}
        for view, (found, vectors, _) in zip(views, answers, strict=True):
            if found is None:
                structlog.get_logger().warning("the detector failed on an image", image=view.digest)
            else:
                self._cache.set(boxes_key(self._detector, view.digest), encode_boxes(found))
            boxes = [None, *(one.box for one in found or ())]
            for box, vector in zip(boxes, vectors, strict=False):
                self._cache.set(self._key(view.digest, box), encode_vector(vector))
                known[view.digest, box] = first_numbers(vector, self.dim)
        total_ms = (time.perf_counter() - started) * 1e3
        decode_ms = min(sum(took_ms for *_, took_ms in answers), total_ms)
        return [found for found, *_ in answers], known, Stages(decode_ms, total_ms - decode_ms)

    def compute(
        self,
        views: Sequence[View],
        check: Callable[[], object] = lambda: None,
        *,
        is_numbered: bool = False,
        is_cached: bool = True,
    ) -> tuple[Embeddings, Stages]:
        """Compute the vectors (N, D) of N > 0 `views`, several at the same time, and cache them.
        `check` is called before each image. With `is_numbered` an error names the image.

        A few parts of one image go to one worker, which decodes it once.

        Raises: ImageError, SearchError, BundleError, what `check` raises.
        """
        started = time.perf_counter()
        images: dict[str, list[int]] = {}
        for position, view in enumerate(views):
            images.setdefault(view.digest, []).append(position)
        orders = [
            parts[start : start + _PARTS]
            for parts in images.values()
            for start in range(0, len(parts), _PARTS)
        ]
        groups = [[views[position] for position in order] for order in orders]
        if self._batcher is None:
            with span("embed"):
                answers = self._each(self._embed, groups, check, is_numbered)
            parts, decode_times_ms = zip(*answers, strict=True)
            found, decode_ms = np.concatenate(parts), sum(decode_times_ms)
        else:
            with span("decode"):
                pixels = np.concatenate(self._each(self._decode, groups, check, is_numbered))
            decode_ms = (time.perf_counter() - started) * 1e3
            with span("embed"):
                found = self._batcher.embed(pixels)
        vectors = np.empty_like(found)
        vectors[[position for order in orders for position in order]] = found
        total_ms = (time.perf_counter() - started) * 1e3
        decode_ms = min(decode_ms, total_ms)  # several images are decoded at the same time
        if is_cached:
            for view, vector in zip(views, vectors, strict=True):
                self._cache.set(self._key(view.digest, view.box), encode_vector(vector))
        return first_numbers(vectors, self.dim), Stages(decode_ms, total_ms - decode_ms)

    async def encode(self, data: bytes, digest: str, kind: BulkKind = "write") -> Vector:
        """The vector (D,) of the image `data` with sha256 `digest`, as a bulk call of this `kind`.

        Raises: ImageError, SearchError, BundleError.
        """
        view = View(data, digest)

        def work() -> Vector:
            vector = self._cache.get(self.lookup(view))
            return self.compute([view])[0][0] if vector is None else vector

        async with self._search_threads.bulk_limit(kind):
            return await self._search_threads.run(work, bulk=True)

    @property
    def tower(self) -> TextTower:
        """The text tower of the bundle.

        Raises: InvalidParameterError if it has none; SearchError without the package `tokenizers`.
        """
        if self.embedder.text is None:
            raise InvalidParameterError(
                f"texts need a text tower, and the bundle {self.bundle_id[:SHORT]} has none. Make "
                "one with kinlens-train teach-words BUNDLE GALLERY, or omit texts."
            )
        if not self.embedder.has_words:
            raise SearchError(
                "The service cannot read words, since the package tokenizers is not installed "
                "where it runs. Install it there with pip install 'kinlens[text]', or omit texts."
            )
        return self.embedder.text

    def embed_texts(self, texts: Mapping[str, str]) -> Embeddings:
        """The whole vectors (M, D) of M > 0 texts by their names for errors, from the cache where
        it has them. The first ones wait until the text tower is opened.

        Raises: InvalidParameterError, SearchError, BundleError.
        """
        tower = self.tower
        cleaned = [cleaned_text(text, name, tower) for name, text in texts.items()]
        keys = {text: text_key(tower.id, text) for text in cleaned}
        read = partial(decode_vector, dim=self._facts.dim)
        cached = self._cache.get_all([Lookup("embedding", key, read) for key in keys.values()])
        vectors = dict(zip(keys, cached, strict=True))
        if missing := [text for text, vector in vectors.items() if vector is None]:
            for text, vector in zip(missing, self.embedder.words().embed(missing), strict=True):
                vectors[text] = vector
                self._cache.set(keys[text], encode_vector(vector))
        return np.stack([vectors[text] for text in cleaned])

    async def encode_texts(self, texts: Mapping[str, str]) -> Embeddings:
        """As `embed_texts`, in one bulk call.

        Raises: InvalidParameterError, SearchError, BundleError.
        """
        work = partial(self.embed_texts, texts)
        async with self._search_threads.bulk_limit("embed"):
            return await self._search_threads.run(work, bulk=True)

    async def _infer(self) -> Vector:
        view = View(self._reference_image, "")
        work = partial(self.compute, [view], is_cached=False)
        vectors, _ = await self._search_threads.run(work, urgent=True, bulk=True)
        vector: Vector = vectors[0]
        return vector

    def _each(
        self,
        work: Callable[[Sequence[View]], T],
        groups: Sequence[Sequence[View]],
        check: Callable[[], object],
        is_numbered: bool,
    ) -> list[T]:
        """The results of `work` for groups of views of one image each."""

        def call(group: Sequence[View]) -> T:
            check()
            try:
                return work(group)
            except ImageError as error:
                if is_numbered:
                    raise type(error)(f"Image {group[0].number}: {error}") from error
                raise

        return self._search_threads.each(call, groups)

    def _decode(self, views: Sequence[View]) -> NDArray[np.uint8]:
        facts, boxes = self.embedder, [view.box for view in views]
        return self.workers.decode(views[0].data, facts.preprocessing, facts.limits, boxes)

    def _embed(self, views: Sequence[View]) -> tuple[Embeddings, float]:
        facts, boxes = self._facts, [view.box for view in views]
        data, spec = views[0].data, facts.preprocessing
        answer = self.workers.embed(data, spec, facts.limits, boxes, facts.dim)
        self._on_batch(len(views))
        return answer


class Models:
    """Opens a model when a gallery needs it, and drops it when no gallery does."""

    def __init__(
        self, find: Callable[[str, str], Backend], connect: Callable[[Backend], Model]
    ) -> None:
        """`find` opens a bundle for galleries of a precision, and may block. `connect` makes a
        model of it.
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
        return [model.workers for model in self.running()]

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
        model, embedder = self._connect(backend), backend.facts
        await model.warm_up()
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
