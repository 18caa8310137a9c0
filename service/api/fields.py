"""The fields of requests: their limits, descriptions and validators, which refuse bad values
cheaply; and the query that those of a search make.
"""

import base64
import binascii
import re
from collections.abc import Callable
from typing import Annotated, Any, Self

from fastapi import Request
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

from kinlens.embedder.errors import FilterError, InvalidParameterError
from kinlens.embedder.preprocess import Box, check_box, windows
from kinlens.embedder.programs.faults import shown
from kinlens.embedder.sources.names import composed
from kinlens.embedder.views.text import MAX_CHARACTERS
from kinlens.indexer import types
from kinlens.indexer.filters.json import filter_from_json
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import MAX_FACETS, Grouping
from kinlens.models import Distinct
from kinlens.quality.answers import check_likely
from kinlens.service.encoding.model import View
from kinlens.service.encoding.vectors import MAX_NUMBERS, MAX_WEIGHT, vector_content
from kinlens.service.http.bodies import fault, parse_form, parse_json
from kinlens.service.search.query import Query, views_of
from kinlens.service.settings import Settings

_SHORT_FILTER = 256  # characters
_CORNERS = 4
_UNKNOWN_KEPT = 5
_HEAD = 256
_SHOWN = 80
_NAMES = 'send colour,price or ["colour", "price"]'
_MAX_FIELDS = 256
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
    """The content of base64, also in a data: URL. Other URLs are never loaded.

    Raises: InvalidParameterError.
    """
    if isinstance(value, bytes):  # from a form; JSON has no bytes
        return value
    if not isinstance(value, str):
        raise InvalidParameterError(
            "data must be a string; send the content of an image file as base64."
        )
    start = _DATA_URL.match(value[:_HEAD])
    try:
        return base64.b64decode(value if start is None else value[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(
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
            value = parse_json(value.encode(errors="surrogatepass"))
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
    return None if value is None else _names_of("fields", value, _MAX_FIELDS)


def _names_of(field: str, value: Any, limit: int) -> list[str]:
    """Attributes in a field: a list, a JSON list as text, or names separated by commas."""
    names = value
    if isinstance(value, str):
        try:
            is_json = value[:1] == "["
            names = parse_json(value.encode()) if is_json else value.split(",") if value else []
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


def worded(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A validator that calls `parse`, whose message is shown unchanged."""

    def check(value: Any) -> Any:
        try:
            return parse(value)
        except InvalidParameterError as error:
            raise custom_error(str(error)) from error

    return check


def _text_for(parse: Callable[[str], object]) -> AfterValidator:
    """A validator for a text that `parse` accepts, or an empty one."""
    return AfterValidator(worded(lambda text: text and parse(text) and text))


def _box(value: Any) -> Box:
    """A crop of four numbers, or of a text with four numbers separated by commas."""
    parts = value.split(",", _CORNERS) if isinstance(value, str) else value
    try:
        if not isinstance(parts, list) or any(isinstance(part, bool) for part in parts):
            raise TypeError
        if len(parts) > _CORNERS:
            raise ValueError
        return check_box([float(part) for part in parts])
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameterError(
            f"crop = {shown(value)} is not a crop; send left,top,width,height as fractions of the "
            "image, such as 0.1,0.2,0.5,0.5."
        ) from error


def _filter(value: Any) -> Any:
    """A filter, as a text, an object, or None."""
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
_Crop = Annotated[Box, BeforeValidator(worded(_box)), WithJsonSchema(_CROP_SCHEMA)]
_AtLeast1 = Annotated[int, Field(ge=1, le=Settings.max_k)]
_AtLeast0 = Annotated[int, Field(ge=0, le=Settings.max_k)]
_Score = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
FilterText = Annotated[
    str | dict[str, JsonValue] | None, Field(description="As in a search: text or JSON.")
]


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

    data: Annotated[bytes, BeforeValidator(worded(base64_content)), WithJsonSchema(_DATA_SCHEMA)]


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
        BeforeValidator(worded(vector_content)),
        WithJsonSchema({"anyOf": VECTOR_FORMS, "description": VECTOR_TEXT}),
    ]
    weight: Annotated[
        _Weight,
        Field(description="Its part in the mean; an image has 1. Below 0: unlike this vector."),
    ] = 1.0


class TextInput(Strict):
    """Words of a query, which need a text tower in the bundle of the gallery."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
    weight: Annotated[
        _Weight,
        Field(description="How far they move the query; an image has 1. Below 0: unlike them."),
    ] = 1.0


_PLAIN_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS}
TextOrWords = Annotated[
    TextInput,
    BeforeValidator(lambda value: {"text": value} if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_PLAIN_TEXT, TextInput.model_json_schema()]}),
]
"""Words with a weight, or a text alone."""


def list_as_text(value: Any) -> Any:
    """A validator for a list, which forms and query strings send as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode(errors="surrogatepass"))
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
        WithJsonSchema({"enum": [False, True, "near"]}),
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
        Annotated[str, _text_for(types.boost_of)] | None,
        Field(
            description="NAME:WEIGHT or NAME:WEIGHT:FROM:TO: rank by score + weight * a numeric "
            "attribute, scaled to 0..1 by its range in the gallery or by FROM and TO; weights from "
            f"{-types.MAX_BOOST} to {types.MAX_BOOST}. Scores do not change.",
            examples=["price:-0.1", "price:-0.1:0:50"],
        ),
    ] = None
    sort_by: Annotated[
        Annotated[str, _text_for(types.sort_by_of)] | None,
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
            max_length=_MAX_FIELDS,
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
        return Query(
            k=self.k or Settings.default_k,
            offset=self.offset or 0,
            min_score=self.min_score,
            min_probability=self.min_probability,
            where=where_of(self.filter),
            grouping=Grouping(self.group_by, self.group_size or 1) if self.group_by else None,
            distinct=self.distinct,
            exact=self.exact,
            facets=tuple(dict.fromkeys(self.facets)),
            fields=None if self.fields is None else tuple(map(composed, self.fields)),
            diversity=self.diversity or 0.0,
            boost=types.boost_of(self.boost) if self.boost else None,
            sort_by=types.sort_by_of(self.sort_by) if self.sort_by else None,
            **more,
        )


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
