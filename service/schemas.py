"""The JSON that goes over the wire."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from embedder.types import AttributeValue

_BUNDLE = "3f1c" + "0" * 60
_VERSION = "9b2e" + "0" * 60
_GENERATION = "51c7a90be2f4"
_HIT: dict[str, JsonValue] = {
    "id": 17,
    "key": "shoes/0017.jpg",
    "score": 0.9312,
    "attributes": {"class": "shoes", "price": 59.9, "sale": True},
    "image": f"/galleries/shop/items/17/image?version={_GENERATION}",
}
_TIMINGS: dict[str, JsonValue] = {"decode": 3.1, "embed": 11.8, "search": 0.4, "total": 15.9}


class HitModel(BaseModel):
    """An item of the gallery and its cosine similarity to the query."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HIT]})

    id: int
    key: str
    score: float
    attributes: dict[str, AttributeValue]
    image: Annotated[
        str, Field(description="Address of the item's picture, good until the gallery is rebuilt.")
    ]


class Timings(BaseModel):
    """Milliseconds in each stage; 0 for a stage that a cache made unnecessary."""

    decode: float
    embed: float
    search: float
    total: float


class SearchAnswer(BaseModel):
    """Hits, best first, and the model and gallery version that they come from.

    Of a gallery that changes during the search, `gallery_version` is the version at its beginning,
    and the hits are from that one or a later one.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "bundle_id": _BUNDLE,
                    "gallery": "shop",
                    "gallery_version": _VERSION,
                    "k": 20,
                    "count": 1,
                    "cached": False,
                    "hits": [_HIT],
                    "timings_ms": _TIMINGS,
                }
            ]
        }
    )

    bundle_id: str
    gallery: str
    gallery_version: str
    k: int
    count: int
    cached: Annotated[bool, Field(description="Whether the whole answer came from a cache.")]
    hits: list[HitModel]
    timings_ms: Timings


class GalleryModel(BaseModel):
    """A gallery that can be searched."""

    name: str
    version: Annotated[str, Field(description="Changes with every change of an item.")]
    generation: Annotated[
        str, Field(description="Changes when the gallery is rebuilt; item numbers are good for it.")
    ]
    bundle_id: str
    size: int
    dim: int
    created_at: str


class Galleries(BaseModel):
    """All galleries; the first is the default of a search."""

    bundle_id: str
    galleries: list[GalleryModel]


class Live(BaseModel):
    """The process answers."""

    status: Literal["live"] = "live"


class Ready(BaseModel):
    """What is served, by what, and the verdict of each check: `ok` or what is wrong."""

    status: Literal["ready", "not ready"]
    provider: str
    bundle_id: str
    galleries: dict[str, str]
    queue_depth: int
    redis: Literal["off", "up", "down"]
    checks: dict[str, str]
    last_error: str | None


class Fault(BaseModel):
    """A parameter that does not fit."""

    name: str
    message: str


class Problem(BaseModel):
    """An error as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str
    errors: list[Fault] | None = None
