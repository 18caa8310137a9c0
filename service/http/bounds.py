"""How many bytes a body may have, by where it goes and what it says it is."""

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

FORM_BYTES = 64 * 2**10
"""Room beside the images for the other parts of a form and its boundaries."""

_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # read where it holds up all other requests
_SEARCH = "/search"
_MANY = re.compile(r"/search/batch|/galleries/[^/]+/items")
_KEYS = re.compile(r"/galleries/[^/]+/items(/delete)?")
_MANY_METHODS = frozenset({"POST", "PUT"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """`image_bytes` for a search with a file, `batch_bytes` for what may hold several images.

    Both get 64 KiB more for what is around the images. A list of keys or changes has at most
    1 MiB, everything else 16 KiB.
    """

    image_bytes: int
    batch_bytes: int

    def of(self, scope: Scope) -> int:
        """The limit in bytes for the body of a request."""
        path = scope["path"]
        if scope["method"] in _MANY_METHODS and _MANY.fullmatch(path):
            return self.batch_bytes + FORM_BYTES
        if scope["method"] == "POST" and path == _SEARCH:
            image = not _is_json(scope)
            return (self.image_bytes if image else self.batch_bytes) + FORM_BYTES
        plain = _KEYS_BYTES if _KEYS.fullmatch(path) else _PLAIN_BYTES
        return min(plain, self.image_bytes + FORM_BYTES)

    @property
    def largest(self) -> int:
        """The limit of the widest route."""
        return max(self.image_bytes, self.batch_bytes) + FORM_BYTES

    def places(self, max_bytes: int) -> int:
        """How many single uploads a body of up to `max_bytes` counts as."""
        return max(1, -(-max_bytes // (self.image_bytes + FORM_BYTES)))


def _is_json(scope: Scope) -> bool:
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
