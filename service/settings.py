"""Settings of the service, read once from KINLENS_* variables and command line options."""

import contextlib
import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import AskedEngine, AskedPrecision
from kinlens.embedder.preprocess import ImageLimits
from kinlens.indexer.calibration import DEFAULT_PRIOR
from kinlens.indexer.types import GALLERY_NAME, MILVUS, Consistency, milvus_address, seconds_of
from kinlens.models import FeedbackMode
from kinlens.service.access.keys import Scope
from kinlens.service.access.rates import parse_network, parse_rates
from kinlens.service.redis import check_url

ANY_HOST = "*"
REPLICAS = "replicas"
"""The subfolder of the state folder with copies of followed galleries."""

MAX_HITS = 100_000
"""Maximum number of hits of one request, over all its queries."""

_FORM_BYTES = 64 * 2**10  # a body in addition to its images
_MOST_VIEWS = 256
START_WORDS = ("imagenet", "none", "current")
"""Initial weights that need no setting: published, random, and the gallery's own model."""

_CPU_BATCH = 2
_GPU_BATCH = 32
_MOST_ALONE = 8  # more threads for the image of one search gain little
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"\*|\[[0-9a-f:.]+\]|[a-z0-9._-]+")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def split_named(entry: str) -> tuple[str | None, str]:
    """Split `NAME=TEXT` or `TEXT`."""
    name, separator, text = entry.partition("=")
    return (name, text) if separator else (None, entry)


def split_gallery(entry: str) -> tuple[str | None, Path]:
    """Split `NAME=PATH` or `PATH`; without a name the gallery's own name is used."""
    name, text = split_named(entry)
    return name, Path(text)


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
        name, path = split_gallery(entry)
        if not name or path == Path():
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


def search_threads_of(processes: int) -> int:
    """The default number of search threads per process: more than cores, since a thread that
    searches or waits for the GIL does not use its core.
    """
    return core_count() // processes + (2 if processes == 1 else 1)


