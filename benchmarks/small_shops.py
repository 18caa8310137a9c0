"""Small shops: what `adapt` and `shop` change for classes that they did not learn.

    KINLENS_SHARED=DIR python benchmarks/small_shops.py --json docs/results/shops/kinds.json

A shop is a random draw of classes and images of one kind: products (groceries, cars, drawn ones),
categories (kinds of groceries, bodies and makes of cars, shapes), or a mixture. Half of its classes
are learnt. Photos of the other half are searched among themselves ("alone") and among all photos of
the shop ("all"). Results are right first answers, of the trunk and of the model, and seconds.

The rule of `adapt` was chosen on shops of one half of the classes, `--half choose`; those of
`--half held` were looked at once, after that. Runs in the JSON file are not repeated.
With `--other` products of one kind are learnt, and those of another kind are searched.
"""

import tempfile
import time
import zlib
from collections import defaultdict
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import grocery_photos, heading, keep, options, records, row, shared_folder, skip
from scipy.io import loadmat
from torch import nn
from torch.nn import functional

from kinlens.rendered.catalogue import class_name, render_view
from kinlens.training.checkpoint import load_chosen
from kinlens.training.config.job import load_job
from kinlens.training.data.load import load_split
from kinlens.training.evaluation.evaluate import embed, pooled
from kinlens.training.evaluation.retrieval import retrieval
from kinlens.training.models.from_bundle import new_network
from kinlens.training.report.log import Callback
from kinlens.training.runner import run_job
from kinlens.training.start import whiten_within, whitening_helps

Kinds = dict[str, dict[str, list[Path]]]

TRUNKS = {
    "mobilenet_v2": ["model.weights={weights}/mobilenet_v2-imagenet-fp16.pth"],
    "lite2": [
        "model.backbone=timm:tf_efficientnet_lite2",
        "model.weights={weights}/tf_efficientnet_lite2-imagenet-fp16.pth",
        "input={size_px=224,resize_px=256,test_px=224}",
    ],
}
BODIES = {"SUV", "Sedan", "Coupe", "Convertible", "Hatchback", "Cab", "Van", "Wagon", "Minivan"}
SHOPS = (  # kind, classes, images of each at most
    ("grocery", 4, 12), ("grocery", 12, 20), ("grocery", 24, 10), ("grocery", 36, 40),
    ("cars", 8, 24), ("cars", 20, 15), ("cars", 40, 5), ("cars", 80, 12),
    ("drawn", 8, 8), ("drawn", 24, 4), ("mixture", 12, 10), ("mixture", 24, 12),
    ("mixture", 60, 6), ("mixture", 100, 2), ("body", 6, 25), ("body", 8, 50), ("make", 12, 25),
    ("make", 20, 8), ("category", 6, 25), ("category", 12, 25), ("category", 16, 50),
    ("shape", 6, 25), ("categories", 12, 25), ("categories", 24, 6),
)  # fmt: skip
OTHERS = (
    ("cars", 80, 12), ("grocery", 81, 10), ("drawn", 40, 8), ("category", 16, 25), ("body", 8, 50),
)  # fmt: skip


def main() -> None:
    args = options(
        __doc__, seeds=1, shops=len(SHOPS), methods=["adapt"], trunks=[*TRUNKS],
        half="held", other=False, json=None,
    )  # fmt: skip
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    if args.other:
        _learn_one_kind_and_search_another(shared, args.trunks)
        return
    found: dict[str, dict[str, Any]] = records(args.json)
    with tempfile.TemporaryDirectory() as name:
        kinds = _kinds(shared, Path(name), args.half)
        draws = product(SHOPS[: args.shops], args.trunks, range(args.seeds), args.methods)
        for number, (shop, trunk, seed, method) in enumerate(draws):
            key = f"{args.half} {shop[0]} {shop[1]}x{shop[2]} {trunk} {seed} {method}"
            if key not in found:
                folder = Path(name, f"{number}")
                _draw(kinds[shop[0]], *shop[1:], seed, folder / "shop")
                settings = [*_settings(trunk, shared, folder / "shop"), f"seed={seed}"]
                found[key] = _run(method, settings, folder / "run")
                print(key, found[key], flush=True)
                keep(found, args.json)
    _print(found)


def _settings(trunk: str, shared: Path, shop: Path) -> list[str]:
    settings = [x.replace("{weights}", f"{shared / 'weights'}") for x in TRUNKS[trunk]]
    return [*settings, f"data.root={shop}"]


def _learn_one_kind_and_search_another(shared: Path, trunks: list[str]) -> None:
    """Right first answers of each trunk and of its whitening, where it is proven."""
    heading("trunk", "learns", "searched", "photos", "alone", "all")
    with tempfile.TemporaryDirectory() as name:
        kinds: Kinds = defaultdict(dict)
        for half in ("choose", "held"):
            for kind, classes in _kinds(shared, Path(name, half), half).items():
                kinds[kind] |= classes
        for trunk in trunks:
            shops = {}
            for kind, count, images in OTHERS:
                folder = Path(name, trunk, kind)
                _draw(kinds[kind], count, images, 0, folder)
                job = load_job("adapt", _settings(trunk, shared, folder))
                whole = load_split(job.data)
                net, parts = new_network(job), [whole.train, whole.test]
                labels = [whole.train.labels, whole.test.labels + whole.train.classes]
                features = torch.cat([pooled(net, part, job) for part in parts])
                shops[kind] = features, np.concatenate(labels)
            for learnt, other in permutations(shops, 2):
                (x, of_x), (y, of_y) = shops[learnt], shops[other]
                if whitening_helps(x, of_x, seed=0):
                    layer = nn.Linear(x.shape[1], x.shape[1]).requires_grad_(False)
                    whiten_within(layer, x, of_x)
                    both, labels = torch.cat([y, x]), np.concatenate([of_y, of_x + of_y.max() + 1])
                    cells = [
                        f"{_right(z, of_z, len(y))} -> {_right(layer(z), of_z, len(y))}"
                        for z, of_z in ((y, of_y), (both, labels))
                    ]
                    row(trunk, learnt, other, len(y), *cells)


