"""`kinlens-serve check`: try each part of a service separately, and show what to do for faults."""

import asyncio
import contextlib
import json
import os
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

from kinlens.embedder.errors import GalleryError, KinlensError, StateError
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.gallery import gpu_memory, snapshot_at
from kinlens.service.access.keys import open_keys
from kinlens.service.cards import describe_use
from kinlens.service.commands import options
from kinlens.service.commands.settings import unknown_variables
from kinlens.service.encoding.sandbox import absences, holding
from kinlens.service.galleries.locations import Bundles, Gallery, Locations, open_gallery
from kinlens.service.http.server import listen
from kinlens.service.redis import SharedRedis
from kinlens.service.runtime import missing_image_roots
from kinlens.service.settings import ANY_HOST, Settings

P = ParamSpec("P")

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
    bundle, *decoder = _model(bundles)
    yield bundle
    yield from _galleries(settings, bundles)
    if settings.searched_on() == "cuda":
        yield _gpu()
    if settings.state is None:
        text = "There is no state folder for keys, galleries and jobs, so changes are refused. "
        yield Finding("state", "warning", f"{text}Set --state DIR to allow changes.")
    else:
        yield _tried("state", _state, settings.state)
    yield _tried("keys", _keys, settings)
    yield from decoder
    yield _redis(settings)
    yield _tried("port", _port, settings)
    yield from (Finding("exposure", "warning", text) for text in exposures(settings))


def _tried(subject: str, part: Callable[P, str], *args: P.args, **options: P.kwargs) -> Finding:
    try:
        return Finding(subject, "ok", part(*args, **options))
    except (KinlensError, OSError) as error:
        return _failed(subject, error)


def _failed(subject: str, error: Exception) -> Finding:
    return Finding(subject, "fault", " ".join(str(error).split()) or type(error).__name__)


def _model(bundles: Bundles) -> Iterator[Finding]:
    """Start the model and its workers, and report the active layers of their sandbox."""
    try:
        backend = bundles.open(bundles.primary())
    except (KinlensError, OSError) as error:
        yield _failed("bundle", error)
        return
    facts = backend.facts
    yield Finding(
        "bundle",
        "ok",
        f"{facts.bundle_id[:12]}, D = {facts.dim}, on {facts.provider} in {facts.mode.precision}: "
        f"{facts.precision_reason}",
    )
    with contextlib.closing(backend.workers) as workers:
        found, absent = f"sandbox: {holding(workers.layers)}", absences(workers.layers)
    missing = " ".join(f"No {name}: {absence}" for name, absence in absent.items())
    yield Finding(
        "decoder", "warning" if absent else "ok", f"{found}. {missing}" if absent else found
    )


def _galleries(settings: Settings, bundles: Bundles) -> Iterator[Finding]:
    try:
        locations = Locations(settings).list_galleries()
        if not locations and settings.state is None:
            raise GalleryError(
                "There is no gallery, and no state folder to create one in. Set --gallery or "
                "--state DIR."
            )
    except (KinlensError, OSError) as error:
        yield _failed("galleries", error)
        return
    for location in locations:
        subject = f"gallery {location.name}"
        try:
            on_cpu = settings.model_copy(update={"index_device": "cpu"})  # a GPU may be in use
            if location.follows is not None:
                snapshot = snapshot_at(location.follows)
                bundles.folder(snapshot.gallery.bundle_id)
                items = f"{snapshot.size:,} items of bundle {snapshot.gallery.bundle_id[:12]}"
                yield Finding(
                    subject,
                    "ok",
                    f"{items}, published at {snapshot.published_at}; it is copied at the start",
                )
                continue
            with contextlib.closing(open_gallery(location, on_cpu)) as gallery:
                bundles.folder(gallery.bundle_id)
                items = f"{gallery.size:,} items of bundle {gallery.bundle_id[:12]}"
                names = [facts.name for facts in gallery.attribute_facts()]
                use = describe_use(names, settings.product_url)
                yield Finding(subject, "ok", f"{items}{_index_text(gallery)}; on the page: {use}")
                if not location.managed:  # managed galleries store their own images
                    for text in missing_image_roots({location.name: gallery}):
                        yield Finding(subject, "warning", text)
        except (KinlensError, OSError) as error:
            yield _failed(subject, error)


def _index_text(gallery: Gallery) -> str:
    index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
    return "" if index is None else f"; index {index.kind}, {index.memory_mb:,.0f} MB of memory"


def _gpu() -> Finding:
    """Whether the GPU can be used for searches."""
    try:
        memory = gpu_memory()
    except KinlensError as error:
        return Finding("gpu", "warning", f"Galleries are searched on the CPU: {error}")
    text = f"{memory.free_mb:,.0f} of {memory.total_mb:,.0f} MB free for galleries and model"
    return Finding("gpu", "ok", text)


def _state(folder: Path) -> str:
    options.make_state(folder)
    return f"{folder} is writable"


def _keys(settings: Settings) -> str:
    store = open_keys(settings.state)
    active = 0 if store is None else store.active()
    closed = (
        "no API key is active, so changes and jobs are refused; create one with kinlens-serve keys "
        "create"
    )
    return f"{active} active" if active else closed


def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        return Finding("redis", "ok", "not used")
    timeout_s = max(1.0, settings.redis_timeout_ms / 1e3)
    redis = SharedRedis(settings.redis_url.get_secret_value(), timeout_s)
    fault = asyncio.run(redis.find_fault())
    return Finding("redis", "warning", fault) if fault else Finding("redis", "ok", "answers")


def _port(settings: Settings) -> str:
    listen(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def exposures(settings: Settings) -> list[str]:
    """A warning, with what to do, for each setting that exposes the service."""
    found = []
    is_public = not settings.is_local()
    if settings.cors_origins and ANY_HOST in settings.cors_origins:
        found.append(
            "Any web page may call this service from the browsers of its visitors. Name the "
            "origins in KINLENS_CORS_ORIGINS instead of *."
        )
    if is_public and settings.anonymous_scopes and not settings.rate_limit_per_address:
        found.append(
            f"Any client that can connect to {settings.host} may search without a rate limit. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 120/minute (it counts images and queries), "
            "or require keys with an empty KINLENS_ANONYMOUS_SCOPES."
        )
    if settings.image_links == "signed" and not settings.rate_limit_per_address:
        found.append(
            "Whoever has a signed image link may load it without a rate limit. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 600/minute; images count one each."
        )
    if is_public and ANY_HOST in settings.hosts():
        found.append(
            "Requests may name any host, so a foreign web page can point its own name here. List "
            "the hosts of this service in KINLENS_ALLOWED_HOSTS."
        )
    if settings.anonymous_scopes and (bound := _bound_keys(settings)):
        found.append(
            f"{bound} keys are bound to galleries, but clients without a key may "
            f"{' and '.join(settings.anonymous_scopes)} in all of them. Set "
            "KINLENS_ANONYMOUS_SCOPES to an empty text."
        )
    if settings.state is not None and _others_may_write(settings.state):
        found.append(
            f"Other users of this machine can write to {settings.state}, and so create keys. Run "
            f"chmod go-w {settings.state}."
        )
    return found


def _bound_keys(settings: Settings) -> int:
    """The number of active keys bound to galleries; 0 if unreadable, which `_keys` reports."""
    with contextlib.suppress(StateError):
        store, now = open_keys(settings.state), datetime.now(UTC)
        known = () if store is None else store.list()
        return sum(key.binding().is_bound and key.state(now) == "active" for key in known)
    return 0


def _others_may_write(folder: Path) -> bool:
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return os.name == "posix" and bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
