"""What a service would find at its start: each part tried by itself, with a cure for each fault."""

import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from embedder.errors import KinlensError
from service.access.keys import open_keys
from service.galleries.locations import Bundles, GalleryLocation, Locations, open_gallery
from service.http.server import listen
from service.runtime import missing_image_roots
from service.settings import ANY_HOST, Settings

Verdict = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the service; a `fault` keeps it from starting, `cure` says what to do."""

    subject: str
    verdict: Verdict
    text: str
    cure: str = ""


def look(settings: Settings) -> Iterator[Finding]:
    """Try everything that a start would, without serving; one fault does not hide the next."""
    bundles = Bundles(settings)
    yield _bundle(bundles)
    yield from _galleries(settings, bundles)
    yield _state(settings.state)
    yield _keys(settings)
    yield asyncio.run(_redis(settings))
    yield _port(settings)
    for sentence in exposures(settings):
        text, cure = _split(sentence)
        yield Finding("exposure", "warning", text, cure)


def failed(subject: str, error: Exception) -> Finding:
    """A fault from an error whose message ends with what to do."""
    text, cure = _split(" ".join(str(error).split()) or type(error).__name__)
    return Finding(subject, "fault", text, cure)


def _bundle(bundles: Bundles) -> Finding:
    try:
        embedder = bundles.open(bundles.primary())
    except (KinlensError, OSError) as error:
        return failed("bundle", error)
    return Finding(
        "bundle",
        "ok",
        f"{embedder.bundle_id[:12]}, D = {embedder.dim}, on {embedder.provider} in "
        f"{embedder.precision}: {embedder.precision_reason}",
    )


def _galleries(settings: Settings, bundles: Bundles) -> Iterator[Finding]:
    try:
        places = Locations(settings).list_galleries()
    except (KinlensError, OSError) as error:
        yield failed("galleries", error)
        return
    if not places and settings.state is None:
        yield Finding(
            "galleries",
            "fault",
            "No gallery was given, and there is no folder to make one in.",
            "Name one with --gallery, or give --state DIR.",
        )
    for place in places:
        yield from _gallery(place, bundles, settings)


def _gallery(place: GalleryLocation, bundles: Bundles, settings: Settings) -> Iterator[Finding]:
    subject = f"gallery {place.name}"
    try:
        gallery = open_gallery(place, settings)
    except (KinlensError, OSError) as error:
        yield failed(subject, error)
        return
    try:
        bundles.folder(gallery.bundle_id)
        yield Finding(subject, "ok", f"{gallery.size:,} items of bundle {gallery.bundle_id[:12]}")
        # What the service makes shows pictures that were uploaded.
        for sentence in [] if place.managed else missing_image_roots({place.name: gallery}):
            text, cure = _split(sentence)
            yield Finding(subject, "warning", text, cure)
    except KinlensError as error:
        yield failed(subject, error)
    finally:
        gallery.close()


def _state(folder: Path | None) -> Finding:
    if folder is None:
        return Finding(
            "state",
            "warning",
            "There is no folder for keys, galleries and jobs, so that nothing can be changed here.",
            "Give --state DIR if it should be.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".check-", dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})."
        return Finding("state", "fault", text, "Let this user write there, or name another folder.")
    return Finding("state", "ok", f"{folder} can be written")


def _keys(settings: Settings) -> Finding:
    try:
        store = open_keys(settings.state)
        active = 0 if store is None else store.active()
    except KinlensError as error:
        return failed("keys", error)
    if active == 0:
        text = "No API key is active, so that changes and jobs are closed."
        return Finding("keys", "ok", text, "Make one with kinlens-serve keys create.")
    return Finding("keys", "ok", f"{active} active")


async def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        return Finding("redis", "ok", "not used")
    timeout_s = max(1.0, settings.redis_timeout_ms / 1e3)
    client = Redis.from_url(
        settings.redis_url.get_secret_value(),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
    except Exception as error:
        # Its text may hold the address with its password.
        text = f"Redis does not answer ({type(error).__name__}); the service works without it."
        return Finding("redis", "warning", text, "Start it, or mend KINLENS_REDIS_URL.")
    finally:
        await client.aclose()
    return Finding("redis", "ok", "answers")


def _port(settings: Settings) -> Finding:
    try:
        listen(settings.host, settings.port).close()
    except OSError as error:
        return failed("port", error)
    return Finding("port", "ok", f"{settings.host}:{settings.port} is free")


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and the last sentence, which says what to do."""
    text, separator, cure = message.rstrip().removesuffix(".").rpartition(". ")
    return (f"{text}.", f"{cure}.") if separator else (message, "")


def exposures(settings: Settings) -> list[str]:
    """One sentence, with its cure, for each setting that opens more than one may think."""
    found = []
    if settings.cors_origins and ANY_HOST in settings.cors_origins:
        found.append(
            "Any web page may call this service from the browsers of its visitors. Name the "
            "origins in KINLENS_CORS_ORIGINS instead of *."
        )
    if settings.workers > 1 and settings.redis_url is None and _has_rates(settings):
        found.append(
            f"Each of the {settings.workers} processes counts requests for itself, so that a "
            "caller gets up to as many times its rate. Set KINLENS_REDIS_URL to count together."
        )
    if not settings.is_local():
        found += _public(settings)
    if settings.state is not None and _others_may_write(settings.state):
        found.append(
            f"Other users of this machine may write to {settings.state}, and so make keys. Take "
            f"that from them: chmod go-w {settings.state}."
        )
    return found


def _public(settings: Settings) -> list[str]:
    found = []
    if settings.anonymous_scopes and not settings.rate_limit_per_address:
        found.append(
            f"Everybody who reaches {settings.host} may search, as often as they like. Set "
            "KINLENS_RATE_LIMIT_PER_ADDRESS, such as 120/minute, or close the search with an "
            "empty KINLENS_ANONYMOUS_SCOPES."
        )
    if ANY_HOST in settings.hosts():
        found.append(
            "Requests may name any host, so that a foreign web page can point its own name here. "
            "Name the hosts of this service in KINLENS_ALLOWED_HOSTS."
        )
    return found


def _has_rates(settings: Settings) -> bool:
    return bool(settings.rate_limit_per_key or settings.rate_limit_per_address)


def _others_may_write(folder: Path) -> bool:
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return os.name == "posix" and bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
