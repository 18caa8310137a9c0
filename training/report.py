"""The report of a run: curves as PNG and a page in Markdown."""

import platform
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from training.config.job import Job
from training.data.records import Split

Rows = Sequence[dict[str, float]]


def write_report(folder: Path, job: Job, split: Split, history: Rows) -> Path:
    """Write `curves.png` and `report.md` into the run folder; returns the page."""
    draw_curves(folder / "curves.png", history)
    page = folder / "report.md"
    page.write_text("\n".join(_lines(job, split, history)) + "\n", encoding="utf-8")
    return page


def draw_curves(path: Path, history: Rows) -> None:
    """Loss and recall over epochs, side by side."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = [row["epoch"] for row in history]
    left.plot(epochs, [row["loss"] for row in history], marker="o")
    left.set(title="training loss", xlabel="epoch")
    for name in _recall_names(history):
        points = [(row["epoch"], row[name]) for row in history if name in row]
        right.plot(*zip(*points, strict=True), marker="o", label=name)
    right.set(title="recall on unseen classes, %", xlabel="epoch")
    if _recall_names(history):
        right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _recall_names(history: Rows) -> list[str]:
    return [name for name in history[-1] if name.startswith("R@")] if history else []


def _lines(job: Job, split: Split, history: Rows) -> list[str]:
    names = _recall_names(history)
    seconds = sum(row["seconds"] for row in history)
    regularizers = [name for name, value in job.regularizers if value is not None]
    header = ["epoch", "loss", *names, "images/s", "seconds"]
    return [
        f"# {job.name}",
        "",
        job.description,
        "",
        f"- network: {job.model.backbone}, {job.model.dim}-d, pooling {job.model.pooling}, "
        f"{job.input.size_px} px",
        f"- loss: {job.loss.name}; regularizers: {', '.join(regularizers) or 'none'}; "
        f"seed {job.seed}",
        f"- train: {len(split.train):,} images, {split.train.classes:,} classes; "
        f"test: {len(split.test):,} images, {split.test.classes:,} other classes",
        f"- split sha256: `{split.sha256()[:16]}`",
        f"- training time: {seconds / 60:.1f} minutes on {platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        "- the model is that of the last epoch; no epoch was chosen by its test recall",
        *_lipschitz(history),
        "",
        "![curves](curves.png)",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *(_table_row(row, names) for row in history),
    ]


def _lipschitz(history: Rows) -> list[str]:
    if not history or "lipschitz_max" not in history[-1]:
        return []
    row = history[-1]
    return [
        "- local Lipschitz constant of the exported flow on test images: "
        f"mean {row['lipschitz_mean']:.3f}, largest {row['lipschitz_max']:.3f}"
    ]


def _table_row(row: dict[str, float], names: list[str]) -> str:
    recalls = [f"{row[name]:.1f}" if name in row else "" for name in names]
    cells = [
        f"{row['epoch']:.0f}",
        f"{row['loss']:.3f}",
        *recalls,
        f"{row['images_per_s']:.0f}",
        f"{row['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"
