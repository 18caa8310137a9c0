"""The operations that change items: put, patch, remove and restore. They do not use HTTP.

check ─► sent or stored vector, or decode and embed ─► image on the disk ─► catalogue ─► answer
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.decoding.formats import format_of
from kinlens.embedder.errors import (
    BundleMismatchError,
    DeadlineExceededError,
    DeltaFullError,
    GalleryBusyError,
    InvalidParameterError,
    KinlensError,
    StateMissingError,
)
from kinlens.embedder.sources.names import composed
from kinlens.embedder.types import ItemId
from kinlens.indexer.entries import NO_IMAGE, AttributeTypes, Entry, Item, check_key
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.galleries import MilvusStore, current_generation
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.ingest.products import changes_by_key
from kinlens.indexer.uploads import UploadFolder
from kinlens.models import ItemStatus, PatchAnswer, PutResult, RemoveAnswer
from kinlens.service.concurrency import BoundedPool
from kinlens.service.encoding.model import Model
from kinlens.service.encoding.vectors import fitted
from kinlens.service.galleries.locations import Gallery
from kinlens.service.galleries.registry import Registry, Served, change
from kinlens.service.galleries.uploads import SharedUploads
from kinlens.service.galleries.view import GalleryView
from kinlens.values import AttributeValue

T = TypeVar("T")
Change = Mapping[str, AttributeValue | None]
Changes = Mapping[str, Change]

MAX_ATTRIBUTES = 64
"""Maximum number of attributes of one item."""

_EMBEDDED_AT_ONCE = 16  # for all puts together, so that searches need not queue behind them
_IMAGES_PER_LIMIT = 16
_ITEMS_PER_LIMIT = 10_000  # a change by filter works in steps of this size
_PAGE = 20_000


@dataclass(frozen=True, slots=True)
class NewItem:
    """An image or a vector to store under a key. With `error` it was already refused, and is not
    stored.

    `vector` is a unit vector as little-endian float32; empty for an image. With `keeps`, attributes
    of a stored item that `attributes` does not name are kept. Without `keeps_image`, only the
    vector of the image is stored.
    """

    key: str
    data: bytes = field(repr=False)
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: KinlensError | None = None
    keeps: bool = False
    vector: bytes = field(default=b"", repr=False)
    keeps_image: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", composed(self.key))


Put = Sequence[tuple[PutResult, KinlensError | None]]
"""The result of each item, in the order sent, and why it failed."""


@dataclass(slots=True)
class Items:
    """Changes the galleries of `registry`; a change is durable and searchable when it returns. Each
    change returns the version of the gallery after it.

    `limit_s` is the time limit of a change, for each 16 images of a put and each 10,000 items of a
    change by filter. Without `puts`, galleries in folders refuse new images.

    Every method raises: GalleryNotFoundError, GalleryBusyError, GalleryWriteError, OverloadedError,
    DeadlineExceededError.
    """

    registry: Registry
    pool: BoundedPool
    limit_s: float
    puts: bool
    _embedding: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_EMBEDDED_AT_ONCE), init=False
    )

    async def put(self, gallery: str, items: Sequence[NewItem]) -> tuple[Put, str]:
        """Store items; each can fail without the others.

        Raises: StateMissingError if there are images to keep, which this service cannot store;
            DeltaFullError.
        """

        limit_s = -(-len(items) // _IMAGES_PER_LIMIT) * self.limit_s

        async def put(served: Served) -> tuple[Put, str]:
            stores = any(
                item.keeps_image and not item.vector and item.error is None for item in items
            )
            uploads = self._upload_store(served) if stores else None
            run = partial(change, self.pool, served, limit_s=limit_s, bulk=True)
            drafts = await run(lambda: _drafts(served, items))
            deadline = time.monotonic() + limit_s
            unknown = [draft for draft in drafts if draft.error is None and draft.vector is None]
            await asyncio.gather(*(self._embed(served.model, draft, deadline) for draft in unknown))
            return await run(lambda: _store(served, uploads, drafts))

        with self.pool.permit():
            return await self._changing(gallery, put)

    async def patch(self, gallery: str, changes: Changes) -> PatchAnswer:
        """Change attributes of items by key, in one transaction; None removes an attribute.

        Raises: ItemNotFoundError, InvalidParameterError naming the attribute.
        """
        return await self._calling(gallery, lambda served: _patch(served.gallery, changes))

    async def patch_products(self, gallery: str, changes: Changes) -> PatchAnswer:
        """Change attributes of all items of each product, in one transaction.

        Raises: ItemNotFoundError for a product without items; the errors of `patch`.
        """

        def patch(served: Served) -> PatchAnswer:
            return _patch(served.gallery, changes_by_key(served.gallery, changes))

        return await self._calling(gallery, patch)

    async def patch_where(self, gallery: str, where: Filter, attributes: Change) -> PatchAnswer:
        """Apply one change to every matching item. Raises: FilterError, InvalidParameterError."""
        return await self._calling(
            gallery, lambda own: _patch_where(own.gallery, where, attributes), may_take_all=True
        )

    async def remove(
        self, gallery: str, keys: Sequence[str], keep: Sequence[str] = ()
    ) -> RemoveAnswer:
        """Remove items by key; with `keep`, only if an item with one of these other keys exists.
        Uploaded images are kept until the removal can no longer be undone.

        Raises: GalleryConflictError if no item of `keep` exists.
        """
        return await self._calling(gallery, lambda served: _remove(served, keys, keep))

    async def restore(self, gallery: str, keys: Sequence[str]) -> tuple[Sequence[Item], str]:
        """Restore removed items by key, with new ids; keys that cannot be restored are omitted.

        Raises: DeltaFullError.
        """

        def restore(served: Served) -> tuple[Sequence[Item], str]:
            return _restorable(served.gallery, "restore").restore(keys), served.gallery.version

        return await self._calling(gallery, restore)

    async def remove_where(self, gallery: str, where: Filter) -> RemoveAnswer:
        """Remove every matching item. Raises: FilterError."""
        return await self._calling(
            gallery, lambda served: _remove_where(served, where), may_take_all=True
        )

    async def remove_item(
        self, gallery: str, item_id: ItemId, generation: str | None = None
    ) -> RemoveAnswer:
        """Remove an item by its id in the generation whose name starts with `generation`, by
        default the served one. In another generation the id may name another item.

        Raises: ItemNotFoundError, also if the gallery has been replaced.
        """
        async with self.registry.find(gallery) as served:
            served.refuse_if_followed()
            served.check_generation(generation)
            return await self._change(served, lambda served: _remove_item(served, item_id))

    async def _calling(
        self, gallery: str, work: Callable[[Served], T], *, may_take_all: bool = False
    ) -> T:
        async def call(served: Served) -> T:
            steps = 1
            if may_take_all:
                size = await self._change(served, lambda served: served.gallery.size)
                steps += size // _ITEMS_PER_LIMIT
            return await self._change(served, work, steps)

        return await self._changing(gallery, call)

    async def _change(self, served: Served, work: Callable[[Served], T], steps: int = 1) -> T:
        return await change(self.pool, served, lambda: work(served), steps * self.limit_s)

    async def _changing(self, gallery: str, work: Callable[[Served], Awaitable[T]]) -> T:
        """Do `work` in the current gallery, and repeat it if that was replaced during the work."""

        async def attempt() -> T:
            async with self.registry.find(gallery) as served:
                served.refuse_if_followed()
                return await work(served)

        with contextlib.suppress(GalleryBusyError, BundleMismatchError):
            return await attempt()
        await self.registry.read_from_disk(self.limit_s, gallery)
        return await attempt()

    def _upload_store(self, served: Served) -> UploadFolder | SharedUploads:
        uploads = served.uploads
        if uploads is None and served.is_remote:
            raise StateMissingError(
                f"The service cannot store images for gallery {served.name}, which is on Milvus. "
                f"Start the service with --pictures {served.name}=ADDRESS."
            )
        if uploads is None or not (self.puts or served.is_remote):
            raise StateMissingError(
                "The service cannot store uploaded images. Start it with --state DIR."
            )
        return uploads

    async def _embed(self, model: Model, draft: "_Draft", deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._embedding:
                draft.vector = await model.encode(draft.item.data, draft.sha256)
        except TimeoutError:
            draft.error = DeadlineExceededError(
                f"The image was not embedded in time: the limit is {self.limit_s:g} s for each "
                f"{_IMAGES_PER_LIMIT} images of a request. Try again in a second."
            )
        except KinlensError as error:
            draft.error = error


@dataclass(slots=True)
class _Draft:
    """An item that is being stored; with an `error` it is not processed further."""

    item: NewItem
    error: KinlensError | None
    sha256: str = ""
    vector: NDArray[np.float32] | None = None

    def entry(self, stored: Item | None) -> Entry:
        """The entry to store. An unchanged image keeps the path that it was indexed from."""
        assert self.vector is not None
        path, kind = "", NO_IMAGE
        if self.item.keeps_image:
            kind = format_of(self.item.data) or ""
        if stored is not None and stored.sha256 == self.sha256 and stored.path:
            path, kind = stored.path, stored.format
        item = self.item
        return Entry(
            item.key, self.vector, self.sha256, item.attributes, path, kind, keeps=item.keeps
        )

    def result(
        self, entries: Mapping[str, Entry], old: Mapping[str, Item], new: Mapping[str, Item]
    ) -> PutResult:
        """The result; `old` and `new` are the items by key before and after the put."""
        key = self.item.key
        if self.error is not None:
            return PutResult(key=key, status="failed", id=None, problem=None)
        return PutResult(
            key=key,
            status=_status(old.get(key), new.get(key), entries[key]),
            id=new[key].id if key in new else None,
            attributes="kept" if self.item.keeps and key in old else "replaced",
            problem=None,
        )


def _drafts(served: Served, items: Sequence[NewItem]) -> list[_Draft]:
    """Check each item against the gallery, and reuse the vector of a content that it contains: the
    vector of an image is the same for every caller.
    """
    gallery = served.whole
    drafts = [_Draft(item, item.error) for item in items]
    types = AttributeTypes(gallery.schema(), gallery.has_attribute)
    seen: set[str] = set()
    for draft in drafts:
        key, attributes = draft.item.key, draft.item.attributes
        if draft.error is None:
            try:
                if key in seen:
                    text = f"The request contains the key {key!r:.200} twice. Send each item once."
                    raise InvalidParameterError(text)
                _check_count(key, attributes)
                check_key(key)
                types.check(key, attributes)
                content = draft.item.data
                if draft.item.vector:
                    draft.vector = fitted(draft.item.vector, served.model)
                    content = draft.vector.tobytes()
                draft.sha256 = hashlib.sha256(content).hexdigest()
            except KinlensError as error:
                draft.error = error
            seen.add(key)
    stored = gallery.vectors_of_contents([draft.sha256 for draft in drafts if draft.sha256])
    for draft in drafts:
        # The content of an item without an image may be its vector, whose bytes are no image.
        if draft.vector is None and len(draft.item.data) != 4 * gallery.dim:
            draft.vector = stored.get(draft.sha256)
    is_new = any(draft.sha256 not in stored and draft.error is None for draft in drafts)
    if is_new and isinstance(gallery, IndexedGallery):
        try:
            gallery.check_delta()  # before the work of embedding them
        except DeltaFullError:
            gallery.compact_for_writers()
            raise
    return drafts


def _check_count(key: str, attributes: Collection[str]) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidParameterError(
            f"Item {key!r:.200} has {len(attributes):,} attributes, the limit is {MAX_ATTRIBUTES}. "
            "Send fewer attributes."
        )


def _store(
    served: Served, uploads: UploadFolder | SharedUploads | None, drafts: Sequence[_Draft]
) -> tuple[Put, str]:
    """Store the images, then the items, and discard images that no item uses afterwards.

    Raises: GalleryBusyError, GalleryWriteError; then nothing was stored.
    """
    gallery = served.gallery
    good = {draft.item.key: draft for draft in drafts if draft.error is None}
    old = gallery.stored([*good])
    entries = {key: draft.entry(old.get(key)) for key, draft in good.items()}
    images = {
        draft.sha256: draft.item.data
        for key, draft in good.items()
        if not (entries[key].path or draft.item.vector) and draft.item.keeps_image
    }
    replaced = [
        item.sha256
        for key, item in old.items()
        if item.sha256 != entries[key].sha256 or entries[key].format == NO_IMAGE
    ]
    try:
        with uploads.storing(images) if uploads else contextlib.nullcontext():
            _add(served, good, entries)
    except KinlensError:
        served.discard_uploads([*images])
        raise
    failed = [draft.sha256 for draft in good.values() if draft.error is not None]
    served.discard_uploads([*replaced, *failed])
    new = gallery.stored([*entries])
    return [(draft.result(entries, old, new), draft.error) for draft in drafts], gallery.version


def _add(served: Served, drafts: Mapping[str, _Draft], entries: Mapping[str, Entry]) -> None:
    """Add all entries in one transaction; if the gallery refuses one, each in its own."""
    gallery = served.gallery
    if any(not draft.item.vector for draft in drafts.values()):
        served.whole.admit(served.model.embedder.mode.precision)
    try:
        gallery.add(list(entries.values()))
    except InvalidParameterError:
        for key, entry in entries.items():
            try:
                gallery.add([entry])
            except KinlensError as error:
                drafts[key].error = error


def _status(stored: Item | None, item: Item | None, entry: Entry) -> ItemStatus:
    """The effect of storing `entry`: `stored` and `item` had its key before and after it."""
    if stored is None:
        return "added"
    if stored.sha256 != entry.sha256 or (item is not None and item.id != stored.id):
        return "replaced"
    before = (stored.path, stored.format, dict(stored.attributes))
    kept = stored.attributes if entry.keeps else {}
    same = before == (entry.path, entry.format, {**kept, **entry.attributes})
    return "unchanged" if same else "updated"


def _patch(gallery: Gallery, changes: Changes) -> PatchAnswer:
    for key, item in gallery.stored([*changes]).items():
        names = set(item.attributes)
        for name, value in changes[key].items():
            (names.discard if value is None else names.add)(name)
        if names - set(item.attributes):
            _check_count(key, names)
    return PatchAnswer(changed=gallery.update(changes), version=gallery.version)


def _patch_where(gallery: Gallery, where: Filter, change: Change) -> PatchAnswer:
    new = {name for name, value in change.items() if value is not None} - gallery.schema().keys()
    if new and len(gallery.schema()) + len(new) > MAX_ATTRIBUTES:
        raise InvalidParameterError(
            f"With the new attributes {', '.join(sorted(new)):.200} the gallery would have more "
            f"than {MAX_ATTRIBUTES}, the limit of one item. Add new attributes by key."
        )
    return PatchAnswer(changed=gallery.update_where(where, change), version=gallery.version)


def _remove(served: Served, keys: Sequence[str], keep: Sequence[str]) -> RemoveAnswer:
    gallery = served.gallery
    contents = _uploaded(gallery.stored(keys).values())
    removed = _restorable(gallery, "keep").remove(keys, keep=keep) if keep else gallery.remove(keys)
    served.discard_uploads(contents)
    return RemoveAnswer(removed=removed, version=gallery.version)


def _restorable(gallery: Gallery, what: str) -> IndexedGallery | GalleryView:
    """The gallery, which can do `what`, unless it is on Milvus. Raises: InvalidParameterError."""
    if isinstance(gallery, MilvusStore):
        raise InvalidParameterError(
            f"{what} needs a gallery in a folder. This one is on Milvus, which cannot restore "
            "removed items. Put the items again."
        )
    return gallery


def _remove_item(served: Served, item_id: ItemId) -> RemoveAnswer:
    gallery = served.gallery
    item = gallery.item(item_id)
    try:
        if not gallery.remove_items([item_id]):
            gallery.item(item_id)  # raises the right error if the item was just removed
    except GalleryBusyError:
        if served.path is not None:
            served.check_generation(gallery.generation, current_generation(served.path))
        raise
    served.discard_uploads(_uploaded([item]))
    return RemoveAnswer(removed=1, version=gallery.version)


def _remove_where(served: Served, where: Filter) -> RemoveAnswer:
    gallery = served.gallery
    contents: list[str] = []
    after, is_more = -1, served.is_remote
    while is_more:
        items = gallery.page(0, _PAGE, where, after=after).items
        contents += _uploaded(items)
        is_more = len(items) == _PAGE
        after = items[-1].id if items else -1
    try:
        removed = gallery.remove_where(where)
    finally:
        served.discard_uploads(contents)  # also after an interrupted removal
    return RemoveAnswer(removed=removed, version=gallery.version)


def _uploaded(items: Iterable[Item]) -> list[str]:
    return [item.sha256 for item in items if not item.path]
