"""Small shops: gains and losses of a training on unseen products.

    KINLENS_SHARED=DIR python benchmarks/small_shops.py --json docs/results/shops/shops.json

Each shop is a random draw of products and of images from groceries, cars, rendered products or all
three; half of its products are trained on. The methods:

- adapt   `kinlens-train adapt`: a head on the frozen trunk, chosen on folds
- today   the earlier job `shop`: the whole network, from principal directions, the last epoch
- shop    the job `shop`: from the directions of `adapt`, chosen on folds

A gain is R@1 on the products that were not trained on, minus the untrained trunk's, in points. The
mean has Student's 95 % interval over all shops and seeds; the worst is that of a shop over its
seeds, and of a single run. Runs in the JSON file are not repeated.
"""

import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Quiet, heading, options, row, shared_folder, skip
from regularizers import cars_job
from scipy import stats

from kinlens.training.checkpoint import START, load_checkpoint
from kinlens.training.config.job import Job, load_job
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.data.records import LabelledImages
from kinlens.training.device import choose_device
from kinlens.training.evaluation.choice import ALPHAS, between, name_of
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.evaluation.retrieval import retrieval
from kinlens.training.folder import read_json, replace_json
from kinlens.training.rendered.catalogue import class_name, render_view
from kinlens.training.runner import run_job

METHODS: dict[str, tuple[str, list[str]]] = {
    "adapt": ("adapt", []),
    "today": ("shop", ["start.projection=trunk", "protocol={choose_by='last'}"]),
    "shop": ("shop", []),
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
)


def main() -> None:
    args = options(
        __doc__, seeds=3, shops=len(SHOPS), methods=["adapt", "today"], first_seed=0, json=None
    )
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
    """The figures of a run; `line` has those of each candidate of the folds, on them and on test.

    They are pairs of R@1 and MAP@R, by the name of the candidate.
    """
    name, overrides = METHODS[method]
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    job = load_job(
        name,
        [f"data.root={data}", f"data.split_seed={seed}", f"seed={seed}", f"model.weights={weights}",
         *overrides],
    )  # fmt: skip
    started = time.perf_counter()
    split = load_split(job.data)
    result = run_job(job, split, out, Quiet())
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {
        "trunk": round(result.trunk["R@1"], 3),
        "gain": round(result.figures["R@1"] - result.trunk["R@1"], 3),
        "gain MAP@R": round(result.figures["MAP@R"] - result.trunk["MAP@R"], 3),
        "seconds": round(seconds, 3),
    }
    if job.protocol.choose_by == "folds":
        choice = read_json(out / "choice.json", "")
        found |= {"alpha": choice["alpha"], "line": {}}
        tested = {"trunk": [result.trunk[figure] for figure in ("R@1", "MAP@R")]}
        for alpha in ALPHAS:
            tested[name_of(alpha)] = _at(alpha, out, split.test, job)
        for name, figures in tested.items():
            on_folds = [choice["recall"][name], choice["map_at_r"][name]]
            found["line"][name] = [round(figure, 3) for figure in (*on_folds, *figures)]
    for file in out.rglob("*.pt"):
        file.unlink()
    return found


def _at(alpha: float, out: Path, images: LabelledImages, job: Job) -> list[float]:
    """R@1 and MAP@R at a point between the start of a run and its last epoch."""
    start, last = load_checkpoint(out / START), load_checkpoint(out)
    net = last.network()[1].to(choose_device(job.runtime))
    net.load_state_dict(between(start, last, alpha))
    found = retrieval(embed(net, images, job), images.labels)
    return [found.recall[1], found.map_at_r]


def _print(found: dict[str, dict[str, Any]], methods: list[str]) -> None:
    """The mean gain of each shop in R@1, its worst draw, and the gain in MAP@R."""
    shops = list(dict.fromkeys(key.rsplit(" ", 2)[0] for key in found))
    runs = {
        (shop, method): [
            figures
            for key, figures in found.items()
            if (key.rsplit(" ", 2)[0], key.rsplit(" ", 1)[1]) == (shop, method)
        ]
        for shop, method in product(shops, methods)
    }
    heading("shop", "trunk R@1", *(f"{method}: R@1 (worst), MAP@R" for method in methods))
    for shop in shops:
        cells = []
        for method in methods:
            gains = np.array([(r["gain"], r["gain MAP@R"]) for r in runs[shop, method]])
            mean = gains.mean(axis=0) if len(gains) else None
            cells.append(
                f"{mean[0]:+.1f} ({gains[:, 0].min():+.1f}), {mean[1]:+.1f}" if len(gains) else ""
            )
        trunks = [r["trunk"] for method in methods for r in runs[shop, method]]
        row(shop, f"{np.mean(trunks):.1f}", *cells)
    for method in methods:
        every = [run for shop in shops for run in runs[shop, method]]
        gains = np.array([run["gain"] for run in every])
        half = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains) if len(gains) > 1 else np.nan
        means = [np.mean([r["gain"] for r in runs[s, method]]) for s in shops if runs[s, method]]
        print(
            f"{method}: {len(every)} runs, mean gain {gains.mean():+.1f} ± {half:.1f}, worst shop "
            f"{min(means):+.1f}, {np.mean([r['seconds'] for r in every]):.0f} s each"
        )


if __name__ == "__main__":
    main()
