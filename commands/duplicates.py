"""kinlens-index duplicates: find products that were photographed or listed twice."""

from typing import Annotated

import typer

from kinlens.commands import stores
from kinlens.commands.console import (
    SHOWN,
    exit_if_empty,
    print_report,
    progress,
)
from kinlens.commands.options import JsonOption, StoreArgument
from kinlens.indexer.checks.duplicates import (
    clusters_of,
    find_duplicates,
    members_of,
)

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
    as_json: JsonOption = False,
) -> None:
    """Find groups of items that probably show the same product. Exits with 1 if there are none."""
    with stores.in_folder(gallery, "cannot search for near-duplicates") as store:
        with progress(store.size, "Comparing") as advance:
            near = find_duplicates(store, min_score=min_score, exact=exact, on_progress=advance)
        groups, clusters = list(members_of(store, near.groups)), list(clusters_of(store, near))
        segment = None if exact else store.facts().segment
        report = {
            "name": store.name,
            "version": store.version,
            "size": store.size,
            "min_score": near.min_score,
            "floor": near.floor,
            "recall": 1.0 if segment is None else segment.recall,
            "items": sum(map(len, groups)),
            "warning": near.warning,  # why no item should be removed because of its group
            "crowds": clusters,  # clusters that are too large for copies of a product
            "groups": groups,
        }
    first = [group[:SHOWN] for group in groups[:SHOWN]]
    lines = ["  ".join(f"{one.item.key} {one.score:.4f}" for one in group) for group in first]
    text = (
        f"Groups of near-duplicates: {len(groups):,}, with {report['items']:,} of the "
        f"{report['size']:,} items of {report['name']}; cosine at least {near.min_score:.5f}; "
        f"recall {report['recall']:.3f}."
    )
    warnings = [] if near.warning is None else [near.warning]
    warnings += [f"{one.detail} The first one: {one.examples[0].key}." for one in clusters]
    print_report(report, as_json, *lines, text, *map("Warning: {}".format, warnings))
    exit_if_empty(not groups, f"No items of {report['name']} are near-duplicates.")
