"""Caps what request bodies may weigh, how long they may take, and how many arrive at a time."""

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    OVERLOADED,
    Kind,
    problem,
    request_id_of,
)

FORM_BYTES = 64 * 2**10
"""Room beside the image for the other parts of a form and its boundaries."""

_DRAIN_S = 5.0
_DRAIN_FACTOR = 4


class _RefusedError(Exception):
    """Ends the reading of a body that was refused."""


class BodyLimit:
    """Refuses a body above `max_bytes` (413), or not complete after `timeout_s` (408).

    While `max_concurrent` bodies are arriving, a further one is refused (503). A refused body is
    read on for a moment and thrown away, since a client that is cut off while it sends would not
    see the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, max_concurrent: int) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_concurrent = max_concurrent
        self._arriving: set[_Body] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(receive, self._max_bytes, self._timeout_s, self._arriving)
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(refusal, body, scope, send)
            return
        if _has_body(scope):
            self._arriving.add(body)
        try:
            await self._pass_on(body, scope, send)
        finally:
            self._arriving.discard(body)

    async def _pass_on(self, body: "_Body", scope: Scope, send: Send) -> None:
        started = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if body.refused and not started:
                return
            started = True
            await send(message)

        with contextlib.suppress(_RefusedError):
            await self.app(scope, body.receive, send_unless_refused)
        if body.refused and not started:
            too_large = self._too_large(scope, f"more than {self._max_bytes:,} bytes")
            answer = self._too_slow(scope) if body.refused == "slow" else too_large
            await self._refuse(answer, body, scope, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """What is known before anything has arrived."""
        claimed = Headers(scope=scope).get("content-length", "0")
        if claimed.isdecimal() and int(claimed) > self._max_bytes:
            return self._too_large(scope, f"{int(claimed):,} bytes")
        if _has_body(scope) and len(self._arriving) >= self._max_concurrent:
            return self._too_many(scope)
        return None

    async def _refuse(self, answer: Response, body: "_Body", scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": answer.status_code}
        await send({**start, "headers": [*answer.raw_headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
        if body.refused != "slow" and "expect" not in Headers(scope=scope):
            await body.drain(_DRAIN_FACTOR * self._max_bytes)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _too_large(self, scope: Scope, found: str) -> Response:
        return _answer(
            BODY_TOO_LARGE,
            f"The request body has {found}; the limit is {self._max_bytes:,}. "
            "Resize or compress the image.",
            scope,
        )

    def _too_slow(self, scope: Scope) -> Response:
        return _answer(
            BODY_TOO_SLOW,
            f"The request body was not complete after {self._timeout_s:g} s, which is the limit. "
            "Send a smaller image or use a faster connection.",
            scope,
        )

    def _too_many(self, scope: Scope) -> Response:
        return _answer(
            OVERLOADED,
            f"{self._max_concurrent} uploads are arriving, which is the limit. Try again in a "
            "second, or raise KINLENS_MAX_CONCURRENT_UPLOADS.",
            scope,
        )


class _Body:
    """Counts and times what is received; it is one of `arriving` until it is complete."""

    def __init__(
        self, receive: Receive, max_bytes: int, timeout_s: float, arriving: set["_Body"]
    ) -> None:
        self.refused = ""
        self._arriving = arriving
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refused = "slow"
            raise _RefusedError from None
        self._bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._complete:
            self._arriving.discard(self)
        if self._bytes > self._max_bytes:
            self.refused = "large"
            raise _RefusedError
        return message

    async def drain(self, max_bytes: int) -> None:
        """Read on and forget, within bounds."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self._complete and self._bytes <= max_bytes:
                    message = await self._receive()
                    self._bytes += len(message.get("body", b""))
                    self._complete = not message.get("more_body", False)
        except TimeoutError:
            return


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _answer(kind: Kind, detail: str, scope: Scope) -> Response:
    return problem(kind, detail, request_id=request_id_of(scope), instance=scope["path"])
