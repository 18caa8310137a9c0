r"""What answers guarantee, by simulation; and the harm of each broken assumption.

    KINLENS_SHARED=DIR OMP_NUM_THREADS=1 python benchmarks/guarantee.py --path DIR \
      --json docs/results/guarantee.json --plot docs/images/guarantee.png

Groceries, cars and drawn products are embedded with MobileNetV2 as it comes, once: the folder
--path keeps the vectors. bf16 is that of OpenVINO, and needs `kinlens[openvino]` and a CPU with
bf16 units; without them its rows are omitted. The first run takes about 20 minutes of one core,
later ones about 6.

A shop is a random draw of products, and of their photos in the gallery. The other photos are the
queries that come. Labelled queries are drawn from those, so what a rule really covers is known
exactly. Each row has --draws draws of labels, in equal parts from --shops shops.

The first part has rows whose labels are drawn from what comes: the coverage must not be below the
level by more than chance. In the second part the queries that come are others than the labelled.
The third part has categories with limits of their own. The last one is the test for drift: how
often it gives a false alarm within 10,000 queries, and how many other queries come until its alarm.
"""

import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from harness import grocery_photos, heading, kinlens, options, row, shared_folder, skip
from PIL import Image, ImageFilter
from words import cars

from kinlens.embedder.engines.models import SessionSettings, engine_versions
from kinlens.embedder.errors import BundleError, InvalidParameterError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.types import SAME_SCORE
from kinlens.quality.drift import FALSE_ALARMS, DriftTest
from kinlens.quality.guarantee import (
    CONFIDENCE,
    KEPT,
    Guarantee,
    Judged,
    lowest_lead,
)
from kinlens.quality.intervals import exact_interval
from kinlens.rendered.catalogue import write_catalogue

UNCUT = ("one product", "k = 5", "filter")
SOURCES = ("groceries", "drawn", "cars")
LEVEL, ACCEPT = 0.95, 0.9
LABELS = 300
CATEGORIES, LABELS_OF_ALL = (1, 2, 5), 1000
ENGINES = {
    "fp32": SessionSettings(),
    "int8": SessionSettings(precision="int8"),
    "bf16": SessionSettings(precision="bf16", engine="openvino"),
}
BATCH = 64
DRAWN_VIEWS = 20
QUERIES = 1500  # of a shop, at most
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Condition:
    """What a shop, its queries and its labels are like.

    Attributes:
        views: photos of a product in the gallery; None: 1 to 16, another number for each.
        absent: share of the queries whose product is not in the gallery.
        products: share of the products of the source that the gallery has.
        precision: of the model that embeds the queries; "blurred" for blurred photos, "other" for
            photos of another source.
        easy: only the half of the queries that are most similar to a photo of their product.
        few: only queries for a tenth of the products.
        half: only queries for half of the products.
    """

    views: int | None = 4
    absent: float = 0.0
    products: float = 1.0
    precision: str = "fp32"
    easy: bool = False
    few: bool = False
    half: bool = False


@dataclass(frozen=True)
class Row:
    """Labels drawn under one condition, queries that come under another.

    wrong: share of the labels that name another product.
    """

    name: str
    labels: Condition
    live: Condition
    wrong: float = 0.0
    count: int = LABELS


@dataclass(frozen=True)
class Drift:
    """Queries of another kind that come after some like the labelled ones."""

    name: str
    labels: Condition
    live: Condition
    after: int = 0


