"""Settings of the service, read once from KINLENS_* variables and command line options."""

import contextlib
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kinlens.embedder.errors import InvalidParameterError, StateMissingError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import AskedEngine, AskedPrecision
from kinlens.embedder.preprocess import ImageLimits
from kinlens.indexer.types import GALLERY_NAME, MILVUS, Consistency, milvus_address, seconds_of
from kinlens.models import MAX_ITEMS, FeedbackMode, Scope
from kinlens.quality.calibration import DEFAULT_PRIOR
from kinlens.service.access.links import check_image_url, check_prefix, check_product_url, origin_of
from kinlens.service.access.rates import parse_rates
from kinlens.service.redis import check_url

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY_HOST = "*"
REPLICAS = "replicas"
"""The subfolder of the state folder with copies of followed galleries."""

MAX_HITS = 100_000
"""Maximum number of hits of one request, over all its queries."""

FORM_BYTES = 64 * 2**10
"""Allowance for the other parts and the boundaries of a form, in addition to its images."""

START_WORDS = ("imagenet", "none", "current")
"""Initial weights that need no setting: published, random, and the gallery's own model."""

_CPU_BATCH = 2
_GPU_BATCH = 32
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"\*|\[[0-9a-f:.]+\]|[a-z0-9._-]+")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def parse_network(text: str) -> Network:
    """An address or network such as 10.0.0.0/8. Raises: ValueError with a hint."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a proxy address; write an address such as 10.0.0.5 or a network "
            "such as 10.0.0.0/8"
        ) from None
    if network.prefixlen == 0:
        raise ValueError(
            f"{text!r} would trust X-Forwarded-For from every client; write the address of your "
            "proxy"
        )
    return network


def split_named(entry: str) -> tuple[str | None, str]:
    """Split `NAME=TEXT` or `TEXT`."""
    name, separator, text = entry.partition("=")
    return (name, text) if separator else (None, entry)


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _check_name(name: str) -> None:
    if not re.fullmatch(GALLERY_NAME, name):
        raise ValueError(
            f"gallery name {name!r} is not valid in a URL; use up to 64 letters, digits, dots, "
            "dashes and underscores, beginning with a letter or digit"
        )


def is_followed(text: str) -> bool:
    """Whether the location of a gallery is the URL of a published snapshot to follow."""
    return "://" in text and not text.startswith(MILVUS)


def _duration(value: object) -> object:
    """The seconds of a text such as 5s or 2m; other values unchanged."""
    seconds = seconds_of(value) if isinstance(value, str) else None
    return value if seconds is None else seconds


def _check_gallery(entry: str) -> None:
    name, text = split_named(entry)
    if name is not None:
        _check_name(name)
    if text.startswith(MILVUS):
        try:
            milvus_address(text)
        except InvalidParameterError as error:
            raise ValueError(str(error)) from None
    if is_followed(text) and urlsplit(text).password:
        raise ValueError(
            "the URL of a gallery contains a password, which logs would show; set it in the "
            "configuration or the variables of the storage client"
        )
    if Path(text) == Path():
        raise ValueError(f"gallery {entry!r} has no path; write NAME=PATH or PATH")


def _named_once(entries: tuple[str, ...]) -> tuple[str, ...]:
    names = []
    for entry in entries:
        name, text = split_named(entry)
        if not name or Path(text) == Path():
            raise ValueError(f"{entry!r} is not NAME=PATH; write a name and a path or URL")
        _check_name(name)
        names.append(name)
    if len(set(names)) < len(names):
        raise ValueError(f"a name occurs twice in {', '.join(names)}; name each once")
    return entries


def _check_weights(entry: str) -> None:
    if (name := split_named(entry)[0]) in START_WORDS:
        raise ValueError(f"training weights {name!r} is a reserved name; rename it")


def _check_origin(origin: str) -> None:
    if origin != ANY_HOST and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"{origin!r} is not a web origin; write for example https://shop.example, in "
            f"lowercase, without a path or trailing slash, or {ANY_HOST} for every site"
        )


def _check_image_origin(origin: str) -> None:
    if origin == ANY_HOST:
        raise ValueError(f"{ANY_HOST!r} would let a page load from any site; name each web origin")
    _check_origin(origin)


def _check_host(host: str) -> None:
    if not _HOST.fullmatch(host.lower()):
        raise ValueError(
            f"{host!r} is not a host; write a name or an address ([::1] in brackets) without a "
            f"port, or {ANY_HOST} for any host"
        )


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """A validator that calls `check`, which raises ValueError for invalid values."""

    def checked(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(checked)


def _each(check: Callable[[str], object]) -> AfterValidator:
    return _checked(lambda values: [check(value) for value in values])


_Split = BeforeValidator(_split)
_EmptyIsNone = BeforeValidator(lambda value: value or None)
Words = Annotated[tuple[str, ...], NoDecode, _Split]
NamedPaths = Annotated[Words, AfterValidator(_named_once)]
Duration = Annotated[float, BeforeValidator(_duration)]
Rate = Annotated[str, _checked(parse_rates)]
HttpAddress = Annotated[str, Field(pattern="^https?://")]
RedisUrl = Annotated[SecretStr, _checked(lambda url: check_url(url.get_secret_value()))]


def _search_threads() -> int:
    # More than cores, since a thread that searches or waits for the GIL does not use its core.
    return core_count() + 2


GROUPS = {
    "bundle": "Model and galleries",
    "host": "Network and access",
    "device": "Compute",
    "max_upload_bytes": "Size limits",
    "request_timeout_ms": "Timeouts",
    "feedback": "Feedback and jobs",
    "cache_max_bytes": "Cache and Redis",
    "milvus_token": "Milvus",
}
"""The first setting of each group, and the title of the group."""


class Settings(BaseSettings):
    """All settings. `kinlens-serve settings` and the documentation show the text of each."""

    model_config = SettingsConfigDict(
        env_prefix="KINLENS_",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    # Limits that nobody had to change.
    default_k: ClassVar[int] = 20
    max_k: ClassVar[int] = 10_000
    max_images: ClassVar[int] = 32  # in one query
    max_crops: ClassVar[int] = 16  # in one image
    max_batch_queries: ClassVar[int] = 64
    max_batch_bytes: ClassVar[int] = 64 * 2**20  # of a request with several images
    max_held_bytes: ClassVar[int] = 256 * 2**20  # of all request bodies in memory
    max_items_per_request: ClassVar[int] = MAX_ITEMS
    max_views: ClassVar[int] = 256  # images, crops, vectors and texts over all queries of a request
    max_megapixels: ClassVar[float] = 64.0  # of an image, read from its header
    max_side_px: ClassVar[int] = 16_384
    queue_size: ClassVar[int] = 64  # of each stage; reads of items and images have 16 times that
    decode_memory_mb: ClassVar[int] = 1_024  # address space of a worker, in addition to the model
    decode_timeout_ms: ClassVar[int] = 5_000  # of each image
    body_timeout_ms: ClassVar[int] = 30_000  # until the body of a request must be complete
    reload_interval_ms: ClassVar[int] = 1_000
    ready_timeout_ms: ClassVar[int] = 5_000  # of each readiness check
    pictures_timeout_ms: ClassVar[int] = 5_000  # of an image in an object store
    image_cache_bytes: ClassVar[int] = 2**30  # of images in object stores, on the disk
    recall_sample: ClassVar[int] = 1_000  # 1 of this many index searches is repeated exactly
    feedback_max_rows: ClassVar[int] = 100_000
    cache_max_entries: ClassVar[int] = 10_000
    redis_timeout_ms: ClassVar[int] = 50  # of one request, for rates and caches together
    milvus_timeout_ms: ClassVar[int] = 5_000  # of each request to Milvus

    bundle: Path | None = None
    """Folder of the model bundle."""
    galleries: Annotated[Words, _each(_check_gallery)] = ()
    """Galleries, separated by commas; the first is the default gallery. Each is `PATH`,
    `NAME=PATH`, `NAME=milvus://HOST:PORT/GALLERY`, or the URL of a published gallery such as
    `NAME=s3://bucket/shop`.
    """
    image_roots: NamedPaths = ()
    """`NAME=DIR`, separated by commas: folder or fsspec URL of a gallery's images if they have
    moved since the build.
    """
    pictures: NamedPaths = ()
    """`NAME=URL`, separated by commas: where images uploaded to a gallery on Milvus are stored; a
    folder or an fsspec URL such as `s3://bucket/shop` (extra `s3`).
    """
    follow: Duration = Field(
        default="5s", validate_default=True, ge=0.1, le=86_400, allow_inf_nan=False
    )
    """How often to check published galleries for a new snapshot, in seconds or as `250ms`, `5s`,
    `2m`.
    """
    replica_folder: Path | None = None
    """Folder for copies of published galleries; if unset, `STATE/replicas`."""
    state: Path | None = None
    """Folder for keys, the audit log, managed galleries, bundles and jobs."""
    no_match_prior: float = Field(default=DEFAULT_PRIOR, ge=0, lt=1, allow_inf_nan=False)
    """Share of searches for products that you do not sell. The probabilities of hits depend on it.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 picks a free one."""
    allowed_hosts: Annotated[Words, _each(_check_host)] = ()
    """Accepted `Host` names without ports, separated by commas; `*` accepts any. If unset: the
    local names and `KINLENS_HOST`; with a host of `0.0.0.0` or `::`, any.
    """
    trusted_proxies: Annotated[Words, _each(parse_network)] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Prefix` are
    trusted, separated by commas.
    """
    prefix: Annotated[str, AfterValidator(check_prefix)] = ""
    """Path below which a proxy serves the service, such as `/visual`. It is part of the links in
    answers. A trusted proxy that strips it may send it as `X-Forwarded-Prefix` instead; one on this
    machine may do so if neither this variable nor `KINLENS_TRUSTED_PROXIES` is set.
    """
    cors_origins: Annotated[Words, _each(_check_origin)] = ()
    """Web origins that may call from a browser, separated by commas."""
    anonymous_scopes: Annotated[tuple[Scope, ...], NoDecode, _Split] = ("search",)
    """Scopes of callers without a key, separated by commas; empty also closes search."""
    image_links: Literal["plain", "signed"] = "plain"
    """`signed`: image links in answers to an API key work without the key, for a day or until the
    key is revoked or the gallery is rebuilt, so that a page of a shop can show them. They count
    against the client address, so set `KINLENS_RATE_LIMIT_PER_ADDRESS`.
    """
    rate_limit_per_key: Rate = ""
    """Rate of each API key, such as `600/minute`. It counts images and queries, not requests; a key
    may have its own rate.
    """
    rate_limit_per_address: Rate = ""
    """The same limit for each client address without a key."""
    admin_link: bool = False
    """Show a link to `/admin` in the header of the search page."""
    product_url: Annotated[str, _checked(check_product_url)] = "url"
    """Where a result on the search page leads: the name of an attribute that is a link, or an
    address with attributes in braces, such as `https://shop.example/p/{product}`; empty: nowhere.
    """
    image_url: Annotated[str, _checked(check_image_url)] = ""
    """Where the image of an item without one of its own is: the name of an attribute with its
    address, or an address with attributes or the key in braces, such as
    `https://cdn.example/{key}.jpg`; empty: nowhere.
    """
    image_origins: Annotated[Words, _each(_check_image_origin)] = ()
    """Web origins from which the pages may show such images, separated by commas; that of an
    address in `KINLENS_IMAGE_URL` is one.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important log events that are written."""
    otlp_endpoint: Annotated[HttpAddress | None, _EmptyIsNone] = None
    """Collector for traces, such as `http://collector:4318` (extra `otel`); without it no traces.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model and of gallery search. The start is refused if the model would run
    elsewhere. Of several GPUs, the first in `CUDA_VISIBLE_DEVICES` is used.
    """
    index_device: Literal["cpu", "cuda"] | None = None
    """Device of gallery search; if unset, `KINLENS_DEVICE`. Each process has its own index copies
    on the GPU; an index that does not fit is searched on the CPU. Indexes leave 2,048 MiB of the
    GPU to the model, so set `KINLENS_GPU_MEMORY_MB` below that.
    """
    gpu_memory_mb: int = Field(default=0, ge=0)
    """With `cuda`: MiB of GPU memory that the model may use, so that indexes and other processes
    get the rest; 0: no limit.
    """
    precision: AskedPrecision = "fp32"
    """Precision of the model; `auto` is the fastest that is accurate on this machine."""
    engine: AskedEngine = "auto"
    """Engine of the model; `auto` is the faster one."""
    threads: int = Field(default=1, ge=0)
    """Threads of the model in each worker process; 0 lets the engine choose. With 1 the workers
    share the weights, which serves most searches per second. More shorten the latency of one client
    on an idle machine; each worker then loads the model itself, with onnxruntime.
    """
    search_threads: int = Field(default_factory=_search_threads, ge=1)
    """Searches processed at the same time. `cores` respects CPU affinity and container limits,
    rounded up. For N services on one host, cores / N + 1 is enough.
    """

    max_upload_bytes: int = Field(default=20 * 2**20, ge=1)
    """Bytes of an image; a request may be 64 KiB larger. Above 64 MiB, raise the limit of the proxy
    too.
    """

    request_timeout_ms: int = Field(default=10_000, ge=1)
    """Limit of a search after its body is read: for parsing, waiting and searching together, even
    if its gallery switches to another model meanwhile. For a change, parsing its body and making it
    have this limit each. Reading an image has it too.
    """
    shutdown_timeout_s: int = Field(default=5, ge=1)
    """Grace period for running requests at shutdown."""
    drain_s: float = Field(default=0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds after SIGTERM during which requests are still accepted while `/ready` returns 503.
    Use more than two check intervals of the load balancer, such as 15 for checks every 5 s.
    """

    feedback: FeedbackMode = "off"
    """`pairs`: accept feedback; `pictures`: also store the query images."""
    feedback_days: int = Field(default=180, ge=1)
    """Days that feedback is kept."""
    jobs: Literal["here", "elsewhere"] = "here"
    """`here`: the service runs jobs; `elsewhere`: `kinlens-serve work` does."""
    training_command: Annotated[str, Field(pattern=r"\S")] = "kinlens-train"
    """Command of a training job."""
    sync_folders: NamedPaths = ()
    """`NAME=PATH`, separated by commas: folders below the image root of a gallery, or CSV lists,
    that a sync over HTTP may name.
    """
    training_data: NamedPaths = ()
    """`NAME=DIR`, separated by commas: data sets that training jobs may name."""
    training_weights: Annotated[NamedPaths, _each(_check_weights)] = ()
    """`NAME=PATH`, separated by commas: weight files or bundles for `model.weights = NAME` of
    training jobs.
    """

    cache_max_bytes: int = Field(default=64 * 2**20, ge=0)
    """Bytes of the in-process cache; 0 turns it off."""
    redis_url: Annotated[RedisUrl | None, _EmptyIsNone] = None
    """Second cache level and shared rates: `redis://HOST:PORT/0`, `rediss://` or `unix://`."""

    milvus_token: SecretStr | None = None
    """Token of the Milvus servers: `USER:PASSWORD` or an API key."""
    milvus_consistency: Consistency = "Strong"
    """When a search sees a change."""

    @model_validator(mode="after")
    def _changes_are_not_open_to_the_network(self) -> Self:
        opened = [scope for scope in self.anonymous_scopes if scope != "search"]
        if opened and not self.is_local():
            raise ValueError(
                f"host = {self.host} with anonymous_scopes = {','.join(self.anonymous_scopes)} "
                f"gives every client the scope {' and '.join(opened)}; create a key with "
                "kinlens-serve keys create and set anonymous_scopes to search, or listen on "
                "127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _feedback_has_a_folder(self) -> Self:
        if self.feedback != "off" and self.state is None:
            raise ValueError(
                f"feedback = {self.feedback} needs a state folder; set --state DIR or "
                "KINLENS_STATE, or set KINLENS_FEEDBACK to off"
            )
        return self

    @model_validator(mode="after")
    def _copies_have_a_folder(self) -> Self:
        entries = [entry for entry in self.galleries if is_followed(split_named(entry)[1])]
        if entries and self.copies_in() is None:
            raise ValueError(
                f"gallery {entries[0]!r} is followed, but there is no folder for its copy; set "
                "--replica-folder DIR or KINLENS_REPLICA_FOLDER, or --state DIR"
            )
        return self

    def largest_body(self) -> int:
        """The largest limit of the body of any route in bytes."""
        return max(self.max_upload_bytes, self.max_batch_bytes) + FORM_BYTES

    def held_bytes(self) -> int:
        """The limit of all request bodies in memory; at least two of the largest fit."""
        return max(self.max_held_bytes, 2 * self.largest_body())

    def require_state(self, what: str) -> Path:
        """The state folder. Raises: StateMissingError that names `what` needs it."""
        if self.state is None:
            raise StateMissingError(
                f"{what} needs a state folder. Set it with --state DIR or KINLENS_STATE."
            )
        return self.state

    def copies_in(self) -> Path | None:
        """The folder for copies of followed galleries; None without one."""
        if self.replica_folder is None and self.state is not None:
            return self.state / REPLICAS
        return self.replica_folder

    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host.lower() == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def images_at_once(self) -> int:
        """Maximum number of images in one call of the model.

        On a CPU, workers embed each image on its own.
        """
        return _GPU_BATCH if self.device == "cuda" else _CPU_BATCH

    def searched_on(self) -> Literal["cpu", "cuda"]:
        """The device for searches; by default the device of the model."""
        return self.index_device or self.device

    def shown_origins(self) -> tuple[str, ...]:
        """The web origins from which pages may show images."""
        own = origin_of(self.image_url)
        return tuple(dict.fromkeys([*([own] if own else []), *self.image_origins]))

    def waiting_files(self) -> int:
        """Number of reads of files that may be queued: a page of results requests many images at
        once, and each is short.
        """
        return 16 * self.queue_size

    def image_limits(self) -> ImageLimits:
        """The limits of uploaded images."""
        return ImageLimits(self.max_upload_bytes, self.max_megapixels, self.max_side_px)

    def hosts(self) -> frozenset[str]:
        """The allowed Host headers; by default the local names and `host`."""
        if self.allowed_hosts:
            return frozenset(host.lower() for host in self.allowed_hosts)
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(self.host).is_unspecified:
                return frozenset({ANY_HOST})
        bound = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset({*_LOCAL_HOSTS, bound.lower()})
