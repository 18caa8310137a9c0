"""What a probability is worth: its reliability on classes that the curve was not fitted on.

    kinlens-train data render runs/rendered --products 60 --views 16 --size-px 160 --seed 7
    kinlens-train export --backbone mobilenet_v2 --out runs/trunk --size-px 128 --resize-px 144 \\
      --weights $KINLENS_SHARED/weights/mobilenet_v2-imagenet-fp16.pth
    python benchmarks/calibration.py trunk=runs/trunk:grocery trunk=runs/trunk:cars196-half \\
      trunk=runs/trunk:runs/rendered demo=runs/demo-bundle:runs/rendered shop=runs/shop-bundle:job

Each argument is NAME=BUNDLE:DATA. DATA is `grocery` (81 classes), `cars196-half` (classes 99-196),
both under $KINLENS_SHARED/data, `job` (the test classes of the job that trained the bundle), or a
folder with a sub-folder per class; none of it may have been trained on. Without an argument: the
trunk, with random weights where its own are not to be had, on products that are drawn for it. Half
of the classes, drawn at random, fit a curve; the other half asks, in galleries of all classes, of
that half, and of half of it. Beside it stands the curve that bundles had before: a logistic of the
score alone. Written: a table on the console, `--json` with the bins, `--plot`. Embeddings are kept
in `--cache`.
"""

import csv
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import heading, kinlens, options, row, shared_folder, skip
from numpy.typing import NDArray

from embedder.bundle import Bundle
from embedder.errors import EvaluationError
from embedder.session import OnnxEmbedder
from embedder.types import Embeddings
from training.config.job import parse_job
from training.data.datasets import OFFICIAL, read_official
from training.data.load import load_split
from training.export.calibration import (
    NEIGHBOURS,
    Hits,
    calibration_error,
    fit_calibration,
    fit_logistic,
    search,
    some_queries,
)

SIZES = ("full", "half", "quarter")
QUERIES, BINS, BATCH = 1_000, 10, 64
FIGURES = {
    "error": "error", "error_of_one": "in one halving", "error_before": "score alone",
    "said": "said", "true": "true", "said_best": "best hit: said",
    "said_best_before": "score alone", "true_best": "true",
}  # fmt: skip
Labels = NDArray[np.int64]
Likely = Callable[[Hits], NDArray[np.float64]]
Asked = tuple[Hits, int, Likely, Likely]
Row = dict[str, Any]


def main() -> None:
    asked = options(
        __doc__, "cases", cases=list[str](), cache=Path("runs/calibration"), json=None, plot=None,
        repeats=3,
    )  # fmt: skip
    rows = [found for case in cases_of(asked) for found in measured(case, asked)]
    heading("model", "data", "gallery", "items", *FIGURES.values())
    for one in rows:
        start = (one["model"], one["data"])
        if "reason" in one:
            row(*start, f"none: {one['reason']}", *[""] * (1 + len(FIGURES)))
        else:
            figures = (f"{one[name]:.3f}" for name in FIGURES)
            row(*start, one["gallery"], round(one["items"]), *figures)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if asked.plot:
        plot([one for one in rows if "bins" in one], asked.plot)


def cases_of(asked: Namespace) -> list[str]:
    """Those that were asked for; else one that needs nothing, made in the cache."""
    if asked.cases:
        return list(asked.cases)
    shared, bundle, data = shared_folder(), asked.cache / "trunk", asked.cache / "rendered"
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth" if shared else "none"
    if not data.exists():
        kinlens("train", "data", "render", data, "--products", 40, "--views", 8, "--size-px", 80)
    if not bundle.exists():
        side = ("--size-px", 64, "--resize-px", 72, "--weights", weights)
        kinlens("train", "export", "--backbone", "mobilenet_v2", "--out", bundle, *side)
    return [f"trunk={bundle}:{data}"]


def measured(case: str, asked: Namespace) -> list[Row]:
    """A row for each gallery size, or one with the reason why there is no calibration."""
    name, path, data = parts_of(case)
    vectors, labels = embedded(path, data, asked.cache)
    head = {"model": name, "data": Path(data).name, "classes": len(np.unique(labels))}
    found: dict[str, list[Asked]] = {size: [] for size in SIZES}
    reasons = []
    for fitted, asking in halvings(labels, asked.repeats):
        try:
            curve = fit_calibration(vectors[fitted], labels[fitted], "test")
        except EvaluationError as error:
            reasons.append(str(error))
            continue
        before = score_alone(vectors[fitted], labels[fitted])
        for size, gallery in galleries(labels, fitted, asking):
            hits = answers(vectors, labels, gallery, asking)
            here = curve.for_gallery(len(gallery))
            now: Likely = lambda hits, here=here: here.probability(hits.scores, hits.ranks)
            found[size].append((hits, len(gallery), now, before))
    print(f"{case}: {len(reasons)} of {2 * asked.repeats} refused", flush=True)
    if not found["full"]:
        return [head | {"reason": reasons[0]}]
    refused = {"refused": len(reasons)}
    return [head | {"gallery": size} | refused | judged(found[size]) for size in SIZES]


