"""A call in a daemon thread, which the exit of the process does not wait for."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread of its own, which does not delay the exit of the process."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # so a cancelled caller does not cancel the thread
    threading.Thread(target=run, name="kinlens-call", daemon=True).start()
    return future


async def in_thread(work: Callable[[], T], limit_s: float | None = None) -> T:
    """The result of `begin_in_thread`. Unlike with `asyncio.to_thread`, the exit of the process
    does not wait for a hanging call.

    Raises: TimeoutError after `limit_s` seconds, if not None; the call continues.
    """
    async with asyncio.timeout(limit_s):
        return await asyncio.wrap_future(begin_in_thread(work))
