"""Effect of each regularizer when the whole network is trained, by loss and number of epochs.

    KINLENS_SHARED=DIR python benchmarks/trained_trunk.py --json docs/results/trunk/cars.json

MobileNetV2 of ImageNet at 112 px on the public half of Cars196 (classes 1-98 train, 99-196 test),
with the recipe of the job `cars196-half`. Each regularizer is added to the losses of its own paper.
A row differs from its baseline only in the regularizer: loss, start, batches, steps and seed are
the same. Its share is searched first, on a third of the train classes, at the shorter length; only
the chosen share is tested. All images are decoded once and views are drawn on the device, so a GPU
trains a network in seconds. Runs in the JSON file are not repeated, and after `--minutes` the
remaining runs are left to the next call.

Measured on the test classes: R@1 and MAP@R; R@1 of the same network in bf16; R@1 on the groceries,
which it never saw; and how well the similarity of the best answer separates products in the gallery
from absent ones (AUROC). Intervals are over seeds, paired, with one variance for all rows of a
table (variation between seeds is of the same kind), corrected by Bonferroni.

Hypotheses from before the first run: (H1) graph consistency is above with triplets at the shorter
length; (H2) with Proxy-Anchor none is above; (H3) effects that are above at the shorter length are
smaller at the longer; (H4) no reading of the determinant differs from another; (H5) nothing that is
above on cars is above on the groceries.
"""

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import heading, options, row, shared_folder, skip
from numpy.typing import NDArray
from PIL import Image
from regularizers import LOSSES, auroc, begin, cars_job, grocery_photos, with_loss
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import TrainingError
from kinlens.embedder.preprocess import decode, preprocess
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Input
from kinlens.training.data.images import random_box
from kinlens.training.data.load import load_split
from kinlens.training.device import tuned
from kinlens.training.evaluation.evaluate import evaluate_embeddings
from kinlens.training.models.embedding import EmbeddingNet, evaluating
from kinlens.training.state import create_run
from kinlens.training.trainer import train_step

HEIGHT, WIDTH = 176, 288
"""Size of a decoded image, whatever its shape: boxes of views are relative."""

REGULARIZERS: dict[str, dict[str, Any]] = {
    "determinant": {"activation": "none"},
    "skewed_mean": {"hinge": True, "delta": 0.45, "gamma": 10.0},
    "non_isotropy": {"exponentiate": False, "weight": 0.005, "fit_epochs": 2},
    "graph_consistency": {},
}
SHARES = {
    "determinant": (0.03, 0.1, 0.3),
    "skewed_mean": (0.05, 0.2, 0.5),
    "non_isotropy": (0.02, 0.1, 0.3),
    "graph_consistency": (0.1, 0.3, 1.0),
}
OF_PAPERS = {
    "determinant": ("softmax", "triplet", "proxy_anchor", "multi_similarity"),
    "skewed_mean": ("softmax", "proxy_anchor"),
    "non_isotropy": ("softmax", "proxy_anchor"),
    "graph_consistency": ("triplet", "n_pair", "binomial_deviance", "margin", "proxy_anchor"),
}
READINGS: dict[str, dict[str, dict[str, Any]]] = {
    "determinant as it is": {},
    "leaky ReLU": {"determinant": {"activation": "leaky_relu"}},
    "input of length 1": {"determinant": {"input_norm": 1.0}},
    "proxies of their own": {"determinant": {"proxies": "separate"}},
    "tangent": {"determinant": {"direction": "tangent"}},
    "mean over layers": {"determinant": {"depth": "mean"}},
    "rate x 10": {"optimizer": {"lr_flows": 2e-4}},
    "rate x 100": {"optimizer": {"lr_flows": 2e-3}},
}
"""Readings of the determinant at a share of 0.1, with Proxy-Anchor."""

FOLDS = 3
FOLD_SEEDS = 2


class Cell(NamedTuple):
    """One training; `fold` is None on the test classes, `share` 0 without the regularizer."""

    loss: str
    regularizer: str
    share: float
    epochs: int
    seed: int
    fold: int | None = None
    reading: str = ""

    def name(self) -> str:
        where = "test" if self.fold is None else f"fold {self.fold}"
        what = self.reading or (f"{self.regularizer} {self.share:g}" if self.share else "none")
        return f"{where}|{self.loss}|{what}|{self.epochs}|{self.seed}"


