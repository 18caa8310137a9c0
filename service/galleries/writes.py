"""The use cases that change items: put, patch and remove. They know nothing of HTTP.

check ─► known content? its vector : decode and embed ─► upload on the disk ─► catalogue ─► answer
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.errors import (
    DeadlineExceededError,
    GalleryBusyError,
    KinlensError,
    OverloadedError,
    StateMissingError,
)
from embedder.types import ItemId
from indexer.filters.tree import Filter
from indexer.gallery import current_generation
from service.concurrency import BoundedPool
from service.galleries import storing
from service.galleries.claims import Claims
from service.galleries.holders import Holders
from service.galleries.items import Draft, NewItem, drafts_of
from service.galleries.registry import Registry, Served
from service.galleries.storing import Changed, Changes, Put
from service.galleries.uploads import Uploads
from service.galleries.versions import check_generation
from service.search.model import Model

T = TypeVar("T")
_EMBEDDED_AT_ONCE = 16  # of all puts together: searches find a place in the queue of the model
_IMAGES_PER_LIMIT = 16
_PATIENCE_S = 0.05
_FOLLOW_S = 10.0
_FOLLOWS_PER_SWEEP = 60


class Writes:
    """Changes the galleries of `registry`; a change is durable and searchable when it returns.

    Every method raises: GalleryNotFoundError, GalleryBusyError, GalleryWriteError, OverloadedError.
    """

    def __init__(
        self,
        registry: Registry,
        uploads: Uploads | None,
        state: Path | None,
        pool: BoundedPool,
        limit_s: float,
        is_copying: Callable[[], bool] = lambda: False,
    ) -> None:
        """`limit_s` is how long 16 images of one put may take until the last is embedded.

        While `is_copying`, which may block, no upload is thrown away: a copy may still need it.
        """
        self._registry = registry
        self._uploads = uploads
        self._state = state
        self._claims = None if state is None else Claims(state)
        self._is_copying = is_copying
        self._pool = pool
        self._limit_s = limit_s
        self._embedding = asyncio.Semaphore(_EMBEDDED_AT_ONCE)
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Remove orphaned uploads, of interrupted writes and of other processes, now and then."""
        if self._uploads is not None:
            self._sweeping = asyncio.create_task(self._keep_sweeping())

    async def stop(self) -> None:
        """End the sweep."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def put(self, gallery: str, items: Sequence[NewItem]) -> Put:
        """Store items; each fails alone. Raises: StateMissingError without a place for uploads."""
        uploads = self._checked_uploads()
        return await self._changing(gallery, lambda served: self._put(served, items, uploads))

    async def patch(self, gallery: str, changes: Changes) -> Changed:
        """Change attributes by key, all or none; None takes one away.

        Raises: ItemNotFoundError, InvalidParameterError naming the attribute.
        """

        async def change(served: Served) -> Changed:
            return await self._pool.run(lambda: storing.patch(served.gallery, changes))

        return await self._changing(gallery, change)

    async def remove(self, gallery: str, keys: Sequence[str]) -> Changed:
        """Remove items by key, with the uploads that no item has any more."""
        return await self._removing(gallery, lambda served: storing.remove(served.gallery, keys))

    async def remove_where(self, gallery: str, where: Filter) -> Changed:
        """As `remove`, every item that fits. Raises: FilterError."""
        return await self._removing(
            gallery, lambda served: storing.remove_where(served.gallery, where)
        )

    async def remove_item(
        self, gallery: str, item_id: ItemId, generation: str | None = None
    ) -> Changed:
        """As `remove`, by number, which is one of the generation that begins so; or of the one
        being served. In another generation it is the number of another item.

        Raises: ItemNotFoundError, also if the gallery was replaced meanwhile.
        """
        with self._registry.lease(gallery) as served:
            check_generation(gallery, served.gallery.generation, generation)
            try:
                removed = await self._pool.run(lambda: storing.remove_item(served.gallery, item_id))
            except GalleryBusyError:
                current = await self._pool.run(lambda: _generation_of(served))
                check_generation(gallery, current, served.gallery.generation)
                raise
        changed, contents = removed
        await self._discard(contents)
        return changed

    async def sweep(self) -> int:
        """Remove every upload that no item of any gallery has; how many went."""
        uploads = self._uploads
        if uploads is None:
            return 0
        return await self._with_holders(uploads.sweep)

    async def _removing(
        self, gallery: str, remove: Callable[[Served], tuple[Changed, list[str]]]
    ) -> Changed:
        async def change(served: Served) -> tuple[Changed, list[str]]:
            return await self._pool.run(lambda: remove(served))

        changed, contents = await self._changing(gallery, change)
        await self._discard(contents)
        return changed

    async def _changing(self, gallery: str, work: Callable[[Served], Awaitable[T]]) -> T:
        """Do it in the gallery as it is now; once more if that was replaced meanwhile."""
        try:
            with self._registry.lease(gallery) as served:
                return await work(served)
        except GalleryBusyError:
            await self._registry.look()
        with self._registry.lease(gallery) as served:
            return await work(served)

    async def _put(self, served: Served, items: Sequence[NewItem], uploads: Uploads) -> Put:
        drafts = await self._pool.run(lambda: drafts_of(served.gallery, items))
        parts = -(-len(items) // _IMAGES_PER_LIMIT)
        deadline = time.monotonic() + parts * self._limit_s
        unknown = [draft for draft in drafts if draft.needs_vector]
        await asyncio.gather(*(self._embed(served.model, draft, deadline) for draft in unknown))
        try:
            stored = await self._pool.run(
                lambda: storing.store(served.gallery, uploads, drafts, lambda: self._claim(served))
            )
        except KinlensError:
            await self._discard(draft.sha256 for draft in drafts if draft.sha256)
            raise
        done, orphans = stored
        await self._discard(orphans)
        return done

    async def _embed(self, model: Model, draft: Draft, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._embedding:
                encoded = await _encoded(model, draft)
        except TimeoutError:
            draft.error = DeadlineExceededError(
                f"The image was not embedded within {self._limit_s:g} s for each "
                f"{_IMAGES_PER_LIMIT} images, which is the limit. Try again in a second."
            )
        except KinlensError as error:
            draft.error = error
        else:
            draft.vector = encoded

    async def _discard(self, contents: Iterable[str]) -> None:
        """What cannot be thrown away now goes with a later sweep; the change itself stands."""
        uploads, gone = self._uploads, [*contents]
        if uploads is None or not gone:
            return
        try:
            await self._with_holders(lambda holders: uploads.discard_unless(holders, gone))
        except (KinlensError, OSError) as error:
            structlog.get_logger().warning("uploads stay for now", error=type(error).__name__)

    def end(self, gallery: Path, delete: Callable[[], None]) -> None:
        """Delete a gallery with what is known of its uploads; a sweep may take them afterwards.
        It blocks. Raises: what `delete` raises."""
        if self._claims is None:
            delete()
        else:
            self._claims.end(gallery, delete)

    async def _with_holders(self, work: Callable[[Holders], int]) -> int:
        assert self._state is not None
        assert self._claims is not None
        with ExitStack() as leases:
            names = self._registry.names()
            served = [leases.enter_context(self._registry.lease(name)) for name in names]
            holders = Holders(served, self._state, self._claims, self._is_copying)
            return await self._pool.run(lambda: work(holders), urgent=True)

    async def _keep_sweeping(self) -> None:
        while True:
            await self._attempt(self.sweep)
            for _ in range(_FOLLOWS_PER_SWEEP):
                await asyncio.sleep(_FOLLOW_S)
                await self._attempt(self._follow)

    async def _follow(self) -> int:
        if self._claims is not None:
            await self._pool.run(self._claims.follow, urgent=True)
        return 0

    def _claim(self, served: Served) -> None:
        if self._claims is not None and served.path is not None:
            self._claims.claim(served.path)

    async def _attempt(self, sweep: Callable[[], Awaitable[int]]) -> None:
        try:
            removed = await sweep()
        except (KinlensError, OSError) as error:
            structlog.get_logger().warning("no sweep of uploads", error=type(error).__name__)
        else:
            if removed:
                structlog.get_logger().info("orphaned uploads removed", count=removed)

    def _checked_uploads(self) -> Uploads:
        if self._uploads is None:
            raise StateMissingError(
                "The service has no folder to keep uploaded images in. Start it with --state DIR."
            )
        return self._uploads


def _generation_of(served: Served) -> str:
    """The one on the disk now."""
    current = None if served.path is None else current_generation(served.path)
    return current or served.gallery.generation


async def _encoded(model: Model, draft: Draft) -> NDArray[np.float32]:
    while True:
        try:
            return await model.encoder.encode(draft.item.data, draft.sha256)
        except OverloadedError:
            await asyncio.sleep(_PATIENCE_S)
