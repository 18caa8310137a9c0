"""Bodies of requests: let in within limits, read as forms or JSON, and named where they are wrong.

socket ─► BodyLimit (bytes by route, bytes in all, seconds) ─► forms, read_model ─► route
             └─ refuse: 413, 408, 503, while the rest of the body is thrown away
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Protocol, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens.embedder.errors import InvalidParameterError
from kinlens.service.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    CLIENT_GONE,
    OVERLOADED,
    fault_text,
    path_of,
    problem,
    request_id_of,
)

BodyKind = Literal["plain", "keys", "picture", "image", "batch"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

FORM_BYTES = 64 * 2**10
"""Room beside the images for the other parts of a form and its boundaries."""

JSON = "application/json"
MAX_MARKS = 100_000
"""Commas and opening brackets in one JSON text: what it can hold of values, at most."""

INLINE_BYTES = 4 * 2**10
"""So short a text is read on the event loop, but for a filter; a longer one in a thread."""

_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # read where it holds up all other requests
_DRAIN_S = 5.0
_DRAIN_FACTOR = 4
_MARKS = (b",", b"[", b"{")
_STEP = 2**20  # a look at so much holds up other threads for a millisecond or two
_SHOWN = 80
_MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """`image_bytes` for one file, `batch_bytes` for what may hold several images.

    Both get 64 KiB more for what is around the images. A list of keys or changes has at most
    1 MiB, everything else 16 KiB.
    """

    image_bytes: int
    batch_bytes: int

    def of(self, kind: BodyKind, media_type: str) -> int:
        """The limit in bytes for the body of a request; a search with JSON may hold a batch."""
        is_json = media_type == JSON or media_type.endswith("+json")
        if kind == "batch" or (kind == "image" and is_json):
            return self.batch_bytes + FORM_BYTES
        if kind == "image" or (kind == "picture" and not is_json):
            return self.image_bytes + FORM_BYTES
        plain = _KEYS_BYTES if kind == "keys" else _PLAIN_BYTES
        return min(plain, self.image_bytes + FORM_BYTES)

    @property
    def largest(self) -> int:
        """The limit of the widest route."""
        return max(self.image_bytes, self.batch_bytes) + FORM_BYTES


class HeldBytes:
    """Bytes of all bodies that are arriving or whose requests are being answered.

    Only what has arrived counts: a client that announces much and sends little keeps nobody out.
    Above `limit` the body that has been arriving longest gives way, so one that is held back at
    its last byte keeps nobody out either.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.arriving: dict[_Body, None] = {}  # in the order in which they began

    def take(self, body: "_Body", more: int) -> None:
        """Count `more` bytes of `body`, or refuse it and those that began before it."""
        self.arriving.setdefault(body)
        while self.count + more > self.limit and not body.refusal:
            next(iter(self.arriving)).give_way()
        if not body.refusal:
            self.count += more


class _RefusedError(Exception):
    """Ends the reading of a body that was refused."""


