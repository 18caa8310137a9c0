"""Proxy-Anchor as the documentation of pytorch-metric-learning shows it, in a hand-written loop.

The baseline of our recipe: the same images, trunk, batch and number of steps; everything else is
typical for a user of that library: torchvision's transforms, one AdamW with constant rates
(proxies 100 times the network's), batch norm with frozen statistics, the weights of the last step.

    KINLENS_SHARED=/data/kinlens python benchmarks/peers/plain_loop.py --seed 0 --out plain-0.json

Prints and writes R@1, 2, 4, 8 on the test classes of cars196-half (99-196, each image searched for
among the others), and its settings.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from PIL import Image
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.models import mobilenet_v2
from torchvision.transforms import v2

from kinlens.training.config.settings import OfficialData
from kinlens.training.data.load import load_split
from kinlens.training.data.records import LabelledImages

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEST_SCALE = 1.15  # resized side relative to the cropped side, as 256 to 224


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: LabelledImages, transform: v2.Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with Image.open(self.images.root / self.images.paths[number]) as image:
            return self.transform(image.convert("RGB")), int(self.images.labels[number])


class Network(nn.Module):
    def __init__(self, weights: Path, dim: int) -> None:
        super().__init__()
        network = mobilenet_v2(weights=None)
        network.load_state_dict({k: v.float() for k, v in torch.load(weights).items()})
        self.trunk = network.features
        self.head = nn.Linear(1280, dim)

    def forward(self, pixels: Tensor) -> Tensor:
        maps = self.trunk(pixels)
        return F.normalize(self.head((maps.mean((2, 3)) + maps.amax((2, 3))).float()), dim=1)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def train(options: argparse.Namespace, images: LabelledImages) -> tuple[Network, float]:
    torch.manual_seed(options.seed)
    network = Network(Path(options.shared) / "weights/mobilenet_v2-imagenet-fp16.pth", options.dim)
    network.to(memory_format=torch.channels_last).train()
    loss_function = ProxyAnchorLoss(images.classes, options.dim, margin=0.1, alpha=32)
    optimizer = torch.optim.AdamW(
        [
            {"params": network.parameters(), "lr": 1e-4},
            {"params": loss_function.parameters(), "lr": 1e-2},
        ],
        weight_decay=1e-4,
    )
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(options.size_px, scale=(0.3, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            *to_tensor(),
        ]
    )
    loader = DataLoader(
        Images(images, transform), options.batch_size, shuffle=True, drop_last=True,
        num_workers=2, persistent_workers=True,
    )  # fmt: skip
    started, step = time.perf_counter(), 0
    while step < options.steps:
        for pixels, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                embeddings = network(pixels.contiguous(memory_format=torch.channels_last))
            loss = loss_function(embeddings.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 45 == 0:
                print(f"step {step}/{options.steps}  loss {float(loss):.3f}", flush=True)
            if step == options.steps:
                break
    return network.eval(), time.perf_counter() - started


def recall(
    network: Network, images: LabelledImages, size_px: int, count: int | None
) -> dict[str, float]:
    transform = v2.Compose(
        [v2.Resize(round(TEST_SCALE * size_px)), v2.CenterCrop(size_px), *to_tensor()]
    )
    asked = range(len(images))[:count]
    loader = DataLoader(Subset(Images(images, transform), asked), 90, num_workers=2)
    with torch.inference_mode():
        vectors = torch.cat([network(pixels) for pixels, _ in loader])
    scores = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
    labels = torch.from_numpy(images.labels[: len(asked)])
    right = labels[scores.topk(8, dim=1).indices] == labels[:, None]
    return {f"R@{k}": 100 * float(right[:, :k].any(1).float().mean()) for k in (1, 2, 4, 8)}


def to_tensor() -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shared", default=os.environ.get("KINLENS_SHARED", "../shared"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size-px", type=int, default=112)
    parser.add_argument("--steps", type=int, default=225)
    parser.add_argument("--batch-size", type=int, default=90)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--test-images", type=int, help="number of test images; default: all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = str(Path(options.shared) / "data/cars196-half")
    if not Path(root).is_dir():
        print(f"skipped: needs {root} with the images of Cars196; pass --shared")
        raise SystemExit(77)
    split = load_split(OfficialData(kind="cars196", root=root, allow_partial=True))
    network, seconds = train(options, split.train)
    found = {
        "name": "plain loop (pytorch-metric-learning)",
        "seed": options.seed,
        "size_px": options.size_px,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seconds_per_step": seconds / options.steps,
        "figures": recall(network, split.test, options.size_px, options.test_images),
    }
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
