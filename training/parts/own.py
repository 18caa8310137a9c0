"""A user's own part of a job: a loss, regularizer, miner, sampler, augmentation or backbone.

A job names it by its import path, `my_package.losses:NormFace`, or by its file,
`/home/me/losses.py:NormFace`. A command does not search the working directory for modules, so a
file that is not installed must be named as a file.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kinlens.embedder.errors import CheckpointError, JobError

OWN_PATH = r"^[^:]+:[A-Za-z_]\w*$"
_NOT_OWN = "timm:"
_ALIAS = "kinlens_own_"
_PLAIN = (bool, int, float, str, type(None))
_TABLES = ("loss", "regularizers", "sampling", "input")

_parts: dict[str, Any] = {}
"""Parts by path: each is imported once, and `register` adds those that have no import path."""


def is_own(name: object) -> bool:
    found = isinstance(name, str) and re.match(OWN_PATH, name) is not None
    return found and not str(name).startswith(_NOT_OWN)


def own_part(path: str) -> Any:
    """The class or function of an import path. Raises: JobError if it cannot be imported."""
    if path not in _parts:
        module, _, name = path.rpartition(":")
        try:
            _parts[path] = getattr(_module(module), name)
        except Exception as error:  # whatever the module raises
            reason = f"{type(error).__name__}: {error}"
            raise JobError(
                f"{path} cannot be imported ({reason}). Install its package, or name the file "
                f"itself: /path/to/file.py:{name}."
            ) from error
    return _parts[path]


def register(part: Any) -> str:
    """The path of a class, function or module instance of this process, for a job."""
    kind = _kind_of(part)
    path = f"{kind.__module__}:{kind.__name__}"
    _parts[path] = part
    return path


def forget_files() -> None:
    """Import files again at their next use: a notebook may have edited them since the last run."""
    for path in [path for path in _parts if path.rpartition(":")[0].endswith(".py")]:
        del _parts[path]
    for name in [name for name in sys.modules if name.startswith(_ALIAS)]:
        del sys.modules[name]


def own_paths(content: Mapping[str, Any]) -> list[str]:
    """The paths of all own parts of a job as plain data, sorted."""
    found = {content["model"]["backbone"], *_texts([content[table] for table in _TABLES])}
    return sorted(path for path in found if is_own(path))


def sources_of(content: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the source file of each own part; "" if it has none, as in a notebook."""
    return {path: source_sha256(path) for path in own_paths(content)}


def require_sources(known: Mapping[str, str], found: Mapping[str, str], run: str) -> None:
    """Raises: CheckpointError if the source of an own part has changed since the run began."""
    changed = [path for path in known.keys() & found.keys() if known[path] != found[path]]
    if changed:
        raise CheckpointError(
            f"{run} was trained with another source of {', '.join(sorted(changed))}, or with other "
            "options of it. Restore them, or start a new run."
        )


def absolute_path(path: str) -> str:
    """`path` with an absolute file, if it names one, so that other folders find it."""
    module, _, name = path.rpartition(":")
    return f"{Path(module).expanduser().absolute()}:{name}" if module.endswith(".py") else path


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    alias = f"{_ALIAS}{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module  # before its code runs, as `import` does
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alias]
            raise
    return sys.modules[alias]


def source_sha256(path: str) -> str:
    """Of the source file of an own part and, if the part is a module made by the user, its options.

    "" if neither is known, as for a class of an interactive session.
    """
    part = own_part(path)
    try:
        file = inspect.getsourcefile(_kind_of(part))
    except (OSError, TypeError):  # of an interactive session
        file = None
    source = b"" if file is None or not Path(file).is_file() else Path(file).read_bytes()
    options = _options(part)
    return hashlib.sha256(source + options).hexdigest() if source or options else ""


def _options(part: Any) -> bytes:
    """The attributes of a module made by the user that are values, such as its margin or a list of
    weights; b"" of a class. Its parameters and buffers are no options, but states that it learns.
    """
    if inspect.isclass(part) or not hasattr(part, "named_modules"):
        return b""
    found = [
        (module, name, _value(value))
        for module, one in part.named_modules()
        for name, value in sorted(vars(one).items())
        if name != "training" and not name.startswith("_")
    ]
    return repr(found).encode()


def _value(value: Any) -> Any:
    """What `repr` shows whole and alike in each process; of another object its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return [(_value(key), _value(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_value(one)) for one in value)
    if hasattr(value, "tolist"):  # a tensor, or an array of NumPy
        return str(value.dtype), value.tolist()
    return type(value).__qualname__


def _kind_of(part: Any) -> Any:
    """The class of an instance; a class or function itself."""
    return part if inspect.isclass(part) or inspect.isfunction(part) else type(part)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
