"""Accuracy of probabilities in galleries that differ as shops do.

    kinlens-train data render runs/drawn --products 320 --views 24 --size-px 96 --seed 11
    kinlens-train export --backbone mobilenet_v2 --out runs/trunk --size-px 128 --resize-px 144 \\
      --weights $KINLENS_SHARED/weights/mobilenet_v2-imagenet-fp16.pth
    kinlens-train fit cars196-half --out runs/cars \\
      --set data.root=$KINLENS_SHARED/data/cars196-half \\
      --set model.weights=$KINLENS_SHARED/weights/mobilenet_v2-imagenet-fp16.pth \\
      --set optimizer.epochs=3 --set input.size_px=112 --set input.test_px=112 \\
      --set input.resize_px=128
    kinlens-train export runs/cars --out runs/cars-bundle
    python benchmarks/calibration.py trunk=runs/trunk:grocery trunk=runs/trunk:cars196-half \\
      trunk=runs/trunk:runs/drawn demo=runs/demo-bundle:runs/drawn \\
      cars=runs/cars-bundle:cars196-half cars=runs/cars-bundle:grocery --json docs/calibration.json

Each argument is NAME=BUNDLE:DATA. DATA is `grocery` (81 classes), `cars196-half` (classes 99-196),
both under $KINLENS_SHARED/data, `job` (the test classes of the job that trained the bundle), or a
folder with a sub-folder per class; none of it may have been trained on. Without an argument: the
trunk, with random weights if its own are not available, on products rendered for it.

Randomly drawn classes fit the curves of the bundle. The others make galleries: 1, 2, 4, 8 or 16
images of each product, or in turn 1, 1, 2, 4 and 8 ("mixed"); half, the same, and if there are
enough classes ten times the fitted number of products. The other images of these products are
queries. For 0, 20 or 50 % of them the product is removed from the gallery, which is the prior of
the curve. Each source is evaluated separately: the gallery's labels (its items search for each
other), a golden set (images of one half of the products, which are not queries) and the curves of
the bundle. A row pools `--repeats` draws; its errors are expected calibration errors of the best
hit and of the ten best hits. Output: a table, and `--json`. `--cache` stores embeddings.
"""

import csv
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from harness import heading, kinlens, options, row, shared_folder, skip, verdict
from numpy.typing import NDArray

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.calibration import Calibration, Curve, Searches, calibration_error
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embeddings, Hit
from kinlens.indexer.calibration import Calibrated, Fit, Labelled, choose, fit_gallery, fit_golden
from kinlens.indexer.types import Item, SearchOptions
from kinlens.training.config.job import parse_job
from kinlens.training.data.datasets import OFFICIAL, read_official
from kinlens.training.data.load import load_split
from kinlens.training.export.calibration import MIN_CLASSES, candidates_of, fit_calibration
from kinlens.values import AttributeValue

VIEWS = {1: [1], 2: [2], 4: [4], 8: [8], 16: [16], "mixed": [1, 1, 2, 4, 8]}
SIZES = {"half": 0.5, "same": 1.0, "ten times": 10.0}
ABSENT = (0.0, 0.2, 0.5)
TARGETS = {"golden": 0.05, "gallery": 0.05, "bundle": 0.10}
ASKING, QUERIES, BATCH, TEN = 10, 800, 64, 10
Labels = NDArray[np.int64]
Row = dict[str, Any]


def main() -> None:
    args = options(
        __doc__, "cases", cases=list[str](), cache=Path("runs/calibration"), json=None, repeats=16
    )  # fmt: skip
    rows = [found for case in cases_of(args) for found in measured(case, args)]
    names = ("model", "data", "products", "views", "gallery", "source", "absent", "draws")
    figures = ("best hit: error", "predicted", "true", "ten best: error", "predicted", "true")
    heading(*names, *figures)
    for one in rows:
        row(*(one[name] for name in names), *(one.get(name, "-") for name in FIGURES))
    for source, target in TARGETS.items():
        of_source = [one for one in rows if one["source"] == source and one["draws"]]
        if of_source:
            for name, what in (("error_best", "best hit"), ("error_ten", "ten best hits")):
                worst = max(one[name] for one in of_source)
                missed = sum(one[name] > target for one in of_source)
                text = f"{source}, {what}: worst of {len(of_source)} cases, {missed} above"
                verdict(text, worst, target, at_most=True)
    if args.json:
        lines = ",\n".join(map(json.dumps, rows))
        args.json.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


FIGURES = ("error_best", "said_best", "true_best", "error_ten", "said_ten", "true_ten")


def cases_of(args: Namespace) -> list[str]:
    """The given cases; by default one that needs no data, generated in the cache."""
    if args.cases:
        return list(args.cases)
    shared, bundle, data = shared_folder(), args.cache / "trunk", args.cache / "rendered"
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth" if shared else "none"
    if not data.exists():
        kinlens("train", "data", "render", data, "--products", 40, "--views", 8, "--size-px", 80)
    if not bundle.exists():
        side = ("--size-px", 64, "--resize-px", 72, "--weights", weights)
        kinlens("train", "export", "--backbone", "mobilenet_v2", "--out", bundle, *side)
    return [f"trunk={bundle}:{data}"]


