"""Searches over HTTP: their requests (a form, JSON or a raw image), and their routes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Self, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_json

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.errors import InvalidParameterError, KinlensError
from kinlens.embedder.programs.faults import path_of
from kinlens.models import Combine
from kinlens.quality.guarantee import HIGHEST, LOWEST
from kinlens.service.access.rates import account_of
from kinlens.service.api.fields import (
    ImageInput,
    SearchFields,
    Strict,
    TextOrWords,
    VectorInput,
    custom_error,
    list_as_text,
    read_form,
)
from kinlens.service.api.galleries import (
    FAILURES,
    IMAGE_FAILURES,
    ITEM_PATHS,
    Generation,
    ItemRef,
    Service,
)
from kinlens.service.encoding.model import View
from kinlens.service.encoding.vectors import VectorView
from kinlens.service.http.bodies import (
    FORM,
    IMAGE,
    INLINE_BYTES,
    JSON,
    RAW,
    checked,
    fault,
    off_loop,
    parse_object,
    read_at,
    read_body,
)
from kinlens.service.http.openapi import batch_docs, parameters_of, problems, search_docs
from kinlens.service.http.rules import RequestRoute, Route, rule, while_connected
from kinlens.service.problems import described, request_id_of
from kinlens.service.runtime import Runtime
from kinlens.service.search.query import Answer, Query
from kinlens.service.settings import MAX_HITS, Settings

Pairs = Sequence[tuple[str, str]]
_INLINE_IMAGE = 256 * 2**10
_INLINE_PARTS = 16
_LISTS = {"positive": "positives", "negative": "negatives", "crop": "crops"}
_LISTED = ("images", *_LISTS.values())  # names that are only valid in JSON
_VIEWS, _ALL_VIEWS = "images and crops", "images, crops, vectors and texts"
_MAX_KEYS = 256
_SHOWN = 80
NO_STORE = {"Cache-Control": "no-store"}
_SIMILAR = (*FAILURES, errors.ItemNotFoundError, errors.FilterError)
SEARCH_FAILURES = (*_SIMILAR, *IMAGE_FAILURES, errors.SearchError)
"""Problems of a request with a search."""


_Keys = Annotated[list[str], Field(default_factory=list, max_length=_MAX_KEYS, fail_fast=True)]
_Level = Annotated[float, Field(ge=LOWEST, le=HIGHEST, allow_inf_nan=False)]


class SearchRequest(SearchFields):
    """A search with at least one image, vector, text or positive."""

    gallery: Annotated[
        str | None,
        Field(
            description="Name of the gallery; default: the first in the settings, else by name. "
            "Always send it if galleries can be created."
        ),
    ] = None
    combine: Annotated[
        Combine,
        Field(
            description="mean: one query from the mean of all images, crops, vectors and "
            "positives, moved away from the negatives. best: search with each image, crop and "
            "vector; an item or group counts with the best of them, its view. best is not possible "
            "with positives, negatives, weights, distinct, diversity, boost and sort_by."
        ),
    ] = "mean"
    positives: Annotated[_Keys, Field(description="Keys of liked items.")]
    negatives: Annotated[_Keys, Field(description="Keys of disliked items.")]
    images: Annotated[
        list[ImageInput],
        Field(default_factory=list, max_length=Settings.max_images, fail_fast=True),
    ]
    vectors: Annotated[
        list[VectorInput],
        Field(
            default_factory=list,
            max_length=Settings.max_images,
            fail_fast=True,
            description="Vectors to search with, alone or together with images.",
        ),
        BeforeValidator(list_as_text),
    ]
    texts: Annotated[
        list[TextOrWords],
        Field(
            default_factory=list,
            max_length=Settings.max_images,
            fail_fast=True,
            description="Words to search with, alone or added to the images. The hits of such a "
            "search have no probabilities.",
        ),
        BeforeValidator(list_as_text),
    ]
    guarantee: Annotated[
        _Level | None,
        Field(
            description="The smallest set of products that has the right one with this "
            "probability. It needs labelled queries, else 422, and one whole image or vector. Not "
            "with offset, sort_by, diversity, boost, exact, min_score and min_probability.",
            examples=[0.95],
        ),
    ] = None
    accept: Annotated[
        _Level | None,
        Field(
            description="Whether the best product may be taken without a person, so that this "
            "share of those taken is right. It needs labelled queries, else 422, and one whole "
            "image or vector, without what guarantee excludes.",
            examples=[0.99],
        ),
    ] = None

    @model_validator(mode="after")
    def _has_views(self) -> Self:
        asks_guarantee = self.guarantee is not None or self.accept is not None
        if asks_guarantee and not self._is_whole:
            raise custom_error(
                "guarantee and accept hold for queries like the labelled ones: one whole image, or "
                "its vector; omit crops, texts, positives, negatives, weights and further images."
            )
        is_auto = any(image.is_auto for image in self.images)
        if is_auto and "combine" in self.model_fields_set and self.combine != "best":
            raise custom_error(
                f"crops = auto searches with each window; omit combine = {self.combine}, or send "
                "combine = best."
            )
        if is_auto:
            self.combine = "best"
        others = (self.positives, self.negatives, self.distinct)
        if self.combine == "best" and any((*others, self.diversity, self.boost, self.sort_by)):
            cure = "omit crops = auto" if is_auto else "send combine = mean"
            raise custom_error(
                "combine = best searches with each image and crop; omit positives, negatives, "
                f"distinct, diversity, boost and sort_by, or {cure}."
            )
        if self.texts and not (self._has_likes or any(sent.weight > 0 for sent in self.texts)):
            raise custom_error(
                "texts have no weight above 0, and there is no image; name what to search for."
            )
        if self.combine == "best" and any(sent.weight != 1 for sent in self.vectors):
            raise custom_error(
                "combine = best searches with each vector alone, where a weight has no effect; "
                "omit the weights, or send combine = mean."
            )
        return self

    @property
    def _is_whole(self) -> bool:
        """Whether it is about one whole image or vector alone."""
        return len(self.images) + len(self.vectors) == 1 and not (
            any(image.crops for image in self.images)
            or any(sent.weight != 1 for sent in self.vectors)
            or any((self.texts, self.positives, self.negatives))
        )

    @property
    def _has_likes(self) -> bool:
        return bool(self.images or self.vectors or self.positives)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to search for."""
        return not (self._has_likes or self.texts)

    def query(self, **more: Any) -> Query:
        """Convert to a query. Raises: FilterError, InvalidParameterError."""
        count = sum([max(1, len(image.crops)) for image in self.images]) + len(self.vectors)
        name = _ALL_VIEWS if self.vectors or self.texts else _VIEWS
        _check(name, count + len(self.texts), Settings.max_views)
        if self.combine == "best":
            depth = (self.offset or 0) + (self.k or Settings.default_k)
            _check("hits", count * depth * (self.group_size or 1), MAX_HITS)
        images = [
            view
            for number, image in enumerate(self.images, 1)
            for view in image.views(image.data, number)
        ]
        return super().query(
            views=(*images, *self.other_views()),
            positives=tuple(dict.fromkeys(self.positives)),
            negatives=tuple(dict.fromkeys(self.negatives)),
            texts=tuple((sent.text, sent.weight) for sent in self.texts),
            gallery=self.gallery,
            best_view=self.combine == "best" and count > 0,
            guarantee=self.guarantee,
            accept=self.accept,
            **more,
        )

    def other_views(self) -> list[VectorView]:
        """The views that need no image."""
        return [
            VectorView(sent.vector, sent.weight, number)
            for number, sent in enumerate(self.vectors, 1)
        ]


