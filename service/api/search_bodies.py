"""Searches as they are sent, a form, a raw image or JSON, made into queries."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from embedder.errors import KinlensError
from embedder.preprocess import Box
from indexer.types import Grouping
from service.api.amounts import check_amounts, check_queries, check_views
from service.api.bounded import check_count
from service.api.query_models import (
    Crop,
    LookingFor,
    SearchFields,
    SearchRequest,
    check_looked_for,
)
from service.api.reading import where_of
from service.http.bodies import (
    INLINE_BYTES,
    JSON,
    Part,
    as_faults,
    checked,
    checking,
    fault,
    media_type_of,
    off_loop,
    parse_form,
    parse_object,
)
from service.search.query import Query, SearchLimits, View, views_of

T = TypeVar("T")
Pairs = Sequence[tuple[str, str]]

FORM, RAW = "multipart/form-data", "application/octet-stream"
_INLINE_IMAGE = 256 * 2**10  # what is quicker to read at once than to hand to a thread
_INLINE_PARTS = 16
_LISTS = {"positive": "positives", "negative": "negatives"}
_CROPS: TypeAdapter[list[Box]] = TypeAdapter(list[Crop])
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for: one query, or if `separate` one for each view, answered apart."""

    queries: list[Query]
    separate: bool


async def read_search(request: Request, limits: SearchLimits) -> Asked:
    """What a search asks for.

    Raises: HTTPException (400, 415), RequestValidationError, KinlensError.
    """
    body, kind = await request.body(), media_type_of(request)
    query = request.query_params.multi_items()
    if kind == FORM:
        content_type = request.headers["content-type"]
        return await _read(body, request, lambda: _from_form(body, content_type, query, limits))
    if kind == JSON:
        return await _read(body, request, lambda: _from_json(body, query, limits))
    if kind == RAW or kind.startswith("image/"):
        return await _read(body, request, lambda: _from_raw(body, query, limits))
    raise HTTPException(
        415,
        f"Content-Type = {kind[:_SHOWN]!r} is not read here; send {FORM}, an image as image/* or "
        f"{RAW}, or {JSON}.",
    )


async def read_batch(request: Request, limits: SearchLimits) -> list[Query | Exception]:
    """What a batch asks for; a query that cannot be read is an error in its place.

    Raises: as `read_search`.
    """
    body, kind = await request.body(), media_type_of(request)
    if kind == FORM:
        content_type = request.headers["content-type"]
        return await _read(body, request, lambda: _batch_from_form(body, content_type, limits))
    if kind == JSON:
        return await _read(body, request, lambda: _batch_from_json(body, limits))
    raise HTTPException(
        415, f"Content-Type = {kind[:_SHOWN]!r} is not read here; send {JSON} or {FORM}."
    )


async def read_fields(pairs: Pairs, limits: SearchLimits) -> Query:
    """A query without images from a query string. Raises: RequestValidationError, FilterError."""
    length = sum(len(name) + len(value) for name, value in pairs)
    return await off_loop(
        lambda: _query(checked(SearchFields, _fields(pairs), limits), limits),
        short=length <= INLINE_BYTES,
    )


async def _read(body: bytes, request: Request, work: Callable[[], T]) -> T:
    short = len(request.url.query) <= INLINE_BYTES and _is_short(body, media_type_of(request))
    return await off_loop(work, short=short)


def _is_short(body: bytes, kind: str) -> bool:
    if len(body) <= INLINE_BYTES or kind == JSON or len(body) > _INLINE_IMAGE:
        return len(body) <= INLINE_BYTES
    return kind != FORM or (b"filter" not in body and body.count(b"\n--") <= _INLINE_PARTS)


def _from_form(body: bytes, content_type: str, query: Pairs, limits: SearchLimits) -> Asked:
    images, pairs = _form(body, content_type)
    return _from_images(images, [*query, *pairs], limits)


def _from_raw(body: bytes, query: Pairs, limits: SearchLimits) -> Asked:
    return _from_images([body], query, limits)


def _from_json(body: bytes, query: Pairs, limits: SearchLimits) -> Asked:
    payload = parse_object(body)
    fields = _fields(query)
    for name in fields.keys() & payload.keys():
        raise fault(name, f"{name} is given twice; send it once, in the query string or the body.")
    asked = checked(SearchRequest, {**fields, **payload}, limits)
    return _split(_asked_in(asked, limits), asked, limits)


def _from_images(images: Sequence[bytes], pairs: Pairs, limits: SearchLimits) -> Asked:
    looking = checked(LookingFor, _fields(_without(pairs, "crop")), limits)
    boxes = _boxes(pairs, limits)

    def check() -> None:
        check_count("images", images, limits.max_images)
        check_looked_for(len(images), looking.positives)

    checking("image", check)
    check_views(len(images) * max(1, len(boxes)), limits)
    views = [view for n, data in enumerate(images, 1) for view in views_of(data, boxes, n)]
    return _split(_query(looking, limits, views), looking, limits)


