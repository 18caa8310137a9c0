"""The life of galleries over HTTP: list, describe, create, delete."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fastapi import APIRouter, Response

from embedder import errors
from embedder.calibration import Calibration
from indexer.gallery import GalleryFacts
from indexer.types import AttributeFacts
from service.api.gallery_models import (
    AttributeCount,
    AttributeModel,
    CalibrationModel,
    Galleries,
    GalleryDetail,
    GalleryModel,
    IndexModel,
    NewGallery,
    ThresholdModel,
)
from service.api.reading import FAILURES, LOOK_FAILURES, look
from service.galleries.registry import Served
from service.http.openapi import problems
from service.problems import KINDS
from service.runtime import Runtime

_CHANGES = (
    KINDS[errors.GalleryConflictError],
    KINDS[errors.StateMissingError],
    KINDS[errors.GalleryBusyError],
)


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of galleries."""
    router = APIRouter()
    _add_reading(router, runtime)
    _add_changing(router, runtime)
    return router


def _add_reading(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/galleries", responses=problems(*LOOK_FAILURES), summary="List the galleries")
    async def galleries() -> Galleries:
        """Every gallery as it is now; the first is the default of a search."""
        listed = [await _listed(runtime, name) for name in runtime.registry.names()]
        return Galleries(bundle_id=runtime.registry.model.bundle_id, galleries=listed)

    @router.get(
        "/galleries/{name}",
        responses=problems(*FAILURES),
        summary="Describe a gallery",
    )
    async def gallery(name: str) -> GalleryDetail:
        """A gallery with its attributes, for filters; its index; the calibration of its bundle."""
        await runtime.registry.refresh_if_unknown(name)
        listed = await _listed(runtime, name)
        with runtime.registry.lease(name) as served:
            return await look(runtime, "the gallery", lambda: _detail(served, listed))


def _add_changing(router: APIRouter, runtime: Runtime) -> None:
    @router.post(
        "/galleries",
        status_code=201,
        responses=problems(*FAILURES, *_CHANGES),
        summary="Create a gallery",
    )
    async def create(new: NewGallery, response: Response) -> GalleryModel:
        """An empty gallery, searchable at once, to which items can be added."""
        await runtime.managed.create(new.name, new.bundle_id)
        response.headers["Location"] = f"/galleries/{new.name}"
        return await _listed(runtime, new.name)

    @router.delete(
        "/galleries/{name}",
        status_code=204,
        responses=problems(*FAILURES, *_CHANGES),
        summary="Delete a gallery",
    )
    async def delete(name: str) -> None:
        """The gallery with its items and their uploaded pictures; only one created here."""
        await runtime.managed.delete(name)


async def _listed(runtime: Runtime, name: str) -> GalleryModel:
    with runtime.registry.lease(name) as served:
        gallery = served.gallery
        state = await runtime.searching.state(gallery)
        return GalleryModel(
            name=name,
            version=state.version,
            generation=gallery.generation,
            bundle_id=gallery.bundle_id,
            size=state.size,
            dim=gallery.dim,
            created_at=gallery.created_at,
            managed=served.managed,
            writable=runtime.settings.state is not None and _may_write(served.path),
        )


def _may_write(path: Path | None) -> bool:
    return path is not None and os.access(path, os.W_OK)


def _detail(served: Served, listed: GalleryModel) -> GalleryDetail:
    facts = served.gallery.facts()
    known = listed.model_dump() | {"version": facts.version, "size": facts.size}
    return GalleryDetail(
        **known,
        attributes=_attributes(served.gallery.attribute_facts()),
        index=_index(facts),
        calibration=_calibration(served.model.calibration, facts.size),
        no_calibration=served.model.no_calibration,
        provider=served.model.provider,
        image_root_missing=bool(facts.source_root) and not served.gallery.image_root.is_dir(),
    )


def _attributes(facts: Sequence[AttributeFacts]) -> list[AttributeModel]:
    return [
        AttributeModel(
            name=one.name,
            kind=one.kind,
            values=None
            if one.values is None
            else [AttributeCount(value=value, count=count) for value, count in one.values],
            minimum=one.minimum,
            maximum=one.maximum,
        )
        for one in facts
    ]


def _index(facts: GalleryFacts) -> IndexModel:
    segment = facts.segment
    return IndexModel(
        kind=None if segment is None else segment.kind,
        segment_items=0 if segment is None else segment.size,
        delta=facts.delta,
        tombstones=facts.tombstones,
        compaction_due=facts.compaction_due,
        recall=None if segment is None else segment.recall,
        target_recall=None if segment is None else segment.target_recall,
        parameters={} if segment is None else segment.parameters,
        created_at=None if segment is None else segment.created_at,
    )


def _calibration(calibration: Calibration | None, size: int) -> CalibrationModel | None:
    if calibration is None:
        return None
    calibration = calibration.for_gallery(size)
    scores = np.array([threshold.search_score for threshold in calibration.thresholds])
    probabilities = calibration.probability(scores).tolist()
    return CalibrationModel(
        slope=calibration.slope,
        intercept=calibration.intercept,
        rank_slope=calibration.rank_slope,
        tail_slope=calibration.tail_slope,
        thresholds=[
            ThresholdModel(
                false_matches=threshold.false_matches,
                search_score=threshold.search_score,
                probability=probability,
            )
            for threshold, probability in zip(calibration.thresholds, probabilities, strict=True)
        ],
    )
