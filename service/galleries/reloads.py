"""Opens the galleries, and again those that change, for the registry to serve.

    look at every CURRENT ─► changed? open it ─► warm up its model ─► self-check ─► one assignment
      one thread, 1 s          a few threads         the old gallery is closed after its last lease

A gallery that nobody changes costs two `stat` a second and no thread.
"""

import asyncio
import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import structlog

from kinlens.embedder.errors import (
    BundleMismatchError,
    BundleNotFoundError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryNotFoundError,
    KinlensError,
)
from kinlens.embedder.session import fitted
from kinlens.indexer.galleries import MilvusStore
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.service.concurrency import (
    DaemonThreads,
    KeyedThreads,
    begin_in_thread,
    in_thread,
    too_late,
    within,
)
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.locations import (
    GalleryLocation,
    Locations,
    Opened,
    Stamp,
    open_gallery,
)
from kinlens.service.galleries.registry import LOCATION_S, Failures, Registry, Served
from kinlens.service.observe.metrics import Metrics
from kinlens.service.settings import Settings

T = TypeVar("T")

_CLOSE_S = 5.0
_LIST_S = 10.0
_UNKNOWN_AT_ONCE = 16
_HANGS = "It continues, and the gallery is served once it is open. Check its disk or server."
_CONTINUES = "It continues; try again in a second."
_OPENERS = 4
_DEVICES_AT_ONCE = 16
_FIT_S = 600.0  # after which a calibration hangs; the largest gallery takes seconds
_VISIBLE_S = 5.0  # until which a change is visible: its file changes before it is on the disk
_PAUSE = 20  # times as long as it took to find a calibration not outdated, until the next time
_REMOTE_READS = 2  # of the openers, so that servers that are away leave the others


