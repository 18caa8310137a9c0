"""The path of a query, from top to bottom: queries in, ranked results out. It does not use HTTP.

event loop: acquire gallery and model ──► search thread:
    cached? ─► decode ─► embed ─► search in the gallery ─► JSON ─► cache

A sample of searches is repeated with exact search in the background, to estimate the recall.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog

from kinlens.embedder.calibration import CANDIDATES
from kinlens.embedder.errors import (
    BundleMismatchError,
    DeadlineExceededError,
    InvalidParameterError,
)
from kinlens.embedder.types import Embeddings, Hit
from kinlens.embedder.views.boxes import AUTO_BOXES
from kinlens.indexer.galleries import MilvusStore
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.types import SearchOptions, no_checkpoint
from kinlens.quality.answers import (
    Targets,
    Wanted,
    Words,
    guaranteed,
    prior_of,
    results_of,
    targets_of,
)
from kinlens.quality.calibration import Calibrated, choose
from kinlens.quality.guarantee import Guarantee
from kinlens.service.concurrency import DaemonThreads, SearchThreads, too_late, within
from kinlens.service.encoding.cache import Cache, Lookup
from kinlens.service.encoding.model import Known, Model, Stages, View
from kinlens.service.encoding.workers import Vector
from kinlens.service.galleries.registry import FILTERED, Registry, Served
from kinlens.service.galleries.view import GalleryView, check_names
from kinlens.service.observe.metrics import Metrics, record_wait, span
from kinlens.service.search.guarantee import described, guaranteed_by, watch
from kinlens.service.search.query import (
    WORDS_NOT_CALIBRATED,
    Answer,
    Found,
    Query,
    nearness,
)

_LIMITED = ("The search", "Ask for fewer results or try again in a second.")
_VERSION_BYTES = 64
_TIE = 1e-6  # cosines this close count as equal, so either item is a correct result


class CancelToken:
    """Cooperative cancellation of a search. A thread cannot be interrupted from outside, so the
    search checks this token between its steps, and soon frees its thread and memory.
    """

    def __init__(self) -> None:
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the search: the time limit has passed, or the client has disconnected."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raises: DeadlineExceededError once the search is cancelled."""
        if self._is_cancelled:
            raise DeadlineExceededError(
                "The search was cancelled: the client disconnected or the time limit passed."
            )