class BatchRequest(Strict):
    """Several searches, validated and answered independently."""

    queries: Annotated[
        list[SearchRequest], Field(min_length=1, max_length=Settings.max_batch_queries)
    ]


Parsed = TypeVar("Parsed", bound=Strict)


router = APIRouter(route_class=RequestRoute)


@router.post(
    "/search",
    response_model=models.SearchAnswer,
    responses={200: {"description": "The hits or groups."}, **problems(*SEARCH_FAILURES)},
    summary="Search with images or items",
)
@rule("search", "items", "image", docs=partial(search_docs, SearchRequest))
async def search(request: Request) -> Response:
    """The items of a gallery that are visually most similar to the query, best first.

    Send a form, JSON, or the raw bytes of an image with the other fields in the query string.
    Several images, crops and items are combined into one query. For several queries use
    POST /search/batch.
    """
    runtime: Runtime = request.app.state.runtime
    query = await read_search(request)
    await charge(request, [query])
    searching = runtime.searching.search(query, read_at(request))
    answer = await while_connected(request, searching)
    return _response(answer, runtime)


@router.post(
    "/search/batch",
    response_model=models.BatchAnswer,
    responses={
        200: {"description": "An outcome for each query, in order."},
        **problems(errors.InvalidParameterError, errors.OverloadedError),
    },
    summary="Several searches at once",
)
@rule("search", "items", "batch", docs=partial(batch_docs, BatchRequest, SearchRequest))
async def search_batch(request: Request) -> Response:
    """Several independent searches; a query that fails has a problem in place of an answer.

    Send JSON with a list of searches, or a form in which each image is a query and all queries
    share the other fields.
    """
    runtime: Runtime = request.app.state.runtime
    body, kind = await read_body(request, JSON, FORM)
    read = _batch_of_json if kind == JSON else _batch_of_form
    queries = await off_loop(request, partial(read, request, body))
    await charge(request, queries)
    searching = runtime.searching.search_all(queries, read_at(request))
    answers = await while_connected(request, searching)
    outcomes = b",".join(_outcome(answer, request, runtime) for answer in answers)
    return Response(b'{"answers":[' + outcomes + b"]}", headers=NO_STORE, media_type=JSON)


