"""Steps that make a write survive a crash, each with a name at which a test can let it fail.

Writing aside, `sync`, `rename`, `sync` of the folder: after a crash there is the old state or the
new one. SQLite does its own syncing; the points around its commits are reached by name as well.
"""

import os
from collections.abc import Callable
from pathlib import Path

Hook = Callable[[str], None]
"""Called with the name of a step, before and after it; it may raise or end the process."""

_hooks: list[Hook] = []


def set_fault_hook(hook: Hook | None) -> None:
    """Call `hook` at every step from now on; None takes it away. For tests."""
    _hooks[:] = [] if hook is None else [hook]


def reach(point: str) -> None:
    """Say that the step `point` is reached."""
    for hook in _hooks:
        hook(point)


def sync(path: Path, step: str) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises: OSError."""
    reach(f"{step}: before sync of {path.name}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    reach(f"{step}: after sync of {path.name}")


def sync_tree(folder: Path, step: str) -> None:
    """Bring everything below `folder` to the disk. Raises: OSError."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            sync_tree(entry, step)
        else:
            sync(entry, step)
    sync(folder, step)


def make_folder(folder: Path, step: str) -> None:
    """Create a folder and the parents that it lacks, for good. Raises: OSError."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, step)
        folder.mkdir(exist_ok=True)
        sync(folder.parent, step)


def rename(source: Path, target: Path, step: str) -> None:
    """Give `source` the name `target`, whatever had it, for good. Raises: OSError."""
    reach(f"{step}: before rename")
    source.replace(target)
    reach(f"{step}: after rename")
    sync(target.parent, step)