@dataclass(slots=True)
class Pipeline:
    """Answers queries in the galleries of `registry`, each within `limit_s` seconds. `prior` is the
    prior probability that the product of a query is absent from the gallery, `image_url` as in the
    settings. `in_flight` counts the searches and batches that are being answered.
    """

    registry: Registry
    search_threads: SearchThreads
    cache: Cache
    metrics: Metrics
    sampler: "RecallSampler"
    limit_s: float
    prior: float
    image_url: str = ""
    in_flight: int = field(default=0, init=False)

    async def search(self, query: Query, since: float) -> Answer:
        """Answer one query. The limit counts from `since` on, a time of the event loop.

        Raises: ImageError, GalleryError, SearchError, OverloadedError, DeadlineExceededError.
        """
        self.in_flight += 1
        try:
            async with within(self.limit_s, *_LIMITED, since):
                return await self._search(query)
        finally:
            self.in_flight -= 1

    async def search_all(
        self, queries: Sequence[Query | Exception], since: float
    ) -> list[Answer | Exception]:
        """Answer queries concurrently and independently: the result of a query that fails is its
        error. An error among the queries is returned as its own result; `since` as in `search`.

        Raises: OverloadedError when too many requests are queued.
        """
        with self.search_threads.batch():
            tasks = [asyncio.create_task(self._outcome(query)) for query in queries]
            self.in_flight += 1
            try:
                left_s = since + self.limit_s - asyncio.get_running_loop().time()
                await asyncio.wait(tasks, timeout=max(0.0, left_s))
                return [
                    task.result() if task.done() else too_late(self.limit_s, *_LIMITED)
                    for task in tasks
                ]
            finally:
                self.in_flight -= 1
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(self, query: Query | Exception) -> Answer | Exception:
        if isinstance(query, Exception):
            return query
        try:
            async with self.search_threads.bulk_limit("batch"):
                return await self._search(query, bulk=True)
        except Exception as error:
            # Unexpected errors too: the other queries must still be answered.
            return error

    async def _search(self, query: Query, *, bulk: bool = False) -> Answer:
        await self.registry.refresh_if_unknown(query.gallery)
        try:
            with self.registry.lease(query.gallery) as served:
                return await self._run_in_thread(served, query, bulk)
        except BundleMismatchError:
            pass
        # A gallery on Milvus has switched to another bundle: wait for the model of that.
        await self.registry.read_from_disk(self.limit_s, query.gallery)
        with self.registry.lease(query.gallery) as served:
            return await self._run_in_thread(served, query, bulk)

    async def _run_in_thread(self, served: Served, query: Query, bulk: bool) -> Answer:
        cancel_token, started = CancelToken(), time.perf_counter()
        # A cached result is served first. Look it up only if there is a queue, and
        # not for a filtered query: the cache key of a long filter takes long to compute.
        is_short = query.where is None and not query.asks_guarantee
        may_be_cached = not bulk and is_short and self.search_threads.waiting > 0
        # With the calibration of the last search: to read the current one may wait for the disk.
        is_cached = may_be_cached and self.cache.has(self._key(served, query, served.calibrated))
        served.refuse_if_hanging(self.limit_s)
        served.acquire()  # until the search thread is done, even if the client has disconnected
        try:
            return await self.search_threads.run(
                lambda: self._answer(served, query, cancel_token, started),
                urgent=is_cached,
                bulk=bulk,
                after=served.release,
            )
        finally:
            cancel_token.cancel()

    def _answer(
        self, served: Served, query: Query, cancel_token: CancelToken, started: float
    ) -> Answer:
        """Answer one query from cache lookup to JSON, in a search thread."""
        cancel_token.check()
        served.refuse_if_hanging(self.limit_s)  # reads may have begun to hang during the queueing
        waited_s = time.perf_counter() - started
        self.metrics.observe_stage("queue", waited_s)
        record_wait("queue", waited_s)
        gallery, model = served.gallery, served.model
        with served.reading():
            version = gallery.version
            calibrated = served.calibrated = calibrated_by(served)
            guarantee = guaranteed_by(served, query) if query.asks_guarantee else None
        if query.texts:
            calibrated = WORDS_NOT_CALIBRATED
        if query.min_probability is not None and isinstance(calibrated, str):
            raise InvalidParameterError(
                f"min_probability = {query.min_probability:g} needs probabilities, and this "
                f"search has none ({calibrated.rstrip('.')}). Send min_score instead."
            )
        query, known, finding = self._with_boxes(served, query, cancel_token)
        key = self._key(served, query, calibrated, guarantee)
        results, cached = self._cached(served, query, key, version)
        stages, search_ms, is_cached = finding, 0.0, results is not None
        if results is None:
            vectors, stages = self._vectors(served, query, cached, known, cancel_token)
            words = _words(served, query)
            stages = Stages(stages.decode + finding.decode, stages.embed + finding.embed)
            before = time.perf_counter()
            with served.reading(), span("search"):
                found = find(served, query, vectors, words, calibrated, self.prior, cancel_token)
                if guarantee is not None:
                    kept = guaranteed(
                        gallery,
                        found.vector[np.newaxis],
                        guarantee,
                        query.guarantee,
                        query.accept,
                        found.wanted,
                    )
                    watch(served, guarantee, kept, found.vector)
                    found = replace(found, guaranteed=described(kept))
            results = found.encoded(served.name, gallery.generation, self.image_url)
            search_ms = (time.perf_counter() - before) * 1e3
            # If a later version is in memory, the results may be from that.
            whole = served.whole
            if not isinstance(whole, MilvusStore) and whole.loaded_version == version:
                self.cache.set(key, version.encode() + results)
            self.sampler.offer(served.name, query.k, found, version)
        total_ms = (time.perf_counter() - started) * 1e3
        stages = replace(stages, search=search_ms, total=total_ms)
        self._observe(stages)
        return Answer(model.bundle_id, served.name, version, query, results, is_cached, stages)

    async def vectors(self, served: Served, query: Query) -> Embeddings:
        """The vectors (V, D) that a query without items is searched with, one for each view with
        `best_view`; as a bulk call for a golden set.

        Raises: ImageError, InvalidParameterError, SearchError, BundleError.
        """

        def embed() -> Embeddings:
            cancel_token = CancelToken()
            found, known, _ = self._with_boxes(served, query, cancel_token)
            lookups = [_model(served, query).lookup(view) for view in found.images]
            cached = self.cache.get_all(lookups)
            vectors, _ = self._vectors(served, found, cached, known, cancel_token)
            return _targets(served, found, vectors, _words(served, found)).vectors

        async with self.search_threads.bulk_limit("golden"):
            return await self.search_threads.run(embed, bulk=True)

    def _with_boxes(
        self, served: Served, query: Query, cancel_token: CancelToken
    ) -> tuple[Query, Known, Stages]:
        """The query with the boxes of a detector in place of windows, if the model has one; and
        what was computed on the way.
        """
        autos = {view.digest: view for view in query.images if view.is_auto and view.box is None}
        model = _model(served, query)
        if not autos or model.embedder.boxes is None:
            return query, {}, Stages()
        cached = self.cache.get_all([model.boxes_lookup(view) for view in autos.values()])
        boxes = dict(zip(autos, cached, strict=True))
        missing = [view for digest, view in autos.items() if boxes[digest] is None]
        known, stages = Known(), Stages()
        if missing:
            found, known, stages = model.find(
                missing, AUTO_BOXES, cancel_token.check, is_numbered=query.has_several_images
            )
            boxes |= zip((view.digest for view in missing), found, strict=True)
        return query.with_boxes(boxes), known, stages

    def _key(
        self,
        served: Served,
        query: Query,
        calibrated: Calibrated | str,
        guarantee: Guarantee | None = None,
    ) -> str:
        model, gallery, digest = served.model, served.gallery, query.digest
        if served.scope:  # callers with different filters must not share answers
            digest += f":{hashlib.sha256(served.scope.encode()).hexdigest()}"
        if query.texts:  # another text tower changes no bundle id
            digest += f":{model.tower.id}"
        elif not isinstance(calibrated, str):  # the probabilities depend on the curve
            digest += f":{calibrated.product}:{hash(calibrated.curve):x}:{self.prior}"
        if guarantee is not None:  # which is judged again without a change of an item
            digest += f":{guarantee.digest}"
        if self.image_url:
            digest += f":{hashlib.sha256(self.image_url.encode()).hexdigest()}"
        return model.answer_key(served.name, gallery.generation, digest)

    def _cached(
        self, served: Served, query: Query, key: str, version: str
    ) -> tuple[bytes | None, list[Vector | None]]:
        """The cached results, and the cached vector of each image; None for what is not cached."""
        started = time.perf_counter()

        def current(payload: bytes) -> bytes:
            if payload[:_VERSION_BYTES] != version.encode():
                raise ValueError("the answer is about another version of the gallery")
            return payload[_VERSION_BYTES:]

        answers = Lookup("answer", key, current)
        if not served.is_remote and (results := self.cache.get_local(answers)) is not None:
            return results, []
        model = _model(served, query)
        lookups = [model.lookup(view) for view in query.images]
        if served.is_remote:  # no reliable version number, so answers are not cached
            vectors = self.cache.get_all(lookups)
            self.metrics.observe_stage("cache", time.perf_counter() - started)
            return None, vectors
        results, *vectors = self.cache.get_all([answers, *lookups])
        self.metrics.observe_stage("cache", time.perf_counter() - started)
        return results, vectors

    def _vectors(
        self,
        served: Served,
        query: Query,
        cached: Sequence[Vector | None],
        known: Known,
        cancel_token: CancelToken,
    ) -> tuple[list[Vector], Stages]:
        """The vector of every view; images without a cached or known vector are decoded and
        embedded together.
        """
        model, images, stages = _model(served, query), query.images, Stages()
        others = iter([view.vector(model) for view in query.views if not isinstance(view, View)])
        if known:
            pairs = zip(images, cached, strict=True)
            cached = [known.get((view.digest, view.box), vector) for view, vector in pairs]
        missing = [view for view, vector in zip(images, cached, strict=True) if vector is None]
        new: Iterator[Vector] = iter(())
        if missing:
            computed, stages = model.compute(
                missing, cancel_token.check, is_numbered=query.has_several_images
            )
            new = iter(computed)
        embedded = iter([next(new) if vector is None else vector for vector in cached])
        return [
            next(embedded if isinstance(view, View) else others) for view in query.views
        ], stages

    def _observe(self, stages: Stages) -> None:
        for stage in ("decode", "embed", "search", "total"):
            if milliseconds := getattr(stages, stage):
                self.metrics.observe_stage(stage, milliseconds / 1e3)


