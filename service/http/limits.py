"""Caps what request bodies may weigh, how long they may take, and how many arrive at a time."""

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.address import address_of
from service.http.bounds import Bounds
from service.http.places import Places
from service.http.refusal import has_body, refuse
from service.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    OVERLOADED,
    Kind,
    problem,
    request_id_of,
)

_DRAIN_FACTOR = 4


class _RefusedError(Exception):
    """Ends the reading of a body that was refused."""


class BodyLimit:
    """Refuses a body above the bound of its route (413), or not complete after `timeout_s` (408).

    While `max_concurrent` bodies are arriving, a further one is refused (503), or takes the place
    of one whose address holds more of them. A body that may hold several images counts as several.
    A refused body is read on for a moment and thrown away, since a client that is cut off while it
    sends would not see the answer.
    """

    def __init__(
        self, app: ASGIApp, *, bounds: Bounds, timeout_s: float, max_concurrent: int
    ) -> None:
        self.app = app
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._places = Places(max_concurrent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(scope):
            await self.app(scope, receive, send)
            return
        max_bytes = self._bounds.of(scope)
        claimed = _claimed_bytes(scope)
        body = _Body(receive, max_bytes, self._timeout_s, self._places)
        body.address = address_of(scope)
        body.places = self._bounds.places(max_bytes if claimed is None else claimed)
        if claimed is not None and claimed > max_bytes:
            answer = self._too_large(scope, f"{claimed:,} bytes", max_bytes)
        elif not self._places.enter(body):
            answer = self._too_many(scope)
        else:
            await self._pass_on(body, scope, send)
            return
        await refuse(answer, scope, body.drained, send, drain_bytes=_DRAIN_FACTOR * max_bytes)

    async def _pass_on(self, body: "_Body", scope: Scope, send: Send) -> None:
        started = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if body.refused and not started:
                return
            started = True
            await send(message)

        try:
            with contextlib.suppress(_RefusedError):
                await self.app(scope, body.receive, send_unless_refused)
        except asyncio.CancelledError:
            if body.complete or started:
                raise
            body.refused = "ending"  # the service stops and waits no longer for this body
        finally:
            self._places.leave(body)
        if body.refused and not started:
            ending = body.refused == "ending"
            drain_bytes = -1 if ending else _DRAIN_FACTOR * body.max_bytes
            answer = self._answer_to(body, scope)
            await refuse(answer, scope, body.drained, send, drain_bytes=drain_bytes)

    def _answer_to(self, body: "_Body", scope: Scope) -> Response:
        if body.refused == "slow":
            return self._too_slow(scope)
        if body.refused == "crowded":
            return self._too_many(scope)
        if body.refused == "ending":
            return _answer(OVERLOADED, "The service is stopping. Try again in a second.", scope)
        return self._too_large(scope, f"more than {body.max_bytes:,} bytes", body.max_bytes)

    def _too_large(self, scope: Scope, found: str, max_bytes: int) -> Response:
        return _answer(
            BODY_TOO_LARGE,
            f"The request body has {found}; the limit is {max_bytes:,}. "
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
            f"{self._places.count} uploads are arriving, which is the limit. Try again in a "
            "second, or raise KINLENS_MAX_CONCURRENT_UPLOADS.",
            scope,
        )


class _Body:
    """Counts and times what is received; it holds its places until it is complete."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, places: Places) -> None:
        self.address = ""
        self.places = 1
        self.refused = ""
        self.max_bytes = max_bytes
        self._held = places
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout: asyncio.Timeout | None = None
        self._bytes = 0
        self.complete = False

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        if self.refused:
            raise _RefusedError
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            if not self.refused:  # it may have been sent away
                self.refused = "slow"
            raise _RefusedError from None
        finally:
            self._timeout = None
        self._count(message)
        if self._bytes > self.max_bytes:
            self.refused = "large"
            raise _RefusedError
        return message

    async def drained(self) -> Message:
        """The next message, whatever the limits say."""
        if self.complete:
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._receive()
        self._count(message)
        return message

    def send_away(self) -> None:
        """End the reading now, since the places of this body went to another address."""
        if not self.complete:
            self.refused = "crowded"
            if self._timeout is not None:
                self._timeout.reschedule(asyncio.get_running_loop().time())

    def _count(self, message: Message) -> None:
        self._bytes += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self.complete:
            self._held.leave(self)


def _claimed_bytes(scope: Scope) -> int | None:
    """What the request says its body has; None if it does not."""
    claimed = Headers(scope=scope).get("content-length")
    return int(claimed) if claimed is not None and claimed.isdecimal() else None


def _answer(kind: Kind, detail: str, scope: Scope) -> Response:
    return problem(kind, detail, request_id=request_id_of(scope), instance=scope["path"])