router.route_class = Route

for _path, _by, _item in ITEM_PATHS:

    @router.get(
        f"{_path}/similar",
        response_model=models.SearchAnswer,
        responses={
            200: {"description": "Similar items, without the item itself."},
            **problems(*_SIMILAR),
        },
        summary=f"Search with an item{_by}",
    )
    @rule("search", "items", docs=lambda: {"parameters": parameters_of(SearchFields)})
    async def similar(
        runtime: Service, request: Request, name: str, generation: Generation, ref: ItemRef = _item
    ) -> Response:
        """The items that are visually most similar to this one, without it, best first."""
        sent = request.query_params.multi_items()
        options = [pair for pair in sent if pair[0] not in ("generation", "version")]
        is_short = sum(len(name) + len(value) for name, value in options) <= INLINE_BYTES
        parse = partial(checked, SearchFields, _fields(options))
        query = await _read_query(request, parse, short=is_short)
        await charge(request, [query])
        generation = generation or ref.generation
        query, key = replace(query, gallery=name, like=ref.id, generation=generation), ""
        since = read_at(request)
        if runtime.feedback is not None:
            async with runtime.registry.find(name) as served:
                served.check_generation(generation)
                read = partial(served.gallery.item, ref.id)
                key = (await runtime.read("the item", read, served=served, since=since)).key
                query = replace(query, generation=served.gallery.generation)
        answer = await while_connected(request, runtime.searching.search(query, since))
        return _response(answer, runtime, key)


async def read_search(request: Request) -> Query:
    """Read a search from a request.

    Raises: HTTPException (400, 415), RequestValidationError, KinlensError.
    """
    body, kind = await read_body(request, FORM, IMAGE, RAW, JSON)
    query_length = len(request.scope["query_string"])
    short = len(body) + query_length <= INLINE_BYTES or (
        # an image that is faster to parse here than to hand to a thread
        kind != JSON
        and len(body) <= _INLINE_IMAGE
        and query_length <= INLINE_BYTES
        and body.count(b"\n--") <= _INLINE_PARTS
    )

    def read() -> SearchRequest:
        return _not_empty(parsed(SearchRequest, request, body, kind))

    return await _read_query(request, read, short=short)


async def charge(request: Request, queries: Sequence[Query | Exception]) -> None:
    """Charge the caller for queries; an invalid query costs one unit.

    Raises: RateLimitedError.
    """
    units = sum([query.units if isinstance(query, Query) else 1 for query in queries])
    if units > 1:
        await account_of(request.scope).owe(units)


async def _read_query(request: Request, read: Callable[[], SearchFields], *, short: bool) -> Query:
    """Read fields with `read` and convert them to a query, on the event loop if they are `short`.

    Filters have their own limit: 4 KiB take 12 ms to parse, 100 times as long as other fields.
    Their length is only known after parsing, since a body can spell a field name in several ways.
    """
    fields = read() if short else await off_loop(request, read)
    if short and fields.has_short_filter:
        return fields.query()
    return await off_loop(request, fields.query)


def parsed(model: type[Parsed], request: Request, body: bytes, kind: str) -> Parsed:
    """A request of this model, as a form, JSON or a raw image with a query string.

    Raises: HTTPException (400), RequestValidationError, KinlensError.
    """
    images: Sequence[bytes] = [body]
    pairs = request.query_params.multi_items()
    if kind == FORM:
        images, fields = read_form(request, body)
        pairs += fields
    if kind != JSON:
        return _of_pairs(model, pairs, images)
    return _of_json(model, parse_object(body), pairs)


