"""What our processes and the libraries in them read from the environment, and what is installed."""

import contextlib
import getpass
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any, cast

ENGINES = ("cpu", "gpu")
TRAINING = ("cpu,training", "gpu,training")
"""Extras that bring the same packages, for CPUs and for GPUs."""

_NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime 1.29 and later report to Microsoft
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # for timm's weights
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
}


def refuse_telemetry() -> None:
    """Switch off the reports of libraries to their makers, unless the user has chosen otherwise.

    `import kinlens` calls this, so it precedes every library that Kinlens imports, in each process.
    """
    for name, value in _NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
    # OpenVINO has no setting for it: its import reports, and writes to the home folder. It runs
    # without the package `openvino_telemetry`, and None is Python's mark for "cannot be imported".
    cast(dict[str, Any], sys.modules).setdefault("openvino_telemetry", None)


def isolate() -> None:
    """Prepare the process of a command, and all that it starts, before its work begins.

    - Modules are not imported from the working directory, where anyone may have put a file.
    - A user id without a name gets one, and caches get a folder where the home folder is missing
      or read-only, as in a container with an arbitrary user id.
    """
    sys.path[:] = _module_path()
    inherited = child_environment()
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(inherited)
    if not _has_user_name():
        os.environ["LOGNAME"] = _user_id()  # `getpass.getuser` of torch
    with contextlib.suppress(OSError):  # there is no folder for temporary files either
        _place_caches()


def _place_caches() -> None:
    home, cache = _home(), os.environ.get("XDG_CACHE_HOME")
    has_home = home is not None and _is_writable(home)
    if has_home if cache is None else _is_writable(Path(cache)):
        folder = cache
    else:
        folder = os.environ["XDG_CACHE_HOME"] = str(_private_folder())
    if not has_home:
        for name in ("MPLCONFIGDIR", "TRITON_HOME"):  # they ignore XDG_CACHE_HOME
            os.environ.setdefault(name, str(folder))
    if home is None:  # a home folder that cannot be written may still hold credentials
        os.environ["HOME"] = str(folder)


def child_environment() -> dict[str, str]:
    """The environment for Python processes that must not import from the working directory."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    absolute = [entry for entry in _python_path() if Path(entry).is_absolute()]
    if absolute:
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    else:
        environment.pop("PYTHONPATH", None)
    return environment


def _python_path() -> list[str]:
    text = os.environ.get("PYTHONPATH", "")
    return text.split(os.pathsep) if text else []


def _module_path() -> list[str]:
    """`sys.path` without the entries that Python derived from the working directory."""
    derived = {Path(entry).resolve() for entry in _python_path() if not Path(entry).is_absolute()}
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None  # python -m
    if is_module and not sys.flags.safe_path:
        derived.add(Path.cwd())
    derived.discard(Path(__file__).resolve().parents[1])  # Kinlens itself, in a checkout
    return [entry for entry in sys.path if Path(entry).resolve() not in derived]


def _has_user_name() -> bool:
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry for the user id
        return False
    return True


if sys.platform == "win32":

    def _user_id() -> str:
        return "user"

    def _is_private(_folder: Path) -> bool:
        return True  # the folder for temporary files is that of the user

else:

    def _user_id() -> str:
        return str(os.getuid())

    def _is_private(folder: Path) -> bool:
        status = folder.lstat()
        is_own = status.st_uid == os.getuid() and not status.st_mode & 0o077
        return stat.S_ISDIR(status.st_mode) and is_own


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and no entry for the user id
        return None


def _is_writable(folder: Path) -> bool:
    """Whether this process may write to a folder, or make it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    """A folder for temporary files of this user alone, the same for each process."""
    folder = Path(tempfile.gettempdir(), f"kinlens-{_user_id()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if _is_private(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="kinlens-"))  # another user made it first


@contextlib.contextmanager
def needs(user: str, *extras: str) -> Iterator[None]:
    """Name the extras of `user`, a function or module, if a package is missing that one brings.

    Another module may be one of the caller, such as the file of a backbone. Also a decorator.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if not is_of_extra(missing):
            raise
        reason = missing_package(user, missing, *extras)
        raise ModuleNotFoundError(reason, name=missing.name) from missing


def is_of_extra(missing: ModuleNotFoundError) -> bool:
    """Whether Kinlens or an extra of it requires a package that could not be imported."""
    module = (missing.name or "").partition(".")[0]
    package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(module, module.replace("_", "-"))
    return any(re.match(rf"{package}\b", line) for line in requires("kinlens") or ())


def missing_package(user: str, error: ModuleNotFoundError, *extras: str) -> str:
    """A message for `user`, which cannot import a package.

    Args:
        user: what needs the package, such as "kinlens-serve".
        error: the failed import. An error about a module of this project is re-raised.
        extras: the extras that bring the package; any one of them is enough.
    """
    if error.name is None or error.name.split(".")[0] == "kinlens":
        raise error
    commands = " or ".join(f"pip install 'kinlens[{extra}]'" for extra in extras)
    return f"{user} needs the package {error.name}, which is not installed. Install it: {commands}."
