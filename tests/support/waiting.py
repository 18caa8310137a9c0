"""Waiting for what another thread or process makes true."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

WAIT_S = 60.0  # a hang, not a slow machine


def until(condition: Callable[[], object]) -> None:
    """Ask again and again, less often the longer it takes; fails if it never happens."""
    started = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started
        assert waited_s < WAIT_S, "never happened"
        time.sleep(min(max(0.005, waited_s / 20), 0.05))


@contextmanager
def repeating(work: Callable[[int], object], threads: int = 1) -> Iterator[None]:
    """Threads that call `work` with their number, again and again until the block ends; a failure
    ends its thread, and is raised then.
    """
    ended = threading.Event()

    def repeat(number: int) -> None:
        while not ended.is_set():
            work(number)

    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(repeat, number) for number in range(threads)]
        try:
            yield
        finally:
            ended.set()
            for call in calls:
                call.result()
