"""The quality of a gallery over HTTP: its golden set, labelled queries and runs that measure with
them; and its near-duplicates, one product photographed or listed twice.

A run uses one search thread at a time and queues for it like a search, so it delays searches
little.
"""

import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response

from kinlens.embedder import errors
from kinlens.embedder.errors import ImageError, InvalidParameterError, KinlensError
from kinlens.embedder.preprocess import windows
from kinlens.golden import (
    GoldenQueries,
    GoldenQuery,
    GoldenRun,
    GoldenRuns,
    Label,
    UnlabelledQuery,
    Words,
)
from kinlens.indexer.checks.duplicates import (
    Member,
    clusters_of,
    find_duplicates,
    members_of,
)
from kinlens.indexer.gallery import Gallery
from kinlens.models import DuplicatesAnswer, NearCrowd, NearFloor, NearItem
from kinlens.quality.golden import KEPT_RUNS, GoldenSet, NewQuery
from kinlens.quality.judging import GoldenResults, Vector, ask, labelled, threshold_of
from kinlens.service.access.audit import note
from kinlens.service.api.feedback import SUBJECT, store_of
from kinlens.service.api.fields import read_form
from kinlens.service.api.galleries import CHANGE_FAILURES, FAILURES, IMAGE_FAILURES, Service
from kinlens.service.api.images import AS_SIZE, KEPT, Size
from kinlens.service.api.items import item_model
from kinlens.service.api.search import search_of
from kinlens.service.concurrency import BoundedPool, within
from kinlens.service.galleries.feedback import FeedbackStore
from kinlens.service.galleries.registry import Served
from kinlens.service.http.bodies import (
    FORM,
    checked,
    fault,
    off_loop,
    parse_json,
    read_at,
    read_body,
)
from kinlens.service.http.openapi import body_docs, problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime
from kinlens.service.search.pipeline import CancelToken
from kinlens.service.search.query import Query as Search
from kinlens.service.search.query import views_of
from kinlens.values import AUTO

MAX_ITEMS = 10_000
"""Maximum number of items in a gallery that a request may search for near-duplicates."""

_MAX_GROUPS = 200
_SCANS = BoundedPool("near-duplicates", 1, 0)  # one at a time, since it uses all cores
_QUERIES_PER_LIMIT = 16
_KEPT = (*FAILURES, errors.GalleryConflictError)
_MODEL = (errors.SearchError, errors.BundleError)
_FIELDS = {"label", "name", "crop", "texts"}
_LABEL_TEXT = (
    'The right items, as JSON: {"keys": ["a", "b"]}, {"attribute": "product", "value": 12} or '
    '{"no_match": true}.'
)
_ADD_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["label"],
    "properties": {
        "image": {"type": "string", "format": "binary", "description": "The image file."},
        "crop": {"type": "string", "description": "As in a search: one crop, or auto."},
        "texts": {"type": "string", "description": "As in a search: words with weights, as JSON."},
        "label": {"type": "string", "description": _LABEL_TEXT},
        "name": {"type": "string", "description": "The name of the query in reports."},
    },
}

Sha256 = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="Its sha256, as in the list of queries.")
]
T = TypeVar("T")
router = APIRouter(route_class=Route, prefix="/galleries/{name}")


@router.get("/golden", responses=problems(*_KEPT), summary="List golden queries")
@rule("write", "galleries")
async def queries(runtime: Service, name: str) -> GoldenQueries:
    """The labelled queries and the right items of each."""
    found = await runtime.read_in(name, "the golden set", lambda served: _golden(served).queries())
    return GoldenQueries(queries=found)


