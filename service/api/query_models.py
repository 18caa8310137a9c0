"""The JSON of searches: requests. To check one takes its limits as context (`SearchLimits`)."""

from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from embedder.preprocess import Box
from indexer.types import GroupScore
from service.api.bounded import Strict, at_most, at_most_within, limits_of
from service.api.parameters import (
    base64_content,
    crop_box,
    custom_error,
    filter_form,
    finite_number,
    whole_number_within,
)
from service.search.query import Combine

# Red and blue, 8 x 8 px.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGklEQVR42mM8ISfHAANhDKvgbCYGHGBw"
    "SgAAioUCFJLJ2DgAAAAASUVORK5CYII="
)
_MAX_KEYS = 256
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
    "description": "The content of an image file as base64, also as a data: URL. Addresses are "
    "refused: nothing is loaded from elsewhere.",
}

Crop = Annotated[Box, BeforeValidator(crop_box), WithJsonSchema(_CROP_SCHEMA)]
Keys = Annotated[
    list[str],
    Field(default_factory=list, max_length=_MAX_KEYS, fail_fast=True),
    BeforeValidator(at_most("keys", _MAX_KEYS)),
]


class ImageInput(Strict):
    """An image, or parts of it: each crop is looked for by itself."""

    data: Annotated[bytes, BeforeValidator(base64_content), WithJsonSchema(_DATA_SCHEMA)]
    crops: Annotated[
        list[Crop],
        Field(default_factory=list, fail_fast=True),
        BeforeValidator(at_most_within("crops of an image", "max_crops")),
    ]


class SearchFields(Strict):
    """How to search and what to show, in any content type."""

    k: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(whole_number_within("k", 1, "max_k")),
        Field(description="How many hits, or groups, at most."),
    ] = None
    offset: Annotated[
        Annotated[int, Field(ge=0)] | None,
        BeforeValidator(whole_number_within("offset", 0, "max_k")),
        Field(description="Leave out that many of the best."),
    ] = None
    min_score: Annotated[
        Annotated[float, Field(ge=-1, le=1)] | None,
        BeforeValidator(finite_number("min_score", -1.0, 1.0)),
        Field(description="Leave out hits below this cosine similarity."),
    ] = None
    min_probability: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        BeforeValidator(finite_number("min_probability", 0.0, 1.0)),
        Field(description="Leave out hits that are less likely to be right."),
    ] = None
    filter: Annotated[
        str | dict[str, JsonValue] | None,
        BeforeValidator(filter_form),
        Field(
            description="Which items: as text or as JSON.",
            examples=['colour = "red" and price < 20', {"colour": "red", "price": {"<": 20}}],
        ),
    ] = None
    group_by: Annotated[
        str | None, Field(description="An attribute: answer with groups of items that share it.")
    ] = None
    group_score: Annotated[
        GroupScore, Field(description="Rank groups by their best item or by the mean of all.")
    ] = "best"
    group_size: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(whole_number_within("group_size", 1, "max_k")),
        Field(description="How many items of each group; default 1."),
    ] = None
    distinct: Annotated[bool, Field(description="Of items with equal content only the best.")] = (
        False
    )
    exact: Annotated[bool, Field(description="Compare with every item, whatever the index.")] = (
        False
    )

    @model_validator(mode="after")
    def _is_within_reach(self, info: ValidationInfo) -> Self:
        limits = limits_of(info)
        k, offset = self.k or limits.default_k, self.offset or 0
        if offset + k > limits.max_k:
            raise custom_error(
                f"offset + k = {offset + k:,} is above the limit of {limits.max_k:,}; ask for "
                "fewer, or narrow the search with a filter."
            )
        if k * (self.group_size or 1) > limits.max_k:
            raise custom_error(
                f"k * group_size = {k * (self.group_size or 1):,} is above the limit of "
                f"{limits.max_k:,}; ask for fewer groups or fewer items of each."
            )
        return self


class LookingFor(SearchFields):
    """Where to search, and what for beside the images, in any content type."""

    gallery: Annotated[str | None, Field(description="Where to search; default: the first.")] = None
    combine: Annotated[
        Combine,
        Field(
            description="One query from the mean of all images, crops and positives, moved away "
            "from the negatives; or a query for each image and crop."
        ),
    ] = "mean"
    positives: Annotated[Keys, Field(description="Keys of items to look like.")]
    negatives: Annotated[Keys, Field(description="Keys of items not to look like.")]


class SearchRequest(LookingFor):
    """A search: at least one image or one positive."""

    images: Annotated[
        list[ImageInput],
        Field(default_factory=list, fail_fast=True),
        BeforeValidator(at_most_within("images", "max_images")),
    ]

    @model_validator(mode="after")
    def _looks_for_something(self) -> Self:
        check_looked_for(len(self.images), self.positives)
        return self


class BatchRequest(Strict):
    """Several searches; each is checked and answered by itself."""

    queries: Annotated[list[SearchRequest], Field(min_length=1)]


def check_looked_for(images: int, positives: list[str]) -> None:
    """Raises: PydanticCustomError if nothing is looked for."""
    if not images and not positives:
        raise custom_error(
            "image is missing, and so are positives; send at least one image, or the key of an "
            "item."
        )
