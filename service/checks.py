"""Try each part of a start separately, and find settings that expose the service."""

import asyncio
import contextlib
import stat
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from kinlens.embedder.errors import (
    InvalidParameterError,
    KinlensError,
    StateError,
    disk_fault,
)
from kinlens.indexer.galleries import gpu_memory, snapshot_at
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet
from kinlens.quality.guarantee import LEVEL
from kinlens.service.access.keys import open_keys
from kinlens.service.access.links import describe_link
from kinlens.service.encoding.model import Backend
from kinlens.service.encoding.sandbox import absences, holding
from kinlens.service.galleries.bundles import Bundles
from kinlens.service.galleries.locations import GalleryLocation, Locations, open_gallery
from kinlens.service.galleries.remote import ImageStores
from kinlens.service.http.server import listen
from kinlens.service.runtime import missing_image_roots, open_redis
from kinlens.service.settings import ANY_HOST, Settings


class Finding(NamedTuple):
    """The result for one part; a `fault` prevents a start. `text` ends with what to do."""

    subject: str
    verdict: Literal["ok", "warning", "fault"]
    text: str


def make_state(folder: Path | None) -> None:
    """Create the folder of --state, if set, and check that it is writable. Raises: StateError."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise StateError(f"state = {folder} is not a folder. Choose another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fault = disk_fault(error, folder, what="state =")
        cure = "" if "another folder" in fault else " Or choose another folder."
        raise StateError(f"{fault}{cure}") from error


def findings_of(settings: Settings) -> Iterator[Finding]:
    """Try every part of a start, and continue after faults."""
    bundles, state = Bundles(settings), settings.state
    backend: Backend | None = None

    def open_bundle() -> str:
        nonlocal backend
        backend = bundles.open(bundles.primary())
        facts = backend.facts
        on = f"on {facts.provider} in {facts.mode.precision}: {facts.precision_reason}"
        return f"{facts.bundle_id[:12]}, D = {facts.dim}, {on}"

    yield _tried("bundle", open_bundle)
    try:
        every = Locations(settings)
        locations, hidden = every.list_galleries(), every.hidden()
    except (KinlensError, OSError) as error:
        yield _failed("galleries", error)
    else:
        for location in locations:
            name = f"gallery {location.name}"
            yield _tried(name, partial(_gallery, location, settings, bundles))
            if location.name in hidden:
                yield Finding(name, "warning", hidden[location.name])
        if not locations and state is None:
            text = "There is no gallery, and no state folder to create one in. Set --gallery or "
            yield Finding("galleries", "fault", f"{text}--state DIR.")
    if settings.searched_on() == "cuda":
        yield _tried("gpu", _gpu)
    yield _tried("state", lambda: _state(state))
    yield _tried("keys", lambda: _keys(state))
    if backend is not None:
        yield _tried("decoder", partial(_decoder, backend))
    yield _tried("redis", lambda: _redis(settings))
    yield _tried("port", lambda: _port(settings))
    yield from (Finding("exposure", "warning", text) for text in exposures(settings))


def _tried(subject: str, part: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "ok", part())
    except UserWarning as warning:
        return Finding(subject, "warning", str(warning))
    except (KinlensError, OSError) as error:
        return _failed(subject, error)


def _failed(subject: str, error: Exception) -> Finding:
    return Finding(subject, "fault", " ".join(str(error).split()) or type(error).__name__)


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
        bundles.bundle(copy.gallery.bundle_id)
        items = f"{copy.size:,} items of bundle {copy.gallery.bundle_id[:12]}"
        return f"{items}, published at {copy.published_at}; it is copied at the start"
    on_cpu = settings.model_copy(update={"index_device": "cpu"})  # a GPU may be in use
    with contextlib.closing(open_gallery(location, on_cpu)) as gallery:
        bundles.bundle(gallery.bundle_id)
        text = f"{gallery.size:,} items of bundle {gallery.bundle_id[:12]}"
        index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
        if index is not None:
            text += f"; index {index.kind}, {index.memory_mb:,.0f} MB of memory"
        names = [facts.name for facts in gallery.attribute_facts()]
        text += f"; {describe_link(names, settings.product_url)}"
        # Managed galleries store their own images.
        missing = [] if location.managed else missing_image_roots({location.name: gallery})
        if fault := ImageStores(None, settings.pictures_timeout_ms / 1e3).check(gallery):
            missing = [f"The images at {gallery.image_root} cannot be read now: {fault}."]
        if isinstance(gallery, IndexedGallery) and (fault := _no_guarantee(gallery)):
            missing.append(fault)
    if missing:
        raise UserWarning(f"{text}. {' '.join(missing)}")
    return text


def _no_guarantee(gallery: IndexedGallery) -> str | None:
    """Why its labelled queries guarantee no answer; None without such queries."""
    if not GoldenSet(gallery.path).queries():
        return None
    try:
        Calibrator(gallery).guarantee().sets(LEVEL)
    except InvalidParameterError as error:
        return str(error)
    return None


def _gpu() -> str:
    try:
        memory = gpu_memory()
    except KinlensError as error:
        raise UserWarning(f"Galleries are searched on the CPU: {error}") from error
    return f"{memory.free_mb:,.0f} of {memory.total_mb:,.0f} MB free for galleries and model"


def _state(folder: Path | None) -> str:
    make_state(folder)
    if folder is None:
        raise UserWarning(
            "There is no state folder for keys, galleries and jobs, so changes are refused. Set "
            "--state DIR to allow changes."
        )
    return f"{folder} is writable"


def _keys(state: Path | None) -> str:
    if state is not None and (active := open_keys(state).active()):
        return f"{active} active"
    return (
        "no API key is active, so changes and jobs are refused; create one with kinlens-serve keys "
        "create"
    )


def _redis(settings: Settings) -> str:
    redis = open_redis(settings, at_least_s=1.0)
    if redis is None:
        return "not used"
    if fault := asyncio.run(redis.find_fault()):
        raise UserWarning(fault)
    return "answers"


def _port(settings: Settings) -> str:
    listen(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def exposures(settings: Settings) -> list[str]:
    """A warning, with what to do, for each setting that exposes the service."""
    is_public, is_unlimited = not settings.is_local(), not settings.rate_limit_per_address
    is_open, folder = bool(settings.anonymous_scopes), settings.state
    bound_keys, others_may_write = 0, False
    with contextlib.suppress(StateError):  # which is a fault of `keys`
        now = datetime.now(UTC)
        for key in () if folder is None else open_keys(folder).list():
            bound_keys += key.binding().is_bound and key.state(now) == "active"
    with contextlib.suppress(OSError):
        mode = 0 if folder is None else folder.stat().st_mode
        others_may_write = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
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
            is_open and bound_keys > 0,
            f"{bound_keys} keys are bound to galleries, but clients without a key may "
            f"{' and '.join(settings.anonymous_scopes)} in all of them. Set "
            "KINLENS_ANONYMOUS_SCOPES to an empty text.",
        ),
        (
            others_may_write,
            f"Other users of this machine can write to {folder}, and so create keys. Run "
            f"chmod go-w {folder}.",
        ),
    ]
    return [text for applies, text in exposed if applies]
