"""A Markdown table of finished runs, side by side.

python scripts/compare_runs.py runs/cars196-half-*
"""

import sys
from pathlib import Path

from training.result import Result, read_result

COLUMNS = (
    "R@1",
    "R@2",
    "R@4",
    "R@8",
    "MAP@R",
    "NMI",
    "F1",
    "uniformity",
    "density",
    "spectral_decay",
    "class_variance",
)


def main(folders: list[str]) -> None:
    found = {Path(folder).name: read_result(Path(folder)) for folder in folders}
    missing = [name for name, result in found.items() if result is None]
    if missing or not found:
        raise SystemExit(f"no finished run in {', '.join(missing) or 'no folder at all'}")
    header = ["run", "epoch", "validation R@1", *COLUMNS, "s/epoch"]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for name, result in found.items():
        assert result is not None
        print("| " + " | ".join(row(name, result)) + " |")


def row(name: str, result: Result) -> list[str]:
    figures = [cell(name, result.figures.get(name)) for name in COLUMNS]
    validation = cell("R@1", result.validation.get("R@1"))
    seconds = f"{result.seconds_per_epoch:.0f}"
    return [f"`{name}`", str(result.best_epoch), validation, *figures, seconds]


def cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if "@" in name or name in ("NMI", "F1") else f"{value:.3g}"


if __name__ == "__main__":
    main(sys.argv[1:])
