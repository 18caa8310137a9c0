"""Effect of each regularizer on heads of a frozen trunk: where it is above, below or equal.

    KINLENS_SHARED=DIR python benchmarks/regularizers.py --json docs/results/heads/cars.json

Heads on cached features of MobileNetV2 at 176 px; the public half of Cars196, tested on classes
99-196. Each condition changes one thing of "20 epochs": 512 dimensions, all classes, images and
labels. A row differs from its baseline only in the regularizer: loss, start, batches, steps and
seed are the same. A difference is paired by seed. A bold one is not zero by Student's 95 %
interval, corrected for all comparisons of the table (Bonferroni); "above" and "below" mean that.

Figures: R@1 and MAP@R; R@1 with a gallery of one image a class (five draws); how often the best
hit of a query is nearer than that of a query whose product is absent (AUROC); the expected
calibration error of the best hit on half of the test classes, with a curve fitted on the others;
R@1 on groceries.

Hypotheses from before the first run with four seeds: (H1) with Proxy-Anchor none is above its
baseline; (H2) graph consistency is above with triplets; (H3) the determinant is neither; (H4)
an effect above with few classes is also above with all; (H5) noise, which bounds the likelihood
of non-isotropy, changes its R@1 by less than a point; (H6) graph consistency is above with the
margin loss; (H7) at 100 epochs on a tenth of the classes only graph consistency is above. From
before the run with the other conditions: (H8) with triplets, graph consistency is above in each
condition, and most with wrong labels; (H9) with Proxy-Anchor and four images a class none is
above; (H10) in 64 dimensions skewed mean is even; (H11) three times the share keeps the sign of
each effect; (H12) AUROC and R@1 on groceries have the sign of MAP@R where that is above or below;
(H13) the determinant with a slow flow is even in each condition that was run. The shares come from
the jobs or from the papers' nearest values; none was searched here.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import heading, options, row, shared_folder, skip
from numpy.typing import NDArray
from scipy import stats

from kinlens.embedder.calibration import Searches, fit_curve
from kinlens.training.checkpoint import Average
from kinlens.training.config.job import Job, load_job, parse_job
from kinlens.training.data.features import CachedFeatures, pooled_views
from kinlens.training.data.images import build_loader
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.data.records import LabelledImages, Split, labelled
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.evaluation.evaluate import evaluate_embeddings, through_head
from kinlens.training.export.calibration import candidates_of
from kinlens.training.folder import replace_json
from kinlens.training.start import start_from_features
from kinlens.training.state import Run, create_run
from kinlens.training.trainer import train_step

_PAIRS: dict[str, Any] = {"sampling": {"per_class": 5}, "start": {"proxies": "random"}}
LOSSES: dict[str, dict[str, Any]] = {
    "triplet": {"loss": {"name": "triplet", "margin": 0.05}, **_PAIRS},
    "proxy_anchor": {"loss": {"name": "proxy_anchor"}},
    "softmax": {
        "loss": {"name": "arcface", "margin_degrees": 0.0, "scale": 20.0},
        "optimizer": {"lr_proxies": 1e-3},
    },
    "n_pair": {
        "loss": {"name": "n_pair"},
        "sampling": {"per_class": 2},
        "start": {"proxies": "random"},
        "optimizer": {"batch_size": 88},
    },
    "binomial_deviance": {"loss": {"name": "binomial_deviance"}, **_PAIRS},
    "margin": {"loss": {"name": "margin"}, **_PAIRS, "optimizer": {"lr_proxies": 5e-5}},
    "multi_similarity": {"loss": {"name": "multi_similarity"}, **_PAIRS},
}
REGULARIZERS: dict[str, dict[str, Any]] = {
    "none": {},
    "determinant 0.1": {"determinant": {"activation": "none", "share": 0.1}},
    "determinant 0.1, slow flow": {"determinant": {"activation": "none", "share": 0.1}},
    "skewed mean 0.2": {"skewed_mean": {"hinge": True, "delta": 0.45, "gamma": 10.0, "share": 0.2}},
    "non-isotropy 0.02": {
        "non_isotropy": {"exponentiate": False, "weight": 0.005, "fit_epochs": 1, "share": 0.02}
    },
    "non-isotropy 0.02, noise": {
        "non_isotropy": {
            "exponentiate": False,
            "weight": 0.005,
            "fit_epochs": 1,
            "share": 0.02,
            "noise": 0.05,
        }
    },
    "graph consistency 0.3": {"graph_consistency": {"share": 0.3}},
}
_SLOW_FLOW = 2e-5  # the rate of the flow; the job has 1e-4
_BEFORE = ("determinant 0.1", "non-isotropy 0.02")  # run with `before` alone
_ON_PROXIES = ("skewed_mean", "non_isotropy")
_WITH_PROXIES = ("proxy_anchor", "softmax")


class Condition(NamedTuple):
    """What a head is trained on; `images` of each class, all if 0; `factor` of each share."""

    epochs: int = 20
    classes: float = 1.0
    images: int = 0
    wrong_labels: float = 0.0
    dim: int = 512
    factor: int = 1


CONDITIONS = {
    "20 epochs": Condition(),
    "3 times the share": Condition(factor=3),
    "4 images a class": Condition(images=4),
    "a tenth of the classes": Condition(classes=0.1),
    "a tenth of the classes, 100 epochs": Condition(classes=0.1, epochs=100),
    "40 % wrong labels": Condition(wrong_labels=0.4),
    "64 dimensions": Condition(dim=64),
    "5 epochs": Condition(epochs=5),
    "5 epochs, half of the classes": Condition(epochs=5, classes=0.5),
    "20 epochs, half of the classes": Condition(classes=0.5),
}
_WITH_DETERMINANT = ("20 epochs", "4 images a class", "a tenth of the classes")
"""Its flow takes five times as long as a head."""
FIGURES = ("R@1", "MAP@R", "1 image", "AUROC", "calibration error", "groceries")
Cell = tuple[int, str, str, str]


def main() -> None:
    args = options(
        __doc__,
        seeds=5,
        losses=["proxy_anchor", "triplet"],
        conditions=list(CONDITIONS)[:7],
        before=False,
        processes=2,
        json=None,
    )
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    _data()  # computes the features once, before the processes need them
    found: dict[str, dict[str, float]] = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    wanted = [
        cell
        for seed in range(args.seeds)
        for cell in cells_of(seed, args.losses, args.conditions, args.before)
        if len(found.get(name_of(*cell), ())) < len(FIGURES)
    ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for cell, figures in zip(wanted, pool.map(run, wanted), strict=True):
            found[name_of(*cell)] = figures
            if args.json is not None:
                replace_json(args.json, found)
    report(found)


def cells_of(seed: int, losses: list[str], conditions: list[str], before: bool) -> Iterator[Cell]:
    """Every training of a seed; `before` adds those that only the first run had."""
    for condition, loss, (name, settings) in product(conditions, losses, REGULARIZERS.items()):
        if settings.keys() & set(_ON_PROXIES) and loss not in _WITH_PROXIES:
            continue
        if name in _BEFORE and not before:
            continue
        if name == "none" and CONDITIONS[condition].factor > 1:
            continue  # the baseline of "20 epochs"
        if "determinant" in settings and condition not in _WITH_DETERMINANT and not before:
            continue
        yield seed, loss, condition, name


def name_of(seed: int, loss: str, condition: str, regularizer: str) -> str:
    return f"{loss}|{condition}|{regularizer}|{seed}"


def cars_job(shared: Path, *changes: str) -> Job:
    """The recipe on half of Cars196 with the weights of the shared folder, with overrides."""
    data, weights = shared / "data/cars196-half", shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    return load_job("cars196-half", [f"data.root={data}", f"model.weights={weights}", *changes])


def base_job(shared: Path) -> Job:
    return cars_job(
        shared,
        "model.frozen_trunk=true",
        "input.test_px=176",
        "start.projection=within_class",
        "optimizer.lr_head=1e-3",
        "runtime.precision=fp32",
        "runtime.device=cpu",
    )


def grocery_photos(shared: Path) -> LabelledImages:
    """The photos of Grocery Store, by the name of their product."""
    root = shared / "data/grocery-store"
    photos = [record.path for record in read_folder(root) if "iconic" not in record.path]
    return labelled(root, [(path, Path(path).parent.name) for path in photos])


class _Data(NamedTuple):
    job: Job
    split: Split
    train: torch.Tensor  # three views of each image
    test: torch.Tensor  # the view of the service, as of groceries
    groceries: torch.Tensor
    grocery_labels: NDArray[np.int64]


@cache
def _data() -> _Data:
    """The job, its images and their features, read once per process."""
    shared = shared_folder()
    assert shared is not None
    job = base_job(shared)
    split = load_split(job.data)
    groceries, net = grocery_photos(shared), create_run(job, split.train.classes).net

    def served(images: LabelledImages) -> torch.Tensor:
        return pooled_views(net, images, job.input, job.runtime)[:, 0]

    train = pooled_views(net, split.train, job.input, job.runtime, 3)
    return _Data(job, split, train, served(split.test), served(groceries), groceries.labels)


def run(cell: Cell) -> dict[str, float]:
    """Train a head and evaluate it on the test classes."""
    torch.set_num_threads(1)
    seed, loss, name, regularizer = cell
    condition, data = CONDITIONS[name], _data()
    every = data.split.train
    job = _job(data.job, loss, condition, regularizer, seed, every.classes)
    rng = np.random.default_rng(seed)
    classes = rng.choice(every.classes, round(condition.classes * every.classes), replace=False)
    rows = np.flatnonzero(np.isin(every.labels, classes))
    if condition.images:
        shuffled = rng.permutation(rows)
        rows = np.sort(
            np.concatenate(
                [shuffled[every.labels[shuffled] == c][: condition.images] for c in classes]
            )
        )
    labels = np.unique(every.labels[rows], return_inverse=True)[1]
    is_wrong = rng.random(len(labels)) < condition.wrong_labels
    moved = (labels + rng.integers(1, len(classes), len(labels))) % len(classes)
    labels = np.where(is_wrong, moved, labels)
    torch.manual_seed(seed)
    views = data.train[torch.from_numpy(rows)]  # (N, V, C)
    state, order = begin(job, views[:, 0], labels)
    runtime = job.runtime.model_copy(update={"workers": 0})
    loader = build_loader(CachedFeatures(views, labels, seed), order, runtime, state.device, seed)
    while state.epoch < condition.epochs:
        order.epoch = state.epoch
        model = state.begin_epoch(trunk_frozen=False)
        for pixels, chosen in loader:
            train_step(state, model, pixels, chosen, len(order))
        state.epoch += 1
    test = through_head(state.served, data.test)
    found = evaluate_embeddings(test, data.split.test.labels, full=False)
    others = through_head(state.served, data.groceries)
    figures = {
        **{figure: found[figure] for figure in ("R@1", "MAP@R")},
        **open_set(test, data.split.test.labels),
        "groceries": evaluate_embeddings(others, data.grocery_labels, full=False)["R@1"],
    }
    return {figure: round(value, 3) for figure, value in figures.items()}


def _job(
    base: Job, loss: str, condition: Condition, regularizer: str, seed: int, classes: int
) -> Job:
    content = base.as_dict()
    content["seed"], content["optimizer"]["epochs"] = seed, condition.epochs
    content["model"]["dim"] = condition.dim
    with_loss(content, LOSSES[loss])
    # A batch draws a class at most twice.
    largest = 2 * content["sampling"]["per_class"] * round(condition.classes * classes)
    content["optimizer"]["batch_size"] = min(content["optimizer"]["batch_size"], largest)
    if "slow flow" in regularizer:
        content["optimizer"]["lr_flows"] = _SLOW_FLOW
    content["regularizers"] = {
        name: settings | {"share": settings["share"] * condition.factor}
        for name, settings in REGULARIZERS[regularizer].items()
    }
    return parse_job(content)


def with_loss(content: dict[str, Any], settings: dict[str, Any]) -> None:
    """Put the loss and the tables of `settings` into the content of a job."""
    content["loss"] = settings["loss"]
    for table in ("sampling", "start", "optimizer"):
        content[table] |= settings.get(table, {})


def open_set(vectors: NDArray[np.float32], labels: NDArray[np.int64]) -> dict[str, float]:
    """One-shot R@1, AUROC of absent products and calibration error, in percent."""
    rng = np.random.default_rng(0)
    names = np.unique(labels)
    right = []
    for _ in range(5):
        gallery = np.array([rng.choice(np.flatnonzero(labels == name)) for name in names])
        asked = np.setdiff1d(np.arange(len(labels)), gallery)
        best = (vectors[asked] @ vectors[gallery].T).argmax(axis=1)
        right.append(float((names[best] == labels[asked]).mean()))
    fitted, judged = (
        _searches(vectors, labels, part, rng) for part in np.array_split(rng.permutation(names), 2)
    )
    error, _ = judged.error(fit_curve(fitted), prior=0.5)
    return {
        "1 image": 100 * np.mean(right),
        "AUROC": auroc(torch.from_numpy(vectors), labels),
        "calibration error": 100 * error,
    }


def auroc(vectors: torch.Tensor, labels: NDArray[np.int64]) -> float:
    """Share of queries, in percent, whose best hit is nearer if their product is in the gallery.

    Each image is searched among the others twice: with its own class, and without it.
    """
    classes = torch.from_numpy(labels).to(vectors.device)
    scores = vectors.float() @ vectors.float().T
    scores.fill_diagonal_(-1)
    present = scores.amax(1)
    absent = scores.masked_fill_(classes[:, None] == classes, -1).amax(1).sort().values
    below = torch.searchsorted(absent, present).float().mean() / len(absent)
    return 100 * float(below)


def _searches(
    vectors: NDArray[np.float32],
    labels: NDArray[np.int64],
    names: NDArray[np.int64],
    rng: np.random.Generator,
) -> Searches:
    """Searches among four images of each of these classes, with and without the right class."""
    shuffled = [rng.permutation(np.flatnonzero(labels == name)) for name in names]
    gallery = np.concatenate([images[:4] for images in shuffled])
    queries = np.concatenate([images[4:] for images in shuffled])
    return Searches.joined(candidates_of(vectors, labels, queries, gallery))


def begin(job: Job, features: torch.Tensor, labels: NDArray[np.int64]) -> tuple[Run, BatchSampler]:
    """A run at step 0, from the pooled features (N, C) of its images, and its sampler."""
    state = create_run(job, int(labels.max()) + 1)
    start_from_features(state, features, labels)
    if state.average is not None:
        state.average = Average(state.net, state.average.decay)
    order = BatchSampler(job, labels)
    state.objective.shares.calibration_steps = len(order)
    state.net.train()
    return state, order


def report(found: dict[str, dict[str, float]]) -> None:
    """A table for each two figures: a row for each loss and condition with paired seeds."""
    names = [name for name in REGULARIZERS if name != "none"]
    rows = dict.fromkeys(tuple(key.split("|")[:2]) for key in found)
    gains: dict[tuple[str, str, str, str], NDArray[np.float64]] = {}
    bases: dict[tuple[str, str, str], NDArray[np.float64]] = {}
    for (loss, condition), figure in product(rows, FIGURES):
        base = runs_of(found, loss, condition, "none", figure)
        if CONDITIONS[condition].factor > 1:
            base = runs_of(found, loss, "20 epochs", "none", figure)
        bases[loss, condition, figure] = np.array([*base.values()])
        for name in names:
            runs = runs_of(found, loss, condition, name, figure)
            paired = [runs[seed] - base[seed] for seed in runs.keys() & base.keys()]
            if len(paired) > 1:
                gains[loss, condition, name, figure] = np.array(paired)

    def difference(cell: tuple[str, str, str, str], comparisons: int) -> str:
        mean, count = gains[cell].mean(), len(gains[cell])
        error = gains[cell].std(ddof=1) / count**0.5
        is_sure = abs(mean) > stats.t.ppf(1 - 0.025 / comparisons, count - 1) * error
        text = f"{mean:+.1f}" if abs(mean) >= 1 else f"{mean:+.2f}"
        return f"**{text}**" if is_sure else text

    for pair in (FIGURES[:2], FIGURES[2:4], FIGURES[4:]):
        cells = [cell for cell in gains if cell[3] in pair]
        shown = [name for name in names if any(cell[2] == name for cell in cells)]
        heading(f"loss ({', '.join(pair)})", "condition", "seeds", "without", *shown)
        for loss, condition in dict.fromkeys(cell[:2] for cell in cells):
            own = [cell for cell in cells if cell[:2] == (loss, condition)]
            columns = [
                ", ".join(difference(cell, len(cells)) for cell in own if cell[2] == name)
                for name in shown
            ]
            counts = sorted({len(gains[cell]) for cell in own})
            without = ", ".join(f"{bases[loss, condition, f].mean():.1f}" for f in pair)
            row(loss, condition, "-".join(map(str, counts)), without, *columns)
        print(f"\nbold: significant among {len(cells)} comparisons\n")


def runs_of(
    found: dict[str, dict[str, float]], loss: str, condition: str, regularizer: str, figure: str
) -> dict[str, float]:
    """The figure by seed."""
    runs = {
        key.split("|")[3]: key
        for key in found
        if key.split("|")[:3] == [loss, condition, regularizer]
    }
    return {seed: found[key][figure] for seed, key in runs.items() if figure in found[key]}


if __name__ == "__main__":
    main()
