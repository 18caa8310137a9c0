"""The served galleries, each with its model: leased for a request, and swapped atomically.

    look at every CURRENT ─► changed? open it ─► warm up its model ─► self-check ─► one assignment
      one thread, 1 s          a few threads         the old gallery is closed after its last lease

A gallery that nobody changes costs one `stat` a second and no thread.
"""

import asyncio
import contextlib
import copy
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog

from kinlens.embedder.errors import (
    AccessError,
    BundleMismatchError,
    BundleNotFoundError,
    DeadlineExceededError,
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryNotFoundError,
    ImageMissingError,
    ItemNotFoundError,
    KinlensError,
    OverloadedError,
)
from kinlens.embedder.session import fitted
from kinlens.embedder.types import ItemId
from kinlens.indexer.galleries import MilvusStore
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.uploads import UploadFolder
from kinlens.quality.calibration import Calibrated
from kinlens.quality.calibrator import Calibrator
from kinlens.service.access.keys import CALLER, Binding
from kinlens.service.access.links import VERSION_DIGITS
from kinlens.service.concurrency import (
    BoundedPool,
    DaemonThreads,
    KeyedThreads,
    begin_in_thread,
    in_thread,
    too_late,
    within,
)
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.locations import (
    Gallery,
    GalleryLocation,
    Locations,
    Opened,
    Stamp,
    is_name,
    unknown_gallery,
)
from kinlens.service.galleries.uploads import SharedUploads
from kinlens.service.galleries.view import GalleryView

T = TypeVar("T")

_CLOSE_S = 5.0
_READ_S = 10.0
_REPORT_EVERY_S = 30.0
_UNKNOWN_AT_ONCE = 16
_LOCATION_S = 2.0  # a healthy disk or server answers much sooner
_HANGS = "It continues, and the gallery is served once it is open. Check its disk or server."
_OPENERS = 4
_CALLS = 16
_FIT_S = 600.0  # after which a calibration hangs; the largest gallery takes seconds
_VISIBLE_S = 5.0  # until which a change is visible: its file changes before it is on the disk
_PAUSE = 20  # times as long as it took to find a calibration not outdated, until the next time
_REMOTE_READS = 2  # of the openers, so that servers that are away leave the others
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


FILTERED = "The key has a filter, and probabilities are calibrated for all items"
"""Why a gallery is not calibrated for a key with a filter."""


