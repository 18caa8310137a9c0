"""How much memory there is to work with."""

import os
from pathlib import Path

_CGROUP_FILES = ("memory.max", "memory/memory.limit_in_bytes")
_MIB = 2**20


def memory_mb(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """MiB of main memory that this process may use: a container may leave it less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _CGROUP_FILES:
        text = _text(cgroup / name)
        if text.isdecimal():
            limits.append(int(text))
    return min(limits) / _MIB


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