def main() -> None:
    args = options(
        __doc__, seeds=5, epochs=[5, 20], losses=list(LOSSES), processes=1, minutes=600.0,
        classes=98, cache=None, json=None,
    )  # fmt: skip
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    until = time.monotonic() + 60 * args.minutes
    found: dict[str, dict[str, float]] = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.cache or Path(temporary)
        make_views(shared, folder, args.classes)
        with context.Pool(args.processes, _begin, (shared, folder)) as pool:
            try:
                for stage in _stages(args.losses, args.epochs, args.seeds, found):
                    _run_all(pool, stage, found, until, args.json)
            except TimeoutError:
                print("\nthe time is up; the next call continues")
    report(found, args.epochs)


def _stages(
    losses: list[str], lengths: list[int], seeds: int, found: dict[str, dict[str, float]]
) -> Iterator[list[Cell]]:
    """Folds, then the test classes at each length; folds choose the shares of later stages."""
    pairs = [(loss, name) for name, of in OF_PAPERS.items() for loss in of if loss in losses]
    yield [
        cell
        for pair in pairs
        for share in SHARES[pair[1]]
        for cell in folds(*pair, share, lengths[0])
    ]
    best = {pair: best_share(*pair, lengths[0], found) for pair in pairs}
    for epochs in lengths:
        cells = []
        for seed in range(seeds):
            cells += [Cell(loss, "", 0, epochs, seed) for loss in losses]
            cells += [Cell(*pair, share, epochs, seed) for pair, share in best.items()]
            if "proxy_anchor" in losses:
                setting = ("proxy_anchor", "determinant", 0.1, epochs, seed, None)
                cells += [Cell(*setting, reading) for reading in READINGS]
        yield cells


def folds(loss: str, name: str, share: float, epochs: int) -> list[Cell]:
    return [Cell(loss, name, share, epochs, seed, seed % FOLDS) for seed in range(FOLD_SEEDS)]


def best_share(loss: str, name: str, epochs: int, found: dict[str, dict[str, float]]) -> float:
    """The share with the best mean R@1 on held-out train classes."""

    def mean(share: float) -> float:
        names = [cell.name() for cell in folds(loss, name, share, epochs)]
        return float(np.mean([found[n]["R@1"] if n in found else 0.0 for n in names]))

    return max(SHARES[name], key=mean)


