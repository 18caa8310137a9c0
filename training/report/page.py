"""The report of a run, a page in Markdown with its curves, and a plot of sizes."""

import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

from kinlens.embedder.errors import CheckpointError
from kinlens.training.checkpoint import Epoch, Figures, Row
from kinlens.training.config.job import Job
from kinlens.training.data.feedback import sentences
from kinlens.training.data.records import SKIPPED, Split
from kinlens.training.distributed import world
from kinlens.training.evaluation.retrieval import GAIN
from kinlens.training.folder import RESULT, Result, read_result, replace_text
from kinlens.training.regularizers.shares import LEAST
from kinlens.training.report.notices import CHOSEN_BY, after_epoch, did_it_help

if TYPE_CHECKING:
    import pandas as pd

History = Sequence[Epoch]


def write_report(folder: Path, job: Job, split: Split, history: History, result: Result) -> None:
    if history:
        _draw_curves(folder / "curves.png", history)
    notes = did_it_help(split, result)
    for epoch in range(len(history)):
        notes += after_epoch(job, history[: epoch + 1])
    lines = [
        f"# {job.name}",
        "",
        job.description,
        "",
        *_facts(job, split, history, result),
        "",
        *(["## Did it help?", "", *(f"- {note}" for note in notes), ""] if notes else []),
        *_figures(result),
        *_others(folder.resolve(), result),
        *_regularizers(job, history),
        *(["![curves](curves.png)", "", *_epochs(history)] if history else []),
    ]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")


