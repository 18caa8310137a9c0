"""TOML: files of plain data, and jobs written in the format that they are read from."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from embedder.errors import JobError
from training.config.job import Job, parse_job


def read_toml(path: Path) -> dict[str, Any]:
    """The plain data of a file. Raises: JobError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid TOML: {error}") from error


def job_toml(job: Job, *comments: str) -> str:
    """`job` as a TOML file with all its settings, below a line for each comment.

    Raises: JobError for a setting that TOML cannot hold: none where the default is a value.
    """
    content = job.as_dict()
    text = "".join(f"# {line}\n" for line in comments) + toml(content)
    if parse_job(_without_none(content)) != job:
        raise JobError(
            f"The job {job.name} sets a value to none whose default is not; TOML has no none. "
            "Choose a value for it."
        )
    return text


def toml(content: Mapping[str, Any]) -> str:
    """Plain data as TOML; keys that are None are left out."""
    return tomli_w.dumps(_without_none(content))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
