"""A sandbox in which a process cannot use files, the network or other processes.

It has two layers of the Linux kernel. Each works independently, needs no privilege and is
permanent:

    landlock   no file can be opened, no TCP port reached, no other process signalled
    seccomp    only the listed system calls work: no open, socket, execve, fork, ptrace or kill

Open files and loaded code stay usable, so a process opens and loads everything first.
"""

import contextlib
import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_REHEARSAL_S = 10
_FROM_OUTSIDE = (signal.SIGALRM, signal.SIGKILL)
_TASKS = Path("/proc/self/task")
_NO_NEW_PRIVILEGES = 38

_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # on every architecture
_ASK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # number of file rights, from each version on
_TCP_RIGHTS, _TCP_SINCE = 0b11, 4
_SCOPES, _SCOPES_SINCE = 0b11, 6  # abstract Unix sockets, signals

_MACHINES = {"x86_64": (0xC000003E, 317, 56), "aarch64": (0xC00000B7, 277, 220)}
"""For each architecture: its id in a filter, and the numbers of `seccomp` and `clone`."""
ALLOWED_CALLS = """
    recvfrom 45 207      sendmsg 46 211       sendto 44 206          setitimer 38 103
    getitimer 36 102     futex 202 98         mmap 9 222             munmap 11 215
    mprotect 10 226      mremap 25 216        madvise 28 233         brk 12 214
    rt_sigaction 13 134  rt_sigreturn 15 139  rt_sigprocmask 14 135  sigaltstack 131 132
    read 0 63            write 1 64           writev 20 66           lseek 8 62
    close 3 57           fstat 5 80           dup2 33 -              dup3 292 24
    exit 60 93           exit_group 231 94    getpid 39 172          gettid 186 178
    rseq 334 293         membarrier 324 283   set_robust_list 273 99 restart_syscall 219 128
    getcpu 309 168       sched_yield 24 124   sched_getaffinity 204 123 nanosleep 35 101
    time 201 -           gettimeofday 96 169  clock_gettime 228 113  clock_nanosleep 230 115
    getrandom 318 278    getrusage 98 165     clock_getres 229 114   sysinfo 99 179
    getcwd 79 17
"""
"""Allowed system calls, with their numbers on x86_64 and aarch64."""
_CLONE_THREAD = 0x10000
_CLONE3 = 435
_FIRST_UNKNOWN = 463

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_SET_FILTER, _ALL_THREADS = 1, 1

_ABSENCES = {
    ("landlock", errno.ENOSYS): "The kernel has none. Use Linux 5.13 or newer.",
    ("landlock", errno.EOPNOTSUPP): "The kernel starts without it. Add it to the parameter lsm=.",
    ("landlock", errno.EPERM): "The container forbids it. Allow landlock_* in its seccomp profile.",
    (
        "landlock",
        errno.EBUSY,
    ): "A library had started a thread already. Report which packages are installed.",
    ("seccomp", errno.ENOSYS): "The kernel has none. Use one with CONFIG_SECCOMP_FILTER.",
    ("seccomp", errno.EINVAL): "The kernel has no filters. Use one with CONFIG_SECCOMP_FILTER.",
    ("seccomp", errno.EPERM): "The container forbids it. Allow seccomp in its seccomp profile.",
}


class Layer(NamedTuple):
    """A layer and whether it is active (`holds`); if not, `absence` is the reason and the fix."""

    name: str
    holds: bool
    absence: str = ""


def active_names(layers: Sequence[Layer]) -> list[str]:
    """The names of the active layers."""
    return [layer.name for layer in layers if layer.holds]


def holding(layers: Sequence[Layer]) -> str:
    """The names of the active layers as one string, or "none"."""
    return ", ".join(active_names(layers)) or "none"


def absences(layers: Sequence[Layer]) -> dict[str, str]:
    """For each layer that is not active, the reason and the fix."""
    return {layer.name: layer.absence for layer in layers if not layer.holds}


def enter(rehearse: Callable[[], object], names: Sequence[str] | None = None) -> list[Layer]:
    """Enter each layer of `names` (default: all) that this kernel has. This cannot be undone.

    A child process enters a layer first and calls `rehearse` there. If that fails the layer is
    skipped: a filter that does not fit the machine, as under emulation, must not stop all decoding.

    Raises: TimeoutError if the child takes too long, or was killed from outside.
    """
    return [_entered(name, rehearse) for name in names or _LAYERS]


