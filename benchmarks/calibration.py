"""What a probability is worth: its reliability on classes that the curve was not fitted on.

    kinlens-train data render runs/rendered --products 60 --views 16 --size-px 160 --seed 7
    kinlens-train export --backbone mobilenet_v2 --out runs/trunk --size-px 128 --resize-px 144 \\
      --weights $KINLENS_SHARED/weights/mobilenet_v2-imagenet-fp16.pth
    python benchmarks/calibration.py trunk=runs/trunk:grocery trunk=runs/trunk:cars196-half \\
      trunk=runs/trunk:runs/rendered demo=runs/demo-bundle:runs/rendered shop=runs/shop-bundle:job

Each argument is NAME=BUNDLE:DATA. DATA is `grocery` (81 classes), `cars196-half` (classes 99-196),
both under $KINLENS_SHARED/data, `job` (the test classes of the job that trained the bundle), or a
folder with a sub-folder per class; none of it may have been trained on. Half of the classes, drawn
at random, fit a curve; the other half asks, in galleries of all classes, of that half, and of half
of it. Written: a table on the console, `--json` with the bins, `--plot`. Embeddings are kept in
`--cache`.
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from running import shared_folder

from embedder.bundle import Bundle
from embedder.calibration import Calibration
from embedder.errors import EvaluationError
from embedder.session import OnnxEmbedder
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
QUERIES = 1_000
BINS = 10
BATCH = 64
Labels = NDArray[np.int64]
Likely = Callable[[Hits, int], NDArray[np.float64]]
Asked = tuple[Hits, int, Likely, Likely]
Data = list[tuple[Path, str]]


def main() -> None:
    arguments = parsed()
    rows = [row for case in arguments.cases for row in measured(case, arguments)]
    print("\n" + table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(rows, arguments.plot)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="+", metavar="NAME=BUNDLE:DATA")
    parser.add_argument("--cache", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--repeats", type=int, default=3, help="halvings, each in both directions")
    return parser.parse_args()


def measured(case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each gallery size, or one with the reason why there is no calibration."""
    name, _, rest = case.partition("=")
    path, _, data = rest.rpartition(":")
    vectors, labels = embedded(Path(path), data, arguments.cache)
    row = {"model": name, "data": Path(data).name, "classes": len(np.unique(labels))}
    found: dict[str, list[Asked]] = {size: [] for size in SIZES}
    reasons = []
    for fitted, asking in halvings(labels, arguments.repeats):
        try:
            calibration = fit_calibration(vectors[fitted], labels[fitted], "test")
        except EvaluationError as error:
            reasons.append(str(error))
            continue
        before = score_alone(vectors[fitted], labels[fitted])
        for size, gallery in galleries(labels, fitted, asking):
            hits = answers(vectors, labels, gallery, asking)
            found[size].append((hits, len(gallery), ranked(calibration), before))
    print(f"{case}: {len(reasons)} of {2 * arguments.repeats} refused", flush=True)
    if not found["full"]:
        return [row | {"reason": reasons[0]}]
    return [
        row | {"gallery": size, "refused": len(reasons)} | judged(found[size]) for size in SIZES
    ]


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
    names = np.unique(labels[asking])
    yield "quarter", asking[np.isin(labels[asking], names[::2])]


def answers(vectors: Any, labels: Labels, gallery: Labels, asking: Labels) -> Hits:
    """The best hits of images that are in the gallery and were not fitted on."""
    rng = np.random.default_rng(0)
    queries = some_queries(labels, np.intersect1d(gallery, asking), rng, QUERIES)
    hits = search(vectors, labels, queries, gallery)
    best = hits.ranks <= NEIGHBOURS
    return Hits(hits.scores[:, best], hits.right[:, best], hits.ranks[best], hits.best_wrong)


def ranked(calibration: Calibration) -> Likely:
    """The probability as the service gives it."""
    return lambda hits, items: calibration.for_gallery(items).probability(hits.scores, hits.ranks)


def score_alone(vectors: Any, labels: Labels) -> Likely:
    """As it was before: a logistic curve of the score over the 10 best hits."""
    hits = answers(vectors, labels, np.arange(len(labels)), np.arange(len(labels)))
    scores, right = hits.scores.ravel()[:, None].astype(np.float64), hits.right.ravel()
    slopes, intercept = fit_logistic(scores, right, np.ones(len(right)), (np.inf,))
    return lambda hits, _: 1 / (1 + np.exp(-(slopes[0] * hits.scores + intercept)))


def judged(asked: list[Asked]) -> dict[str, Any]:
    """The figures of all halvings; `error` pools their hits, `error_of_one` is the mean of each."""
    right = np.concatenate([hits.right for hits, *_ in asked])
    now = np.concatenate([likely(hits, items) for hits, items, likely, _ in asked])
    before = np.concatenate([likely(hits, items) for hits, items, _, likely in asked])
    alone = [
        calibration_error(likely(hits, items).ravel(), hits.right.ravel())
        for hits, items, likely, _ in asked
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


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| model | data | gallery | items | error | in one halving | score alone | said | true "
        "| best hit: said | score alone | true |"
    )
    lines = [head, "|" + "---|" * 12]
    for row in rows:
        if "reason" in row:
            lines.append(f"| {row['model']} | {row['data']} | none: {row['reason']} |" + " |" * 9)
            continue
        errors = ("error", "error_of_one", "error_before")
        means = ("said", "true", "said_best", "said_best_before", "true_best")
        figures = " | ".join(f"{row[name]:.3f}" for name in (*errors, *means))
        start = f"| {row['model']} | {row['data']} | {row['gallery']} | {row['items']:,.0f} "
        lines.append(f"{start}| {figures} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Of each case and size, what was said and what was true in each bin."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if "bins" in row]
    cases = list(dict.fromkeys((row["model"], row["data"]) for row in rows))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(2.3 * len(cases), 2.6), sharey=True, squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for row in rows:
            if (row["model"], row["data"]) == case:
                said, true = np.array(row["bins"]).T
                axis.plot(said, true, marker="o", markersize=3, linewidth=1, label=row["gallery"])
        axis.set(title=" on ".join(case), xlabel="said", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axis.title.set_fontsize(9)
    axes[0, 0].set_ylabel("true")
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def embedded(path: Path, data: str, cache: Path) -> tuple[Any, Labels]:
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


def images_of(data: str, bundle: Bundle) -> Data:
    """(path, class) of each image."""
    if data == "job":
        split = load_split(parse_job(bundle.manifest.job).data)
    elif data == "cars196-half":
        split = read_official(OFFICIAL["cars196"], shared_data() / data, allow_partial=True)
    elif data == "grocery":
        return groceries(shared_data() / "grocery-store")
    else:
        folders = sorted(folder for folder in Path(data).iterdir() if folder.is_dir())
        return [(path, folder.name) for folder in folders for path in sorted(folder.iterdir())]
    test = split.test
    return [
        (test.root / path, test.class_names[label])
        for path, label in zip(test.paths, test.labels, strict=True)
    ]


def groceries(root: Path) -> Data:
    found = []
    for part in ("train", "val", "test"):
        with (root / f"{part}.txt").open(newline="", encoding="utf-8") as stream:
            found += [(root / row[0].strip(), row[1].strip()) for row in csv.reader(stream) if row]
    return found


def shared_data() -> Path:
    shared = shared_folder()
    if shared is None:
        raise SystemExit("This data needs $KINLENS_SHARED, with the folder data/ in it.")
    return shared / "data"


if __name__ == "__main__":
    main()
