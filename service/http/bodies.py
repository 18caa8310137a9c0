"""Request bodies: limits of size and time, parsing as forms or JSON, and messages for faults.

server ─► _Source (gzip, byte order mark) ─► BodyLimit (bytes per route, total bytes, seconds)
    ─► forms, read_model ─► route
BodyLimit refuses with 413, 408, 415, 503, while the rest of the body is discarded.
"""

import asyncio
import codecs
import contextlib
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Protocol, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.service.problems import (
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    CLIENT_DISCONNECTED,
    HEAD_TOO_LARGE,
    OVERLOADED,
    UNSUPPORTED_MEDIA,
    ClientDisconnectedError,
    ProblemType,
    problem,
    request_id_of,
)
from kinlens.service.settings import Settings

BodyKind = Literal["plain", "keys", "form_image", "image", "batch"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

FORM_BYTES = 64 * 2**10
"""Allowance for the other parts and the boundaries of a form, in addition to its images."""

HEAD_BYTES = 16 * 2**10
"""Limit of the head of a request."""

JSON = "application/json"
MAX_MARKS = 100_000
"""Maximum number of commas and opening brackets in a JSON text; it bounds the number of values."""

INLINE_BYTES = 4 * 2**10
"""Texts up to this length, except filters, are parsed on the event loop, longer ones in a thread.
"""

_VERSIONS = frozenset({"1.0", "1.1", "2", "3"})
_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # small, since it is parsed on the event loop
_DRAIN_S = 5.0
_DRAIN_FACTOR = 4
_CODINGS = ("gzip", "deflate")
_INFLATE_STEP = 2**18  # bytes inflated at once on the event loop; takes about 1 ms
_GZIP_OR_ZLIB, _RAW = 47, -15
_FIRST_NIBBLES = (8, 15)  # of zlib and gzip; deflate without a header never begins so
_MARKS = (b",", b"[", b"{")
_STEP = 2**20  # bytes counted at once; holds the GIL for 1 to 2 ms
_SHOWN = 80
_MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Size limits of bodies: `image_bytes` for one image, `batch_bytes` for several.

    Both get 64 KiB more for the rest of the form. A list of keys or changes is limited to 1 MiB,
    all other bodies to 16 KiB.
    """

    image_bytes: int
    batch_bytes: int

    def of(self, kind: BodyKind, media_type: str) -> int:
        """The limit in bytes for a body; a search with JSON can contain several images."""
        is_json = media_type == JSON or media_type.endswith("+json")
        if kind == "batch" or (kind == "image" and is_json):
            return self.batch_bytes + FORM_BYTES
        if kind == "image" or (kind == "form_image" and not is_json):
            return self.image_bytes + FORM_BYTES
        plain = _KEYS_BYTES if kind == "keys" else _PLAIN_BYTES
        return min(plain, self.image_bytes + FORM_BYTES)

    @property
    def largest(self) -> int:
        """The largest limit of any route."""
        return max(self.image_bytes, self.batch_bytes) + FORM_BYTES


def bounds_of(settings: Settings) -> Bounds:
    """The limits of request bodies."""
    return Bounds(settings.max_upload_bytes, settings.max_batch_bytes)


class BufferedBytes:
    """Total bytes of the request bodies in memory, with a limit.

    Only received bytes count, so a client cannot block others with a large Content-Length.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0


class _RefusedError(ClientDisconnectedError):
    """Stops reading a body, which is refused for `reason`; `BodyLimit` answers, not the route."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Source:
    """The messages of one body, inflated, and without the byte order mark of a JSON text.

    Inflated bytes come in small steps, so a small body that inflates to a large one blocks neither
    the event loop nor memory before a limit refuses it. `is_read` is true once all has arrived.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.is_read = False
        self._receive = receive
        self._coding = _coding(scope)
        self._inflater: Any = None  # zlib does not export its type
        self._pending = b""
        media_type = media_type_of(scope)
        self._is_start_of_json = media_type == JSON or media_type.endswith("+json")

    async def raw(self) -> Message:
        """The next message as it was sent."""
        message = await self._receive()
        self.is_read = not message.get("more_body", False)
        return message

    async def receive(self) -> Message:
        """The next message. Raises: _RefusedError."""
        message = await self._inflated()
        while self._is_start_of_json and message.get("more_body") and len(message["body"]) < 3:
            more = await self._inflated()
            message = {**more, "body": message["body"] + more.get("body", b"")}
        if self._is_start_of_json:
            self._is_start_of_json = False
            start = message.get("body", b"")
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
                raise _RefusedError("no UTF-8")
            message = {**message, "body": start.removeprefix(codecs.BOM_UTF8)}
        return message

    async def _inflated(self) -> Message:
        if not self._coding:
            return await self.raw()
        if self._pending or self.is_read:
            await asyncio.sleep(0)  # lets other requests run
        else:
            message = await self.raw()
            if message["type"] != "http.request":
                return message
            self._pending = message.get("body", b"")
        if self._inflater is None or self._inflater.eof:
            if self._inflater is not None:
                self._pending = self._pending.lstrip(b"\0")  # padding after a member of a gzip file
            elif self.is_read and not self._pending:
                raise _RefusedError("damaged")
            if not self._pending:
                return {"type": "http.request", "body": b"", "more_body": not self.is_read}
            is_raw = self._coding == "deflate" and self._pending[0] % 16 not in _FIRST_NIBBLES
            self._inflater = zlib.decompressobj(_RAW if is_raw else _GZIP_OR_ZLIB)
        try:
            body = self._inflater.decompress(self._pending, _INFLATE_STEP)
        except zlib.error:
            raise _RefusedError("damaged") from None
        self._pending = self._inflater.unconsumed_tail or self._inflater.unused_data
        more = not self.is_read or bool(self._pending) or len(body) == _INFLATE_STEP
        if not more and not self._inflater.eof:
            raise _RefusedError("damaged")
        return {"type": "http.request", "body": body, "more_body": more}


class BodyLimit:
    """Refuses a body that is too large for its route (413), that is incomplete after `timeout_s`
    (408), or that raises the total of all bodies above `max_total_bytes` (503).
    """

    def __init__(
        self, app: ASGIApp, *, bounds: Bounds, timeout_s: float, max_total_bytes: int
    ) -> None:
        self.app = app
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._buffered = BufferedBytes(max_total_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        claimed = _claimed_bytes(scope)
        body = _Body(_Source(scope, receive), self._timeout_s, self._buffered)
        send_early = _draining(scope, body.drained, send, self._bounds.largest)
        started = is_early = False

        async def receive_limited() -> Message:
            if not body.max_bytes:  # the route has admitted its caller, and begins to read
                kind = scope["state"]["route"].rule.body
                body.max_bytes = self._bounds.of(kind, media_type_of(scope))
                body.refusal = _refusal_before_body(scope, claimed or 0, body.max_bytes)
            return await body.receive()

        async def send_unless_refused(message: Message) -> None:
            nonlocal started, is_early
            if body.refusal and not started:
                return
            if not started:
                started, is_early = True, not body.complete
            await (send_early if is_early else send)(message)

        try:
            with contextlib.suppress(_RefusedError):
                await self.app(scope, receive_limited, send_unless_refused)
        except asyncio.CancelledError:
            if body.complete or started:
                raise
            body.refusal = "ending"  # the service stops before the body is complete
        finally:
            body.release()
        if body.refusal and not started:
            is_lost = body.refusal in ("ending", "disconnected")
            drain_bytes = -1 if is_lost else _DRAIN_FACTOR * body.max_bytes
            answer = self._answer(body, scope, claimed)
            await refuse(answer, scope, body.drained, send, drain_bytes=drain_bytes)

    def _answer(self, body: "_Body", scope: Scope, claimed: int | None) -> Response:
        is_declared = claimed is not None and claimed > body.max_bytes
        found = f"{claimed:,} bytes" if is_declared else f"more than {body.max_bytes:,} bytes"
        if _coding(scope) and not is_declared:
            found += " after decompression"
        media_type = media_type_of(scope)
        is_text = media_type == JSON or media_type.endswith("+json")
        cure = "Split the request" if is_text else "Resize or compress the image"
        kind, text = {
            "large": (
                BODY_TOO_LARGE,
                f"The request body has {found}; the limit is {body.max_bytes:,}. {cure}.",
            ),
            "slow": (
                BODY_TOO_SLOW,
                f"The request body was not complete after {self._timeout_s:g} s, which is the "
                "limit. Send a smaller image or use a faster connection.",
            ),
            "full": (
                OVERLOADED,
                f"The bodies of all requests use more than {self._buffered.limit:,} bytes, which "
                "is the limit. Try again in a second, or raise KINLENS_MAX_HELD_BYTES.",
            ),
            "ending": (OVERLOADED, "The service is stopping. Try again in a second."),
            "disconnected": (
                CLIENT_DISCONNECTED,
                "The client disconnected before its body was complete.",
            ),
            "coding": (
                UNSUPPORTED_MEDIA,
                f"Content-Encoding = {_coding(scope)[:_SHOWN]!r} is not supported; send "
                f"{' or '.join(_CODINGS)}, or the body as it is.",
            ),
            "damaged": (
                BAD_REQUEST,
                f"The body is not complete {_coding(scope)} data. Compress it again, or send it "
                "without Content-Encoding.",
            ),
            "no UTF-8": (
                UNSUPPORTED_MEDIA,
                "The JSON is encoded as UTF-16 or UTF-32. Send it as UTF-8.",
            ),
        }[body.refusal]
        headers = {"Accept-Encoding": ", ".join(_CODINGS)} if body.refusal == "coding" else {}
        where = {"request_id": request_id_of(scope), "instance": scope["path"]}
        return problem(kind, text, headers=headers, **where)


class _Body:
    """Receives one body, counts its bytes until `release`, and enforces its limits.

    `refusal` is the reason of a refusal, a key of `BodyLimit._answer`; else empty.
    """

    def __init__(self, source: _Source, timeout_s: float, buffered: BufferedBytes) -> None:
        self.refusal = ""
        self.complete = False
        self.max_bytes = 0
        self._buffered = buffered
        self._source = source
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0

    async def receive(self) -> Message:
        if self.complete and not self.refusal:
            return await self._source.raw()
        try:
            if self.refusal:
                raise _RefusedError(self.refusal)
            async with asyncio.timeout_at(self._deadline):
                message = await self._source.receive()
        except TimeoutError:
            self.refusal = "slow"
            raise _RefusedError(self.refusal) from None
        except _RefusedError as error:
            self.refusal = error.reason
            raise
        self._count(message)
        if self.refusal:
            raise _RefusedError(self.refusal)
        return message

    async def drained(self) -> Message:
        """The next message, without limits."""
        if self._source.is_read:
            return {"type": "http.request", "body": b"", "more_body": False}
        return await self._source.raw()

    def release(self) -> None:
        """Stop counting the body: it is no longer in memory."""
        self._buffered.count -= self._bytes
        self._bytes = 0

    def _count(self, message: Message) -> None:
        self.complete = not message.get("more_body", False)
        count = len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            self.refusal = "disconnected"
        elif self._bytes + count > self.max_bytes:
            self.refusal = "large"
        elif self._buffered.count + count > self._buffered.limit:
            self.refusal = "full"
        else:
            self._bytes += count
            self._buffered.count += count


async def refuse(
    answer: Response, scope: Scope, receive: Receive, send: Send, *, drain_bytes: int
) -> None:
    """Send `answer` without reading the body, of which up to `drain_bytes` are discarded."""
    await answer(
        scope, receive, _draining(scope, receive, send, drain_bytes) if _has_body(scope) else send
    )


def _draining(scope: Scope, receive: Receive, send: Send, drain_bytes: int) -> Send:
    """The `send` of an answer before the end of the body, of which up to `drain_bytes` are read
    and discarded (none if negative).

    Without reading on, a client that is still sending would not see the answer. The connection is
    then closed, since the rest of the body would look like the next request.
    """
    status = 0

    async def send_and_drain(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            MutableHeaders(scope=message)["Connection"] = "close"
        elif not message.get("more_body", False):
            await send({**message, "more_body": True})
            if not _waits(scope) and status != HTTPStatus.REQUEST_TIMEOUT:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_S):
                        await _drain(receive, drain_bytes)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return send_and_drain


async def _drain(receive: Receive, max_bytes: int) -> None:
    seen = 0
    while seen <= max_bytes:
        message = await receive()
        seen += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _has_body(scope: Scope) -> bool:
    """Whether the headers of the request declare a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def refusal_of_head(scope: Scope) -> tuple[ProblemType, str] | None:
    """Why the head of a request is refused, or None.

    A server may accept a larger head that arrives at once, and a body with two lengths, which a
    proxy in front of it could read as two requests.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["path"]) + len(scope["query_string"])
    if size + sum(len(name) + len(value) + 4 for name, value in headers) > HEAD_BYTES:
        return (
            HEAD_TOO_LARGE,
            f"The head of the request has more than {HEAD_BYTES // 2**10} KiB. Shorten it.",
        )
    version = scope["http_version"]
    if version not in _VERSIONS:
        return BAD_REQUEST, f"HTTP/{version[:_SHOWN]} is not supported. Send HTTP/1.1."
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    has_length = any(name == b"content-length" for name, _ in headers)
    if codings and (has_length or codings != [b"chunked"] or version == "1.0"):
        return BAD_REQUEST, "Transfer-Encoding must be chunked, without a length, in HTTP/1.1."
    return None


def _refusal_before_body(scope: Scope, claimed: int, max_bytes: int) -> str:
    """The reason to refuse a body before it is read; empty without one."""
    if _coding(scope) not in ("", *_CODINGS):
        return "coding"
    return "large" if claimed > max_bytes else ""


def _coding(scope: Scope) -> str:
    """The Content-Encoding of a body; empty if it is sent as it is."""
    sent = ",".join(Headers(scope=scope).getlist("content-encoding")).lower().split(",")
    codings = [{"identity": "", "x-gzip": "gzip"}.get(each, each) for each in map(str.strip, sent)]
    return ", ".join(filter(None, codings))


def _waits(scope: Scope) -> bool:
    """Whether the client waits for 100 Continue before it sends its body."""
    return Headers(scope=scope).get("expect", "").lower() == "100-continue"


def _claimed_bytes(scope: Scope) -> int | None:
    """The Content-Length of the request; None without one."""
    claimed = Headers(scope=scope).get("content-length")
    return int(claimed) if claimed is not None and claimed.isdecimal() else None


def media_type_of(request: Request | Scope) -> str:
    """The content type without its parameters, in lowercase."""
    headers = request.headers if isinstance(request, Request) else Headers(scope=request)
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, for a request whose body was read; cancel it if the client disconnects.

    Raises: ClientDisconnectedError, any error of `work`.
    """
    working = asyncio.current_task()
    assert working is not None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected and not working.uncancel():
            raise ClientDisconnectedError from None
        raise
    finally:
        watching.cancel()


def parse_json(body: bytes) -> Any:
    """The value of a JSON text. Invalid Unicode, NaN and infinity are refused.

    Raises: ValueError if it is invalid or nested too deeply, InvalidParameterError above
        `MAX_MARKS`.
    """
    count = 0
    for start in range(0, len(body), _STEP):
        count += sum(body.count(mark, start, start + _STEP) for mark in _MARKS)
        if count > MAX_MARKS:
            raise InvalidParameterError(
                f"The JSON has more than {MAX_MARKS:,} commas and opening brackets, which is the "
                "limit. Split the request."
            )
    return from_json(body, allow_inf_nan=False)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises: HTTPException (400), InvalidParameterError."""
    try:
        payload = parse_json(body)
    except ValueError as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}. Send an object.") from error
    if not isinstance(payload, dict):
        raise HTTPException(400, "The body must be a JSON object. Send {…}.")
    return payload


