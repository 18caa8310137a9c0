"""Signed image links: an `<img>` sends no API key, so the link names the key of its answer.

    answer to a key ─► sign ─► ?signed_by=ID&expires=TIME&signature=MAC ─► check ─► the same key

The MAC is made with the digest of the secret of the key, so all replicas that share the keys check
each other's links, and a revoked or rotated key ends its links. Whoever knows the key could sign as
well, which gives them nothing: a link shows an image only as long as the key itself would.
"""

import hmac
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from kinlens.embedder.errors import KeyMissingError
from kinlens.service.access.keys import Key
from kinlens.service.access.prefix import public_path
from kinlens.service.galleries.locations import VERSION_DIGITS

IMAGE_OF_ITEM = "/items/{item_id}/image"
"""The end of the route of these links."""

_HOUR_S = 3_600
_VALID_HOURS = 24
_MAC_BYTES = 16
# After the attributes of a hit: no attribute has an object as its value, so none is matched.
_IN_RESULTS = re.compile(
    rb'(?<=},"image":")/galleries/([^/"\\]+)/items/(\d+)/image\?(?:generation|version)=([0-9a-f]+)(?=")'
)
_SIGNER: ContextVar[Key | None] = ContextVar("kinlens_signer", default=None)


def set_signer(key: Key | None) -> None:
    """Sign the image links of the rest of this request for `key`, or none."""
    _SIGNER.set(key)


def plain_link(gallery: str, item_id: int, generation: str) -> str:
    """The link to the image of an item, as answers are cached: without prefix and signature."""
    generation = generation[:VERSION_DIGITS]
    return f"/galleries/{quote(gallery, safe='')}/items/{item_id}/image?generation={generation}"


def image_link(gallery: str, item_id: int, generation: str) -> str:
    """The link to the image of an item, for the caller of the current request."""
    link, key = public_path(plain_link(gallery, item_id, generation)), _SIGNER.get()
    if key is None:
        return link
    # Whole hours, so that a browser finds the images of an earlier answer in its cache.
    expires = (int(time.time()) // _HOUR_S + 1 + _VALID_HOURS) * _HOUR_S
    parts = gallery, str(item_id), generation[:VERSION_DIGITS], str(expires)
    return f"{link}&signed_by={key.id}&expires={expires}&signature={_mac(key.digest, *parts)}"


def with_links(results: bytes) -> bytes:
    """Encoded results, which callers share in the cache, with the links of this caller."""
    if _SIGNER.get() is None and not public_path(""):
        return results

    def link(match: re.Match[bytes]) -> bytes:
        gallery, item_id, generation = (group.decode() for group in match.groups())
        return image_link(unquote(gallery), int(item_id), generation).encode()

    return _IN_RESULTS.sub(link, results)


def check(key: Key | None, item: Mapping[str, str], query: Mapping[str, str]) -> Key:
    """The active `key` that signed the link with this `query` to an image of `item`.

    Raises: KeyMissingError for an expired link, one that was changed, or without its key.
    """
    expires, now = query.get("expires", ""), datetime.now(UTC)
    if not re.fullmatch(r"[0-9]{1,12}", expires) or int(expires) <= now.timestamp():
        raise KeyMissingError("This image link has expired. Search again for a new one.")
    if key is not None:
        generation = query.get("generation", query.get("version", ""))
        sent = query.get("signature", "").encode()
        digests = [key.digest, *([key.old.digest] if key.old and key.old_valid_until(now) else ())]
        for digest in digests:
            mac = _mac(digest, item["name"], item["item_id"], generation, expires)
            if hmac.compare_digest(mac.encode(), sent):
                return key
    raise KeyMissingError(
        "The signature of this image link is wrong, or its API key was revoked. Use the links of "
        "an answer unchanged; only size may be added."
    )


def _mac(digest: str, *parts: str) -> str:
    return hmac.digest(digest.encode(), "\n".join(parts).encode(), "sha256")[:_MAC_BYTES].hex()