class _Usage:
    """The leases, running reads and last report of a gallery, shared by all its views."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self.leases = 1  # the registry has the first one while it serves the gallery
        self.reads: dict[object, float] = {}  # start time of each running read
        self.read_at = time.monotonic()  # when the last read ended
        self.reported_at = -math.inf  # when an image file was last reported missing
        self.lock = threading.Lock()


class _Read:
    """A read of a gallery while it runs."""

    def __init__(self, usage: _Usage) -> None:
        self._usage = usage

    def __enter__(self) -> None:
        self._usage.reads[self] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        del self._usage.reads[self]
        self._usage.read_at = time.monotonic()


class Served:
    """A gallery and the model that made its vectors. It counts leases, and calls `close` once: when
    it has been replaced and the last lease is released. Thread safe.

    `gallery` has the items that the caller may see: for a key with a filter, a view of the `whole`.
    """

    def __init__(
        self,
        gallery: Opened,
        model: Model,
        location: GalleryLocation,
        close: Callable[[], None],
    ) -> None:
        self.gallery: Gallery = gallery
        self.whole = gallery
        self.model = model
        self.name = location.name
        self.path = location.path
        self.managed = location.managed
        self.follows = location.follows
        self.is_remote = isinstance(gallery, MilvusStore)
        self.calibrated: Calibrated | str = "No search yet"  # the calibration of the last search
        self.calibrator = Calibrator(gallery) if isinstance(gallery, IndexedGallery) else None
        self.is_checked = False  # whether misfits of vectors and checksums have been logged
        self.is_to_examine = self.calibrator is not None  # whether its calibration is outdated
        self.changed_at = -math.inf  # when its catalogue was last seen to have changed
        self.examine_at = 0.0  # not before this time, by the clock of `time.monotonic`
        self._shared = location.uploads
        self._usage = _Usage(close)

    def seen_by(self, binding: Binding) -> "Served":
        """This gallery limited to the items that the binding permits; leases count together."""
        if binding.where is None:
            return self
        seen = copy.copy(self)
        seen.gallery = GalleryView(self.whole, binding.where)
        seen.calibrated = FILTERED
        return seen

    def require_whole(self) -> Opened:
        """The gallery with all its items. Raises: AccessError if the key of the caller has a
        filter.
        """
        if isinstance(self.gallery, GalleryView):
            raise AccessError(
                f"This operation needs all items of gallery {self.name}, and the key has a filter. "
                "Send a key that was made without --filter."
            )
        return self.whole

    @property
    def scope(self) -> str:
        """The filter of the view as a string for cache keys; empty without a filter."""
        return repr(self.gallery.where) if isinstance(self.gallery, GalleryView) else ""

    @property
    def uploads(self) -> UploadFolder | SharedUploads | None:
        """Its uploaded images, or those that were published with the gallery that it follows; None
        if it has no upload store.
        """
        if self.path is None or self.follows is not None:
            return self._shared
        return UploadFolder(self.path)

    def refuse_if_followed(self) -> None:
        """Raises: GalleryConflictError if the gallery is a copy, which cannot be changed."""
        if self.follows is not None:
            raise GalleryConflictError(
                f"Gallery {self.name} is a copy that follows {self.follows}. Change it at the "
                "service that publishes it."
            )

    def discard_uploads(self, sha256s: Sequence[str]) -> None:
        """Remove these images from a shared store if no item uses them; a folder is swept."""
        if isinstance(self.whole, MilvusStore) and self._shared is not None:
            self._shared.discard(sha256s, self.whole.kept_contents)

    def report_missing(self, item_id: ItemId, error: ImageMissingError) -> None:
        """Log a missing image file, since visitors only see a placeholder. A page can miss many, so
        one of them is logged every 30 seconds.
        """
        if (now := time.monotonic()) - self._usage.reported_at < _REPORT_EVERY_S:
            return
        self._usage.reported_at = now
        log = structlog.get_logger()
        log.warning("image file is missing", gallery=self.name, item=item_id, detail=str(error))

    def check_generation(self, version: str | None, current: str | None = None) -> None:
        """Check that an item id comes from the `current` generation, by default the served one.

        In another generation an id names another item. Ids on Milvus are permanent and always pass.

        Raises: ItemNotFoundError for an id from another generation.
        """
        current = current or self.gallery.generation
        if version is not None and not self.is_remote and not current.startswith(version):
            raise ItemNotFoundError(
                f"This link is from build {version[:VERSION_DIGITS]} of gallery {self.name}, which "
                f"was rebuilt and is at build {current[:VERSION_DIGITS]} now. Search again."
            )

    def reading(self) -> AbstractContextManager[object]:
        """Hold this around work that reads the gallery: `refuse_if_hanging` needs its duration."""
        return _Read(self._usage)

    def refuse_if_hanging(self, limit_s: float) -> None:
        """Refuse new reads while a read has run longer than `limit_s` and no read has ended since
        it began: the disk does not answer, and each new read would block another thread.

        Raises: OverloadedError.
        """
        oldest = min(list(self._usage.reads.values()), default=math.inf)
        longest = time.monotonic() - max(oldest, self._usage.read_at)
        if longest > limit_s:
            raise OverloadedError(
                f"Gallery {self.name} does not answer: reads have been running for "
                f"{longest:.0f} s. Check its disk. Try again when it answers."
            )

    def acquire(self) -> bool:
        """Acquire a lease; False if the gallery is already closed."""
        with self._usage.lock:
            if self._usage.leases == 0:
                return False
            self._usage.leases += 1
            return True

    def release(self) -> None:
        """Release a lease; the last release closes the gallery."""
        with self._usage.lock:
            self._usage.leases -= 1
            is_last = self._usage.leases == 0
        if is_last:
            self._usage.close()


async def change(
    pool: BoundedPool, served: Served, work: Callable[[], T], limit_s: float, *, bulk: bool = False
) -> T:
    """Run `work`, a change of the gallery `served`, in a thread of `pool`. It keeps its own lease,
    since it continues after the limit; the caller has one, too.

    Raises: DeadlineExceededError after `limit_s`, OverloadedError, any error of `work`.
    """
    served.acquire()
    cure = "It may still be made: read the items before you send it again."
    subject = f"Gallery {served.name}"
    async with within(limit_s, f"The change of gallery {served.name}", cure):
        return await pool.run(work, bulk=bulk, subject=subject, after=served.release)


class Registry:
    """Leases galleries by name. A caller gets only galleries that its key is bound to, limited by
    the filter of the key (`kinlens.service.access.keys`); others are unknown to it.

    Leases, names and folders may be used in any thread, everything else only in the thread of the
    event loop.
    """

    def __init__(
        self,
        locations: Locations,
        models: Models,
        primary: str,
        *,
        open_gallery: Callable[[GalleryLocation], Opened],
        on_failure: Callable[[str], None],
        on_forget: Callable[[str], None],
    ) -> None:
        """Open all galleries and their embedders. A managed gallery that cannot be opened is
        skipped; for any other this fails.

        primary: the bundle to run while there is no gallery.
        on_failure: called with the name of a gallery each time that it cannot be opened.
        on_forget: called with the name of a deleted gallery.

        Raises: GalleryError, BundleError.
        """
        self.failures = Failures(on_failure)
        self._locations = locations
        self._models = models
        self._primary = primary
        self._open_gallery = open_gallery
        self._on_forget = on_forget
        self._opened: dict[GalleryLocation, Opened] = {}  # until `start` serves them
        self._served: dict[str, Served] = {}  # in the order of the service
        self._listed: set[str] = set()  # names of the last look
        self._stamps: dict[str, Stamp] = {}  # of each CURRENT when it was last read
        self._looking: set[asyncio.Task[None]] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._closings: set[futures.Future[None]] = set()
        self._openers = DaemonThreads("gallery", _OPENERS, _LOCATION_S)
        self._calibrators = DaemonThreads("calibration", 1, _FIT_S)
        self._remote = asyncio.Semaphore(_REMOTE_READS)
        self._looks = KeyedThreads(_CALLS)
        self._descriptions = KeyedThreads(_CALLS)  # which galleries that hang may all hold
        self._watching: asyncio.Task[None] | None = None
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
            await self._call(location.name, partial(self._begin_compaction, gallery, location))
            del self._opened[location]
            self._served[location.name] = self._make_served(location, gallery, model)
        await self._drop_models()
        self._watching = asyncio.create_task(self._watch(interval_s))

    async def stop(self) -> None:
        """Close every gallery that was opened here and stop the models, in a bounded time."""
        self._is_stopped = True  # so that galleries that are being opened now are closed again
        watching = [*self._looking]
        if self._watching is not None:
            watching.append(self._watching)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        if self._reading:
            _, hanging = await asyncio.wait(self._reading.values(), timeout=_LOCATION_S)
            for reading in hanging:
                reading.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        self._close_opened()
        all_served, self._served = self._served, {}
        for served in all_served.values():
            served.release()
        await in_thread(self._models.close)
        await in_thread(self._join)

    @property
    def model(self) -> Model:
        """The model of the caller's first gallery; if it has none, any running model."""
        first = self._first()
        return self._models.running()[0] if first is None else first.model.whole

    def models(self) -> list[Model]:
        """The models of the caller's galleries; for a caller without a binding also those of no
        gallery.
        """
        binding = CALLER.get()
        served = [one.model.whole for name, one in self._served.items() if binding.permits(name)]
        others = [] if binding.is_bound else self._models.running()
        return list(dict.fromkeys([*served, *others]))

    def names(self) -> list[str]:
        """The names of the caller's galleries; the first is the default."""
        binding = CALLER.get()
        return [name for name in self._served if binding.permits(name)]

    def galleries(self) -> dict[str, Opened]:
        """All galleries by name, also before `start`. Requests must use `lease` instead."""
        served = {name: served.whole for name, served in self._served.items()}
        return served | {location.name: gallery for location, gallery in self._opened.items()}

    def folders(self, *, copies: bool = False) -> list[Path]:
        """The folders of all galleries in folders, with or without `copies` of followed ones."""
        all_served = self._served.values()
        return [one.path for one in all_served if one.path and (copies or one.follows is None)]

    @contextlib.contextmanager
    def lease(self, name: str | None = None) -> Iterator[Served]:
        """Lease a gallery, by default the first, with its model; neither is closed until the lease
        ends. Raises: GalleryNotFoundError naming the known galleries.
        """
        served = self._get(name)
        while not served.acquire():  # it has just been replaced
            served = self._get(name)
        served = served.seen_by(CALLER.get())
        try:
            yield served
        finally:
            served.release()

    @contextlib.asynccontextmanager
    async def find(self, name: str | None) -> AsyncIterator[Served]:
        """Lease a gallery, also one that another process has just made."""
        await self.refresh_if_unknown(name)
        with self.lease(name) as served:
            yield served

    async def describe_each(self, describe: Callable[[Served], T]) -> tuple[list[T], list[str]]:
        """The result of `describe` for each gallery, and the names of galleries that did not answer
        in time, failed, or have not been opened.
        """
        closed = self.failures.verdicts().keys() - self._served.keys()
        silent = {*filter(CALLER.get().permits, closed)}

        async def ask(name: str) -> list[T]:
            try:
                with self.lease(name) as served:
                    work = partial(describe, served)
                    key = served.whole, served.scope  # shared by callers who see the same
                    return [await self._descriptions.run(key, work, _LOCATION_S)]
            except GalleryNotFoundError:
                pass  # it has just been deleted
            except (KinlensError, TimeoutError) as error:
                structlog.get_logger().warning("gallery not listed", gallery=name, exc_info=error)
                silent.add(name)
            return []

        found = await asyncio.gather(*map(ask, self.names()))
        return [one for part in found for one in part], sorted(silent)

    async def refresh_if_unknown(self, name: str | None) -> None:
        """Look for a gallery of an unknown name: another process may have just made it.

        A gallery that the caller is not bound to is not looked up: the time of the response would
        reveal whether it exists.
        """
        if name is None or name in self._served or not is_name(name):
            return
        if not CALLER.get().permits(name):
            return
        # While the disk hangs, names that clients make up do not pile up.
        if len(self._reading.keys() - self._listed) >= _UNKNOWN_AT_ONCE:
            return
        with contextlib.suppress(DeadlineExceededError):  # `_read` reports it
            await self.read_from_disk(_LOCATION_S, name)

    async def read_from_disk(self, limit_s: float = _READ_S, name: str | None = None) -> None:
        """Read a gallery, by default the first, from the disk after this call, and serve it if it
        was changed or made, or not if it was deleted.

        Raises: DeadlineExceededError after `limit_s`.
        """
        if name is None:
            name = next(iter(self._served), "")
        location = self._locations.find(name)
        if location is None:
            return
        cure = "It continues; try again in a second."
        async with within(limit_s, "Reading the gallery from the disk", cure):
            if name in self._reading:  # it may have begun before this call
                await asyncio.wait((self._reading[name],))
            await asyncio.wait((self._begin_reading(location),))

    def _get(self, name: str | None) -> Served:
        if name is None:
            if (first := self._first()) is not None:
                return first
            raise GalleryNotFoundError(
                "This service has no gallery yet. Make one with POST /galleries, or start the "
                "service with --gallery."
            )
        served = self._served.get(name)
        if served is None or not CALLER.get().permits(name):
            raise unknown_gallery(name, self.names())
        return served

    def _first(self) -> Served | None:
        """The default gallery of the caller."""
        bound = CALLER.get().galleries
        if bound is None:
            return next(iter(self._served.values()), None)
        names = [name for name in bound if name in self._served]
        return self._served[min(names, key=self._locations.order)] if names else None

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
            self.failures.add(location, error)
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
        locations = await self._looks.run("list", self._locations.list_unread, _READ_S)
        self._listed = {location.name for location in locations}
        for name in (self._served.keys() | self.failures.verdicts().keys()) - self._listed:
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
            await asyncio.wait(looking, timeout=_LOCATION_S)
        self._looking = {task for task in self._looking if not task.done()}
        await self._drop_models()

    async def _look_at(self, device: object, locations: Sequence[GalleryLocation]) -> None:
        """Look at the galleries of a device, in one thread: if one hangs, the others would too."""
        looks: list[tuple[GalleryLocation, Stamp | None, bool]] = []

        def look() -> None:
            for location in locations:
                served = self._served.get(location.name)
                gallery = None if served is None else served.whole
                has_changed = isinstance(gallery, IndexedGallery) and gallery.has_changed()
                looks.append((location, location.stamp(), has_changed))

        if self._looks.is_running(device):
            return  # it is slow or hangs, which has been reported
        try:
            while (seen := len(looks)) < len(locations):
                with contextlib.suppress(TimeoutError):
                    await self._looks.run(device, look, _LOCATION_S)
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
        if name in self._reading or (is_same and name not in self.failures.verdicts()):
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
        late = loop.call_later(_LOCATION_S, self._report_late, location)
        try:
            async with self._remote if location.address else contextlib.nullcontext():
                location = await self._call(name, partial(self._read_generation, location))
            served = self._served.get(name)
            if location.managed and not location.exists:
                self._forget(name)
            elif served is not None and served.whole.generation == location.generation:
                self.failures.clear(name)
            elif not self.failures.is_waiting(location):
                await self._reload(location)
        except Exception as error:
            # Whatever is wrong with a new generation, the old one must stay served.
            if not self.failures.is_waiting(location):
                self._fail(location, error)
        finally:
            late.cancel()
            del self._reading[name]
        await self._drop_models()

    def _report_late(self, location: GalleryLocation) -> None:
        error = too_late(_LOCATION_S, f"Opening gallery {location.name!r}", _HANGS)
        self._fail(location, error, f"no result within {_LOCATION_S:g} s")

    def _fail(self, location: GalleryLocation, error: Exception, verdict: str = "") -> None:
        """Report a fault, unless the name is any that a client has sent: a gallery of that name is
        listed at the next look, which reads it again.
        """
        if location.name in self._listed:
            self.failures.add(location, error, verdict)

    def _read_generation(self, location: GalleryLocation) -> GalleryLocation:
        """The location with its current generation; while Milvus does not answer, with the last
        known one.
        """
        served = self._served.get(location.name)
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
            await self._call(name, partial(self._begin_compaction, gallery, location))
            if self._is_stopped:
                raise GalleryNotFoundError("The service is stopping.")
        except BaseException:
            self._close(location, gallery)
            raise
        self.failures.clear(name)
        self._serve(location, gallery, model)
        structlog.get_logger().info(
            "gallery loaded",
            gallery=name,
            generation=gallery.generation,
            bundle_id=model.bundle_id,
        )

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
        served = self._served.get(name)
        if served is not None and isinstance(served.whole, IndexedGallery) and served.acquire():
            refreshing = self._openers.submit(served.whole.refresh, subject=name)
            refreshing.add_done_callback(lambda _: served.release())

    def _examine(self, name: str, has_changed: bool) -> None:
        """Check the vectors of a new gallery, and calibrate it again if it has changed enough; one
        gallery at a time.
        """
        served = self._served.get(name)
        if served is None or served.calibrator is None:
            return
        now = time.monotonic()
        if has_changed:
            served.changed_at = now
        served.is_to_examine |= now < served.changed_at + _VISIBLE_S
        is_time = now >= served.examine_at
        if served.is_to_examine and is_time and served.acquire():
            served.is_to_examine, served.examine_at = False, math.inf
            work = partial(_examine, served, self._refuse_if_stopped)
            self._calibrators.submit(work, subject=name).add_done_callback(
                lambda _: served.release()
            )

    def _refuse_if_stopped(self, _: int) -> None:
        if self._is_stopped:
            raise GalleryBusyError("The calibration was cancelled: the service is stopping.")

    def _make_served(self, location: GalleryLocation, gallery: Opened, model: Model) -> Served:
        fitting = model.first(gallery.dim)
        return Served(gallery, fitting, location, lambda: self._close(location, gallery))

    def _serve(self, location: GalleryLocation, gallery: Opened, model: Model) -> None:
        """Serve a gallery from the next lease on, in place of the old one of this name."""
        old = self._served.get(location.name)
        every = self._served | {location.name: self._make_served(location, gallery, model)}
        if old is None:
            every = {name: every[name] for name in sorted(every, key=self._locations.order)}
        self._served = every
        if old is not None:
            old.release()

    def _forget(self, name: str) -> None:
        """Stop serving a gallery that was deleted."""
        removed = self._served.get(name)
        self._served = {other: own for other, own in self._served.items() if other != name}
        self._stamps.pop(name, None)
        self.failures.clear(name)
        self._on_forget(name)
        if removed is not None:
            removed.release()

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
        used = {served.model.bundle_id for served in self._served.values()}
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


