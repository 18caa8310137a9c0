"""What agents send and get: images named in texts, and items as plain values with a link.

`kinlens-serve mcp` and `kinlens.langchain` share it. An agent may repeat text of strangers, so it
never chooses freely which files are read: a path must be below the folder that its user has named.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.request import url2pathname

from pydantic import BaseModel, Field

from kinlens.client import Client
from kinlens.errors import ArgumentError
from kinlens.models import HitModel, ItemModel
from kinlens.values import NAME, AttributeValue, filled, text_of

_SHOWN = 80


class FoundItem(BaseModel):
    """An item of a gallery, as an agent sees it."""

    key: Annotated[str, Field(description="The name of the item in its shop.")]
    attributes: dict[str, AttributeValue]
    link: Annotated[str | None, Field(description="The address of the product in its shop.")]
    score: Annotated[
        float | None, Field(description="Similarity to the query, from -1 to 1; more is better.")
    ] = None
    probability: Annotated[
        float | None, Field(description="Estimated chance that this is the right product.")
    ] = None


def read_image(text: str, folder: Path | None) -> bytes | Path:
    """The image that a text names: the content of a data URL, or a path below `folder`.

    Args:
        text: `data:image/jpeg;base64,...`; or a path, also as a `file:` URL.
        folder: None refuses all paths.

    Raises: ArgumentError if the text is neither, or the path leads out of the folder.
    """
    if text.startswith("data:"):
        head, _, content = text.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("it has no ;base64")
            return base64.b64decode(content, validate=True)
        except ValueError as error:
            raise ArgumentError(
                f"image = {text[:_SHOWN]!r} is not a data URL in base64: {error}. Send "
                "data:image/jpeg;base64, and the content of the file."
            ) from error
    if folder is None:
        raise ArgumentError(
            f"image = {text[:_SHOWN]!r} is a path, but no folder of images was named. Send a data "
            "URL, or name the folder at the start."
        )
    is_url = text.startswith("file:")
    name = url2pathname(text.removeprefix("file:").removeprefix("//")) if is_url else text
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, links in a circle
        raise ArgumentError(f"image = {text[:_SHOWN]!r} cannot be a path: {error}.") from error
    if not path.is_relative_to(root):
        raise ArgumentError(
            f"image = {text[:_SHOWN]!r} is outside of the folder of images. Use a path below it."
        )
    if not path.is_file():  # a named pipe would never end
        raise ArgumentError(f"image = {text[:_SHOWN]!r} is not a file in the folder of images.")
    return path


def found_items(
    client: Client, gallery: str, items: Sequence[HitModel | ItemModel]
) -> list[FoundItem]:
    """Hits or items of a gallery with their links to the shop."""
    listed = client.galleries().galleries if items else []
    template = next((known.product_url for known in listed if known.name == gallery), "")
    return [
        FoundItem(
            key=item.key,
            attributes=item.attributes,
            link=shop_link(template, item.attributes),
            score=getattr(item, "score", None),
            probability=getattr(item, "probability", None),
        )
        for item in items
    ]


def shop_link(template: str, attributes: Mapping[str, AttributeValue]) -> str | None:
    """The address of an item in its shop; None if an attribute that it needs is missing.

    Args:
        template: `product_url` of a gallery: the name of an attribute, or an address with names of
            attributes in braces.

    An address with another scheme than http or https is None: it could be a script.
    """
    texts = {name: text_of(value).strip() for name, value in attributes.items()}
    link = filled(template, texts) if NAME.search(template) else texts.get(template)
    return link if link and re.match(r"(?i)https?://|/", link) else None