def measured(case: str, args: Namespace) -> list[Row]:
    """A row per gallery, source and share of absent products; `draws` counts successful fits."""
    name, path, data = parts_of(case)
    vectors, labels = embedded(path, data, args.cache)
    pooled: dict[tuple[Any, ...], list[tuple[Searches, Curve]]] = {}
    products: dict[tuple[str, Views], int] = {}
    for seed in range(args.repeats):
        for size, views, count, source, asking, curve in sources(vectors, labels, seed):
            products[size, views] = count
            for absent in ABSENT:
                found = pooled.setdefault((size, views, source, absent), [])
                if curve is not None:
                    found.append((with_absent(asking, absent, seed), curve))
    return [
        {
            "model": name,
            "data": Path(data).name,
            "products": products[size, views],
            "views": views,
            "gallery": size,
            "source": source,
            "absent": absent,
            "draws": len(found),
            **(judged(found, absent) if found else {}),
        }
        for (size, views, source, absent), found in pooled.items()
    ]


Asking = tuple[Searches, Searches]
Views = int | str
Source = tuple[str, Views, int, str, Asking, Curve | None]


def sources(vectors: Embeddings, labels: Labels, seed: int) -> Iterator[Source]:
    """Size, views and products of each gallery; each source with its queries, which it has not
    seen, with their product in the gallery and without it; and its curve or the refusal.
    """
    rng = np.random.default_rng(seed)
    names = rng.permutation(np.unique(labels))
    # A tenth if that is enough to fit, so that some galleries have ten times the products.
    part = len(names) // 11 if len(names) // 11 >= MIN_CLASSES else len(names) // 2
    fitted, others = names[:part], names[part:]
    of_fitted = np.isin(labels, fitted)
    bundle: Calibration | None = None
    try:
        bundle = fit_calibration(vectors[of_fitted], labels[of_fitted], "test", seed)
    except CalibrationError as error:
        print(f"no curves of the bundle: {error}", flush=True)
    for size, times in SIZES.items():
        for views, images in VIEWS.items():
            usable = [one for one in others if (labels == one).sum() > max(images)]
            chosen = usable[: round(times * part)]
            if len(chosen) < 0.8 * times * part:
                continue
            shop = Shop.drawn(vectors, labels, np.array(chosen), images, rng)
            everyone = shop.asking(shop.queries)
            own = fit_gallery(shop)
            yield size, views, len(chosen), "gallery", everyone, curve_of(own.gallery)
            half = np.isin(labels[shop.queries], chosen[::2])
            golden = fit_golden(shop, "class", shop.labelled(shop.queries[half]))
            rest = shop.asking(shop.queries[~half])
            yield size, views, len(chosen), "golden", rest, curve_of(golden)
            alone = own.model_copy(update={"gallery": "", "golden": ""})
            offered = choose(alone, bundle, None)
            curve = offered.curve if isinstance(offered, Calibrated) else None
            yield size, views, len(chosen), "bundle", everyone, curve


def curve_of(fit: Fit | str) -> Curve | None:
    return fit.curve if isinstance(fit, Fit) else None


def with_absent(asking: Asking, absent: float, seed: int) -> Searches:
    """Queries of which a share has its product removed from the gallery."""
    present, masked = asking
    order = np.random.default_rng(seed).permutation(len(present))
    cut = round(absent * len(order))
    return Searches.joined([present[order[cut:]], masked[order[:cut]]])


def judged(found: Sequence[tuple[Searches, Curve]], absent: float) -> Row:
    """Errors of all draws pooled: those of a single draw depend on its products by chance."""
    figures: Row = {}
    for name, hits in (("best", 1), ("ten", TEN)):
        predicted, true = [], []
        for searches, curve in found:
            likely = searches.probabilities(curve, absent)[:, :hits]
            exists = np.isfinite(searches.scores[:, :hits])
            predicted.append(likely[exists])
            true.append(searches.right[:, :hits][exists])
        likely, right = np.concatenate(predicted), np.concatenate(true)
        figures[f"error_{name}"] = calibration_error(likely, right)
        figures[f"said_{name}"], figures[f"true_{name}"] = likely.mean(), right.mean()
    return {name: round(float(value), 4) for name, value in figures.items()}