class BodyLimit:
    """Refuses a body above the bound of its route (413), or not complete after `timeout_s` (408),
    or too much together with the bodies of other requests: above `max_held_bytes` (503).
    """

    def __init__(
        self, app: ASGIApp, *, bounds: Bounds, timeout_s: float, max_held_bytes: int
    ) -> None:
        self.app = app
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._held = HeldBytes(max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        max_bytes = self._bounds.of(scope["state"]["route"].rule.body, media_type_of(scope))
        claimed = _claimed_bytes(scope)
        body = _Body(receive, max_bytes, self._timeout_s, self._held)
        if claimed is not None and claimed > max_bytes:
            body.refusal = "large"
        started = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if body.refusal and not started:
                return
            started = True
            await send(message)

        try:
            if not body.refusal:
                with contextlib.suppress(_RefusedError):
                    await self.app(scope, body.receive, send_unless_refused)
        except asyncio.CancelledError:
            if body.complete or started:
                raise
            body.refusal = "ending"  # the service stops and waits no longer for this body
        finally:
            body.release()
        if body.refusal and not started:
            drain_bytes = -1 if body.refusal in ("ending", "gone") else _DRAIN_FACTOR * max_bytes
            answer = self._answer(body, scope, claimed)
            await refuse(answer, scope, body.drained, send, drain_bytes=drain_bytes)

    def _answer(self, body: "_Body", scope: Scope, claimed: int | None) -> Response:
        is_told = claimed is not None and claimed > body.max_bytes
        found = f"{claimed:,} bytes" if is_told else f"more than {body.max_bytes:,} bytes"
        kind, text = {
            "large": (
                BODY_TOO_LARGE,
                f"The request body has {found}; the limit is {body.max_bytes:,}. Resize or "
                "compress the image.",
            ),
            "slow": (
                BODY_TOO_SLOW,
                f"The request body was not complete after {self._timeout_s:g} s, which is the "
                "limit. Send a smaller image or use a faster connection.",
            ),
            "crowded": (
                OVERLOADED,
                f"The bodies of all requests hold more than {self._held.limit:,} bytes, which is "
                "the limit. Try again in a second, or raise KINLENS_MAX_HELD_BYTES.",
            ),
            "ending": (OVERLOADED, "The service is stopping. Try again in a second."),
            "gone": (CLIENT_GONE, "The client left before its body was complete."),
        }[body.refusal]
        return problem(kind, text, request_id=request_id_of(scope), instance=scope["path"])


class _Body:
    """Counts and times what is received, which is held until `release`.

    `refusal` is why it is refused: large, slow, crowded, ending or gone; empty while it is not.
    """

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, held: HeldBytes) -> None:
        self.refusal = ""
        self.complete = False
        self.max_bytes = max_bytes
        self._held = held
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout: asyncio.Timeout | None = None
        self._bytes = 0

    async def receive(self) -> Message:
        if self.refusal:
            raise _RefusedError
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            if not self.refusal:  # it may have given way
                self.refusal = "slow"
            raise _RefusedError from None
        finally:
            self._timeout = None
        self._count(message)
        if self.refusal:
            raise _RefusedError
        return message

    async def drained(self) -> Message:
        """The next message, whatever the limits say."""
        if self.complete:
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._receive()
        self.complete = not message.get("more_body", False)
        return message

    def give_way(self) -> None:
        """End the reading now, for the sake of other bodies."""
        self.refusal = "crowded"
        self.release()
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Nothing of the body is in use any more."""
        self._held.arriving.pop(self, None)
        self._held.count -= self._bytes
        self._bytes = 0

    def _count(self, message: Message) -> None:
        self.complete = not message.get("more_body", False)
        count = len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            self.refusal = "gone"
        elif self._bytes + count > self.max_bytes:
            self.refusal = "large"
        elif not self.refusal:
            self._held.take(self, count)
        if not self.refusal:
            self._bytes += count
        if self.complete:
            self._held.arriving.pop(self, None)


async def refuse(
    answer: Response, scope: Scope, receive: Receive, send: Send, *, drain_bytes: int
) -> None:
    """Send `answer`; read on for up to `drain_bytes` of the body, below 0 none, and forget them.

    A client that is cut off while it sends would not see the answer. Afterwards the connection
    ends, since the rest of the body could not be told from a next request.
    """
    if not _has_body(scope):
        await answer(scope, receive, send)
        return
    headers = [*answer.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
    waits = "expect" in Headers(scope=scope)  # for 100 Continue, which never comes
    if not waits and answer.status_code != HTTPStatus.REQUEST_TIMEOUT:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await _drain(receive, drain_bytes)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive, max_bytes: int) -> None:
    seen = 0
    while seen <= max_bytes:
        message = await receive()
        seen += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _has_body(scope: Scope) -> bool:
    """Whether the request says that it has a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _claimed_bytes(scope: Scope) -> int | None:
    """What the request says its body has; None if it does not."""
    claimed = Headers(scope=scope).get("content-length")
    return int(claimed) if claimed is not None and claimed.isdecimal() else None


