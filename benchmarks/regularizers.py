"""Effect of each regularizer, on heads of a frozen trunk and on whole networks.

    KINLENS_SHARED=DIR python benchmarks/regularizers.py --json docs/results/regularizers/cars.json

MobileNetV2 of ImageNet with the recipe of the job `cars196-half`, on the public half of Cars196:
classes 1-98 train, 99-196 test. A condition trains heads on cached features at 176 px, with one
change of "20 epochs" (512 dimensions, all classes, images and labels), or the whole network at
112 px. A row differs from its baseline only in the regularizer: loss, start, batches, steps and
seed are the same. Runs in the JSON file are not repeated, unless their job has changed (`job` is a
digest of the settings); after `--minutes` the remaining runs are left to the next call.

    --conditions "network, 5 epochs" "network, 20 epochs" --losses triplet margin ... --processes 9
        each regularizer with the losses of its paper, at the share of CHOSEN; a GPU trains a
        network in ten seconds, since views are drawn on it from images that were decoded once
    --conditions "network, 40 % wrong labels" --regularizers "graph consistency 0.3"
        whether a result of the heads holds for a network
    --folds --seeds 2 --conditions "network, 5 epochs" --losses ...
        the search that chose these shares, on a third of the train classes
    --regularizers "determinant 0.1, leaky ReLU" ...
        other readings of a regularizer: VARIANTS

Figures: R@1 and MAP@R; R@1 with a gallery of one image a class (five draws); how often the best
hit of a query is nearer than that of a query whose product is absent (AUROC); the expected
calibration error of the best hit on half of the test classes, with a curve fitted on the others;
R@1 on groceries; R@1 with the trunk in int8 (heads) or the network in bf16 (on a GPU). A difference
is paired by seed. A bold one is not zero by Student's 95 % interval, corrected for all comparisons
of the table (Bonferroni); "above" and "below" mean that.

docs/results.md has the hypotheses that preceded each run, and their outcome. The shares of heads
come from the jobs or from the papers' nearest values.
"""

import hashlib
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import heading, options, row, shared_folder, skip
from numpy.typing import NDArray
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.calibration import Searches, fit_curve
from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import TrainingError
from kinlens.embedder.preprocess import decode, preprocess
from kinlens.training.bundles.calibration import candidates_of
from kinlens.training.bundles.graph import write_onnx
from kinlens.training.bundles.int8 import quantize_int8, range_images
from kinlens.training.checkpoint import Average
from kinlens.training.config.job import Job, load_job, parse_job
from kinlens.training.config.settings import Input
from kinlens.training.data.features import CachedFeatures, pooled_views
from kinlens.training.data.images import random_box
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.data.records import LabelledImages, labelled
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.device import tuned
from kinlens.training.evaluation.evaluate import evaluate_embeddings, through_head
from kinlens.training.folder import replace_json
from kinlens.training.models.embedding import EmbeddingNet, evaluating
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
    "determinant": {"activation": "none"},
    "skewed mean": {"hinge": True, "delta": 0.45, "gamma": 10.0},
    "non-isotropy": {"exponentiate": False, "weight": 0.005, "fit_epochs": 1},
    "graph consistency": {},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "slow flow": {"optimizer": {"lr_flows": 2e-5}},
    "fast flow": {"optimizer": {"lr_flows": 2e-3}},
    "leaky ReLU": {"determinant": {"activation": "leaky_relu"}},
    "input of length 1": {"determinant": {"input_norm": 1.0}},
    "proxies of their own": {"determinant": {"proxies": "separate"}},
    "tangent": {"determinant": {"direction": "tangent"}},
    "mean over layers": {"determinant": {"depth": "mean"}},
    "noise": {"non_isotropy": {"noise": 0.05}},
}
SHARES = {
    "determinant": (0.03, 0.1, 0.3),
    "skewed mean": (0.05, 0.2, 0.5),
    "non-isotropy": (0.02, 0.1, 0.3),
    "graph consistency": (0.1, 0.3, 1.0),
}
CHOSEN = {
    "triplet": ("graph consistency 1", "determinant 0.1"),
    "margin": ("graph consistency 1",),
    "binomial_deviance": ("graph consistency 0.3",),
    "n_pair": ("graph consistency 0.3",),
    "multi_similarity": ("determinant 0.1",),
    "softmax": ("determinant 0.03", "skewed mean 0.2", "non-isotropy 0.1"),
    "proxy_anchor": (
        "determinant 0.3",
        "skewed mean 0.2",
        "non-isotropy 0.02",
        "graph consistency 0.1",
    ),
}
"""The best of these shares for each loss of a paper, by R@1 on folds of the train classes."""
OF_HEADS = (
    "determinant 0.1, slow flow",
    "skewed mean 0.2",
    "non-isotropy 0.02, noise",
    "graph consistency 0.3",
)
_ON_PROXIES, _WITH_PROXIES = ("skewed mean", "non-isotropy"), ("proxy_anchor", "softmax")


