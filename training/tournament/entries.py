"""The entries of a grid: a name, and the settings that it lays over the base job."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embedder.errors import JobError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*(-[A-Za-z0-9._]+)*")
_NO_REGULARIZER = "none"
_TABLE_OF = {"losses": "loss", "regularizers": "regularizers", "backbones": "model"}


@dataclass(frozen=True)
class Entry:
    """A loss, regularizer or backbone; its table takes the place of the base's table `replaces`."""

    name: str
    settings: Mapping[str, Any]
    replaces: str | None

    def lay_over(self, content: dict[str, Any]) -> None:
        """Change the job `content` in place."""
        if self.replaces is not None:
            content[self.replaces] = {}
        _merge(content, self.settings)


@dataclass(frozen=True)
class Limit:
    """A table of `exclude` or `only`: an axis that it does not name may have any value."""

    allowed: Mapping[str, tuple[Any, ...]]

    def covers(self, axes: Mapping[str, Any]) -> bool:
        """Whether every axis that it names has one of its values."""
        return all(axes[name] in values for name, values in self.allowed.items())


@dataclass(frozen=True)
class Limits:
    """What a grid leaves out, and, if `only` has tables, the only things that it keeps."""

    exclude: tuple[Limit, ...] = ()
    only: tuple[Limit, ...] = ()

    def allow(self, axes: Mapping[str, Any]) -> bool:
        """Whether a combination is one of the grid."""
        if any(limit.covers(axes) for limit in self.exclude):
            return False
        return not self.only or any(limit.covers(axes) for limit in self.only)


def entries(
    content: Mapping[str, Any], axis: str, default: str, of_base: Mapping[str, Any]
) -> list[Entry]:
    """The entries of `losses`, `regularizers` or `backbones`; without any, that of the base job.

    A word stands for the loss, regularizer or backbone of that name with its default settings.

    Raises: JobError.
    """
    replaces = None if axis == "backbones" else _TABLE_OF[axis]
    given = content.get(axis)
    if given is None:
        return [Entry(default, of_base, replaces)]
    if not isinstance(given, list) or not given:
        raise JobError(f"{axis} = {given!r} must be a list of names or tables.")
    found = [_entry(item, axis, replaces) for item in given]
    _require_unique([entry.name for entry in found], axis)
    return found


def integers(content: Mapping[str, Any], axis: str) -> list[int]:
    """`dims` or `seeds`, [] if the grid has none. Raises: JobError."""
    given = content.get(axis)
    if given is None:
        return []
    if not isinstance(given, list) or not given or any(type(n) is not int for n in given):
        raise JobError(f"{axis} = {given!r} must be a list of integers.")
    _require_unique(given, axis)
    return given


def limits(
    content: Mapping[str, Any], key: str, names: Mapping[str, set[Any]]
) -> tuple[Limit, ...]:
    """The tables of `exclude` or `only`: {loss = "triplet", dim = [64, 128]}. Raises: JobError."""
    given = content.get(key, [])
    if not isinstance(given, list) or any(not isinstance(table, dict) for table in given):
        raise JobError(f'{key} must be a list of tables: [[{key}]] loss = "triplet".')
    found = []
    for table in given:
        allowed = {}
        for axis, value in table.items():
            if axis not in names:
                raise JobError(f"{key}: unknown axis {axis!r}; there are {', '.join(names)}.")
            allowed[axis] = tuple(value) if isinstance(value, list) else (value,)
            strange = [item for item in allowed[axis] if item not in names[axis]]
            if strange:
                known = ", ".join(map(str, sorted(names[axis], key=str)))
                raise JobError(f"{key}: no {axis} {strange[0]!r} in this grid; there are {known}.")
        found.append(Limit(allowed))
    return tuple(found)


def _entry(item: Any, axis: str, replaces: str | None) -> Entry:
    given = {"name": item} if isinstance(item, str) else item
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise JobError(f"{axis}: {item!r} must be a name, or a table with a name and settings.")
    name: str = given["name"]
    if not _NAME.fullmatch(name):
        raise JobError(
            f"{axis}: the name {name!r} becomes a folder; use letters, digits, dots, underscores "
            "and single hyphens, and put what it stands for into its settings."
        )
    settings = {key: value for key, value in given.items() if key != "name"}
    table = settings.get(_TABLE_OF[axis])
    if table is None:
        settings |= _named(name, axis)
    elif axis == "losses" and isinstance(table, dict):
        settings["loss"] = {"name": name, **table}
    return Entry(name, settings, replaces)


def _named(name: str, axis: str) -> dict[str, Any]:
    """The settings that a mere name stands for."""
    if axis == "losses":
        return {"loss": {"name": name}}
    if axis == "backbones":
        return {"model": {"backbone": name}}
    return {"regularizers": {} if name == _NO_REGULARIZER else {name: {}}}


def _require_unique(values: list[Any], axis: str) -> None:
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise JobError(f"{axis}: {twice[0]!r} is there twice. Give each entry a name of its own.")


def _merge(content: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        inner = content.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            content[key] = value
