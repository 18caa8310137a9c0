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
from training.distributed import world
from training.result import Result
from training.state import Row

Rows = Sequence[Row]


def write_report(folder: Path, job: Job, split: Split, history: Rows, result: Result) -> Path:
    """Write `curves.png` and `report.md` into the run folder; returns the page."""
    draw_curves(folder / "curves.png", history)
    page = folder / "report.md"
    page.write_text("\n".join(_lines(job, split, history, result)) + "\n", encoding="utf-8")
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
    """Names of the recalls of any epoch, in the order in which they appear."""
    return [name for name in dict.fromkeys(n for row in history for n in row) if "R@" in name]


def _lines(job: Job, split: Split, history: Rows, result: Result) -> list[str]:
    names = [name for name in _recall_names(history) if "MAP" not in name]
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
        f"sampling: {job.sampling.kind}; seed {job.seed}",
        *_parts(split),
        f"- split sha256: `{split.sha256()[:16]}`",
        f"- training time: {seconds / 60:.1f} minutes on {platform.machine()}, {world()} "
        f"process(es), {torch.get_num_threads()} threads, torch {torch.__version__}",
        f"- {_choice(job, result)}",
        "",
        *_figures(result),
        "![curves](curves.png)",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *(_table_row(row, names) for row in history),
    ]


def _parts(split: Split) -> list[str]:
    parts = {
        "train": split.train,
        "validation": split.validation,
        "test": split.test,
        "gallery": split.gallery,
    }
    return [
        f"- {name}: {len(images):,} images, {images.classes:,} classes"
        for name, images in parts.items()
        if images is not None
    ]


def _choice(job: Job, result: Result) -> str:
    if job.protocol.choose_by == "last":
        return "the model is that of the last epoch; no epoch was chosen by its test recall"
    if job.protocol.choose_by == "validation":
        return (
            f"the model is that of epoch {result.best_epoch}, the best R@1 on validation classes; "
            "test classes chose nothing"
        )
    return (
        f"**CHOSEN BY TEST**: the model is that of epoch {result.best_epoch}, the best R@1 on the "
        "test classes themselves. The figures are too high and compare with no honest ones"
    )


def _figures(result: Result) -> list[str]:
    names = list(dict.fromkeys([*result.figures, *result.validation]))
    if not names:
        return []
    rows = [
        f"| {name} | {_cell(result.figures.get(name))} | {_cell(result.validation.get(name))} |"
        for name in names
    ]
    return ["| figure | test classes | validation classes |", "|---|---|---|", *rows, ""]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table_row(row: Row, names: list[str]) -> str:
    recalls = [f"{row[name]:.1f}" if name in row else "" for name in names]
    cells = [
        f"{row['epoch']:.0f}",
        f"{row['loss']:.3f}",
        *recalls,
        f"{row['images_per_s']:.0f}",
        f"{row['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"