class Condition(NamedTuple):
    """What is trained, and on what; `images` of each class, all if 0; `factor` of each share.

    `size_px` is the side of the views of a whole network; 0 trains a head.
    """

    epochs: int = 20
    classes: float = 1.0
    images: int = 0
    wrong_labels: float = 0.0
    dim: int = 512
    factor: int = 1
    size_px: int = 0


CONDITIONS = {
    "20 epochs": Condition(),
    "3 times the share": Condition(factor=3),
    "4 images a class": Condition(images=4),
    "a tenth of the classes": Condition(classes=0.1),
    "a tenth of the classes, 100 epochs": Condition(classes=0.1, epochs=100),
    "5 % of the classes": Condition(classes=0.05),
    "5 % of the classes, 1,000 epochs": Condition(classes=0.05, epochs=1000),
    "40 % wrong labels": Condition(wrong_labels=0.4),
    "64 dimensions": Condition(dim=64),
    "5 epochs": Condition(epochs=5),
    "5 epochs, half of the classes": Condition(epochs=5, classes=0.5),
    "20 epochs, half of the classes": Condition(classes=0.5),
    "network, 5 epochs": Condition(epochs=5, size_px=112),
    "network, 20 epochs": Condition(size_px=112),
    "network, 40 % wrong labels": Condition(epochs=5, wrong_labels=0.4, size_px=112),
    "network, 30 epochs at 160 px": Condition(epochs=30, size_px=160),
}
BASE = "20 epochs"
_WITH_DETERMINANT = (BASE, "4 images a class", "a tenth of the classes")
"""Its flow takes five times as long as a head."""

FIGURES = ("R@1", "MAP@R", "1 image", "AUROC", "calibration error", "groceries", "int8", "bf16")
FOLDS = 3
HEIGHT, WIDTH = 176, 288
"""Size of a decoded image, whatever its shape: boxes of views are relative."""


class Cell(NamedTuple):
    """One training; `fold` is None on the test classes."""

    seed: int
    loss: str
    condition: str
    regularizer: str = "none"
    fold: int | None = None

    @property
    def name(self) -> str:
        fold = () if self.fold is None else (f"fold {self.fold}",)
        return "|".join([self.loss, self.condition, self.regularizer, str(self.seed), *fold])

    @property
    def of(self) -> Condition:
        return CONDITIONS[self.condition]


def main() -> None:
    args = options(
        __doc__,
        seeds=10,
        losses=["proxy_anchor", "triplet"],
        conditions=list(CONDITIONS)[:9],
        regularizers=["chosen"],
        folds=False,
        classes=98,
        processes=2,
        minutes=600.0,
        cache=None,
        json=None,
    )
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: dict[str, dict[str, Any]] = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.cache or Path(temporary)
        for size_px in {CONDITIONS[name].size_px for name in args.conditions}:
            prepare(shared, folder, size_px, args.classes)
        _begin(shared, folder)
        wanted = [
            cell
            for cell in dict.fromkeys(cells_of(args))
            if found.get(cell.name, {}).get("job") != digest_of(cell)
        ]
        with ProcessPoolExecutor(args.processes, context, _begin, (shared, folder)) as pool:
            runs = {pool.submit(run, cell): cell.name for cell in wanted}
            try:
                for done in as_completed(runs, timeout=60 * args.minutes):
                    if figures := done.result():
                        found[runs[done]] = figures
                        print(f"{runs[done]:70} R@1 {figures['R@1']:.1f}", flush=True)
                    if args.json is not None:
                        replace_json(args.json, dict(sorted(found.items())))
            except TimeoutError:
                print("\nthe time is up; the next call continues")
                pool.shutdown(cancel_futures=True)
    report(found)


