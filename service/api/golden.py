"""The golden set of a gallery over HTTP: labelled queries, and runs that measure quality on them.

A run uses one search thread at a time and queues for it like a search, so it delays searches
little.
"""

import hashlib
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from kinlens.embedder import errors
from kinlens.embedder.errors import ImageError, InvalidParameterError, KinlensError
from kinlens.golden import GoldenQueries, GoldenQuery, GoldenRun, GoldenRuns, Label
from kinlens.quality.golden import KEPT_RUNS, GoldenSet, NewQuery
from kinlens.quality.judging import GoldenResults, Vector, ask, labelled, threshold_of
from kinlens.service.access.audit import note
from kinlens.service.api.galleries import CHANGE_FAILURES, FAILURES, IMAGE_FAILURES, Service
from kinlens.service.api.images import AS_SIZE, KEPT, Size
from kinlens.service.api.requests import read_form
from kinlens.service.concurrency import within
from kinlens.service.galleries.registry import Served
from kinlens.service.http.bodies import FORM, checked, fault, off_loop, parse_json, read_body
from kinlens.service.http.openapi import body_docs, problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime

_QUERIES_PER_LIMIT = 16
_KEPT = (*FAILURES, errors.GalleryConflictError)
_MODEL = (errors.SearchError, errors.BundleError)
_LABEL_TEXT = (
    'The right items, as JSON: {"keys": ["a", "b"]}, {"attribute": "product", "value": 12} or '
    '{"no_match": true}.'
)
_ADD_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["image", "label"],
    "properties": {
        "image": {"type": "string", "format": "binary", "description": "The image file."},
        "label": {"type": "string", "description": _LABEL_TEXT},
        "name": {"type": "string", "description": "The name of the query in reports."},
    },
}

Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The sha256 of its image.")]
router = APIRouter(route_class=Route, prefix="/galleries/{name}/golden")


@router.get("", responses=problems(*_KEPT), summary="List golden queries")
@rule("write", "galleries")
async def queries(runtime: Service, name: str) -> GoldenQueries:
    """The labelled queries and the right items of each."""
    async with runtime.registry.find(name) as served:
        golden = GoldenSet(_folder(served))
        found = await runtime.read("the golden set", golden.queries, served=served)
    return GoldenQueries(queries=found)


@router.post(
    "",
    responses=problems(*CHANGE_FAILURES, *_MODEL, *IMAGE_FAILURES, errors.FilterError),
    summary="Label a query",
)
@rule("write", "galleries", "image", docs=partial(body_docs, {FORM: {"schema": _ADD_FORM}}))
async def add(runtime: Service, name: str, request: Request) -> GoldenQuery:
    """Store an image with its right items; an image that is stored already gets the new label.

    The keys, or an item with the value, must exist in the gallery.
    """
    async with runtime.registry.find(name) as served:
        served.refuse_if_followed()
        golden = GoldenSet(_folder(served))
        body, _ = await read_body(request, FORM)
        new = await off_loop(request, lambda: _new_query(request, body))
        async with within(runtime.settings.request_timeout_ms / 1e3, "Embedding the image"):
            await served.model.encode(new.data, hashlib.sha256(new.data).hexdigest())
        [made] = await runtime.change(served, lambda: golden.add([new], served.require_whole()))
    note(request.scope["state"], affected=1)
    return made


@router.delete(
    "/{sha256}",
    status_code=204,
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError),
    summary="Remove a golden query",
)
@rule("write", "galleries")
async def remove(runtime: Service, request: Request, name: str, sha256: Sha256) -> None:
    """Remove a query with its image; reports are not changed."""
    async with runtime.registry.find(name) as served:
        served.refuse_if_followed()
        golden = GoldenSet(_folder(served))

        def work() -> None:
            if not golden.remove([sha256]):
                golden.image(sha256)  # raises ItemNotFoundError

        await runtime.change(served, work)
    note(request.scope["state"], affected=1)


@router.get(
    "/{sha256}/image",
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
    async with runtime.registry.find(name) as served:
        golden = GoldenSet(_folder(served))
        data = await runtime.read("the image", lambda: golden.image(sha256), served=served)

    async def read() -> bytes:
        return data

    made = await runtime.renditions.get(f"golden/{sha256}", read, size)
    return Response(made, media_type="image/jpeg", headers={"Cache-Control": KEPT})


@router.post("/run", responses=problems(*CHANGE_FAILURES, *_MODEL), summary="Run the golden set")
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
        golden = GoldenSet(_folder(served))
        report = await _run(runtime, served, golden, min_score)
        await runtime.change(served, lambda: golden.keep(report))
    return report


@router.get("/runs", responses=problems(*_KEPT), summary="List golden runs")
@rule("write", "galleries")
async def runs(
    runtime: Service, name: str, limit: Annotated[int, Query(ge=1, le=KEPT_RUNS)] = 50
) -> GoldenRuns:
    """Reports of earlier runs, newest first."""
    async with runtime.registry.find(name) as served:
        golden = GoldenSet(_folder(served))
        found = await runtime.read("the reports", lambda: golden.runs(limit), served=served)
        return GoldenRuns(runs=found)


def _folder(served: Served) -> FilePath:
    served.require_whole()
    if served.path is None:
        raise errors.GalleryConflictError(
            f"Gallery {served.name} is stored in Milvus and has no folder for a golden set. Use a "
            "gallery in a folder."
        )
    return served.path


async def _run(
    runtime: Runtime, served: Served, golden: GoldenSet, min_score: float | None
) -> GoldenRun:
    gallery, model, pool = served.require_whole(), served.model, runtime.pools["file"]
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
    return begun.report(threshold_of(model.calibration) if min_score is None else min_score)


async def _vector(
    runtime: Runtime, served: Served, golden: GoldenSet, query: GoldenQuery
) -> Vector | errors.KinlensError:
    read = partial(golden.image, query.sha256)
    try:
        data = await runtime.pools["file"].run(read, bulk=True)
        return await served.model.encode(data, query.sha256, "golden")
    except (ImageError, errors.ItemNotFoundError) as error:  # ItemNotFoundError: was removed since
        return error


def _new_query(request: Request, body: bytes) -> NewQuery:
    """Raises: HTTPException (400), RequestValidationError."""
    images, fields = read_form(request, body)
    if len(images) != 1:
        raise fault("image", f"The form has {len(images)} images; send one.")
    sent = dict(fields)
    if len(sent) < len(fields) or not sent.keys() <= {"label", "name"}:
        raise fault("label", "A field is unknown or sent twice; send image, label and name once.")
    if "label" not in sent:
        raise fault("label", f"label is missing. {_LABEL_TEXT}")
    try:
        label = parse_json(sent["label"].encode())
    except ValueError as error:
        raise fault("label", f"label is not valid JSON: {error}. {_LABEL_TEXT}") from error
    return NewQuery(images[0], checked(Label, label, lambda _: "label"), sent.get("name", ""))