@router.post(
    "/golden",
    responses=problems(*CHANGE_FAILURES, *_MODEL, *IMAGE_FAILURES, errors.FilterError),
    summary="Label a query",
)
@rule("write", "galleries", "image", docs=partial(body_docs, {FORM: {"schema": _ADD_FORM}}))
async def add(runtime: Service, name: str, request: Request) -> GoldenQuery:
    """Store an image, words or both with the right items; a query that is stored already gets the
    new label.

    The keys, or an item with the value, must exist in the gallery.
    """
    async with runtime.registry.find(name) as served:
        served.refuse_if_followed()
        golden = _golden(served)
        body, _ = await read_body(request, FORM)
        new = await off_loop(request, lambda: _new_query(request, body))
        limit_s = runtime.settings.request_timeout_ms / 1e3
        async with within(limit_s, "Embedding the image", since=read_at(request)):
            await runtime.searching.vectors(served, _query_of(new, new.data))
        [made] = await runtime.change(served, lambda: golden.add([new], served.require_whole()))
    note(request.scope["state"], affected=1)
    return made


@router.delete(
    "/golden/{sha256}",
    status_code=204,
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError),
    summary="Remove a golden query",
)
@rule("write", "galleries")
async def remove(runtime: Service, request: Request, name: str, sha256: Sha256) -> None:
    """Remove a query with its image; reports are not changed."""
    async with runtime.registry.find(name) as served:
        served.refuse_if_followed()
        golden = _golden(served)

        def work() -> None:
            if not golden.remove([sha256]):
                golden.image(sha256)  # raises ItemNotFoundError

        await runtime.change(served, work)
    note(request.scope["state"], affected=1)


@router.get(
    "/golden/{sha256}/image",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "The image as a JPEG."},
        **problems(*_KEPT, errors.ItemNotFoundError),
    },
    summary="The image of a golden query",
)
@rule("write", "galleries")
async def image(
    runtime: Service,
    name: str,
    sha256: Sha256,
    size: Annotated[Size, AS_SIZE, Query(description="Maximum longest side in pixels.")] = 320,
) -> Response:
    """The image of a labelled query, scaled down."""
    data = await runtime.read_in(name, "the image", lambda served: _golden(served).image(sha256))
    if not data:
        raise errors.ItemNotFoundError(f"Query {sha256} has words alone, and no image.")

    async def read() -> bytes:
        return data

    made = await runtime.renditions.get(f"golden/{sha256}", read, size)
    return Response(made, media_type="image/jpeg", headers={"Cache-Control": KEPT})


@router.post(
    "/golden/run", responses=problems(*CHANGE_FAILURES, *_MODEL), summary="Run the golden set"
)
@rule("write", "galleries")
async def run(
    runtime: Service,
    name: str,
    min_score: Annotated[
        float | None,
        Query(
            ge=-1,
            le=1,
            allow_inf_nan=False,
            description="Minimum score of a match; default: the calibrated threshold.",
        ),
    ] = None,
) -> GoldenRun:
    """Search with every query: recall at 1, 5 and 10, MAP@R, no-match precision, worst queries.

    The report is stored with the model and the version of the gallery, even if the client
    disconnects.
    """
    async with runtime.registry.find(name) as served:
        served.refuse_if_followed()
        golden = _golden(served)
        report = await _run(runtime, served, golden, min_score)
        await runtime.change(served, lambda: golden.keep(report))
    return report


@router.get("/golden/runs", responses=problems(*_KEPT), summary="List golden runs")
@rule("write", "galleries")
async def runs(
    runtime: Service, name: str, limit: Annotated[int, Query(ge=1, le=KEPT_RUNS)] = 50
) -> GoldenRuns:
    """Reports of earlier runs, newest first."""
    found = await runtime.read_in(name, "the reports", lambda served: _golden(served).runs(limit))
    return GoldenRuns(runs=found)


