"""Work that is dropped when the client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it ends or the client goes. The body must have been read before.

    Raises: ClientGoneError, whatever `work` raises.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