def _of_json(model: type[Parsed], payload: dict[str, Any], pairs: Pairs) -> Parsed:
    fields = _fields(pairs)
    for name in fields.keys() & payload.keys():
        raise fault(name, f"{name} was sent twice; send it once, in the query string or the body.")
    if fields:
        read = checked(SearchRequest, fields)
        fields = {name: getattr(read, name) for name in read.model_fields_set}
    return checked(model, {**fields, **payload}, strict=True)


def _of_pairs(model: type[Parsed], pairs: Pairs, images: Sequence[bytes]) -> Parsed:
    """The request with the crops in `pairs` for each image; errors use the names of form fields."""
    fields = _fields(pairs)
    crops = {"crops": fields.pop("crops")} if "crops" in fields else {}
    sent = [{"data": data, **crops} for data in images]
    return checked(model, {**fields, "images": sent}, _form_name)


def search_of(pairs: Pairs, images: Sequence[bytes]) -> SearchRequest:
    """A search with these form fields and images. Raises: RequestValidationError."""
    return _not_empty(_of_pairs(SearchRequest, pairs, images))


def _batch_of_json(_: Request, body: bytes) -> list[Query | Exception]:
    """The searches in a body; an invalid query is replaced by its error."""
    payload = parse_object(body)
    raw = payload.get("queries")
    if payload.keys() != {"queries"} or not isinstance(raw, list) or not raw:
        raise fault("queries", 'queries must be a list of searches; send {"queries": [{…}]}.')
    _check("queries", len(raw), Settings.max_batch_queries)
    queries: list[Query | Exception] = []
    for value in raw:
        try:
            queries.append(_not_empty(checked(SearchRequest, value, strict=True)).query())
        except (RequestValidationError, KinlensError) as error:
            queries.append(error)
    _check_amounts([query for query in queries if isinstance(query, Query)])
    return queries


def _batch_of_form(request: Request, body: bytes) -> list[Query | Exception]:
    images, pairs = read_form(request, body)
    if not images:
        raise _empty_query()
    _check("queries", len(images), Settings.max_batch_queries)
    search = search_of(pairs, images[:1])
    shared, first = search.query(), search.images[0]
    others = search.other_views()
    queries = [replace(shared, views=(*first.views(data), *others)) for data in images]
    _check_amounts(queries)
    return list(queries)


def _fields(pairs: Pairs) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in _LISTS:
            fields.setdefault(_LISTS[name], []).append(value)
        elif name in fields or name in _LISTED:
            known = name[:_SHOWN]
            raise fault(known, f"{known} was sent twice, or is only valid in JSON; send it once.")
        else:
            fields[name] = value
    return fields


def _form_name(location: Sequence[str | int]) -> str:
    if location[:1] == ("images",):
        return "crop" if "crops" in location else "image"
    return path_of(location)


def _not_empty(search: SearchRequest) -> SearchRequest:
    """Raises: RequestValidationError for a search for nothing."""
    if search.is_empty:
        raise _empty_query()
    return search


def _empty_query() -> RequestValidationError:
    return fault(
        "image",
        "image and positives are missing; send an image, a vector, words, or the key of an item.",
    )


def _check_amounts(queries: Sequence[Query]) -> None:
    """Check the totals over all queries of a request. Raises: InvalidParameterError."""
    views = [view for query in queries for view in query.views]
    texts = sum(len(query.texts) for query in queries)
    has_others = texts > 0 or not all(isinstance(view, View) for view in views)
    _check(_ALL_VIEWS if has_others else _VIEWS, len(views) + texts, Settings.max_views)
    hits = sum(query.k * (query.grouping.size if query.grouping else 1) for query in queries)
    _check("hits", hits, MAX_HITS)


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidParameterError(
            f"The request has {count:,} {what} in total; the limit is {limit:,}. Send less, or "
            "split it into several requests."
        )


def _response(answer: Answer, runtime: Runtime, like: str = "") -> Response:
    stages = ", ".join([f"{stage};dur={ms}" for stage, ms in answer.timings.items()])
    headers = {**NO_STORE, "X-Kinlens-Bundle": answer.bundle_id, "Server-Timing": stages}
    return Response(answer.encoded(runtime.feedback, like), headers=headers, media_type=JSON)


def _outcome(answer: Answer | Exception, request: Request, runtime: Runtime) -> bytes:
    if isinstance(answer, Answer):
        return b'{"status":200,"answer":' + answer.encoded(runtime.feedback) + b',"problem":null}'
    problem = described(answer, request_id=request_id_of(request.scope), instance=request.url.path)
    return to_json({"status": problem["status"], "answer": None, "problem": problem})
