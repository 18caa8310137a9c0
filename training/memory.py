"""What the C library does with memory that a training step frees."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of giving it back; whether that could be set.

    A step on a CPU allocates and frees the same hundreds of megabytes again and again. glibc hands
    large blocks back to the system, which then clears every page anew: a tenth of a step and more.
    Elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST))
    )
