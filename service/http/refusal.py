"""Refusing a request whose body may still be on its way."""

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_DRAIN_S = 5.0


def has_body(scope: Scope) -> bool:
    """Whether the request says that it has a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def refuse(
    answer: Response, scope: Scope, receive: Receive, send: Send, *, drain_bytes: int
) -> None:
    """Send `answer`; read on for up to `drain_bytes` of the body, below 0 none, and forget them.

    A client that is cut off while it sends would not see the answer. Afterwards the connection
    ends, since the rest of the body could not be told from a next request.
    """
    if not has_body(scope):
        await answer(scope, receive, send)
        return
    headers = [*answer.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
    waits = "expect" in Headers(scope=scope)  # for 100 Continue, which never comes
    if not waits and answer.status_code != HTTPStatus.REQUEST_TIMEOUT:
        await _drain(receive, drain_bytes)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive, max_bytes: int) -> None:
    seen = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while seen <= max_bytes:
                message = await receive()
                seen += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
