"""Diversity and boost: their effect on answers, and their cost.

    kinlens-train export --backbone mobilenet_v2 --out runs/trunk --size-px 128 --resize-px 144 \\
      --weights $KINLENS_SHARED/weights/mobilenet_v2-imagenet-fp16.pth
    python benchmarks/rerank.py trunk=runs/trunk:cars196-half trunk=runs/trunk:grocery \\
      cars=runs/cars-bundle:cars196-half cars=runs/cars-bundle:grocery \\
      grocery=runs/grocery-bundle:job

Each argument is NAME=BUNDLE:DATA as in benchmarks/calibration.py, which stores the embeddings in
`--cache`. For groceries the queries are the test split, in the train split; in every other data set
each image is searched for among the others. The methods are those of indexer/live/rerank.py, on the
first CANDIDATES hits of an exact search.

Queries are from half of the classes, drawn at random. A difference is paired with the same queries
without the method, with the 95 % interval of 2,000 bootstraps over classes, since images of one
class are right or wrong together. The last table times the options in a gallery, next to a plain
search.

MAP@R: precision at each right hit among the first R, summed and divided by R, the number of right
items in the gallery (Musgrave et al., 2020, https://arxiv.org/abs/2003.08505).
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from calibration import Labels, cases_of, embedded, groceries, parts_of
from harness import heading, options, ratio, row, timed_ms
from numpy.typing import NDArray

from kinlens.embedder.types import Embeddings
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.rerank import diverse
from kinlens.indexer.types import CANDIDATES, Boost, Entry, SearchOptions

ASKING = 1_000  # maximum number of queries
BOOTSTRAPS, SHOWN = 2_000, 10
WEIGHTS = (0.0, 0.02, 0.05, 0.1)
DEMANDS, SOLD, LARGEST_LABEL = 40, 2_000, 1_000
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """Queries and a gallery; `own` images are ignored in their own answers."""

    name: str
    queries: Embeddings
    query_labels: Labels
    gallery: Embeddings
    labels: Labels
    own: bool


@dataclass(frozen=True)
class Asked:
    """One query with its first hits, best first; `relevant` items of the gallery are right."""

    query: Floats
    vectors: Embeddings
    scores: Floats
    labels: Labels
    label: int
    relevant: int


def main() -> None:
    args = options(
        __doc__, "cases", cases=list[str](), cache=Path("runs/calibration"), rounds=200
    )  # fmt: skip
    cases = [case_of(case, args.cache) for case in cases_of(args)]
    titles = ("R@1", "difference", "R@10", "difference", "MAP@R", "difference")
    heading("model on data", "method", *titles, "classes in ten")
    for case in cases:
        asking = asking_half(case)
        plain = np.array([judged(one, np.arange(len(one.labels))) for one in asking])
        row(case.name, "as found", *cells(plain, plain, lambda _: ""))
        for name, method in METHODS.items():
            figures = np.array([judged(one, method(one)) for one in asking])
            row(case.name, name, *cells(figures, plain, partial(bootstrapped, asking)))
        for weight, figures, without in demanded(asking):
            name = f"boost {weight:g}" if weight else "as found"
            interval = spread if weight else lambda _: ""
            row(case.name, f"{name}, demand by Zipf", *cells(figures, without, interval))
    heading("gallery", "option", "ms", "times a plain search")
    for case in cases:
        for line in timed(case, args.rounds):
            row(f"{len(case.labels):,} x {case.gallery.shape[1]:,}", *line)


def case_of(argument: str, cache: Path) -> Case:
    name, path, data = parts_of(argument)
    vectors, labels = embedded(path, data, cache)
    name = f"{name} on {Path(data).name}"
    if data != "grocery":
        return Case(name, vectors, labels, vectors, labels, True)
    splits = groceries()
    train, test = slice(len(splits["train"])), slice(len(labels) - len(splits["test"]), None)
    return Case(name, vectors[test], labels[test], vectors[train], labels[train], False)


def asking_half(case: Case) -> list[Asked]:
    """Queries of the half of the classes that did not choose parameters."""
    rng = np.random.default_rng(0)
    names = rng.permutation(np.unique(case.labels))
    tunes = np.isin(case.query_labels, names[: len(names) // 2])
    rng.permutation(np.flatnonzero(tunes))  # advances the generator past the tuning queries
    numbers = rng.permutation(np.flatnonzero(~tunes))[:ASKING]
    return [first_hits(case, int(number)) for number in np.sort(numbers)]


def first_hits(case: Case, number: int) -> Asked:
    query, label = case.queries[number], case.query_labels[number]
    scores = case.gallery @ query
    relevant = int((case.labels == label).sum())
    if case.own:
        scores[number], relevant = -np.inf, relevant - 1
    best = np.argsort(-scores, kind="stable")[: min(CANDIDATES, len(scores) - case.own)]
    return Asked(query, case.gallery[best], scores[best], case.labels[best], label, relevant)


# Another order


def by_relevance(relevance: Floats) -> Labels:
    return np.argsort(-relevance, kind="stable")


def spread_out(diversity: float, one: Asked) -> Labels:
    """Maximal marginal relevance up to the evaluated depth; the other hits keep their order."""
    placed = diverse(one.vectors, one.scores, diversity, max(SHOWN, one.relevant))
    rest = np.setdiff1d(np.arange(len(one.scores)), placed)
    return np.concatenate([np.array(placed, np.int64), rest])


def by_chance(weight: float, one: Asked) -> Labels:
    """A boost by an uninformative attribute of the class, from 0 to 1."""
    of_class = np.random.default_rng(0).random(LARGEST_LABEL, np.float32)
    return by_relevance(one.scores + weight * of_class[one.labels])


METHODS: dict[str, Callable[[Asked], Labels]] = {
    **{f"diversity {d:g}": partial(spread_out, d) for d in (0.1, 0.2, 0.3, 0.5)},
    **{f"boost {w:g} by chance": partial(by_chance, w) for w in (0.02, 0.05)},
}


def demanded(asking: Sequence[Asked]) -> Iterator[tuple[float, Any, Any]]:
    """Each weight of a boost when demand differs between products: by Zipf's law, in a random
    order. The attribute is the logarithm of the number of items that SOLD other customers, drawn
    in the same way, bought of the product. Figures are means, one for each draw.
    """
    classes = np.unique(np.concatenate([one.labels for one in asking]))
    counts = Counter(one.label for one in asking)
    found: dict[float, list[Any]] = {weight: [] for weight in WEIGHTS}
    for seed in range(DEMANDS):
        rng = np.random.default_rng(seed)
        shares = 1.0 / rng.permutation(np.arange(1, len(classes) + 1))
        share = dict(zip(classes, shares, strict=True))
        sold = np.log1p(rng.multinomial(SOLD, shares / sum(share.values())))
        of_class = np.zeros(classes.max() + 1)
        of_class[classes] = sold / sold.max()
        weights = np.array([share.get(one.label, 0) / counts[one.label] for one in asking])
        for weight in WEIGHTS:
            orders = (by_relevance(one.scores + weight * of_class[one.labels]) for one in asking)
            figures = np.array([judged(*pair) for pair in zip(asking, orders, strict=True)])
            found[weight].append(np.average(figures, axis=0, weights=weights))
    for weight in WEIGHTS:
        yield weight, np.array(found[weight]), np.array(found[WEIGHTS[0]])


# Figures


def judged(one: Asked, order: Labels) -> tuple[float, float, float, float]:
    """R@1, R@10, MAP@R and the number of classes among the first ten."""
    labels = one.labels[order]
    right = labels == one.label
    among = right[: one.relevant]
    precision = np.cumsum(among) / np.arange(1, len(among) + 1)
    precise = float((precision * among).sum() / max(1, one.relevant))
    return right[0], right[:SHOWN].any(), precise, len(np.unique(labels[:SHOWN]))


def cells(figures: Any, plain: Any, interval: Callable[[Floats], str]) -> list[str]:
    """Means in percent, each with its difference in points."""
    parts = []
    for column in range(3):
        parts.append(f"{100 * figures[:, column].mean():.1f}")
        parts.append(interval(100 * (figures[:, column] - plain[:, column])))
    return [*parts, f"{figures[:, 3].mean():.1f}"]


def bootstrapped(asking: Sequence[Asked], gain: Floats) -> str:
    """The mean difference and its 95 % interval by resampling classes."""
    rng = np.random.default_rng(0)
    _, classes = np.unique([one.label for one in asking], return_inverse=True)
    sums, sizes = np.bincount(classes, gain), np.bincount(classes)
    drawn = rng.integers(0, len(sums), (BOOTSTRAPS, len(sums)))
    low, high = np.percentile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [2.5, 97.5])
    return f"{gain.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def spread(gain: Floats) -> str:
    """The mean difference and the range of 95 % of the draws."""
    low, high = np.percentile(gain, [2.5, 97.5])
    return f"{gain.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def timed(case: Case, rounds: int) -> Iterator[tuple[str, float, float]]:
    """The cost of the options: ten hits of a flat gallery, in turns, medians."""
    wanted = {
        "as found": SearchOptions(),
        "boost 0.05": SearchOptions(boost=Boost("price", 0.05)),
        "diversity 0.2": SearchOptions(diversity=0.2),
    }
    took: dict[str, list[float]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        dim = case.gallery.shape[1]
        gallery = Gallery.create(folder, name="g", bundle_id="b" * 64, dim=dim)
        gallery.add(
            Entry(str(n), vector, f"{n:064x}", {"price": n % 97, "class": str(label)})
            for n, (vector, label) in enumerate(zip(case.gallery, case.labels, strict=True))
        )
        gallery.compact()
        for number in np.random.default_rng(0).integers(0, len(case.queries), rounds):
            query = np.ascontiguousarray(case.queries[number][None])
            for name, one in wanted.items():
                took[name].append(timed_ms(partial(gallery.search, query, SHOWN, one)))
        gallery.close()
    for name, own in took.items():
        yield name, float(np.median(own)), ratio(own, took["as found"])


if __name__ == "__main__":
    main()
