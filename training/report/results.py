"""Finished runs of several methods and seeds, as records that can be kept, and as a table.

A study is a JSON file: the records of its runs, whom each method is compared with, and nothing that
the table does not need. From it the table can be made again without the runs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from embedder.errors import CheckpointError, JobError
from training.checkpoint import FILE
from training.folder import replace_json, replace_text
from training.report import markdown
from training.result import RESULT, read_result
from training.state import OF_TERMS, on_validation

_SEED = re.compile(r"seed-\d+")
_FIGURES = ("R@1", "R@2", "R@4", "R@8", "MAP@R", "NMI", "uniformity", "density", "spectral_decay")


@dataclass(frozen=True)
class Record:
    """One run: its method and seed, what it was given and what it found.

    `figures` are on test classes, `validation` on validation classes, `trunk` those of the
    untrained trunk; `terms` the shares and scales of the last epoch; `bundle` R@1 of the exported
    model by precision, where the run folder holds one.
    """

    method: str
    seed: int
    figures: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    trunk: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    bundle: dict[str, float] = field(default_factory=dict)
    seconds_per_step: float | None = None
    job: dict[str, Any] = field(default_factory=dict)
    split_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Records, and for each method whom it is compared with; "" stands for all others."""

    records: tuple[Record, ...] = ()
    against: dict[str, str] = field(default_factory=dict)

    def merged(self, new: Sequence[Record], against: Mapping[str, str]) -> "Study":
        """With `new` in place of records of the same method and seed."""
        names = {(record.method, record.seed) for record in new}
        kept = [r for r in self.records if (r.method, r.seed) not in names]
        records = sorted([*kept, *new], key=lambda r: (r.method, r.seed))
        return Study(tuple(records), {**self.against, **against})


def read_study(path: Path) -> Study:
    """The study in `path`; an empty one if there is none. Raises: JobError."""
    if not path.exists():
        return Study()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Study(tuple(Record(**r) for r in content["records"]), content["against"])
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path} is no study ({error}). Give another file, or remove it.") from error


def write_study(path: Path, study: Study) -> None:
    """Keep `study` in `path`."""
    replace_json(path, asdict(study))


def record_of(source: Path) -> Record:
    """The record of a finished run folder, or of a peer's JSON file with name, seed and figures.

    The method is the name of the folder, or of its parent if it is called seed-N. A run that never
    looked at its test classes is known by its validation classes.

    Raises: JobError, CheckpointError.
    """
    if source.is_file():
        return _of_peer(source)
    result = read_result(source)
    if result is None:
        raise JobError(f"{source} has no {RESULT}: the run has not finished. Go on with --resume.")
    last = _last_epoch(source)
    return Record(
        method=source.parent.name if _SEED.fullmatch(source.name) else source.name,
        seed=result.job["seed"],
        figures=result.figures or result.validation,
        validation=result.validation,
        trunk=result.trunk if result.figures else on_validation(result.trunk),
        terms={name: value for name, value in last.items() if name.startswith(OF_TERMS)},
        bundle=_bundle(source / "bundle" / "manifest.json"),
        seconds_per_step=result.seconds_per_epoch * last["epoch"] / last["step"],
        job=result.job,
        split_sha256=result.split_sha256,
        versions=result.versions,
    )


