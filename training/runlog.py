"""The log of a run: JSON lines always, TensorBoard if asked for."""

import json
from pathlib import Path
from typing import Any

from embedder.errors import JobError


class RunLog:
    """Append records to `log.jsonl` in a run folder; numbers also go to TensorBoard."""

    def __init__(self, folder: Path, tensorboard: bool = False) -> None:
        self._file = (folder / "log.jsonl").open("a", encoding="utf-8")
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


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError(
            "runtime.tensorboard = true needs TensorBoard. Install the extra `tensorboard`, or "
            "set it to false: log.jsonl holds the same numbers."
        ) from error
    return SummaryWriter(folder / "tensorboard")
