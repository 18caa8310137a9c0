"""The machine: cores, memory, processor, and whether FAISS can be loaded."""

import contextlib
import functools
import importlib
import math
import os
import platform
import sys
from pathlib import Path

from kinlens import __version__
from kinlens.installs import missing_package

CONTROL_GROUP = Path("/sys/fs/cgroup")

_CGROUP_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_MEMORY_INFO = Path("/proc/meminfo")
_MIB = 2**20
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


def core_count(group: Path = CONTROL_GROUP) -> int:
    """Cores that this process may use: taskset, cpusets and containers may leave it fewer.

    A container's share of time, as of `--cpus 1.5`, is read from `group` and rounded up.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = quota_of(group)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


@functools.cache
def quota_of(group: Path) -> float | None:
    """Seconds of work in each second that the control group `group` allows; None: no limit.

    Read once in a process, for it stands in the way of every search.
    """
    for quota, period in (_version_2(group), _version_1(group)):
        with contextlib.suppress(ValueError):
            if int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
    return None


def _version_2(group: Path) -> tuple[str, str]:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return quota, period


def _version_1(group: Path) -> tuple[str, str]:
    return _text(group / "cpu/cpu.cfs_quota_us"), _text(group / "cpu/cpu.cfs_period_us")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def memory_mb(cgroup: Path = CONTROL_GROUP) -> float:
    """MiB of main memory that this process may use: a container may leave it less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name, _ in _CGROUP_MEMORY:
        text = _text(cgroup / name)
        if text.isdecimal():
            limits.append(int(text))
    return min(limits) / _MIB


def free_memory_mb(cgroup: Path = CONTROL_GROUP) -> float:
    """MiB of main memory that this process could still take, without swapping."""
    free = [memory_mb(cgroup)]
    for line in _text(_MEMORY_INFO).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            free.append(int(amount.split()[0]) / 1024)
    for limit, used in _CGROUP_MEMORY:
        limited, taken = _text(cgroup / limit), _text(cgroup / used)
        if limited.isdecimal() and taken.isdecimal():
            cached = _file_cache((cgroup / limit).with_name("memory.stat"))
            free.append((int(limited) - int(taken) + cached) / _MIB)
    return max(0.0, min(free))


def _file_cache(statistics: Path) -> int:
    """Bytes that count as taken by a control group, and that the kernel would take back."""
    found = 0
    for line in _text(statistics).splitlines():
        name, _, amount = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            found += int(amount)
    return found


def processor() -> str:
    """What tells kinds of processors apart: model and instructions."""
    lines = []
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith(_CPU_LINES) and line not in lines:
                lines.append(line)
    return "\n".join(lines) or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """The folder for figures that can be computed again; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinlens"


def require_faiss(command: str) -> None:
    """Exit with one line if FAISS is missing, or if it cannot be loaded: the GPU package without
    the CUDA libraries that it needs.
    """
    try:
        importlib.import_module("faiss")
    except ModuleNotFoundError as missing:
        raise SystemExit(missing_package(command, missing, "cpu", "gpu")) from None
    except Exception as error:
        raise SystemExit(
            f"Error: FAISS cannot be loaded: {' '.join(str(error).split())} Install it again with "
            "all that it needs: pip install 'kinlens[gpu]' on a machine with an NVIDIA GPU, "
            "pip install 'kinlens[cpu]' on others."
        ) from None


def print_version(asked: bool) -> None:
    """What `--version` of every command does. It ends the process before any work begins."""
    if asked:
        sys.stdout.write(f"kinlens {__version__}\n")
        raise SystemExit(0)
