"""kinlens-index duplicates: one product photographed or listed twice, with a report of pictures."""

import base64
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from embedder.errors import GalleryWriteError, InvalidParameterError, KinlensError
from embedder.preprocess import render_jpeg
from indexer.checks.duplicates import (
    Crowd,
    Floor,
    Member,
    crowds_of,
    find_duplicates,
    members_of,
)
from indexer.commands import stores
from indexer.commands.console import SHOWN, errors_shown, print_report, progress, shown
from indexer.commands.options import ImageRootOption, JsonOption, StoreArgument
from indexer.gallery import Gallery
from indexer.pictures import ANY_SIZE, item_bytes
from indexer.types import MILVUS, Progress

app = typer.Typer()

_KINDS = (".html", ".csv", ".json")
_SIDE_PX = 160
_MOST_PICTURES = 24  # of a group; the others are counted
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Near-duplicates</title>
<style>
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
body { max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid #8886; padding-bottom: 1rem; }
section div { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { width: 10rem; margin: 0; font-size: .8125rem; overflow-wrap: anywhere; }
img, figure p { width: 10rem; height: 10rem; margin: 0; object-fit: contain; background: #8882; }
</style>
"""


@dataclass(frozen=True, slots=True)
class DuplicatesReport:
    """Groups of near-duplicates, the largest first, with `items` in all.

    `crowds` are groups too large to be copies of a product; no group has their items. `warning`
    says why no item may be removed because of its group. `recall` is that of the index that was
    asked, 1 where all items were compared.
    """

    name: str
    version: str
    size: int
    min_score: float
    floor: Floor
    recall: float
    items: int
    warning: str | None
    crowds: list[Crowd]
    groups: list[list[Member]]

    def text(self) -> str:
        """The figures in a sentence."""
        return (
            f"Groups of near-duplicates: {len(self.groups):,}, with {self.items:,} of the "
            f"{self.size:,} items of {self.name}; cosine at least {self.min_score:.5f}; "
            f"recall {self.recall:.3f}."
        )

    def warnings(self) -> list[str]:
        """What to know before an item is removed."""
        about = [f"{one.detail} The first one: {one.examples[0].key}." for one in self.crowds]
        return ([self.warning] if self.warning else []) + about


@app.command(epilog="Example: kinlens-index duplicates galleries/shop --out near.html")
def duplicates(
    gallery: StoreArgument,
    min_score: Annotated[
        float | None,
        typer.Option(min=-1, max=1, help="Least cosine [0.95, or more where products are alike]."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare all with all.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--out", help="Report: .html with pictures, or .csv or .json."),
    ] = None,
    pictures: Annotated[
        int, typer.Option(min=0, help="Groups that .html shows; the other kinds have all.")
    ] = 200,
    image_root: ImageRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find items that show one product: photographed twice, or listed twice."""
    if file is not None and file.suffix.lower() not in _KINDS:
        raise typer.BadParameter(f"--out {file} must end with {', '.join(_KINDS)}.")
    with errors_shown():
        if gallery.startswith(MILVUS):
            raise InvalidParameterError(
                f"Near-duplicates are looked for in galleries in a folder; {gallery} is on Milvus. "
                f"Copy it: kinlens-index import {gallery} --out FOLDER."
            )
        with stores.opened(gallery, image_root=image_root) as store:
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
                    crowds=list(crowds_of(store, near)),
                    groups=found,
                )
                if file is not None:
                    drawn = min(len(found), pictures)
                    _write(file, report, store, drawn, advance.then("Drawing", drawn))
    first = [group[:SHOWN] for group in report.groups[:SHOWN]]
    lines = ["  ".join(f"{one.item.key} {one.score:.4f}" for one in group) for group in first]
    print_report(
        report, as_json, *lines, report.text(), *map("Warning: {}".format, report.warnings())
    )


def _write(
    file: Path, report: DuplicatesReport, store: Gallery, drawn: int, on_progress: Progress
) -> None:
    kind = file.suffix.lower()
    try:
        with file.open("w", encoding="utf-8", newline="") as stream:
            if kind == ".json":
                stream.write(TypeAdapter(DuplicatesReport).dump_json(report, indent=2).decode())
            elif kind == ".csv":
                csv.writer(stream).writerows(_rows(report))
            else:
                stream.writelines(_page(report, store, drawn, on_progress))
    except OSError as error:
        raise GalleryWriteError(
            f"Cannot write {file}: {error.strerror or error}. Check its folder and the free space."
        ) from error


def _rows(report: DuplicatesReport) -> Iterator[Sequence[object]]:
    yield "group", "id", "key", "score", "same_content", "newest", "attributes"
    for number, group in enumerate(report.groups, 1):
        for one in group:
            item, attributes = one.item, json.dumps(dict(one.item.attributes), ensure_ascii=False)
            judged = one.score, one.same_content, one.newest
            yield number, item.id, item.key, *judged, attributes


def _page(
    report: DuplicatesReport, store: Gallery, drawn: int, on_progress: Progress
) -> Iterator[str]:
    yield f"{_HEAD}<h1>Near-duplicates</h1><p>{escape(report.text())}</p>\n"
    for warning in report.warnings():
        yield f"<p><b>Warning:</b> {escape(warning)}</p>\n"
    if drawn < len(report.groups):
        yield f"<p>The largest {drawn:,} groups are shown; a .csv or .json has all.</p>\n"
    for group in report.groups[:drawn]:
        product = report.floor.attribute or ""
        named = {one.item.attributes.get(product) for one in group} - {None}
        several = f" with different values of {product}" if len(named) > 1 else ""
        yield f"<section><h2>{len(group):,} items{escape(several)}</h2><div>\n"
        for one in group[:_MOST_PICTURES]:
            yield f"<figure>{_picture(store, one)}<figcaption>{_caption(one)}</figcaption>"
            yield "</figure>\n"
        if len(group) > _MOST_PICTURES:
            yield f"<p>and {len(group) - _MOST_PICTURES:,} more</p>"
        yield "</div></section>\n"
        on_progress(1)


def _picture(store: Gallery, member: Member) -> str:
    try:
        data = render_jpeg(item_bytes(store.image_root, member.item), ANY_SIZE, _SIDE_PX)
    except KinlensError:
        return "<p>no picture</p>"
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">'


def _caption(one: Member) -> str:
    said = [f"cosine {one.score:.4f}"]
    said += ["newest"] * one.newest + ["same file as the first"] * one.same_content
    about = escape(shown(one.item.attributes))
    return f"<b>{escape(one.item.key)}</b><br>{'; '.join(said)}<br>{about}"
