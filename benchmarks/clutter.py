"""Busy photos: what windows and boxes find of a product that fills a part of the photo.

    KINLENS_SHARED=DIR python benchmarks/clutter.py --half held --detector boxes.onnx
    KINLENS_SHARED=DIR python benchmarks/clutter.py --cost

A photo of a product is pasted into a photo of something else, cars into groceries and groceries
into cars, at 35 to 54 % of its width, so the true box is known. The whole photo, windows of it,
the boxes of a detector, the true box and the product alone search in the other photos of the same
products. With several boxes an item has the score of its best one. R@1 counts right first answers.

The model is MobileNetV2 as it comes, or --bundle. Layouts of windows are compared on one half of
the products, `--half choose`; figures of the chosen one are those of the other half. Intervals are
95 % bootstrap intervals over products.

With --cost, a service answers searches with such photos, plain and with crop=auto in turns, one
after another: their time, and the CPU time of all its processes.
"""

import io
import itertools
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from clustered import clustered_batches
from harness import (
    grocery_photos,
    heading,
    in_turns,
    kinlens,
    made_gallery,
    options,
    ratio,
    row,
    serving,
    shared_folder,
    skip,
    tree_cpu_s,
)
from PIL import Image

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.preprocess import WHOLE, Box, ImageParts, decode
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embeddings
from kinlens.embedder.views.boxes import Detector, Network
from kinlens.training.bundles.boxes import Given, describe_detector
from kinlens.training.config.job import load_job
from kinlens.training.data.load import load_split

Photos = dict[str, list[Path]]
"""Photos by product."""

BACKGROUND_PX, SHARE = 480, (0.35, 0.54)
BOXES = (1, 2, 4, 5, 8)  # the best of them; a service searches with four
MOST = 8  # photos of a product in the gallery
WIDTHS_PX, PHOTOS, ITEMS = (480, 3024), 10, 10_000  # of the cost
LAYOUTS = {
    "whole": ("whole",),
    "halves": ("whole", "halves"),
    "two thirds": ("whole", "two thirds"),
    "two thirds, halves": ("whole", "two thirds", "halves"),
    "halves, thirds": ("whole", "halves", "thirds"),
    "halves without the whole": ("halves",),
}
SIZES = {"whole": (1.0, 1), "two thirds": (2 / 3, 2), "halves": (1 / 2, 3), "thirds": (1 / 3, 5)}
"""Side of a window as a share of each side of the photo, and the number of them in a row."""


def main() -> None:
    args = options(
        __doc__, bundle=None, detector=None, queries=400, half="choose", json=None, cost=False,
        rounds=20,
    )  # fmt: skip
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    cars, groceries = _cars(shared, args.half), _groceries(shared, args.half)
    with tempfile.TemporaryDirectory() as name:
        bundle = args.bundle or _trunk(shared, Path(name, "bundle"))
        if args.cost:
            cost(bundle, Path(name), cars, groceries, args.rounds)
            return
        embedder = OnnxEmbedder.open(bundle)
        detector = _detector(args.detector, embedder.bundle)
    found: dict[str, Any] = {}
    for name, products, others in (("cars", cars, groceries), ("groceries", groceries, cars)):
        found[name] = contest(embedder, detector, products, others, args.queries)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    heading("", "vectors", *found)
    for method in found["cars"]:
        row(
            method,
            found["cars"][method]["vectors"],
            *(_cell(each[method]) for each in found.values()),
        )


def _trunk(shared: Path, out: Path) -> Path:
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    network = "--backbone", "mobilenet_v2", "--weights", weights
    kinlens("train", "export", *network, "--out", out)
    return out


def _detector(file: Path | None, bundle: Bundle) -> Detector | None:
    """The detector in `file`, or that of the bundle, as `kinlens-train attach` describes it."""
    if file is None:
        return Detector.open(bundle) if bundle.manifest.boxes else None
    block, _ = describe_detector(file, bundle.golden_images(), Given())
    return Detector(Network(file), block)


def _cell(figures: dict[str, float]) -> str:
    return f"{figures['r1']:.1f} ({figures['low']:.1f} to {figures['high']:.1f})"


