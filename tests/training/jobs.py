"""Jobs small enough for a test: rendered products, MobileNetV2 from random weights at 32 px."""

from pathlib import Path
from typing import Any

from training.config import Job, parse_job


def small_job(root: Path, *, regularized: bool = True, **optimizer: Any) -> Job:
    """A job on 6 rendered products with 4 views; `optimizer` settings may be given."""
    determinant = {"determinant": {"flow": {"layers": 2, "hidden": 8}, "lambda1": 1, "lambda2": 1}}
    return parse_job(
        {
            "name": "small",
            "data": {
                "kind": "rendered",
                "root": str(root),
                "products": 6,
                "views": 4,
                "size_px": 40,
            },
            "recall_at": [1, 2],
            "model": {"weights": "none", "dim": 8, "batch_norm": "train"},
            "input": {"size_px": 32, "resize_px": 36},
            "regularizers": determinant if regularized else {},
            "optimizer": {"epochs": 1, "batch_size": 4, "lr_trunk": 1e-3, **optimizer},
            "runtime": {"workers": 0, "precision": "fp32", "device": "cpu"},
        }
    )


class Silent:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rows: list[dict[str, float]] = []

    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None: ...

    def step_done(self, parts: dict[str, float]) -> None:
        self.steps.append(parts)

    def epoch_done(self, row: dict[str, float]) -> None:
        self.rows.append(row)