@dataclass(frozen=True)
class Shop:
    """A gallery in memory with exact search, and `queries` that are not in it."""

    vectors: Embeddings
    labels: Labels
    gallery: Labels
    queries: Labels

    @classmethod
    def drawn(
        cls,
        vectors: Embeddings,
        labels: Labels,
        names: Labels,
        views: Sequence[int],
        rng: np.random.Generator,
    ) -> "Shop":
        """Up to that many images of each class, by class in turn; others are queries."""
        images = [rng.permutation(np.flatnonzero(labels == name)) for name in names]
        stocked = [some[:count] for some, count in zip(images, cycle(views), strict=False)]
        most = max(views)
        queries = np.concatenate([some[most : most + ASKING] for some in images])
        if len(queries) > QUERIES:
            queries = rng.choice(queries, QUERIES, replace=False)
        return cls(vectors, labels, np.concatenate(stocked), queries)

    @property
    def size(self) -> int:
        return len(self.gallery)

    @property
    def last_id(self) -> int:
        return self.size

    def sample(self, count: int) -> tuple[list[Item], Embeddings]:
        chosen = np.arange(self.size)
        if self.size > count:
            chosen = np.sort(np.random.default_rng(0).choice(self.size, count, replace=False))
        items = [
            Item(
                int(n),
                f"{n}",
                "",
                f"{n:064x}",
                {"class": self._name(self.labels[self.gallery[n]])},
                "",
            )
            for n in chosen
        ]
        return items, self.vectors[self.gallery[chosen]]

    def product_counts(
        self, name: str, values: Sequence[AttributeValue]
    ) -> tuple[Mapping[int, int], Mapping[AttributeValue, int]]:
        names, counts = np.unique(self.labels[self.gallery], return_counts=True)
        sizes: dict[AttributeValue, int] = {}
        for label, count in zip(names, counts.tolist(), strict=True):
            sizes[self._name(label)] = count
        return Counter(counts.tolist()), {value: sizes[value] for value in values}

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        scores = queries @ self.vectors[self.gallery].T
        order = np.argsort(-scores, axis=1)[:, :k]
        names = [self._name(label) for label in self.labels[self.gallery]]
        return [
            [Hit(int(n), f"{n}", float(own[n]), {"class": names[n]}) for n in best]
            for own, best in zip(scores, order, strict=True)
        ]

    def asking(self, queries: Labels) -> Asking:
        """Hits of these queries, with their class in the gallery and without it."""
        return candidates_of(self.vectors, self.labels, queries, self.gallery)

    def labelled(self, queries: Labels) -> Iterator[Labelled]:
        """The queries as in a golden set."""
        for query in queries:
            name = self._name(self.labels[query])
            yield self.vectors[query], name, lambda hit, name=name: hit.attributes["class"] == name

    @staticmethod
    def _name(label: object) -> str:
        return f"p{label}"


# Labelled embeddings; benchmarks/rerank.py takes the same arguments


def parts_of(case: str) -> tuple[str, Path, str]:
    """Name, bundle and data of NAME=BUNDLE:DATA."""
    name, _, rest = case.partition("=")
    path, _, data = rest.rpartition(":")
    if not (name and path and data):
        raise SystemExit(f"{case!r} is not NAME=BUNDLE:DATA, such as trunk=runs/trunk:grocery.")
    return name, Path(path), data


def embedded(path: Path, data: str, cache: Path) -> tuple[Embeddings, Labels]:
    """Vectors (N, D) and classes (N,) of the data, from the cache if it has them."""
    bundle = Bundle.open(path)
    file = cache / f"{bundle.bundle_id[:12]}-{Path(data).name}.npz"
    if not file.exists():
        images = images_of(data, bundle)
        model = OnnxEmbedder.open(bundle)
        chunks = [
            model.embed(
                np.stack([model.preprocess(p.read_bytes()) for p, _ in images[n : n + BATCH]])
            )
            for n in range(0, len(images), BATCH)
        ]
        _, labels = np.unique([name for _, name in images], return_inverse=True)
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(file, vectors=np.concatenate(chunks), labels=labels)
    with np.load(file) as stored:
        return stored["vectors"], stored["labels"]


def images_of(data: str, bundle: Bundle) -> list[tuple[Path, str]]:
    """(path, class) of each image."""
    if data == "grocery":
        parts = groceries()
        return [image for part in parts.values() for image in part]
    if data == "job":
        test = load_split(parse_job(bundle.manifest.job).data).test
    elif data == "cars196-half":
        test = read_official(OFFICIAL["cars196"], shared_data() / data, allow_partial=True).test
    else:
        folders = sorted(folder for folder in Path(data).iterdir() if folder.is_dir())
        return [(path, folder.name) for folder in folders for path in sorted(folder.iterdir())]
    names = (test.class_names[label] for label in test.labels)
    return [(test.root / path, name) for path, name in zip(test.paths, names, strict=True)]


def groceries() -> dict[str, list[tuple[Path, str]]]:
    """The images of each split."""
    root, found = shared_data() / "grocery-store", {}
    for part in ("train", "val", "test"):
        with (root / f"{part}.txt").open(newline="", encoding="utf-8") as stream:
            rows = [one for one in csv.reader(stream) if one]
        # The halves of the classes depend on their order, here by number.
        found[part] = [(root / one[0].strip(), one[1].strip().zfill(2)) for one in rows]
    return found


def shared_data() -> Path:
    shared = shared_folder()
    if shared is None:
        skip("this data needs $KINLENS_SHARED with its folder data/")
    return shared / "data"


if __name__ == "__main__":
    main()
