"""Jobs small enough for a test: rendered products at 32 px, a network of 4 convolutions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

from kinlens.embedder.preprocess import to_chw
from kinlens.rendered.catalogue import render_view
from kinlens.training.__main__ import app
from kinlens.training.config.job import Job, job_toml, parse_job
from kinlens.training.report.log import Callback
from tests.training.tiny_net import TinyNet

TINY_TRUNK = f"{Path(__file__).with_name('tiny_net.py')}:TinyNet"
TINY_CHANNELS = TinyNet.channels
SMALL_CATALOGUE = {"products": 6, "views": 4, "size_px": 40}


def small_job(
    root: Path, *, regularized: bool = True, weights: Path | None = None, **optimizer: Any
) -> Job:
    """A job on 6 rendered products with 4 views; `optimizer` settings may be given.

    With `weights` (see `calibrated_weights`) batch norm is frozen.
    """
    model = {"weights": str(weights), "batch_norm": "frozen"} if weights else {"weights": "none"}
    determinant = {"determinant": {"flow": {"layers": 2, "hidden": 8}, "lambda1": 1, "lambda2": 1}}
    return parse_job(
        {
            "name": "small",
            "data": {"kind": "rendered", "root": str(root), **SMALL_CATALOGUE},
            "recall_at": [1, 2],
            "model": {"backbone": TINY_TRUNK, "dim": 16, "batch_norm": "train", **model},
            "input": {"size_px": 32, "resize_px": 36},
            "regularizers": determinant if regularized else {},
            "optimizer": {"epochs": 1, "batch_size": 4, "lr_trunk": 1e-3, **optimizer},
            "runtime": {"workers": 0, "precision": "fp32", "device": "cpu"},
        }
    )


def calibrated_weights(path: Path, build: Callable[[], nn.Module] = TinyNet) -> Path:
    """Write weights of a network, random but with batch statistics of rendered products."""
    torch.manual_seed(0)
    network = build().train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    views = [to_chw(render_view(n, n, size_px=32)) for n in range(24)]
    pixels = torch.stack([torch.from_numpy(view) for view in views]).float()
    with torch.no_grad():
        network((pixels - 120) / 60)
    torch.save(network.state_dict(), path)
    return path


def step_job(
    regularizers: dict[str, Any], weights: Path | str = "none", loss: Any = None, **tables: Any
) -> Job:
    """A job without images, whose steps a test takes itself: two draws of two per class."""
    content = {
        "name": "step",
        "data": {"kind": "folder", "root": "unused"},
        "model": {"backbone": TINY_TRUNK, "weights": str(weights), "dim": 16},
        "input": {"size_px": 32, "resize_px": 36},
        "loss": loss or {"name": "proxy_anchor"},
        "regularizers": regularizers,
        "sampling": {"kind": "paired", "per_class": 2},
        "runtime": {"device": "cpu", "precision": "fp32"},
    }
    return parse_job(content | tables)


def images(count: int = 2, side: int = 64) -> torch.Tensor:
    """Noise, the same on every call: uint8 (N, 3, S, S)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def write_job(path: Path, job: Job) -> Path:
    path.write_text(job_toml(job), encoding="utf-8")
    return path


def called(*words: object, code: int = 0) -> str:
    """What `kinlens-train` prints; errors of ours are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


class Silent(Callback):
    """A listener that remembers its messages."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rows: list[dict[str, float]] = []
        self.sentences: list[str] = []

    def remark(self, sentence: str) -> None:
        self.note(sentence)

    def note(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def step_done(self, parts: dict[str, float]) -> None:
        self.steps.append(parts)

    def epoch_done(self, row: dict[str, float]) -> None:
        self.rows.append(row)


class Stopping(Silent):
    """Presses Ctrl-C at a given step, counted from 1."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.last = step

    def step_done(self, parts: dict[str, float]) -> None:
        super().step_done(parts)
        if len(self.steps) == self.last:
            raise KeyboardInterrupt
