"""The JSON of searches: answers. Requests are in `service.api.query_models`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from embedder.types import AttributeValue
from service.api.problem_models import Problem

_BUNDLE = "3f1c" + "0" * 60
_VERSION = "9b2e" + "0" * 60
_GENERATION = "51c7a90be2f4"
_HIT: dict[str, JsonValue] = {
    "id": 17,
    "key": "shoes/0017.jpg",
    "score": 0.9312,
    "probability": 0.97,
    "attributes": {"class": "shoes", "price": 59.9, "sale": True},
    "image": f"/galleries/shop/items/17/image?version={_GENERATION}",
}
_TIMINGS: dict[str, JsonValue] = {"decode": 3.1, "embed": 11.8, "search": 0.4, "total": 15.9}
ANSWER: dict[str, JsonValue] = {
    "bundle_id": _BUNDLE,
    "gallery": "shop",
    "gallery_version": _VERSION,
    "k": 20,
    "offset": 0,
    "count": 1,
    "cached": False,
    "match": True,
    "min_score": 0.71,
    "hits": [_HIT],
    "groups": None,
    "timings_ms": _TIMINGS,
}
NO_MATCH: dict[str, JsonValue] = {**ANSWER, "count": 0, "match": False, "hits": []}
GROUPED: dict[str, JsonValue] = {
    **ANSWER,
    "hits": [],
    "groups": [{"value": "shoes", "score": 0.9312, "probability": 0.97, "hits": [_HIT]}],
}
_PROBLEM: dict[str, JsonValue] = {
    "type": "urn:kinlens:problem:corrupt-image",
    "title": "Corrupt image",
    "status": 422,
    "detail": "The JPEG image is truncated or damaged (broken data stream). Export it again from "
    "its source.",
    "instance": "/search/batch",
    "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
    "errors": None,
}
BATCH: dict[str, JsonValue] = {
    "answers": [
        {"status": 200, "answer": ANSWER, "problem": None},
        {"status": 422, "answer": None, "problem": _PROBLEM},
    ]
}

Probability = Annotated[
    float | None,
    Field(ge=0, le=1, description="That it is right, if the model is calibrated."),
]


class HitModel(BaseModel):
    """An item of the gallery and its cosine similarity to the query."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HIT]})

    id: int
    key: str
    score: float
    probability: Probability = None
    attributes: dict[str, AttributeValue]
    image: Annotated[
        str, Field(description="Address of the item's picture, good until the gallery is rebuilt.")
    ]


class GroupModel(BaseModel):
    """Items with the same value of an attribute, best first; null for an item without it."""

    value: AttributeValue | None
    score: float
    probability: Probability = None
    hits: list[HitModel]


class Timings(BaseModel):
    """Milliseconds in each stage; 0 for a stage that a cache made unnecessary.

    Of several images the slowest counts.
    """

    decode: float
    embed: float
    search: float
    total: float


class SearchAnswer(BaseModel):
    """Hits or groups, best first, and the model and gallery version that they come from.

    Of a gallery that changes during the search, `gallery_version` is the version at its beginning,
    and the hits are from that one or a later one.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [ANSWER]})

    bundle_id: str
    gallery: str
    gallery_version: str
    k: int
    offset: int
    count: Annotated[int, Field(description="How many hits, or groups, are in this answer.")]
    cached: Annotated[bool, Field(description="Whether the whole answer came from a cache.")]
    match: Annotated[
        bool, Field(description="Whether anything passed; false says: there is no match.")
    ]
    min_score: Annotated[
        float | None,
        Field(
            description="The score that hits had to reach, also for min_probability; above 1: "
            "no score is likely enough."
        ),
    ] = None
    hits: list[HitModel]
    groups: Annotated[
        list[GroupModel] | None, Field(description="With group_by, in place of hits.")
    ] = None
    timings_ms: Timings


class Outcome(BaseModel):
    """What became of one query of several: its answer or its problem."""

    status: int
    answer: SearchAnswer | None = None
    problem: Problem | None = None


class BatchAnswer(BaseModel):
    """One outcome for each query, in their order."""

    model_config = ConfigDict(json_schema_extra={"examples": [BATCH]})

    answers: list[Outcome]
