"""`kinlens-serve mcp`: the tools of an agent that searches a running service."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.agents import build_server
from kinlens.client import Client
from kinlens.embedder.programs.console import command, refuse
from kinlens.environment import missing_package
from kinlens.service.commands import options


@command(options.app, "kinlens-serve mcp --url http://127.0.0.1:8000 --images photos")
def mcp(
    url: Annotated[
        str, typer.Option(help="Address of a running service.")
    ] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None,
        typer.Option(
            envvar="KINLENS_API_KEY",
            help="API key with the scope search. Other users of a machine can read options, but "
            "not the environment.",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(file_okay=False, exists=True, help="Folder of images an agent may read."),
    ] = None,
) -> None:
    """Offer the searches of a running service to agents, over the Model Context Protocol on stdio.

    An agent, which starts this command, has the tools search, similar and item, and can change
    nothing.
    """
    try:
        with Client(url, key=key) as client:
            build_server(client, images).run("stdio")
    except ModuleNotFoundError as missing:
        refuse(missing_package("kinlens-serve mcp", missing, "mcp"))
