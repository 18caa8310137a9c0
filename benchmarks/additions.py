"""What an addition to a training gives: heads on frozen trunks, cars and groceries.

    KINLENS_SHARED=DIR python benchmarks/additions.py --json docs/results/additions/heads.json

Each is the job `cars196-half-head` with Proxy-Anchor, and with one addition: on half of the classes
of Cars196 or of the Grocery Store dataset, with both trunks. "first 64" is R@1 of the first 64
numbers of the embeddings, with unit norm. Differences to "none" are paired by seed, with Student's
95 % interval. Records in the JSON file are not repeated.
"""

import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from harness import heading, options, row, shared_folder, skip
from scipy import stats

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.types import first_numbers
from kinlens.training import fit, load_job
from kinlens.training.checkpoint import load_chosen
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.evaluation.retrieval import retrieval

ADDITIONS: dict[str, list[str]] = {
    "none": [],
    "KoLeo 0.2": ["regularizers.koleo.share=0.2"],
    "Matryoshka": ["loss.matryoshka=[64, 128, 256]"],
}
TRUNKS = {
    "MobileNetV2": ("mobilenet_v2", "folded"),
    "EfficientNet-Lite2": ("timm:tf_efficientnet_lite2", "frozen"),
}
FIGURES = ("R@1", "MAP@R", "first 64")
Records = dict[str, dict[str, float]]


def main() -> None:
    args = options(
        __doc__,
        seeds=5,
        additions=[*ADDITIONS],
        images=["cars", "groceries"],
        trunks=[*TRUNKS],
        json=None,
    )
    if (shared := shared_folder()) is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: Records = {}
    if args.json is not None and args.json.is_file():
        found = json.loads(args.json.read_text())
    cells = product(args.images, args.trunks, range(args.seeds), args.additions)
    for data, trunk, seed, addition in cells:
        key = f"{data}|{trunk}|{addition}|{seed}"
        if key in found:
            continue
        try:
            found[key] = run(data, trunk, addition, seed, shared)
        except KinlensError as error:  # the others still run
            print(f"{key}: {error}", flush=True)
            continue
        print(key, found[key], flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")
    report(found)


def run(data: str, trunk: str, addition: str, seed: int, shared: Path) -> dict[str, float]:
    backbone, batch_norm = TRUNKS[trunk]
    weights = f"{backbone.removeprefix('timm:')}-imagenet-fp16.pth"
    settings = [f"model.backbone={backbone}", f"model.batch_norm={batch_norm}", f"seed={seed}"]
    settings += [f"model.weights={shared / 'weights' / weights}", "model.views=2"]
    settings += [f"data.root={shared / 'data/cars196-half'}", *ADDITIONS[addition]]
    content = load_job("cars196-half-head", settings).as_dict()
    with tempfile.TemporaryDirectory() as name:
        if data == "groceries":
            content["data"] = groceries(shared / "data/grocery-store", Path(name, "images.csv"))
            content["optimizer"]["batch_size"] = 80  # 40 of its classes are trained on
        folder = Path(name, "run")
        figures = fit(content, out=folder).figures
        job, net = load_chosen(folder).network()
        test = load_split(job.data).test
    short = first_numbers(embed(net, test, job), 64)
    first = retrieval(short, test.labels).as_dict()["R@1"]
    values = {"R@1": figures["R@1"], "MAP@R": figures["MAP@R"], "first 64": first}
    return {figure: round(value, 3) for figure, value in values.items()}


def groceries(root: Path, file: Path) -> dict[str, Any]:
    """The table `data` of all photos, of which a product has its own folder in each part."""
    photos = [record for record in read_folder(root) if "iconic" not in record.path]
    rows = [(record.path, Path(record.label).name) for record in photos]
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(file, index=False)
    return {"kind": "csv", "root": str(root), "file": str(file)}


def report(found: Records) -> None:
    heading("images", "trunk", "addition", "seeds", *FIGURES)
    records = pd.DataFrame([[*key.split("|"), *r.values()] for key, r in found.items()])
    records.columns = ["images", "trunk", "addition", "seed", *FIGURES]
    for (images, trunk), cell in records.groupby(["images", "trunk"], sort=False):
        base = cell[cell.addition == "none"].set_index("seed")[[*FIGURES]]
        row(images, trunk, "none", len(base), *(f"{base[f].mean():.1f}" for f in FIGURES))
        for addition, runs in cell[cell.addition != "none"].groupby("addition", sort=False):
            change = (runs.set_index("seed")[[*FIGURES]] - base).dropna()
            texts = [interval(change[figure].to_numpy()) for figure in FIGURES]
            row(images, trunk, addition, len(change), *texts)


def interval(change: Any) -> str:
    if len(change) < 2:
        return f"{change.mean():+.2f}"
    half = stats.t.ppf(0.975, len(change) - 1) * stats.sem(change)
    return f"{np.mean(change):+.2f} ± {half:.2f}"


if __name__ == "__main__":
    main()
