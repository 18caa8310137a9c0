"""A simulated shop that learns from use: recall before and after two rounds of feedback.

    python benchmarks/simulated_shop.py --seeds 3 --json docs/results/feedback/proxy-anchor.json

For each seed a shop of rendered products; two thirds of them are trained on, from random weights,
and the gallery has all of them. Customers take photos of products in views that the shop lacks,
with other light, crops, turns, blur, noise and JPEG. A customer views the ten best answers, clicks
the first right one with a probability of 0.9 and any wrong one with 0.05, and marks each wrong one
as wrong with 0.3. After each round the training continues, for the same steps, in three ways:

- alone        without feedback: the effect of more training as such
- "pictures"   the query images join their classes (`sampling.confused = 0`)
- feedback     also, confused classes share a quarter of the batches: the default

Each continues from its own previous model and gets the feedback on that model's answers. R@1 is of
query images that were never searched with; feedback on products that are not trained on is ignored.
Differences are paired by seed, with Student's 95 % interval over the seeds.
"""

import csv
import hashlib
import io
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quiet, heading, options, row, with_interval
from PIL import Image, ImageFilter

from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.types import Embeddings
from kinlens.training.checkpoint import load_chosen
from kinlens.training.config.job import Job, apply_override, parse_job
from kinlens.training.data.feedback import sentences
from kinlens.training.data.load import load_split, read_folder
from kinlens.training.export.bundle import export_checkpoint
from kinlens.training.models.embedding import torch_embed
from kinlens.training.rendered.catalogue import class_name, render_view
from kinlens.training.runner import run_job

PRODUCTS, VIEWS, SIZE_PX = 40, 6, 80
ASKED, FRESH = 5, 8  # query images per product: used in a round, kept for the figures
FIRST_VIEW = 1000  # number of the customers' first view; the shop's begin at 0
STEPS_PER_EPOCH, EPOCHS, MORE_EPOCHS = 5, 60, 20
ARMS: dict[str, dict[str, Any]] = {
    "alone": {"feedback": False},
    "pictures": {"feedback": True, "confused": 0.0},
    "feedback": {"feedback": True},
}
ROUNDS = ("before", "round 1", "round 2")
Scores = dict[str, dict[str, float]]


def main() -> None:
    args = options(__doc__, seeds=3, out=Path("runs/feedback"), json=None, set=list[str]())
    found = [shop(seed, args.out / str(seed), args.set) for seed in range(args.seeds)]
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    titles = ("R@1, all products", "trained on", "not trained on")
    heading("after", "way", *(word for title in titles for word in (title, "Δ to alone")))
    for cells in table(found):
        row(*cells)


def shop(seed: int, folder: Path, overrides: Sequence[str] = ()) -> dict[str, Scores]:
    """Recall by way and round; `folder` is recreated."""
    shutil.rmtree(folder, ignore_errors=True)
    fresh = sample_images(seed, range(FRESH))
    first = train(job(seed, folder, overrides), folder / "before")
    before = recall(first, folder, fresh)
    scores: dict[str, Scores] = {}
    for arm, settings in ARMS.items():
        run, feedback = first, list[str]()
        scores[arm] = {ROUNDS[0]: before}
        for number, name in enumerate(ROUNDS[1:], start=1):
            views = range(FRESH + (number - 1) * ASKED, FRESH + number * ASKED)
            if settings["feedback"]:
                feedback_folder = folder / f"feedback-{arm}-{number}"
                listen(run, folder, sample_images(seed, views), feedback_folder, (seed, number))
                feedback.append(str(feedback_folder))
            more = job(seed, folder, overrides, run, feedback, settings.get("confused"))
            run = train(more, folder / f"{arm}-{number}")
            scores[arm][name] = recall(run, folder, fresh)
            print(f"  {before} -> {scores[arm][name]}", flush=True)
    return scores


def job(
    seed: int,
    folder: Path,
    overrides: Sequence[str] = (),
    after: Path | None = None,
    feedback: Sequence[str] = (),
    confused: float | None = None,
) -> Job:
    """The first training, or one that continues a run, with the feedback of these folders."""
    first = after is None
    rate = 2e-3 if first else 5e-4
    content: dict[str, Any] = {
        "name": "shop",
        "seed": seed,
        "data": {
            "kind": "rendered", "root": str(folder / "products"), "products": PRODUCTS,
            "views": VIEWS, "size_px": SIZE_PX, "seed": seed, "train_fraction": 2 / 3,
            "split_seed": seed, "feedback": list(feedback),
        },
        "model": {
            "backbone": "timm:test_resnet", "dim": 64,
            "weights": "none" if after is None else str(bundle_of(after)),
            "batch_norm": "train" if first else "statistics",
        },
        "start": {"projection": "trunk", "proxies": "class_means"},
        "input": {"size_px": 64, "resize_px": 72, "min_crop_area": 0.4, "flip": False},
        "sampling": {} if confused is None else {"confused": confused},
        "optimizer": {
            "epochs": EPOCHS if first else MORE_EPOCHS,
            "steps_per_epoch": STEPS_PER_EPOCH,  # with more images too
            "batch_size": 32, "lr_trunk": rate, "lr_head": rate, "lr_proxies": 2e-2,
            "schedule": "cosine", "average": 0.98,
        },
        "protocol": {"evaluate_test": "never"},
        "runtime": {"workers": 0, "precision": "fp32", "device": "cpu", "eval_every_epochs": 0},
    }  # fmt: skip
    for override in overrides:
        apply_override(content, override)
    return parse_job(content)


