"""Addresses on other sites that the attributes of an item make: of its image, and in the shop."""

import re
from collections.abc import Collection, Mapping

from kinlens.values import NAME, AttributeValue, filled, text_of

_ORIGIN = re.compile(r"(?i)(https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?)/")
_EXAMPLE = "https://shop.example/p/{product}"


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
