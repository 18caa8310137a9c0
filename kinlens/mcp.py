"""A running service as tools of the Model Context Protocol, for agents: `kinlens-serve mcp`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from kinlens import __version__
from kinlens.agents import FoundItem, found_items, read_image
from kinlens.client import Client
from kinlens.errors import ClientError
from kinlens.models import SearchAnswer

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

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
