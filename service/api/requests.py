"""Parsing of search requests (a form, JSON or a raw image) into queries, with validators that are
shared with the requests about items and that refuse bad fields cheaply.
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kinlens.embedder.errors import FilterError, InvalidParameterError, KinlensError
from kinlens.embedder.preprocess import Box, check_box
from kinlens.embedder.programs.faults import path_of, shown
from kinlens.embedder.sources.names import composed
from kinlens.embedder.views.text import MAX_CHARACTERS
from kinlens.embedder.views.windows import windows
from kinlens.indexer import types
from kinlens.indexer.filters.json import filter_from_json
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import MAX_FACETS, Grouping
from kinlens.models import Combine, Distinct
from kinlens.quality.answers import check_likely
from kinlens.quality.guarantee import HIGHEST, LOWEST
from kinlens.service.access.rates import account_of
from kinlens.service.encoding.model import View
from kinlens.service.encoding.vectors import MAX_NUMBERS, MAX_WEIGHT, VectorView, vector_content
from kinlens.service.http import bodies
from kinlens.service.http.bodies import (
    FORM,
    IMAGE,
    INLINE_BYTES,
    JSON,
    RAW,
    checked,
    fault,
    parse_form,
)
from kinlens.service.search.query import Query, views_of
from kinlens.service.settings import MAX_HITS, Settings

Pairs = Sequence[tuple[str, str]]
_INLINE_IMAGE = 256 * 2**10
_INLINE_PARTS = 16
_SHORT_FILTER = 256  # characters
_LISTS = {"positive": "positives", "negative": "negatives", "crop": "crops"}
_LISTED = ("images", *_LISTS.values())  # names that are only valid in JSON
_VIEWS, _ALL_VIEWS = "images and crops", "images, crops, vectors and texts"
_MAX_KEYS = 256
_CORNERS = 4
_SHOWN = 80
_UNKNOWN_KEPT = 5
_HEAD = 256
_NAMES = 'send colour,price or ["colour", "price"]'
MAX_FIELDS = 256
"""Maximum number of attributes that a request can choose."""

_DATA_URL = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)


class Strict(BaseModel):
    """Refuses unknown fields, and names the first few of them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keeps_few_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) <= _UNKNOWN_KEPT:
            return value
        unknown = [name for name in value if name not in cls.model_fields][:_UNKNOWN_KEPT]
        return {name: value[name] for name in (*cls.model_fields, *unknown) if name in value}


def is_data_url(text: str) -> bool:
    """Whether a text begins as a data: URL with base64."""
    return _DATA_URL.match(text[:_HEAD]) is not None