BASE = Condition()
KEPT_ROWS = (
    *(
        Row(f"{views} image{'s'[: views > 1]} a product", c := Condition(views), c)
        for views in (1, 2, 4, 8, 16)
    ),
    Row("1 to 16 images a product", c := Condition(None), c),
    *(Row(f"{100 * share:.0f} % absent", c := Condition(absent=share), c) for share in (0.2, 0.5)),
    Row("gallery of half", c := Condition(products=0.5), c),
    Row("gallery of a tenth", c := Condition(products=0.1), c),
    Row("queries for half of the products", c := Condition(half=True), c),
    *(Row(name, c := Condition(precision=name), c) for name in ("int8", "bf16")),
    *(Row(f"{count} labels", BASE, BASE, count=count) for count in (20, 100, 1000)),
)
BROKEN_ROWS = (
    *(
        Row(f"labels in fp32, queries in {name}", BASE, Condition(precision=name))
        for name in ("int8", "bf16")
    ),
    Row("1 % of the labels are wrong", BASE, BASE, 0.01),
    Row("5 % of the labels are wrong", BASE, BASE, 0.05),
    Row("no absent product labelled, 20 % come", BASE, Condition(absent=0.2)),
    Row("20 % absent labelled, 50 % come", Condition(absent=0.2), Condition(absent=0.5)),
    Row("gallery grows by a quarter", Condition(products=0.8), BASE),
    Row("gallery doubles", Condition(products=0.5), BASE),
    Row("gallery grows ten times", Condition(products=0.1), BASE),
    Row("labels for a tenth of the products", Condition(few=True), BASE),
    Row("labelled photos are the easy half", Condition(easy=True), BASE),
    Row("16 images labelled, 4 come", Condition(16), BASE),
)
DRIFTS = tuple(
    Drift(name, labels, live, after)
    for name, labels, live in (
        ("photos of another source", BASE, Condition(precision="other")),
        ("blurred photos", BASE, Condition(precision="blurred")),
        ("labelled photos are the easy half", Condition(easy=True), BASE),
        ("no absent product labelled, 20 % come", BASE, Condition(absent=0.2)),
        ("16 images labelled, 4 come", Condition(16), BASE),
        ("labels in fp32, queries in int8", BASE, Condition(precision="int8")),
        ("labels in fp32, queries in bf16", BASE, Condition(precision="bf16")),
    )
    for after in (0, 1000)
)
CALM, LONGEST = 10_000, 10_000  # queries without drift, and at most with it


@dataclass(frozen=True, eq=False)
class Source:
    """Vectors (N, D) by precision, and the product (N,) of each."""

    vectors: dict[str, Array]
    products: Array


@dataclass(frozen=True, eq=False)
class Shop:
    """The answers to all queries that come.

    Attributes:
        scores: (Q, P) of each product.
        right: (Q,) the right product; -1 if it is absent.
    """

    scores: Array
    right: Array

    @cached_property
    def gaps(self) -> Array:
        """(Q, P) how far each product is below the best one."""
        gaps: Array = self.scores.max(axis=1, keepdims=True) - self.scores
        return gaps.astype(np.float64)

    @cached_property
    def all_gaps(self) -> Array:
        """(Q * P,) ascending."""
        return np.sort(self.gaps, axis=None)

    @cached_property
    def behind(self) -> Array:
        """(Q,) how far the right product is below the best one."""
        own = self.gaps[np.arange(len(self.right)), self.right]
        return np.where(self.right < 0, inf, own)

    @cached_property
    def judged(self) -> list[Judged]:
        """As a gallery judges labelled queries."""
        ordered = np.sort(self.gaps, axis=1)[:, :KEPT].tolist()
        rows = zip(self.scores.max(axis=1).tolist(), ordered, self.behind.tolist(), strict=True)
        return [
            Judged(best, tuple(gaps), None if behind == inf else behind, absent=behind == inf)
            for best, gaps, behind in rows
        ]

    @cached_property
    def leads(self) -> Array:
        """(Q,) how far the second product is below the best one."""
        return np.array([one.lead for one in self.judged])

    @cached_property
    def is_right(self) -> Array:
        """(Q,) whether the best product is right."""
        return np.array([one.is_right for one in self.judged])

    def kinds(self, of: Array, categories: int) -> list[str]:
        """The category of each of these products."""
        return [f"c{number % categories}" for number in of.tolist()]

    def in_categories(self, categories: int) -> list[Judged]:
        """The judged queries with the category of the right and of the best product."""
        own = self.kinds(self.right, categories)
        best = self.kinds(self.scores.argmax(axis=1), categories)
        return [
            one._replace(kind=kind, best_kind=other)
            for one, kind, other in zip(self.judged, own, best, strict=True)
        ]

    def drawn(self, rng: np.random.Generator, count: int, wrong: float = 0.0) -> Guarantee:
        """The judged labels of `count` queries; a share of them names a wrong product."""
        rows = rng.integers(0, len(self.judged), count)
        chosen = [self.judged[row] for row in rows]
        for n in np.flatnonzero(rng.random(count) < wrong).tolist():
            if not chosen[n].absent:  # the label names another product, drawn at random
                gaps = self.gaps[rows[n]]
                chosen[n] = chosen[n]._replace(behind=float(rng.choice(gaps[gaps > 0])))
        return guarantee_of(chosen)


