"""`kinlens-serve check`: try each part of a service separately, and show what to do for faults."""

import asyncio
import contextlib
import json
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

import structlog
import typer
from pydantic import ValidationError

from kinlens.embedder.errors import KinlensError, StateError
from kinlens.indexer.galleries import gpu_memory, snapshot_at
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.service.access.keys import open_keys
from kinlens.service.cards import describe_use
from kinlens.service.commands import options
from kinlens.service.commands.settings import unknown_variables
from kinlens.service.encoding.model import Backend
from kinlens.service.encoding.sandbox import absences, holding
from kinlens.service.galleries.bundles import Bundles
from kinlens.service.galleries.locations import GalleryLocation, Locations, open_gallery
from kinlens.service.http.server import listen
from kinlens.service.redis import SharedRedis
from kinlens.service.runtime import missing_image_roots
from kinlens.service.settings import ANY_HOST, Settings

P = ParamSpec("P")
_REDIS_S = 1.0
_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one part; a `fault` prevents a start. `text` ends with what to do."""

    subject: str
    verdict: Literal["ok", "warning", "fault"]
    text: str


@options.with_shared
def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **given: Any,
) -> None:
    """Check whether the service would start, without serving. Exits with 0 if it would, else 1."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        settings = options.read_settings(**given)
    except ValidationError as error:
        findings = [Finding("settings", "fault", options.faults(error))]
    else:
        findings = [Finding("settings", "ok", "all values are valid"), *_findings(settings)]
    findings += [Finding("environment", "warning", text) for text in unknown_variables()]
    starts = all(finding.verdict != "fault" for finding in findings)
    if as_json:
        shown = {"starts": starts, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        for each in findings:
            typer.secho(f"{each.verdict:8} ", fg=_COLOURS[each.verdict], nl=False)
            typer.echo(f"{each.subject}: {each.text}")
    raise typer.Exit(0 if starts else 1)


def _findings(settings: Settings) -> Iterator[Finding]:
    """Try every part of a start, and continue after faults."""
    bundles = Bundles(settings)
    opened: list[Backend] = []
    yield _tried("bundle", _bundle, bundles, opened)
    try:
        every = Locations(settings)
        locations, hidden = every.list_galleries(), every.hidden()
    except (KinlensError, OSError) as error:
        yield _failed("galleries", error)
    else:
        for location in locations:
            yield _tried(f"gallery {location.name}", _gallery, location, settings, bundles)
            if location.name in hidden:
                yield Finding(f"gallery {location.name}", "warning", hidden[location.name])
        if not locations and settings.state is None:
            text = "There is no gallery, and no state folder to create one in. Set --gallery or "
            yield Finding("galleries", "fault", f"{text}--state DIR.")
    if settings.searched_on() == "cuda":
        yield _tried("gpu", _gpu)
    yield _tried("state", _state, settings.state)
    yield _tried("keys", _keys, settings.state)
    for backend in opened:
        yield _tried("decoder", _decoder, backend)
    yield _tried("redis", _redis, settings)
    yield _tried("port", _port, settings)
    yield from (Finding("exposure", "warning", text) for text in exposures(settings))


def _tried(subject: str, part: Callable[P, str], *args: P.args, **options: P.kwargs) -> Finding:
    try:
        return Finding(subject, "ok", part(*args, **options))
    except UserWarning as warning:
        return Finding(subject, "warning", str(warning))
    except (KinlensError, OSError) as error:
        return _failed(subject, error)


def _failed(subject: str, error: Exception) -> Finding:
    return Finding(subject, "fault", " ".join(str(error).split()) or type(error).__name__)


def _bundle(bundles: Bundles, opened: list[Backend]) -> str:
    backend = bundles.open(bundles.primary())
    opened.append(backend)
    facts = backend.facts
    on = f"on {facts.provider} in {facts.mode.precision}: {facts.precision_reason}"
    return f"{facts.bundle_id[:12]}, D = {facts.dim}, {on}"


def _decoder(backend: Backend) -> str:
    """The layers of the sandbox of its workers, which are ended."""
    with contextlib.closing(backend.workers) as workers:
        text, absent = f"sandbox: {holding(workers.layers)}", absences(workers.layers)
    if absent:
        missing = " ".join(f"No {name}: {absence}" for name, absence in absent.items())
        raise UserWarning(f"{text}. {missing}")
    return text


def _gallery(location: GalleryLocation, settings: Settings, bundles: Bundles) -> str:
    if location.follows is not None:
        copy = snapshot_at(location.follows)
        bundles.folder(copy.gallery.bundle_id)
        items = f"{copy.size:,} items of bundle {copy.gallery.bundle_id[:12]}"
        return f"{items}, published at {copy.published_at}; it is copied at the start"
    on_cpu = settings.model_copy(update={"index_device": "cpu"})  # a GPU may be in use
    with contextlib.closing(open_gallery(location, on_cpu)) as gallery:
        bundles.folder(gallery.bundle_id)
        text = f"{gallery.size:,} items of bundle {gallery.bundle_id[:12]}"
        index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
        if index is not None:
            text += f"; index {index.kind}, {index.memory_mb:,.0f} MB of memory"
        names = [facts.name for facts in gallery.attribute_facts()]
        text += f"; on the page: {describe_use(names, settings.product_url)}"
        # Managed galleries store their own images.
        missing = [] if location.managed else missing_image_roots({location.name: gallery})
    if missing:
        raise UserWarning(f"{text}. {missing[0]}")
    return text


def _gpu() -> str:
    try:
        memory = gpu_memory()
    except KinlensError as error:
        raise UserWarning(f"Galleries are searched on the CPU: {error}") from error
    return f"{memory.free_mb:,.0f} of {memory.total_mb:,.0f} MB free for galleries and model"


def _state(folder: Path | None) -> str:
    options.make_state(folder)
    if folder is None:
        raise UserWarning(
            "There is no state folder for keys, galleries and jobs, so changes are refused. Set "
            "--state DIR to allow changes."
        )
    return f"{folder} is writable"


def _keys(state: Path | None) -> str:
    store = open_keys(state)
    if store is not None and (active := store.active()):
        return f"{active} active"
    return (
        "no API key is active, so changes and jobs are refused; create one with kinlens-serve keys "
        "create"
    )


def _redis(settings: Settings) -> str:
    if settings.redis_url is None:
        return "not used"
    redis = SharedRedis(settings.redis_url.get_secret_value(), _REDIS_S)
    if fault := asyncio.run(redis.find_fault()):
        raise UserWarning(fault)
    return "answers"


def _port(settings: Settings) -> str:
    listen(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def exposures(settings: Settings) -> list[str]:
    """A warning, with what to do, for each setting that exposes the service."""
    is_public, is_unlimited = not settings.is_local(), not settings.rate_limit_per_address
    is_open = bool(settings.anonymous_scopes)
    bound_keys = _bound_keys(settings) if is_open else 0
    exposed = [
        (
            ANY_HOST in settings.cors_origins,
            "Any web page may call this service from the browsers of its visitors. Name the "
            "origins in KINLENS_CORS_ORIGINS instead of *.",
        ),
        (
            is_public and is_open and is_unlimited,
            f"Any client that can connect to {settings.host} may search without a rate limit. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 120/minute (it counts images and queries), "
            "or require keys with an empty KINLENS_ANONYMOUS_SCOPES.",
        ),
        (
            settings.image_links == "signed" and is_unlimited,
            "Whoever has a signed image link may load it without a rate limit. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 600/minute; images count one each.",
        ),
        (
            is_public and ANY_HOST in settings.hosts(),
            "Requests may name any host, so a foreign web page can point its own name here. List "
            "the hosts of this service in KINLENS_ALLOWED_HOSTS.",
        ),
        (
            bound_keys > 0,
            f"{bound_keys} keys are bound to galleries, but clients without a key may "
            f"{' and '.join(settings.anonymous_scopes)} in all of them. Set "
            "KINLENS_ANONYMOUS_SCOPES to an empty text.",
        ),
        (
            _others_may_write(settings.state),
            f"Other users of this machine can write to {settings.state}, and so create keys. Run "
            f"chmod go-w {settings.state}.",
        ),
    ]
    return [text for applies, text in exposed if applies]


def _bound_keys(settings: Settings) -> int:
    """The number of active keys bound to galleries; 0 if unreadable, which is a fault of `keys`."""
    with contextlib.suppress(StateError):
        store, now = open_keys(settings.state), datetime.now(UTC)
        known = () if store is None else store.list()
        return sum(key.binding().is_bound and key.state(now) == "active" for key in known)
    return 0


def _others_may_write(folder: Path | None) -> bool:
    with contextlib.suppress(OSError):
        return folder is not None and bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return False
