"""Near-duplicates of a gallery over HTTP: one product photographed or listed twice."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from kinlens.embedder.errors import InvalidParameterError, OverloadedError
from kinlens.indexer.checks.duplicates import (
    Member,
    NearDuplicates,
    crowds_of,
    find_duplicates,
    members_of,
)
from kinlens.indexer.gallery import Gallery
from kinlens.models import DuplicatesAnswer, NearCrowd, NearFloor, NearItem
from kinlens.service.api.galleries import FAILURES, Service
from kinlens.service.api.items import item_model
from kinlens.service.galleries.registry import Served
from kinlens.service.http.openapi import problems
from kinlens.service.search.pipeline import CancelToken

MOST_ITEMS = 10_000
"""Items of the largest gallery that is looked through while somebody waits."""

_MOST_GROUPS = 200
_at_work = threading.Lock()  # it takes all cores

router = APIRouter()


@router.get(
    "/galleries/{name}/duplicates", responses=problems(*FAILURES), summary="Find near-duplicates"
)
async def duplicates(
    runtime: Service,
    name: str,
    offset: Annotated[int, Query(ge=0, le=MOST_ITEMS)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_GROUPS, description="Groups, at most.")] = 50,
    min_score: Annotated[
        float | None,
        Query(
            ge=-1,
            le=1,
            description="Least cosine; default 0.95, or more where different products are alike.",
        ),
    ] = None,
) -> DuplicatesAnswer:
    """Groups of items that show one product: each is near the first of its group.

    The largest come first. A group with more than 1 % of the gallery and 20 items is in `crowds`
    instead: it shows a placeholder, or the score is too low. Galleries of more than 10,000 items
    are for the command line.
    """
    over = CancelToken()
    async with runtime.registry.find(name) as served:

        def read() -> DuplicatesAnswer:
            gallery = _comparable(served)
            version = gallery.version
            near = find_duplicates(
                gallery,
                min_score=min_score,
                on_progress=lambda _: over.check(),
            )
            page = near.groups[offset : offset + limit]
            return DuplicatesAnswer(
                gallery_version=version,
                min_score=near.min_score,
                floor=NearFloor(**asdict(near.floor)),
                total=len(near.groups),
                items=sum(map(len, near.groups)),
                offset=offset,
                warning=near.warning,
                crowds=list(_crowds(name, gallery, near)),
                groups=[
                    [_item(name, gallery, one) for one in group]
                    for group in members_of(gallery, page)
                ],
            )

        try:
            return await runtime.read("the near-duplicates", lambda: _alone(served, read))
        finally:
            over.cancel()


def _alone(served: Served, read: Callable[[], DuplicatesAnswer]) -> DuplicatesAnswer:
    """What `read` gives, as a user of `served`: it goes on for a moment when nobody waits."""
    if not _at_work.acquire(blocking=False):
        raise OverloadedError("Near-duplicates are looked for already. Try again in a second.")
    try:
        if not served.acquire():
            raise OverloadedError("The gallery has just been replaced. Try again in a second.")
        try:
            return read()
        finally:
            served.release()
    finally:
        _at_work.release()


def _comparable(served: Served) -> Gallery:
    """Its gallery. Raises: InvalidParameterError if it cannot be compared with itself here."""
    gallery = served.whole()
    if not isinstance(gallery, Gallery):
        raise InvalidParameterError(
            f"Gallery {served.name} is on Milvus; near-duplicates are looked for in a folder. Copy "
            "it with kinlens-index import, and run kinlens-index duplicates."
        )
    if gallery.size > MOST_ITEMS:
        raise InvalidParameterError(
            f"Gallery {served.name} has {gallery.size:,} items; here near-duplicates are looked "
            f"for among up to {MOST_ITEMS:,}. Run kinlens-index duplicates GALLERY --out "
            "near.html on the machine of the service."
        )
    return gallery


def _crowds(name: str, gallery: Gallery, near: NearDuplicates) -> Iterator[NearCrowd]:
    for crowd in crowds_of(gallery, near):
        examples = [item_model(name, gallery, item) for item in crowd.examples]
        yield NearCrowd(items=crowd.items, examples=examples, detail=crowd.detail)


def _item(name: str, gallery: Gallery, member: Member) -> NearItem:
    judged = asdict(member)
    del judged["item"]
    return NearItem(**item_model(name, gallery, member.item).model_dump(), **judged)
