"""Galleries over HTTP: list, describe, create, delete; and definitions for all gallery routes."""

import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from kinlens.embedder import errors
from kinlens.indexer.entries import Item
from kinlens.indexer.galleries import GalleryFacts
from kinlens.indexer.images import ImageAddress
from kinlens.indexer.types import AttributeFacts
from kinlens.models import (
    AttributeCount,
    AttributeModel,
    CalibrationModel,
    CountAnswer,
    Galleries,
    GalleryDetail,
    GalleryModel,
    IndexModel,
    ThresholdModel,
)
from kinlens.quality.calibration import Calibrated
from kinlens.service.access.audit import note
from kinlens.service.access.links import (
    VERSION_DIGITS,
    VERSION_PATTERN,
    VERSION_TEXT,
    public_path,
)
from kinlens.service.api.fields import FilterText, Strict, where_of
from kinlens.service.galleries.feedback import forget
from kinlens.service.galleries.locations import Gallery
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.remote import ImageStores
from kinlens.service.http.bodies import read_model
from kinlens.service.http.openapi import model_docs, problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime
from kinlens.service.search.guarantee import offered, withdrawn
from kinlens.service.search.pipeline import calibrated_by
from kinlens.service.settings import Settings

_READING = (errors.OverloadedError, errors.DeadlineExceededError, errors.GalleryError)
FAILURES = (errors.GalleryNotFoundError, errors.InvalidParameterError, *_READING)
"""Problems that every request about a gallery can return."""

CHANGE_FAILURES = (
    *FAILURES,
    errors.GalleryConflictError,
    errors.StateMissingError,
    errors.GalleryBusyError,
)

STATE_FAILURES = (
    *(errors.StateMissingError, errors.StateError, errors.InvalidParameterError),
    *(errors.DeadlineExceededError, errors.OverloadedError),
)
"""Problems that every request about a file of the state folder can return."""

IMAGE_FAILURES = (
    errors.EmptyImageError,
    errors.ImageTooManyBytesError,
    errors.ImageTooLargeError,
    errors.ImageCostError,
    errors.UnsupportedFormatError,
    errors.CorruptImageError,
    errors.BundleError,
)

ItemId = Annotated[int, Path(ge=0, le=2**63 - 1)]
_ALIAS = "The same as `generation`, by its former name."


async def _generation_of(
    generation: Annotated[
        str | None, Query(pattern=VERSION_PATTERN, description=VERSION_TEXT)
    ] = None,
    version: Annotated[
        str | None, Query(pattern=VERSION_PATTERN, description=_ALIAS, deprecated=True)
    ] = None,
) -> str | None:
    return generation or version


Generation = Annotated[str | None, Depends(_generation_of)]
"""Dependency of a route: the gallery generation that an item id is from."""


async def _runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


Service = Annotated[Runtime, Depends(_runtime_of)]
"""Dependency of a route: the parts of the running service."""

Key = Annotated[str, Path(min_length=1, max_length=1024, description="The key of the item.")]
"""The key of the shop, such as a SKU or a path; slashes may be sent as they are or as %2F."""


@dataclass(frozen=True, slots=True)
class ItemRef:
    """An item by its id; `generation` is that of the id if a key was sent."""

    id: int
    generation: str | None = None


async def _by_id(item_id: ItemId) -> ItemRef:
    return ItemRef(item_id)


async def _by_key(runtime: Service, name: str, key: Key) -> ItemRef:
    def read(served: Served) -> ItemRef:
        item = item_of_key(served, key)
        return ItemRef(item.id, served.gallery.generation[:VERSION_DIGITS])

    return await runtime.read_in(name, "the item", read)


ITEM_PATHS: tuple[tuple[str, str, Any], ...] = (
    ("/galleries/{name}/items/{item_id}", "", Depends(_by_id)),
    ("/galleries/{name}/items/by-key/{key:path}", " by key", Depends(_by_key)),
)
"""The two paths of an item, the ends of their titles, and the dependencies that find the item."""


def item_of_key(served: Served, key: str) -> Item:
    """The item with this key. Raises: ItemNotFoundError."""
    found = served.gallery.stored([key])
    if key not in found:
        raise unknown_key(served.name, key)
    return found[key]


def unknown_key(gallery: str, key: str) -> errors.ItemNotFoundError:
    """The error for a key that no item has."""
    return errors.ItemNotFoundError(
        f"Gallery {gallery} has no item with the key {key!r:.200}. Keys are case-sensitive."
    )


router = APIRouter(route_class=Route)


class NewGallery(Strict):
    """An empty gallery to create; by default for the bundle of the first gallery."""

    name: str
    bundle_id: str | None = None


@router.get("/galleries", responses=problems(*_READING), summary="List the galleries")
@rule("search", "items")
async def galleries(runtime: Service) -> Galleries:
    """All galleries; the first is the default of a search."""
    registry, settings = runtime.registry, runtime.settings
    listed, silent = await registry.describe_each(lambda served: _described(served, settings))
    return Galleries(bundle_id=registry.model.bundle_id, galleries=listed, unavailable=silent)


@router.get("/galleries/{name}", responses=problems(*FAILURES), summary="Describe a gallery")
@rule("search", "items")
async def gallery(runtime: Service, name: str) -> GalleryDetail:
    """A gallery with its attributes (for filters), index and calibration."""
    read = partial(_detail, settings=runtime.settings, stores=runtime.image_stores)
    detail = await runtime.read_in(name, "the gallery", read)
    detail.feedback = runtime.settings.feedback
    return detail