def _run_all(
    pool: Pool,
    cells: list[Cell],
    found: dict[str, dict[str, float]],
    until: float,
    file: Path | None,
) -> None:
    """Run all cells. Raises: TimeoutError when the time is up."""
    missing = [cell for cell in cells if cell.name() not in found]
    results, started = pool.imap_unordered(_figures, missing), time.monotonic()
    for number in range(len(missing)):
        try:
            name, figures = results.next(timeout=max(until - time.monotonic(), 0.01))
        except get_context().TimeoutError:
            raise TimeoutError from None
        if "R@1" not in figures:
            continue
        found[name] = figures
        rate = (number + 1) / (time.monotonic() - started)
        print(f"{name:60} R@1 {figures['R@1']:5.1f}  {rate:.2f} runs/s", flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def base_job(shared: Path) -> Job:
    sizes = "input.size_px=112", "input.resize_px=140", "input.test_px=128"
    return cars_job(shared, *sizes, "optimizer.lr_flows=2e-5")


# Images, decoded once


def make_views(shared: Path, folder: Path, classes: int) -> None:
    """Write the pixels of all images as arrays below `folder`, unless they exist."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    job = base_job(shared)
    split = load_split(job.data)
    wanted = {"train": split.train, "test": split.test, "groceries": grocery_photos(shared)}
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for part, every in wanted.items():
            images = every.of_classes(np.arange(min(classes, every.classes)))
            paths = [images.root / path for path in images.paths]
            jobs = [(path, job.input) for path in paths]
            np.save(folder / f"{part}.npy", np.stack(pool.starmap(_served, jobs, 64)))
            np.save(folder / f"{part}-labels.npy", images.labels)
            if part == "train":
                whole = pool.map(_whole, paths, 64)
    np.save(folder / "whole.npy", np.stack([pixels for pixels, _ in whole]))
    np.save(folder / "sizes.npy", np.array([size for _, size in whole]))
    (folder / "done").touch()


def _served(path: Path, spec: Input) -> NDArray[np.uint8]:
    return preprocess(path.read_bytes(), spec.preprocessing())


def _whole(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """A complete image at a fixed size, and its original size."""
    image = decode(path.read_bytes())
    pixels = np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, reducing_gap=3.0))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)), image.size


def drawn_views(
    pixels: Tensor, sizes: NDArray[np.int64], spec: Input, rng: np.random.Generator
) -> Tensor:
    """A random view of each image: uint8 (B, 3, H, W) to (B, 3, S, S).

    A view is sampled at twice its size and halved, so that downscaling averages pixels.
    """
    count = len(pixels)
    boxes = [random_box((w, h), spec.min_crop_area, rng) for w, h in sizes.tolist()]
    left, top, right, bottom = (np.array(boxes) / np.tile(sizes, 2)).T
    mirror = np.where(rng.random(count) < 0.5, -1.0, 1.0) if spec.flip else 1.0
    theta = np.zeros((count, 2, 3), np.float32)
    theta[:, 0, 0], theta[:, 0, 2] = (right - left) * mirror, right + left - 1
    theta[:, 1, 1], theta[:, 1, 2] = bottom - top, bottom + top - 1
    there = torch.from_numpy(theta).to(pixels.device, non_blocking=True)
    shape = [count, 3, 2 * spec.size_px, 2 * spec.size_px]
    grid = F.affine_grid(there, shape, align_corners=False)
    sampled = F.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    return F.avg_pool2d(sampled, 2).round().to(torch.uint8)


# A training


class _Data(NamedTuple):
    job: Job
    pixels: dict[str, Tensor]
    labels: dict[str, NDArray[np.int64]]
    sizes: NDArray[np.int64]
    start: Tensor  # pooled features of the train images by the untrained trunk


_FOLDERS: list[Path] = []


def _begin(shared: Path, folder: Path) -> None:
    _FOLDERS[:] = [shared, folder]
    torch.set_num_threads(1)


@cache
def _data() -> _Data:
    """Images, labels and job, read once per process."""
    shared, folder = _FOLDERS
    job = base_job(shared)
    run = create_run(job, 2)
    parts = ("train", "test", "groceries")
    pixels = {p: torch.from_numpy(np.load(folder / f"{p}.npy")) for p in (*parts, "whole")}
    pixels = {part: tensor.to(run.device) for part, tensor in pixels.items()}
    labels = {part: np.load(folder / f"{part}-labels.npy") for part in parts}
    with evaluating(run.net), torch.inference_mode():
        start = torch.cat([run.net.pooled(chunk) for chunk in pixels["train"].split(256)])
    return _Data(job, pixels, labels, np.load(folder / "sizes.npy"), start.clone())


def _figures(cell: Cell) -> tuple[str, dict[str, float]]:
    """Name and figures of a training; no figures if it failed, so that the others still run."""
    started = time.perf_counter()
    try:
        net, held_out = _train(cell)
    except TrainingError as error:
        print(f"{cell.name()}: {error}", flush=True)
        return cell.name(), {}
    seconds, data = time.perf_counter() - started, _data()
    where = "train" if held_out is not None else "test"
    labels, pixels = data.labels[where], data.pixels[where]
    if held_out is not None:
        labels, pixels = labels[held_out], pixels[torch.from_numpy(held_out)]
    vectors = _embedded(net, pixels)
    found = evaluate_embeddings(vectors, labels, full=False)
    figures = {"R@1": found["R@1"], "MAP@R": found["MAP@R"], "seconds": seconds}
    if held_out is None:
        figures["AUROC"] = auroc(vectors, labels)
        with torch.autocast(vectors.device.type, dtype=torch.bfloat16):
            low = _embedded(net, pixels)
        figures["R@1 in bf16"] = evaluate_embeddings(low, labels, full=False)["R@1"]
        others = _embedded(net, data.pixels["groceries"])
        found = evaluate_embeddings(others, data.labels["groceries"], full=False)
        figures["R@1 on groceries"] = found["R@1"]
    return cell.name(), {name: round(value, 3) for name, value in figures.items()}


def _train(cell: Cell) -> tuple[EmbeddingNet, NDArray[np.int64] | None]:
    """The trained network, and the held-out images."""
    data = _data()
    job = _job(data.job, cell)
    labels = data.labels["train"]
    rows, held_out = np.arange(len(labels)), None
    if cell.fold is not None:
        fold = np.random.default_rng(0).permutation(labels.max() + 1) % FOLDS
        rows, held_out = (np.flatnonzero(x[labels]) for x in (fold != cell.fold, fold == cell.fold))
        labels = np.unique(labels[rows], return_inverse=True)[1]
    torch.manual_seed(cell.seed)
    run, order = begin(job, data.start[torch.from_numpy(rows)], labels)
    rng = np.random.default_rng(cell.seed)
    classes = torch.from_numpy(labels).to(run.device)
    with tuned(run.device):
        while run.epoch < cell.epochs:
            order.epoch = run.epoch
            model = run.begin_epoch(trunk_frozen=False)
            for batch in order:
                chosen = np.array([image for _, image, _ in batch])
                there = torch.from_numpy(rows[chosen]).to(run.device, non_blocking=True)
                views = drawn_views(
                    data.pixels["whole"][there], data.sizes[rows[chosen]], job.input, rng
                )
                own = classes[torch.from_numpy(chosen).to(run.device, non_blocking=True)]
                train_step(run, model, views, own, len(order))
            run.epoch += 1
    return run.served, held_out


def _job(base: Job, cell: Cell) -> Job:
    content = base.as_dict()
    content["seed"], content["optimizer"]["epochs"] = cell.seed, cell.epochs
    with_loss(content, LOSSES[cell.loss])
    if cell.share:
        regularizer = {"share": cell.share, **REGULARIZERS[cell.regularizer]}
        regularizer |= READINGS.get(cell.reading, {}).get("determinant", {})
        content["regularizers"] = {cell.regularizer: regularizer}
    content["optimizer"] |= READINGS.get(cell.reading, {}).get("optimizer", {})
    return parse_job(content)


def _embedded(net: EmbeddingNet, pixels: Tensor) -> Tensor:
    with evaluating(net), torch.inference_mode():
        return torch.cat([net(chunk) for chunk in pixels.split(512)])


# Tables


def report(found: dict[str, dict[str, float]], lengths: list[int]) -> None:
    """A table for each length and figure: a row for each loss and each added regularizer."""
    runs: dict[tuple[int, str, str], dict[str, dict[str, float]]] = defaultdict(dict)
    for name, figures in found.items():
        where, loss, what, epochs, seed = name.split("|")
        if where == "test":
            runs[int(epochs), loss, what][seed] = figures
    for epochs, figure in product(
        lengths, ("R@1", "MAP@R", "AUROC", "R@1 in bf16", "R@1 on groceries")
    ):
        gains: dict[tuple[str, str], NDArray[np.float64]] = {}
        for (length, loss, what), seeds in runs.items():
            none = runs.get((epochs, loss, "none"), {})
            both = sorted(none.keys() & seeds.keys())
            if length == epochs and what != "none" and both:
                differences = [seeds[s][figure] - none[s][figure] for s in both]
                gains[loss, what] = np.array(differences)
        freedom = sum(len(x) - 1 for x in gains.values())
        squares = sum(((x - x.mean()) ** 2).sum() for x in gains.values())
        # A single seed has no interval.
        bound = stats.t.ppf(1 - 0.025 / len(gains), freedom) if freedom else 0.0
        spread = (squares / max(freedom, 1)) ** 0.5
        if gains:
            heading(f"{figure}, {epochs} epochs", "without", "added", "difference", "seeds", "")
        for (loss, what), x in gains.items():
            mean, half = x.mean(), bound * spread / len(x) ** 0.5
            word = "above" if mean > half else "below" if mean < -half else ""
            shown = f"{mean:+.2f} ± {half:.2f}" if freedom else f"{mean:+.2f}"
            bases = [figures[figure] for figures in runs[epochs, loss, "none"].values()]
            row(loss, f"{np.mean(bases):.1f}", what, shown, len(x), word if freedom else "")


if __name__ == "__main__":
    main()
