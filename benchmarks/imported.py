"""An imported ONNX file: what `adapt --bundle` gains on photos of products that it did not learn.

    KINLENS_SHARED=DIR python benchmarks/imported.py --json docs/results/shops/imported.json

The file is MobileNetV2 of torchvision with its ImageNet weights, exported by `torch.onnx` as others
do it, and imported. Shops are all groceries and all cars of the shared images, with at most 20
photos of each. `adapt` learns half of the products; a seed draws the halves.
"""

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import grocery_photos, heading, keep, options, records, row, shared_folder, skip
from torch import nn

import kinlens
from kinlens.training.config.job import load_job
from kinlens.training.data.load import load_split
from kinlens.training.folder import read_result
from kinlens.training.models.backbones import read_weights

FIGURES = ("R@1", "MAP@R", "gain low", "gain high")


def main() -> None:
    args = options(__doc__, seeds=3, photos=20, shops=["groceries", "cars"], json=None)
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: dict[str, dict[str, Any]] = records(args.json)
    with tempfile.TemporaryDirectory() as name:
        folder, base = Path(name), Path(name, "imported")
        _import(shared, folder, base)
        for shop in args.shops:
            photos = _photos(shared, shop, args.photos)
            for seed in range(args.seeds):
                key = f"{shop} {args.photos} {seed}"
                if key not in found:
                    found[key] = _adapt(photos, base, folder / key.replace(" ", "-"), seed)
                    print(key, found[key], flush=True)
                    keep(found, args.json)
    heading("shop, photos, seed", "R@1 imported", "adapted", "95 % interval", "MAP@R", "CPU s")
    for key, run in found.items():
        before, after = run["imported"], run["adapted"]
        row(
            key,
            f"{before['R@1']:.1f}",
            f"{after['R@1']:.1f}",
            f"{after['gain low']:+.1f} to {after['gain high']:+.1f}",
            f"{before['MAP@R']:.1f}, {after['MAP@R']:.1f}",
            f"{run['cpu_s']:.0f}",
        )


def _import(shared: Path, folder: Path, out: Path) -> None:
    from torchvision.models import mobilenet_v2

    network = mobilenet_v2()
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    state = read_weights(str(weights), "mobilenet_v2")
    network.load_state_dict({name: value.float() for name, value in state.items()})
    network.classifier = nn.Identity()
    sample, shapes = torch.zeros(2, 3, 224, 224), ({0: torch.export.Dim("batch")},)
    file = folder / "mobilenet.onnx"
    torch.onnx.export(network.eval(), (sample,), file, dynamic_shapes=shapes, verbose=False)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    kinlens.import_model(file, out, size=224, mean=mean, std=std, licence="apache-2.0")


def _photos(shared: Path, shop: str, most: int) -> list[tuple[str, str]]:
    """At most `most` photos of each product, drawn once, with the name of the product."""
    products: dict[str, list[str]] = defaultdict(list)
    if shop == "groceries":
        for path, name in grocery_photos(shared):
            products[name].append(str(path))
    else:
        job = load_job("cars196-half", [f"data.root={shared / 'data/cars196-half'}"])
        for part in load_split(job.data).parts.values():
            for path, label in zip(part.paths, part.labels.tolist(), strict=True):
                products[part.class_names[label]].append(str(part.root / path))
    rng, drawn = np.random.default_rng(0), []
    for name, paths in sorted(products.items()):
        order = sorted(rng.permutation(len(paths))[:most])
        drawn += [(sorted(paths)[index], name) for index in order]
    return drawn


def _adapt(photos: list[tuple[str, str]], base: Path, out: Path, seed: int) -> dict[str, Any]:
    began, run = time.process_time(), out.with_name(f"{out.name}-run")
    settings = [f"data.split_seed={seed}", "runtime.workers=0"]
    model = kinlens.adapt(photos, out, bundle=base, run=run, settings=settings)
    result = read_result(run)
    assert result is not None
    return {
        "photos": model.report.figures["photos"],
        "products": model.report.figures["products"],
        "model": result.model,
        "gain": model.report.figures["gain"],
        "imported": {name: round(result.trunk[name], 2) for name in FIGURES[:2]},
        "adapted": {name: round(x, 2) for name, x in result.figures.items() if name in FIGURES},
        "cpu_s": round(time.process_time() - began, 1),
    }


if __name__ == "__main__":
    main()