@dataclass(frozen=True, slots=True)
class _Failure:
    generation: str | None
    verdict: str
    pause_s: float
    retry_at: float


class Failures:
    """Galleries that could not be opened; each is retried after a pause that doubles."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._failures: dict[str, _Failure] = {}

    def verdicts(self) -> dict[str, str]:
        """The fault of each gallery by name, without internal details of the service."""
        return {name: failure.verdict for name, failure in self._failures.items()}

    def is_waiting(self, location: GalleryLocation) -> bool:
        """Whether this generation failed recently and must not be retried yet."""
        failure = self._failures.get(location.name)
        if failure is None or failure.generation != location.generation:
            return False
        return time.monotonic() < failure.retry_at

    def add(self, location: GalleryLocation, error: Exception, verdict: str = "") -> None:
        """Record, count and log that a generation could not be opened."""
        name, generation = location.name, location.generation
        last = self._failures.get(name)
        is_again = last is not None and last.generation == generation
        pause_s = min(2 * last.pause_s, _LONGEST_PAUSE_S) if last and is_again else _FIRST_PAUSE_S
        verdict = verdict or f"generation {generation or 'none'} failed with {type(error).__name__}"
        self._failures[name] = _Failure(generation, verdict, pause_s, time.monotonic() + pause_s)
        self._on_failure(name)
        structlog.get_logger().error(
            "gallery not reloaded", gallery=name, generation=generation, exc_info=error
        )

    def clear(self, name: str) -> None:
        """Forget the failure of a gallery that was opened or deleted."""
        self._failures.pop(name, None)


def probe(gallery: Opened, model: Model) -> tuple[str, bool]:
    """Search a gallery with the reference image of its model. Returns its version, and whether the
    search works: a gallery with items has hits, and all scores are finite. Concurrent changes are
    allowed. Raises: GalleryError.
    """
    version, size = gallery.version, gallery.size
    [hits] = gallery.search(np.ascontiguousarray(model.reference_vector[np.newaxis]), 1)
    is_found = bool(hits) or not size or gallery.version != version
    return version, is_found and all(math.isfinite(hit.score) for hit in hits)


def _examine(served: Served, on_progress: Callable[[int], None]) -> None:
    """Examine the vectors of a new gallery, once, and the calibration. A failure is reported; the
    next change repeats the calibration.
    """
    assert served.calibrator is not None
    assert isinstance(served.whole, IndexedGallery)
    if not served.is_checked:
        served.is_checked = True
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
