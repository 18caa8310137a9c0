"""Tables of finished runs in Markdown, methods over seeds.

A study is a JSON file of the records of runs; its table can be rebuilt without them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.folder import RESULT, Result, read_result, replace_text, settings
from kinlens.training.report.markdown import table
from kinlens.training.state import OF_TERMS, on_validation

_SEED = re.compile(r"seed-\d+")


@dataclass(frozen=True)
class Record:
    """One run. `figures` are on test classes, `trunk` of the untrained trunk.

    `terms` are the shares and scales of the last epoch, `bundle` R@1 of the exported model by
    precision, if the run folder has one.
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
    """Records, and the baseline of each method; the key "" sets it for all other methods."""

    records: tuple[Record, ...] = ()
    against: dict[str, str] = field(default_factory=dict)

    def merged(self, new: Sequence[Record], against: Mapping[str, str]) -> "Study":
        records = {(record.method, record.seed): record for record in (*self.records, *new)}
        return Study(tuple(records[key] for key in sorted(records)), {**self.against, **against})


def read_study(path: Path) -> Study:
    """An empty study if there is no file. Raises: JobError."""
    if path.is_dir():
        raise JobError(
            f"{path} is a folder; the first argument is the JSON file of a study. The report of a "
            "run is its report.md."
        )
    if not path.exists():
        return Study()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Study(tuple(Record(**r) for r in content["records"]), content["against"])
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path} is not a study ({error}). Give another file.") from error


def records_of(sources: Sequence[Path], by: str = "") -> list[Record]:
    """The records of runs and peers. Raises: CheckpointError; JobError, also for duplicates."""
    records: dict[tuple[str, int], Record] = {}
    for source in sources:
        record = record_of(source, by)
        if records.setdefault((record.method, record.seed), record) is not record:
            raise JobError(
                f"{source} is {record.method} with seed {record.seed}, and so is another of the "
                "runs. Pass only one of them, or distinguish them by a setting: --by loss.name."
            )
    return list(records.values())


def record_of(source: Path, by: str = "") -> Record:
    """The record of a finished run folder, or of a peer's JSON file with name, seed and figures.

    The method is the value of the job's setting `by`; by default it is the name of the folder, or
    of its parent if the folder is called seed-N. Raises: JobError, CheckpointError.
    """
    if source.is_file():
        return _of_peer(source)
    result = read_result(source)
    if result is None:
        raise JobError(
            f"{source} has no finished run: {RESULT} is missing. Give the folder of a finished "
            "run, or continue this one with --resume."
        )
    last = _last_epoch(source)  # {} if too few classes left the trunk alone
    method: Any = source.parent.name if _SEED.fullmatch(source.name) else source.name
    if by and (method := settings(result.job, free=()).get(by)) is None:
        raise JobError(f"--by {by} is not a setting of a job. Use a name like loss.name.")
    return replace(
        record(str(method), result),
        terms={name: value for name, value in last.items() if name.startswith(OF_TERMS)},
        bundle=_bundle(source / "bundle" / "manifest.json"),
        seconds_per_step=result.seconds_per_epoch * last["epoch"] / last["step"] if last else None,
    )


def record(method: str, result: Result) -> Record:
    """The record of a result; without test figures its validation classes identify the split."""
    return Record(
        method=method,
        seed=result.job["seed"],
        figures=result.figures or result.validation,
        validation=result.validation,
        trunk=result.trunk if result.figures else on_validation(result.trunk),
        job=result.job,
        split_sha256=result.split_sha256,
        versions=result.versions,
    )


def methods(study: Study) -> list[str]:
    """Markdown: a row per method, with the paired difference. Raises: JobError."""
    runs = pd.DataFrame([_row(record) for record in study.records])
    figures = [name for name in runs if re.fullmatch(r"R@\d+", name)]
    figures += [name for name in ("MAP@R",) if name in runs]
    shares = [name for name in runs if name.startswith("share ")]
    precisions = sorted(name for name in runs if name.startswith("R@1 in "))
    by_method = dict(list(runs.groupby("method", sort=False)))
    rows = []
    for name, of in by_method.items():
        other = study.against.get(name, study.against.get("", ""))
        paired = other != name and other in by_method
        difference = _difference(of, by_method[other]) if paired else ""
        share = ", ".join(filter(None, (_mean(of[column]) for column in shares)))
        ms = f"{of['ms'].median():.0f}" if of["ms"].notna().any() else ""
        means = (_mean(of[figure]) for figure in ("trunk R@1", *figures))
        more = (_mean(of[precision]) for precision in precisions)
        rows.append([name, str(len(of)), *means, difference, share, ms, *more])
    header = ["method", "seeds", "trunk R@1", *figures, "ΔR@1", "share, %", "ms per step"]
    return table([*header, *precisions], rows)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over n pairs, and half of its 95 % interval by Student's t (inf for n < 2)."""
    differences = np.asarray(a) - np.asarray(b)
    if len(differences) < 2:
        return float(differences.mean()), float("inf")
    from scipy import stats  # here, since its import takes a second

    t = stats.t.ppf(0.975, len(differences) - 1)
    return float(differences.mean()), float(t * stats.sem(differences))


def replace_block(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put `lines` between `<!-- name -->` and `<!-- end name -->` of a page. Raises: JobError."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(first)
    _, ends, after = rest.partition(last)
    if not found or not ends:
        raise JobError(f"{page} has no markers for the table. Add the lines {first} and {last}.")
    replace_text(page, "\n".join([before + first, "", *lines, "", last + after]))


def _row(record: Record) -> dict[str, Any]:
    seconds = record.seconds_per_step
    return {
        "method": record.method,
        "seed": record.seed,
        "split": record.split_sha256,
        "trunk R@1": record.trunk.get("R@1", np.nan),
        **record.figures,
        **{name: 100 * value for name, value in record.terms.items() if name.startswith("share ")},
        "ms": np.nan if seconds is None else 1000 * seconds,
        **{f"R@1 in {precision}": value for precision, value in record.bundle.items()},
    }


def _mean(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return ""
    spread = f" ± {known.std():.1f}" if known.name == "R@1" and len(known) > 1 else ""
    return f"{known.mean():.{1 if _in_percent(known.name) else 3}f}{spread}"


def _in_percent(figure: str) -> bool:
    return "@" in figure or figure in ("NMI", "F1") or figure.startswith("share ")


def _difference(runs: pd.DataFrame, others: pd.DataFrame) -> str:
    pairs = runs.merge(others, on="seed", suffixes=("", " of other"))
    pairs = pairs.dropna(subset=["R@1", "R@1 of other"])
    for pair in pairs.to_dict("records"):
        if len({pair["split"], pair["split of other"]} - {""}) > 1:
            raise JobError(
                f"{pair['method']} and {pair['method of other']} were tested on different images "
                f"(seed {pair['seed']}), so their figures are not comparable. Keep them in "
                "separate studies."
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
            f"{source} is not a result of a peer ({error}): it needs name, seed and figures."
        ) from error


def _bundle(manifest: Path) -> dict[str, float]:
    if not manifest.is_file():
        return {}
    content = json.loads(manifest.read_text(encoding="utf-8"))
    models = {"ONNX fp32": content, **content.get("variants", {})}
    return {precision: model["recall"]["R@1"] for precision, model in models.items()}


def _last_epoch(folder: Path) -> dict[str, Any]:
    path = folder / "log.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {RESULT} exists. Restore it or train again.")
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    epochs: list[dict[str, Any]] = [line for line in lines if line["kind"] == "epoch"]
    return epochs[-1] if epochs else {}
