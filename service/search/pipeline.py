"""The path of a query, from top to bottom: queries in, ranked results out. It does not use HTTP.

event loop: acquire gallery and model ──► search thread:
    cached? ─► decode ─► embed ─► search in the gallery ─► JSON ─► cache

A sample of searches is repeated with exact search in the background, to estimate the recall.
"""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import structlog

from kinlens.embedder.calibration import CANDIDATES
from kinlens.embedder.errors import (
    BundleMismatchError,
    DeadlineExceededError,
    InvalidParameterError,
    KinlensError,
)
from kinlens.embedder.types import Embeddings, Hit, ItemId, first_numbers
from kinlens.embedder.views.boxes import AUTO_BOXES
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.types import (
    Group,
    Item,
    SearchOptions,
    best_of_views,
    combined_query,
    no_checkpoint,
)
from kinlens.quality.calibration import Calibrated, Shares, choose
from kinlens.quality.guarantee import Guarantee
from kinlens.service.concurrency import DaemonThreads, SearchThreads, too_late, within
from kinlens.service.encoding.cache import Cache, Lookup, answer_key
from kinlens.service.encoding.model import Known, Model, Stages, View
from kinlens.service.encoding.vectors import VectorView
from kinlens.service.encoding.workers import Vector
from kinlens.service.galleries.locations import Gallery
from kinlens.service.galleries.registry import FILTERED, Registry, Served
from kinlens.service.galleries.view import GalleryView, check_names
from kinlens.service.observe.metrics import Metrics, record_wait, span
from kinlens.service.search.guarantee import guaranteed, guaranteed_by
from kinlens.service.search.query import Answer, Found, Query, nearness
from kinlens.values import single

_LIMITED = ("The search", "Ask for fewer results or try again in a second.")
_VERSION_BYTES = 64
_NOT_CALIBRATED = "scores of words are not calibrated"
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