def cells_of(args: Namespace) -> Iterator[Cell]:
    """Every training that the command asks for, a seed at a time."""
    for seed, condition, loss in product(range(args.seeds), args.conditions, args.losses):
        names: tuple[str, ...] = tuple(args.regularizers)
        if names == ("chosen",):
            names = CHOSEN[loss] if CONDITIONS[condition].size_px else OF_HEADS
        if args.folds:
            bases = [name.rsplit(" ", 1)[0] for name in names]
            for base, number in product(bases, range(3)):
                name = f"{base} {SHARES[base][number]:g}"
                yield Cell(seed, loss, condition, name, seed % FOLDS)
            continue
        if CONDITIONS[condition].factor == 1:
            yield Cell(seed, loss, condition)
        for name in names:
            if name.startswith(_ON_PROXIES) and loss not in _WITH_PROXIES:
                continue
            if name == OF_HEADS[0] and condition not in _WITH_DETERMINANT:
                continue
            yield Cell(seed, loss, condition, name)


def cars_job(shared: Path, *changes: str) -> Job:
    """The recipe on half of Cars196 with the weights of the shared folder, with overrides."""
    data, weights = shared / "data/cars196-half", shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    return load_job("cars196-half", [f"data.root={data}", f"model.weights={weights}", *changes])


_HEADS = (
    "model.frozen_trunk=true",
    "input.test_px=176",
    "start.projection=within_class",
    "optimizer.lr_head=1e-3",
    "runtime.precision=fp32",
    "runtime.device=cpu",
)
_NETWORK = {
    112: ("input.size_px=112", "input.resize_px=140", "input.test_px=128"),
    160: ("input.size_px=160", "input.resize_px=192", "input.test_px=176"),
}


def base_job(shared: Path, size_px: int) -> Job:
    changes = (*_NETWORK[size_px], "optimizer.lr_flows=2e-5") if size_px else _HEADS
    return cars_job(shared, *changes)


def job_of(cell: Cell) -> Job:
    data, condition = _data(cell.of.size_px), cell.of
    content = data.job.as_dict()
    content["seed"], content["optimizer"]["epochs"] = cell.seed, condition.epochs
    content["model"]["dim"] = condition.dim
    settings = LOSSES[cell.loss]
    content["loss"] = settings["loss"]
    for table in ("sampling", "start", "optimizer"):
        content[table] |= settings.get(table, {})
    if not condition.size_px:
        # A batch draws a class at most twice.
        classes = round(condition.classes * (int(data.labels["train"].max()) + 1))
        largest = 2 * content["sampling"]["per_class"] * classes
        content["optimizer"]["batch_size"] = min(content["optimizer"]["batch_size"], largest)
    if cell.regularizer != "none":
        name, _, variant = cell.regularizer.partition(", ")
        base, share = name.rsplit(" ", 1)
        table = base.replace(" ", "_").replace("-", "_")
        more = VARIANTS[variant] if variant else {}
        content["optimizer"] |= more.get("optimizer", {})
        settings = REGULARIZERS[base] | more.get(table, {})
        content["regularizers"] = {table: settings | {"share": float(share) * condition.factor}}
    return parse_job(content)