def table(study: Study) -> list[str]:
    """Markdown: a row a method, its mean over seeds, the paired difference and its interval."""
    runs = pd.DataFrame([_row(record) for record in study.records])
    figures = [name for name in _FIGURES if runs[name].notna().any()]
    shares = [name for name in runs if name.startswith("share ")]
    precisions = sorted(name for name in runs if name.startswith("R@1 in "))
    by_method = dict(list(runs.groupby("method", sort=False)))
    rows = []
    for name, of in by_method.items():
        other = study.against.get(name, study.against.get("", ""))
        paired = other != name and other in by_method
        rows.append(
            [
                name,
                str(len(of)),
                _mean(of["trunk R@1"]),
                *(_mean(of[figure], figure) for figure in figures),
                _beside(of, by_method[other]) if paired else "",
                ", ".join(_mean(100 * of[share]) for share in shares if of[share].notna().any()),
                f"{of['ms'].median():.0f}" if of["ms"].notna().any() else "",
                *(_mean(of[precision]) for precision in precisions),
            ]
        )
    header = ["method", "seeds", "trunk R@1", *figures, "R@1 beside", "share, %", "ms a step"]
    return markdown.table([*header, *precisions], rows)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over n pairs, and half of its 95 % interval by Student's t (inf for n < 2)."""
    differences = np.asarray(a) - np.asarray(b)
    if len(differences) < 2:
        return float(differences.mean()), float("inf")
    t = stats.t.ppf(0.975, len(differences) - 1)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(differences.mean()), float(t * error)


def replace_block(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put `lines` between `<!-- name -->` and `<!-- end name -->` of a page.

    Raises: JobError if the page has no such pair.
    """
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(first)
    _, ends, after = rest.partition(last)
    if not found or not ends:
        raise JobError(f"{page} has no place for the table: write {first} and {last} into it.")
    replace_text(page, "\n".join([before + first, "", *lines, "", last + after]))


def _row(record: Record) -> dict[str, Any]:
    """A record, flat: figures that it lacks are NaN."""
    seconds = record.seconds_per_step
    return {
        "method": record.method,
        "seed": record.seed,
        "split": record.split_sha256,
        "trunk R@1": record.trunk.get("R@1", np.nan),
        **{name: record.figures.get(name, np.nan) for name in _FIGURES},
        **{name: value for name, value in record.terms.items() if name.startswith("share ")},
        "ms": np.nan if seconds is None else 1000 * seconds,
        **{f"R@1 in {precision}": value for precision, value in record.bundle.items()},
    }


def _mean(values: pd.Series, figure: str = "NMI") -> str:
    """The mean of what is known, of R@1 with its sample deviation."""
    known = values.dropna()
    if known.empty:
        return ""
    digits = 1 if "@" in figure or figure == "NMI" else 3
    spread = f" ± {known.std():.1f}" if figure == "R@1" and len(known) > 1 else ""
    return f"{known.mean():.{digits}f}{spread}"


def _beside(runs: pd.DataFrame, others: pd.DataFrame) -> str:
    """R@1 against another method, over the seeds that both have."""
    pairs = runs.merge(others, on="seed", suffixes=("", " of other"))
    pairs = pairs.dropna(subset=["R@1", "R@1 of other"])
    for pair in pairs.to_dict("records"):
        if len({pair["split"], pair["split of other"]} - {""}) > 1:
            raise JobError(
                f"{pair['method']} and {pair['method of other']} were tested on other images "
                f"(seed {pair['seed']}), so their figures cannot be compared. Keep them in "
                "studies of their own."
            )
    if pairs.empty:
        return ""
    mean, half = paired_difference(pairs["R@1"], pairs["R@1 of other"])
    spread = "" if np.isinf(half) else f" ± {half:.1f}"
    return f"{mean:+.1f}{spread} ({pairs['method of other'].iloc[0]})"


def _of_peer(source: Path) -> Record:
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        known = {"method": found["name"], "seed": found["seed"], "figures": found["figures"]}
        return Record(**known, seconds_per_step=found.get("seconds_per_step"))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source} is no result of a peer ({error}): it needs name, seed and figures."
        ) from error


def _bundle(manifest: Path) -> dict[str, float]:
    if not manifest.is_file():
        return {}
    content = json.loads(manifest.read_text(encoding="utf-8"))
    found = {"ONNX fp32": content["recall"]["R@1"]}
    for precision, variant in content.get("variants", {}).items():
        found[precision] = variant["recall"]["R@1"]
    return found


def _last_epoch(folder: Path) -> dict[str, Any]:
    path = folder / "log.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {FILE} and it belong together.")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    epochs: list[dict[str, Any]] = [line for line in lines if line["kind"] == "epoch"]
    return epochs[-1]