@router.get(
    "/golden/unlabelled",
    responses=problems(*_KEPT, errors.StateError),
    summary="Draw a query to label",
)
@rule("write", "galleries")
async def unlabelled(runtime: Service, name: str) -> UnlabelledQuery:
    """One of the photos and words that the feedback stores and nobody has labelled or skipped.

    Each is equally likely, whatever was clicked and however sure the answer was: labels of chosen
    queries guarantee nothing for the others. 404 unless the service stores photos.
    """
    async with runtime.registry.find(name) as served:
        _golden(served)
        store = _stored_queries(runtime)
        served.refuse_if_followed()
        calibrator = served.calibrator
        assert calibrator is not None  # since it has a folder
        known = await runtime.read("the calibration", calibrator.stored, served=served)
    queries = await runtime.in_state(SUBJECT, store, lambda store: store.unlabelled(name))
    query = random.choice(queries) if queries else None
    return UnlabelledQuery(
        left=len(queries),
        sha256=None if query is None else query.digest,
        text=None if query is None else query.text or None,
        product=None if known is None else known.product,
    )


@router.get(
    "/golden/unlabelled/{sha256}",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "The photo as it is stored."},
        **problems(*_KEPT, errors.ItemNotFoundError, errors.StateError),
    },
    summary="The photo of a query to label",
)
@rule("write", "galleries")
async def unlabelled_image(runtime: Service, name: str, sha256: Sha256) -> Response:
    """The photo that the feedback stores; 404 from when it was deleted there, or the service ceased
    to store photos.
    """
    data = await _of_feedback(runtime, name, lambda store: store.image(name, sha256))
    return Response(data, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


@router.delete(
    "/golden/unlabelled/{sha256}",
    status_code=204,
    responses=problems(*_KEPT, errors.ItemNotFoundError, errors.StateError),
    summary="Do not draw a query again",
)
@rule("write", "galleries")
async def skip(runtime: Service, request: Request, name: str, sha256: Sha256) -> None:
    """Omit a query from those to label, before the caller labels it, or as nobody can label it.
    The feedback is not changed.

    Of several callers one gets 204, and the others 404: so each query is labelled by one of them.
    """
    await _of_feedback(runtime, name, lambda store: store.handle(name, sha256))
    note(request.scope["state"], affected=1)


@router.put(
    "/golden/unlabelled/{sha256}",
    status_code=204,
    responses=problems(*_KEPT, errors.ItemNotFoundError, errors.StateError),
    summary="Draw a query again",
)
@rule("write", "galleries")
async def unskip(runtime: Service, request: Request, name: str, sha256: Sha256) -> None:
    """Undo that a query is not drawn again. A label of it is not removed."""
    await _of_feedback(runtime, name, lambda store: store.unhandle(name, sha256))
    note(request.scope["state"], affected=1)


@router.get("/duplicates", responses=problems(*FAILURES), summary="Find near-duplicates")
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
    over, image_url = CancelToken(), runtime.settings.image_url
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
                crowds=[
                    NearCrowd(
                        items=cluster.items,
                        examples=[
                            item_model(name, gallery, item, image_url) for item in cluster.examples
                        ],
                        detail=cluster.detail,
                    )
                    for cluster in clusters_of(gallery, near)
                ],
                groups=[
                    [_item(name, gallery, one, image_url) for one in group]
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


async def _of_feedback(runtime: Runtime, name: str, work: Callable[[FeedbackStore], T]) -> T:
    """Run `work` with the feedback, if the caller may use the golden set of the gallery."""
    async with runtime.registry.find(name) as served:
        _golden(served)
    store = _stored_queries(runtime)
    return await runtime.in_state(SUBJECT, store, work)


def _stored_queries(runtime: Runtime) -> FeedbackStore:
    """The feedback. Raises: HTTPException (404) unless it stores photos now; hides old ones."""
    store = store_of(runtime)
    if runtime.settings.feedback != "pictures":
        raise HTTPException(
            404,
            "This service stores no photos of searches. To label them, start it with "
            "KINLENS_FEEDBACK=pictures.",
        )
    return store


def _golden(served: Served) -> GoldenSet:
    """Its golden set. Raises: AccessError, GalleryConflictError if it can have none."""
    served.require_whole()
    if served.path is None:
        raise errors.GalleryConflictError(
            f"Gallery {served.name} is stored in Milvus and has no folder for a golden set. Use a "
            "gallery in a folder."
        )
    return GoldenSet(served.path)


async def _run(
    runtime: Runtime, served: Served, golden: GoldenSet, min_score: float | None
) -> GoldenRun:
    gallery, pool = served.require_whole(), runtime.pools["file"]
    queries = await runtime.read("the golden set", golden.queries, served=served)
    if not queries:
        raise InvalidParameterError(
            f"The golden set of gallery {served.name} is empty. Label queries first: POST "
            f"/galleries/{served.name}/golden."
        )
    limit_s = -(-len(queries) // _QUERIES_PER_LIMIT) * runtime.settings.request_timeout_ms / 1e3
    cure = "Try again when the service is less busy."
    async with within(limit_s, f"Searching with {len(queries):,} queries", cure):
        begun = await pool.run(lambda: GoldenResults.begin(gallery, queries))
        vectors: dict[str, Vector | KinlensError] = {}
        for query in queries:
            vector = await _vector(runtime, served, golden, query)
            work = partial(ask, gallery, query, vector)
            vectors[query.sha256] = vector
            begun.outcomes.append(await pool.run(work, bulk=True))
        if served.calibrator is not None:
            known = partial(labelled, gallery, queries, vectors)
            fit = partial(served.calibrator.fit_golden, known)
            await pool.run(fit, bulk=True)
    calibration = served.model.embedder.calibration
    return begun.report(threshold_of(calibration) if min_score is None else min_score)


async def _vector(
    runtime: Runtime, served: Served, golden: GoldenSet, query: GoldenQuery
) -> Vector | errors.KinlensError:
    read = partial(golden.image, query.sha256)
    try:
        data = await runtime.pools["file"].run(read, bulk=True)
        vectors = await runtime.searching.vectors(served, _query_of(query, data))
    except (ImageError, InvalidParameterError, errors.ItemNotFoundError) as error:
        return error  # ItemNotFoundError: it was removed since
    return vectors if len(vectors) > 1 else vectors[0]


def _query_of(asked: GoldenQuery | NewQuery, data: bytes) -> Search:
    """The search of a labelled query with the image `data`."""
    is_auto = isinstance(asked.crop, str)
    boxes = windows() if isinstance(asked.crop, str) else [asked.crop]
    return Search(
        views=views_of(data, boxes, is_auto=is_auto) if data else (),
        texts=tuple((words.text, words.weight) for words in asked.texts),
        best_view=is_auto,
    )


def _new_query(request: Request, body: bytes) -> NewQuery:
    """Raises: HTTPException (400), RequestValidationError."""
    images, fields = read_form(request, body)
    sent = dict(fields)
    if len(images) > 1 or (not images and "texts" not in sent):
        raise fault("image", f"The form has {len(images)} images; send one, or texts.")
    if not images and "crop" in sent:
        raise fault("crop", "crop was sent without an image; omit it.")
    if len(sent) < len(fields) or not sent.keys() <= _FIELDS:
        raise fault(
            "label", f"A field is unknown or sent twice; send image, {', '.join(sorted(_FIELDS))}."
        )
    if "label" not in sent:
        raise fault("label", f"label is missing. {_LABEL_TEXT}")
    try:
        label = parse_json(sent["label"].encode())
    except ValueError as error:
        raise fault("label", f"label is not valid JSON: {error}. {_LABEL_TEXT}") from error
    asked = [(name, sent[name]) for name in ("crop", "texts") if name in sent]
    search = search_of(asked, images)
    crops = search.images[0].crops if images else []
    return NewQuery(
        b"".join(images),
        checked(Label, label, lambda _: "label"),
        sent.get("name", ""),
        (AUTO if len(crops) > 1 else crops[0]) if crops else None,
        tuple(Words(text=words.text, weight=words.weight) for words in search.texts),
    )


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


def _item(name: str, gallery: Gallery, member: Member, image_url: str) -> NearItem:
    judged = asdict(member)
    del judged["item"]
    return NearItem(**item_model(name, gallery, member.item, image_url).model_dump(), **judged)
