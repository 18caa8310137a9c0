"""kinlens-index golden add, list, remove, run, runs: measure a gallery with labelled queries."""

import contextlib
import csv as csv_text
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands import stores
from kinlens.commands.console import exit_if_empty, print_report, progress
from kinlens.commands.options import GalleryArgument, JsonOption, ModelOptions, grouped
from kinlens.embedder.errors import ImageError, InvalidParameterError, SourceError
from kinlens.embedder.preprocess import ImageLimits, decode
from kinlens.embedder.session import fitted
from kinlens.embedder.sources.names import printable
from kinlens.golden import GoldenQueries, GoldenRuns, Label
from kinlens.indexer.attributes import parse_value
from kinlens.indexer.galleries import current_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import read_image
from kinlens.indexer.ingest.tables import read_table
from kinlens.indexer.types import VectorStore
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet, NewQuery
from kinlens.quality.judging import GoldenResults, embedded, labelled, threshold_of

app = typer.Typer(no_args_is_help=True)

_KEYS = "keys"


@app.command(
    epilog="Example: kinlens-index golden add galleries/shop --query photo.jpg --keys A17,A18"
)
def add(
    gallery: GalleryArgument,
    query: Annotated[
        Path | None, typer.Option(help="Query image, such as a photo of a customer.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(help="Keys of the right items, with commas; quote a key with a comma."),
    ] = None,
    attribute: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE", help="All items with this attribute value are right."),
    ] = None,
    no_match: Annotated[
        bool, typer.Option("--no-match", help="No item of the gallery is right.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="CSV list: column image, and keys or an attribute. Empty cells mean no match."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add a query image with its right items; an existing image gets the new label.

    Paths in a list are relative to its folder. All queries of a list are added, or none.
    """
    if bool(query) == bool(csv):
        raise typer.BadParameter("Pass either --query with its label, or --csv.")
    if bool(keys) + bool(attribute) + no_match != (query is not None):
        raise typer.BadParameter(
            "Pass one of --keys, --attribute and --no-match with --query, and none with --csv."
        )
    with contextlib.closing(Gallery.open(gallery, load_index=False)) as store:
        if csv:
            new = _listed(csv, store)
        else:
            file = (query or Path()).resolve()
            new = [_new(file.parent, file.name, _label(keys, attribute, store))]
        made = GoldenSet(gallery).add(new, store)
        count = len(GoldenSet(gallery).queries())
    text = f"{len(made):,} queries labelled; {count:,} in all."
    print_report(GoldenQueries(queries=made), json, text)


@app.command("list", epilog="Example: kinlens-index golden list galleries/shop")
def list_(gallery: GalleryArgument, json: JsonOption = False) -> None:
    """Show the queries and their labels. Exits with 1 if there are none."""
    current_manifest(gallery)
    queries = GoldenSet(gallery).queries()
    print_report(GoldenQueries(queries=queries), json)
    exit_if_empty(
        not queries, f"The golden set of {gallery} is empty. Add queries: kinlens-index golden add."
    )


@app.command(epilog="Example: kinlens-index golden remove galleries/shop 0f3a91c2b7de")
def remove(
    gallery: GalleryArgument,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids from `golden list`.")],
    json: JsonOption = False,
) -> None:
    """Remove queries and their images. Reports of earlier runs are kept."""
    current_manifest(gallery)
    golden = GoldenSet(gallery)
    known = [query.sha256 for query in golden.queries()]
    chosen = [_chosen(number, known) for number in ids]
    golden.remove(chosen)
    remaining = [query for query in golden.queries() if query.sha256 not in chosen]
    text = f"{len({*chosen}):,} queries removed; {len(remaining):,} in all."
    print_report(GoldenQueries(queries=remaining), json, text)


@app.command(epilog="Example: kinlens-index golden run galleries/shop --bundle bundles/shop")
@grouped
def run(
    gallery: GalleryArgument,
    bundle: Annotated[Path, typer.Option(help="Model bundle that the gallery was built with.")],
    model: ModelOptions,
    min_score: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Minimum score of a match; by default the threshold for 1 % false matches.",
        ),
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, max=1000, help="Number of worst queries to show.")
    ] = 10,
    json: JsonOption = False,
) -> None:
    """Search with every query, measure recall and store the report."""
    embedder = model.open(bundle)
    with stores.opened(str(gallery), bundle_id=embedder.bundle_id) as store:
        embedder = fitted(store, embedder)
        golden = GoldenSet(gallery)
        queries = golden.queries()
        if not queries:
            raise InvalidParameterError(
                f"The golden set of {gallery} is empty. Label queries first: kinlens-index "
                "golden add."
            )
        with progress(len(queries), "Embedding", "images") as advance:
            vectors = embedded(golden, queries, embedder, advance)
        threshold = threshold_of(embedder.calibration) if min_score is None else min_score
        report = GoldenResults.of(store, queries, vectors).report(threshold, worst)
        golden.keep(report)
        assert isinstance(store, Gallery)
        Calibrator(store).fit_golden(partial(labelled, store, queries, vectors))
    print_report(report, json)


@app.command(epilog="Example: kinlens-index golden runs galleries/shop --json")
def runs(gallery: GalleryArgument, json: JsonOption = False) -> None:
    """Show the reports of earlier runs, newest first. Exits with 1 if there are none."""
    current_manifest(gallery)
    found = GoldenSet(gallery).runs()
    print_report(GoldenRuns(runs=found), json)
    exit_if_empty(
        not found, f"The golden set of {gallery} was not run yet. Run it: kinlens-index golden run."
    )


def _label(keys: str | None, attribute: str | None, store: VectorStore) -> Label:
    if keys is not None:
        return Label(keys=_split(keys))
    if attribute is None:
        return Label(no_match=True)
    name, equals, text = attribute.partition("=")
    kind = store.schema().get(name.strip())
    if not equals or kind is None:
        raise InvalidParameterError(
            f"--attribute {attribute}: expected NAME=VALUE with one of the attributes "
            f"{', '.join(store.schema()) or '(the gallery has none)'}."
        )
    try:
        return Label(attribute=name.strip(), value=parse_value(text, kind))
    except ValueError as error:
        raise InvalidParameterError(
            f"--attribute {attribute}: {name} is a {kind} and cannot be {text!r}: {error}."
        ) from error


def _split(keys: str) -> tuple[str, ...]:
    try:
        row = next(csv_text.reader([keys], skipinitialspace=True, strict=True), [])
    except csv_text.Error as error:
        raise InvalidParameterError(
            f"The keys {keys!r:.200} cannot be read: {error}. Separate keys by commas, and put a "
            "key with a comma into double quotes."
        ) from error
    return tuple(dict.fromkeys(key.strip() for key in row if key.strip()))


def _listed(file: Path, store: VectorStore) -> list[NewQuery]:
    """The queries of a list. Raises: SourceError."""
    found = []
    for row in read_table(file, ("image",), {**store.schema(), _KEYS: "text"}):
        given = {name: v for name, v in row.attributes.items() if v is not None and v != ""}
        if len(given) > 1:
            raise SourceError(
                f"{row.position} has values in {', '.join(given)}. Give keys or one attribute per "
                "line, or neither if no item is right."
            )
        label = Label(no_match=True)
        for name, value in given.items():
            if isinstance(value, tuple):
                raise SourceError(
                    f"{row.position} has several values of {name}. Give one value per line."
                )
            label = Label(attribute=name, value=value)
            if name == _KEYS:
                label = Label(keys=_split(str(value)))
        found.append(_new(file.resolve().parent, row.cells["image"], label))
    if not found:
        raise SourceError(f"{file} lists no images. Write one per line below the header.")
    return found


def _new(root: Path, path: str, label: Label) -> NewQuery:
    limits = ImageLimits()
    if not (root / path).exists():
        raise SourceError(f"{printable(str(root / path))} does not exist. Check the name.")
    try:
        data = read_image(root, path, limits.max_bytes)
        decode(data, limits)
    except (ImageError, OSError) as error:
        raise SourceError(f"The image {root / path} cannot be used: {error}") from error
    return NewQuery(data, label, path)


def _chosen(number: str, known: Sequence[str]) -> str:
    found = [sha256 for sha256 in known if sha256.startswith(number.lower())]
    if len(found) != 1:
        raise InvalidParameterError(
            f"{len(found)} queries have an id that starts with {number!r:.80}. Use an id that "
            "`kinlens-index golden list` shows."
        )
    return found[0]
