"""Effect of each regularizer on heads of a frozen trunk, by loss, epochs and number of classes.

    KINLENS_SHARED=DIR python benchmarks/regularizers.py --json docs/results/heads/cars.json

Heads of 512 dimensions on cached features of MobileNetV2 at 176 px; the public half of Cars196,
tested on classes 99-196. A row differs from its baseline only in the regularizer: loss, start,
batches, steps and seed are the same. A difference is paired by seed. A bold one is not zero by
Student's 95 % interval, corrected for all comparisons of the table (Bonferroni); "above" and
"below" mean that.

Hypotheses from before the first run: (H1) with Proxy-Anchor none is above its baseline; (H2) graph
consistency is above with triplets; (H3) the determinant is neither, since its flow stays near the
identity; (H4) effects with few classes that are above are above with all. From before the rows with
noise, margin loss and a tenth of the classes: (H5) noise, which bounds the likelihood of
non-isotropy, changes its R@1 by less than a point; (H6) graph consistency is above with the margin
loss; (H7) at 100 epochs on a tenth of the classes, where a head overfits, only graph consistency is
above. The shares come from the jobs or from the papers' nearest values; none was searched here.
"""

import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import heading, options, row, shared_folder, skip
from numpy.typing import NDArray
from scipy import stats

from kinlens.training.checkpoint import Average
from kinlens.training.config.job import Job, load_job, parse_job
from kinlens.training.data.features import CachedFeatures, pooled_views
from kinlens.training.data.images import build_loader
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.evaluation.evaluate import evaluate_embeddings, through_head
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
_ON_PROXIES = ("skewed_mean", "non_isotropy")
_WITH_PROXIES = ("proxy_anchor", "softmax")


def main() -> None:
    args = options(
        __doc__,
        seeds=4,
        epochs=[5, 20],
        classes=[0.5, 1.0],
        losses=["proxy_anchor", "triplet"],
        json=None,
    )
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    job = base_job(shared)
    features(job, load_split(job.data))  # computed once, before the processes need them
    found: dict[str, dict[str, float]] = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    wanted = [
        cell
        for cell in itertools.product(
            range(args.seeds), args.losses, args.epochs, args.classes, REGULARIZERS
        )
        if cell[1] in _WITH_PROXIES or not REGULARIZERS[cell[4]].keys() & set(_ON_PROXIES)
        if name_of(*cell) not in found
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for cell, figures in zip(wanted, pool.map(run, wanted), strict=True):
            found[name_of(*cell)] = figures
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report(found, args.seeds)


def name_of(seed: int, loss: str, epochs: int, classes: float, regularizer: str) -> str:
    return f"{loss}|{epochs}|{classes:g}|{regularizer}|{seed}"


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
    )


def features(job: Job, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Three views of each train image and the served view of each test image."""
    net = create_run(job, split.train.classes).net
    return (
        pooled_views(net, split.train, job.input, job.runtime, 3),
        pooled_views(net, split.test, job.input, job.runtime)[:, 0],
    )


@cache
def _data() -> tuple[Job, Split, torch.Tensor, torch.Tensor]:
    """The job, its images and their features, read once per process."""
    shared = shared_folder()
    assert shared is not None
    job = base_job(shared)
    split = load_split(job.data)
    return job, split, *features(job, split)


def run(cell: tuple[int, str, int, float, str]) -> dict[str, float]:
    """Train a head and evaluate it on the test classes."""
    torch.set_num_threads(1)
    seed, loss, epochs, part, regularizer = cell
    base, split, train, test = _data()
    content = base.as_dict()
    content["seed"], content["optimizer"]["epochs"] = seed, epochs
    content["loss"] = LOSSES[loss]["loss"]
    for table in ("sampling", "start", "optimizer"):
        content[table] |= LOSSES[loss].get(table, {})
    # A batch draws a class at most twice.
    largest = 2 * content["sampling"]["per_class"] * round(part * split.train.classes)
    content["optimizer"]["batch_size"] = min(content["optimizer"]["batch_size"], largest)
    content["regularizers"] = REGULARIZERS[regularizer]
    job = parse_job(content)
    chosen = np.sort(
        np.random.default_rng(seed).choice(
            split.train.classes, round(part * split.train.classes), replace=False
        )
    )
    rows = np.flatnonzero(np.isin(split.train.labels, chosen))
    images = split.train.of_classes(chosen)
    torch.manual_seed(seed)
    views = train[torch.from_numpy(rows)]  # (N, V, C)
    state, order = begin(job, views[:, 0], images.labels)
    data = CachedFeatures(views, images.labels, seed)
    runtime = job.runtime.model_copy(update={"workers": 0})
    loader = build_loader(data, order, runtime, state.device, seed)
    while state.epoch < epochs:
        order.epoch = state.epoch
        model = state.begin_epoch(trunk_frozen=False)
        for pixels, labels in loader:
            train_step(state, model, pixels, labels, len(order))
        state.epoch += 1
    vectors = through_head(state.served, test)
    found = evaluate_embeddings(vectors, split.test.labels, full=False)
    return {name: round(found[name], 3) for name in ("R@1", "MAP@R")}


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


def report(found: dict[str, dict[str, float]], seeds: int) -> None:
    """One row per loss, length and part of the classes that has all seeds."""
    cells = dict.fromkeys(key.rsplit("|", 1)[0] for key in found)
    complete = [cell for cell in cells if all(f"{cell}|{seed}" in found for seed in range(seeds))]
    names = [name for name in REGULARIZERS if name != "none"]
    comparisons = 2 * sum(not cell.endswith("|none") for cell in complete)
    heading("loss", "epochs", "part of the classes", "without", *(f"{name}, Δ" for name in names))

    def figures(condition: str, name: str) -> NDArray[np.float64]:
        runs = [found[f"{condition}|{name}|{seed}"] for seed in range(seeds)]
        return np.array([[run["R@1"], run["MAP@R"]] for run in runs])  # (seeds, 2)

    def difference(gains: NDArray[np.float64]) -> str:
        error = gains.std(ddof=1) / seeds**0.5
        is_sure = abs(gains.mean()) > stats.t.ppf(1 - 0.025 / comparisons, seeds - 1) * error
        text = f"{gains.mean():+.1f}" if abs(gains.mean()) >= 1 else f"{gains.mean():+.2f}"
        return f"**{text}**" if is_sure else text

    for condition in [cell.removesuffix("|none") for cell in complete if cell.endswith("|none")]:
        base = figures(condition, "none")
        differences = [
            ", ".join(map(difference, (figures(condition, name) - base).T))
            if f"{condition}|{name}" in complete
            else ""
            for name in names
        ]
        without = ", ".join(f"{mean:.1f}" for mean in base.mean(axis=0))
        row(*condition.split("|"), without, *differences)
    print(f"\nR@1, MAP@R; bold: significant among {comparisons} comparisons, {seeds} seeds")


if __name__ == "__main__":
    main()
