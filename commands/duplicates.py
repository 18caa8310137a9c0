"""kinlens-index duplicates: find products that were photographed or listed twice."""

from dataclasses import dataclass
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
from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.checks.duplicates import (
    Cluster,
    Floor,
    Member,
    clusters_of,
    find_duplicates,
    members_of,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import MILVUS

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class DuplicatesReport:
    """Groups of near-duplicates, the largest first, with `items` items in all.

    Attributes:
        crowds: clusters that are too large for copies of a product; their items are in no group.
        warning: why no item should be removed on the basis of its group; None if it may.
        recall: of the index; 1 if all items were compared.
    """

    name: str
    version: str
    size: int
    min_score: float
    floor: Floor
    recall: float
    items: int
    warning: str | None
    crowds: list[Cluster]
    groups: list[list[Member]]

    def text(self) -> str:
        """The report as a sentence."""
        return (
            f"Groups of near-duplicates: {len(self.groups):,}, with {self.items:,} of the "
            f"{self.size:,} items of {self.name}; cosine at least {self.min_score:.5f}; "
            f"recall {self.recall:.3f}."
        )

    def warnings(self) -> list[str]:
        """The reasons for caution before an item is removed."""
        about = [f"{one.detail} The first one: {one.examples[0].key}." for one in self.crowds]
        return ([self.warning] if self.warning else []) + about


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
    if gallery.startswith(MILVUS):
        raise InvalidParameterError(
            f"Near-duplicates can be found only in galleries in a folder; {gallery} is on "
            f"Milvus. Copy it: kinlens-index import {gallery} --out FOLDER."
        )
    with stores.opened(gallery) as store:
        assert isinstance(store, Gallery)
        with progress(store.size, "Comparing") as advance:
            near = find_duplicates(
                store,
                min_score=min_score,
                exact=exact,
                on_progress=advance,
            )
            found = list(members_of(store, near.groups))
            segment = None if exact else store.facts().segment
            report = DuplicatesReport(
                name=store.name,
                version=store.version,
                size=store.size,
                min_score=near.min_score,
                floor=near.floor,
                recall=1.0 if segment is None else segment.recall,
                items=sum(map(len, found)),
                warning=near.warning,
                crowds=list(clusters_of(store, near)),
                groups=found,
            )
    first = [group[:SHOWN] for group in report.groups[:SHOWN]]
    lines = ["  ".join(f"{one.item.key} {one.score:.4f}" for one in group) for group in first]
    print_report(
        report, as_json, *lines, report.text(), *map("Warning: {}".format, report.warnings())
    )
    exit_if_empty(not report.groups, f"No items of {report.name} are near-duplicates.")
