"""The settings as variables of the environment: default, limits and meaning of each."""

import ast
import difflib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kinlens.service import settings as source
from kinlens.service.settings import GROUPS, Settings

PREFIX = "KINLENS_"
_OTHERS = frozenset({"API_KEY", "JOB_ID", "SHARED", "LONG_TESTS", "CHROMIUM"})
"""Variables of `mcp`, jobs and tests, without the prefix."""
_REMOVED = {
    "ALLOW_CPU_FALLBACK": "KINLENS_DEVICE=cpu runs the model on the CPU. ",
    "MAX_BATCH_BYTES": "Bodies with several images may have 64 MiB, or "
    "KINLENS_MAX_UPLOAD_BYTES if that is more. ",
    "MAX_HELD_BYTES": "Bodies in memory may have 256 MiB, or twice the largest body if that is "
    "more. ",
    "WORKERS": "To use more cores, run several services behind a proxy, as docs/production.md "
    "shows. ",
}
"""What to do instead of a setting that was removed."""
_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting, in texts; `limits` is empty if any value is allowed."""

    name: str
    group: str
    default: str
    limits: str
    meaning: str
    is_secret: bool


def variables() -> Iterator[Variable]:
    """All settings in their order, as the command and the documentation show them."""
    # The docstring below each setting; pydantic needs ten times as long to find it.
    [settings_class] = [
        node
        for node in ast.parse(inspect.getsource(source)).body
        if isinstance(node, ast.ClassDef) and node.name == Settings.__name__
    ]
    meanings = {
        field.target.id: " ".join(str(ast.literal_eval(below.value)).split())
        for field, below in pairwise(settings_class.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
    }
    group = ""
    for name, schema in Settings.model_json_schema()["properties"].items():
        group = GROUPS.get(name, group)
        # An optional setting is described by its first kind.
        kind = schema | schema.get("anyOf", [{}])[0]
        yield Variable(
            name=PREFIX + name.upper(),
            group=group,
            default=_default(name, schema),
            limits=_limits(kind),
            meaning=meanings[name],
            is_secret=kind.get("format") == "password",
        )


def unknown_variables() -> list[str]:
    """A warning for each KINLENS_ variable of the environment that nothing reads."""
    # Names are compared without the prefix, which would make all of them similar.
    known = [name.upper() for name in Settings.model_fields]
    given = {
        name.upper().removeprefix(PREFIX): name
        for name in os.environ
        if name.upper().startswith(PREFIX)
    }
    warnings = []
    for name in sorted(given.keys() - {*known, *_OTHERS}):
        near = difflib.get_close_matches(name, known, n=1)
        if name in _REMOVED:
            cure = _REMOVED[name]
        elif name.lower() in Settings.__class_vars__:
            cure = f"Its value is always {getattr(Settings, name.lower()):,}. "
        else:
            cure = f"Did you mean {PREFIX}{near[0]}? " if near else ""
        warnings.append(
            f"{given[name]} is no setting and is ignored. {cure}kinlens-serve settings lists all."
        )
    return warnings


def _default(name: str, schema: dict[str, Any]) -> str:
    value = schema.get("default", "cores + 2")  # search_threads
    if value in (None, [], ""):
        return "none"
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value} ({value / 2**20:g} MiB)" if name.endswith("_bytes") else str(value)


def _limits(kind: dict[str, Any]) -> str:
    """The allowed values or the range, such as "at least 0, below 1"."""
    choices = kind.get("enum") or kind.get("items", {}).get("enum")
    if kind.get("type") == "boolean":
        choices = ["true", "false"]
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    return ", ".join(f"{word} {kind[bound]:,}" for bound, word in _BOUNDS.items() if bound in kind)
