"""kinlens-index duplicates: find products that were photographed or listed twice."""

from typing import Annotated

import typer

from kinlens.commands.console import exit_if_empty, print_report
from kinlens.commands.options import JsonOption, StoreArgument
from kinlens.library import quality, stores

app = typer.Typer()


@app.command(epilog="Example: kinlens-index duplicates galleries/shop --json > near.json")
def duplicates(
    gallery: StoreArgument,
    min_score: Annotated[
        float | None,
        typer.Option(
            min=-1, max=1, help="Minimum cosine; by default 0.95, or higher if products look alike."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare all items with all, without the index.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find groups of items that probably show the same product. Exits with 1 if there are none."""
    with stores.in_folder(gallery, "cannot search for near-duplicates") as store:
        found = quality.duplicates(store, min_score=min_score, exact=exact, shown=True)
    print_report(found, json)
    exit_if_empty(not found.groups, f"No items of {found.name} are near-duplicates.")
