"""`kinlens-serve check`: would it start? Each part is tried by itself; each fault has a cure."""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

import typer
from pydantic import ValidationError
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinlens.embedder.errors import GalleryError, KinlensError, StateError
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.gallery import gpu_memory, snapshot_at
from kinlens.service.access.keys import open_keys
from kinlens.service.commands import options
from kinlens.service.encoding.decode_worker import known_image
from kinlens.service.encoding.decoders import create_decoder
from kinlens.service.encoding.sandbox import absences, holding
from kinlens.service.galleries.locations import Bundles, Gallery, Locations, open_gallery
from kinlens.service.http.server import listen
from kinlens.service.runtime import missing_image_roots
from kinlens.service.settings import ANY_HOST, Settings

P = ParamSpec("P")

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the service; a `fault` keeps it from starting. `text` ends with its cure."""

    subject: str
    verdict: Literal["ok", "warning", "fault"]
    text: str


@options.with_shared
def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    **given: Any,
) -> None:
    """Try everything that a start would, print what was found, and exit: 0 if it would start."""
    try:
        settings = options.read_settings(**given)
    except ValidationError as error:
        findings = [Finding("settings", "fault", options.faults(error))]
    else:
        findings = [Finding("settings", "ok", "every value is within its range"), *_look(settings)]
    starts = all(finding.verdict != "fault" for finding in findings)
    if as_json:
        shown = {"starts": starts, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        table = Table("Part", "Verdict", "Found", box=None, pad_edge=False)
        for found in findings:
            verdict = Text(found.verdict, style=_COLOURS[found.verdict])
            table.add_row(found.subject, verdict, Text(found.text))
        Console(soft_wrap=False).print(table)
    raise typer.Exit(0 if starts else 1)


def _look(settings: Settings) -> Iterator[Finding]:
    """Try everything that a start would, without serving; one fault does not hide the next."""
    bundles = Bundles(settings)
    yield _tried("bundle", _bundle, bundles)
    yield from _galleries(settings, bundles)
    if settings.searched_on() == "cuda":
        yield _gpu()
    if settings.state is None:
        text = "There is no folder for keys, galleries and jobs, so nothing can be changed. "
        yield Finding("state", "warning", f"{text}Give --state DIR if it should be.")
    else:
        yield _tried("state", _state, settings.state)
    yield _tried("keys", _keys, settings)
    yield _decoder(settings)
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


def _bundle(bundles: Bundles) -> str:
    embedder = bundles.open(bundles.primary())
    return (
        f"{embedder.bundle_id[:12]}, D = {embedder.dim}, on {embedder.provider} in "
        f"{embedder.mode.precision}: {embedder.precision_reason}"
    )


def _galleries(settings: Settings, bundles: Bundles) -> Iterator[Finding]:
    try:
        locations = Locations(settings).list_galleries()
        if not locations and settings.state is None:
            raise GalleryError(
                "No gallery was given, and there is no folder to make one in. Name one with "
                "--gallery, or give --state DIR."
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
                    f"{items}, published at {snapshot.published_at}; a start copies it",
                )
                continue
            with contextlib.closing(open_gallery(location, on_cpu)) as gallery:
                bundles.folder(gallery.bundle_id)
                items = f"{gallery.size:,} items of bundle {gallery.bundle_id[:12]}"
                yield Finding(subject, "ok", f"{items}{_place(gallery)}")
                if not location.managed:  # what the service makes shows pictures of its own
                    for text in missing_image_roots({location.name: gallery}):
                        yield Finding(subject, "warning", text)
        except (KinlensError, OSError) as error:
            yield _failed(subject, error)


def _place(gallery: Gallery) -> str:
    place = gallery.index_place() if isinstance(gallery, IndexedGallery) else None
    return "" if place is None else f"; index {place.kind}, {place.memory_mb:,.0f} MB of memory"


def _gpu() -> Finding:
    """Where galleries are to be searched."""
    try:
        memory = gpu_memory()
    except KinlensError as error:
        return Finding("gpu", "warning", f"Galleries are searched on the CPU: {error}")
    text = f"{memory.free_mb:,.0f} of {memory.total_mb:,.0f} MB are free for galleries and model"
    return Finding("gpu", "ok", text)


def _state(folder: Path) -> str:
    options.make_state(folder)
    return f"{folder} can be written"


def _keys(settings: Settings) -> str:
    store = open_keys(settings.state)
    active = 0 if store is None else store.active()
    closed = "no API key is active, so that changes and jobs are closed; kinlens-serve keys create"
    return f"{active} active" if active else closed


def _decoder(settings: Settings) -> Finding:
    """Decode an image as the service will, and see what its process can still reach."""
    timeout_s = settings.decode_timeout_ms / 1e3
    decoder = create_decoder(settings.decode_isolation, settings.decode_memory_mb, timeout_s)
    try:
        with contextlib.closing(decoder):
            decoder.start()
            decoder.render(known_image(), settings.image_limits())
    except KinlensError as error:
        return _failed("decoder", error)
    found, absent = f"sandbox: {holding(decoder.layers)}", absences(decoder.layers)
    if not absent:
        return Finding("decoder", "ok", found)
    missing = " ".join(f"No {name}: {absence}" for name, absence in absent.items())
    return Finding("decoder", "warning", f"{found}. {missing}")


def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        return Finding("redis", "ok", "not used")
    timeout_s = max(1.0, settings.redis_timeout_ms / 1e3)
    try:
        with Redis.from_url(
            settings.redis_url.get_secret_value(),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        ) as client:
            client.ping()
    except Exception as error:
        # Its text may hold the address with its password.
        text = f"Redis does not answer ({type(error).__name__}); the service works without it. "
        return Finding("redis", "warning", f"{text}Start it, or correct KINLENS_REDIS_URL.")
    return Finding("redis", "ok", "answers")


def _port(settings: Settings) -> str:
    listen(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def exposures(settings: Settings) -> list[str]:
    """One sentence, with its cure, for each setting that opens more than one may think."""
    found = []
    is_public = not settings.is_local()
    if settings.cors_origins and ANY_HOST in settings.cors_origins:
        found.append(
            "Any web page may call this service from the browsers of its visitors. Name the "
            "origins in KINLENS_CORS_ORIGINS instead of *."
        )
    has_rates = settings.rate_limit_per_key or settings.rate_limit_per_address
    if settings.workers > 1 and settings.redis_url is None and has_rates:
        found.append(
            f"Each of the {settings.workers} processes counts requests for itself, so that a "
            "caller gets up to as many times its rate. Set KINLENS_REDIS_URL to count together."
        )
    if is_public and settings.anonymous_scopes and not settings.rate_limit_per_address:
        found.append(
            f"Everybody who reaches {settings.host} may search, as often as they like. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 120/minute (it counts images and queries), "
            "or close the search with an empty KINLENS_ANONYMOUS_SCOPES."
        )
    if is_public and ANY_HOST in settings.hosts():
        found.append(
            "Requests may name any host, so that a foreign web page can point its own name here. "
            "Name the hosts of this service in KINLENS_ALLOWED_HOSTS."
        )
    if settings.anonymous_scopes and (bound := _bound_keys(settings)):
        found.append(
            f"{bound} keys are bound to galleries, but who sends no key may "
            f"{' and '.join(settings.anonymous_scopes)} in all of them. Set "
            "KINLENS_ANONYMOUS_SCOPES to nothing."
        )
    if settings.state is not None and _others_may_write(settings.state):
        found.append(
            f"Other users of this machine may write to {settings.state}, and so make keys. Take "
            f"that from them: chmod go-w {settings.state}."
        )
    return found


def _bound_keys(settings: Settings) -> int:
    """How many active keys are bound to galleries; 0 if they cannot be read, which `_keys` says."""
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