def find(
    served: Served,
    query: Query,
    vectors: Sequence[Vector],
    words: Embeddings,
    calibrated: Calibrated | str,
    prior: float,
    cancel_token: CancelToken,
) -> Found:
    """The hits or groups of `query` with their probabilities; `vectors` belong to its views, and
    `words` (M, D) to its texts.

    Raises: GalleryError, ItemNotFoundError, InvalidParameterError, FilterError.
    """
    cancel_token.check()
    gallery = served.gallery
    if query.fields:
        check_names(gallery, query.fields, "return")
    targets = _targets(served, query, vectors, words)
    options = SearchOptions(
        where=query.where,
        min_score=query.min_score,
        offset=query.offset,
        distinct=bool(query.distinct),
        near=nearness(query.distinct, gallery),
        exclude=targets.exclude,
        exact=query.exact,
        diversity=query.diversity,
        boost=query.boost,
        sort_by=query.sort_by,
        checkpoint=cancel_token.check,
    )
    if (
        not query.views
        and isinstance(gallery, IndexedGallery)
        and isinstance(calibrated, Calibrated)
    ):
        prior = prior_of(gallery, calibrated.product, targets.liked, prior)
    wanted = Wanted(query.k, options, query.grouping, query.best_view, query.min_probability)
    results = results_of(gallery, targets.vectors, wanted, calibrated, prior)
    match = bool(results)
    if not match and query.offset:  # past the end of what matches?
        depth = 1 if query.min_probability is None else CANDIDATES
        first = replace(wanted, k=depth, options=replace(options, offset=0))
        match = bool(results_of(gallery, targets.vectors, first, calibrated, prior))
    facets = gallery.facets(query.facets, targets.vectors, options) if query.facets else {}
    return Found(query, results, targets.vectors[0], wanted, match, facets)


