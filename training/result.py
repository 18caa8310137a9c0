"""What a finished run found, and its file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedder.errors import CheckpointError, JobError
from training.checkpoint import UNTRAINED
from training.config.job import Job, parse_job
from training.folder import changes
from training.state import Row

RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """What a finished run found; stored as `result.json` in its folder.

    `figures` are those of the chosen model on the test classes ({} if the protocol never tests),
    `validation` its figures on the validation classes ({} without any), `trunk` those of what
    it `began_with`, the untrained trunk or the model that it went on from, with the prefix of
    validation classes. `seconds_per_epoch` is the median, without evaluation; `split_sha256`
    tells the images, `versions` the packages that trained.
    """

    job: dict[str, Any]
    figures: Row
    validation: Row
    best_epoch: int
    chosen_by: str
    seconds_per_epoch: float
    split_sha256: str = ""
    trunk: Row = field(default_factory=dict)
    began_with: str = UNTRAINED
    versions: dict[str, str] = field(default_factory=dict)


def read_result(folder: Path) -> Result | None:
    """The result of the run in `folder`; None if it has not finished. Raises: CheckpointError."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Remove it and run the job again with --resume."
        ) from error


def finished_result(job: Job, folder: Path) -> Result | None:
    """The result in `folder`, if there is one. Raises: JobError if it is that of another job."""
    result = read_result(folder)
    if result is None:
        return None
    differences = changes(parse_job(result.job, str(folder)).as_dict(), job.as_dict())
    if differences:
        raise JobError(
            f"{folder} holds a run with other settings: {', '.join(differences)}. Go on with the "
            "same settings, use another --out, or delete that folder to train it again."
        )
    return result