def _batch_from_form(
    body: bytes, content_type: str, limits: SearchLimits
) -> list[Query | Exception]:
    images, pairs = _form(body, content_type)
    looking = checked(LookingFor, _fields(_without(pairs, "crop")), limits)
    boxes = _boxes(pairs, limits)
    checking("image", lambda: check_looked_for(len(images), []))
    check_queries(len(images), limits)
    shared = _query(looking, limits)
    queries = [shared.with_views(views_of(data, boxes)) for data in images]
    if looking.combine == "separate":
        queries = [part for query in queries for part in query.apart()]
    check_amounts(queries, limits)
    return list(queries)


def _batch_from_json(body: bytes, limits: SearchLimits) -> list[Query | Exception]:
    payload = parse_object(body)
    raw = payload.get("queries")
    if payload.keys() != {"queries"} or not isinstance(raw, list) or not raw:
        raise fault(
            "queries", 'queries is missing or no list of searches; send {"queries": [{…}]}.'
        )
    check_queries(len(raw), limits)
    queries = [_one_of_batch(value, limits) for value in raw]
    check_amounts([query for query in queries if isinstance(query, Query)], limits)
    return queries


def _one_of_batch(value: Any, limits: SearchLimits) -> Query | Exception:
    try:
        request = checked(SearchRequest, value, limits)
        if request.combine == "separate":
            return fault(
                "combine",
                "combine = separate is not for a query of a batch; send each image as its own "
                "query.",
            )
        return _asked_in(request, limits)
    except (RequestValidationError, KinlensError) as error:
        return error


def _asked_in(request: SearchRequest, limits: SearchLimits) -> Query:
    check_views(sum(max(1, len(image.crops)) for image in request.images), limits)
    views = [
        view
        for number, image in enumerate(request.images, 1)
        for view in views_of(image.data, image.crops, number)
    ]
    return _query(request, limits, views)


def _split(query: Query, looking: LookingFor, limits: SearchLimits) -> Asked:
    if looking.combine == "mean":
        return Asked([query], separate=False)
    queries = query.apart()
    check_amounts(queries, limits)
    return Asked(queries, separate=True)


def _query(fields: SearchFields, limits: SearchLimits, views: Iterable[View] = ()) -> Query:
    grouping = None
    if fields.group_by:
        grouping = Grouping(fields.group_by, fields.group_score, fields.group_size or 1)
    query = Query(
        views=tuple(views),
        k=fields.k or limits.default_k,
        offset=fields.offset or 0,
        min_score=fields.min_score,
        min_probability=fields.min_probability,
        where=where_of(fields.filter),
        grouping=grouping,
        distinct=fields.distinct,
        exact=fields.exact,
    )
    if not isinstance(fields, LookingFor):
        return query
    return replace(
        query,
        positives=tuple(dict.fromkeys(fields.positives)),
        negatives=tuple(dict.fromkeys(fields.negatives)),
        gallery=fields.gallery,
    )


def _form(body: bytes, content_type: str) -> tuple[list[bytes], list[tuple[str, str]]]:
    """The images, and the other fields."""
    parts = parse_form(body, content_type)
    images = [_file(part) for part in parts if part.name == "image"]
    return images, [(part.name, _text(part)) for part in parts if part.name != "image"]


def _file(part: Part) -> bytes:
    if not part.is_file:
        raise fault(
            "image",
            "image is a text; send the content of an image file, with a file name. Nothing is "
            "loaded from addresses or paths.",
        )
    return part.data


def _text(part: Part) -> str:
    if part.is_file:
        name = part.name[:_SHOWN]
        raise fault(name, f"{name} = a file is no value of it; send a text without a file name.")
    return part.text


def _fields(pairs: Pairs) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in _LISTS:
            fields.setdefault(_LISTS[name], []).append(value)
        elif name in fields or name in _LISTS.values():
            shown = name[:_SHOWN]
            raise fault(shown, f"{shown} is given twice, or in the wrong place; send it once.")
        else:
            fields[name] = value
    return fields


def _boxes(pairs: Pairs, limits: SearchLimits) -> list[Box]:
    texts = [value for name, value in pairs if name == "crop"]
    checking("crop", lambda: check_count("crops", texts, limits.max_crops))
    try:
        return _CROPS.validate_python(texts)
    except ValidationError as error:
        raise as_faults(error, "crop") from None


def _without(pairs: Pairs, name: str) -> Pairs:
    return [pair for pair in pairs if pair[0] != name]
