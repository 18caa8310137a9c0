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
from scipy import stats

from embedder.errors import CheckpointError, JobError
from training.checkpoint import FILE
from training.files import replace_json, replace_text
from training.result import RESULT, read_result
from training.state import OF_TERMS

_SEED = re.compile(r"seed-\d+")
_COLUMNS = ("R@1", "R@2", "R@4", "R@8", "MAP@R")
_STRUCTURE = ("NMI", "uniformity", "density", "spectral_decay")


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

    def methods(self) -> dict[str, dict[int, Record]]:
        """The records by method, as first met, and by seed."""
        found: dict[str, dict[int, Record]] = {}
        for record in self.records:
            found.setdefault(record.method, {})[record.seed] = record
        return found

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

    The method is the name of the folder, or of its parent if it is called seed-N.

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
        figures=result.figures,
        validation=result.validation,
        trunk=result.trunk,
        terms={name: value for name, value in last.items() if name.startswith(OF_TERMS)},
        bundle=_bundle(source / "bundle" / "manifest.json"),
        seconds_per_step=result.seconds_per_epoch * last["epoch"] / last["step"],
        job=result.job,
        split_sha256=result.split_sha256,
        versions=result.versions,
    )


def table(study: Study) -> list[str]:
    """Markdown: a row a method, its mean over seeds, the paired difference and its interval."""
    methods = study.methods()
    figures = [name for name in (*_COLUMNS, *_STRUCTURE) if _has(study, name)]
    header = ["method", "seeds", "trunk R@1", *figures, "R@1 beside", "share, %", "ms a step"]
    precisions = sorted({name for record in study.records for name in record.bundle})
    header += [f"R@1 in {name}" for name in precisions]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, runs in methods.items():
        other = study.against.get(name, study.against.get("", ""))
        cells = [name, str(len(runs)), _average([r.trunk.get("R@1") for r in runs.values()])]
        cells += [_mean(runs, figure) for figure in figures]
        cells.append(_beside(runs, methods.get(other, {}), other) if other != name else "")
        cells += [_shares(runs), _milliseconds(runs)]
        cells += [_average([r.bundle.get(p) for r in runs.values()]) for p in precisions]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


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


def _beside(runs: Mapping[int, Record], others: Mapping[int, Record], name: str) -> str:
    seeds = [
        seed
        for seed in runs
        if seed in others and "R@1" in runs[seed].figures and "R@1" in others[seed].figures
    ]
    if not seeds:
        return ""
    for seed in seeds:
        splits = {r[seed].split_sha256 for r in (runs, others)} - {""}
        if len(splits) > 1:
            raise JobError(
                f"{runs[seed].method} and {name} were tested on other images (seed {seed}), so "
                "their figures cannot be compared. Keep them in studies of their own."
            )
    mine, theirs = ([r[seed].figures["R@1"] for seed in seeds] for r in (runs, others))
    mean, half = paired_difference(mine, theirs)
    spread = "" if np.isinf(half) else f" ± {half:.1f}"
    return f"{mean:+.1f}{spread} ({name})"


def _has(study: Study, name: str) -> bool:
    return any(name in record.figures for record in study.records)


def _mean(runs: Mapping[int, Record], name: str) -> str:
    values = [record.figures[name] for record in runs.values() if name in record.figures]
    if not values:
        return ""
    digits = 1 if "@" in name or name == "NMI" else 3
    spread = f" ± {np.std(values, ddof=1):.1f}" if name == "R@1" and len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _average(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.1f}" if known else ""


def _shares(runs: Mapping[int, Record]) -> str:
    names = dict.fromkeys(n for r in runs.values() for n in r.terms if n.startswith("share "))
    found = [
        f"{100 * np.mean([r.terms[name] for r in runs.values() if name in r.terms]):.1f}"
        for name in names
    ]
    return ", ".join(found)


def _milliseconds(runs: Mapping[int, Record]) -> str:
    known = [r.seconds_per_step for r in runs.values() if r.seconds_per_step is not None]
    return f"{1000 * np.median(known):.0f}" if known else ""


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


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {FILE} and it belong together.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _last_epoch(folder: Path) -> dict[str, Any]:
    return [line for line in _lines(folder) if line["kind"] == "epoch"][-1]