def _draw_curves(path: Path, history: History) -> None:
    from matplotlib.figure import Figure  # here, since its import takes a second

    loss = [{"loss": epoch.loss} for epoch in history]
    panels = {"training loss": loss, "recall on unseen classes, %": _recalls(history)}
    shares = [{k: 100 * v for k, v in epoch.shares.items()} for epoch in history]
    if any(shares):
        panels["gradient relative to the loss's, %"] = shares
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axis, (title, rows) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name in _names(rows):
            points = [
                (of.epoch, row[name]) for of, row in zip(history, rows, strict=True) if name in row
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        if rows is shares:
            axis.axhline(100 * LEAST, color="grey", linestyle=":", label="almost no effect")
            axis.set_yscale("log")
        if any(rows) and rows is not loss:
            axis.legend()
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _recalls(history: History) -> list[Row]:
    """R@K of each epoch."""
    rows = (epoch.figures.row().items() for epoch in history)
    return [{name: value for name, value in row if "R@" in name} for row in rows]


def _names(rows: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys(name for row in rows for name in row)]


def _facts(job: Job, split: Split, history: History, result: Result) -> list[str]:
    regularizers = job.regularizers.wanted()
    minutes = sum(epoch.seconds for epoch in history) / 60
    dims = f"{job.model.dim or 'no'} dimensions"
    if job.model.dim == "auto":
        dims = "as many dimensions as the trunk, or as the bundle that was continued"
    return [
        f"- model: {result.model}; backbone {job.model.backbone}, head of "
        f"{dims}, pooling {job.model.pooling}, {job.input.size_px} px",
        f"- loss: {job.loss.name}; regularizers: {', '.join(regularizers) or 'none'}; "
        f"sampling: {job.sampling.kind}; seed {job.seed}",
        *(
            f"- {name}: {len(images):,} images, {images.classes:,} classes"
            for name, images in split.parts.items()
        ),
        *(f"- {sentence}" for sentence in sentences(split)),
        *(
            [f"- {len(split.damaged):,} unreadable images are skipped; `{SKIPPED}` lists all"]
            if split.damaged
            else []
        ),
        f"- split sha256: `{split.sha256()[:16]}`",
        f"- training time: {minutes:.1f} minutes, without evaluation, on "
        f"{platform.machine()}, {world()} process(es), {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}",
        f"- {CHOSEN_BY[result.chosen_by]}"
        + ("" if result.chosen_by == "alpha" else f"; here epoch {result.best_epoch}"),
    ]


def _figures(result: Result) -> list[str]:
    names = dict.fromkeys([*result.figures, *result.validation])
    trunk = Figures.of(result.trunk)
    columns = [result.figures, result.validation, trunk.test, trunk.validation]
    rows = [
        [name, *(f"{column[name]:.4g}" if name in column else "" for column in columns)]
        for name in names
        if name not in GAIN  # stated above in words
    ]
    header = ["figure", "test classes", "validation classes", "trunk, test", "trunk, validation"]
    return [*table(header, rows), ""] if rows else []


def _others(folder: Path, result: Result) -> list[str]:
    """Finished runs next to `folder` that were tested on the same list of images.

    They are in the order of their figures on validation classes, which may choose a run, or else of
    their time.
    """
    found = {folder: result}
    for path in folder.parent.glob(f"*/{RESULT}"):
        with suppress(CheckpointError, OSError):  # this report does not depend on others
            other = read_result(path.parent)
            same = other is not None and other.split_sha256 == result.split_sha256
            if other is not None and same and other.chosen_by != "test":
                found[path.parent] = other
    runs = [run for run, one in found.items() if {"R@1", "MAP@R"} <= one.figures.keys()]
    if len(runs) < 2:
        return []
    validated = all("R@1" in found[run].validation for run in runs)
    if validated:
        runs.sort(key=lambda run: -found[run].validation["R@1"])
    else:
        runs.sort(key=lambda run: (run / RESULT).stat().st_mtime)
    rows = []
    for run in runs:
        plain_name, one = plain(run.name), found[run]
        link = f"[{plain_name}](../{quote(run.name)}/report.md)"
        if run == folder:
            link = f"**{plain_name}**"
        chosen = [f"{one.validation['R@1']:.1f}"] if validated else []
        rows.append(
            [link, one.model, *chosen, *(f"{one.figures[n]:.1f}" for n in ("R@1", "MAP@R"))]
        )
    order = "R@1 on validation classes" if validated else "time"
    columns = ["R@1, validation"] if validated else []
    header = ["run on the same list of images", "model", *columns, "R@1, test", "MAP@R, test"]
    return [
        f"Runs in the order of their {order}. Do not choose one by its test figures: the best of "
        "several is too high by chance. Choose on validation classes "
        "(protocol.validation_fraction).",
        "",
        *table(header, rows),
        "",
    ]


def _regularizers(job: Job, history: History) -> list[str]:
    lines, terms = [], history[-1].terms if history else {}
    for name, settings in job.regularizers.wanted().items():
        values = settings.model_dump(mode="json", exclude_none=True)
        words = ", ".join(f"{key} = {value}" for key, value in values.items())
        lines.append(f"- {name}: {words}")
        measured = [epoch for epoch in history if name in epoch.shares]
        if measured:
            first, end = (100 * measured[n].shares[name] for n in (0, -1))
            lines.append(
                f"  - its gradient relative to the loss's: {first:.2g} % in the first epoch, "
                f"{end:.2g} % in the last epoch; weight x {measured[-1].terms[f'scale {name}']:.3g}"
            )
    if "r_first" in terms:
        lines.append(
            "  - the flows: R began at log 2 = 0.693 in both; at the end it is "
            f"{terms['r_first']:.4f} in flow 1, which is exported, and {terms['r_second']:.4f} in "
            "flow 2, which is not"
        )
    return ["## Regularizers", "", *lines, ""] if lines and history else []


def _epochs(history: History) -> list[str]:
    recalls = _recalls(history)
    names = [name for name in _names(recalls) if "MAP" not in name]
    rows = [
        [
            str(epoch.epoch),
            f"{epoch.loss:.3f}",
            *(f"{row[name]:.1f}" if name in row else "" for name in names),
            f"{epoch.images_per_s:.0f}",
            f"{epoch.seconds:.0f}",
            f"{epoch.terms['feature_norm']:.2f}" if "feature_norm" in epoch.terms else "",
        ]
        for epoch, row in zip(history, recalls, strict=True)
    ]
    header = ["epoch", "loss", *names, "images/s", "seconds", "squared norm of features"]
    return table(header, rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the cells are Markdown already."""
    head, *body = ["| " + " | ".join(line) + " |" for line in [header, *rows]]
    return [head, "|" + "---|" * len(header), *body]


def plain(text: object) -> str:
    """`text` on one line, escaped so that Markdown sees no table, tag or emphasis."""
    line = escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"[\\`*_\[\]|]", r"\\\g<0>", line)


def draw_sizes(path: Path, runs: "pd.DataFrame") -> None:
    """R@1 of each competitor over its sizes, the mean over seeds; a panel for each network.

    `runs` has the columns grid, backbone, dim, competitor and R@1.
    """
    from matplotlib.figure import Figure

    panels = dict(list(runs.groupby(["grid", "backbone"], sort=False)))
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (names, of) in zip(axes, panels.items(), strict=True):
        for competitor, scores in of.groupby("competitor", sort=False):
            means = scores.groupby("dim")["R@1"].mean()
            axis.plot(means.index, means, marker="o", label=str(competitor))
        axis.set_xscale("log", base=2)
        sizes = sorted(of["dim"].unique())
        axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        axis.set(title=" ".join(filter(None, names)), xlabel="dimensions", ylabel="R@1, %")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