def _right(vectors: torch.Tensor, labels: np.ndarray, queries: int) -> int:
    """Right first answers of the first `queries` vectors, each searched among all others."""
    return int((retrieval(functional.normalize(vectors), labels).ranks[:queries] == 0).sum())


def _kinds(shared: Path, work: Path, half: str) -> Kinds:
    """Files by class of each kind of shop, of half of the products."""
    kinds: Kinds = defaultdict(lambda: defaultdict(list))

    def add(path: Path, label: str, **names: str) -> None:
        if (zlib.crc32(label.encode()) % 2 == 0) == (half == "choose"):
            for kind, name in names.items():
                kinds[kind][name].append(path)

    for number, view in product(range(50), range(8)):
        label = class_name(number)
        path = work / "drawn" / label / f"{view}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        render_view(number, view, size_px=160).save(path)
        add(path, label, drawn=label, shape=label.split("-")[1])
    for path, name in grocery_photos(shared):
        add(path, name, grocery=name, category=path.parent.parent.name)
    root = shared / "data/cars196-half"
    cars = loadmat(root / "cars_annos.mat", simplify_cells=True)["class_names"]
    for part in load_split(load_job("cars196-half", [f"data.root={root}"]).data).parts.values():
        for path, number in zip(part.paths, part.labels.tolist(), strict=True):
            label = cars[int(part.class_names[number]) - 1]
            make, *words = label.split()
            names = {"cars": label, "make": make}
            for body in BODIES.intersection(words):
                names["body"] = body
            add(part.root / path, label, **names)
    kinds["mixture"] = kinds["grocery"] | kinds["cars"] | kinds["drawn"]
    kinds["categories"] = kinds["category"] | kinds["body"] | kinds["shape"]
    return kinds


def _draw(classes: dict[str, list[Path]], count: int, images: int, seed: int, folder: Path) -> None:
    """A folder with a sub-folder of links for each drawn class."""
    rng = np.random.default_rng((seed, count, images))
    enough = [name for name, files in sorted(classes.items()) if len(files) >= min(images, 5)]
    for label in rng.permutation(enough)[:count]:
        target = folder / label.replace("/", "-").replace(" ", "-")
        target.mkdir(parents=True)
        for index in rng.permutation(len(classes[label]))[:images]:
            file = classes[label][index]
            (target / f"{index}{file.suffix}").symlink_to(file)


def _run(method: str, settings: list[str], out: Path) -> dict[str, Any]:
    """A run, with the right first answers of its trunk and of its model."""
    job = load_job(method, settings)
    split, began, before = load_split(job.data), time.perf_counter(), time.process_time()
    result = run_job(job, split, out, Callback())
    found: dict[str, Any] = {
        "model": result.model,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - before, 1),
    }
    parts = [split.test, split.train]
    labels = np.concatenate([split.test.labels, split.train.labels + split.test.classes])
    trunk, net = new_network(job), load_chosen(out).network()[1]
    for name, vectors in (
        ("trunk", [functional.normalize(pooled(trunk, part, job)).numpy() for part in parts]),
        ("adapted", [embed(net, part, job) for part in parts]),
    ):
        alone = retrieval(vectors[0], split.test.labels)
        ranks = retrieval(np.concatenate(vectors), labels).ranks[: len(split.test)]
        found[name] = [int((alone.ranks == 0).sum()), int((ranks == 0).sum())]
        found["queries"] = alone.queries
    for file in out.rglob("*.pt"):
        file.unlink()
    return found


def _print(found: dict[str, dict[str, Any]]) -> None:
    """For each shop and method, the changes of its draws in right first answers."""
    shops = defaultdict(list)
    for key, run in found.items():
        half, kind, size, *_, method = key.split()
        for name in (f"{kind} {size}, {method}", f"all of the half {half}, {method}"):
            shops[name].append(run)
    heading("shop", "runs", "queries", "changed", "mean R@1 alone, all", "worst, in answers")
    for name, runs in shops.items():
        answers = np.array([np.subtract(run["adapted"], run["trunk"]) for run in runs])
        queries = np.array([run["queries"] for run in runs])
        means = (100 * answers / queries[:, None]).mean(axis=0)
        changed = sum(run["model"] != "the trunk itself" for run in runs)
        worst = ", ".join(f"{worst:+d}" for worst in answers.min(axis=0))
        row(
            name,
            len(runs),
            f"{queries.mean():.0f}",
            changed,
            f"{means[0]:+.2f}, {means[1]:+.2f}",
            worst,
        )


if __name__ == "__main__":
    main()
