"""Job files in layers: a file over its base, a method over a data set.

The jobs that ship with Kinlens are in `training/jobs/`. In addition to its files, every method of
`methods/` combines with every data set of `data/`, under the name DATA-METHOD.
"""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from kinlens.embedder.errors import JobError

JOBS = Path(__file__).parents[1] / "jobs"

_SAME_KEYS = ("optimizer", "job")  # same keys whatever `kind` or `name` is, e.g. for Adam and AdamW


def read_layers(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The tables of a file, a shipped job or a dict over their bases, and their origin.

    Raises: JobError.
    """
    if isinstance(source, Mapping):
        above = copy.deepcopy(dict(source))
        base = above.pop("base", None)
        return above if base is None else lay_over(read_layers(base)[0], above), "the dict"
    path = _file(source)
    if path is not None:
        return read_file(path), str(path)
    if str(source) in (products := _products()):
        return _product(*products[str(source)]), str(source)
    path = Path(source)
    if path.suffix or len(path.parts) > 1:
        near = get_close_matches(path.name, [x.name for x in path.parent.glob("*.toml")], 1)
        hint = (
            f"; did you mean {path.with_name(near[0])}?" if near else ". Give a job file in TOML."
        )
        raise JobError(f"{source} does not exist{hint}")
    near = get_close_matches(str(source), job_names(), 1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise JobError(f"No job {str(source)!r}. {hint}Give the path of a TOML file or {known_jobs()}.")


def read_top(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables that a user wrote: those of a file or dict without its bases. Raises: JobError."""
    if isinstance(source, Mapping):
        return source
    path = _file(source)
    is_shipped = path is None or path.parent == JOBS
    return {} if is_shipped or path is None else tomllib.loads(path.read_text("utf-8-sig"))


def names_of(overrides: Sequence[str]) -> set[str]:
    """The dotted names of the settings that `--set` changes."""
    return {override.partition("=")[0].strip() for override in overrides}


def job_names() -> list[str]:
    return sorted({*_products(), *(path.stem for path in JOBS.glob("*.toml"))})


def known_jobs() -> str:
    files, data, methods = (
        ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        for folder in (JOBS, JOBS / "data", JOBS / "methods")
    )
    return f"one of: {files}; or DATA-METHOD, DATA of {data}, METHOD of {methods}"


def lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge the tables `above` over `below`; one of another `kind` (loss: `name`) replaces it."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _is_another(key, old, value):
            result[key] = lay_over(old, value)
        else:
            result[key] = value
    return result


def _is_another(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    differ = (word in old and word in new and old[word] != new[word] for word in ("kind", "name"))
    return key not in _SAME_KEYS and any(differ)


def _file(source: str | Path, folder: Path = Path()) -> Path | None:
    candidates = (folder / source, JOBS / f"{source}.toml")
    return next((path for path in candidates if path.is_file()), None)


def _products() -> dict[str, tuple[Path, Path]]:
    """The file of the data set and of the method for each name DATA-METHOD."""
    files = product((JOBS / "data").glob("*.toml"), (JOBS / "methods").glob("*.toml"))
    return {f"{data.stem}-{method.stem}": (data, method) for data, method in files}


def _product(data: Path, method: Path) -> dict[str, Any]:
    """A method over a data set, then the method's own settings for that data set."""
    of_data, of_method = read_file(data), read_file(method)
    own = of_method.pop("on", {}).get(data.stem, {})
    content = lay_over(lay_over(of_data, of_method), own)
    described = f"{of_data['description']} {of_method['description']}"
    return content | {"name": f"{data.stem}-{method.stem}", "description": described}


def read_file(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file over its base; `above` is the chain of files to it. Raises: JobError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise JobError(f"{path} does not exist.") from error
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid TOML: {error}") from error
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise JobError(f"{path}: base = {base!r} must be the name of a job or a path of a file.")
    trail = (*above, path.resolve())
    found = _file(base, path.parent)
    if found is not None and found.resolve() in trail:
        raise JobError(f"{path}: base = {base!r} forms a cycle. Remove one of the bases.")
    try:
        below = read_file(found, trail) if found is not None else read_layers(base)[0]
    except JobError as error:
        raise JobError(f"{path}: base = {base!r}: {error}") from error
    return lay_over(below, content)
