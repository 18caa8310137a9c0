"""kinlens-index search, show, explain, duplicates: search a gallery, show items and matches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kinlens.calls import QueryText
from kinlens.commands import stores
from kinlens.commands.options import (
    CropOption,
    IndexDeviceOption,
    ModelOptions,
    StoreArgument,
    WhereOption,
)
from kinlens.embedder.errors import ItemNotFoundError
from kinlens.embedder.explain import draw_match
from kinlens.embedder.preprocess import Box
from kinlens.embedder.programs.console import Printed, command, refuse
from kinlens.embedder.types import Hit as PlainHit
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.ingest.foreign import read_vectors
from kinlens.indexer.types import Group as PlainGroup
from kinlens.indexer.types import SearchOptions, boost_of, sort_by_of
from kinlens.library.gallery import Gallery
from kinlens.library.hits import Group, Hit, Hits, shown
from kinlens.quality.answers import Guaranteed
from kinlens.quality.calibration import DEFAULT_PRIOR
from kinlens.quality.guarantee import HIGHEST, LOWEST
from kinlens.values import AUTO

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Found:
    """The results of all queries, in their order.

    Attributes:
        hits, groups: one of the two per query, as requested.
        crops: with --crop auto, the part of the image that found each result.
        facets: the value counts per query, if requested.
        probabilities: that each result is right, if the gallery is calibrated.
        no_match_probability: that none of the results is right.
        guarantee: what holds, with --guarantee or --accept.
    """

    gallery: str
    version: str
    hits: Sequence[Sequence[PlainHit]] | None = None
    groups: Sequence[Sequence[PlainGroup]] | None = None
    crops: Sequence[Sequence[Box | None]] | None = None
    facets: Sequence[Mapping[str, Mapping[str, Any]]] | None = None
    probabilities: Sequence[Sequence[float]] | None = None
    no_match_probability: float | None = None
    guarantee: Guaranteed | None = None

    @classmethod
    def of(
        cls, gallery: Gallery, answers: Sequence[Hits], is_likely: bool, has_crops: bool
    ) -> "Found":
        """The answers of a gallery, with probabilities if `is_likely` and they have some."""
        groups = [each.groups for each in answers if each.groups is not None]
        results: Sequence[Sequence[Hit] | Sequence[Group]] = groups or answers
        likely, none = None, answers[0].no_match_probability
        if is_likely and none is not None:
            likely = [[one.probability or 0.0 for one in results[0]]]
        return cls(
            gallery.name,
            gallery.version,
            None if groups else [[*hits] for hits in answers],  # JSON has the fields of PlainHit
            groups or None,
            [[one.view.crop if one.view else None for one in results[0]]] if has_crops else None,
            [
                {name: one.described() for name, one in each.facets.items()}
                for each in answers
                if each.facets is not None
            ]
            or None,
            likely,
            none if likely else None,
            answers[0].guarantee,
        )


@command(app, "kinlens-index search galleries/shop --image new.jpg --bundle bundles/shop -k 5")
def search(
    gallery: StoreArgument,
    model: ModelOptions,
    image: Annotated[
        Path | None, typer.Option(help="Image to search with; needs --bundle.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Words to search with, alone or with --image; repeat."),
    ] = None,
    not_text: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Words that the results must not be like; repeat."),
    ] = None,
    text_weight: Annotated[
        float, typer.Option(min=0, help="Weight of each text; the image has 1.")
    ] = 1.0,
    bundle: Annotated[
        Path | None, typer.Option(help="Model bundle for --image and --text.")
    ] = None,
    crop: CropOption = None,
    vector: Annotated[
        Path | None, typer.Option(help="Unit vectors to search with: .npy, (D,) or (Q, D).")
    ] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Item to be similar to; repeat.")
    ] = None,
    unlike: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Item to be unlike; repeat.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of results.")] = 10,
    offset: Annotated[int, typer.Option(help="Number of top results to skip.")] = 0,
    min_score: Annotated[
        float | None, typer.Option(help="Minimum cosine similarity, -1..1.")
    ] = None,
    where: WhereOption = None,
    group_by: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Return groups of items with the same attribute value."),
    ] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Items to show per group.")] = 1,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Return one item per image content.")
    ] = False,
    near: Annotated[
        float | None,
        typer.Option(metavar="SCORE", help="Skip items with this cosine to a better result."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare with every vector.")] = False,
    effort: Annotated[
        int | None, typer.Option(help="efSearch or nprobe instead of the tuned value.")
    ] = None,
    facets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Count attribute values over all matching items: colour,price."
        ),
    ] = None,
    diversity: Annotated[
        float, typer.Option(help="Weight of dissimilarity to the earlier results, 0..1.")
    ] = 0.0,
    boost: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:WEIGHT[:FROM:TO]", help="Add a scaled numeric attribute to the score."
        ),
    ] = None,
    sort_by: Annotated[
        str | None,
        typer.Option(metavar="NAME[:desc]", help="Sort the best 200 results by an attribute."),
    ] = None,
    prior: Annotated[
        float,
        typer.Option(
            "--no-match-prior",
            min=0,
            max=0.99,
            help="Prior probability that the product is not in the gallery.",
        ),
    ] = DEFAULT_PRIOR,
    guarantee: Annotated[
        float | None,
        typer.Option(
            min=LOWEST, max=HIGHEST, help="Also the products that have the right one this often."
        ),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(
            min=LOWEST, max=HIGHEST, help="Whether to take the best product, right this often."
        ),
    ] = None,
    index_device: IndexDeviceOption = None,
) -> Printed:
    """Search with an image, with words, with items of the gallery, or with vectors.

    Words need a bundle with a text tower, which `kinlens-train teach-words` makes, and
    `kinlens[text]`. Exits with 1 if no query has a result.

    Example: kinlens-index search galleries/shop --text "green mug" --bundle bundles/shop-words
    """
    texts: list[QueryText] = [{"text": one, "weight": text_weight} for one in text or ()]
    texts += [{"text": one, "weight": -text_weight} for one in not_text or ()]
    if sum(map(bool, (image or texts, vector, like))) != 1:
        raise typer.BadParameter("Pass exactly one of: --image or --text, --vector, --like.")
    if bool(image or texts) != bool(bundle):
        raise typer.BadParameter("--image and --text need --bundle, the model that embeds them.")
    if unlike and not like:
        raise typer.BadParameter("--unlike needs at least one --like.")
    if crop and not image:
        raise typer.BadParameter("--crop needs --image.")
    is_auto = crop == AUTO
    if is_auto and any((distinct, near is not None, diversity, boost, sort_by)):
        raise typer.BadParameter(
            "--crop auto searches with each part; omit --distinct, --near, --diversity, --boost "
            "and --sort-by, or pass one part."
        )
    options = SearchOptions(
        where=parse_filter(where) if where else None,
        min_score=min_score,
        offset=offset,
        distinct=distinct,
        near=near,
        exact=exact,
        effort=effort,
        diversity=diversity,
        boost=boost_of(boost) if boost else None,
        sort_by=sort_by_of(sort_by) if sort_by else None,
    )
    embedder = model.open(bundle) if bundle else None
    with stores.gallery_at(gallery, embedder, device=index_device or "cpu") as opened:
        answer = opened.search(
            read_vectors(vector).astype(np.float32) if vector else image,
            k,
            options,
            texts=texts,
            positives=like or (),
            negatives=unlike or (),
            crops=[crop] if crop and not is_auto else crop,
            group_by=group_by,
            group_size=group_size,
            facets=facets.split(",") if facets else (),
            no_match_prior=prior,
            guarantee=guarantee,
            accept=accept,
        )
        answers = [answer] if isinstance(answer, Hits) else answer
        found = Found.of(opened, answers, bool(image and not texts), is_auto)
    yield found, *_lines(answers)
    if not any(found.groups or found.hits or ()):
        refuse("No item matches. Use a lower --min-score or another filter.")


@command(app, "kinlens-index show galleries/shop shoes/red.jpg")
def show(
    gallery: StoreArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the item.")],
) -> Printed:
    """Show an item and its attributes."""
    with stores.gallery_at(gallery) as opened:
        try:
            item = opened.item(key)
        except ItemNotFoundError as error:
            raise ItemNotFoundError(
                f"The gallery {gallery} has no item with the key {key!r}. Keys are case-sensitive; "
                "the key of an image from a folder is its relative path."
            ) from error
    facts = {**asdict(item), "attributes": shown(item.attributes)}
    yield item, *(f"{name:10} {value}" for name, value in facts.items())


@command(app, "kinlens-index explain new.jpg shoes/red.jpg --bundle bundles/shop")
def explain(
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="Query image.")],
    hit: Annotated[Path, typer.Argument(metavar="HIT", help="Image to compare it with.")],
    bundle: Annotated[Path, typer.Option(help="Model bundle, exported with --map.")],
    drawn: Annotated[
        Path, typer.Option("--out", help="Image file to write: both images with heat maps.")
    ] = Path("match.png"),
) -> Printed:
    """Show where two images match, by the contribution of each region to the score."""
    embedder = ModelOptions(engine="onnxruntime").open(bundle)
    match = draw_match(embedder, query, hit, drawn)
    shares = {"query": match.query.tolist(), "hit": match.hit.tolist()}
    report = {"score": match.score, **shares, "out": str(drawn)}
    yield report, f"{match.score:.4f}  {drawn}"


def _lines(answers: Sequence[Hits]) -> Iterator[str]:
    """The answer to each query, with its number if there are several."""
    for number, answer in enumerate(answers):
        if len(answers) > 1:
            yield f"Query {number}:"
            if not answer.all():
                yield "No match."
        yield from answer.lines()


@command(app, "kinlens-index duplicates galleries/shop --json > near.json")
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
) -> Printed:
    """Find groups of items that probably show the same product. Exits with 1 if there are none."""
    with stores.gallery_at(gallery, lack="cannot search for near-duplicates") as opened:
        found = opened.duplicates(min_score=min_score, exact=exact).report
    yield found
    if not found.groups:
        refuse(f"No items of {found.name} are near-duplicates.")