class CountItems(Strict):
    """The items to count: those that match the filter, or all."""

    filter: FilterText = None


@router.post(
    "/galleries/{name}/count",
    responses=problems(*FAILURES, errors.FilterError),
    summary="Count items",
)
@rule("search", "items", "keys", docs=partial(model_docs, CountItems, required=False))
async def count(runtime: Service, name: str, request: Request) -> CountAnswer:
    """The number of items that match a filter; of all without one, or without a body."""
    async with runtime.registry.find(name):
        pass  # raises for an unknown gallery before the body is read
    sent = await read_model(request, CountItems) if await request.body() else CountItems()
    where = await runtime.read("the filter", lambda: where_of(sent.filter), "body")

    def read(served: Served) -> CountAnswer:
        gallery = served.gallery
        version = gallery.version
        total = gallery.size if where is None else gallery.page(0, 0, where).total
        return CountAnswer(count=total, version=version)

    return await runtime.read_in(name, "the items", read)


@router.post(
    "/galleries", status_code=201, responses=problems(*CHANGE_FAILURES), summary="Create a gallery"
)
@rule("admin", "galleries")
async def create(
    runtime: Service, new: NewGallery, request: Request, response: Response
) -> GalleryModel:
    """Create an empty gallery, which can be filled and searched at once."""
    note(request.scope["state"], gallery=new.name)
    await runtime.managed.create(new.name, new.bundle_id)
    response.headers["Location"] = public_path(f"/galleries/{new.name}")
    with runtime.registry.lease(new.name) as served:
        return await runtime.read("the gallery", lambda: _described(served, runtime.settings))


@router.delete(
    "/galleries/{name}",
    status_code=204,
    responses=problems(*CHANGE_FAILURES),
    summary="Delete a gallery",
)
@rule("admin", "galleries")
async def delete(runtime: Service, request: Request, name: str) -> None:
    """Delete a gallery that the service created, with its items and uploaded images."""
    await runtime.managed.delete(name)
    forgotten = await runtime.in_state(
        "The feedback", runtime.settings, lambda settings: forget(settings, runtime.feedback, name)
    )
    if forgotten or runtime.feedback is not None:
        note(request.scope["state"], target=f"{forgotten} feedbacks")


def _described(served: Served, settings: Settings) -> GalleryModel:
    return GalleryModel(**_known(served, served.gallery, settings))


def _known(served: Served, gallery: Gallery | GalleryFacts, settings: Settings) -> dict[str, Any]:
    """The fields that need no index, since the index may be damaged."""
    shared = ("version", "generation", "bundle_id", "precision", "size", "dim", "created_at")
    return {name: getattr(gallery, name) for name in shared} | {
        "name": served.name,
        "managed": served.managed,
        "writable": _is_writable(served, settings.state),
        "has_map": served.model.embedder.has_map,
        "has_boxes": served.model.embedder.boxes is not None,
        "has_words": served.model.embedder.has_words,
        "product_url": settings.product_url,
    }


def _is_writable(served: Served, state: FilePath | None) -> bool:
    """Whether items can be added to it."""
    if served.is_remote:
        return served.uploads is not None
    return state is not None and (served.path is None or os.access(served.path, os.W_OK))


def _is_root_missing(served: Served, stores: ImageStores) -> bool:
    root = served.gallery.image_root
    if isinstance(root, ImageAddress):
        return stores.fault(root) is not None
    return not root.is_dir()


def _detail(served: Served, settings: Settings, stores: ImageStores) -> GalleryDetail:
    facts, known = served.gallery.facts(), served.model.embedder.calibration
    calibrated = calibrated_by(served)
    return GalleryDetail(
        **_known(served, facts, settings),
        attributes=[_attribute(one) for one in served.gallery.attribute_facts()],
        index=_index(facts),
        calibration=None
        if isinstance(calibrated, str)
        else _calibration(calibrated, settings.no_match_prior),
        no_calibration=calibrated if isinstance(calibrated, str) else None,
        guarantee_withdrawn=withdrawn(served) or None,
        **offered(served),
        thresholds=[
            ThresholdModel(false_matches=one.false_matches, search_score=one.search_score)
            for one in (known.thresholds if known else ())
        ],
        facets=not served.is_remote,
        provider=served.model.embedder.provider,
        image_root_missing=bool(facts.source_root) and _is_root_missing(served, stores),
    )


def _attribute(facts: AttributeFacts) -> AttributeModel:
    counts = facts.values
    values = counts and [AttributeCount(value=value, count=count) for value, count in counts]
    return AttributeModel(**asdict(facts) | {"values": values})


def _index(facts: GalleryFacts) -> IndexModel:
    segment = facts.segment
    of_segment = ("kind", "recall", "target_recall", "created_at")
    return IndexModel(
        segment_items=0 if segment is None else segment.size,
        delta=facts.delta,
        tombstones=facts.tombstones,
        compaction_due=facts.compaction_due,
        parameters={} if segment is None else segment.parameters,
        **{name: getattr(segment, name, None) for name in of_segment},
    )


def _calibration(calibrated: Calibrated, prior: float) -> CalibrationModel:
    fit = calibrated.fit
    best, ten = (fit and fit.errors) or (None, None)
    return CalibrationModel(
        source=calibrated.source,
        product=calibrated.product,
        products=calibrated.products,
        views=round(calibrated.views, 2),
        searches=fit and fit.searches,
        wrong_hits=fit and fit.wrong_hits,
        error_best=best,
        error_ten=ten,
        no_match_prior=prior,
        reason=calibrated.reason,
    )
