"""What a taught map can find that it was not fitted on: photos, products and titles held out.

Letters: T texts, H numbers of a text's features, I items, N items in a ranking.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.manifest import WordsFound
from kinlens.training.words.catalogue import Catalogue, Numbers
from kinlens.training.words.taught import Floats, WordMap

Kind = Literal["photos", "products", "titles"]
Fit = Callable[[Catalogue, Floats], WordMap]
"""Fits a map to the texts of a catalogue that have members, given the features (T, H) of all."""

MIN_GAIN = 5.0
"""Percent of the way from chance to a perfect order that a taught tower must reach for products or
titles that it was not fitted on, at the lower end of the 95 % interval."""

FOLDS = 5
MAX_TEXTS = 1_000
MAX_ITEMS = 20_000
_DRAWS = 1_000


class _Score(NamedTuple):
    """The order of one text: average precision, its expectation in a random order, first hit."""

    precision: float
    chance: float
    first: bool


_Scores = dict[int, list[_Score]]
"""The scores of each text, by its number."""


def hold_out(catalogue: Catalogue, features: Floats, fit: Fit) -> dict[Kind, WordsFound]:
    """Fit on a part of the catalogue, and search with its texts for the rest.

    - "photos": a fifth of the photos of each product is held out.
    - "products": a fifth of the products is held out. Searched with texts that others share.
    - "titles": the same products, searched with the texts that no other product has.

    Each text is searched for among the items that were held out and those that it does not
    describe. So a map that finds only what it was fitted on has no advantage. A kind without such
    texts is omitted.
    """
    if len(catalogue.products) > MAX_ITEMS:
        catalogue = catalogue.sampled(MAX_ITEMS)
    scores: defaultdict[Kind, _Scores] = defaultdict(lambda: defaultdict(list))
    for held in _parts(_photo_folds(catalogue.products)):
        for text, _, score in _scored(catalogue, features, fit, held):
            scores["photos"][text].append(score)
    for held in _parts(_product_folds(catalogue.products)):
        for text, is_taught, score in _scored(catalogue, features, fit, held):
            scores["products" if is_taught else "titles"][text].append(score)
    return {kind: _summary(found) for kind, found in scores.items()}


def is_proven(found: Mapping[Kind, WordsFound], kind: Kind) -> bool:
    """Whether texts find what was held out in this way, by more than `MIN_GAIN`."""
    return kind in found and found[kind].gain_low >= MIN_GAIN


def random_precision(relevant: int, total: int) -> float:
    r"""Expected average precision of a random order of N items, of which R are relevant.

    .. math:: \frac{1}{N} \left( H_N + \frac{R - 1}{N - 1} (N - H_N) \right)
    """
    if total == 1:
        return 1.0
    harmonic = float(np.sum(1 / np.arange(1, total + 1)))
    return (harmonic + (relevant - 1) / (total - 1) * (total - harmonic)) / total


def average_precision(relevant: NDArray[np.bool_]) -> float:
    """Of a ranking (N,), best first."""
    places = np.flatnonzero(relevant) + 1
    return float((np.arange(1, len(places) + 1) / places).mean())


def _scored(
    catalogue: Catalogue, features: Floats, fit: Fit, held: NDArray[np.bool_]
) -> Iterator[tuple[int, bool, _Score]]:
    """Each text, whether it was taught, and its score, after a fit without the items in `held`."""
    part = catalogue.without(held)
    asked = [
        number
        for number, members in enumerate(catalogue.members)
        if catalogue.written[number] and held[members].any()
    ]
    asked = sorted(np.random.default_rng(0).permutation(asked)[:MAX_TEXTS].tolist())
    if not asked or not any(map(len, part.members)):
        return
    vectors = fit(part, features)(features[asked])
    for number, vector in zip(asked, vectors, strict=True):
        relevant = np.zeros(len(held), np.bool_)
        relevant[catalogue.members[number]] = True
        candidates = held | ~relevant
        order = np.argsort(-(catalogue.vectors[candidates] @ vector), kind="stable")
        ranking = relevant[candidates][order]
        chance = random_precision(int(ranking.sum()), len(ranking))
        score = _Score(average_precision(ranking), chance, bool(ranking[0]))
        yield number, bool(len(part.members[number])), score


def _photo_folds(products: Numbers) -> Numbers:
    """The fold of each item (I,); those of one product are spread over the folds, and a product
    with one photo is in none (-1).
    """
    rng = np.random.default_rng(0)
    order = np.lexsort((rng.random(len(products)), products))
    counts = np.bincount(products)
    place = np.arange(len(products)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = rng.integers(FOLDS, size=len(counts))
    folds = np.empty(len(products), np.int64)
    folds[order] = (place + start[products[order]]) % FOLDS
    folds[counts[products] == 1] = -1
    return folds


def _product_folds(products: Numbers) -> Numbers:
    """The fold of each item (I,), the same for all of a product."""
    count = int(products.max()) + 1
    folds: Numbers = np.random.default_rng(0).permutation(np.arange(count) % FOLDS)[products]
    return folds


def _parts(folds: Numbers) -> Iterator[NDArray[np.bool_]]:
    for fold in range(FOLDS):
        if (folds == fold).any():
            yield folds == fold


def _summary(scores: _Scores) -> WordsFound:
    """The means over the texts, each of which is asked in several folds; their interval."""
    rows = np.array([np.mean(found, axis=0) for found in scores.values()])  # (T, 3)
    precision, chance, first = rows.T
    gains = (precision - chance) / np.maximum(1 - chance, 1e-9)
    draws = np.random.default_rng(0).integers(len(gains), size=(_DRAWS, len(gains)))
    low = np.quantile(gains[draws].mean(axis=1), 0.025)
    figures = {
        "map": precision.mean(),
        "chance": chance.mean(),
        "precision_at_1": first.mean(),
        "gain": gains.mean(),
        "gain_low": low,
    }
    percent = {name: round(100 * float(value), 2) for name, value in figures.items()}
    return WordsFound(texts=len(rows), **percent)
