"""The images that a command works on: a folder, a CSV list or a data set split."""

from pathlib import Path
from typing import Annotated

import typer

from indexer.catalog.attributes import Schema
from indexer.ingest.sources import Source, csv_source, folder_source, split_source

ImagesArgument = Annotated[
    Path | None,
    typer.Argument(metavar="IMAGES", help="Folder of images; paths in a list start from it."),
]
CsvOption = Annotated[
    Path | None,
    typer.Option(help="CSV list: columns key, path and attributes, such as colour,price:number."),
]
SplitOption = Annotated[
    Path | None, typer.Option(help="Data set list: lines of relative/path.jpg, class, ...")
]


def new_source(images: Path | None, csv: Path | None, split: Path | None) -> Source:
    """What a new gallery is built from. Raises: SourceError; wrong usage."""
    _refuse_both(csv, split)
    if csv:
        return csv_source(csv, images)
    if split:
        return split_source(split, images)
    if images is None:
        raise typer.BadParameter("Give the folder IMAGES, or a list with --csv or --split.")
    return folder_source(images)


def further_source(
    images: Path | None, csv: Path | None, split: Path | None, root: Path, kinds: Schema
) -> Source:
    """What is added to a gallery whose images are below `root`: there, all paths start from it.

    Raises: SourceError; wrong usage.
    """
    _refuse_both(csv, split)
    if images is not None and (csv or split):
        raise typer.BadParameter(
            "Give IMAGES or a list, not both: paths of a list start from the gallery's image root."
        )
    if images is None and not (csv or split):
        raise typer.BadParameter("Give the folder IMAGES, or a list with --csv or --split.")
    if csv:
        return csv_source(csv, root, kinds)
    if split:
        return split_source(split, root)
    return folder_source(images or root, root)


def _refuse_both(csv: Path | None, split: Path | None) -> None:
    if csv and split:
        raise typer.BadParameter("Give --csv or --split, not both.")