def digest_of(cell: Cell) -> str:
    """Digest of what a run is determined by, except for the folders of data and weights."""
    content, condition = job_of(cell).as_dict(), cell.of
    del content["data"]["root"], content["model"]["weights"]
    for name in ("name", "description", "licence", "recall_at", "protocol", "runtime"):
        del content[name]
    classes = int(_data(condition.size_px).labels["train"].max()) + 1
    some_of = (condition.classes, condition.images, condition.wrong_labels)
    text = json.dumps([content, some_of, classes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Features and images, computed once


def prepare(shared: Path, folder: Path, size_px: int, classes: int) -> None:
    """Write features, or the pixels of all images, as arrays below `folder`, unless they exist."""
    target = folder / folder_of(size_px)
    if (target / "done").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    job = base_job(shared, size_px)
    split, net = load_split(job.data), create_run(job, 2).net
    every = {"train": split.train, "test": split.test, "groceries": grocery_photos(shared)}
    parts = {
        part: images.of_classes(np.arange(min(classes, images.classes)))
        for part, images in every.items()
    }
    arrays = {f"{part}-labels": images.labels for part, images in parts.items()}
    arrays["start"] = pooled_views(net, parts["train"], job.input, job.runtime)[:, 0].numpy()
    if size_px:
        with get_context("spawn").Pool(os.cpu_count()) as pool:
            for part, images in parts.items():
                jobs = [(path, job.input) for path in paths_of(images)]
                arrays[part] = np.stack(pool.starmap(_served, jobs, 64))
            whole = pool.map(_whole, paths_of(parts["train"]), 64)
        arrays["views"] = np.stack([pixels for pixels, _ in whole])
        arrays["sizes"] = np.array([size for _, size in whole])
    else:
        arrays["views"] = pooled_views(net, parts["train"], job.input, job.runtime, 3).numpy()
        for part, images in parts.items():
            arrays[part] = pooled_views(net, images, job.input, job.runtime)[:, 0].numpy()
        arrays["int8"] = int8_features(net, parts["train"], parts["test"], job.input)
    for name, array in arrays.items():
        np.save(target / f"{name}.npy", array)
    (target / "done").touch()


def folder_of(size_px: int) -> str:
    return f"network-{size_px}" if size_px else "heads"


def grocery_photos(shared: Path) -> LabelledImages:
    """The photos of Grocery Store, by the name of their product."""
    root = shared / "data/grocery-store"
    photos = [record.path for record in read_folder(root) if "iconic" not in record.path]
    return labelled(root, [(path, Path(path).parent.name) for path in photos])


def paths_of(images: LabelledImages) -> list[Path]:
    return [images.root / path for path in images.paths]


def _served(path: Path, spec: Input) -> NDArray[np.uint8]:
    return preprocess(path.read_bytes(), spec.preprocessing())


def _whole(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """A complete image at a fixed size, and its original size."""
    image = decode(path.read_bytes())
    pixels = np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, reducing_gap=3.0))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)), image.size


class _Trunk(nn.Module):
    """uint8 images to the pooled features of a trunk."""

    def __init__(self, net: EmbeddingNet) -> None:
        super().__init__()
        self.normalize, self.trunk, self.pool = net.normalize, net.trunk, net.pool

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.trunk(self.normalize(images)))
        return pooled


