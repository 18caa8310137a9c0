"""The links in answers: to this service, below its path prefix and signed for images; and to other
sites, from the attributes of an item.

A proxy may serve the service below a path such as /visual. `Edge` sets the prefix for a request. It
removes only the prefix of the settings from a path: that of a header could be of a client, and lead
around the rules of a proxy. Everything that writes an address asks `public_path`.

An `<img>` sends no API key, so its link names the key of the answer:

    answer to a key ─► sign ─► ?signed_by=ID&expires=TIME&signature=MAC ─► check ─► the same key

The MAC is made with the digest of the secret of the key, so all replicas that share the keys check
each other's links, and a revoked or rotated key ends its links. Whoever knows the key could sign as
well, which gives them nothing: a link shows an image only as long as the key itself would.
"""

import hmac
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote, unquote

from kinlens.embedder.errors import KeyMissingError
from kinlens.service.access.keys import Key
from kinlens.values import NAME, AttributeValue, filled, text_of

VERSION_DIGITS = 12
"""Hex digits of a generation in links."""

VERSION_PATTERN = rf"^[0-9a-f]{{{VERSION_DIGITS},64}}$"
VERSION_TEXT = "The gallery generation that the item id is from; default: the served one."

IMAGE_OF_ITEM = "/items/{item_id}/image"
"""The end of the route of these links."""

_HOUR_S = 3_600
_VALID_HOURS = 24
_MAC_BYTES = 16
_KNOWN_GALLERIES = 4_096
# After the attributes of a hit: no attribute has an object as its value, so none is matched.
_IN_RESULTS = re.compile(
    rb'(?<=},"image":")/galleries/([^/"\\]+)/items/(\d+)/image\?(?:generation|version)=([0-9a-f]+)(?=")'
)
SIGNER: ContextVar[Key | None] = ContextVar("kinlens_signer", default=None)
"""The key that signs the image links of a request."""

_OWN = frozenset((
    "access", "admin", "audit", "boxes", "docs", "feedback", "galleries", "jobs", "keys", "live",
    "metrics", "openapi.json", "ready", "search", "startup", "ui", "v1",
))  # fmt: skip
"""The first segments of all routes: whether /ui/search begins with a prefix would be unknown."""
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_MOST_CHARACTERS = 200
_ORIGIN = re.compile(r"(?i)(https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?)/")
_EXAMPLE = "https://shop.example/p/{product}"
PREFIX: ContextVar[str] = ContextVar("kinlens_prefix", default="")
"""The path prefix of a request and of the pool calls that it starts."""


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


def public_path(path: str) -> str:
    """The path of a route as the client sees it."""
    return PREFIX.get() + path


@lru_cache(_KNOWN_GALLERIES)
def link_parts(gallery: str, generation: str) -> tuple[str, str]:
    """What precedes and follows the id in links to the images of a gallery, as answers are cached:
    without prefix and signature.
    """
    end = f"/image?generation={generation[:VERSION_DIGITS]}"
    return f"/galleries/{quote(gallery, safe='')}/items/", end


def image_link(gallery: str, item_id: int, generation: str) -> str:
    """The link to the image of an item, for the caller of the current request."""
    start, end = link_parts(gallery, generation)
    link, key = public_path(f"{start}{item_id}{end}"), SIGNER.get()
    if key is None:
        return link
    # Whole hours, so that a browser finds the images of an earlier answer in its cache.
    expires = (int(time.time()) // _HOUR_S + 1 + _VALID_HOURS) * _HOUR_S
    parts = gallery, str(item_id), generation[:VERSION_DIGITS], str(expires)
    return f"{link}&signed_by={key.id}&expires={expires}&signature={_mac(key.digest, *parts)}"


def with_links(results: bytes) -> bytes:
    """Encoded results, which callers share in the cache, with the links of a caller who has a
    signer or a prefix.
    """

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


def check_product_url(text: str) -> None:
    """Raises: ValueError if it is neither the name of an attribute nor a template of an address."""
    if not NAME.search(text):
        if re.search(r"[{}/:]", text):
            raise ValueError(
                f"{text!r} names no attribute; write the name of an attribute that is a link, such "
                f"as url, or an address with attributes in braces, such as {_EXAMPLE}"
            )
    elif re.search(r"[{}\s]", NAME.sub("", text)) or not re.match(r"(?i)https?://[^/]|/", text):
        raise ValueError(
            f"{text!r} is not the address of a product; begin with https://, http:// or / and put "
            f"each attribute in braces, such as {_EXAMPLE}"
        )


def check_image_url(text: str) -> None:
    """Raises: ValueError if it is neither empty, nor the name of an attribute, nor a template of a
    web address.
    """
    check_product_url(text)
    if NAME.search(text) and origin_of(text) is None:
        raise ValueError(
            f"{text!r} is not the address of an image; begin with https:// or http:// and a host, "
            "such as https://cdn.example/{key}.jpg"
        )


def image_address(image_url: str, key: str, attributes: Mapping[str, AttributeValue]) -> str | None:
    """The address of the image of an item elsewhere: in the attribute `image_url`, or the template
    `image_url` with the key and attributes of the item. None if it has no such address.
    """
    if not image_url:
        return None
    if not NAME.search(image_url):
        address = attributes.get(image_url)
        is_address = isinstance(address, str) and re.match(r"(?i)https?://[^/\s]", address)
        return str(address) if is_address else None
    texts = {"key": key} | {name: text_of(value) for name, value in attributes.items()}
    return filled(image_url, texts, safe="/")


def origin_of(image_url: str) -> str | None:
    """The web origin of a template; None for an attribute, whose addresses can be of any."""
    found = _ORIGIN.match(image_url)
    return None if found is None else found[1].lower()


def describe_link(names: Collection[str], product_url: str) -> str:
    """Whether results lead to the shop, if items have the attributes `names`."""
    if not product_url:
        return "KINLENS_PRODUCT_URL is empty: results do not lead to your shop"
    needed = NAME.findall(product_url) or [product_url]
    if missing := [name for name in needed if name not in names]:
        return f"no attribute {' or '.join(missing)}: results do not lead to your shop"
    return f"link to your shop from {product_url}"