def media_type_of(request: Request | Scope) -> str:
    """The content type without its parameters, in small letters."""
    headers = request.headers if isinstance(request, Request) else Headers(scope=request)
    return headers.get("content-type", "").partition(";")[0].strip().lower()


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


class Connection:
    """A connection, whose requests are answered one after another; the server calls `end` when the
    client has gone.
    """

    def __init__(self) -> None:
        self.is_gone = False
        self._task: asyncio.Task[Any] | None = None

    def end(self) -> None:
        """Cancel what is done for the client."""
        self.is_gone = True
        if self._task is not None:
            self._task.cancel()

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the task of the request until it ends or the client goes.

        Raises: ClientGoneError, whatever `work` raises.
        """
        self._task = task = asyncio.current_task()
        assert task is not None
        try:
            if self.is_gone:
                task.cancel()
            return await work
        except asyncio.CancelledError:
            if self.is_gone and not task.uncancel():
                raise ClientGoneError from None
            raise
        finally:
            self._task = None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it ends or the client goes, as far as the server tells that.

    Raises: ClientGoneError, whatever `work` raises.
    """
    connection: Connection = request.scope["state"].get("connection") or Connection()
    return await connection.keep(work)


def parse_json(body: bytes) -> Any:
    """The value of a JSON text, without broken Unicode, NaN and infinity.

    Raises: ValueError for what is no JSON or too deep, InvalidParameterError above `MAX_MARKS`.
    """
    count = 0
    for start in range(0, len(body), _STEP):
        count += sum(body.count(mark, start, start + _STEP) for mark in _MARKS)
        if count > MAX_MARKS:
            raise InvalidParameterError(
                f"The JSON has more than {MAX_MARKS:,} commas and opening brackets. Send less at "
                "once."
            )
    return from_json(body, allow_inf_nan=False)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises: HTTPException (400), InvalidParameterError."""
    try:
        payload = parse_json(body)
    except ValueError as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}. Send an object.") from error
    if not isinstance(payload, dict):
        raise HTTPException(400, "The body is JSON, but no object. Send {…}.")
    return payload


class Threads(Protocol):
    """What runs calls in a named pool of threads, within the time limit of a request."""

    async def read(self, what: str, work: Callable[[], T], pool: str) -> T:
        """Raises: DeadlineExceededError, OverloadedError, what `work` raises."""


async def off_loop(threads: Threads, work: Callable[[], T], *, short: bool) -> T:
    """What `work` makes of a body, which runs in a thread unless it is `short`.

    Raises: DeadlineExceededError, OverloadedError, what `work` raises.
    """
    return work() if short else await threads.read("the request", work, "body")


async def read_model(request: Request, model: type[M]) -> M:
    """The body of a request as a model.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    kind = media_type_of(request)
    if kind != JSON:
        raise HTTPException(415, f"Content-Type = {kind[:_SHOWN]!r} is not read here; send {JSON}.")
    body = await request.body()
    threads: Threads = request.app.state.runtime
    return await off_loop(
        threads, lambda: checked(model, parse_object(body), None), short=len(body) <= INLINE_BYTES
    )


def body_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of a body that `read_model` reads; the model must have no models inside."""
    content = {JSON: {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def checked(model: type[M], value: Any, context: object) -> M:
    """`value` as a model. Raises: RequestValidationError."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise as_faults(error) from None


def as_faults(error: ValidationError, name: str = "") -> RequestValidationError:
    """What pydantic found, about parameter `name` or those that it names itself."""
    found = error.errors(include_url=False)
    return RequestValidationError([_readable(each, name) for each in found[:_MAX_FAULTS]])


def _readable(each: ErrorDetails, name: str) -> dict[str, Any]:
    name = name or path_of(each["loc"]) or "request"
    return {"type": "out_of_range", "loc": (name,), "msg": fault_text(each, name)}


def fault(name: str, message: str) -> RequestValidationError:
    """One parameter that does not fit, and what to do."""
    return RequestValidationError([{"type": "out_of_range", "loc": (name,), "msg": message}])
