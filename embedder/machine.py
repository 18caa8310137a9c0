"""Facts about this machine: cores, memory, processor, and whether FAISS can be loaded."""

import contextlib
import ctypes
import functools
import importlib
import math
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kinlens.environment import ENGINES, missing_package

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
    """Number of cores that this process may use, as limited by taskset, cpusets and containers.

    The CPU quota of a container, such as `--cpus 1.5`, is read from `group` and rounded up.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = quota_of(group)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


@functools.cache
def quota_of(group: Path) -> float | None:
    """CPU quota of the control group `group`, in CPU seconds per second; None without a limit.

    Cached for the life of the process, because every search needs it.
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
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def memory_mb(cgroup: Path = CONTROL_GROUP) -> float:
    """Main memory that this process may use, in MiB, as limited by a container."""
    limits = [_physical_bytes()[0]]
    for name, _ in _CGROUP_MEMORY:
        text = _text(cgroup / name)
        if text.isdecimal():
            limits.append(int(text))
    return min(limits) / _MIB


if sys.platform == "win32":

    def _physical_bytes() -> tuple[int, int]:
        """Bytes of main memory, and how many of them are free."""
        # The structure MEMORYSTATUSEX: its size of 64 bytes and the load, total, available, ...
        status = (ctypes.c_ulonglong * 8)(64)
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status[1], status[2]

else:

    def _physical_bytes() -> tuple[int, int]:
        """Bytes of main memory, twice: Linux lists what is free in a file, macOS nowhere."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def free_memory_mb() -> float:
    """Main memory that this process can still allocate without swapping, in MiB."""
    free = [memory_mb(), _physical_bytes()[1] / _MIB]
    for line in _text(_MEMORY_INFO).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            free.append(int(amount.split()[0]) / 1024)
    for limit, used in _CGROUP_MEMORY:
        limited, taken = _text(CONTROL_GROUP / limit), _text(CONTROL_GROUP / used)
        if limited.isdecimal() and taken.isdecimal():
            cached = _file_cache((CONTROL_GROUP / limit).with_name("memory.stat"))
            free.append((int(limited) - int(taken) + cached) / _MIB)
    return max(0.0, min(free))


def _file_cache(statistics: Path) -> int:
    """Bytes of file cache, which count as used by a control group but can be reclaimed."""
    found = 0
    for line in _text(statistics).splitlines():
        name, _, amount = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            found += int(amount)
    return found


def processor() -> str:
    """Text that identifies the type of processor: model and instruction sets."""
    lines = []
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith(_CPU_LINES) and line not in lines:
                lines.append(line)
    return "\n".join(lines) or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """The folder for measurements and features that can be computed again; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinlens"


def require_faiss(command: str) -> None:
    """Exit with a one-line message if FAISS is missing or cannot be loaded. The GPU package, for
    example, fails to load without its CUDA libraries.
    """
    for cpu, gpu in (("faiss-cpu", "faiss-gpu-cuvs"), ("onnxruntime", "onnxruntime-gpu")):
        if _is_installed(cpu) and _is_installed(gpu):
            raise SystemExit(
                f"Error: {cpu} and {gpu} are both installed and overwrite each other's files. "
                "Create a new environment, and install either kinlens[cpu] or kinlens[gpu] in it."
            )
    try:
        importlib.import_module("faiss")
    except ModuleNotFoundError as missing:
        raise SystemExit(missing_package(command, missing, *ENGINES)) from None
    except Exception as error:
        raise SystemExit(
            f"Error: FAISS cannot be loaded: {' '.join(str(error).split())} In a new environment, "
            "run pip install 'kinlens[gpu]' on a machine with an NVIDIA GPU, and "
            "pip install 'kinlens[cpu]' on others."
        ) from None


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