def halvings(labels: Labels, repeats: int) -> Iterator[tuple[Labels, Labels]]:
    """Numbers of the images of two halves of the classes, each half once the first."""
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        names = rng.permutation(np.unique(labels))
        inside = np.isin(labels, names[: len(names) // 2])
        one, other = np.flatnonzero(inside), np.flatnonzero(~inside)
        yield one, other
        yield other, one


def galleries(labels: Labels, fitted: Labels, asking: Labels) -> Iterator[tuple[str, Labels]]:
    yield "full", np.concatenate((fitted, asking))
    yield "half", asking
    yield "quarter", asking[np.isin(labels[asking], np.unique(labels[asking])[::2])]


def answers(vectors: Embeddings, labels: Labels, gallery: Labels, asking: Labels) -> Hits:
    """The best hits of images that are in the gallery and were not fitted on."""
    rng = np.random.default_rng(0)
    queries = some_queries(labels, np.intersect1d(gallery, asking), rng, QUERIES)
    hits = search(vectors, labels, queries, gallery)
    best = hits.ranks <= NEIGHBOURS
    return Hits(hits.scores[:, best], hits.right[:, best], hits.ranks[best], hits.best_wrong)


def score_alone(vectors: Embeddings, labels: Labels) -> Likely:
    """A logistic curve of the score over the 10 best hits, the same for any rank and gallery."""
    every = np.arange(len(labels))
    hits = answers(vectors, labels, every, every)
    scores, right = hits.scores.ravel()[:, None].astype(np.float64), hits.right.ravel()
    slopes, intercept = fit_logistic(scores, right, np.ones(len(right)), (np.inf,))
    return lambda hits: 1 / (1 + np.exp(-(slopes[0] * hits.scores + intercept)))


def judged(asked: list[Asked]) -> Row:
    """The figures of all halvings; `error` pools their hits, `error_of_one` is the mean of each."""
    right = np.concatenate([hits.right for hits, *_ in asked])
    now = np.concatenate([likely(hits) for hits, _, likely, _ in asked])
    before = np.concatenate([likely(hits) for hits, _, _, likely in asked])
    alone = [
        calibration_error(likely(hits).ravel(), hits.right.ravel()) for hits, _, likely, _ in asked
    ]
    parts = np.array_split(np.argsort(now, axis=None, kind="stable"), BINS)
    return {
        "items": float(np.mean([items for _, items, *_ in asked])),
        "error": calibration_error(now.ravel(), right.ravel()),
        "error_of_one": float(np.mean(alone)),
        "error_before": calibration_error(before.ravel(), right.ravel()),
        "said": float(now.mean()),
        "true": float(right.mean()),
        "said_best": float(now[:, 0].mean()),
        "said_best_before": float(before[:, 0].mean()),
        "true_best": float(right[:, 0].mean()),
        "bins": [[float(x.ravel()[part].mean()) for x in (now, right)] for part in parts],
    }


def plot(rows: list[Row], path: Path) -> None:
    """Of each case and size, what was said and what was true in each bin."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys((one["model"], one["data"]) for one in rows))
    size = (2.3 * len(cases), 2.6)
    figure, axes = plt.subplots(1, len(cases), figsize=size, sharey=True, squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for one in rows:
            if (one["model"], one["data"]) == case:
                said, true = np.array(one["bins"]).T
                axis.plot(said, true, marker="o", markersize=3, linewidth=1, label=one["gallery"])
        axis.set(title=" on ".join(case), xlabel="said", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axis.title.set_fontsize(9)
    axes[0, 0].set_ylabel("true")
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


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
        # The halves of the classes are drawn by their order: that of the numbers.
        found[part] = [(root / one[0].strip(), one[1].strip().zfill(2)) for one in rows]
    return found


def shared_data() -> Path:
    shared = shared_folder()
    if shared is None:
        skip("this data needs $KINLENS_SHARED, with the folder data/ in it")
    return shared / "data"


if __name__ == "__main__":
    main()