class Threads(Protocol):
    """Runs calls in a named pool of threads, within the time limit of a request."""

    async def read(self, what: str, work: Callable[[], T], pool: str) -> T:
        """Raises: DeadlineExceededError, OverloadedError, any error of `work`."""


async def off_loop(threads: Threads, work: Callable[[], T], *, short: bool) -> T:
    """Run `work`, the parsing of a body, in a thread, or directly if the body is `short`.

    Raises: DeadlineExceededError, OverloadedError, any error of `work`.
    """
    return work() if short else await threads.read("the request", work, "body")


async def read_model(request: Request, model: type[M]) -> M:
    """The body of a request as a model.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    kind = media_type_of(request)
    if kind != JSON:
        raise HTTPException(
            415, f"Content-Type = {kind[:_SHOWN]!r} is not supported here; send {JSON}."
        )
    body = await request.body()
    threads: Threads = request.app.state.runtime
    return await off_loop(
        threads, lambda: checked(model, parse_object(body)), short=len(body) <= INLINE_BYTES
    )


def body_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of a body for `read_model`; the model must not contain other models."""
    content = {JSON: {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def checked(
    model: type[M],
    value: Any,
    named: Callable[[Sequence[str | int]], str] = path_of,
    *,
    strict: bool = False,
) -> M:
    """Validate `value` as a model; `strict` refuses texts for numbers and booleans, which JSON has.

    Raises: RequestValidationError.
    """
    try:
        return model.model_validate(value, strict=strict)
    except ValidationError as error:
        raise as_faults(error, named) from None


def as_faults(
    error: ValidationError, named: Callable[[Sequence[str | int]], str] = path_of
) -> RequestValidationError:
    """Convert a pydantic error; `named` is the name of a parameter for its location."""
    found = error.errors(include_url=False)
    return RequestValidationError([_readable(each, named) for each in found[:_MAX_FAULTS]])


def _readable(each: ErrorDetails, named: Callable[[Sequence[str | int]], str]) -> dict[str, Any]:
    name = named(each["loc"]) or "request"
    return {"type": "out_of_range", "loc": (name,), "msg": fault_text(each, name)}


def fault(name: str, message: str) -> RequestValidationError:
    """The error for one invalid parameter; `message` includes what to do."""
    return RequestValidationError([{"type": "out_of_range", "loc": (name,), "msg": message}])