class Reloads:
    """Opens the galleries of `locations`, and again those that change. It runs in the thread of the
    event loop.

    Attributes:
        registry: the galleries that it serves.
    """

    def __init__(
        self,
        locations: Locations,
        models: Models,
        primary: str,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Open all galleries and their embedders. A managed gallery that cannot be opened is
        skipped; for any other this fails.

        primary: the bundle to run while there is no gallery.

        Raises: GalleryError, BundleError.
        """
        self._failures = Failures(metrics)
        self.registry = Registry(models, locations.order, self._failures, self.read)
        self._locations = locations
        self._models = models
        self._primary = primary
        self._open_gallery = partial(
            open_gallery, settings=settings, on_call=metrics.observe_milvus
        )
        self._metrics = metrics
        self._opened: dict[GalleryLocation, Opened] = {}  # until `start` serves them
        self._listed: set[str] = set()  # names of the last look
        self._stamps: dict[str, Stamp] = {}  # of each CURRENT when it was last read
        self._looking: set[asyncio.Task[None]] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._closings: set[futures.Future[None]] = set()
        self._openers = DaemonThreads("gallery", _OPENERS, LOCATION_S)
        self._calibrators = DaemonThreads("calibration", 1, _FIT_S)
        self._remote = asyncio.Semaphore(_REMOTE_READS)
        self._looks = KeyedThreads(_DEVICES_AT_ONCE)
        self._is_stopped = False
        try:
            for location in locations.list_galleries():
                self._listed.add(location.name)
                self._open_first(location)
            if not self._opened:
                models.open(primary)
        except BaseException:
            self._close_opened()
            raise

    async def start(self, interval_s: float) -> None:
        """Warm up the models, serve the galleries, and look at them every `interval_s`."""
        for location, gallery in list(self._opened.items()):
            model = await self._models.get(gallery.bundle_id, gallery.precision)
            await self._serve(location, gallery, model)
            del self._opened[location]
        await self._drop_models()
        self._looking.add(asyncio.create_task(self._watch(interval_s)))

    async def stop(self) -> None:
        """Close every gallery that was opened here and stop the models, in a bounded time."""
        self._is_stopped = True  # so that galleries that are being opened now are closed again
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        if self._reading:
            _, hanging = await asyncio.wait(self._reading.values(), timeout=LOCATION_S)
            for reading in hanging:
                reading.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        self._close_opened()
        for name in [*self.registry.served]:
            self.registry.forget(name)
        await in_thread(self._models.close)
        await in_thread(self._join)

    async def read(
        self, limit_s: float, name: str | None = None, *, is_guess: bool = False
    ) -> None:
        """Read a gallery, by default the first, from the disk after this call, and serve it if it
        was changed or made, or not if it was deleted.

        Args:
            limit_s: how long this waits.
            name: the name of the gallery.
            is_guess: whether a client may have made up the name. While the disk hangs, only a few
                such names are read, so that they do not pile up.

        Raises: DeadlineExceededError after `limit_s`.
        """
        if is_guess and len(self._reading.keys() - self._listed) >= _UNKNOWN_AT_ONCE:
            return
        if name is None:
            name = next(iter(self.registry.served), "")
        location = self._locations.find(name)
        if location is None:
            return
        async with within(limit_s, "Reading the gallery from the disk", _CONTINUES):
            if location.name in self._reading:  # it may have begun before this call
                await asyncio.wait((self._reading[location.name],))
            await asyncio.wait((self._begin_reading(location),))

    def _open_first(self, location: GalleryLocation) -> None:
        """Open a gallery and its bundle, before the event loop runs."""
        try:
            stamp = location.stamp()  # before it is opened, so the first look sees later changes
            gallery = self._opened[location] = self._open_gallery(location)
            try:
                facts = self._models.open(gallery.bundle_id, gallery.precision)
            except BundleNotFoundError as error:
                raise BundleMismatchError(
                    f"Gallery {location.name!r} cannot be served. {error} Or rebuild the gallery: "
                    "kinlens-index build."
                ) from None
            fitted(gallery, facts)
            if stamp is not None:
                self._stamps[location.name] = stamp
        except KinlensError as error:
            if not location.managed:
                raise
            self._failures.add(location, error)
            if location in self._opened:
                self._close(location, self._opened.pop(location))

    async def _watch(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._look_at_all()
            except Exception as error:
                # The boundary of the task: a disk that fails now may work at the next look.
                structlog.get_logger().error("galleries cannot be read", exc_info=error)

    async def _look_at_all(self) -> None:
        """Begin to read each gallery that has changed or failed, and forget deleted ones."""
        locations = await self._looks.run("list", self._locations.list_unread, _LIST_S)
        self._listed = {location.name for location in locations}
        for name in (self.registry.served.keys() | self._failures.verdicts().keys()) - self._listed:
            if name not in self._reading:
                self._forget(name)
        devices = defaultdict[object, list[GalleryLocation]](list)
        for location in locations:
            if location.path is None and location.given is None:
                self._begin_if_changed(location, None)  # only its server knows
            else:
                stamp = self._stamps.get(location.name)
                devices[stamp[0] if stamp else location.name].append(location)
        looking = [asyncio.create_task(self._look_at(*each)) for each in devices.items()]
        self._looking.update(looking)
        if looking:  # a slow device does not keep the others waiting
            await asyncio.wait(looking, timeout=LOCATION_S)
        self._looking = {task for task in self._looking if not task.done()}
        await self._drop_models()

    async def _look_at(self, device: object, locations: Sequence[GalleryLocation]) -> None:
        """Look at the galleries of a device, in one thread: if one hangs, the others would too."""
        looks: list[tuple[GalleryLocation, Stamp | None, bool]] = []

        def look() -> None:
            for location in locations:
                served = self.registry.served.get(location.name)
                gallery = None if served is None else served.whole
                has_changed = isinstance(gallery, IndexedGallery) and gallery.has_changed()
                looks.append((location, location.stamp(), has_changed))

        if self._looks.is_running(device):
            return  # it is slow or hangs, which has been reported
        try:
            while (seen := len(looks)) < len(locations):
                with contextlib.suppress(TimeoutError):
                    await self._looks.run(device, look, LOCATION_S)
                if len(looks) == seen:
                    self._report_late(locations[seen])
                    return
            for location, stamp, has_changed in looks:
                self._begin_if_changed(location, stamp)
                if has_changed:
                    self._refresh(location.name)
                self._examine(location.name, has_changed)
        except Exception as error:
            # The boundary of the task: a disk that fails now may work at the next look.
            structlog.get_logger().error("galleries cannot be read", exc_info=error)

    def _begin_if_changed(self, location: GalleryLocation, stamp: Stamp | None) -> None:
        name = location.name
        is_same = stamp is not None and stamp == self._stamps.get(name)
        if name in self._reading or (is_same and name not in self._failures.verdicts()):
            return
        if stamp is not None:
            self._stamps[name] = stamp
        self._begin_reading(location)

    def _begin_reading(self, location: GalleryLocation) -> asyncio.Task[None]:
        """The task that reads a gallery, of which each has at most one."""
        name = location.name
        if name not in self._reading:
            self._reading[name] = asyncio.create_task(self._read(location))
        return self._reading[name]

    async def _read(self, location: GalleryLocation) -> None:
        """Read which generation is current, and serve it if it is new."""
        name = location.name
        loop = asyncio.get_running_loop()
        late = loop.call_later(LOCATION_S, self._report_late, location)
        try:
            async with self._remote if location.address else contextlib.nullcontext():
                location = await self._call(name, partial(self._read_generation, location))
            served = self.registry.served.get(name)
            if location.managed and not location.exists:
                self._forget(name)
            elif served is not None and served.whole.generation == location.generation:
                self._failures.clear(name)
            elif not self._failures.is_waiting(location):
                await self._reload(location)
        except Exception as error:
            # Whatever is wrong with a new generation, the old one must stay served.
            if not self._failures.is_waiting(location):
                self._fail(location, error)
        finally:
            late.cancel()
            del self._reading[name]
        await self._drop_models()

    def _report_late(self, location: GalleryLocation) -> None:
        error = too_late(LOCATION_S, f"Opening gallery {location.name!r}", _HANGS)
        self._fail(location, error, f"no result within {LOCATION_S:g} s")

    def _fail(self, location: GalleryLocation, error: Exception, verdict: str = "") -> None:
        """Report a fault, unless the name is any that a client has sent: a gallery of that name is
        listed at the next look, which reads it again.
        """
        if location.name in self._listed:
            self._failures.add(location, error, verdict)

    def _read_generation(self, location: GalleryLocation) -> GalleryLocation:
        """The location with its current generation; while Milvus does not answer, with the last
        known one.
        """
        served = self.registry.served.get(location.name)
        if served is None or not isinstance(gallery := served.whole, MilvusStore):
            return self._locations.read(location)
        try:
            current = gallery.current_generation()
        except KinlensError as error:
            structlog.get_logger().warning(
                "gallery on Milvus cannot be read", gallery=location.name, detail=str(error)
            )
            current = gallery.generation
        return replace(location, generation=current)

    async def _reload(self, location: GalleryLocation) -> None:
        """Open a gallery, and serve it if its model can search it."""
        name = location.name
        gallery = await self._call(name, partial(self._open_gallery, location))
        try:
            precision = await self._call(name, lambda: gallery.precision)  # on the disk
            model = await self._models.get(gallery.bundle_id, precision)
            await self._call(name, partial(_check_searches, location, gallery, model))
            await self._serve(location, gallery, model)
        except BaseException:
            self._close(location, gallery)
            raise
        self._failures.clear(name)
        structlog.get_logger().info(
            "gallery loaded",
            gallery=name,
            generation=gallery.generation,
            bundle_id=model.bundle_id,
        )

    async def _serve(self, location: GalleryLocation, gallery: Opened, model: Model) -> None:
        """Serve a gallery from the next lease on, in place of the old one of this name."""
        await self._call(location.name, partial(self._begin_compaction, gallery, location))
        if self._is_stopped:
            raise GalleryNotFoundError("The service is stopping.")
        close = partial(self._close, location, gallery)
        self.registry.serve(Served(gallery, model.first(gallery.dim), location, close))

    def _begin_compaction(self, gallery: Opened, location: GalleryLocation) -> None:
        """Compact a gallery in the background when it is due. One of the settings is left as it is
        until a write follows, and by a service without a state folder, which changes nothing.
        """
        if not isinstance(gallery, IndexedGallery):
            return
        gallery.when_full = "refuse"
        if location.managed:
            gallery.compact_in_background()
        elif self._locations.has_state and os.access(gallery.path, os.W_OK):
            gallery.compact_in_background(after_writes=True)

    def _refresh(self, name: str) -> None:
        """Open what another process has written to a gallery, before a search has to."""
        served = self.registry.served.get(name)
        if served is not None and isinstance(served.whole, IndexedGallery) and served.acquire():
            refreshing = self._openers.submit(served.whole.refresh, subject=name)
            refreshing.add_done_callback(lambda _: served.release())

    def _examine(self, name: str, has_changed: bool) -> None:
        """Check the vectors of a new gallery, and calibrate it again if it has changed enough; one
        gallery at a time.
        """
        served = self.registry.served.get(name)
        if served is None or served.calibrator is None:
            return
        now = time.monotonic()
        if has_changed:
            served.changed_at = now
        is_due = served.examined_at < served.changed_at + _VISIBLE_S and now >= served.examine_at
        if is_due and served.acquire():
            is_new, served.examined_at, served.examine_at = not served.examined_at, now, math.inf
            work = partial(_examine, served, self._refuse_if_stopped, is_new)
            examining = self._calibrators.submit(work, subject=name)
            examining.add_done_callback(lambda _: served.release())

    def _refuse_if_stopped(self, _: int) -> None:
        if self._is_stopped:
            raise GalleryBusyError("The calibration was cancelled: the service is stopping.")

    def _forget(self, name: str) -> None:
        """Stop serving a gallery that was deleted."""
        self._stamps.pop(name, None)
        self.registry.forget(name)
        self._metrics.forget(name)

    def _close(self, location: GalleryLocation, gallery: Opened) -> None:
        """Close a gallery in another thread: it may take as long as a compaction."""
        if location.given is None:
            closing = begin_in_thread(gallery.close)
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    def _close_opened(self) -> None:
        while self._opened:
            self._close(*self._opened.popitem())

    def _join(self) -> None:
        self._openers.close()
        self._calibrators.close()
        futures.wait(list(self._closings), _CLOSE_S)

    async def _drop_models(self) -> None:
        """Drop every model that no gallery uses; without any gallery, keep the primary one. A model
        that a search still uses is freed after that search.
        """
        if self._reading or self._is_stopped:
            return  # one may just have started its model
        used = {served.model.bundle_id for served in self.registry.served.values()}
        if not used:
            try:
                await self._models.get(self._primary)
            except KinlensError as error:
                structlog.get_logger().error("the primary bundle does not run", exc_info=error)
                return  # keep the other models, which are better than none
        await self._models.keep(used or {self._primary})

    async def _call(self, name: str, work: Callable[[], T]) -> T:
        """Call `work` in a thread; one at a time for each gallery, and for all unknown names."""
        subject = name if name in self._listed else ""
        return await asyncio.wrap_future(self._openers.submit(work, subject=subject))


def probe(gallery: Opened, model: Model) -> tuple[str, bool]:
    """Search a gallery with the reference image of its model. Returns its version, and whether the
    search works: a gallery with items has hits, and all scores are finite. Concurrent changes are
    allowed. Raises: GalleryError.
    """
    version, size = gallery.version, gallery.size
    [hits] = gallery.search(np.ascontiguousarray(model.reference_vector[np.newaxis]), 1)
    is_found = bool(hits) or not size or gallery.version != version
    return version, is_found and all(math.isfinite(hit.score) for hit in hits)


def _examine(served: Served, on_progress: Callable[[int], None], is_new: bool) -> None:
    """Examine the vectors of a new gallery, and the calibration. A failure is reported; the next
    change repeats the calibration.
    """
    assert served.calibrator is not None
    assert isinstance(served.whole, IndexedGallery)
    if is_new:
        try:
            served.whole.check_vectors()
        except Exception as error:
            # The boundary of the thread: a read of a damaged vector reports it, too.
            log = structlog.get_logger()
            log.warning("vectors not checked", gallery=served.name, exc_info=error)
    begun, fitted = time.monotonic(), False
    try:
        fitted = served.calibrator.fit_if_outdated(on_progress)
    except GalleryBusyError:
        pass  # the service is stopping
    except Exception as error:
        # The boundary of the thread: searches go on with the last calibration.
        structlog.get_logger().warning("calibration failed", gallery=served.name, exc_info=error)
    ended = time.monotonic()
    # A fit needs many changes, but each change may need a sample of the items.
    served.examine_at = ended if fitted else ended + _PAUSE * (ended - begun)


def _check_searches(location: GalleryLocation, gallery: Opened, model: Model) -> None:
    """Check that a gallery can be searched before it is served.

    Raises: GalleryError, InvalidParameterError.
    """
    fitted(gallery, model.embedder)
    _, is_searchable = probe(gallery, model.first(gallery.dim))
    if not is_searchable:
        raise GalleryCorruptError(
            f"Gallery {location.name!r} has {gallery.size:,} items, but a search found none of "
            "them. Rebuild its index: kinlens-index compact GALLERY --rebuild."
        )
