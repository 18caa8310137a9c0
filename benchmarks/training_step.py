"""Cost of a training step: each regularizer compared with Proxy-Anchor only and a plain loop.

    python benchmarks/training_step.py [--rounds 40]

MobileNetV2 at 160 px, 512-d, batch 90, on the CPU. All contestants take the same ten batches and
run steps in turns, in a new random order each round, so that noise on the machine affects all
alike; read the ratios, which are medians over rounds.

The peer, "plain loop", is hand-written: the same network, AdamW, and the Proxy-Anchor of
pytorch-metric-learning. The bounds: our loop is at least as fast as the plain one, a regularizer
costs at most 10 % of a step. Images of $KINLENS_SHARED if available, else rendered products.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import heading, in_turns, options, ratio, row, shared_folder
from pytorch_metric_learning.losses import ProxyAnchorLoss as PeerLoss
from torch import Tensor
from torch.utils.data import DataLoader

from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.images import TrainingImages
from kinlens.training.data.load import load_split
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.device import autocast, tuned
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.state import create_run
from kinlens.training.trainer import train_step

DIM, WARM_UP = 512, 3
REGULARIZERS: dict[str, dict[str, dict[str, Any]]] = {
    "Proxy-Anchor": {},
    "+ determinant, Real-NVP": {"determinant": {}},
    "+ skewed mean": {"skewed_mean": {}},
    "+ non-isotropy": {"non_isotropy": {}},
    "+ graph consistency": {"graph_consistency": {}},
}
PLAIN = "plain loop, peer's Proxy-Anchor"
Step = Callable[[Tensor, Tensor], None]


def main() -> None:
    args = options(__doc__, rounds=40, batch=90, size_px=160)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            name: job(tables, Path(folder), args.batch, args.size_px)
            for name, tables in REGULARIZERS.items()
        }
        base = jobs["Proxy-Anchor"]
        split = load_split(base.data)
        steps = {name: ours(one, split.train.classes) for name, one in jobs.items()}
        steps[PLAIN] = plain(base, split.train.classes)
        paired = jobs["+ graph consistency"]
        loader = DataLoader(
            TrainingImages(split.train, base.input, 0),
            batch_sampler=BatchSampler(paired, split.train.labels),
            num_workers=2,
        )
        batches = itertools.cycle([*itertools.islice(loader, 10)])
        calls = {name: lambda step=step: step(*next(batches)) for name, step in steps.items()}
        with tuned(torch.device("cpu")):
            seconds = in_turns(calls, args.rounds, warm_up=WARM_UP)
    heading("step", "images/s", "time / Proxy-Anchor alone")
    for name, values in seconds.items():
        alone = f"{ratio(values, seconds['Proxy-Anchor']):.3f}"
        row(name, args.batch / statistics.median(values), alone)


def job(regularizers: dict[str, dict[str, Any]], folder: Path, batch: int, size_px: int) -> Job:
    """Proxy-Anchor on cars, or on rendered products, with some regularizers."""
    shared = shared_folder()
    if shared is None:
        data = {"kind": "rendered", "root": str(folder / "products"), "products": 40}
    else:
        data = {"kind": "cars196", "root": f"{shared}/data/cars196-half", "allow_partial": True}
    return parse_job({
        "name": "step",
        "data": data,
        "model": {"weights": "none", "dim": DIM, "batch_norm": "folded"},
        "input": {"size_px": size_px, "resize_px": size_px * 11 // 10},
        "sampling": {"kind": "paired", "per_class": 5},
        "optimizer": {"batch_size": batch, "epochs": 1},
        "regularizers": regularizers,
        "runtime": {"device": "cpu"},
    })  # fmt: skip


def ours(settings: Job, classes: int) -> Step:
    """One step of Kinlens's training loop."""
    run = create_run(settings, classes)
    run.net.train()
    model = run.begin_epoch(trunk_frozen=False)
    return lambda images, labels: train_step(run, model, images, labels, 1000) and None


def plain(settings: Job, classes: int) -> Step:
    """One step of a typical hand-written loop."""
    net = EmbeddingNet(settings.model).to(memory_format=torch.channels_last).train()
    loss_fn = PeerLoss(classes, DIM, margin=0.1, alpha=32)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    rates = [{"params": trained, "lr": 1e-4}, {"params": loss_fn.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(rates, weight_decay=1e-4)

    def step(images: Tensor, labels: Tensor) -> None:
        with autocast(settings.runtime, torch.device("cpu")):
            embeddings = net(images)
        loss = loss_fn(embeddings, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


if __name__ == "__main__":
    main()