def enter_again(names: Sequence[str]) -> list[Layer]:
    """Enter the active layers of an earlier process. Raises: OSError if one is refused now.

    There is no rehearsal: an attacker could overload the machine to make it fail, and the process
    that replaces a killed one would then run without a sandbox.
    """
    for name in names:
        _LAYERS[name]()
    return [Layer(name, True) for name in names]


def _entered(name: str, rehearse: Callable[[], object]) -> Layer:
    restrict = _LAYERS[name]
    status = _rehearsed(restrict, rehearse)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OUTSIDE:
        # The machine is too busy or out of memory, which shows nothing about the layer. The
        # service starts another process.
        raise TimeoutError(
            f"decoding a small image in the layer {name} was ended by "
            f"{signal.Signals(os.WTERMSIG(status)).name}; the limit is {_REHEARSAL_S} s"
        )
    if status:
        return Layer(
            name, False, "No image can be decoded in it here. Run the service without emulation."
        )
    try:
        restrict()
    except OSError as error:
        absence = f"It was refused ({error.strerror}). Check the kernel's configuration."
        return Layer(name, False, _ABSENCES.get((name, error.errno or 0), absence))
    return Layer(name, True)


def _rehearsed(restrict: Callable[[], None], rehearse: Callable[[], object]) -> int:
    """The wait status of a child that calls `rehearse` in this layer: 0 means success. A layer
    that the kernel lacks is not entered.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        signal.alarm(_REHEARSAL_S)
        with contextlib.suppress(OSError):
            restrict()
        rehearse()
        status = 0
    finally:
        os._exit(status)


def landlock_version() -> int:
    """The Landlock version of the kernel. Raises: OSError if it has none."""
    return system_call(_CREATE_RULESET, None, 0, _ASK_VERSION)


def _landlock() -> None:
    """Deny every right that this version of Landlock knows to this thread and all threads that it
    starts later. Raises: OSError.
    """
    if _TASKS.is_dir() and len([*_TASKS.iterdir()]) > 1:
        raise OSError(errno.EBUSY, "another thread is running, which Landlock would not restrict")
    version = landlock_version()
    count = max(count for since, count in _FILE_RIGHTS.items() if since <= version)
    tcp = _TCP_RIGHTS if version >= _TCP_SINCE else 0
    scopes = _SCOPES if version >= _SCOPES_SINCE else 0
    denied = struct.pack("=QQQ", (1 << count) - 1, tcp, scopes)
    ruleset = system_call(_CREATE_RULESET, denied, len(denied), 0)
    try:
        _forbid_new_privileges()
        system_call(_RESTRICT_SELF, ruleset, 0)  # no rules: a rule would allow something
    finally:
        os.close(ruleset)


def _seccomp() -> None:
    """Refuse every system call except ALLOWED_CALLS, in all threads. Raises: OSError."""
    machine = os.uname().machine
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        raise OSError(errno.ENOTSUP, f"no list of system calls for {machine}")
    _, seccomp, _ = _MACHINES[machine]
    code = ctypes.create_string_buffer(_filter(machine))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(code))
    _forbid_new_privileges()
    system_call(seccomp, _SET_FILTER, _ALL_THREADS, program)


def _filter(machine: str) -> bytes:
    """The program, in classic BPF, that the kernel runs before each system call."""
    architecture, _, clone = _MACHINES[machine]
    column = 1 + list(_MACHINES).index(machine)
    words = ALLOWED_CALLS.split()
    numbers = [int(number) for number in words[column::3] if number != "-"]

    def returned_if(test: int, value: int, result: int) -> list[tuple[int, int, int, int]]:
        return [(test, 0, 1, value), (_RETURN, 0, 0, result)]

    refuse, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in numbers:
        steps += returned_if(_EQUALS, number, _ALLOW)
    # After ENOSYS, but not after EPERM, a C library falls back from a newer call to an older one.
    # clone3 must be refused as well, since no filter can read its flags.
    steps += returned_if(_AT_LEAST, _FIRST_UNKNOWN, unknown)
    steps += returned_if(_EQUALS, _CLONE3, unknown)
    steps += [
        (_EQUALS, 0, 3, clone),  # allowed for threads, refused for processes
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *returned_if(_HAS_BITS, _CLONE_THREAD, _ALLOW),
        (_RETURN, 0, 0, refuse),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _forbid_new_privileges() -> None:
    """Let no later program gain privileges; without this the kernel refuses both layers."""
    if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. Raises: OSError."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = int(call(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


_LAYERS: dict[str, Callable[[], None]] = {"landlock": _landlock, "seccomp": _seccomp}
