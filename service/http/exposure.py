"""What a set of settings opens to others, said at the start."""

import os
import stat
from pathlib import Path

from service.settings import ANY_HOST, Settings


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
