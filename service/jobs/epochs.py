"""How far a training is, read from the files of its run folder: job.json, log.jsonl, result.json"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_LOOK_S = 0.5


def epochs_of(run: Path) -> tuple[int, int, dict[str, Any]]:
    """Finished epochs, all epochs (0 if unknown yet), and the figures of the last finished one."""
    total = _json(run / "job.json").get("optimizer", {}).get("epochs", 0)
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError), (run / "log.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be half written
                record = json.loads(line)
                if isinstance(record, dict) and record.get("kind") == "epoch":
                    last = record
    return int(last.get("epoch", 0)), int(total), last


def result_of(run: Path) -> dict[str, Any]:
    """What a finished run found on classes that it did not train on; {} if it says nothing."""
    found = _json(run / "result.json")
    names = ("figures", "validation", "trunk", "best_epoch", "seconds_per_epoch")
    return {name: found[name] for name in names if name in found}


@contextlib.contextmanager
def followed(run: Path, tell: Callable[[int, int, dict[str, Any]], None]) -> Iterator[None]:
    """While the block runs, tell about finished epochs as they come."""
    is_done = threading.Event()

    def watch() -> None:
        told = -1
        while not is_done.wait(_LOOK_S):
            epoch, total, figures = epochs_of(run)
            if total and epoch != told:
                tell(epoch, total, figures)
                told = epoch

    thread = threading.Thread(target=watch, name="epochs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