def base64_content(value: Any) -> bytes:
    """A validator for base64, also in a data: URL. Other URLs are never loaded."""
    if isinstance(value, bytes):  # from a form; JSON has no bytes
        return value
    if not isinstance(value, str):
        raise custom_error("data must be a string; send the content of an image file as base64.")
    start = _DATA_URL.match(value[:_HEAD])
    try:
        return base64.b64decode(value if start is None else value[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise custom_error(
            f"data = {shown(value)!r} is not base64 ({error}); encode the content of an image file "
            "with the standard alphabet and padding, without line breaks, optionally after "
            "data:image/...;base64, Other URLs are not loaded."
        ) from error


def where_of(value: str | dict[str, Any] | None) -> Filter | None:
    """Parse a filter: in text form, as a JSON object, or as JSON in a text. Raises: FilterError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return parse_filter(value)
        try:
            value = bodies.parse_json(value.encode(errors="surrogatepass"))
        except (ValueError, InvalidParameterError) as error:
            raise FilterError(
                f"The filter is not valid JSON: {error}. Write it as "
                '{"colour": "red"}, or as text: colour = "red".'
            ) from error
    return filter_from_json(value)


def facets_of(value: Any) -> list[str]:
    """A validator for the attributes to count. Raises: InvalidParameterError."""
    return _names_of("facets", value, MAX_FACETS)


def fields_of(value: Any) -> list[str] | None:
    """A validator for the attributes to return; None for all. Raises: InvalidParameterError."""
    return None if value is None else _names_of("fields", value, MAX_FIELDS)


def _names_of(field: str, value: Any, limit: int) -> list[str]:
    """Attributes in a field: a list, a JSON list as text, or names separated by commas."""
    names = value
    if isinstance(value, str):
        try:
            is_json = value[:1] == "["
            names = (
                bodies.parse_json(value.encode()) if is_json else value.split(",") if value else []
            )
        except ValueError as error:
            raise InvalidParameterError(
                f"{field} is not a valid JSON list: {error}; {_NAMES}."
            ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise InvalidParameterError(
            f"{field} = {shown(value)} must be names of attributes; {_NAMES}."
        )
    if len(names) > limit:
        raise InvalidParameterError(
            f"{field} has {len(names):,} attributes; the limit is {limit}. Send fewer."
        )
    return names


def custom_error(message: str) -> PydanticCustomError:
    """A validation error whose message is shown unchanged."""
    return PydanticCustomError("out_of_range", "{message}", {"message": message})


def _box(value: Any) -> Box:
    """A validator for a crop: four numbers, or a text with four numbers separated by commas."""
    parts = value.split(",", _CORNERS) if isinstance(value, str) else value
    try:
        if not isinstance(parts, list) or any(isinstance(part, bool) for part in parts):
            raise TypeError
        if len(parts) > _CORNERS:
            raise ValueError
        return check_box([float(part) for part in parts])
    except InvalidParameterError as error:
        raise custom_error(str(error)) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise custom_error(
            f"crop = {shown(value)} is not a crop; send left,top,width,height as fractions of the "
            "image, such as 0.1,0.2,0.5,0.5."
        ) from error


def _filter(value: Any) -> Any:
    """A validator for the type of a filter: a text, an object, or None."""
    if value is None or isinstance(value, str | dict):
        return value
    raise custom_error(
        f"filter = {shown(value)} is neither a text nor an object; send "
        'colour = "red" or {"colour": "red"}.'
    )


def _distinct(value: Any, validate: ValidatorFunctionWrapHandler) -> Distinct:
    """A validator for "near" or a boolean, with one message for both."""
    try:
        checked_value: Distinct = validate(value)
    except ValidationError as error:
        raise custom_error(
            f"distinct = {shown(value)} is not valid; send true, false or near."
        ) from error
    return checked_value


_DISTINCT_SCHEMA: dict[str, Any] = {"enum": [False, True, "near"]}


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """A validator for a text that `parse` accepts; empty is None."""

    def check(text: str) -> str:
        try:
            if text:
                parse(text)
        except InvalidParameterError as error:
            raise custom_error(str(error)) from error
        return text

    return AfterValidator(check)


_CROP_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "number", "minimum": 0, "maximum": 1},
    "minItems": 4,
    "maxItems": 4,
    "description": "left, top, width, height as fractions of the upright image.",
}
_DATA_SCHEMA: dict[str, Any] = {
    "type": "string",
    "contentEncoding": "base64",
    "description": "The content of an image file as base64, also as a data: URL. Other URLs are "
    "refused and never loaded.",
}
_Crop = Annotated[Box, BeforeValidator(_box), WithJsonSchema(_CROP_SCHEMA)]
_AtLeast1 = Annotated[int, Field(ge=1, le=Settings.max_k)]
_AtLeast0 = Annotated[int, Field(ge=0, le=Settings.max_k)]
_Score = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Level = Annotated[float, Field(ge=LOWEST, le=HIGHEST, allow_inf_nan=False)]
_Keys = Annotated[list[str], Field(default_factory=list, max_length=_MAX_KEYS, fail_fast=True)]


def _crops(value: Any, validate: ValidatorFunctionWrapHandler) -> list[Box | None]:
    """A validator for a list of crops, or for auto; a form sends that as a list."""
    if value in ("auto", ["auto"]):
        return windows()
    if isinstance(value, str):
        raise custom_error(f"crops = {shown(value)} is not valid; send auto, or a list of crops.")
    checked_value: list[Box | None] = validate(value)
    return checked_value


_CROPS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": _CROP_SCHEMA, "maxItems": Settings.max_crops},
        {"const": "auto"},
    ],
    "description": f"auto: the whole image and up to {len(windows()) - 1} parts of it, with "
    "combine = best; for photos of which the product fills only a part. The parts are the boxes of "
    "a detector if the bundle has one (`has_boxes` of the gallery), otherwise fixed windows.",
}


class PlainImage(Strict):
    """An image."""

    data: Annotated[bytes, BeforeValidator(base64_content), WithJsonSchema(_DATA_SCHEMA)]


class ImageInput(PlainImage):
    """An image, or crops of it, each of which is a view of the query."""

    crops: Annotated[
        list[_Crop],
        Field(default_factory=list, max_length=Settings.max_crops, fail_fast=True),
        WrapValidator(_crops),
        WithJsonSchema(_CROPS_SCHEMA),
    ]

    @property
    def is_auto(self) -> bool:
        """Whether the crops are windows: these alone include the whole image."""
        return None in self.crops

    def views(self, data: bytes, number: int = 1) -> tuple[View, ...]:
        """The parts of the image `data` to search with; the whole image as in a search without
        crops, which may have cached its vector.
        """
        return views_of(data, self.crops, number, self.is_auto)


def _vector(value: Any) -> bytes:
    """A validator for a vector, as a list of numbers or as base64."""
    try:
        return vector_content(value)
    except InvalidParameterError as error:
        raise custom_error(str(error)) from error


VECTOR_FORMS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": MAX_NUMBERS},
    {"type": "string", "contentEncoding": "base64"},
]
VECTOR_TEXT = (
    "A vector of norm 1 from the bundle of the gallery: its numbers, or base64 of them as "
    "little-endian float32."
)
_Weight = Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)]


class VectorInput(Strict):
    """A vector that was embedded before; it is a view of the query as an image is."""

    vector: Annotated[
        bytes,
        BeforeValidator(_vector),
        WithJsonSchema({"anyOf": VECTOR_FORMS, "description": VECTOR_TEXT}),
    ]
    weight: Annotated[
        _Weight,
        Field(description="Its part in the mean; an image has 1. Below 0: unlike this vector."),
    ] = 1.0


def _text(value: Any) -> Any:
    """A validator for words: a text alone, or an object with a weight."""
    return {"text": value} if isinstance(value, str) else value


class TextInput(Strict):
    """Words of a query, which need a text tower in the bundle of the gallery."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
    weight: Annotated[
        _Weight,
        Field(description="How far they move the query; an image has 1. Below 0: unlike them."),
    ] = 1.0


_TEXT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS},
        TextInput.model_json_schema(),
    ]
}


