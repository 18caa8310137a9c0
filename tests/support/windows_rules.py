"""Rules of Windows on Linux, for one process: what is missing there, and what its files refuse."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "_posixshmem", "syslog")
FUNCTIONS = (
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgid", "killpg", "nice"),
    *("sched_getaffinity", "sched_setaffinity", "sysconf", "uname", "mkfifo", "pread", "pwrite"),
    *("posix_fallocate", "getloadavg", "chown", "O_TMPFILE", "O_CLOEXEC", "O_DIRECTORY"),
    *("O_NOFOLLOW", "O_NONBLOCK", "O_SYNC"),
)
SIGNALS = ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGQUIT", "SIGPIPE")
FIRST = (
    *("asyncio", "concurrent.futures", "getpass", "http.client", "multiprocessing.connection"),
    *("multiprocessing.pool", "platform", "secrets", "shutil", "sqlite3", "subprocess", "tempfile"),
    *("urllib.request", "uuid", "webbrowser", "numpy", "PIL.Image", "PIL.ImageCms", "faiss"),
    *("onnx", "onnxruntime", "pydantic", "httpx", "lark", "rich.console", "rich.progress", "typer"),
    *("rich.traceback", "rich.table", "typer.rich_utils", "encodings.idna", "numpy.testing"),
)
"""What has its own way on each system, and finds out when it is imported."""
SYSTEM_FOLDERS = ("/proc/", "/sys/")


def follow_windows_rules() -> None:
    """Hide what Windows lacks, then refuse as it does; before `kinlens` is imported.

    - A folder cannot be opened. A file that is open or mapped is neither removed nor replaced, and
      no folder around it is renamed. sqlite and FAISS open their files without that right as well.
    - Locks are those of `msvcrt`: exclusive, of bytes, of one opening of a file.
    """
    for name in FIRST:
        import_module(name)
    locks = stand_in_msvcrt()
    shutil._use_fd_functions = False  # it opens folders
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in FUNCTIONS:
        if hasattr(os, name):
            delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    sys.modules["msvcrt"] = locks
    ctypes.windll = types.SimpleNamespace(kernel32=Kernel())
    sys.platform = "win32"
    sys.addaudithook(Rules())


class Kernel:
    """The one call of Windows that Kinlens makes itself."""

    @staticmethod
    def GlobalMemoryStatusEx(structure: Any) -> int:  # noqa: N802
        status = ctypes.cast(structure, ctypes.POINTER(ctypes.c_ulonglong))
        assert status[0] == 64
        status[1], status[2] = 8 * 2**30, 4 * 2**30
        return 1


def stand_in_msvcrt() -> types.ModuleType:
    """`msvcrt.locking` by locks of an open file description, which are as exclusive as those."""
    module: Any = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.LK_UNLCK = 2, 0

    def locking(descriptor: int, mode: int, count: int) -> None:
        kind = fcntl.F_UNLCK if mode == module.LK_UNLCK else fcntl.F_WRLCK
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            fcntl.fcntl(
                descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, 0, start, count, 0)
            )
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    module.locking = locking
    return module


class Rules:
    """An audit hook, which Python calls before it opens, renames or removes a file."""

    def __init__(self) -> None:
        self._is_looking = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_looking or event not in ("open", "os.rename", "os.remove", "os.rmdir"):
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        self._is_looking = True
        try:
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if event == "open":
                self._refuse_to_open(path)
            elif event == "os.rename":
                self._refuse_if_open(path, "renamed")
                self._refuse_if_open(os.path.realpath(os.fsdecode(arguments[1])), "replaced")
            elif event == "os.remove":
                self._refuse_if_open(path, "removed")
        finally:
            self._is_looking = False

    @staticmethod
    def _refuse_to_open(path: str) -> None:
        if f"{path}/".startswith(SYSTEM_FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", path)
        if Path(path).is_dir():
            raise PermissionError(13, "A folder cannot be opened on Windows", path)

    @staticmethod
    def _refuse_if_open(path: str, what: str) -> None:
        for used in paths_in_use():
            if used == path or used.startswith(f"{path}/"):
                raise PermissionError(13, f"{used} is open, so {path} cannot be {what}", path)


def paths_in_use() -> Iterator[str]:
    """The files that this process has open or mapped."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(descriptor.readlink())
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        yield line[73:]
