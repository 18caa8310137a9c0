"""The table of a study: finished runs, as methods over seeds.

A study is a JSON file of the records of runs; its table can be rebuilt without them.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.checkpoint import Epoch, Figures
from kinlens.training.folder import RESULT, Result, by_name, read_result, replace_text
from kinlens.training.report.page import table

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
    if by and (method := by_name(result.job, free=()).get(by)) is None:
        raise JobError(f"--by {by} is not a setting of a job. Use a name like loss.name.")
    return replace(
        record(str(method), result),
        terms=Epoch.terms_in(last),
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
        trunk=result.trunk if result.figures else Figures.of(result.trunk).validation,
        job=result.job,
        split_sha256=result.split_sha256,
        versions=result.versions,
    )


def methods(study: Study) -> list[str]:
    """Markdown: a row per method, with the paired difference. Raises: JobError."""
    by_method: dict[str, list[Record]] = {}
    for record in study.records:
        by_method.setdefault(record.method, []).append(record)
    known = dict.fromkeys(name for record in study.records for name in record.figures)
    figures = [name for name in known if re.fullmatch(r"R@\d+", name)]
    figures += ["MAP@R"] if "MAP@R" in known else []
    shares = dict.fromkeys(n for r in study.records for n in r.terms if n.startswith("share "))
    precisions = sorted({name for record in study.records for name in record.bundle})
    rows = []
    for name, of in by_method.items():
        other = study.against.get(name, study.against.get("", ""))
        paired = other != name and other in by_method
        steps = [1000 * r.seconds_per_step for r in of if r.seconds_per_step is not None]
        trunk = _mean([r.trunk for r in of], "R@1")
        means = (_mean([r.figures for r in of], figure, figure == "R@1") for figure in figures)
        difference = _difference(of, by_method[other]) if paired else ""
        share = ", ".join(
            filter(None, (_mean([r.terms for r in of], s, factor=100) for s in shares))
        )
        ms = f"{statistics.median(steps):.0f}" if steps else ""
        more = (_mean([r.bundle for r in of], precision) for precision in precisions)
        rows.append([name, str(len(of)), trunk, *means, difference, share, ms, *more])
    header = ["method", "seeds", "trunk R@1", *figures, "ΔR@1", "share, %", "ms per step"]
    return table([*header, *(f"R@1 in {precision}" for precision in precisions)], rows)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b over n pairs, and half of its 95 % interval by Student's t (inf for n < 2)."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    count = len(differences)
    mean = statistics.fmean(differences)
    if count < 2:
        return mean, float("inf")
    from scipy import stats  # here, since its import takes a second

    t = float(stats.t.ppf(0.975, count - 1))
    return mean, t * statistics.stdev(differences) / count**0.5


def replace_block(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put `lines` between `<!-- name -->` and `<!-- end name -->` of a page. Raises: JobError."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(first)
    _, ends, after = rest.partition(last)
    if not found or not ends:
        raise JobError(f"{page} has no markers for the table. Add the lines {first} and {last}.")
    replace_text(page, "\n".join([before + first, "", *lines, "", last + after]))


def _mean(
    rows: Sequence[Mapping[str, float]], name: str, with_spread: bool = False, factor: float = 1
) -> str:
    values = [factor * row[name] for row in rows if name in row]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if with_spread and len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def _difference(runs: Sequence[Record], others: Sequence[Record]) -> str:
    by_seed = {other.seed: other for other in others}
    pairs = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
    pairs = [pair for pair in pairs if all("R@1" in one.figures for one in pair)]
    for run, other in pairs:
        if len({run.split_sha256, other.split_sha256} - {""}) > 1:
            raise JobError(
                f"{run.method} and {other.method} were tested on different images (seed "
                f"{run.seed}), so their figures are not comparable. Keep them in separate studies."
            )
    if not pairs:
        return ""
    ours, theirs = ([one.figures["R@1"] for one in side] for side in zip(*pairs, strict=True))
    mean, half = paired_difference(ours, theirs)
    spread = "" if half == float("inf") else f" ± {half:.1f}"
    return f"{mean:+.1f}{spread} ({others[0].method})"


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
