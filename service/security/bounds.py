"""How many bytes a body may have, by where it goes and what it says it is."""

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

FORM_BYTES = 64 * 2**10
"""Room beside the images for the other parts of a form and its boundaries."""

_PLAIN_BYTES = 2**20
_SEARCH = "/search"
_MANY = re.compile(r"/search/batch|/galleries/[^/]+/items")
_MANY_METHODS = frozenset({"POST", "PUT"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """`image_bytes` for a search with a file, `batch_bytes` for what may hold several images.

    Both get 64 KiB more for what is around the images. Everything else has at most 1 MiB.
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
        return min(_PLAIN_BYTES, self.image_bytes + FORM_BYTES)

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
