"""The JSON of galleries and their items."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from embedder.types import AttributeValue
from service.api.bounded import Strict, at_most, plain_changes, plain_values
from service.api.problem_models import Problem

MAX_KEYS = 10_000
"""Items that one request may patch or remove by key."""

_BUNDLE = "3f1c" + "0" * 60
_SHA256 = "7a90" + "0" * 60
_VERSION = "9b2e" + "0" * 60
_GENERATION = "51c7a90be2f4"
_ITEM: dict[str, JsonValue] = {
    "id": 17,
    "key": "shoes/0017.jpg",
    "attributes": {"class": "shoes", "price": 59.9, "sale": True},
    "sha256": _SHA256,
    "image": f"/galleries/shop/items/17/image?version={_GENERATION}",
}
_GALLERY: dict[str, JsonValue] = {
    "name": "shop",
    "version": _VERSION,
    "generation": _GENERATION,
    "bundle_id": _BUNDLE,
    "size": 12612,
    "dim": 512,
    "created_at": "2026-01-01T00:00:00+00:00",
    "managed": True,
    "writable": True,
}
_PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


class GalleryModel(BaseModel):
    """A gallery that can be searched."""

    model_config = ConfigDict(json_schema_extra={"examples": [_GALLERY]})

    name: str
    version: Annotated[str, Field(description="Changes with every change of an item.")]
    generation: Annotated[
        str, Field(description="Changes when the gallery is rebuilt; item numbers are good for it.")
    ]
    bundle_id: str
    size: int
    dim: int
    created_at: str
    managed: Annotated[bool, Field(description="Made by the service, which may delete it.")] = False
    writable: Annotated[bool, Field(description="Whether items can be put here.")] = False


class Galleries(BaseModel):
    """All galleries; the first is the default of a search."""

    bundle_id: str
    galleries: list[GalleryModel]


class AttributeCount(BaseModel):
    """A value of an attribute, and how many items have it."""

    value: AttributeValue
    count: int


class AttributeModel(BaseModel):
    """An attribute that items have had: what a filter of it can be made of.

    `values` are the most frequent ones; null for numbers of which there are too many. `minimum` and
    `maximum` are of numbers.
    """

    name: str
    kind: Literal["text", "number", "boolean"]
    values: list[AttributeCount] | None
    minimum: float | None
    maximum: float | None


class IndexModel(BaseModel):
    """The index of a gallery: `delta` items came after it, `tombstones` of it were removed.

    `kind` is null while there is none; `recall` at 10 was measured when it was made.
    """

    kind: str | None
    segment_items: int
    delta: int
    tombstones: int
    compaction_due: str | None
    recall: float | None
    target_recall: float | None
    parameters: dict[str, int]
    created_at: str | None


class ThresholdModel(BaseModel):
    """From `search_score` on, a wrong best hit is as rare as `false_matches`.

    `probability`: that a best hit with this score is right.
    """

    false_matches: float
    search_score: float
    probability: float


class CalibrationModel(BaseModel):
    """P(same class | score, rank) = 1 / (1 + exp(-(slope * score + intercept - rank_slope *
    ln(rank) - tail_slope * ln((rank + 20) / 21)))), for the gallery as large as it is now; rank 1
    is the best hit, of which both last terms are 0.
    """

    slope: float
    intercept: float
    rank_slope: float = 0.0
    tail_slope: float = 0.0
    thresholds: list[ThresholdModel]


class GalleryDetail(GalleryModel):
    """A gallery with its attributes, its index and the calibration of its bundle."""

    attributes: list[AttributeModel]
    index: IndexModel
    calibration: CalibrationModel | None
    no_calibration: Annotated[
        str | None, Field(description="Why the model has no calibration.")
    ] = None
    provider: str
    image_root_missing: bool


class NewGallery(BaseModel):
    """A gallery to be made, without items; by default for the bundle of the first gallery."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "summer", "bundle_id": None}]}
    )

    name: str
    bundle_id: str | None = None


class ItemModel(BaseModel):
    """An item; `image` is the address of its picture, good until the gallery is rebuilt."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ITEM]})

    id: int
    key: str
    attributes: dict[str, AttributeValue]
    sha256: str
    image: str


class ItemPage(BaseModel):
    """Items from place `offset` on, of `total` that fit, in the order of their numbers."""

    total: int
    offset: int
    items: list[ItemModel]
    last: Annotated[int | None, Field(description="The highest number of an item that fits.")] = (
        None
    )
    generation: Annotated[
        str | None, Field(description="That the numbers are of; in another they are of others.")
    ] = None


class NewItemModel(Strict):
    """An item to be put: its key, its image as base64, and all of its attributes."""

    key: str
    data: Annotated[str, Field(description="The image file, base64.")]
    attributes: Annotated[
        dict[str, AttributeValue], BeforeValidator(plain_values), Field(default_factory=dict)
    ]


class PutItems(Strict):
    """Items to be put; one with the key of a stored item takes its place."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"items": [{"key": "a/1.png", "data": _PICTURE, "attributes": {"class": "hats"}}]}
            ]
        },
    )

    items: Annotated[list[NewItemModel], Field(fail_fast=True, min_length=1)]


class PutResult(BaseModel):
    """What became of one item; `id` is its number, `problem` says why it failed."""

    key: str
    status: Literal["added", "replaced", "updated", "unchanged", "failed"]
    id: int | None
    problem: Problem | None


class PutAnswer(BaseModel):
    """What became of each item, in the order sent, and the version of the gallery afterwards."""

    added: int
    replaced: int
    updated: int
    unchanged: int
    failed: int
    items: list[PutResult]
    version: str


class PatchItems(Strict):
    """Attributes to change, by key; null takes one away, those not named stay."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"changes": {"shoes/0017.jpg": {"price": 49.9, "sale": None}}}]
        },
    )

    changes: Annotated[
        dict[str, dict[str, AttributeValue | None]],
        BeforeValidator(plain_changes),
        Field(min_length=1, max_length=MAX_KEYS),
        BeforeValidator(at_most("items", MAX_KEYS)),
    ]


class PatchAnswer(BaseModel):
    """How many items differ now."""

    changed: int
    version: str


class RemoveItems(Strict):
    """Which items to remove: those with these keys, or those that fit the filter."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"keys": ["shoes/0017.jpg"]}]}
    )

    keys: Annotated[
        Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_KEYS)] | None,
        BeforeValidator(at_most("keys", MAX_KEYS)),
    ] = None
    filter: Annotated[
        str | dict[str, JsonValue] | None, Field(description="As in a search: text or JSON.")
    ] = None


class RemoveAnswer(BaseModel):
    """How many items were removed; unknown keys are not counted."""

    removed: int
    version: str
