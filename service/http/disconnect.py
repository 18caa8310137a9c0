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

    The work runs in the task of the request, which is cancelled when the client goes.

    Raises: ClientGoneError, whatever `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not watcher.cancelled():
            is_gone = True
            task.cancel()

    watcher = asyncio.create_task(_gone(request))
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        watcher.remove_done_callback(leave)
        watcher.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
