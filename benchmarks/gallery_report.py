"""The figures of benchmarks/gallery.py: printed as they come, then as one table or as JSON."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """The bound that a figure has to keep."""

    bound: float
    is_upper: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.is_upper else '>='} {readable(self.bound)}"

    def kept(self, value: float) -> bool:
        return value <= self.bound if self.is_upper else value >= self.bound


@dataclass(frozen=True)
class Figure:
    """One number of one gallery (`setting`), or the reason why there is none."""

    setting: str
    name: str
    value: float | str
    unit: str = ""
    target: Target | None = None

    @property
    def passed(self) -> bool | None:
        if self.target is None or isinstance(self.value, str):
            return None
        return self.target.kept(self.value)

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else readable(self.value)
        return (
            f"{shown} {self.unit}".strip() + {None: "", True: " pass", False: " MISS"}[self.passed]
        )


class Report:
    """Collects figures and prints each at once."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self._setting = ""

    def begin(self, setting: str) -> None:
        """The figures that follow are about this gallery."""
        self._setting = setting
        print(f"\n## {setting}\n\n| figure | value | target |\n|---|---|---|", flush=True)

    def add(
        self, name: str, value: float | str, unit: str = "", target: Target | None = None
    ) -> None:
        figure = Figure(self._setting, name, value, unit, target)
        self.figures.append(figure)
        print(f"| {name} | {figure} | {target or ''} |", flush=True)

    def value(self, setting: str, name: str) -> float | None:
        """A number that was added before."""
        for figure in self.figures:
            if (figure.setting, figure.name) == (setting, name):
                return None if isinstance(figure.value, str) else figure.value
        return None

    def write_json(self, path: Path) -> None:
        figures = [{**asdict(figure), "passed": figure.passed} for figure in self.figures]
        text = json.dumps({"machine": machine(), "figures": figures}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")

    def markdown(self) -> str:
        """One table: a row for each figure, a column for each gallery."""
        settings = list(dict.fromkeys(figure.setting for figure in self.figures))
        names = list(dict.fromkeys(figure.name for figure in self.figures))
        cells = {(figure.setting, figure.name): str(figure) for figure in self.figures}
        targets = {figure.name: figure.target for figure in self.figures if figure.target}
        lines = [f"| | {' | '.join(settings)} | target |", "|---" * (len(settings) + 2) + "|"]
        for name in names:
            row = [cells.get((setting, name), "") for setting in settings]
            lines.append(f"| {name} | {' | '.join(row)} | {targets.get(name, '')} |")
        return "\n".join(lines)


def readable(value: float) -> str:
    """A number with three or four digits that count."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def machine() -> dict[str, str | int | None]:
    import faiss

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "faiss": faiss.__version__,
        "instructions": faiss.get_compile_options().strip(),
        "python": platform.python_version(),
    }