def int8_features(
    net: EmbeddingNet, train: LabelledImages, test: LabelledImages, spec: Input
) -> NDArray[np.float32]:
    """The features of `test` by the trunk in int8, quantized on `train` as an export does it."""
    served = spec.preprocessing()
    with tempfile.TemporaryDirectory() as folder:
        fp32, int8 = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        write_onnx(_Trunk(net).eval(), served.crop_px, fp32)
        quantize_int8(fp32, range_images(train, served), int8)
        session = create_session(int8, SessionSettings())
    made = []
    for paths in np.array_split(np.array(paths_of(test)), len(test) // 32 + 1):
        pixels = np.stack([_served(path, spec) for path in paths])
        made.append(session.run(None, {"images": pixels})[0])
    return np.concatenate(made)


class _Data(NamedTuple):
    """The job, and what `prepare` has written; pixels are on the device of the runs.

    `train`, `test` and `groceries` are images as served, or their features; training views are
    drawn from `views`, whole images or the features of three views of each. `start` has the
    features of `train` by the untrained trunk.
    """

    job: Job
    arrays: dict[str, Tensor]
    labels: dict[str, NDArray[np.int64]]


_FOLDERS: list[Path] = []


def _begin(shared: Path, folder: Path) -> None:
    _FOLDERS[:] = [shared, folder]
    torch.set_num_threads(1)


@cache
def _data(size_px: int) -> _Data:
    """Read once per process."""
    shared, folder = _FOLDERS
    job = base_job(shared, size_px)
    device = create_run(job, 2).device
    arrays, labels = {}, {}
    for file in (folder / folder_of(size_px)).glob("*.npy"):
        array = np.load(file)
        if file.stem.endswith("-labels"):
            labels[file.stem.removesuffix("-labels")] = array
        else:
            arrays[file.stem] = torch.from_numpy(array)
            if array.dtype == np.uint8:
                arrays[file.stem] = arrays[file.stem].to(device)
    return _Data(job, arrays, labels)


# A training


def run(cell: Cell) -> dict[str, Any]:
    """Figures on the test classes or a fold; none if training failed, so that the others run."""
    data = _data(cell.of.size_px)
    held_out = np.zeros(len(data.labels["train"]), dtype=bool)
    if cell.fold is not None:
        fold = np.random.default_rng(0).permutation(data.labels["train"].max() + 1) % FOLDS
        held_out = (fold == cell.fold)[data.labels["train"]]
    try:
        net = trained(cell, data, np.flatnonzero(~held_out))
    except TrainingError as error:
        print(f"{cell.name}: {error}", flush=True)
        return {}
    if cell.fold is None:
        figures = tested(net, data)
    else:
        vectors = embedded(net, data.arrays["train"][torch.from_numpy(held_out)])
        found = evaluate_embeddings(vectors, data.labels["train"][held_out], full=False)
        figures = {figure: found[figure] for figure in FIGURES[:2]}
    rounded = {figure: round(value, 3) for figure, value in figures.items()}
    return {**rounded, "job": digest_of(cell)}


def trained(cell: Cell, data: _Data, rows: NDArray[np.int64]) -> EmbeddingNet:
    """Train on some of the train images. Raises: TrainingError."""
    job, condition = job_of(cell), cell.of
    rng = np.random.default_rng(cell.seed)
    rows = some(rows, data.labels["train"], condition, rng)
    labels = np.unique(data.labels["train"][rows], return_inverse=True)[1]
    labels = mislabelled(labels, condition.wrong_labels, rng)
    torch.manual_seed(cell.seed)
    state, order = begin(job, data.arrays["start"][torch.from_numpy(rows)], labels)
    classes = torch.from_numpy(labels).to(state.device)
    views, features = data.arrays["views"], None
    if not condition.size_px:
        features = CachedFeatures(views[torch.from_numpy(rows)], labels, cell.seed)
    with tuned(state.device):
        while state.epoch < condition.epochs:
            order.epoch = state.epoch
            model = state.begin_epoch(trunk_frozen=False)
            for batch in order:
                chosen = np.array([image for _, image, _ in batch])
                if features is None:
                    there = torch.from_numpy(rows[chosen]).to(state.device, non_blocking=True)
                    sizes = data.arrays["sizes"][torch.from_numpy(rows[chosen])].numpy()
                    images = drawn_views(views[there], sizes, job.input, rng)
                else:
                    images = torch.stack([features[index][0] for index in batch])
                own = classes[torch.from_numpy(chosen).to(state.device, non_blocking=True)]
                train_step(state, model, images, own, len(order))
            state.epoch += 1
    return state.served


def some(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    condition: Condition,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """The rows of the condition's share of the classes, and its number of images of each."""
    names = np.unique(labels[rows])
    classes = rng.choice(names, round(condition.classes * len(names)), replace=False)
    rows = rows[np.isin(labels[rows], classes)]
    if not condition.images:
        return rows
    shuffled = rng.permutation(rows)
    of_each = [shuffled[labels[shuffled] == c][: condition.images] for c in classes]
    return np.sort(np.concatenate(of_each))


def mislabelled(
    labels: NDArray[np.int64], share: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The labels, that share of them moved to another class."""
    is_wrong, classes = rng.random(len(labels)) < share, int(labels.max()) + 1
    moved = (labels + rng.integers(1, classes, len(labels))) % classes
    return np.where(is_wrong, moved, labels)


def begin(job: Job, features: Tensor, labels: NDArray[np.int64]) -> tuple[Run, BatchSampler]:
    """A run at step 0, from the pooled features (N, C) of its images, and its sampler."""
    state = create_run(job, int(labels.max()) + 1)
    start_from_features(state, features, labels)
    if state.average is not None:
        state.average = Average(state.net, state.average.decay)
    order = BatchSampler(job, labels)
    state.objective.shares.calibration_steps = len(order)
    state.net.train()
    return state, order


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


# Figures


def tested(net: EmbeddingNet, data: _Data) -> dict[str, float]:
    """The figures on the test classes and on groceries, in percent."""
    vectors, labels = embedded(net, data.arrays["test"]), data.labels["test"]
    found = evaluate_embeddings(vectors, labels, full=False)
    others = embedded(net, data.arrays["groceries"])
    found |= open_set(vectors, labels)
    found["groceries"] = evaluate_embeddings(others, data.labels["groceries"], full=False)["R@1"]
    if "int8" in data.arrays:
        low = embedded(net, data.arrays["int8"])
        found["int8"] = evaluate_embeddings(low, labels, full=False)["R@1"]
    elif data.arrays["test"].device.type == "cuda":  # a CPU may have no bf16
        with torch.autocast("cuda", dtype=torch.bfloat16):
            low = embedded(net, data.arrays["test"])
        found["bf16"] = evaluate_embeddings(low, labels, full=False)["R@1"]
    return {figure: found[figure] for figure in FIGURES if figure in found}


def embedded(net: EmbeddingNet, inputs: Tensor) -> NDArray[np.float32]:
    """Embeddings of images as served, or of their features."""
    if inputs.dtype != torch.uint8:
        return through_head(net, inputs)
    with evaluating(net), torch.inference_mode():
        return torch.cat([net(chunk).float() for chunk in inputs.split(128)]).cpu().numpy()


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
        "1 image": 100 * float(np.mean(right)),
        "AUROC": auroc(vectors, labels),
        "calibration error": 100 * error,
    }


def auroc(vectors: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Share of queries, in percent, whose best hit is nearer if their product is in the gallery.

    Each image is searched among the others twice: with its own class, and without it.
    """
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -1)
    present = scores.max(axis=1)
    scores[labels[:, None] == labels] = -1
    absent = np.sort(scores.max(axis=1))
    return 100 * float((np.searchsorted(absent, present) / len(absent)).mean())


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


# Table


Figures = dict[str, Any]
Seeds = dict[str, Figures]


def report(found: dict[str, Figures]) -> None:
    """A row for each loss and condition, and one with paired differences for each regularizer."""
    runs: dict[tuple[str, str], dict[str, Seeds]] = {}
    for key, figures in sorted(found.items()):
        loss, condition, regularizer, seed, *fold = key.split("|")
        where = f"{condition}, folds" if fold else condition
        runs.setdefault((loss, where), {}).setdefault(regularizer, {})[seed] = figures
    cells = {
        (loss, condition, name, figure): difference(seeds, base_of(runs, loss, condition), figure)
        for (loss, condition), names in runs.items()
        for (name, seeds), figure in product(names.items(), FIGURES)
        if name != "none"
    }
    comparisons = sum(len(values) > 1 for values in cells.values())
    heading("loss", "condition", "regularizer", "seeds", *FIGURES)
    for (loss, condition), names in runs.items():
        for name, seeds in sorted(names.items(), key=lambda item: item[0] != "none"):
            if name == "none" or condition.endswith("folds"):
                every = [[r[f] for r in seeds.values() if f in r] for f in FIGURES]
                shown = [f"{np.mean(values):.1f}" if values else "" for values in every]
            else:
                values = [cells[loss, condition, name, figure] for figure in FIGURES]
                with_interval = CONDITIONS[condition].size_px > 0  # few seeds
                shown = [marked(each, comparisons, with_interval) for each in values]
            row(loss, condition, name, len(seeds), *shown)
    print(f"\nbold: significant among {comparisons} comparisons")


def base_of(runs: dict[tuple[str, str], dict[str, Seeds]], loss: str, condition: str) -> Seeds:
    """The runs without a regularizer; more of a share has those of the first condition."""
    is_more = condition in CONDITIONS and CONDITIONS[condition].factor > 1
    return runs.get((loss, BASE if is_more else condition), {}).get("none", {})


def difference(seeds: Seeds, base: Seeds, figure: str) -> NDArray[np.float64]:
    """By seed that both have."""
    both = [(seeds[s], base[s]) for s in sorted(seeds.keys() & base.keys())]
    return np.array([a[figure] - b[figure] for a, b in both if figure in a and figure in b])


def marked(differences: NDArray[np.float64], comparisons: int, with_interval: bool) -> str:
    """The mean, perhaps with its interval, which is not corrected; bold if above or below 0."""
    count = len(differences)
    if not count:
        return ""
    mean = differences.mean()
    text = f"{mean:+.1f}" if abs(mean) >= 1 else f"{mean:+.2f}"
    if count == 1:
        return text
    spread, digits = stats.sem(differences), 1 if abs(mean) >= 1 else 2
    if abs(mean) > stats.t.ppf(1 - 0.025 / comparisons, count - 1) * spread:
        text = f"**{text}**"
    half = stats.t.ppf(0.975, count - 1) * spread
    return f"{text} ± {half:.{digits}f}" if with_interval and count > 2 else text


if __name__ == "__main__":
    main()