def guarantee_of(judged: Sequence[Judged], by: str | None = None) -> Guarantee:
    """The guarantee of these labels, which are not validated: that would take most of the time."""
    fields: dict[str, Any] = {"at": str(time.perf_counter_ns()), "last": 0}
    return Guarantee.model_construct(
        **fields, queries=(*judged,), by=by, is_split=by is not None, confidence=CONFIDENCE
    )


@lru_cache(maxsize=48)
def shop(source: Source, condition: Condition, seed: int) -> Shop:
    """A gallery of some photos, and its answers to the others."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(source.products))
    photos: dict[int, list[int]] = {}
    for number in order.tolist():
        photos.setdefault(int(source.products[number]), []).append(number)
    views = {p: condition.views or int(rng.integers(1, 17)) for p in sorted(photos)}
    usable = [
        p for p in rng.permutation(sorted(photos)).tolist() if len(photos[p]) > 2 + views[p] // 8
    ]
    views = {p: min(views[p], len(photos[p]) - 2) for p in usable}
    strangers, usable = usable[: len(usable) // 4], usable[len(usable) // 4 :]
    here = usable[: max(2, round(condition.products * len(usable)))]
    items = [number for p in here for number in photos[p][: views[p]]]
    starts = np.cumsum([0, *(views[p] for p in here)])[:-1]
    asked = here[: max(1, len(here) // 10)] if condition.few else here
    asked = asked[: max(1, len(asked) // 2)] if condition.half else asked
    present = [
        (n, index) for index, p in enumerate(here) if p in set(asked) for n in photos[p][views[p] :]
    ]
    absent = [(n, -1) for p in strangers for n in photos[p]]
    count = min(QUERIES, len(present))
    many = round(count * condition.absent / (1 - condition.absent)) if condition.absent < 1 else 0
    chosen = [present[n] for n in rng.permutation(len(present))[:count]]
    chosen += [absent[n] for n in rng.integers(0, len(absent), many)]
    numbers, right = np.array([n for n, _ in chosen]), np.array([index for _, index in chosen])
    if condition.precision == "other":
        numbers = rng.integers(0, len(source.vectors["other"]), len(numbers))
    queries = source.vectors[condition.precision][numbers]
    scores = np.maximum.reduceat(queries @ source.vectors["fp32"][items].T, starts, axis=1)
    if condition.easy:
        own = scores[np.arange(len(right)), right]
        keep = own >= np.median(own)
        scores, right = scores[keep], right[keep]
    return Shop(scores, right)


def uncut(source: Source, draws: int, shops: int) -> dict[str, float]:
    """How often a set has the right product, of all sets and of those that nothing cuts; and the
    share of these.
    """
    found: dict[str, list[Array]] = {name: [] for name in UNCUT}
    covered = []
    for number in range(shops):
        here = shop(source, BASE, number)
        own = np.zeros(here.gaps.shape, bool)
        own[np.arange(len(own)), here.right] = True
        rng = np.random.default_rng(1000 + number)
        for _ in range(draws // shops):
            limit = here.drawn(rng, LABELS).sets(LEVEL).limits[""] + SAME_SCORE
            covered.append(np.asarray(here.behind <= limit))
            members = here.gaps <= limit
            sizes = members.sum(axis=1)
            passes = rng.random(members.shape[1]) < 0.5
            found["one product"].append(sizes == 1)
            found["k = 5"].append(sizes <= 5)
            lost = (members & ~(passes | own)).any(axis=1)
            found["filter"].append(np.asarray(~lost))
    right = np.concatenate(covered)
    cells = {"all": float(right.mean())}
    for name, parts in found.items():
        chosen = np.concatenate(parts)
        cells |= {name: float(right[chosen].mean()), f"{name}, share": float(chosen.mean())}
    return cells


def figures(source: Source, one: Row, draws: int, shops: int) -> dict[str, float]:
    """What draws of labels really cover and accept."""
    found: dict[str, list[float]] = {
        name: [] for name in ("covered", "size", "single", "none", "accepted", "error")
    }
    refused = 0
    for number in range(shops):
        labels, live = shop(source, one.labels, number), shop(source, one.live, number)
        absent = live.right < 0
        evidence = live.scores.max(axis=1) + live.leads
        rng = np.random.default_rng(1000 + number)
        for _ in range(draws // shops):
            drawn = labels.drawn(rng, one.count, one.wrong)
            sets = drawn.sets(LEVEL)
            limit, none = sets.limits[""] + SAME_SCORE, np.zeros(len(absent), bool)
            if sets.none is not None:
                none = evidence <= sets.none + SAME_SCORE
            members = np.searchsorted(live.all_gaps, limit, "right")
            found["covered"].append(np.where(absent, none, live.behind <= limit).mean())
            found["size"].append(members / len(absent))
            found["single"].append(((live.leads > limit) & ~none).mean())
            found["none"].append(none[~absent].mean())
            taken = np.zeros(len(absent), bool)
            try:
                taken = live.leads > drawn.decisions(ACCEPT).leads[""]
            except InvalidParameterError:
                refused += 1
            found["accepted"].append(taken.mean())
            found["error"].append((taken & ~live.is_right).sum() / max(taken.sum(), 1))
    errors = found.pop("error")
    return {
        **{name: float(np.mean(values)) for name, values in found.items()},
        "half": float(1.96 * np.std(found["covered"]) / np.sqrt(len(errors))),
        "refused": refused / len(errors),
        "harmed": float(np.mean(np.array(errors) > 1 - ACCEPT + 1e-9)),
        "draws": len(errors),
    }


def separate(source: Source, categories: int, draws: int, shops: int) -> dict[str, float]:
    """Each category with a limit of its own: the lowest coverage of a category, and how often one
    of them accepts too many wrong queries; also if each limit alone had the whole confidence.
    """
    covered: list[list[float]] = []
    accepted, harmed, alone = [], [], []
    for number in range(shops):
        live = shop(source, Condition(8), number)
        judged = live.in_categories(categories)
        kinds = np.array([one.kind for one in judged])
        best_kinds = np.array([one.best_kind for one in judged])
        rng = np.random.default_rng(1000 + number)

        def taken(
            leads: dict[str, float], best_kinds: Array = best_kinds, live: Shop = live
        ) -> Any:
            own = np.array([leads.get(kind, leads[""]) for kind in best_kinds.tolist()])
            return live.leads > own

        def errs(taken: Array, best_kinds: Array = best_kinds, live: Shop = live) -> bool:
            chosen = (taken & (best_kinds == kind) for kind in np.unique(best_kinds))
            return any((each & ~live.is_right).sum() > (1 - ACCEPT) * each.sum() for each in chosen)

        for _ in range(draws // shops):
            queries = [judged[n] for n in rng.integers(0, len(judged), LABELS_OF_ALL)]
            drawn = guarantee_of(queries, "category")
            limits = drawn.sets(LEVEL).limits
            own = np.array([limits.get(kind, limits[""]) for kind in kinds.tolist()])
            within = live.behind <= own + SAME_SCORE
            covered.append([within[kinds == kind].mean() for kind in np.unique(kinds)])
            try:
                leads = drawn.decisions(ACCEPT).leads
            except InvalidParameterError:
                leads = {"": inf}
            accepted.append(taken(leads).mean())
            harmed.append(errs(taken(leads)))
            parts = {k: [q for q in queries if q.best_kind == k] for k in leads if k}
            plain = {k: lowest_lead(part, ACCEPT, CONFIDENCE) for k, part in parts.items()}
            alone.append(errs(taken({"": inf, **plain})))
    return {
        "covered": float(np.mean(covered)),
        "lowest": float(np.mean(covered, axis=0).min()),
        "accepted": float(np.mean(accepted)),
        "harmed": float(np.mean(harmed)),
        "harmed, each alone": float(np.mean(alone)),
    }


def alarm(labels: Shop, live: Shop, after: int, most: int, seed: int) -> int | None:
    """Number of queries that come until the alarm, after some like the labelled ones; None if there
    is no alarm among `most`. After a false one the test begins again.
    """
    rng = np.random.default_rng(seed)
    usual, other = (each.scores.max(axis=1).tolist() for each in (labels, live))
    known = [usual[n] for n in rng.integers(0, len(usual), LABELS).tolist()]
    test = DriftTest(known, rng.random)
    for n in rng.integers(0, len(usual), after).tolist():
        if test.add(usual[n]):
            test = DriftTest(known, rng.random)
    coming = rng.integers(0, len(other), most).tolist()
    return next((count for count, n in enumerate(coming, 1) if test.add(other[n])), None)


def false_alarms(source: Source, runs: int, shops: int) -> dict[str, float]:
    """How many of the tests without drift give an alarm."""
    usual = [shop(source, BASE, number) for number in range(shops)]
    one = [usual[run % shops] for run in range(runs)]
    found = sum(alarm(each, each, 0, CALM, n) is not None for n, each in enumerate(one))
    low, high = exact_interval(found, runs)
    return {"runs": runs, "queries": CALM, "alarms": found, "low": low, "high": high}


def delays(source: Source, one: Drift, runs: int, shops: int) -> dict[str, float]:
    """How many queries come until the alarm: the median and the 9th of 10 runs; and the share of
    runs without an alarm.
    """
    pairs = [(shop(source, one.labels, n), shop(source, one.live, n)) for n in range(shops)]
    found = [alarm(*pairs[run % shops], one.after, LONGEST, run) for run in range(runs)]
    counts = sorted(LONGEST + 1 if count is None else count for count in found)
    return {
        "median": counts[runs // 2],
        "ninth": counts[9 * runs // 10],
        "missed": found.count(None) / runs,
    }


def has(source: Source, one: Row | Drift) -> bool:
    """Whether a source has the vectors of a row."""
    return {one.labels.precision, one.live.precision} <= source.vectors.keys()


def report_coverage(
    found: dict[str, Source], report: dict[str, Any], draws: int, shops: int
) -> None:
    """Print the first parts, and add them to the report."""
    for title, rows in (("drawn as the labels", KEPT_ROWS), ("broken assumptions", BROKEN_ROWS)):
        print(
            f"\n{title}: covered and products in sets of {LEVEL:.0%}; accepted, and draws with too "
            f"many wrong, if {ACCEPT:.0%} are right"
        )
        heading("", *(f"{name}: sets" for name in found), *(f"{name}: decisions" for name in found))
        for one in rows:
            own = {
                name: figures(images, one, draws, shops)
                for name, images in found.items()
                if has(images, one)
            }
            for name, cells in own.items():
                report[name][one.name] = cells
            row(one.name, *sets_and_decisions(found, own))
    print("\nsets that nothing cuts: how often they have the right product, and their share")
    heading("", "all", *UNCUT)
    for name, images in found.items():
        cells = report[name]["sets that nothing cuts"] = uncut(images, draws, shops)
        shown = (f"{cells[each]:.3f} ({cells[f'{each}, share']:.0%})" for each in UNCUT)
        row(name, f"{cells['all']:.3f}", *shown)
    print(f"\neach category with a limit of its own, {LABELS_OF_ALL:,} labels, 8 images")
    heading("", "categories", "covered", "lowest", "accepted", "too many wrong", "each alone")
    for name, images in found.items():
        for count in CATEGORIES:
            cells = report[name][f"{count} categories"] = separate(images, count, draws, shops)
            shares = (f"{cells[n]:.1%}" for n in ("accepted", "harmed", "harmed, each alone"))
            row(name, count, f"{cells['covered']:.3f}", f"{cells['lowest']:.3f}", *shares)


def sets_and_decisions(found: dict[str, Source], own: dict[str, dict[str, float]]) -> Iterator[str]:
    """The cells of a row: of the sets of each source, and of its decisions."""
    texts: tuple[Callable[[dict[str, float]], str], ...] = (
        lambda cells: f"{cells['covered']:.3f}, {cells['size']:.1f}",
        lambda cells: f"{100 * cells['accepted']:.0f} %, {100 * cells['harmed']:.1f} %",
    )
    return (text(own[name]) if name in own else "" for text in texts for name in found)


def report_drift(found: dict[str, Source], report: dict[str, Any], runs: int, shops: int) -> None:
    """Print the part about drift, and add it to the report."""
    print(f"\nfalse alarms, at most {FALSE_ALARMS:.0%}, within {CALM:,} queries like the labelled")
    heading("source", "runs", "alarms", "share, 95 % interval")
    for source, images in found.items():
        cells = report[source]["no drift"] = false_alarms(images, runs, shops)
        row(source, runs, cells["alarms"], f"{cells['low']:.2%} to {cells['high']:.2%}")
    print("\nother queries until the alarm: median, 9 of 10 runs, and runs without an alarm")
    heading("", *found)
    for one in DRIFTS:
        name = f"{one.name}, {f'after {one.after:,}' if one.after else 'at once'}"
        shown = []
        for source, images in found.items():
            shown.append("")
            if has(images, one):
                cells = report[source][name] = delays(images, one, max(runs // 5, 1), shops)
                late = (f"{cells[n]:,}" if cells[n] <= LONGEST else "none" for n in _DELAYS)
                shown[-1] = f"{', '.join(late)}, {cells['missed']:.0%}"
        row(name, *shown)


_DELAYS = "median", "ninth"


def main() -> None:
    args = options(
        __doc__,
        sources=[*SOURCES],
        products=250,
        draws=500,
        shops=10,
        path=None,
        json=None,
        plot=None,
    )
    shared, started = shared_folder(), time.perf_counter()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    with tempfile.TemporaryDirectory() as name:
        folder = args.path or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        found = {source: read(shared, folder, source, args.products) for source in args.sources}
    if {"groceries", "cars"} <= found.keys():
        found["groceries"].vectors["other"] = found["cars"].vectors["fp32"]
    embedded_s = time.perf_counter() - started
    report: dict[str, Any] = {source: {} for source in found}
    report_coverage(found, report, args.draws, args.shops)
    report_drift(found, report, args.draws, args.shops)
    report["run"] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started),
        "seconds of embedding": round(embedded_s),
        "engines": engine_versions(),
        "photos": {source: len(images.products) for source, images in found.items()},
        "cosine to fp32": {
            name: round(float((images.vectors[name] * images.vectors["fp32"]).sum(1).mean()), 5)
            for images in found.values()
            for name in images.vectors
            if name in ("int8", "bf16", "blurred")
        },
    }
    print(f"\n{report['run']}")
    if args.plot is not None:
        plot(found[args.sources[0]] if "drawn" not in found else found["drawn"], args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read(shared: Path, folder: Path, source: str, drawn: int) -> Source:
    """The vectors of a source, with `drawn` drawn products; what `folder` lacks is embedded."""
    names = ["fp32", "int8", "bf16", "blurred"] if source == "groceries" else ["fp32"]
    if source == "drawn":
        paths = [*write_catalogue(folder / "drawn", drawn, DRAWN_VIEWS)]
        products = [str(number // DRAWN_VIEWS) for number in range(len(paths))]
    else:
        listed = grocery_photos(shared) if source == "groceries" else _cars(shared, folder)
        paths, products = [path for path, _ in listed], [product for _, product in listed]
    files = {name: folder / f"{source}-{name}.npy" for name in names}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        started, bundle = time.perf_counter(), _bundle(shared, folder, missing)
        for name, made in embed(bundle, paths, missing).items():
            np.save(files[name], made)
        seconds = time.perf_counter() - started
        print(f"{source}: {len(paths):,} photos embedded in {seconds:.0f} s", flush=True)
    vectors = {name: np.load(file) for name, file in files.items() if file.is_file()}
    return Source(vectors, np.unique(products, return_inverse=True)[1])


def embed(bundle: Path, paths: Sequence[Path], names: Sequence[str]) -> dict[str, Array]:
    """The vectors (N, D) of each kind; a precision that this machine lacks is omitted."""
    models: dict[str, OnnxEmbedder] = {}
    for name in names:
        settings = replace(ENGINES.get(name, ENGINES["fp32"]), threads=1)
        try:
            models[name] = OnnxEmbedder.open(bundle, settings)
        except BundleError as error:
            print(f"{name} is omitted: {error}", flush=True)
    found: dict[str, list[Array]] = {name: [] for name in models}
    for start in range(0, len(paths), BATCH):
        photos = [path.read_bytes() for path in paths[start : start + BATCH]]
        pixels: dict[bool, Array] = {}
        for name, model in models.items():
            is_blurred = name == "blurred"
            if is_blurred not in pixels:
                shown = map(_blurred, photos) if is_blurred else photos
                pixels[is_blurred] = np.stack([model.preprocess(data) for data in shown])
            found[name].append(model.embed(pixels[is_blurred]))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _blurred(data: bytes) -> bytes:
    """The photo out of focus: a small copy, blurred by a hundredth of its size."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.thumbnail((300, 300))
    out = io.BytesIO()
    image.filter(ImageFilter.GaussianBlur(3)).save(out, "JPEG", quality=90)
    return out.getvalue()


