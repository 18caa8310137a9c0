"""The folder of a run or a study: its result, atomic writes, and checks of its settings."""

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kinlens.embedder.durable import lock
from kinlens.embedder.errors import CheckpointError, JobError, TrainingError
from kinlens.training.config.job import Job, stored_job

if sys.platform != "win32":
    import fcntl

RESULT = "result.json"
LOCK = ".lock"
UNTRAINED = "the untrained trunk"
"""What a run begins with, unless it continues the trained model of a bundle."""

FREE = frozenset(("name", "description", "licence", "runtime", "data.root"))
"""Settings of a job that do not affect its figures."""
FREE_TO_RESUME = FREE | {"data.feedback", "recall_at", "protocol.alpha"}
"""Settings that may change until a run is finished; feedback is compared by its content."""


def is_begun(folder: Path) -> bool:
    return (folder / "checkpoint.pt").exists()


@contextmanager
def exclusive(folder: Path, *, with_children: bool = False) -> Iterator[None]:
    """Lock `folder` until this process or, with children, the last child ends. Raises: JobError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w", encoding="ascii")
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be written ({error.strerror}). Choose another folder."
        ) from error
    with file:
        os.set_inheritable(file.fileno(), with_children)
        if not (_lock_with_children if with_children else _lock_alone)(file.fileno()):
            raise JobError(
                f"Another training is running in {folder}. Wait for it, stop it, or use another "
                "run folder."
            )
        yield


def _lock_with_children(descriptor: int) -> bool:
    return lock(descriptor, alone=True, wait=False)


if sys.platform == "win32":
    _lock_alone = _lock_with_children
else:

    def _lock_alone(descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


@dataclass(frozen=True)
class Result:
    """The outcome of a finished run; stored as `result.json` in its folder.

    `figures` are measured on the test classes ({} if the protocol never tests), `validation` on the
    validation classes. `trunk` has both for the model that the run began with (`began_with`), with
    a prefix for validation classes. `verdict` states whether the model is better than that,
    `choice` why nothing was trained, `model` in words what the model is. `seconds_per_epoch` is
    the median, without evaluation.
    """

    job: dict[str, Any]
    figures: dict[str, float]
    validation: dict[str, float]
    best_epoch: int
    chosen_by: str
    seconds_per_epoch: float
    split_sha256: str = ""
    trunk: dict[str, float] = field(default_factory=dict)
    began_with: str = UNTRAINED
    verdict: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choice: str = ""
    model: str = "a trained network"


def read_result(folder: Path) -> Result | None:
    path = folder / RESULT
    if not path.is_file():
        return None
    cure = "Remove it and run the job again with --resume."
    try:
        return Result(**read_json(path, cure))
    except TypeError as error:
        raise CheckpointError(f"{path} is not of this version ({error}). {cure}") from error


def read_json(path: Path, cure: str) -> Any:
    """Raises: CheckpointError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}). {cure}") from error


def finished_result(job: Job, folder: Path) -> Result | None:
    """The result in `folder`, if any. Raises: JobError if it belongs to another job."""
    result = read_result(folder)
    if result is not None:
        _require_none(folder, changes(result.job, job, origin=str(folder)))
    return result


def stamp(folder: Path, file: str, content: Mapping[str, Any], job: Job | None = None) -> None:
    """Write `content` and the job to `file` of `folder`, or check that it has the same.

    Raises: JobError if it has another content or job, CheckpointError if it is damaged.
    """
    path = folder / file
    if not path.exists():
        replace_json(path, {**({} if job is None else {"job": job.as_dict()}), **content})
        return
    found = read_json(path, "Use another --out.")
    stored = found.pop("job", {})
    differences = [] if job is None else changes(stored, job, origin=str(path))
    before, after = by_name(found, ()), by_name(json.loads(json.dumps(content)), ())
    _require_none(folder, [*differences, *_differences(before, after)])


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path`; a reader, or a crash, sees the complete old or new one.

    Raises: TrainingError if it cannot be written.
    """
    stage = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with stage.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        stage.replace(path)
    except OSError as error:
        with suppress(OSError):
            stage.unlink()
        raise TrainingError(
            f"{path} cannot be written ({error}). Free disk space or choose another folder, then "
            "run the command again, `fit` with --resume."
        ) from error


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def replace_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def by_name(
    content: Mapping[str, Any], free: Collection[str] = FREE, prefix: str = ""
) -> dict[str, Any]:
    """Plain data by dotted names, `{"optimizer.epochs": 30}`, without the tables in `free`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = prefix + key
        if name not in free:
            is_table = isinstance(value, Mapping)
            found |= by_name(value, free, f"{name}.") if is_table else {name: value}
    return found


def changes(
    stored: dict[str, Any], job: Job, free: Collection[str] = FREE, origin: str = "the run"
) -> list[str]:
    """The differences of a stored job, also of an older version, and `job`, except in `free`.

    This alone decides whether two jobs are the same. Raises: JobError if `stored` is no job.
    """
    before = stored_job(stored, f"the job in {origin}").as_dict()
    return _differences(by_name(before, free), by_name(job.as_dict(), free))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {before.get(name)!r}, now {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and not _is_one_path(name, before.get(name), after.get(name))
    ]


def _is_one_path(name: str, one: Any, other: Any) -> bool:
    """Whether two settings are the same file: runs of version 0.2 have relative paths."""
    is_path = name == "model.weights" and isinstance(one, str) and isinstance(other, str)
    return is_path and Path(one).absolute() == Path(other).absolute()


def _require_none(folder: Path, differences: list[str]) -> None:
    if differences:
        raise JobError(
            f"{folder} has a run with other settings: {', '.join(differences)}. Continue with "
            "the same settings, use another --out, or delete that folder to train it again."
        )
