"""Waiting for what another thread or process makes true."""

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0  # a hang, not a slow machine


def until(condition: Callable[[], object]) -> None:
    """Ask again and again; fails if it never happens."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object]) -> None:
    """The same in an event loop, which keeps running."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)
