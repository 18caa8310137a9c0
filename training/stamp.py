"""What the runs in a folder belong to, so that two studies never mix."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedder.errors import JobError
from training.files import replace_json

FREE = frozenset(("name", "description", "licence", "runtime", "data.root"))
"""Settings of a job that change nothing in its figures."""


def stamp(folder: Path, file: str, content: dict[str, Any]) -> None:
    """Write `content` into `file` of `folder`, or check that it is what stands there.

    Raises: JobError naming what differs.
    """
    path = folder / file
    if not path.exists():
        replace_json(path, content)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is damaged ({error}). Use another --out.") from error
    differences = changes(found, json.loads(json.dumps(content)), {f"job.{name}" for name in FREE})
    if differences:
        raise JobError(
            f"{folder} holds runs with other settings: {', '.join(differences)}. Go on with the "
            "same settings, or use another --out."
        )


def identity(job: Mapping[str, Any]) -> str:
    """Text that two jobs share if they differ in nothing but settings of `FREE`."""

    def kept(value: Any, prefix: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: kept(v, f"{prefix}{k}.") for k, v in value.items() if prefix + k not in FREE}

    return json.dumps(kept(job, ""), sort_keys=True)


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    free: frozenset[str] | set[str] = FREE,
    prefix: str = "",
) -> list[str]:
    """Settings that differ between two jobs as plain data, but for those in `free`."""
    names = []
    for key in sorted(old.keys() | new.keys()):
        name = prefix + key
        before, after = old.get(key), new.get(key)
        if name in free or before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += changes(before, after, free, f"{name}.")
        else:
            names.append(f"{name} = {before!r}, now {after!r}")
    return names