def _model(served: Served, query: Query) -> Model:
    """The model for the images of a query: words are added to whole vectors."""
    return served.model.whole if query.texts else served.model


def _words(served: Served, query: Query) -> Embeddings:
    """The vectors (M, D) of the texts of a query. The first ones wait for the text tower, which is
    no reading of the gallery.
    """
    if not query.texts:
        return np.empty((0, 0), np.float32)
    texts = {f"texts[{number}]": text for number, (text, _) in enumerate(query.texts)}
    return served.model.embed_texts(texts)


def _targets(served: Served, query: Query, vectors: Sequence[Vector], words: Embeddings) -> Targets:
    """What to search for. Raises: ItemNotFoundError, InvalidParameterError."""
    gallery, positives = served.gallery, query.positives
    if query.like is not None:
        served.check_generation(query.generation)
        positives = (gallery.item(query.like).key, *positives)
    weights = [weight for _, weight in query.texts]
    return targets_of(
        gallery,
        vectors,
        [view.weight for view in query.views],
        positives,
        query.negatives,
        words=Words(served.model.embedder.words(), words, weights) if weights else None,
        best_view=query.best_view,
    )


def calibrated_by(served: Served) -> Calibrated | str:
    """The calibration that a gallery uses now, or the reason why there is none."""
    facts = served.model.embedder
    if served.calibrator is None:
        return "Galleries on Milvus are not calibrated"
    if isinstance(served.gallery, GalleryView):
        return FILTERED
    return choose(served.calibrator.stored(), facts.calibration, facts.no_calibration)


class RecallSampler:
    """Measures the recall of every `every`-th search that used an index; 0 turns it off.

    Galleries without a segment or with a flat one are skipped. They search every item, so their
    recall of 1.0 would hide the losses of the others.
    """

    def __init__(self, registry: Registry, metrics: Metrics, every: int) -> None:
        self._registry = registry
        self._metrics = metrics
        self._every = every
        self._offered = 0
        self._threads = DaemonThreads("recall", 1)
        self._running = threading.Lock()

    def offer(self, gallery: str, k: int, found: Found, version: str) -> None:
        """Count a search, and repeat it in the background if it is sampled. Does not block."""
        is_measurable = found.ranked is not None and not found.wanted.options.reorders
        if not self._every or not is_measurable or found.wanted.options.exact:
            return
        self._offered += 1
        if self._offered % self._every == 0 and self._running.acquire(blocking=False):
            self._threads.submit(lambda: self._measure(gallery, k, found, version))

    def close(self) -> None:
        """Cancel the search that is being repeated."""
        self._threads.close()

    def _measure(self, name: str, k: int, found: Found, version: str) -> None:
        try:
            with self._registry.lease(name) as served:
                gallery = served.gallery
                segment = gallery.facts().segment
                if segment is None or segment.kind == "flat":
                    return
                options = replace(found.wanted.options, exact=True, checkpoint=no_checkpoint)
                [exact] = gallery.search(found.vector[np.newaxis], k, options)
                if gallery.version == version and exact:
                    recall = recall_of(found.ranked or (), exact)
                    self._metrics.online_recall.labels(name).observe(recall)
        except Exception as error:
            # No request depends on this. A real fault also shows in the searches themselves.
            structlog.get_logger().debug("recall not measured", error=type(error).__name__)
        finally:
            self._running.release()


def recall_of(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """The part of the `exact` hits, at least one, that `hits` contain; ties count as found."""
    least = exact[-1].score - _TIE
    return min(1.0, sum(hit.score >= least for hit in hits) / len(exact))