def contest(
    embedder: OnnxEmbedder, detector: Detector | None, products: Photos, others: Photos, n: int
) -> dict[str, dict[str, float]]:
    """R@1 in percent with its interval, and the mean number of vectors, of each method."""
    rng = np.random.default_rng(0)
    names = sorted(products)
    backgrounds = sorted(path for paths in others.values() for path in paths)
    gallery = [(name, path) for name in names for path in products[name][1 : 1 + MOST]]
    labels = np.array([name for name, _ in gallery])
    vectors = np.concatenate([_embedded(embedder, path.read_bytes()) for _, path in gallery])
    right: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    queried = [names[number % len(names)] for number in range(n)]

    def ask(method: str, name: str, asked: Embeddings) -> None:
        best = (asked @ vectors.T).max(axis=0).argmax()
        right.setdefault(method, []).append(float(labels[best] == name))
        counts.setdefault(method, []).append(len(asked))

    for number, name in enumerate(queried):
        photos = [products[name][0], *products[name][1 + MOST :]]
        photo = photos[(number // len(names)) % len(photos)]
        behind = backgrounds[int(rng.integers(len(backgrounds)))]
        scene, truth = composite(photo, behind, rng)
        methods: dict[str, list[Box]] = {"true box": [truth]}
        methods |= {f"windows: {method}": windows(sizes) for method, sizes in LAYOUTS.items()}
        if detector is not None:
            boxes = [one.box for one in detector.find(decode(scene))]
            methods |= {f"boxes: {most}": [WHOLE, *boxes[:most]] for most in BOXES}
        ask("alone", name, _embedded(embedder, photo.read_bytes()))
        every = list(dict.fromkeys(itertools.chain.from_iterable(methods.values())))
        found = dict(zip(every, _embedded(embedder, scene, every), strict=True))
        for method, asked in methods.items():
            ask(method, name, np.stack([found[box] for box in asked]))
    groups = np.array([names.index(name) for name in queried])
    return {
        method: {**_interval(np.array(each), groups), "vectors": float(np.mean(counts[method]))}
        for method, each in right.items()
    }


def cost(bundle: Path, folder: Path, products: Photos, others: Photos, rounds: int) -> None:
    """What windows cost over HTTP, for small photos and for those of a phone."""
    embedder, rng = OnnxEmbedder.open(bundle), np.random.default_rng(0)
    dim, bundle_id = embedder.dim, embedder.bundle_id
    batches = lambda: clustered_batches(ITEMS, dim)
    gallery = made_gallery(folder / "gallery", batches, ITEMS, dim, bundle_id=bundle_id)
    pairs = list(zip(products.values(), others.values(), strict=False))[:PHOTOS]
    serial = itertools.count()  # makes each file new, so that no vector is cached
    heading("photo", "ms of", "plain", "auto", "ratio")
    with serving(bundle, gallery) as server, httpx.Client(base_url=server.url) as client:
        for width in WIDTHS_PX:
            scenes = [composite(one[0], other[0], rng, width)[0] for one, other in pairs]

            def ask(fields: dict[str, str], scenes: Sequence[bytes] = scenes) -> None:
                for scene in scenes:
                    files = {"image": ("photo.jpg", scene + b"%016d" % next(serial))}
                    client.post("/search", files=files, data=fields).raise_for_status()

            calls = {"plain": lambda: ask({}), "auto": lambda: ask({"crop": "auto"})}
            cpu_s = lambda: tree_cpu_s(server.process.pid)
            for name, clock in (("time", time.perf_counter), ("CPU", cpu_s)):
                seconds = in_turns(calls, rounds, clock, warm_up=1)
                plain, auto = (1e3 * statistics.median(seconds[of]) / PHOTOS for of in calls)
                row(f"{width} px", name, plain, auto, ratio(seconds["auto"], seconds["plain"]))


def windows(sizes: Sequence[str]) -> list[Box]:
    """The windows of these sizes, each row and column of them evenly spread over the photo."""
    found: list[Box] = []
    for side, count in map(SIZES.__getitem__, sizes):
        starts = np.linspace(0, 1 - side, count).tolist()
        found += [(left, top, side, side) for top in starts for left in starts]
    return found


def composite(
    photo: Path, behind: Path, rng: np.random.Generator, width_px: int = BACKGROUND_PX
) -> tuple[bytes, Box]:
    """A JPEG of `behind` with `photo` pasted in at random, and the box of the latter."""
    with Image.open(behind) as image:
        scene = image.convert("RGB")
    scene = scene.resize((width_px, round(width_px * scene.height / scene.width)))
    with Image.open(photo) as image:
        pasted = image.convert("RGB")
    width = round(float(rng.uniform(*SHARE)) * scene.width)
    height = round(width * pasted.height / pasted.width)
    if height > 0.9 * scene.height:
        width, height = round(width * 0.9 * scene.height / height), round(0.9 * scene.height)
    left = int(rng.integers(scene.width - width + 1))
    top = int(rng.integers(scene.height - height + 1))
    scene.paste(pasted.resize((width, height), Image.Resampling.BICUBIC), (left, top))
    out = io.BytesIO()
    scene.save(out, "JPEG", quality=90)
    size = scene.width, scene.height, scene.width, scene.height
    box = np.array([left, top, width, height]) / size
    return out.getvalue(), (float(box[0]), float(box[1]), float(box[2]), float(box[3]))


def _embedded(embedder: OnnxEmbedder, data: bytes, boxes: Sequence[Box | None] = (None,)) -> Any:
    return embedder.embed(ImageParts(data).pixels(boxes, embedder.preprocessing))


def _interval(right: Any, groups: Any) -> dict[str, float]:
    """The percentage of right answers, with a bootstrap interval over the groups."""
    rng, sums = np.random.default_rng(1), np.bincount(groups, weights=right)
    counts = np.bincount(groups)
    draws = rng.integers(len(sums), size=(2000, len(sums)))
    shares = 100 * sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return {"r1": 100 * float(right.mean()), "low": float(low), "high": float(high)}


def _in_half(label: str, half: str) -> bool:
    return (zlib.crc32(label.encode()) % 2 == 0) == (half == "choose")


def _cars(shared: Path, half: str) -> Photos:
    root = shared / "data/cars196-half"
    found: Photos = {}
    split = load_split(load_job("cars196-half", [f"data.root={root}"]).data)
    for part in split.parts.values():
        for path, number in zip(part.paths, part.labels.tolist(), strict=True):
            label = part.class_names[number]
            if _in_half(label, half):
                found.setdefault(label, []).append(root / path)
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > MOST}


def _groceries(shared: Path, half: str) -> Photos:
    found: Photos = {}
    for path, product in grocery_photos(shared):
        if _in_half(product, half):
            found.setdefault(product, []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > MOST}


if __name__ == "__main__":
    main()