def _list_as_text(value: Any) -> Any:
    """A validator for a list, which forms and query strings send as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return bodies.parse_json(value.encode(errors="surrogatepass"))
    except (ValueError, InvalidParameterError) as error:
        raise custom_error(f"it is not valid JSON: {error}; send a list.") from error


class SearchFields(Strict):
    """Options of a search."""

    k: Annotated[_AtLeast1 | None, Field(description="Maximum number of hits, or groups.")] = (
        Settings.default_k
    )
    offset: Annotated[
        _AtLeast0 | None,
        Field(description="Number of top hits, or groups, to skip; offset + k has the limit of k."),
    ] = None
    min_score: Annotated[
        _Score | None, Field(description="Omit hits below this cosine similarity.")
    ] = None
    min_probability: Annotated[
        _Share | None,
        Field(
            description="Omit hits and groups with a lower probability of being right; 422 if the "
            "gallery has no probabilities. Facets ignore it. Not with sort_by."
        ),
    ] = None
    filter: Annotated[
        str | dict[str, JsonValue] | None,
        BeforeValidator(_filter),
        Field(
            description="Only search items that match this filter, as text or JSON.",
            examples=['colour = "red" and price < 20'],
        ),
    ] = None
    group_by: Annotated[
        str | None,
        Field(
            description="Return groups of items with equal values of this attribute, ranked by "
            "their best item."
        ),
    ] = None
    group_size: Annotated[
        _AtLeast1 | None,
        Field(
            description="Maximum number of items in each group; default 1. k * group_size has the "
            "limit of k."
        ),
    ] = None
    distinct: Annotated[
        Distinct,
        WrapValidator(_distinct),
        WithJsonSchema(_DISTINCT_SCHEMA),
        Field(
            description="true: return only the best of items with identical content. near: also of "
            "near-duplicates, with a cosine of 0.95, or more if different products look alike; "
            "not with group_by, and not on Milvus."
        ),
    ] = False
    exact: Annotated[
        bool, Field(description="Exact search: compare with every item, without the index.")
    ] = False
    diversity: Annotated[
        _Share | None,
        Field(
            description="Rerank the best 200 to prefer items unlike earlier ones; 0: off. 0.1 to "
            "0.3 is already strong."
        ),
    ] = None
    boost: Annotated[
        Annotated[str, _parsed_by(types.boost_of)] | None,
        Field(
            description="NAME:WEIGHT or NAME:WEIGHT:FROM:TO: rank by score + weight * a numeric "
            "attribute, scaled to 0..1 by its range in the gallery or by FROM and TO; weights from "
            f"{-types.MAX_BOOST} to {types.MAX_BOOST}. Scores do not change.",
            examples=["price:-0.1", "price:-0.1:0:50"],
        ),
    ] = None
    sort_by: Annotated[
        Annotated[str, _parsed_by(types.sort_by_of)] | None,
        Field(
            description="NAME, NAME:asc or NAME:desc: sort the best 200 by an attribute; items "
            "without it come last. Scores do not change.",
            examples=["price", "price:desc"],
        ),
    ] = None
    facets: Annotated[
        list[str],
        Field(
            default_factory=list,
            max_length=MAX_FACETS,
            description="Attributes whose values are counted over all matching items.",
            examples=[["colour", "price"]],
        ),
        BeforeValidator(facets_of),
    ]
    fields: Annotated[
        list[str] | None,
        Field(
            max_length=MAX_FIELDS,
            description="The only attributes to return with each hit; default: all. 422 for a "
            "name that no item has had.",
            examples=[["colour", "price"]],
        ),
        BeforeValidator(fields_of),
    ] = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        k, offset, size = self.k or Settings.default_k, self.offset or 0, self.group_size or 1
        if offset + k > Settings.max_k:
            raise custom_error(
                f"offset + k = {offset + k:,} is above the limit of {Settings.max_k:,}; request "
                "fewer, or narrow the search with a filter."
            )
        if k * size > Settings.max_k:
            raise custom_error(
                f"k * group_size = {k * size:,} is above the limit of {Settings.max_k:,}; request "
                "fewer groups or fewer items in each."
            )
        check_likely(self.min_probability, self.sort_by)
        return self

    @property
    def has_short_filter(self) -> bool:
        """Whether there is no filter, or one that is quick to parse."""
        return not self.filter or (
            isinstance(self.filter, str) and len(self.filter) <= _SHORT_FILTER
        )

    def query(self, **more: Any) -> Query:
        """Convert to a query with `more` of its fields. Raises: FilterError."""
        grouping = Grouping(self.group_by, self.group_size or 1) if self.group_by else None
        return Query(
            k=self.k or Settings.default_k,
            offset=self.offset or 0,
            min_score=self.min_score,
            min_probability=self.min_probability,
            where=where_of(self.filter),
            grouping=grouping,
            distinct=self.distinct,
            exact=self.exact,
            facets=tuple(dict.fromkeys(self.facets)),
            fields=None if self.fields is None else tuple(map(composed, self.fields)),
            diversity=self.diversity or 0.0,
            boost=types.boost_of(self.boost) if self.boost else None,
            sort_by=types.sort_by_of(self.sort_by) if self.sort_by else None,
            **more,
        )


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
        BeforeValidator(_list_as_text),
    ]
    texts: Annotated[
        list[Annotated[TextInput, BeforeValidator(_text), WithJsonSchema(_TEXT_SCHEMA)]],
        Field(
            default_factory=list,
            max_length=Settings.max_images,
            fail_fast=True,
            description="Words to search with, alone or added to the images. The hits of such a "
            "search have no probabilities.",
        ),
        BeforeValidator(_list_as_text),
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
        is_whole = len(self.images) + len(self.vectors) == 1 and not (
            any(image.crops for image in self.images)
            or any(sent.weight != 1 for sent in self.vectors)
            or any((self.texts, self.positives, self.negatives))
        )
        if (self.guarantee is not None or self.accept is not None) and not is_whole:
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


class BoxesRequest(Strict):
    """An image to find boxes in."""

    gallery: Annotated[
        str | None,
        Field(description="Its bundle finds the boxes; default: as in POST /search."),
    ] = None
    images: Annotated[list[PlainImage], Field(min_length=1, max_length=1, fail_fast=True)]


Parsed = TypeVar("Parsed", SearchRequest, BoxesRequest)


async def read_search(request: Request) -> Query:
    """Read a search from a request.

    Raises: HTTPException (400, 415), RequestValidationError, KinlensError.
    """
    body, kind = await bodies.read_body(request, FORM, IMAGE, RAW, JSON)
    query_length = len(request.scope["query_string"])
    short = len(body) + query_length <= INLINE_BYTES or (
        # an image that is faster to parse here than to hand to a thread
        kind != JSON
        and len(body) <= _INLINE_IMAGE
        and query_length <= INLINE_BYTES
        and body.count(b"\n--") <= _INLINE_PARTS
    )

    def read() -> SearchRequest:
        return _not_empty(_parsed(SearchRequest, request, body, kind))

    return await _read_query(request, read, short=short)


async def read_boxes(request: Request) -> tuple[View, str | None]:
    """Read an image to find boxes in, and the name of a gallery.

    Raises: HTTPException (400, 415), RequestValidationError, KinlensError.
    """
    body, kind = await bodies.read_body(request, FORM, IMAGE, RAW, JSON)

    def read() -> tuple[View, str | None]:
        sent = _parsed(BoxesRequest, request, body, kind)
        [view] = views_of(sent.images[0].data)
        return view, sent.gallery

    return await bodies.off_loop(request, read)


async def read_batch(request: Request) -> list[Query | Exception]:
    """Read a batch of searches; an invalid query is replaced by its error.

    Raises: HTTPException (400, 415), RequestValidationError, KinlensError.
    """
    body, kind = await bodies.read_body(request, JSON, FORM)
    return await bodies.off_loop(
        request, lambda: _batch_of_json(body) if kind == JSON else _batch_of_form(request, body)
    )


async def read_fields(request: Request, pairs: Pairs) -> Query:
    """Read a query without images from a query string.

    Raises: RequestValidationError, KinlensError.
    """
    length = sum(len(name) + len(value) for name, value in pairs)
    short = length <= INLINE_BYTES
    return await _read_query(request, lambda: checked(SearchFields, _fields(pairs)), short=short)


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
    fields = read() if short else await bodies.off_loop(request, read)
    if short and fields.has_short_filter:
        return fields.query()
    return await bodies.off_loop(request, fields.query)


def _parsed(model: type[Parsed], request: Request, body: bytes, kind: str) -> Parsed:
    images: Sequence[bytes] = [body]
    pairs = request.query_params.multi_items() if request.scope["query_string"] else []
    if kind == FORM:
        images, fields = read_form(request, body)
        pairs += fields
    if kind != JSON:
        return _of_pairs(model, pairs, images)
    return _of_json(model, bodies.parse_object(body), pairs)


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


def _batch_of_json(body: bytes) -> list[Query | Exception]:
    payload = bodies.parse_object(body)
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


def read_form(request: Request, body: bytes) -> tuple[list[bytes], list[tuple[str, str]]]:
    """The images of a form and its other fields.

    Raises: HTTPException (400), RequestValidationError.
    """
    images, pairs = [], []
    for part in parse_form(body, request.headers["content-type"]):
        name = part.name[:_SHOWN]
        if part.name == "image" and not part.is_file:
            raise fault(
                "image",
                "image was sent as a text; send the content of an image file, with a file name. "
                "URLs and paths are not loaded.",
            )
        if part.name == "image":
            images.append(part.data)
        elif part.is_file:
            raise fault(
                name,
                f"{name} was sent as a file; only the field image may be a file. Send any other "
                "field as a text without a file name.",
            )
        else:
            pairs.append((part.name, part.text))
    return images, pairs


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