class Settings(BaseSettings):
    """All settings; `docs/operations.md` describes each."""

    model_config = SettingsConfigDict(
        env_prefix="KINLENS_", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    bundle: Path | None = None
    galleries: Annotated[Words, _each(_check_gallery)] = ()
    image_roots: NamedPaths = ()
    pictures: NamedPaths = ()
    follow: Duration = Field(
        default="5s", validate_default=True, ge=0.1, le=86_400, allow_inf_nan=False
    )
    replica_folder: Path | None = None
    state: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allowed_hosts: Annotated[Words, _each(_check_host)] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    device: Literal["cpu", "cuda"] = "cpu"
    index_device: Literal["cpu", "cuda"] | None = None
    allow_cpu_fallback: bool = False
    gpu_memory_mb: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=0)
    precision: AskedPrecision = "fp32"
    engine: AskedEngine = "auto"
    workers: int = Field(default=1, ge=1, le=64)

    anonymous_scopes: Annotated[tuple[Scope, ...], NoDecode, _Split] = ("search",)
    rate_limit_per_key: Rate = ""
    rate_limit_per_address: Rate = ""
    trusted_proxies: Annotated[Words, _each(parse_network)] = ()
    cors_origins: Annotated[Words, _each(_check_origin)] = ()

    max_upload_bytes: int = Field(default=20 * 2**20, ge=1)
    max_megapixels: float = Field(default=64.0, gt=0, le=178)
    max_side_px: int = Field(default=16384, ge=1)
    default_k: int = Field(default=20, ge=1)
    max_k: int = Field(default=10_000, ge=1, le=10_000)
    max_batch_bytes: int = Field(default=64 * 2**20, ge=1)
    max_held_bytes: int = Field(default=256 * 2**20, ge=1)
    max_images: int = Field(default=32, ge=1)
    max_crops: int = Field(default=16, ge=1)
    max_batch_queries: int = Field(default=64, ge=1)
    max_items_per_request: int = Field(default=256, ge=1)

    batch_size: int = Field(default=0, ge=0)
    queue_size: int = Field(default=64, ge=1)
    search_threads: int = Field(default_factory=lambda: search_threads_of(1), ge=1)
    decode_isolation: bool = True
    decode_memory_mb: int = Field(default=1024, ge=256)
    decode_timeout_ms: int = Field(default=5_000, ge=1)
    recall_sample: int = Field(default=1_000, ge=0)
    no_match_prior: float = Field(default=DEFAULT_PRIOR, ge=0, lt=1, allow_inf_nan=False)
    reload_interval_ms: int = Field(default=1_000, ge=10)

    admin_link: bool = False

    feedback: FeedbackMode = "off"
    feedback_max_rows: int = Field(default=100_000, ge=1)
    feedback_days: int = Field(default=180, ge=1)

    jobs: Literal["here", "elsewhere"] = "here"
    training_command: Annotated[str, Field(pattern=r"\S")] = "kinlens-train"
    training_data: NamedPaths = ()
    training_weights: Annotated[NamedPaths, _each(_check_weights)] = ()
    otlp_endpoint: Annotated[HttpAddress | None, _EmptyIsNone] = None

    request_timeout_ms: int = Field(default=10_000, ge=1)
    body_timeout_ms: int = Field(default=30_000, ge=1)
    ready_timeout_ms: int = Field(default=5_000, ge=1)
    shutdown_timeout_s: int = Field(default=5, ge=1)
    drain_s: float = Field(default=0, ge=0, le=3600, allow_inf_nan=False)

    cache_max_bytes: int = Field(default=64 * 2**20, ge=0)
    cache_max_entries: int = Field(default=10_000, ge=0)
    redis_url: Annotated[RedisUrl | None, _EmptyIsNone] = None
    redis_timeout_ms: int = Field(default=50, ge=1)
    redis_retry_ms: int = Field(default=1_000, ge=1)
    redis_ttl_s: int = Field(default=86_400, ge=1)
    redis_max_value_bytes: int = Field(default=2**20, ge=1)
    redis_connections: int = Field(default=16, ge=1)

    milvus_token: SecretStr | None = None
    milvus_timeout_ms: int = Field(default=5_000, ge=1)
    milvus_consistency: Consistency = "Strong"
    pictures_timeout_ms: int = Field(default=5_000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _processes_share_the_cores(cls, given: dict[str, Any]) -> dict[str, Any]:
        workers = str(given.get("workers", 1))
        if not workers.isdecimal() or int(workers) < 1:
            return given  # the field itself refuses it
        return {"search_threads": search_threads_of(int(workers))} | given

    @model_validator(mode="after")
    def _default_k_fits(self) -> Self:
        if self.default_k > self.max_k:
            raise ValueError(
                f"default_k = {self.default_k} is above max_k = {self.max_k}; lower default_k or "
                "raise max_k"
            )
        return self

    @model_validator(mode="after")
    def _largest_body_fits(self) -> Self:
        largest = max(self.max_upload_bytes, self.max_batch_bytes) + _FORM_BYTES
        if self.max_held_bytes < largest:
            raise ValueError(
                f"max_held_bytes = {self.max_held_bytes:,} is below the {largest:,} bytes of the "
                "largest body, which would always be refused; raise KINLENS_MAX_HELD_BYTES, or "
                "lower KINLENS_MAX_UPLOAD_BYTES and KINLENS_MAX_BATCH_BYTES"
            )
        return self

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

    @property
    def max_views(self) -> int:
        """Maximum number of images and crops over all queries of a request."""
        return max(_MOST_VIEWS, self.max_images, self.max_batch_queries)

    def images_at_once(self) -> int:
        """Maximum number of images in one call of the model.

        On a CPU, batches do not reduce the cost per image, and large ones exceed the CPU caches.
        """
        return self.batch_size or (_GPU_BATCH if self.device == "cuda" else _CPU_BATCH)

    def searched_on(self) -> Literal["cpu", "cuda"]:
        """The device for searches; by default the device of the model."""
        return self.index_device or self.device

    def single_threads(self) -> int:
        """Number of model threads for a search while no other runs; 0: no extra threads.

        With several processes it is 0, since a process cannot see the load of the others.
        """
        is_wanted = self.device == "cpu" and self.threads == self.workers == 1
        return min(core_count(), _MOST_ALONE) if is_wanted else 0

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
