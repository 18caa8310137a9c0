"""Run the training command: its output into the log of the job, bounded, and how it ended."""

import subprocess
from collections import deque
from collections.abc import Sequence

from embedder.errors import JobConflictError, StateError

LOG_BYTES = 4 * 2**20
"""Of the output of a command, that many go into the log."""

_SHOWN = 3  # lines of output in the error


def run_command(words: Sequence[str]) -> None:
    """Run a command to its end; it ends with this process.

    Raises: JobConflictError if it cannot be started; StateError, with its last lines, if it fails.
    """
    print(f"$ {' '.join(words)}", flush=True)  # noqa: T201 (into the log of the job)
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise JobConflictError(f"{words[0]} cannot be started: {error.strerror}.") from error
    last: deque[str] = deque(maxlen=_SHOWN)
    left = LOG_BYTES
    with process:
        assert process.stdout is not None
        for line in iter(lambda: process.stdout.readline(LOG_BYTES), b""):  # type: ignore[union-attr]
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                last.append(text[-500:])
            if left > 0:
                print(text[:left], flush=True)  # noqa: T201
            left -= len(line)
            if left <= 0 < left + len(line):
                print("(the log is full; what follows is left out)", flush=True)  # noqa: T201
    if process.returncode:
        raise StateError(
            f"{words[0].rsplit('/', 1)[-1]} {words[1]} ended with {process.returncode}: "
            f"{' '.join(last)[-1500:] or 'it said nothing'}"
        )
