"""The galleries that are served, each with its model: leased for a request, swapped in one step.

look at the disk ─► open what is new ─► its model, warm ─► self-check ─► one assignment
                                                 the old one closes after its last user
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from embedder.errors import (
    DeadlineExceededError,
    GalleryError,
    GalleryNotFoundError,
    KinlensError,
)
from service.concurrency import DaemonThreads
from service.galleries.failures import Failures
from service.galleries.holding import Holding, held
from service.galleries.loading import Opened, OpenGallery, check_searches
from service.galleries.locations import Place, is_name
from service.galleries.lookout import Lookout
from service.galleries.types import Gallery
from service.search.model import Model, Models

T = TypeVar("T")
_SHOWN_NAME = 64
_THREADS = 2
_CLOSERS = 4  # to close one may take as long as its compaction
_CLOSE_S = 5.0
_LOOK_S = 10.0
_UNKNOWN_S = 2.0


class Looking(Protocol):
    """Where galleries are: `service.galleries.locations.Sources`."""

    def look(self) -> list[Place]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A gallery and the model that made its vectors; without `path` it was given open."""

    name: str
    gallery: Gallery
    model: Model
    path: Path | None
    managed: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    served: Served
    generation: str
    holding: Holding


class Registry:
    """Gives out galleries by name; everything here belongs to the thread of the event loop."""

    def __init__(
        self,
        sources: Looking,
        models: Models,
        primary: str,
        open_gallery: OpenGallery,
        opened: Sequence[Opened],
        failures: Failures,
    ) -> None:
        """Serves `opened` from the start; `primary` is the bundle that runs without a gallery."""
        self.failures = failures
        self._sources = sources
        self._models = models
        self._primary = primary
        self._open_gallery = open_gallery
        self._opened = list(opened)
        self._given = {one.name for one in opened if one.place is None}
        self._slots: dict[str, _Slot] = {}
        self._retired: set[_Slot] = set()
        self._closings: set[Future[None]] = set()
        self._threads = DaemonThreads("gallery", _THREADS)
        self._closers = DaemonThreads("close", _CLOSERS)
        self._refreshing = asyncio.Lock()
        self._lookout = Lookout(functools.partial(self.refresh, retry=False))
        self._polling: asyncio.Task[None] | None = None

    async def start(self, interval_s: float) -> None:
        """Warm the models up, serve the galleries, and look for changes every `interval_s`."""
        while self._opened:
            opened = self._opened[0]
            model = await self._models.get(opened.gallery.bundle_id)
            self._serve(self._opened.pop(0), model)
        await self._drop_models()
        self._polling = asyncio.create_task(self._poll(interval_s))

    async def stop(self) -> None:
        """Close every gallery that was opened here and stop the models; what hangs is left."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._lookout.close()
        for opened in self._opened:
            self._close(opened)
        slots, self._slots, self._opened = self._slots, {}, []
        for slot in slots.values():
            self._retire(slot)
        await self._models.keep(())
        if self._closings:
            await asyncio.wait(
                [asyncio.wrap_future(closing) for closing in list(self._closings)],
                timeout=_CLOSE_S,
            )
        await asyncio.gather(
            asyncio.to_thread(self._threads.close), asyncio.to_thread(self._closers.close)
        )

    @property
    def default(self) -> str:
        """The first gallery. Raises: GalleryNotFoundError if there is none."""
        for name in self._slots:
            return name
        raise GalleryNotFoundError(
            "This service has no gallery yet. Make one with POST /galleries, or start the service "
            "with --gallery."
        )

    @property
    def model(self) -> Model:
        """The model of the first gallery, or the one that runs while there is none."""
        for slot in self._slots.values():
            return slot.served.model
        return self._models.running()[0]

    def names(self) -> list[str]:
        """The names of all galleries; the first is the default."""
        return list(self._slots)

    def galleries(self) -> dict[str, Gallery]:
        """The galleries by name, also before the start; a request takes a lease instead."""
        served = {name: slot.served.gallery for name, slot in self._slots.items()}
        return served | {opened.name: opened.gallery for opened in self._opened}

    @contextlib.contextmanager
    def lease(self, name: str | None = None) -> Iterator[Served]:
        """A gallery and its model, which both stay as they are until the lease ends.

        Raises: GalleryNotFoundError naming the known ones.
        """
        name = self.default if name is None else name
        slot = self._slots.get(name)
        if slot is None:
            raise GalleryNotFoundError(
                f"gallery = {name[:_SHOWN_NAME]!r} is unknown. Known are: "
                f"{', '.join(self._slots) or 'none'}."
            )
        with slot.holding.use():
            yield slot.served

    async def look(self, limit_s: float = _LOOK_S) -> None:
        """As `refresh`, shared with others and at most a few times a second.

        Raises: DeadlineExceededError, GalleryError.
        """
        await self._lookout.look(limit_s)

    async def know(self, name: str | None) -> None:
        """Look at the disk if this name is unknown: another process may have just made it."""
        if name is None or name in self._slots or not is_name(name):
            return
        with contextlib.suppress(DeadlineExceededError, GalleryError):
            await self.look(_UNKNOWN_S)

    async def refresh(self, *, retry: bool = True) -> None:
        """Look at the disk now and serve what is there; with `retry` also what failed lately.

        A generation that cannot be opened leaves the old one served and is in `failures`.
        """
        async with self._refreshing:
            found = await self._call(self._sources.look)
            places = {place.name: place for place in found if place.name not in self._given}
            due = [place for place in places.values() if self._is_due(place, retry=retry)]
            await asyncio.gather(*(self._reload(place) for place in due))
            order = [*(name for name in self._slots if name in self._given), *places]
            gone = [slot for name, slot in self._slots.items() if name not in order]
            self._slots = {name: self._slots[name] for name in order if name in self._slots}
            for slot in gone:
                self._retire(slot)
            self.failures.keep(order)
            await self._drop_models()

    def _is_due(self, place: Place, *, retry: bool) -> bool:
        slot = self._slots.get(place.name)
        if slot is not None and slot.generation == place.generation:
            self.failures.clear(place.name)
            return False
        return retry or not self.failures.is_waiting(place)

    async def _reload(self, place: Place) -> None:
        try:
            gallery = await self._call(functools.partial(self._open_gallery, place))
            opened = Opened(place.name, gallery, place)
            try:
                model = await self._models.get(gallery.bundle_id)
                check = functools.partial(check_searches, place.name, gallery, model)
                await self._call(check)
            except BaseException:
                self._close(opened)
                raise
        except Exception as error:
            # Whatever is wrong with the new one, the old one must stay.
            self.failures.add(place, error)
            return
        self.failures.clear(place.name)
        self._serve(opened, model)
        structlog.get_logger().info(
            "gallery loaded",
            gallery=place.name,
            generation=gallery.generation,
            bundle_id=model.bundle_id,
        )

    def _serve(self, opened: Opened, model: Model) -> None:
        """From the next lease on."""
        holding = Holding(lambda: self._end(slot, opened))
        served = Served(
            opened.name,
            held(opened.gallery, holding),
            model,
            None if opened.place is None else opened.place.path,
            managed=opened.place is not None and opened.place.managed,
        )
        slot = _Slot(served, opened.gallery.generation, holding)
        old = self._slots.get(opened.name)
        self._slots = self._slots | {opened.name: slot}
        opened.look_after()
        if old is not None:
            self._retire(old)

    def _retire(self, slot: _Slot) -> None:
        self._retired.add(slot)
        slot.holding.retire()

    def _end(self, slot: _Slot, opened: Opened) -> None:
        """Nobody uses it any more; called in the thread of its last user."""
        self._retired.discard(slot)
        self._close(opened)

    def _close(self, opened: Opened) -> None:
        closing = self._closers.submit(opened.close)
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    async def _drop_models(self) -> None:
        """Let go of every model without a gallery, except where there is no gallery at all."""
        used = {slot.served.model.bundle_id for slot in (*self._slots.values(), *self._retired)}
        if not used:
            try:
                await self._models.get(self._primary)
            except KinlensError as error:
                structlog.get_logger().error("the first bundle does not run", exc_info=error)
                return  # better another model than none
        await self._models.keep(used or {self._primary})

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(work))

    async def _poll(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.refresh(retry=False)
            except Exception as error:
                # The border of the task: a disk that fails now may be back at the next look.
                structlog.get_logger().error("galleries cannot be looked at", exc_info=error)
