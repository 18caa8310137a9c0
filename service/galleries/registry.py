"""The served galleries, each with its model: leased for a request, and swapped atomically.

`kinlens.service.galleries.reloads` opens them. A replaced gallery is closed after its last lease.
"""

import asyncio
import contextlib
import copy
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from kinlens.embedder.errors import (
    AccessError,
    DeadlineExceededError,
    GalleryConflictError,
    GalleryNotFoundError,
    ImageMissingError,
    ItemNotFoundError,
    KinlensError,
    OverloadedError,
)
from kinlens.embedder.types import ItemId
from kinlens.indexer.galleries import MilvusStore
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.uploads import UploadFolder
from kinlens.quality.calibration import Calibrated
from kinlens.quality.calibrator import Calibrator
from kinlens.service.access.keys import CALLER, Binding
from kinlens.service.access.links import VERSION_DIGITS
from kinlens.service.concurrency import BoundedPool, KeyedThreads, within
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.locations import (
    Gallery,
    GalleryLocation,
    Opened,
    unknown_gallery,
)
from kinlens.service.galleries.uploads import SharedUploads
from kinlens.service.galleries.view import GalleryView
from kinlens.service.observe.metrics import Metrics

T = TypeVar("T")

LOCATION_S = 2.0
"""Limit of one read of a gallery; a healthy disk or server answers much sooner."""

_REPORT_EVERY_S = 30.0
_CALLS = 16
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
        # By the clock of `time.monotonic`, for the next check of its calibration:
        self.changed_at = 0.0  # when its catalogue was last seen to have changed
        self.examined_at = 0.0  # when the last check began
        self.examine_at = 0.0  # no check before this time
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
        structlog.get_logger().warning(
            "image file is missing", gallery=self.name, item=item_id, detail=str(error)
        )

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

    Attributes:
        served: the galleries by name, in the order of the service. Requests must use `lease`.
        failures: the galleries that could not be opened.
        read_from_disk: reads a gallery, by default the first, from the disk after this call, and
            serves it if it was changed or made, or not if it was deleted. Its arguments are those
            of `Reloads.read`.
    """

    def __init__(
        self,
        models: Models,
        order: Callable[[str], tuple[int, str]],
        failures: "Failures",
        read_from_disk: Callable[..., Awaitable[None]],
    ) -> None:
        self.failures = failures
        self.read_from_disk = read_from_disk
        self._models = models
        self._order = order
        self.served: dict[str, Served] = {}
        self._descriptions = KeyedThreads(_CALLS)  # which galleries that hang may all hold

    def serve(self, served: Served) -> None:
        """Lease a gallery from now on, in place of the old one of this name."""
        old = self.served.get(served.name)
        every = self.served | {served.name: served}
        self.served = {name: every[name] for name in sorted(every, key=self._order)}
        if old is not None:
            old.release()

    def forget(self, name: str) -> None:
        """Lease a gallery no more, after it was deleted."""
        removed = self.served.get(name)
        self.served = {other: own for other, own in self.served.items() if other != name}
        self.failures.clear(name)
        if removed is not None:
            removed.release()

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
        served = [one.model.whole for name, one in self.served.items() if binding.permits(name)]
        others = [] if binding.is_bound else self._models.running()
        return list(dict.fromkeys([*served, *others]))

    def names(self) -> list[str]:
        """The names of the caller's galleries; the first is the default."""
        binding = CALLER.get()
        return [name for name in self.served if binding.permits(name)]

    def folders(self, *, copies: bool = False) -> list[Path]:
        """The folders of all galleries in folders, with or without `copies` of followed ones."""
        all_served = self.served.values()
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
        closed = self.failures.verdicts().keys() - self.served.keys()
        silent = {*filter(CALLER.get().permits, closed)}

        async def ask(name: str) -> list[T]:
            try:
                with self.lease(name) as served:
                    work = partial(describe, served)
                    key = served.whole, served.scope  # shared by callers who see the same
                    return [await self._descriptions.run(key, work, LOCATION_S)]
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
        if name is not None and name not in self.served and CALLER.get().permits(name):
            with contextlib.suppress(DeadlineExceededError):  # which is reported
                await self.read_from_disk(LOCATION_S, name, is_guess=True)

    def _get(self, name: str | None) -> Served:
        if name is None:
            if (first := self._first()) is not None:
                return first
            raise GalleryNotFoundError(
                "This service has no gallery yet. Make one with POST /galleries, or start the "
                "service with --gallery."
            )
        served = self.served.get(name)
        if served is None or not CALLER.get().permits(name):
            raise unknown_gallery(name, self.names())
        return served

    def _first(self) -> Served | None:
        """The default gallery of the caller."""
        bound = CALLER.get().galleries
        if bound is None:
            return next(iter(self.served.values()), None)
        names = [name for name in bound if name in self.served]
        return self.served[min(names, key=self._order)] if names else None


@dataclass(frozen=True, slots=True)
class _Failure:
    generation: str | None
    verdict: str
    pause_s: float
    retry_at: float


class Failures:
    """Galleries that could not be opened; each is retried after a pause that doubles."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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
        self._metrics.reload_failures.labels(name).inc()
        structlog.get_logger().error(
            "gallery not reloaded", gallery=name, generation=generation, exc_info=error
        )

    def clear(self, name: str) -> None:
        """Forget the failure of a gallery that was opened or deleted."""
        self._failures.pop(name, None)
