"""Temporary folders in memory: on a disk, a small test spends most of its time in `fsync`."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MEMORY = Path("/dev/shm")
LEAST_BYTES = 4 * 2**30
PREFIX = "kinlens-tests-"


class Folders:
    """The part of `pytest.TempPathFactory` that tests use."""

    def __init__(self, root: str) -> None:
        self._root = root

    def mktemp(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._root))


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Folders in memory where there is a file system for it with enough space."""
    free = os.statvfs(MEMORY) if MEMORY.is_dir() else None
    if free is None or free.f_bavail * free.f_frsize < LEAST_BYTES:
        yield tmp_path_factory
        return
    for left in MEMORY.glob(f"{PREFIX}*"):  # of a run that was killed
        if not Path("/proc", left.name.removeprefix(PREFIX).split("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY, ignore_cleanup_errors=True
    ) as root:
        yield Folders(root)


@pytest.fixture
def tmp_path(tmp_path_factory: Any) -> Iterator[Path]:
    """A folder of the test, removed after it."""
    folder = tmp_path_factory.mktemp("test")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
