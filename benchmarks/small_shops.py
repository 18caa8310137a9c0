"""Small shops: gains and losses of a training on unseen products.

    KINLENS_SHARED=DIR python benchmarks/small_shops.py --json docs/results/shops/shops.json

Each shop is a random draw of products and of images from groceries, cars, rendered products or all
three; half of its products are trained on. The methods:

- adapt     `kinlens-train adapt`: a head on the frozen trunk, with its folds
- head      the same training without folds: every point between its start and its last epoch
- head-512  a head of 512 dimensions instead of the trunk's 1,280
- shop      the job `shop`: the whole network, with its folds
- whole     the same training without folds

A gain is R@1 or MAP@R on the products that were not trained on, minus the untrained trunk's, in
points. Means have Student's 95 % interval over all runs. Runs in the JSON file are not repeated.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Quiet, heading, options, row, shared_folder, skip
from regularizers import cars_job
from scipy import stats

from kinlens.rendered.catalogue import class_name, render_view
from kinlens.training.checkpoint import START, load_checkpoint
from kinlens.training.config.job import Job, load_job
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.data.records import LabelledImages
from kinlens.training.device import choose_device, tuned
from kinlens.training.evaluation.choice import ALPHAS, between, name_of
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.evaluation.retrieval import retrieval
from kinlens.training.folder import read_json, replace_json
from kinlens.training.runner import run_job
from kinlens.training.trainer import fit

WITH_FOLDS = ("adapt", "shop")
METHODS: dict[str, tuple[str, list[str]]] = {
    "adapt": ("adapt", []),
    "head": ("adapt", []),
    "head-512": ("adapt", ["model.dim=512"]),
    "shop": ("shop", []),
    "whole": ("shop", []),
}


class Shop(NamedTuple):
    """Number of products, maximum number of images of each, and the sources to use in turn."""

    source: str
    products: int
    images: int


SHOPS = (
    Shop("grocery", 12, 20),
    Shop("cars", 20, 15),
    Shop("mixture", 24, 12),
    Shop("grocery", 24, 10),
    Shop("cars", 8, 40),
    Shop("drawn", 24, 8),
    Shop("cars", 40, 12),
    Shop("grocery", 40, 20),
    Shop("mixture", 12, 10),
    Shop("cars", 40, 5),
    Shop("cars", 80, 25),  # a larger one, with --shops 11
)


def main() -> None:
    args = options(__doc__, seeds=3, shops=10, methods=["head", "whole"], first_seed=0, json=None)
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: dict[str, dict[str, Any]] = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with tempfile.TemporaryDirectory() as name:
        sources = _sources(shared, Path(name))
        for seed, shop, method in product(seeds, SHOPS[: args.shops], args.methods):
            key = f"{shop.source} {shop.products}x{shop.images} {seed} {method}"
            if key not in found:
                folder = Path(name, f"{shop.source}-{shop.products}-{shop.images}-{seed}")
                _make(shop, seed, sources, folder)
                found[key] = _run(method, folder, seed, shared, Path(name, key.replace(" ", "-")))
                print(key, found[key], flush=True)
            if args.json is not None:
                replace_json(args.json, dict(sorted(found.items())))
    _print(found, args.methods)


def _sources(shared: Path, work: Path) -> dict[str, dict[str, list[Path]]]:
    """Files by class of each source."""
    drawn = work / "drawn"
    for number in range(40):
        folder = drawn / class_name(number)
        folder.mkdir(parents=True)
        for view in range(12):
            render_view(number, view, size_px=160).save(folder / f"{view}.jpg")
    roots = {"grocery": shared / "data/grocery-store", "drawn": drawn}
    found: dict[str, dict[str, list[Path]]] = {}
    for source, root in roots.items():
        found[source] = {}
        for record in read_folder(root):
            if "iconic" not in record.path:
                label = Path(record.label).name
                found[source].setdefault(label, []).append(root / record.path)
    found["cars"] = {}
    for part in load_split(cars_job(shared).data).parts.values():
        for path, label in zip(part.paths, part.labels.tolist(), strict=True):
            found["cars"].setdefault(part.class_names[label], []).append(part.root / path)
    return found


def _make(shop: Shop, seed: int, sources: dict[str, dict[str, list[Path]]], folder: Path) -> None:
    """A folder with a sub-folder of links for each product."""
    if folder.exists():
        return
    rng = np.random.default_rng((seed, shop.products, shop.images))
    names = sorted(sources) if shop.source == "mixture" else [shop.source]
    for number, name in enumerate(names):
        classes = sources[name]
        enough = [c for c, files in sorted(classes.items()) if len(files) >= min(shop.images, 5)]
        share = shop.products // len(names) + (number < shop.products % len(names))
        for label in rng.choice(enough, share, replace=False):
            files = classes[str(label)]
            chosen = rng.choice(len(files), min(shop.images, len(files)), replace=False)
            target = folder / f"{name}-{label}".replace("/", "-")
            target.mkdir(parents=True)
            for index in chosen:
                (target / f"{index}{files[index].suffix}").symlink_to(files[index])


def _run(method: str, data: Path, seed: int, shared: Path, out: Path) -> dict[str, Any]:
    """The figures of a run; `line` has R@1 and MAP@R of each candidate, `folds` those on folds."""
    name, overrides = METHODS[method]
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    job = load_job(
        name,
        [f"data.root={data}", f"data.split_seed={seed}", f"seed={seed}", f"model.weights={weights}",
         *overrides],
    )  # fmt: skip
    started = time.perf_counter()
    split = load_split(job.data)
    out.mkdir()
    found: dict[str, Any] = {}
    if method not in WITH_FOLDS:
        with tuned(choose_device(job.runtime)):
            fit(job, split, out, Quiet())
    else:
        result = run_job(job, split, out, Quiet())
        found["chosen"] = _rounded(result.figures)
    found["seconds"] = round(time.perf_counter() - started, 1)
    found["line"] = {"trunk": _rounded(load_checkpoint(out).trunk)}
    found["line"] |= {name_of(a): _rounded(_at(a, out, split.test, job)) for a in ALPHAS}
    if (out / "choice.json").exists():
        choice = read_json(out / "choice.json", "")
        found["alpha"] = choice["alpha"]
        found["folds"] = {
            candidate: [round(choice[figure][candidate], 3) for figure in ("recall", "map_at_r")]
            for candidate in choice["recall"]
        }
    for file in out.rglob("*.pt"):
        file.unlink()
    return found


def _rounded(figures: Mapping[str, float]) -> list[float]:
    return [round(figures[name], 3) for name in ("R@1", "MAP@R")]


def _at(alpha: float, out: Path, images: LabelledImages, job: Job) -> dict[str, float]:
    """The figures at a point between the start of a run and its last epoch."""
    (_, start), (_, net) = (load_checkpoint(path).network() for path in (out / START, out))
    net.load_state_dict(between(start.state_dict(), net.state_dict(), alpha))
    net = net.to(choose_device(job.runtime))
    return retrieval(embed(net, images, job), images.labels).as_dict()


def _print(found: dict[str, dict[str, Any]], methods: list[str]) -> None:
    """For each shop and method, the mean gain in R@1, its worst draw, and the gain in MAP@R."""
    shops = list(dict.fromkeys(key.rsplit(" ", 2)[0] for key in found))
    chosen: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for key, run in found.items():
        shop, _, method = key.rsplit(" ", 2)
        if method in methods:
            named = {f"alpha {name}": figures for name, figures in run["line"].items()}
            if method in WITH_FOLDS:
                named = {"folds": run["chosen"]}
            for name, figures in named.items():
                recall, precision = np.subtract(figures, run["line"]["trunk"])
                column = chosen.setdefault(f"{method} {name}", {})
                column.setdefault(shop, []).append((recall, precision))
    chosen = {name: column for name, column in chosen.items() if not name.endswith("trunk")}
    heading("shop", "trunk R@1", *(f"{name}: R@1 (worst), MAP@R" for name in chosen))
    for shop in shops:
        trunks = {
            key.rsplit(" ", 1)[0]: run["line"]["trunk"][0]
            for key, run in found.items()
            if key.startswith(f"{shop} ")
        }
        cells = []
        for of_shop in chosen.values():
            gains = np.array(of_shop.get(shop, []))
            cells.append("")
            if len(gains):
                mean = gains.mean(axis=0)
                cells[-1] = f"{mean[0]:+.1f} ({gains[:, 0].min():+.1f}), {mean[1]:+.1f}"
        row(shop, f"{np.mean(list(trunks.values())):.1f}", *cells)
    for name, of_shop in chosen.items():
        gains = np.array([pair for pairs in of_shop.values() for pair in pairs])
        half = stats.t.ppf(0.975, max(len(gains) - 1, 1)) * stats.sem(gains)
        worst = min(np.mean([pair[0] for pair in pairs]) for pairs in of_shop.values())
        mean = gains.mean(axis=0)
        print(
            f"{name}: {len(gains)} runs, R@1 {mean[0]:+.1f} ± {half[0]:.1f}, worst shop "
            f"{worst:+.1f}, worst run {gains[:, 0].min():+.1f}; MAP@R {mean[1]:+.1f} ± "
            f"{half[1]:.1f}, worst run {gains[:, 1].min():+.1f}"
        )


if __name__ == "__main__":
    main()