class Pipeline:
    """Answers queries in the galleries of `registry`, each within `limit_s` seconds. `prior` is the
    prior probability that the product of a query is absent from the gallery, `image_url` as in the
    settings.
    """

    def __init__(
        self,
        registry: Registry,
        search_threads: SearchThreads,
        cache: Cache,
        metrics: Metrics,
        sampler: "RecallSampler",
        limit_s: float,
        prior: float,
        image_url: str = "",
    ) -> None:
        self._registry = registry
        self._search_threads = search_threads
        self._cache = cache
        self._metrics = metrics
        self._sampler = sampler
        self._limit_s = limit_s
        self._prior = prior
        self._image_url = image_url
        self.in_flight = 0  # searches, and batches

    async def search(self, query: Query) -> Answer:
        """Answer one query.

        Raises: ImageError, GalleryError, SearchError, OverloadedError, DeadlineExceededError.
        """
        await self._registry.refresh_if_unknown(query.gallery)
        self.in_flight += 1
        try:
            async with within(self._limit_s, *_LIMITED):
                with contextlib.suppress(BundleMismatchError):
                    return await self._search(query)
                # A gallery on Milvus has switched to another bundle: wait for the model of that.
                await self._registry.read_from_disk(self._limit_s, query.gallery)
                return await self._search(query)
        finally:
            self.in_flight -= 1

    async def _search(self, query: Query) -> Answer:
        with self._registry.lease(query.gallery) as own:
            return await self._run_in_thread(own, query)

    async def search_all(self, queries: Sequence[Query | Exception]) -> list[Answer | Exception]:
        """Answer queries concurrently and independently: the result of a query that fails is its
        error. An error among the queries is returned as its own result.

        All queries of one gallery use the same gallery generation and model.

        Raises: OverloadedError when too many requests are queued.
        """
        names = {query.gallery for query in queries if isinstance(query, Query)}
        await asyncio.gather(*(self._registry.refresh_if_unknown(name) for name in names))
        with ExitStack() as leases:
            leases.enter_context(self._search_threads.batch())
            leased = {name: self._leased(name, leases) for name in names}
            tasks = [asyncio.create_task(self._outcome(query, leased)) for query in queries]
            self.in_flight += 1
            try:
                await asyncio.wait(tasks, timeout=self._limit_s)
                return [
                    task.result() if task.done() else too_late(self._limit_s, *_LIMITED)
                    for task in tasks
                ]
            finally:
                self.in_flight -= 1
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(
        self, query: Query | Exception, leased: dict[str | None, Served | KinlensError]
    ) -> Answer | Exception:
        if isinstance(query, Exception):
            return query
        served = leased[query.gallery]
        if isinstance(served, KinlensError):
            return served
        try:
            async with self._search_threads.bulk_limit("batch"):
                with contextlib.suppress(BundleMismatchError):
                    return await self._run_in_thread(served, query, bulk=True)
                # As in `search`. The other queries of this gallery fail in the same way.
                await self._registry.read_from_disk(self._limit_s, query.gallery)
                with self._registry.lease(query.gallery) as served:
                    return await self._run_in_thread(served, query, bulk=True)
        except Exception as error:
            # Unexpected errors too: the other queries must still be answered.
            return error

    def _leased(self, name: str | None, leases: ExitStack) -> Served | KinlensError:
        try:
            return leases.enter_context(self._registry.lease(name))
        except KinlensError as error:
            return error

    async def _run_in_thread(self, served: Served, query: Query, *, bulk: bool = False) -> Answer:
        cancel_token, started = CancelToken(), time.perf_counter()
        # A cached result is served first. Look it up only if there is a queue, and
        # not for a filtered query: the cache key of a long filter takes long to compute.
        is_short = query.where is None and not query.asks_guarantee
        may_be_cached = not bulk and is_short and self._search_threads.waiting > 0
        # With the calibration of the last search: to read the current one may wait for the disk.
        is_cached = may_be_cached and self._cache.has(self._key(served, query, served.calibrated))
        served.refuse_if_hanging(self._limit_s)
        served.acquire()  # until the search thread is done, even if the client has disconnected
        try:
            return await self._search_threads.run(
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
        served.refuse_if_hanging(self._limit_s)  # reads may have begun to hang during the queueing
        waited_s = time.perf_counter() - started
        self._metrics.observe_stage("queue", waited_s)
        record_wait("queue", waited_s)
        gallery, model = served.gallery, served.model
        with served.reading():
            version = gallery.version
            calibrated = served.calibrated = calibrated_by(served)
            guarantee = guaranteed_by(served, query)
        if query.texts:
            calibrated = _NOT_CALIBRATED
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
            # The first texts wait for the text tower, which is no reading of the gallery.
            texts = [text for text, _ in query.texts]
            words = model.embed_texts(texts) if texts else np.empty((0, 0), np.float32)
            stages = Stages(stages.decode + finding.decode, stages.embed + finding.embed)
            before = time.perf_counter()
            with served.reading(), span("search"):
                found = find(served, query, vectors, words, calibrated, self._prior, cancel_token)
                if guarantee is not None:
                    target, check = found.vector[np.newaxis], cancel_token.check
                    fields = guaranteed(gallery, query, target, guarantee, check)
                    found = replace(found, guaranteed=fields)
            by = _grouped_by(query)
            results = found.encoded(
                served.name, gallery.generation, by, query.fields, self._image_url
            )
            search_ms = (time.perf_counter() - before) * 1e3
            # If the version has changed, the results may be from a later version.
            if not served.is_remote and gallery.version == version:
                self._cache.set(key, version.encode() + results)
            self._sampler.offer(served.name, query.k, found, version)
        total_ms = (time.perf_counter() - started) * 1e3
        stages = replace(stages, search=search_ms, total=total_ms)
        self._observe(stages)
        return Answer(model.bundle_id, served.name, version, query, results, is_cached, stages)

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
        cached = self._cache.get_all([model.boxes_lookup(view) for view in autos.values()])
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
            digest += f":{calibrated.product}:{hash(calibrated.curve):x}:{self._prior}"
        if guarantee is not None:  # which is judged again without a change of an item
            digest += f":{guarantee.digest}"
        if self._image_url:
            digest += f":{hashlib.sha256(self._image_url.encode()).hexdigest()}"
        mode = model.embedder.mode
        return answer_key(model.bundle_id, mode, served.name, gallery.generation, digest)

    def _cached(
        self, served: Served, query: Query, key: str, version: str
    ) -> tuple[bytes | None, list[Vector | None]]:
        """The cached results, and the cached vector of each image; None for what is not cached."""
        started = time.perf_counter()

        def current(payload: bytes) -> bytes:
            if payload[:_VERSION_BYTES] != version.encode():
                raise ValueError("the answer is about another version of the gallery")
            return payload[_VERSION_BYTES:]

        model = _model(served, query)
        lookups = [model.lookup(view) for view in query.images]
        if served.is_remote:  # no reliable version number, so answers are not cached
            vectors = self._cache.get_all(lookups)
            self._metrics.observe_stage("cache", time.perf_counter() - started)
            return None, vectors
        answers = Lookup("answer", key, current)
        results = self._cache.get_local(answers)
        if results is not None:
            return results, []
        results, *vectors = self._cache.get_all([answers, *lookups])
        self._metrics.observe_stage("cache", time.perf_counter() - started)
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
                self._metrics.observe_stage(stage, milliseconds / 1e3)


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
    targets, exclude, positives = _targets(served, query, vectors, words)
    options = SearchOptions(
        where=query.where,
        min_score=query.min_score,
        offset=query.offset,
        distinct=bool(query.distinct),
        near=nearness(query.distinct, gallery),
        exclude=exclude,
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
        prior = _prior_of(gallery, calibrated.product, positives, prior)
    found = _page(gallery, query, targets, options, calibrated, prior)
    match = bool(found.hits or found.groups)
    if not match and query.offset:  # past the end of what matches?
        first = replace(query, k=1 if query.min_probability is None else CANDIDATES)
        start = _page(gallery, first, targets, replace(options, offset=0), calibrated, prior)
        match = bool(start.hits or start.groups)
    facets = gallery.facets(query.facets, targets, options) if query.facets else {}
    return replace(found, match=match, facets=facets)


def _page(
    gallery: Gallery,
    query: Query,
    targets: Embeddings,
    options: SearchOptions,
    calibrated: Calibrated | str,
    prior: float,
) -> Found:
    """One page of hits or groups with their probabilities."""
    # Probabilities come from the best hits of all items: a filter makes no product likelier.
    of_all = SearchOptions(
        exclude=options.exclude, exact=options.exact, checkpoint=options.checkpoint
    )
    is_of_all = query.grouping is None and options == of_all  # then one search is enough
    is_deep = is_of_all and not isinstance(calibrated, str)
    depth = max(query.k, CANDIDATES) if is_deep else query.k
    best, groups, views = _search(gallery, query, targets, depth, options)
    hits = best[: query.k]
    measurable = hits if groups is None and views is None else None
    found = Found(hits, groups, targets[0], options, measurable, views)
    if isinstance(calibrated, str):
        return found
    if not is_of_all:
        best = _search(gallery, replace(query, grouping=None), targets, CANDIDATES, of_all)[0]
    answered = [*hits, *(hit for group in groups or () for hit in group.hits)]
    shares, by = Shares(calibrated, prior, best, answered), _grouped_by(query)
    if (least := query.min_probability) is not None:
        hits = [hit for hit in hits if shares.of(hit) >= least]
        groups = groups and [group for group in groups if shares.of_group(group, by) >= least]
    none = shares.of_none(hits, groups, by)
    return replace(found, hits=hits, groups=groups, shares=shares, none=none)


def _grouped_by(query: Query) -> str:
    return "" if query.grouping is None else query.grouping.by


def _search(
    gallery: Gallery, query: Query, targets: Embeddings, k: int, options: SearchOptions
) -> tuple[list[Hit], list[Group] | None, Mapping[ItemId, View | VectorView] | None]:
    """Hits or groups, and for `best_view` the view that found each."""
    if query.best_view:
        return _search_views(gallery, query, targets, k, options)
    if query.grouping is None:
        [hits] = gallery.search(targets, k, options)
        return hits, None, None
    [groups] = gallery.search_groups(targets, k, query.grouping, options)
    return [], groups, None


def _search_views(
    gallery: Gallery, query: Query, targets: Embeddings, k: int, options: SearchOptions
) -> tuple[list[Hit], list[Group] | None, Mapping[ItemId, View | VectorView]]:
    """Search with each view separately."""
    grouping, views = query.grouping, query.views
    if grouping is None:
        hits = best_of_views(lambda depth, whole: gallery.search(targets, depth, whole), k, options)
        return [hit for hit, _ in hits], None, {hit.id: views[n] for hit, n in hits}
    groups = best_of_views(
        lambda depth, whole: gallery.search_groups(targets, depth, grouping, whole), k, options
    )
    found_by = {group.hits[0].id: views[n] for group, n in groups}
    return [], [group for group, _ in groups], found_by


def _model(served: Served, query: Query) -> Model:
    """The model for the images of a query: words are added to whole vectors."""
    return served.model.whole if query.texts else served.model


def _targets(
    served: Served, query: Query, vectors: Sequence[Vector], words: Embeddings
) -> tuple[Embeddings, frozenset[int], Sequence[Item]]:
    """The query vector (1, D), or (V, D) for `best_view`; the ids of items to exclude from the
    results; the liked items.
    """
    if not query.texts:
        return _liked(served, query, vectors)
    model = served.model
    has_likes = bool(query.positives) or query.like is not None
    if (has_likes or query.negatives) and model.whole is not model:
        raise InvalidParameterError(
            f"texts cannot be combined with items in a gallery of the first {model.dim:,} numbers "
            "of each vector; send an image of the item, or omit texts."
        )
    encoder, weights = model.embedder.words(), [weight for _, weight in query.texts]
    if not (query.views or has_likes):
        alone = first_numbers(encoder.joined(None, words, weights), model.dim)
        return _liked(served, query, list(alone), [1.0])
    targets, exclude, items = _liked(served, query, vectors)
    return first_numbers(encoder.joined(targets, words, weights), model.dim), exclude, items


def _liked(
    served: Served,
    query: Query,
    vectors: Sequence[Vector],
    weights: Sequence[float] | None = None,
) -> tuple[Embeddings, frozenset[int], Sequence[Item]]:
    """As `_targets`, for `vectors` with these weights, or those of the views."""
    if query.best_view:
        return np.stack(vectors), frozenset(), []
    gallery, positives = served.gallery, query.positives
    if query.like is not None:
        served.check_generation(query.generation)
        positives = (gallery.item(query.like).key, *positives)
    keys = [*positives, *query.negatives]
    weights = [view.weight for view in query.views] if weights is None else weights
    if not keys and weights == [1.0]:
        return np.ascontiguousarray(vectors[0][np.newaxis]), frozenset(), []
    stored = [entry.vector for entry in gallery.entries(keys)] if keys else []
    liked = np.stack([*vectors, *stored[: len(positives)]])
    disliked = np.asarray(stored[len(positives) :], dtype=np.float32)
    items = gallery.stored(keys) if keys else {}
    exclude = frozenset(item.id for item in items.values())
    liked_items = [items[key] for key in positives if key in items]
    target = combined_query(liked, disliked, [*weights, *[1.0] * len(positives)])
    return target[np.newaxis], exclude, liked_items


def _prior_of(gallery: IndexedGallery, product: str, liked: Sequence[Item], prior: float) -> float:
    """The prior probability that no other item shows a product of the `liked` items, which are
    excluded from the results. If all of them name their product it is known: 0 or 1.
    """
    named = [single(item.attributes.get(product)) for item in liked]
    values = [value for value in named if value is not None]
    if len(values) < len(liked):
        return prior
    counts = Counter((isinstance(value, bool), value) for value in values)
    has_more = [gallery.has_more(product, value, n) for (_, value), n in counts.items()]
    return 0.0 if any(has_more) else 1.0


def calibrated_by(served: Served) -> Calibrated | str:
    """The calibration that a gallery uses now, or the reason why there is none."""
    model = served.model
    if served.calibrator is None:
        return "Galleries on Milvus are not calibrated"
    if isinstance(served.gallery, GalleryView):
        return FILTERED
    return choose(served.calibrator.stored(), model.calibration, model.no_calibration)


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
        is_measurable = found.ranked is not None and not found.options.reorders
        if not self._every or not is_measurable or found.options.exact:
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
                options = replace(found.options, exact=True, checkpoint=no_checkpoint)
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
