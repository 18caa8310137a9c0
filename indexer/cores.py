"""How many cores there are to work with."""

import os


def core_count() -> int:
    """Cores that this process may use: taskset, cpusets and containers may leave it fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