def _cars(shared: Path, folder: Path) -> list[tuple[Path, str]]:
    return [(path, attributes["product"]) for path, attributes in cars(shared, folder, 0)]


def _bundle(shared: Path, folder: Path, names: Sequence[str]) -> Path:
    """The network as it comes; in other precisions it is a bundle that passed their gates."""
    plain, several = folder / "bundle", folder / "bundle-precisions"
    if not plain.is_dir():
        weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
        network = "--backbone", "mobilenet_v2", "--weights", weights
        kinlens("train", "export", *network, "--out", plain)
    if not {"int8", "bf16"} & {*names}:
        return plain
    if not several.is_dir():
        form = "--size", 224, "--resize", 256, "--mean", 0, "--std", 1, "--scale", 255
        images = "--licence", "apache-2.0", "--images", shared / "data/grocery-store/val"
        precisions = "--precision", "int8", "--precision", "bf16"
        file = plain / "model.onnx"
        kinlens("train", "import", file, *form, *images, *precisions, "--out", several)
    return several


def plot(source: Source, file: Path) -> None:
    """Draw the share of accepted queries against their error, and the point that labels choose."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    judged = shop(source, Condition(8, absent=0.2), 0).judged
    rng = np.random.default_rng(0)
    order = sorted(judged, key=lambda one: one.lead, reverse=True)
    accepted = np.arange(1, len(order) + 1) / len(order)
    wrong = np.cumsum([not one.is_right for one in order]) / np.arange(1, len(order) + 1)
    labels = [judged[n] for n in rng.integers(0, len(judged), 1000)]
    lead = guarantee_of(labels).decisions(_PLOTTED).leads[""]
    chosen = max(sum(one.lead > lead for one in order) - 1, 0)
    figure, axes = plt.subplots(figsize=(5.6, 3.4), dpi=110)
    axes.plot(100 * accepted[20:], 100 * wrong[20:], color="#2a6fb0", label="all photos that come")
    axes.axhline(100 * (1 - _PLOTTED), color="#999999", linestyle="--", label="most errors allowed")
    axes.plot(100 * accepted[chosen], 100 * wrong[chosen], "o", color="#c0392b", markersize=8)
    axes.annotate(
        f"chosen with {len(labels):,} labelled photos:\n{accepted[chosen]:.0%} accepted, "
        f"{wrong[chosen]:.1%} of them wrong",
        (100 * accepted[chosen], 100 * wrong[chosen]),
        xytext=(8, 9),
        arrowprops={"arrowstyle": "-", "color": "#c0392b"},
    )
    axes.set_xlabel("accepted without a person, % of the photos")
    axes.set_ylabel("wrong among them, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, None)
    axes.legend(frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)


_PLOTTED = 0.95

if __name__ == "__main__":
    main()
