"""The report of a run: curves as PNG and a page in Markdown."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from training.config.job import Job
from training.data.records import Split
from training.distributed import world
from training.regularizers.shares import LEAST
from training.report.notices import after_epoch, did_it_help
from training.result import Result
from training.state import Row, on_validation

Rows = Sequence[Row]


def write_report(folder: Path, job: Job, split: Split, history: Rows, result: Result) -> Path:
    """Write `curves.png` and `report.md` into the run folder; returns the page."""
    draw_curves(folder / "curves.png", history)
    page = folder / "report.md"
    page.write_text("\n".join(_lines(job, split, history, result)) + "\n", encoding="utf-8")
    return page


def draw_curves(path: Path, history: Rows) -> None:
    """Loss and recall over epochs, and the shares of the regularizers, side by side."""
    terms = _terms(history)
    panels = 3 if terms else 2
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4), layout="constrained")
    left, right = axes[:2]
    epochs = [row["epoch"] for row in history]
    left.plot(epochs, [row["loss"] for row in history], marker="o")
    left.set(title="training loss", xlabel="epoch")
    for name in _recall_names(history):
        points = [(row["epoch"], row[name]) for row in history if name in row]
        right.plot(*zip(*points, strict=True), marker="o", label=name)
    right.set(title="recall on unseen classes, %", xlabel="epoch")
    if _recall_names(history):
        right.legend()
    if terms:
        _draw_shares(axes[2], history, terms)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_shares(axis: Any, history: Rows, terms: Sequence[str]) -> None:
    for name in terms:
        points = [
            (row["epoch"], 100 * row[f"share {name}"])
            for row in history
            if row.get(f"share {name}")
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.axhline(100 * LEAST, color="grey", linestyle=":", label="next to nothing")
    axis.set(title="gradient beside the loss's, %", xlabel="epoch", yscale="log")
    axis.legend()


def _terms(history: Rows) -> list[str]:
    """The regularizers whose share was measured in any epoch."""
    names = dict.fromkeys(name for row in history for name in row if name.startswith("share "))
    return [name.removeprefix("share ") for name in names]


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
        *_help(job, split, history, result),
        *_figures(result),
        *_regularizers(job, history),
        "![curves](curves.png)",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *(_table_row(row, names) for row in history),
    ]


def _help(job: Job, split: Split, history: Rows, result: Result) -> list[str]:
    """Whether the training helped, and what was said on the way."""
    said = did_it_help(split, result.began_with, result.trunk, result.figures, result.validation)
    for epoch in range(len(history)):
        said += after_epoch(job, history[: epoch + 1])
    return ["## Did it help?", "", *(f"- {sentence}" for sentence in said), ""] if said else []


def _regularizers(job: Job, history: Rows) -> list[str]:
    """The settings of each regularizer, its share of the gradient and what the flows did."""
    lines = []
    last = history[-1]
    for name, settings in job.regularizers:
        if settings is None:
            continue
        values = settings.model_dump(mode="json", exclude_none=True)
        words = ", ".join(f"{key} = {value}" for key, value in values.items())
        lines.append(f"- {name}: {words}")
        shares = [100 * row[f"share {name}"] for row in history if f"share {name}" in row]
        if shares:
            lines.append(
                f"  - its gradient beside that of the loss: {shares[0]:.2g} % in the first epoch, "
                f"{shares[-1]:.2g} % in the last epoch; weight x {last[f'scale {name}']:.3g}"
            )
    if "r_first" in last:
        lines.append(
            "  - the flows: R was log 2 = 0.693 in both; at the end it is "
            f"{last['r_first']:.4f} in flow 1, which is exported, and {last['r_second']:.4f} in "
            "flow 2, which is not"
        )
    return ["## Regularizers", "", *lines, ""] if lines else []


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
    columns = [result.figures, result.validation]
    columns += [result.trunk, on_validation(result.trunk)]
    header = "| figure | test classes | validation classes | trunk, test | trunk, validation |"
    rows = [
        f"| {name} | " + " | ".join(_cell(column.get(name)) for column in columns) + " |"
        for name in names
    ]
    return [header, "|---" * 5 + "|", *rows, ""]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


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
