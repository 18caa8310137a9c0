"""What is finished: a row a run, in `rows.jsonl` and `runs.csv`, and why other runs failed."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import CheckpointError, JobError
from training.crossval import finished_result
from training.files import replace_text
from training.result import Result
from training.tournament.grid import Combination
from training.tournament.process import FAILURE, keep_failure

_ROWS, _TABLE = "rows.jsonl", "runs.csv"


@dataclass(frozen=True)
class Finished:
    """A combination and its result."""

    combination: Combination
    result: Result

    def row(self) -> dict[str, Any]:
        """Its line in the tables."""
        result = self.result
        return {
            **self.combination.axes,
            **result.figures,
            **{f"validation {name}": value for name, value in result.validation.items()},
            "best_epoch": result.best_epoch,
            "chosen_by": result.chosen_by,
            "seconds_per_epoch": result.seconds_per_epoch,
            "folder": self.combination.folder.as_posix(),
        }


@dataclass(frozen=True)
class Failed:
    """A combination and why its last attempt failed."""

    combination: Combination
    reason: str
    attempts: int


class Ledger:
    """The finished and failed runs of a tournament in `folder`; the run folders are the truth.

    Raises: JobError if a run folder holds the result of another job.
    """

    def __init__(self, folder: Path, combinations: Sequence[Combination]) -> None:
        self._folder = folder
        self.combinations = tuple(combinations)
        self.finished: list[Finished] = []
        for combination in self._in_order_of_finish():
            result = finished_result(combination.job, folder / combination.folder)
            if result is not None:
                self._take_up(Finished(combination, result))

    def open_combinations(self) -> list[Combination]:
        """Those without a result, in the order of the grid."""
        done = {finished.combination.folder for finished in self.finished}
        return [c for c in self.combinations if c.folder not in done]

    def failed(self) -> list[Failed]:
        """Those that failed and have not finished since."""
        found = []
        for combination in self.open_combinations():
            path = self._folder / combination.folder / FAILURE
            if path.exists():
                content = json.loads(path.read_text(encoding="utf-8"))
                found.append(Failed(combination, content["reason"], content["attempts"]))
        return found

    def add(self, combination: Combination) -> Finished:
        """Take up the result of a run that has just finished. Raises: CheckpointError."""
        place = self._folder / combination.folder
        result = finished_result(combination.job, place)
        if result is None:
            raise CheckpointError(f"The run ended well but left no result in {place}.")
        (place / FAILURE).unlink(missing_ok=True)
        finished = Finished(combination, result)
        self._take_up(finished)
        self.write()
        return finished

    def add_failure(self, combination: Combination, reason: str) -> None:
        """Keep why a run failed; it will be tried again on the next call."""
        keep_failure(self._folder / combination.folder, reason)

    def _take_up(self, finished: Finished) -> None:
        """Raises: JobError if the run was trained on other images than those before it."""
        known = {one.result.split_sha256: one.combination for one in self.finished}
        if known and finished.result.split_sha256 not in known:
            raise JobError(
                f"{finished.combination.folder} was trained on other images than "
                f"{next(iter(known.values())).folder}, so their figures do not compare. Use "
                f"another --out for other images, or delete one of the two in {self._folder}."
            )
        self.finished.append(finished)

    def _in_order_of_finish(self) -> list[Combination]:
        """Those with a row first, in the order of the rows."""
        path = self._folder / _ROWS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rank = {_folder_of(line): n for n, line in enumerate(lines)}
        return sorted(self.combinations, key=lambda c: rank.get(c.folder.as_posix(), len(lines)))

    def write(self) -> None:
        """Write both tables anew: whole, whatever happened to the old ones."""
        rows = [finished.row() for finished in self.finished]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        replace_text(self._folder / _ROWS, "".join(lines))
        table = io.StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(table, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self._folder / _TABLE, table.getvalue())


def _folder_of(line: str) -> str | None:
    """The run of a row; None if the row is damaged. The table is made again from the folders."""
    try:
        return str(json.loads(line)["folder"])
    except (ValueError, TypeError, KeyError):
        return None
