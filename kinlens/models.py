"""What the service answers, as JSON. The client reads these too, so nothing else is imported."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from kinlens.values import AttributeValue, Scalar

JobKind = Literal["compact", "swap", "rebuild", "train"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Action = Literal["clicked", "bought", "wrong"]
FeedbackMode = Literal["off", "pairs", "pictures"]

Probability = Annotated[
    float | None,
    Field(ge=0, le=1, description="That it is right; null where the gallery has no calibration."),
]


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


class ViewModel(BaseModel):
    """A part of the query: the number of its image, from 1, and its crop; null for the whole."""

    image: int
    crop: list[float] | None


_VIEW = Field(description="With combine=best: the image and crop of the query that it is like.")


class HitModel(BaseModel):
    """An item of the gallery and its cosine similarity to the query."""

    id: int
    key: str
    score: float
    probability: Probability = None
    attributes: dict[str, AttributeValue]
    image: Annotated[
        str, Field(description="Address of the item's picture, good until the gallery is rebuilt.")
    ]
    view: Annotated[ViewModel | None, _VIEW] = None


class GroupModel(BaseModel):
    """Items with the same value of an attribute, best first; null for an item without it."""

    value: Scalar | None
    score: float
    probability: Probability = None
    hits: list[HitModel]
    view: Annotated[ViewModel | None, _VIEW] = None


class Timings(BaseModel):
    """Milliseconds in each stage; 0 for a stage that a cache made unnecessary.

    Of several images the slowest counts.
    """

    decode: float
    embed: float
    search: float
    total: float


class AttributeCount(BaseModel):
    """A value of an attribute, and how many items have it."""

    value: Scalar
    count: int


class BinModel(BaseModel):
    """How many items have a number from `from` to below `to`; the last bin has `to` as well."""

    from_: Annotated[float, Field(alias="from")]
    to: float
    count: int


class FacetModel(BaseModel):
    """How many of the items that fit have which value of an attribute; `missing` have none.

    `values` are the 50 most frequent, and `other` items have another; of at most 20 different
    numbers they are all, ascending. More numbers are counted in `bins` of one width.
    """

    values: list[AttributeCount] | None = None
    bins: list[BinModel] | None = None
    other: int = 0
    missing: int


Facets = Annotated[
    dict[str, FacetModel] | None,
    Field(description="Of each attribute that `facets` names, over all that fits."),
]


class SearchAnswer(BaseModel):
    """Hits or groups, best first, and the model and gallery version that they come from.

    Of a gallery that changes during the search, `gallery_version` is the version at its beginning,
    and the hits are from that one or a later one.
    """

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
        Field(description="The score that hits had to reach."),
    ] = None
    no_match_probability: Annotated[
        float | None,
        Field(
            description="That none of the hits, or groups, that the search found is right: the "
            "product is not in the gallery, or it ranks further down."
        ),
    ] = None
    hits: list[HitModel]
    groups: Annotated[
        list[GroupModel] | None, Field(description="With group_by, in place of hits.")
    ] = None
    facets: Facets = None
    timings_ms: Timings
    answer_id: Annotated[
        str | None,
        Field(
            description="To send feedback with, where the service takes it; null for an answer "
            "that is about no single whole picture or item."
        ),
    ] = None


class Outcome(BaseModel):
    """What became of one query of several: its answer or its problem."""

    status: int
    answer: SearchAnswer | None = None
    problem: Problem | None = None


class BatchAnswer(BaseModel):
    """One outcome for each query, in their order."""

    answers: list[Outcome]


class GalleryModel(BaseModel):
    """A gallery that can be searched."""

    name: str
    version: Annotated[str, Field(description="Changes with every change of an item.")]
    generation: Annotated[
        str, Field(description="Changes when the gallery is rebuilt; item numbers are good for it.")
    ]
    bundle_id: str
    precision: Annotated[
        str, Field(description="The precision that the model computed in when it was made.")
    ] = "fp32"
    size: int
    dim: int
    created_at: str
    managed: Annotated[bool, Field(description="Made by the service, which may delete it.")] = False
    writable: Annotated[bool, Field(description="Whether items can be put here.")] = False
    has_map: Annotated[
        bool, Field(description="Whether its bundle tells where hits match: POST .../explain.")
    ] = False


class Galleries(BaseModel):
    """All galleries; the first is the default of a search."""

    bundle_id: str
    galleries: list[GalleryModel]
    unavailable: Annotated[
        list[str],
        Field(description="Those that do not answer or cannot be opened; `/ready` says why."),
    ] = []


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
    """From `search_score` on, a wrong best hit is as rare as `false_matches`."""

    false_matches: float
    search_score: float


class CalibrationModel(BaseModel):
    """Where the probabilities of a gallery come from: its golden set, its own labelled items, or
    the bundle. `product` is the attribute that says which items show one product, of which there
    are `products` with `views` images on average.
    """

    source: Literal["golden", "gallery", "bundle"]
    product: str
    products: int
    views: float
    searches: Annotated[int | None, Field(description="Searches that the curve was fitted to.")]
    wrong_hits: Annotated[int | None, Field(description="Wrong hits among their ten best.")]
    error_best: Annotated[
        float | None,
        Field(description="Expected calibration error of the best hit, cross-validated."),
    ]
    error_ten: Annotated[float | None, Field(description="The same of the ten best hits.")]
    no_match_prior: Annotated[
        float, Field(description="Probability that a product is absent, before the search.")
    ]
    reason: Annotated[str | None, Field(description="Why no better source was used.")]


class GalleryDetail(GalleryModel):
    """A gallery with its attributes, its index and its calibration."""

    attributes: list[AttributeModel]
    index: IndexModel
    calibration: CalibrationModel | None
    no_calibration: Annotated[str | None, Field(description="Why hits have no probability.")] = None
    thresholds: Annotated[
        list[ThresholdModel], Field(description="Scores of a match, by the bundle.")
    ] = []
    facets: Annotated[bool, Field(description="Whether values are counted on request.")] = False
    provider: str
    image_root_missing: bool
    feedback: Annotated[
        FeedbackMode, Field(description="What the service keeps of POST /feedback.")
    ] = "off"


class FeedbackCounts(BaseModel):
    """How much feedback there is on a gallery; `pairs` of it can be learnt from."""

    clicked: int
    bought: int
    wrong: int
    pairs: int


class QueryShares(BaseModel):
    """Of an image of the query, by its number from 1, or of a crop of it: rows of `shares`."""

    image: int
    crop: tuple[float, float, float, float] | None
    shares: list[list[float]]


class ExplainAnswer(BaseModel):
    """Where a hit matches: the share of `score` that each region has, in rows from the top.

    The shares of `hit` sum to the score; those of all `query`, with `rest`, the part of liked and
    disliked items, do too. They cover the central square of a picture, or of its crop, whose side
    is the part `square` of the shorter one.
    """

    bundle_id: str
    gallery: str
    gallery_version: str
    key: Annotated[str, Field(description="Of the item: numbers change when a gallery is rebuilt.")]
    score: float
    rest: float
    square: float
    hit: list[list[float]]
    query: list[QueryShares]


class ItemModel(BaseModel):
    """An item; `image` is the address of its picture, good until the gallery is rebuilt."""

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
        str | None, Field(description="Generation that these item ids belong to.")
    ] = None
    facets: Facets = None


class NearItem(ItemModel):
    """An item of a group of near-duplicates; `score` is its cosine to the first of the group."""

    score: float
    same_content: Annotated[bool, Field(description="Its file is that of the first.")]
    newest: Annotated[bool, Field(description="It came last of its group.")]


class NearFloor(BaseModel):
    """The least default score of near-duplicates in this gallery.

    One in 1,000 of `pairs` of items of different products reaches it, unless it is 0.95.
    """

    score: float
    pairs: int
    attribute: Annotated[
        str | None, Field(description="Names the products; null: pairs of any items were taken.")
    ]


class NearCrowd(BaseModel):
    """Too many items around one item to be copies of a product."""

    items: int
    examples: list[ItemModel]
    detail: Annotated[str, Field(description="What may be wrong, and what to do.")]


class DuplicatesAnswer(BaseModel):
    """Groups of near-duplicates from place `offset` on, the largest of all first.

    All members are as near to the first of their group as `min_score` says.
    """

    gallery_version: str
    min_score: Annotated[float, Field(description="Least cosine.")]
    floor: NearFloor
    total: Annotated[int, Field(description="How many groups there are, without crowds.")]
    items: Annotated[int, Field(description="How many items are in these groups.")]
    offset: int
    warning: Annotated[
        str | None, Field(description="Why no item may be removed because of its group.")
    ] = None
    crowds: Annotated[
        list[NearCrowd], Field(description="Groups of more than 1 % of the gallery and 20 items.")
    ]
    groups: list[list[NearItem]]


class PutResult(BaseModel):
    """What became of one item; `id` is its number, `problem` says why it failed."""

    key: str
    status: Literal["added", "replaced", "updated", "unchanged", "failed"]
    id: int | None
    attributes: Annotated[
        Literal["kept", "replaced"] | None,
        Field(
            description="kept: none were sent, so those of the stored item stay. replaced: the "
            "item has those that were sent and no others. null: it failed."
        ),
    ] = None
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


class PatchAnswer(BaseModel):
    """How many items differ now."""

    changed: int
    version: str


class RemoveAnswer(BaseModel):
    """How many items were removed; unknown keys are not counted."""

    removed: int
    version: str


class RestoreAnswer(BaseModel):
    """The items that came back, under new ids. Others have a new item under their key, were never
    removed, or were dropped by a compaction since.
    """

    restored: int
    items: list[ItemModel]
    version: str


class JobModel(BaseModel):
    """Long work on a gallery."""

    id: str
    kind: JobKind
    gallery: str
    state: JobState
    step: Annotated[str, Field(description="What it does now.")]
    done: Annotated[int, Field(description="Of `total`; never goes back.")]
    total: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    by: Annotated[str, Field(description="The key that started it.")]
    params: dict[str, Any]
    error: Annotated[str | None, Field(description="Why it failed, and what to do.")]
    report: Annotated[
        dict[str, Any] | None,
        Field(description="What it found: old and new gallery, overlap, gate, whether swapped."),
    ]


class Jobs(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobModel]


class BundleModel(BaseModel):
    """A model bundle that the service knows, as its manifest says, or "" where that does not."""

    bundle_id: str
    backbone: str
    created_at: str


class JobOptions(BaseModel):
    """What jobs can be given by name."""

    training_jobs: list[str]
    no_training: Annotated[str | None, Field(description="Why nothing can be trained here.")] = None
    data: Annotated[list[str], Field(description="Data sets that the settings name.")]
    weights: Annotated[list[str], Field(description="What model.weights of a training can be.")]
    bundles: Annotated[list[BundleModel], Field(description="What a rebuild can be given.")]


class JobLog(BaseModel):
    """A part of what a job has written; ask again from `next_offset`."""

    offset: int
    next_offset: int
    text: str


class Live(BaseModel):
    """The process answers."""

    status: Literal["live"] = "live"


class Startup(BaseModel):
    """Whether the service was ready once."""

    status: Literal["started", "starting"]


class IndexPlace(BaseModel):
    """Where the index of a gallery is searched, the MiB that it takes of the machine and of the
    GPU, and why it is not the GPU that was asked for.
    """

    kind: str
    device: Literal["cpu", "cuda"]
    memory_mb: float
    gpu_memory_mb: float
    reason: str | None


class Ready(BaseModel):
    """What is served, by what, and the verdict of each check: `ok` or what is wrong."""

    status: Literal["ready", "not ready"]
    provider: str
    engine: str | None = None
    precision: str | None = None
    precision_reason: str | None = None
    bundle_id: str
    galleries: dict[str, str]
    indexes: dict[str, IndexPlace] = Field(
        default={}, description="Of each gallery in a folder that was compacted."
    )
    free_memory_mb: float | None = Field(default=None, description="MiB of the machine.")
    free_gpu_memory_mb: float | None = Field(
        default=None, description="MiB of the GPU; null where galleries are not searched on one."
    )
    queue_depth: int
    redis: Literal["off", "up", "down"]
    checks: dict[str, str]
    last_error: str | None


class KeyModel(BaseModel):
    """An API key without its secret. `id` is the part of its text that may be shown; `old_until`
    is when the secret before the last rotation ends, if it is still valid.
    """

    id: str
    name: str
    scopes: list[Literal["search", "write", "admin"]]
    state: Literal["active", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    rotated_at: datetime | None
    old_until: datetime | None
    galleries: Annotated[
        list[str] | None, Field(description="The only ones it sees; null for all.")
    ]
    filter: Annotated[str | None, Field(description="Of these, the items that it sees.")]
    rate: Annotated[str | None, Field(description="In place of KINLENS_RATE_LIMIT_PER_KEY.")]
    daily_units: Annotated[int | None, Field(description="Units of work that fit into a day.")]


class Keys(BaseModel):
    """Every key, also those that were revoked or have expired; oldest first."""

    keys: list[KeyModel]


class NewKey(BaseModel):
    """A key with its text, which is shown this once."""

    text: Annotated[str, Field(description="Send it as Authorization: Bearer TEXT.")]
    key: KeyModel


class AuditEntry(BaseModel):
    """One change, or an attempt at one that was refused with 403."""

    number: int
    time: datetime
    action: Annotated[str, Field(description="Method and template of the address, or a command.")]
    by: Annotated[str, Field(description="Name of the key, `anonymous` or `command line`.")]
    status: Annotated[int, Field(description="Of the answer; 0 if none was sent.")]
    key_id: str | None = None
    client: str | None = None
    gallery: str | None = None
    target: Annotated[
        str | None, Field(description="What was changed: the name of a key, the id of a job.")
    ] = None
    affected: Annotated[
        int | None, Field(description="How many items, queries or keys were changed.")
    ] = None
    request_id: str | None = None


class Audit(BaseModel):
    """Changes, newest first. Send the last `number` as `before` for the next page."""

    entries: list[AuditEntry]
