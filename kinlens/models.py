"""The JSON responses of the service. The client uses them too, so this imports no service code."""

from datetime import datetime
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from kinlens.values import AttributeValue, Scalar

JobKind = Literal["compact", "swap", "sync", "rebuild", "train"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Scope = Literal["search", "write", "admin", "embed"]
Action = Literal["clicked", "bought", "wrong"]
ItemStatus = Literal["added", "replaced", "updated", "unchanged", "failed"]
FeedbackMode = Literal["off", "pairs", "pictures"]
Combine = Literal["mean", "best"]
Distinct = bool | Literal["near"]

MAX_ITEMS = 256
"""Maximum number of items in one request."""

MAX_PAGE = 200
"""Maximum number of items in one page of a list."""

Probability = Annotated[
    float | None,
    Field(
        ge=0,
        le=1,
        description="Estimated chance that it shows the right product, equal for all images of a "
        "product; null if the gallery has no calibration.",
    ),
]


class Fault(BaseModel):
    """An invalid parameter."""

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
    """A part of the query: the position of its image, from 1, and its crop (null: no crop); or the
    position of its `vector`, and then `image` is null.
    """

    image: int | None
    crop: list[float] | None
    vector: int | None = None


_VIEW = Field(description="With combine=best: the best matching image and crop of the query.")


HasImage = Annotated[
    bool,
    Field(
        description="Whether the item has an image; false if only its vector was stored. Omitted "
        "if true.",
        exclude_if=lambda value: value,
    ),
]
ImageUrl = Annotated[
    str | None,
    Field(
        description="Address of the image of an item without one of its own, by KINLENS_IMAGE_URL. "
        "Omitted without.",
        exclude_if=lambda value: value is None,
    ),
]


class HitModel(BaseModel):
    """An item of the gallery and its cosine similarity to the query."""

    id: Annotated[
        int,
        Field(
            description="Never reused for another item or other content; valid until the gallery "
            "is rebuilt."
        ),
    ]
    key: Annotated[str, Field(description="Your name for the item; it survives rebuilds.")]
    score: Annotated[
        float,
        Field(
            description="Cosine similarity, even if diversity, boost or sort_by changes the order."
        ),
    ]
    probability: Probability = None
    attributes: dict[str, AttributeValue]
    image: Annotated[
        str,
        Field(
            description="URL of the item's image, valid until the gallery is rebuilt; use it "
            "unchanged."
        ),
    ]
    has_image: HasImage = True
    image_url: ImageUrl = None
    view: Annotated[ViewModel | None, _VIEW] = None


class GroupModel(BaseModel):
    """Items with one `value` of an attribute, best first; null for items without a value."""

    value: Scalar | None
    score: float
    probability: Probability = None
    hits: list[HitModel]
    view: Annotated[ViewModel | None, _VIEW] = None


class Timings(BaseModel):
    """Milliseconds in each stage; 0 for a stage that a cache hit skipped.

    `embed` includes queue time. With several images, the times are those of the slowest one.
    """

    decode: float
    embed: float
    search: float
    total: float


class AttributeCount(BaseModel):
    """A value of an attribute and the number of items that have it."""

    value: Scalar
    count: int


class BinModel(BaseModel):
    """The number of items with a value in [`from`, `to`); the last bin includes `to`."""

    from_: Annotated[float, Field(alias="from")]
    to: float
    count: int


class FacetModel(BaseModel):
    """Counts of an attribute's values over the matching items; `missing` items have no value.

    `values` are the 50 most frequent values; `other` counts the items with any other value. Up to
    20 different numbers are listed, in ascending order; more are counted in `bins` of equal width.
    """

    values: list[AttributeCount] | None = None
    bins: list[BinModel] | None = None
    other: int = 0
    missing: int


Facets = Annotated[
    dict[str, FacetModel] | None,
    Field(description="One entry for each attribute in `facets`, over all matching items."),
]


class MemberModel(BaseModel):
    """A product of a guaranteed set: its value, and the key and score of its best item."""

    value: Scalar | None
    key: str
    score: float


class GuaranteeModel(BaseModel):
    """What an answer guarantees, for queries that are drawn as the labelled ones were."""

    queries: Annotated[int, Field(description="Number of labelled queries behind it.")]
    source: Annotated[
        Literal["golden", "gallery"],
        Field(
            description="The golden set; or items of the gallery, if its owner states that queries "
            "are like them."
        ),
    ]
    product: Annotated[str, Field(description="The attribute that names a product.")]
    level: Annotated[
        float | None, Field(description="The probability that the set has the right product.")
    ]
    holds: Annotated[
        bool | None,
        Field(description="false if the set was cut, and then nothing is guaranteed about it."),
    ]
    cut: Annotated[
        Literal["k", "filter"] | None,
        Field(description="What removed products from the set: its size k, or the filter."),
    ]
    groups: Annotated[
        list[MemberModel],
        Field(description="The set, best first; without guarantee, the best product."),
    ]
    none: Annotated[
        bool | None,
        Field(
            description='Whether "none of these" is in the set; null if no labelled query has an '
            "absent product. Then the right product is taken to be in the gallery."
        ),
    ]
    accept: Annotated[
        float | None, Field(description="The share of accepted answers that are right.")
    ]
    confidence: Annotated[float | None, Field(description="How sure that share is.")]


class SearchAnswer(BaseModel):
    """Hits or groups, best first, with the model and the gallery version that they come from.

    `gallery_version` is the version when the search started. If the gallery changes during the
    search, hits can come from a later version.
    """

    bundle_id: str
    gallery: str
    gallery_version: Annotated[str, Field(description="Changes with every change of an item.")]
    k: int
    offset: int
    count: Annotated[int, Field(description="Number of hits, or groups, in this answer.")]
    cached: Annotated[bool, Field(description="Whether the whole answer came from a cache.")]
    match: Annotated[
        bool, Field(description="Whether any hit passed the thresholds; false means no match.")
    ]
    min_score: Annotated[
        float | None,
        Field(description="The minimum score of a hit."),
    ] = None
    no_match_probability: Annotated[
        float | None,
        Field(
            description="Estimated chance that none of the hits, or groups, is right: the product "
            "is not in the gallery, or it ranks further down."
        ),
    ] = None
    no_probabilities: Annotated[
        str | None,
        Field(description="Why a search with words has no probabilities; omitted for others."),
    ] = None
    hits: list[HitModel]
    groups: Annotated[
        list[GroupModel] | None, Field(description="The groups, with group_by; hits is then empty.")
    ] = None
    facets: Facets = None
    accepted: Annotated[
        bool | None,
        Field(
            description="With accept: whether the best product, the first of guarantee.groups, may "
            "be taken without a person. It is that of the first hit, or of the first group."
        ),
    ] = None
    guarantee: Annotated[
        GuaranteeModel | None, Field(description="With guarantee or accept: what holds.")
    ] = None
    timings_ms: Timings
    answer_id: Annotated[
        str | None,
        Field(
            description="Id for POST /feedback, if the service accepts feedback. null unless the "
            "query was a single uncropped image or a single item."
        ),
    ] = None


class Outcome(BaseModel):
    """The result of one query of a batch: its answer or its problem."""

    status: int
    answer: SearchAnswer | None = None
    problem: Problem | None = None


class BatchAnswer(BaseModel):
    """One outcome for each query, in the order of the request."""

    answers: list[Outcome]


class GalleryModel(BaseModel):
    """A gallery that can be searched."""

    name: str
    version: Annotated[str, Field(description="Changes with every change of an item.")]
    generation: Annotated[
        str,
        Field(description="Changes with a rebuild; item ids are valid within a generation."),
    ]
    bundle_id: str
    precision: Annotated[
        str, Field(description="Precision of the model that computed the stored vectors.")
    ] = "fp32"
    size: int
    dim: int
    created_at: str
    managed: Annotated[
        bool, Field(description="Whether the service created it and can delete it.")
    ] = False
    writable: Annotated[bool, Field(description="Whether items can be added.")] = False
    has_map: Annotated[bool, Field(description="Whether its bundle supports POST .../explain.")] = (
        False
    )
    has_boxes: Annotated[
        bool,
        Field(description="Whether its bundle finds objects in photos, see POST /boxes."),
    ] = False
    has_words: Annotated[bool, Field(description="Whether it can be searched with `texts`.")] = (
        False
    )
    product_url: Annotated[
        str,
        Field(
            description="The address of an item in the shop: the name of an attribute, or an "
            "address with names of attributes in braces; empty: none."
        ),
    ] = ""


class Galleries(BaseModel):
    """All galleries; the first is the default of a search."""

    bundle_id: str
    galleries: list[GalleryModel]
    unavailable: Annotated[
        list[str],
        Field(description="Galleries that cannot be opened or do not respond; see `/ready`."),
    ] = []


class AttributeModel(BaseModel):
    """An attribute of the items, with the values that a filter can use.

    `values` are the most frequent ones, or null for numbers with too many different values.
    `minimum` and `maximum` are null unless the values are numbers.
    """

    name: str
    kind: Literal["text", "number", "boolean"]
    values: list[AttributeCount] | None
    minimum: float | None
    maximum: float | None


class IndexModel(BaseModel):
    """The index of a gallery: a segment, a delta of later inserts, and tombstones.

    `delta` counts the items added after the segment was built, `tombstones` its removed items.
    `kind` is null without a segment. `recall` at 10 was measured when the segment was built.
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
    """A fraction `false_matches` of searches for absent products reaches `search_score`."""

    false_matches: float
    search_score: float


class CalibrationModel(BaseModel):
    """The source of a gallery's probabilities: its golden set, its own labelled items, or the
    bundle. `product` is the attribute that is equal for all items of one product. There are
    `products` such products with `views` images on average.
    """

    source: Literal["golden", "gallery", "bundle"]
    product: str
    products: int
    views: float
    searches: Annotated[
        int | None, Field(description="Number of searches the curve was fitted to.")
    ]
    wrong_hits: Annotated[
        int | None, Field(description="Number of wrong hits among the ten best of these searches.")
    ]
    error_best: Annotated[
        float | None,
        Field(description="Expected calibration error of the best hit, cross-validated."),
    ]
    error_ten: Annotated[
        float | None,
        Field(description="Expected calibration error of the ten best hits, cross-validated."),
    ]
    no_match_prior: Annotated[
        float, Field(description="Prior probability that the product is not in the gallery.")
    ]
    reason: Annotated[str | None, Field(description="Why no better source was used.")]


class GalleryDetail(GalleryModel):
    """A gallery with its attributes, index and calibration."""

    attributes: list[AttributeModel]
    index: IndexModel
    calibration: CalibrationModel | None
    no_calibration: Annotated[str | None, Field(description="Why hits have no probability.")] = None
    guarantee: Annotated[
        float | None,
        Field(description="0.95 if the labelled queries suffice for sets of this level."),
    ] = None
    accept: Annotated[
        float | None,
        Field(description="0.99 or 0.95: the strictest that the labelled queries suffice for."),
    ] = None
    guarantee_withdrawn: Annotated[
        str | None,
        Field(
            description="Why answers are no longer guaranteed; null while they are, and if they "
            "never were."
        ),
    ] = None
    thresholds: Annotated[
        list[ThresholdModel], Field(description="Score thresholds for a match, from the bundle.")
    ] = []
    facets: Annotated[
        bool, Field(description="Whether searches can request counts with `facets`.")
    ] = False
    provider: str
    image_root_missing: bool
    feedback: Annotated[FeedbackMode, Field(description="What POST /feedback stores.")] = "off"


class FeedbackCounts(BaseModel):
    """Counts of the feedback on a gallery. `pairs` of them can be used for training; `words` is the
    number of different texts with an item that was right for them, omitted if there is none.
    """

    clicked: int
    bought: int
    wrong: int
    pairs: int
    words: int = Field(default=0, exclude_if=not_)


class QueryShares(BaseModel):
    """The `shares` of one image of the query (counted from 1), or of a crop of it, in rows."""

    image: int
    crop: tuple[float, float, float, float] | None
    shares: list[list[float]]


class ExplainAnswer(BaseModel):
    """Which regions of a hit match the query: their shares of `score`, in rows from the top.

    The shares of `hit` sum to the score. The shares of all `query` images plus `rest`, the part of
    liked and disliked items, sum to it too. Each grid covers the central square of an image or
    crop; its side is the fraction `square` of the shorter side.
    """

    bundle_id: str
    gallery: str
    gallery_version: str
    key: Annotated[str, Field(description="Key of the item; ids change with a rebuild.")]
    score: float
    rest: float
    square: float
    hit: list[list[float]]
    query: list[QueryShares]


class BoxModel(BaseModel):
    """An object in a photo."""

    box: Annotated[
        tuple[float, float, float, float],
        Field(description="Left, top, width and height as fractions of the upright image."),
    ]
    score: Annotated[float, Field(description="How sure the detector is, from 0 to 1.")]
    label: Annotated[str | None, Field(description="The kind of object, if it is known.")]


class BoxesAnswer(BaseModel):
    """The objects in a photo, best first; each box can be sent as a crop of a search."""

    bundle_id: str
    gallery: str
    boxes: list[BoxModel]


class ItemModel(BaseModel):
    """An item; `image` is the URL of its image, valid until the gallery is rebuilt."""

    id: int
    key: str
    attributes: dict[str, AttributeValue]
    sha256: str
    image: str
    has_image: HasImage = True
    image_url: ImageUrl = None


class ItemVector(BaseModel):
    """The stored vector of an item: of norm 1, comparable with vectors of the same `bundle_id` and
    length.
    """

    id: int
    key: str
    sha256: str
    bundle_id: str
    vector: list[float]


class CountAnswer(BaseModel):
    """The number of items that match, and the version of the gallery."""

    count: int
    version: str


class EmbeddingModel(BaseModel):
    """The vector of one input: its numbers, or base64 of them as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The units of work of a request: one for each input."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """Vectors of norm 1 in the order of the inputs; `model` is the id of the bundle."""

    object: Literal["list"] = "list"
    data: list[EmbeddingModel]
    model: str
    usage: EmbeddingUsage


class ItemPage(BaseModel):
    """The matching items from `offset` on, `total` in all; by id unless `sort_by` was sent."""

    total: int
    offset: int
    items: list[ItemModel]
    last: Annotated[int | None, Field(description="Highest id of a matching item.")] = None
    generation: Annotated[str | None, Field(description="Generation these item ids belong to.")] = (
        None
    )
    facets: Facets = None


class NearItem(ItemModel):
    """An item of a group of near-duplicates; `score` is its cosine to the first of the group."""

    score: float
    same_content: Annotated[
        bool, Field(description="Whether its file is identical to the first item's.")
    ]
    newest: Annotated[
        bool, Field(description="Whether it was added after all others of its group.")
    ]


class NearFloor(BaseModel):
    """The default minimum score of near-duplicates in this gallery.

    It is 0.95 or, if higher, the score that 1 in 1,000 of `pairs` unrelated pairs reaches.
    """

    score: float
    pairs: int
    attribute: Annotated[
        str | None,
        Field(description="Attribute that names the products; null: pairs of any items were used."),
    ]


class NearCrowd(BaseModel):
    """A cluster of near-duplicates that is too large to be copies of one product."""

    items: int
    examples: list[ItemModel]
    detail: Annotated[str, Field(description="The likely cause, and what to do.")]


class DuplicatesAnswer(BaseModel):
    """Groups of near-duplicates from `offset` on, the largest first.

    Each item has a cosine of at least `min_score` to the first item of its group.
    """

    gallery_version: str
    min_score: Annotated[float, Field(description="Minimum cosine.")]
    floor: NearFloor
    total: Annotated[int, Field(description="Number of groups, without `crowds`.")]
    items: Annotated[int, Field(description="Number of items in these groups.")]
    offset: int
    warning: Annotated[
        str | None,
        Field(description="Why these groups must not be used to remove items."),
    ] = None
    crowds: Annotated[
        list[NearCrowd],
        Field(description="Groups of more than 20 items and more than 1 % of the gallery."),
    ]
    groups: list[list[NearItem]]


class PutResult(BaseModel):
    """The result for one item; `problem` shows why it failed."""

    key: str
    status: Annotated[
        ItemStatus,
        Field(
            description="replaced: the image is another one. updated: only attributes changed. "
            "failed: the item has a problem."
        ),
    ]
    id: int | None
    attributes: Annotated[
        Literal["kept", "replaced"] | None,
        Field(
            description="kept: none were sent, so the stored attributes remain. replaced: the "
            "item has exactly the sent attributes. null: the item failed."
        ),
    ] = None
    problem: Problem | None


class PutAnswer(BaseModel):
    """The result for each item, in the order sent, and the new version of the gallery."""

    added: int
    replaced: int
    updated: int
    unchanged: int
    failed: int
    items: list[PutResult]
    version: str


class PatchAnswer(BaseModel):
    """The number of items that the patch changed."""

    changed: int
    version: str


class RemoveAnswer(BaseModel):
    """The number of removed items; unknown keys are not counted."""

    removed: int
    version: str


class RestoreAnswer(BaseModel):
    """The restored items, under new ids. An item is not restored if its key has a new item, if it
    was never removed, or if a compaction has dropped it.
    """

    restored: int
    items: list[ItemModel]
    version: str


class JobModel(BaseModel):
    """A long-running job on a gallery."""

    id: str
    kind: JobKind
    gallery: str
    state: JobState
    step: Annotated[str, Field(description="The current step.")]
    done: Annotated[int, Field(description="Progress, out of `total`; never decreases.")]
    total: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    by: Annotated[str, Field(description="Name of the API key that started it.")]
    params: dict[str, Any]
    error: Annotated[str | None, Field(description="Why it failed, and what to do.")]
    report: Annotated[
        dict[str, Any] | None,
        Field(description="The results: old and new gallery, overlap, gate, whether swapped."),
    ]


class Jobs(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobModel]


class BundleModel(BaseModel):
    """A model bundle of the service, as described by its manifest; "" for a missing entry."""

    bundle_id: str
    backbone: str
    created_at: str


class Access(BaseModel):
    """What the caller may do. A page shows only what `scopes`, `galleries` and `filter` permit."""

    key: Annotated[str | None, Field(description="The name of the key; null without a key.")]
    scopes: Annotated[
        list[str],
        Field(
            description="Its scopes, including those that they imply. Ignore those that you do not "
            "know: later versions may have more.",
            examples=[["search", "write"]],
        ),
    ]
    galleries: Annotated[
        list[str] | None,
        Field(description="The only galleries that it may see; null: all, and the whole service."),
    ]
    filter: Annotated[
        str | None, Field(description="It only sees items that match this filter; null: all.")
    ]


class JobOptions(BaseModel):
    """The names that requests for jobs can use. A key that is bound to galleries gets the bundles
    of these, and no data sets or training jobs.
    """

    training_jobs: list[str]
    no_training: Annotated[
        str | None, Field(description="Why this service cannot run training jobs.")
    ] = None
    data: Annotated[list[str], Field(description="Data sets named in the settings.")]
    folders: Annotated[list[str], Field(description="Folders and lists that a sync can use.")] = []
    weights: Annotated[
        list[str], Field(description="Allowed values of model.weights in a training job.")
    ]
    bundles: Annotated[list[BundleModel], Field(description="Bundles that a rebuild can use.")]


class JobLog(BaseModel):
    """A part of the log of a job; the next part starts at byte `next_offset`."""

    offset: int
    next_offset: int
    text: str


class Live(BaseModel):
    """The process responds."""

    status: Literal["live"] = "live"


class Startup(BaseModel):
    """Whether the service has been ready at least once."""

    status: Literal["started", "starting"]


class IndexLocation(BaseModel):
    """The device that searches an index, and the MiB of the index in main and GPU memory.

    `reason` shows why the index is not on the requested GPU.
    """

    kind: str
    device: Literal["cpu", "cuda"]
    memory_mb: float
    gpu_memory_mb: float
    reason: str | None


class Ready(BaseModel):
    """The model, the galleries, and the result of each check: `ok` or the fault. A caller without a
    key only gets the `status` if such callers have no scope.
    """

    status: Literal["ready", "not ready"]
    provider: Annotated[str, Field(description="The provider that runs the model.")] = ""
    engine: str | None = None
    precision: str | None = None
    precision_reason: str | None = Field(
        default=None, description="Why this precision: configured, or chosen by `auto`."
    )
    bundle_id: str = ""
    galleries: dict[str, str] = Field(
        default={}, description="The version of each gallery; `unknown` if it cannot be read."
    )
    indexes: dict[str, IndexLocation] = Field(
        default={}, description="The index of each compacted gallery in a local folder."
    )
    free_memory_mb: float | None = Field(default=None, description="Free memory in MiB.")
    free_gpu_memory_mb: float | None = Field(
        default=None, description="Free GPU memory in MiB; null if no gallery is searched on a GPU."
    )
    queue_depth: Annotated[int, Field(description="Searches waiting for a search thread.")] = 0
    redis: Annotated[
        Literal["off", "up", "down"],
        Field(description="down: it does not answer, or refuses a command of the service."),
    ] = "off"
    redis_fault: Annotated[
        str | None, Field(description="The reason why Redis is down, and what to do.")
    ] = None
    checks: dict[str, str] = Field(
        default={},
        description="`ok` or the problem of each model and gallery; also of new generations that "
        "could not be opened, which do not make the service unready.",
    )
    notes: dict[str, str] = Field(
        default={},
        description="What does not make the service unready: galleries whose images cannot be "
        "read now, since their store does not answer.",
    )
    last_error: Annotated[
        str | None, Field(description="The latest failed check since the start, if any.")
    ] = None


class KeyModel(BaseModel):
    """An API key without its secret. `id` is the public part of its text. `old_until` is when
    the secret before the last rotation expires, if it is still valid.
    """

    id: str
    name: str
    scopes: Annotated[list[str], Field(description="As in the answer of GET /access.")]
    state: Literal["active", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    rotated_at: datetime | None
    old_until: datetime | None
    galleries: Annotated[
        list[str] | None, Field(description="The galleries that it can see; null for all.")
    ]
    filter: Annotated[
        str | None, Field(description="Filter that restricts the key to matching items.")
    ]
    rate: Annotated[
        str | None, Field(description="Rate limit that replaces KINLENS_RATE_LIMIT_PER_KEY.")
    ]
    daily_units: Annotated[int | None, Field(description="Maximum units of work in a day.")]


class Keys(BaseModel):
    """All keys, including revoked and expired ones; oldest first."""

    keys: list[KeyModel]


class NewKey(BaseModel):
    """A new key with its text, which is shown only once."""

    text: Annotated[str, Field(description="Send it as Authorization: Bearer TEXT.")]
    key: KeyModel


class Change(BaseModel):
    """A change, or an attempt that was refused with 403, for the audit log."""

    action: Annotated[str, Field(description="Method and path template, or a command.")]
    by: Annotated[str, Field(description="Name of the key, `anonymous` or `command line`.")]
    status: Annotated[int, Field(description="HTTP status; 0 if no response was sent.")]
    key_id: str | None = None
    client: str | None = None
    gallery: str | None = None
    target: Annotated[
        str | None, Field(description="The changed object: the name of a key, the id of a job.")
    ] = None
    affected: Annotated[
        int | None, Field(description="Number of items, queries or keys that were changed.")
    ] = None
    request_id: str | None = None


class Numbered(BaseModel):
    """The place of an entry in the audit log."""

    number: int
    time: datetime


class AuditEntry(Change, Numbered):
    """A change, or an attempt that was refused with 403."""


class Audit(BaseModel):
    """Changes, newest first. For the next page, send the last `number` as `before`."""

    entries: list[AuditEntry]
