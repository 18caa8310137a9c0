"""What an addition to a training gives: heads on frozen trunks, cars and groceries.

    KINLENS_SHARED=DIR python benchmarks/additions.py --json docs/results/additions/heads.json

Each is the job `cars196-half-head`, and with one addition: on half of the classes of Cars196 or of
the Grocery Store dataset, with both trunks. The loss is Proxy-Anchor or, below "multi-similarity",
that. "first 64" is R@1 of the first 64 numbers of the embeddings, with unit norm. "phone" is R@1 of
photos as of a phone, searched for among the test images but their own. Differences to the row
without the addition are paired by seed, with Student's 95 % interval. Records in the JSON file are
not repeated.
"""

import io
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from harness import grocery_photos, heading, keep, options, records, row, shared_folder, skip
from PIL import Image, ImageFilter
from scipy import stats

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.types import first_numbers
from kinlens.training import fit, load_job
from kinlens.training.checkpoint import load_chosen
from kinlens.training.data.load import load_split
from kinlens.training.data.records import LabelledImages
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.evaluation.retrieval import retrieval

PAIRS = [
    "loss.name=multi_similarity",
    "sampling={kind = 'balanced', per_class = 5}",
    "start.proxies=random",
]
ADDITIONS: dict[str, list[str]] = {
    "none": [],
    "KoLeo 0.2": ["regularizers.koleo.share=0.2"],
    "Matryoshka": ["loss.matryoshka=[64, 128, 256]"],
    "large batches": [
        "sampling.per_class=10",
        "optimizer.batch_size=800",
        "optimizer.epochs=60",
        "optimizer.lr_head=3e-3",
    ],
    "phone views": [
        "input.colour=0.4",
        "input.blur_px=1.5",
        "input.jpeg_quality=40",
        "input.erase=0.2",
    ],
    "multi-similarity": PAIRS,
}
BASES = {"distillation, trunk": "none", "memory 3600": "multi-similarity"}
"""The row without the addition, if it is not "none"; also of additions that are gone again."""
TRUNKS = {
    "MobileNetV2": ("mobilenet_v2", "folded"),
    "EfficientNet-Lite2": ("timm:tf_efficientnet_lite2", "frozen"),
}
FIGURES = ("R@1", "MAP@R", "first 64", "phone")
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
    found: Records = records(args.json)
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
        keep(found, args.json)
    report(found)


def run(data: str, trunk: str, addition: str, seed: int, shared: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        content = job_of(data, trunk, addition, seed, shared, Path(name))
        folder = Path(name, "run")
        figures = fit(content, out=folder).figures
        job, net = load_chosen(folder).network()
        test = load_split(job.data).test
    vectors = embed(net, test, job)
    first = retrieval(first_numbers(vectors, 64), test.labels).as_dict()["R@1"]
    scores = embed(net, of_phones(test, data), job) @ vectors.T
    np.fill_diagonal(scores, -1)  # the photo that it was made from
    phone = 100 * np.mean(test.labels[scores.argmax(axis=1)] == test.labels)
    values = {"R@1": figures["R@1"], "MAP@R": figures["MAP@R"], "first 64": first, "phone": phone}
    return {figure: round(float(value), 3) for figure, value in values.items()}


def job_of(
    data: str, trunk: str, addition: str, seed: int, shared: Path, folder: Path
) -> dict[str, Any]:
    """The tables of a job; a list of images is written to `folder`."""
    backbone, batch_norm = TRUNKS[trunk]
    weights = f"{backbone.removeprefix('timm:')}-imagenet-fp16.pth"
    settings = [f"model.backbone={backbone}", f"model.batch_norm={batch_norm}", f"seed={seed}"]
    settings += [f"model.weights={shared / 'weights' / weights}", "model.views=2"]
    settings += [f"data.root={shared / 'data/cars196-half'}"]
    if data == "groceries":
        settings += ["optimizer.batch_size=80"]  # 40 of its classes are trained on
    content = load_job("cars196-half-head", settings + ADDITIONS[addition]).as_dict()
    if data == "groceries":
        content["data"] = groceries(shared, folder / "images.csv")
    return content


def of_phones(images: LabelledImages, data: str) -> LabelledImages:
    """The images as a phone takes them, in files that later runs find.

    Turned, in other light, unsharp, with noise and compressed. Training views share with them only
    brightness, blur and JPEG, and no code.
    """
    root = Path(tempfile.gettempdir(), "kinlens-phone-photos", data)
    for number, path in enumerate(images.paths):
        file = root / path
        if not file.is_file():
            photo = of_a_phone(Image.open(images.root / path), np.random.default_rng(number))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(photo)
    return replace(images, root=root)


def of_a_phone(image: Image.Image, rng: np.random.Generator) -> bytes:
    turned = image.convert("RGB").rotate(rng.uniform(-10, 10), Image.Resampling.BICUBIC)
    pixels = np.asarray(turned.filter(ImageFilter.BoxBlur(rng.uniform(0, 1.5))), float) / 255
    light = rng.uniform(0.8, 1.2, 3) * pixels ** rng.uniform(0.6, 1.7)
    noisy = light + rng.normal(0, rng.uniform(0, 0.04), pixels.shape)
    file = io.BytesIO()
    photo = Image.fromarray((255 * noisy.clip(0, 1)).astype(np.uint8))
    photo.save(file, "JPEG", quality=int(rng.integers(30, 70)))
    return file.getvalue()


def groceries(shared: Path, file: Path) -> dict[str, Any]:
    """The table `data` of all photos."""
    rows = grocery_photos(shared)
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(file, index=False)
    return {"kind": "csv", "root": str(shared / "data/grocery-store"), "file": str(file)}


def report(found: Records) -> None:
    heading("images", "trunk", "addition", "seeds", *FIGURES)
    records = pd.DataFrame([{**of_key(key), **record} for key, record in found.items()])
    for (images, trunk), cell in records.groupby(["images", "trunk"], sort=False):
        runs = {
            name: part.set_index("seed").reindex(columns=FIGURES)
            for name, part in cell.groupby("addition")
        }
        for addition in [name for name in (*ADDITIONS, *BASES) if name in runs]:
            own = runs[addition]
            if addition in ("none", *BASES.values()):
                texts = [f"{own[figure].mean():.1f}".replace("nan", "") for figure in FIGURES]
            elif (base := BASES.get(addition, "none")) in runs:
                change = own - runs[base]
                texts = [interval(change[figure].dropna().to_numpy()) for figure in FIGURES]
            else:
                continue
            row(images, trunk, addition, len(own), *texts)


def of_key(key: str) -> dict[str, str]:
    return dict(zip(("images", "trunk", "addition", "seed"), key.split("|"), strict=True))


def interval(change: Any) -> str:
    if len(change) < 2:
        return f"{change.mean():+.2f}" if len(change) else ""
    half = stats.t.ppf(0.975, len(change) - 1) * stats.sem(change)
    return f"{np.mean(change):+.2f} ± {half:.2f}"


if __name__ == "__main__":
    main()
