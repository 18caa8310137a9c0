"""The log of a run: JSON lines always, TensorBoard if asked for."""

import json
from pathlib import Path
from typing import Any

from embedder.errors import JobError


class RunLog:
    """Records in `log.jsonl` of a run folder; numbers also go to TensorBoard.

    A resumed run passes the step of its checkpoint: what was logged after it is dropped, since it
    will be logged again. A fresh run passes 0.
    """

    def __init__(self, folder: Path, tensorboard: bool = False, step: int = 0) -> None:
        path = folder / "log.jsonl"
        kept = _records_until(path, step)
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._writer = _summary_writer(folder) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line: {"kind": ..., "step": ..., **values}."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _records_until(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [line for line in whole if json.loads(line)["step"] <= step]


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError(
            "runtime.tensorboard = true needs TensorBoard. Install the extra `tensorboard`, or "
            "set it to false: log.jsonl holds the same numbers."
        ) from error
    return SummaryWriter(folder / "tensorboard")
