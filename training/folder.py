"""The folder of a run or a study: files written whole, and what the runs in it belong to."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from embedder.errors import JobError

FREE = frozenset(("name", "description", "licence", "runtime", "data.root"))
"""Settings of a job that change nothing in its figures."""


def replace_text(path: Path, text: str) -> None:
    """Write `path`; a reader, or a crash, sees the whole old or the whole new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(path.name + ".tmp")
    with stage.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    stage.replace(path)


def replace_json(path: Path, content: Any) -> None:
    """`replace_text` with indented JSON."""
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


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


def settings(
    content: Mapping[str, Any], free: Collection[str] = FREE, prefix: str = ""
) -> dict[str, Any]:
    """Plain data by dotted names, `{"optimizer.epochs": 30}`, without the tables in `free`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = prefix + key
        if name in free:
            continue
        if isinstance(value, Mapping):
            found |= settings(value, free, f"{name}.")
        else:
            found[name] = value
    return found


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = FREE
) -> list[str]:
    """What differs between two jobs as plain data, but for settings in `free`."""
    before, after = settings(old, free), settings(new, free)
    return [
        f"{name} = {before.get(name)!r}, now {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
