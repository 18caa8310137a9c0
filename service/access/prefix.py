"""The path prefix of the service, for the addresses in its answers.

A proxy may serve the service below a path such as /visual. `Edge` sets the prefix for a request. It
removes only the prefix of the settings from a path: that of a header could be of a client, and lead
around the rules of a proxy. Everything that writes an address asks `public_path`.
"""

import re
from collections.abc import Iterable
from contextvars import ContextVar

_OWN = frozenset((
    "access", "admin", "audit", "docs", "feedback", "galleries", "jobs", "keys", "live", "metrics",
    "openapi.json", "ready", "search", "startup", "ui",
))  # fmt: skip
"""The first segments of all routes: whether /ui/search begins with a prefix would be unknown."""
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_MOST_CHARACTERS = 200
_OF_REQUEST: ContextVar[str] = ContextVar("kinlens_prefix", default="")


def check_prefix(text: str) -> str:
    """A path prefix that no route begins with. Raises: ValueError."""
    prefix = _checked(text)
    if prefix and prefix.split("/")[1] in _OWN:
        raise ValueError(
            f"{text!r} begins like a route of the service; choose another path, such as /visual"
        )
    return prefix


def _checked(text: str) -> str:
    """A path prefix without its trailing slash. Raises: ValueError."""
    prefix = text.rstrip("/")
    is_path = _PREFIX.fullmatch(prefix) and not {".", ".."} & set(prefix.split("/"))
    if prefix and (not is_path or len(prefix) > _MOST_CHARACTERS):
        raise ValueError(
            f"{text[:_MOST_CHARACTERS]!r} is not a path prefix; write a path such as /visual, of "
            f"letters, digits and . _ ~ - with up to {_MOST_CHARACTERS} characters"
        )
    return prefix


def forwarded_prefix(headers: Iterable[str]) -> str | None:
    """The prefix of X-Forwarded-Prefix headers; None without a valid one.

    Each proxy of a chain appends its own, and the first is the outermost.
    """
    try:
        parts = [_checked(part.strip()) for text in headers for part in text.split(",")]
    except ValueError:
        return None
    return "".join(parts) if parts else None


def set_prefix(prefix: str) -> None:
    """Set the prefix for the rest of this request, including the pool calls that it starts."""
    _OF_REQUEST.set(prefix)


def public_path(path: str) -> str:
    """The path of a route as the client sees it."""
    return _OF_REQUEST.get() + path
