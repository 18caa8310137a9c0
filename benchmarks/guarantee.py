r"""What answers guarantee, by simulation; and the harm of each broken assumption.

    KINLENS_SHARED=DIR python benchmarks/guarantee.py --cache DIR --json docs/results/guarantee.json
    KINLENS_SHARED=DIR python benchmarks/guarantee.py --cache DIR --sources drawn \
      --plot docs/images/guarantee.png

Groceries, cars and drawn products are embedded once with MobileNetV2 as it comes. A shop is a
random draw of products, and of their photos in the gallery. The other photos are the queries that
come.
Labelled queries are drawn from those, so what a rule really covers is known exactly. Each row has
--draws draws of labels, in equal parts from --shops shops.

The first part has rows whose labels are drawn from what comes: the coverage must not be below the
level by more than chance. In the second part the queries that come are others than the labelled.
The third part is the test for drift: how often it gives a false alarm within 10,000 queries, and
how many other queries come until its alarm. `--only drift` adds this part to the record of the
others.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import grocery_photos, heading, kinlens, options, row, shared_folder, skip
from PIL import Image, ImageFilter
from words import cars

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.types import SAME_SCORE
from kinlens.quality.drift import FALSE_ALARMS, DriftTest
from kinlens.quality.guarantee import KEPT, Guarantee, Judged
from kinlens.quality.intervals import exact_interval
from kinlens.rendered.catalogue import write_catalogue

UNCUT = ("one product", "k = 5", "filter")
LEVEL, ACCEPT = 0.95, 0.95
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
    count: int = 300


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
    Row("int8", c := Condition(precision="int8"), c),
    *(Row(f"{count} labels", BASE, BASE, count=count) for count in (20, 100, 1000)),
)
BROKEN_ROWS = (
    Row("labels in fp32, queries in int8", BASE, Condition(precision="int8")),
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
    )
    for after in (0, 1000)
)
CALM, LONGEST = 10_000, 10_000  # queries without drift, and at most with it


@dataclass(frozen=True)
class Source:
    """Vectors (N, D) by precision, and the product (N,) of each."""

    vectors: dict[str, Array]
    products: Array


@dataclass(frozen=True)
class Shop:
    """The answers to all queries that come."""

    judged: list[Judged]
    scores: Array  # (Q, P) of each product

    def drawn(self, rng: np.random.Generator, count: int, wrong: float) -> Guarantee:
        """The judged labels of `count` queries; a share of them names a wrong product."""
        rows = rng.integers(0, len(self.judged), count)
        chosen = [self.judged[row] for row in rows]
        for n in np.flatnonzero(rng.random(count) < wrong).tolist():
            if not chosen[n].absent:  # the label names another product, drawn at random
                gaps = self.scores[rows[n]].max() - self.scores[rows[n]]
                chosen[n] = chosen[n]._replace(behind=float(rng.choice(gaps[gaps > 0])))
        return Guarantee(
            at=str(rng.random()), items=0, last=0, product="", source="golden", queries=(*chosen,)
        )


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
    ordered = -np.sort(-scores, axis=1)
    best = ordered[:, 0]
    behind = best - scores[np.arange(len(right)), right]
    judged = [
        Judged(float(b), tuple(gaps), None if r < 0 else float(d), absent=bool(r < 0))
        for b, gaps, d, r in zip(
            best, (best[:, None] - ordered[:, :KEPT]).tolist(), behind, right.tolist(), strict=True
        )
    ]
    return Shop(judged, scores)


def uncut(source: Source, condition: Condition, draws: int, shops: int) -> dict[str, float]:
    """How often a set has the right product, of all sets and of those that nothing cuts; and the
    share of these.
    """
    found: dict[str, list[Array]] = {name: [] for name in UNCUT}
    covered = []
    for number in range(shops):
        judged = shop(source, condition, number)
        behind = np.array([one.behind for one in judged.judged])
        gaps = judged.scores.max(axis=1, keepdims=True) - judged.scores
        own = np.isclose(gaps, behind[:, None], atol=1e-7)
        rng = np.random.default_rng(1000 + number)
        for _ in range(draws // shops):
            limit = judged.drawn(rng, 300, 0.0).sets(LEVEL).limits[""] + SAME_SCORE
            covered.append(behind <= limit)
            members = gaps <= limit
            sizes = members.sum(axis=1)
            passes = rng.random(members.shape[1]) < 0.5
            found["one product"].append(sizes == 1)
            found["k = 5"].append(sizes <= 5)
            found["filter"].append(~(members & ~(passes | own)).any(axis=1))
    right = np.concatenate(covered)
    figures = {"all": float(right.mean())}
    for name, parts in found.items():
        chosen = np.concatenate(parts)
        figures |= {name: float(right[chosen].mean()), f"{name}, share": float(chosen.mean())}
    return figures


def figures(source: Source, one: Row, draws: int, shops: int, accept: float) -> dict[str, float]:
    """What draws of labels really cover and accept."""
    covered, sizes, singles, nones, shares, errors = ([] for _ in range(6))
    refused = 0
    for number in range(shops):
        labels, live = shop(source, one.labels, number), shop(source, one.live, number)
        behind = np.array([np.inf if q.behind is None else q.behind for q in live.judged])
        absent = np.array([q.absent for q in live.judged])
        leads = np.array([q.lead for q in live.judged])
        right = np.array([q.is_right for q in live.judged])
        evidence = np.array([q.scores[0] + q.lead for q in live.judged])
        gaps = live.scores.max(axis=1, keepdims=True) - live.scores
        rng = np.random.default_rng(1000 + number)
        for _ in range(draws // shops):
            drawn = labels.drawn(rng, one.count, one.wrong)
            sets = drawn.sets(LEVEL)
            limit = sets.limits[""] + SAME_SCORE
            none = np.zeros(len(leads), bool)
            if sets.none is not None:
                none = evidence <= sets.none + SAME_SCORE
            covered.append(np.where(absent, none, behind <= limit).mean())
            members = (gaps <= limit).sum(axis=1)
            sizes.append(members.mean())
            singles.append(((members == 1) & ~none).mean())
            nones.append(none[~absent].mean())
            try:
                taken = leads > drawn.decisions(accept).leads[""]
            except InvalidParameterError:
                refused += 1
                shares.append(0.0)
                errors.append(0.0)
                continue
            shares.append(taken.mean())
            errors.append((taken & ~right).sum() / max(taken.sum(), 1))
    half = 1.96 * np.std(covered) / np.sqrt(len(covered))
    return {
        "covered": float(np.mean(covered)),
        "half": float(half),
        "size": float(np.mean(sizes)),
        "single": float(np.mean(singles)),
        "none": float(np.mean(nones)),
        "accepted": float(np.mean(shares)),
        "refused": refused / len(covered),
        "harmed": float(np.mean(np.array(errors) > 1 - accept + 1e-9)),
        "draws": len(covered),
    }


def alarm(labels: Shop, live: Shop, after: int, most: int, seed: int) -> int | None:
    """Number of queries that come until the alarm, after some like the labelled ones; None if there
    is no alarm among `most`. After a false one the test begins again.
    """
    rng = np.random.default_rng(seed)
    known = [one.best for one in labels.drawn(rng, 300, 0.0).queries]
    usual, other = ([one.best for one in each.judged] for each in (labels, live))
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


def report_drift(found: dict[str, Source], report: dict[str, Any], runs: int, shops: int) -> None:
    """Print the part about drift, and add it to the report."""
    print(f"\nfalse alarms, at most {FALSE_ALARMS:.0%}, within {CALM:,} queries like the labelled")
    heading("source", "runs", "alarms", "share, 95 % interval")
    for source, images in found.items():
        cells = false_alarms(images, runs, shops)
        report.setdefault(source, {})["no drift"] = cells
        row(source, runs, cells["alarms"], f"{cells['low']:.2%} to {cells['high']:.2%}")
    print("\nother queries until the alarm: median, and 9 of 10 runs")
    heading("source", "queries that come", "after", "median", "9 of 10", "no alarm")
    for source, images in found.items():
        for one in DRIFTS:
            if one.live.precision not in images.vectors:
                continue
            cells = delays(images, one, max(runs // 5, 1), shops)
            report[source][f"{one.name}, after {one.after}"] = cells
            shown = (f"{cells['median']:,}", f"{cells['ninth']:,}", f"{cells['missed']:.0%}")
            row(source, one.name, f"{one.after:,}", *shown)


def report_coverage(
    found: dict[str, Source], report: dict[str, Any], draws: int, shops: int, accept: float
) -> None:
    """Print the first two parts, and add them to the report."""
    for title, rows in (("drawn as the labels", KEPT_ROWS), ("broken assumptions", BROKEN_ROWS)):
        print(f"\n{title}, sets of {LEVEL:.0%}, {accept:.0%} of the accepted right")
        heading(
            *("source", "condition", "covered", "products in a set", "one product and sure"),
            *('"none" though present', "accepted", "no decision", "too many wrong"),
        )
        for source, images in found.items():
            for one in rows:
                if {one.labels.precision, one.live.precision} - images.vectors.keys():
                    continue
                cells = figures(images, one, draws, shops, accept)
                report.setdefault(source, {})[one.name] = cells
                row(
                    source,
                    one.name,
                    f"{cells['covered']:.3f} ± {cells['half']:.3f}",
                    f"{cells['size']:.1f}",
                    *(
                        f"{cells[n]:.1%}"
                        for n in ("single", "none", "accepted", "refused", "harmed")
                    ),
                )
    print("\nsets that nothing cuts: share of these, and how often they have the right product")
    heading("source", "all", *UNCUT)
    for source, images in found.items():
        cells = uncut(images, BASE, draws, shops)
        report.setdefault(source, {})["sets that nothing cuts"] = cells
        shown = (f"{cells[f'{name}, share']:.1%}: {cells[name]:.3f}" for name in UNCUT)
        row(source, f"{cells['all']:.3f}", *shown)


def main() -> None:
    args = options(
        __doc__,
        only="",
        sources=["groceries", "cars", "drawn"],
        products=250,
        draws=500,
        shops=10,
        accept=0.9,
        cache=None,
        json=None,
        plot=None,
    )
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    with tempfile.TemporaryDirectory() as name:
        folder = args.cache or Path(name)
        found = {source: read(shared, folder, source, args.products) for source in args.sources}
    if args.plot is not None:
        plot(found[args.sources[0]], args.plot)
        return
    report: dict[str, Any] = {}
    if args.only == "drift" and args.json is not None:
        report = json.loads(args.json.read_text("utf-8"))
    if args.only != "drift":
        report_coverage(found, report, args.draws, args.shops, args.accept)
    report_drift(found, report, args.draws, args.shops)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read(shared: Path, folder: Path, source: str, drawn: int) -> Source:
    """The vectors of a source, embedded once, with `drawn` drawn products. Those in int8 are read
    if `folder` has them, from a bundle that passed its gate.
    """
    if source == "drawn":
        count = drawn * DRAWN_VIEWS
        paths = [folder / f"{number}" for number in range(count)]
        products = [str(number // DRAWN_VIEWS) for number in range(count)]
    else:
        listed = grocery_photos(shared) if source == "groceries" else _cars(shared, folder)
        paths, products = [path for path, _ in listed], [product for _, product in listed]
    file = folder / f"{source}.npy"
    if not file.is_file():
        if source == "drawn":
            paths = write_catalogue(folder / "drawn", drawn, DRAWN_VIEWS)
        np.save(file, OnnxEmbedder.open(_bundle(shared, folder)).embed_files(paths))
    vectors = {"fp32": np.load(file)}
    if (other := folder / f"{source}-int8.npy").is_file():
        vectors["int8"] = np.load(other)
    if source == "groceries":
        file = folder / "groceries-blurred.npy"
        if not file.is_file():
            np.save(
                file,
                OnnxEmbedder.open(_bundle(shared, folder)).embed_files(_blurred(paths, folder)),
            )
        vectors["blurred"] = np.load(file)
        if (other := folder / "cars.npy").is_file():
            vectors["other"] = np.load(other)
    return Source(vectors, np.unique(products, return_inverse=True)[1])


def _blurred(paths: Sequence[Path], folder: Path) -> list[Path]:
    """The photos out of focus: a small copy of each, blurred by a hundredth of its size."""
    found = []
    (folder / "blurred").mkdir(exist_ok=True)
    for number, path in enumerate(paths):
        image = Image.open(path).convert("RGB")
        image.thumbnail((300, 300))
        found.append(folder / "blurred" / f"{number}.jpg")
        image.filter(ImageFilter.GaussianBlur(3)).save(found[-1], quality=90)
    return found


def _cars(shared: Path, folder: Path) -> list[tuple[Path, str]]:
    return [(path, attributes["product"]) for path, attributes in cars(shared, folder, 0)]


def _bundle(shared: Path, folder: Path) -> Path:
    bundle = folder / "bundle"
    if not bundle.is_dir():
        weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
        network = "--backbone", "mobilenet_v2", "--weights", weights
        kinlens("train", "export", *network, "--out", bundle)
    return bundle


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
    guarantee = Guarantee(at="", items=0, last=0, product="", source="golden", queries=(*labels,))
    lead = guarantee.decisions(ACCEPT).leads[""]
    chosen = max(sum(one.lead > lead for one in order) - 1, 0)
    figure, axes = plt.subplots(figsize=(5.6, 3.4), dpi=110)
    axes.plot(100 * accepted[20:], 100 * wrong[20:], color="#2a6fb0", label="all photos that come")
    axes.axhline(100 * (1 - ACCEPT), color="#999999", linestyle="--", label="most errors allowed")
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


if __name__ == "__main__":
    main()
