"""kinlens-index search, show: ask a gallery."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from embedder.errors import ItemNotFoundError
from embedder.types import Embeddings, Hit
from indexer.commands import options, stores
from indexer.commands.console import errors_shown, out, print_json, shown
from indexer.commands.options import (
    DeviceOption,
    FallbackOption,
    JsonOption,
    PrecisionOption,
    StoreArgument,
    WhereOption,
)
from indexer.filters.text import parse_filter
from indexer.types import Group, Grouping, GroupScore, SearchOptions, VectorStore, combined_query

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Found:
    """The answers to all queries, in their order: `hits`, or `groups` if these were asked for."""

    gallery: str
    version: str
    hits: Sequence[Sequence[Hit]] | None = None
    groups: Sequence[Sequence[Group]] | None = None


@app.command(
    epilog="Example: kinlens-index search shop/gallery --image new.jpg --bundle shop/bundle -k 5"
)
def search(
    gallery: StoreArgument,
    image: Annotated[
        Path | None, typer.Option(help="Image to search with; needs --bundle.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Model bundle for --image.")] = None,
    vector: Annotated[
        Path | None, typer.Option(help="Unit vectors to search with: .npy, (D,) or (Q, D).")
    ] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Item to be similar to; repeat.")
    ] = None,
    unlike: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Item to be unlike; repeat.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="How many answers.")] = 10,
    offset: Annotated[int, typer.Option(help="Leave out that many of the best.")] = 0,
    min_score: Annotated[float | None, typer.Option(help="Least cosine similarity, -1..1.")] = None,
    where: WhereOption = None,
    group_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Search for groups with one value of it.")
    ] = None,
    group_score: Annotated[
        GroupScore, typer.Option(help="Rank groups by their best item, or by the mean of all.")
    ] = "best",
    group_size: Annotated[int, typer.Option(min=1, help="Items to show of a group.")] = 1,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Of items with equal content only the best.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Compare with every vector.")] = False,
    effort: Annotated[
        int | None, typer.Option(help="efSearch or nprobe instead of the tuned value.")
    ] = None,
    device: DeviceOption = "cpu",
    allow_cpu_fallback: FallbackOption = False,
    precision: PrecisionOption = "fp32",
    json: JsonOption = False,
) -> None:
    """Search with an image, with items of the gallery, or with vectors."""
    _check_usage(image, bundle, vector, like, unlike)
    with errors_shown():
        embedder = (
            options.open_embedder(bundle, device, allow_cpu_fallback, precision) if bundle else None
        )
        wanted = SearchOptions(
            where=parse_filter(where) if where else None,
            min_score=min_score,
            offset=offset,
            distinct=distinct,
            exact=exact,
            effort=effort,
        )
        grouping = Grouping(group_by, group_score, group_size) if group_by else None
        expected = None if embedder is None else embedder.bundle_id
        with stores.opened(gallery, bundle_id=expected, device=device) as store:
            if like:
                found = _found_like(store, like, unlike or [], k, wanted, grouping)
            elif image and embedder:
                found = _found(store, options.vector_of(image, embedder), k, wanted, grouping)
            else:
                found = _found(store, options.read_vectors(vector or Path()), k, wanted, grouping)
        if json:
            print_json(found)
        else:
            _print_found(found)


@app.command(epilog="Example: kinlens-index show shop/gallery shoes/red.jpg")
def show(
    gallery: StoreArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the item.")],
    json: JsonOption = False,
) -> None:
    """Show an item and its attributes."""
    with errors_shown(), stores.opened(gallery) as store:
        item = store.stored([key]).get(key)
        if item is None:
            raise ItemNotFoundError(
                f"The gallery {gallery} has no item with the key {key!r}. Keys are compared letter "
                "by letter; a folder gives its images their relative paths as keys."
            )
    if json:
        print_json(item)
        return
    for name, value in asdict(item).items():
        out.print(f"{name:10} {shown(value) if name == 'attributes' else value}")


def _check_usage(
    image: Path | None,
    bundle: Path | None,
    vector: Path | None,
    like: list[str] | None,
    unlike: list[str] | None,
) -> None:
    if sum(map(bool, (image, vector, like))) != 1:
        raise typer.BadParameter("Give --image, --vector or --like, and one of them alone.")
    if bool(image) != bool(bundle):
        raise typer.BadParameter("--image needs --bundle, the model that embeds it.")
    if unlike and not like:
        raise typer.BadParameter("--unlike needs at least one --like.")


def _found(
    store: VectorStore,
    queries: Embeddings,
    k: int,
    wanted: SearchOptions,
    grouping: Grouping | None,
) -> Found:
    if grouping is None:
        hits = store.search(queries, k, wanted)
        return Found(store.name, store.version, hits=hits)
    groups = store.search_groups(queries, k, grouping, wanted)
    return Found(store.name, store.version, groups=groups)


def _found_like(
    store: VectorStore,
    like: Sequence[str],
    unlike: Sequence[str],
    k: int,
    wanted: SearchOptions,
    grouping: Grouping | None,
) -> Found:
    if grouping is None:
        hits = store.search_like(like, unlike, k, wanted)
        return Found(store.name, store.version, hits=[hits])
    liked, disliked = _vectors(store, like), _vectors(store, unlike)
    known = store.stored([*like, *unlike]).values()
    wanted = replace(wanted, exclude=frozenset(item.id for item in known))
    return _found(store, combined_query(liked, disliked)[None], k, wanted, grouping)


def _vectors(store: VectorStore, keys: Sequence[str]) -> Embeddings:
    rows = [entry.vector for entry in store.entries(keys)]
    return np.stack(rows) if rows else np.empty((0, store.dim), np.float32)


def _print_found(found: Found) -> None:
    """One line an item."""
    answers: Sequence[Sequence[Hit | Group]] = found.groups or found.hits or ()
    for number, answer in enumerate(answers):
        if len(answers) > 1:
            out.print(f"Query {number}:")
        if not answer:
            out.print("Nothing fits.")
        for part in answer:
            if isinstance(part, Hit):
                _print_hit(part)
                continue
            out.print(f"{part.score:.4f}  {'(no value)' if part.value is None else part.value}")
            for hit in part.hits:
                _print_hit(hit, "    ")


def _print_hit(hit: Hit, indent: str = "") -> None:
    out.print(f"{indent}{hit.score:.4f}  {hit.key}  {shown(hit.attributes)}".rstrip())
