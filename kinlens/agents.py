"""What agents send and get, which `kinlens.langchain` shares, and the tools of `kinlens-serve mcp`.

Agents name images in texts, and get items as plain values with a link. An agent may repeat text of
strangers, so it never chooses freely which files are read: a path must be below the folder that its
user has named.
"""

import base64
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.request import url2pathname

from pydantic import BaseModel, Field

from kinlens import __version__
from kinlens.client import Client
from kinlens.errors import ArgumentError, ClientError
from kinlens.models import HitModel, ItemModel, SearchAnswer
from kinlens.values import NAME, AttributeValue, filled, text_of

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_SHOWN = 80
_INSTRUCTIONS = (
    "Finds products of a shop by photo or words. Results are ordered by similarity; the most "
    "similar item need not be the right one, so look at its probability."
)

Gallery = Annotated[
    str | None, Field(description="Name of the gallery; omit it for the default one.")
]
Count = Annotated[int, Field(ge=1, le=50, description="Maximum number of items.")]
Filter = Annotated[
    str | None,
    Field(description='Only items with these attributes, such as: price < 60 and colour = "red".'),
]


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


class Found(BaseModel):
    """Items, best first."""

    gallery: str
    items: list[FoundItem]
    no_match_probability: Annotated[
        float | None, Field(description="Estimated chance that none of the items is right.")
    ] = None


def build_server(client: Client, images: Path | None) -> "MCPServer":
    """The server of the tools, which sends requests when a tool is called.

    Raises: ModuleNotFoundError without the extra `mcp`.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

    server = MCPServer(
        "kinlens", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING"
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        """Errors of the service and of arguments are for the agent; others are faults."""
        try:
            yield
        except ClientError as error:
            raise ToolError(str(error)) from error

    def found(answer: SearchAnswer) -> Found:
        return Found(
            gallery=answer.gallery,
            items=found_items(client, answer.gallery, answer.hits),
            no_match_probability=answer.no_match_probability,
        )

    def named(gallery: str | None) -> str:
        known = [gallery] if gallery else [each.name for each in client.galleries().galleries]
        if not known:
            raise ToolError("The service has no gallery that this key can see.")
        return known[0]

    @server.tool(annotations=reads)
    def search(
        text: Annotated[
            str | None, Field(description="Words that describe the product; not all galleries.")
        ] = None,
        image: Annotated[
            str | None,
            Field(description="A data URL (data:image/jpeg;base64,...), or a path, if allowed."),
        ] = None,
        gallery: Gallery = None,
        k: Count = 5,
        filter: Filter = None,
    ) -> Found:
        """Find the items most similar to an image, to words, or to an image changed by words."""
        with explained():
            views = [] if image is None else [read_image(image, images)]
            texts = None if text is None else [text]
            return found(client.search(views, texts=texts, gallery=gallery, k=k, filter=filter))

    @server.tool(annotations=reads)
    def similar(key: str, gallery: Gallery = None, k: Count = 5, filter: Filter = None) -> Found:
        """Find the items most similar to an item, which is named by its key."""
        with explained():
            return found(client.similar(named(gallery), key, k=k, filter=filter))

    @server.tool(annotations=reads)
    def item(key: str, gallery: Gallery = None) -> FoundItem:
        """Read the attributes of an item, and its address in the shop."""
        with explained():
            name = named(gallery)
            return found_items(client, name, [client.item(name, key)])[0]

    return server