def train(settings: Job, run: Path) -> Path:
    """The folder of a run of the job."""
    started = time.perf_counter()
    split = load_split(settings.data)
    run_job(settings, split, run, Quiet())
    messages = "; ".join(sentences(split))
    print(f"{run}: {time.perf_counter() - started:.0f} s {messages}", flush=True)
    return run


def bundle_of(run: Path) -> Path:
    """The bundle of a run, exported on first use."""
    if not (run / "bundle").exists():
        split = load_split(job_of(run).data)
        export_checkpoint(load_chosen(run), split, run / "bundle")
    return run / "bundle"


def job_of(run: Path) -> Job:
    return parse_job(load_chosen(run).job)


def listen(
    run: Path,
    folder: Path,
    queries: list[tuple[int, bytes]],
    feedback_folder: Path,
    seed: tuple[int, int],
) -> None:
    """Write the customers' feedback on the answers of a model, in the format of the service."""
    labels, paths, order = answers(run, folder, [data for _, data in queries])
    (feedback_folder / "pictures").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with (feedback_folder / "pairs.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("query", "query_key", "item", "action"))
        for (product, data), ranking in zip(queries, order, strict=True):
            query = f"pictures/{hashlib.sha256(data).hexdigest()}.jpg"
            (feedback_folder / query).write_bytes(data)
            right = [i for i in ranking[:10] if labels[i] == product]
            wrong = [i for i in ranking[:10] if labels[i] != product]
            if right and rng.random() < 0.9:
                writer.writerow((query, "", paths[right[0]], "clicked"))
            if wrong and rng.random() < 0.05:
                writer.writerow((query, "", paths[rng.choice(wrong)], "clicked"))
            for item in wrong:
                if rng.random() < 0.3:
                    writer.writerow((query, "", paths[item], "wrong"))


def recall(run: Path, folder: Path, fresh: list[tuple[int, bytes]]) -> dict[str, float]:
    """R@1 in percent of query images among all products: all, trained on, not trained on."""
    labels, _, order = answers(run, folder, [data for _, data in fresh])
    products = np.array([product for product, _ in fresh])
    right = labels[order[:, 0]] == products
    split = load_split(job_of(run).data)
    trained = np.array([number_of(name) for name in split.train.class_names])
    seen = np.isin(products, trained)
    parts = {"all": right, "trained on": right[seen], "not trained on": right[~seen]}
    return {name: round(100 * float(part.mean()), 2) for name, part in parts.items()}


def number_of(name: str) -> int:
    """The product of a class name, such as 7 of p007-mug-TORVI."""
    return int(name[1:].split("-")[0])


def answers(
    run: Path, folder: Path, queries: list[bytes]
) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Product and path of each image of the shop, and for each query their order, best first."""
    root = folder / "products"
    paths = [record.path for record in read_folder(root)]
    settings, net = load_chosen(run).network()
    spec = settings.input.preprocessing()

    def embed(images: list[bytes]) -> Embeddings:
        return torch_embed(net, np.stack([preprocess(data, spec) for data in images]))

    shown = embed([(root / path).read_bytes() for path in paths])
    order = np.argsort(-(embed(queries) @ shown.T), axis=1, kind="stable")
    return np.array([number_of(path) for path in paths]), paths, order


def sample_images(seed: int, views: range) -> list[tuple[int, bytes]]:
    """Query images of customers: (product, JPEG) of each view of each product of a shop."""
    assert class_name(0, seed).startswith("p000")
    return [
        (product, customer_photo(seed, product, FIRST_VIEW + view))
        for product in range(PRODUCTS)
        for view in views
    ]


@cache
def customer_photo(seed: int, product: int, view: int) -> bytes:
    """A customer's photo of a product: rotated, cropped, in indoor light, blurred, noisy."""
    rng = np.random.default_rng((seed, product, view, 7))
    image = render_view(product, view, size_px=3 * SIZE_PX // 2, seed=seed)
    image = image.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR, fillcolor=(70, 66, 60))
    side = image.width * np.sqrt(rng.uniform(0.6, 0.95))
    left, top = rng.uniform(0, image.width - side, 2)
    image = image.crop((int(left), int(top), int(left + side), int(top + side)))
    image = image.resize((SIZE_PX, SIZE_PX), Image.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.2)))
    light = rng.uniform(0.55, 1.3) * rng.uniform(0.8, 1.2, 3)
    pixels = np.asarray(image, np.float32) * light
    pixels += rng.normal(0, rng.uniform(3, 12), pixels.shape)
    buffer = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.save(buffer, "JPEG", quality=int(rng.integers(35, 75)))
    return buffer.getvalue()


def table(found: list[dict[str, Scores]]) -> Iterator[list[str]]:
    """Means over the seeds, and the differences to training without feedback."""
    for name in ROUNDS:
        for arm in ARMS if name != ROUNDS[0] else ["alone"]:
            cells = [name, arm if name != ROUNDS[0] else ""]
            for part in ("all", "trained on", "not trained on"):
                values = [scores[arm][name][part] for scores in found]
                alone = [scores["alone"][name][part] for scores in found]
                cells += [
                    f"{statistics.mean(values):.1f}",
                    "" if arm == "alone" else with_interval(np.subtract(values, alone)),
                ]
            yield cells


if __name__ == "__main__":
    main()
