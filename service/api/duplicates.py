"""Near-duplicates of a gallery over HTTP: one product photographed or listed twice."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.checks.duplicates import (
    Member,
    NearDuplicates,
    clusters_of,
    find_duplicates,
    members_of,
)
from kinlens.indexer.gallery import Gallery
from kinlens.models import DuplicatesAnswer, NearCrowd, NearFloor, NearItem
from kinlens.service.api.galleries import FAILURES, Service
from kinlens.service.api.items import item_model
from kinlens.service.concurrency import BoundedPool, within
from kinlens.service.galleries.registry import Served
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.search.pipeline import CancelToken

MAX_ITEMS = 10_000
"""Maximum number of items in a gallery that a request may search for near-duplicates."""

_MAX_GROUPS = 200
_SCANS = BoundedPool("near-duplicates", 1, 0)  # one at a time, since it uses all cores

router = APIRouter(route_class=Route)


@router.get(
    "/galleries/{name}/duplicates", responses=problems(*FAILURES), summary="Find near-duplicates"
)
@rule("admin", "galleries")
async def duplicates(
    runtime: Service,
    name: str,
    offset: Annotated[int, Query(ge=0, le=MAX_ITEMS)] = 0,
    limit: Annotated[
        int, Query(ge=1, le=_MAX_GROUPS, description="Maximum number of groups.")
    ] = 50,
    min_score: Annotated[
        float | None,
        Query(
            ge=-1,
            le=1,
            description="Minimum cosine; default 0.95, or more if different products look alike.",
        ),
    ] = None,
) -> DuplicatesAnswer:
    """Groups of near-duplicates that likely show one product, the largest first.

    Each item is near the first of its group. A group of more than 20 items and more than 1 % of the
    gallery is listed in `crowds` instead: it is a placeholder image, or the score is too low. For
    galleries of more than 10,000 items, use the command line.
    """
    over = CancelToken()
    async with runtime.registry.find(name) as served:

        def read() -> DuplicatesAnswer:
            gallery = _comparable(served)
            version = gallery.version
            near = find_duplicates(gallery, min_score=min_score, on_progress=lambda _: over.check())
            page = near.groups[offset : offset + limit]
            return DuplicatesAnswer(
                gallery_version=version,
                min_score=near.min_score,
                floor=NearFloor(**asdict(near.floor)),
                total=len(near.groups),
                items=sum(map(len, near.groups)),
                offset=offset,
                warning=near.warning,
                crowds=list(_clusters(name, gallery, near)),
                groups=[
                    [_item(name, gallery, one) for one in group]
                    for group in members_of(gallery, page)
                ],
            )

        served.acquire()  # until the thread ends, even if the client has disconnected
        try:
            limit_s = runtime.settings.request_timeout_ms / 1e3
            async with within(limit_s, "Reading the near-duplicates"):
                return await _SCANS.run(read, after=served.release)
        finally:
            over.cancel()


def _comparable(served: Served) -> Gallery:
    """The gallery of `served`. Raises: InvalidParameterError if it is remote or too large."""
    gallery = served.require_whole()
    if not isinstance(gallery, Gallery):
        raise InvalidParameterError(
            f"Gallery {served.name} is on Milvus; near-duplicates need a gallery in a folder. Copy "
            "it with kinlens-index import, and run kinlens-index duplicates."
        )
    if gallery.size > MAX_ITEMS:
        raise InvalidParameterError(
            f"Gallery {served.name} has {gallery.size:,} items; the limit for near-duplicates over "
            f"HTTP is {MAX_ITEMS:,}. Run kinlens-index duplicates GALLERY on the "
            "machine of the service."
        )
    return gallery


def _clusters(name: str, gallery: Gallery, near: NearDuplicates) -> Iterator[NearCrowd]:
    for cluster in clusters_of(gallery, near):
        examples = [item_model(name, gallery, item) for item in cluster.examples]
        yield NearCrowd(items=cluster.items, examples=examples, detail=cluster.detail)


def _item(name: str, gallery: Gallery, member: Member) -> NearItem:
    judged = asdict(member)
    del judged["item"]
    return NearItem(**item_model(name, gallery, member.item).model_dump(), **judged)
