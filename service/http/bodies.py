"""Request bodies: limits of size and time, parsing as forms or JSON, and messages for faults.

server ─► BodyLimit (gzip, byte order mark; bytes per route, total bytes, seconds) ─► route
BodyLimit refuses with 413, 408, 415, 503, while the rest of the body is discarded.
"""

import asyncio
import codecs
import contextlib
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NoReturn, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.service import problems
from kinlens.service.problems import ProblemType, RefusedError
from kinlens.service.runtime import Runtime
from kinlens.service.settings import FORM_BYTES, Settings

BodyKind = Literal["plain", "keys", "form_image", "image", "batch"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

HEAD_BYTES = 16 * 2**10
"""Limit of the head of a request."""

JSON = "application/json"
FORM, RAW, IMAGE = "multipart/form-data", "application/octet-stream", "image/*"

MAX_MARKS = 100_000
"""Maximum number of commas and opening brackets in a JSON text; it bounds the number of values."""

INLINE_BYTES = 4 * 2**10
"""Texts up to this length, except filters, are parsed on the event loop, longer ones in a thread.
"""

_WITH_STREAMS = frozenset({"2", "3"})  # versions whose requests do not end with a connection
_VERSIONS = frozenset({"1.0", "1.1"}) | _WITH_STREAMS
_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # small, since it is parsed on the event loop
_DRAIN_S = 5.0
_WATCH_AFTER_S = 0.02
_CODINGS = ("gzip", "deflate")
_INFLATE_STEP = 2**18  # bytes inflated at once on the event loop; takes about 1 ms
_GZIP_OR_ZLIB, _RAW_DEFLATE = 47, -15
_FIRST_NIBBLES = (8, 15)  # of zlib and gzip; deflate without a header never begins so
_MARKS = (b",", b"[", b"{")
_STEP = 2**20  # bytes counted at once; holds the GIL for 1 to 2 ms
_SHOWN = 80
_MAX_FAULTS = 20


def _limit_of(settings: Settings, kind: BodyKind, *, is_json: bool) -> int:
    """The limit in bytes of a body; a search with JSON can contain several images."""
    if kind == "batch" or (kind == "image" and is_json):
        return settings.largest_body()
    image_bytes = settings.max_upload_bytes + FORM_BYTES
    if kind == "image" or (kind == "form_image" and not is_json):
        return image_bytes
    return min(_KEYS_BYTES if kind == "keys" else _PLAIN_BYTES, image_bytes)


@dataclass(slots=True)
class _Held:
    """Bytes of all request bodies in memory. Only received bytes count, so a client cannot block
    others with a large Content-Length.
    """

    limit: int
    count: int = 0


class BodyLimit:
    """Refuses a body that is too large for its route (413), that is incomplete after the body
    timeout (408), or that raises the total of all bodies above the limit (503).

    The route begins to read after it has admitted its caller, and answers with the refusal.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self.app = app
        self._settings = settings
        self._held = _Held(settings.held_bytes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        body = _Body(scope, receive, self._settings, self._held)
        try:
            await self.app(scope, body.receive, body.draining(send))
        finally:
            body.release()


class _Body:
    """One body: its messages, inflated and without the byte order mark of a JSON text, within its
    limits. Its bytes count until `release`.

    Inflated bytes come in small steps, so a small body that inflates to a large one blocks neither
    the event loop nor memory before a limit refuses it.
    """

    def __init__(self, scope: Scope, receive: Receive, settings: Settings, held: _Held) -> None:
        self._scope = scope
        self._receive = receive
        self._settings = settings
        self._held = held
        self._deadline = asyncio.get_running_loop().time() + settings.body_timeout_ms / 1e3
        self._max_bytes = 0
        self._bytes = 0
        self._has_arrived = self._is_complete = False  # at this server, at the route
        self._coding = _coding(scope)
        self._inflater: Any = None  # zlib does not export its type
        self._pending = b""
        media_type = media_type_of(scope)
        self._is_json = media_type == JSON or media_type.endswith("+json")
        self._is_at_start = True

    async def receive(self) -> Message:
        """The next message for the route. Raises: RefusedError."""
        if self._is_complete:
            return await self._raw()
        if not self._max_bytes:
            self._begin()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._unmarked()
        except TimeoutError:
            raise RefusedError(
                problems.BODY_TOO_SLOW,
                "The request body was not complete after "
                f"{self._settings.body_timeout_ms / 1e3:g} s, which is the limit. Send a smaller "
                "image or use a faster connection.",
            ) from None
        except asyncio.CancelledError:
            raise RefusedError(
                problems.OVERLOADED, "The service is stopping. Try again in a second."
            ) from None
        if message["type"] == "http.disconnect":
            raise RefusedError(
                problems.CLIENT_DISCONNECTED,
                "The client disconnected before its body was complete.",
            )
        self._count(len(message.get("body", b"")))
        self._is_complete = not message.get("more_body", False)
        return message

    def draining(self, send: Send) -> Send:
        """`send`, which discards the rest of the body during an answer that comes before its end.

        Without reading on, a client that is still sending would not see the answer. The connection
        is then closed, since the rest of the body would look like the next request.
        """
        is_early, is_drained = False, True

        async def send_and_drain(message: Message) -> None:
            nonlocal is_early, is_drained
            if message["type"] == "http.response.start" and not self._is_complete:
                is_early = True
                # A client that waits for 100 Continue sends nothing, and a slow one takes long.
                waits = header(self._scope, b"expect").lower() == "100-continue"
                is_drained = not waits and message["status"] != HTTPStatus.REQUEST_TIMEOUT
                if self._scope["http_version"] not in _WITH_STREAMS:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif is_early and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if is_drained:
                    await self._drain()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return send_and_drain

    def release(self) -> None:
        """Stop counting the body: it is no longer in memory."""
        self._held.count -= self._bytes
        self._bytes = 0

    def _begin(self) -> None:
        kind: BodyKind = self._scope["state"]["route"].rule.body
        self._max_bytes = _limit_of(self._settings, kind, is_json=self._is_json)
        if self._coding not in ("", *_CODINGS):
            raise RefusedError(
                problems.UNSUPPORTED_MEDIA,
                f"Content-Encoding = {self._coding[:_SHOWN]!r} is not supported; send "
                f"{' or '.join(_CODINGS)}, or the body as it is.",
                {"Accept-Encoding": ", ".join(_CODINGS)},
            )
        claimed = header(self._scope, b"content-length")
        if claimed.isdecimal() and int(claimed) > self._max_bytes:
            self._refuse_size(f"{int(claimed):,} bytes")

    def _count(self, size: int) -> None:
        if self._bytes + size > self._max_bytes:
            after = " after decompression" if self._coding else ""
            self._refuse_size(f"more than {self._max_bytes:,} bytes{after}")
        if self._held.count + size > self._held.limit:
            raise RefusedError(
                problems.OVERLOADED,
                f"The bodies of all requests use more than {self._held.limit:,} bytes, which is "
                "the limit. Try again in a second.",
            )
        self._bytes += size
        self._held.count += size

    def _refuse_size(self, size: str) -> NoReturn:
        cure = "Split the request" if self._is_json else "Resize or compress the image"
        raise RefusedError(
            problems.BODY_TOO_LARGE,
            f"The request body has {size}; the limit is {self._max_bytes:,}. {cure}.",
        )

    async def _unmarked(self) -> Message:
        message = await self._inflated()
        is_start, self._is_at_start = self._is_at_start and self._is_json, False
        while is_start and message.get("more_body") and len(message["body"]) < 3:
            more = await self._inflated()
            message = {**more, "body": message["body"] + more.get("body", b"")}
        if is_start:
            start = message.get("body", b"")
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
                raise RefusedError(
                    problems.UNSUPPORTED_MEDIA,
                    "The JSON is encoded as UTF-16 or UTF-32. Send it as UTF-8.",
                )
            message = {**message, "body": start.removeprefix(codecs.BOM_UTF8)}
        return message

    async def _inflated(self) -> Message:
        if not self._coding:
            return await self._raw()
        if self._pending or self._has_arrived:
            await asyncio.sleep(0)  # lets other requests run
        else:
            message = await self._raw()
            if message["type"] != "http.request":
                return message
            self._pending = message.get("body", b"")
        if self._inflater is None or self._inflater.eof:
            if self._inflater is not None:
                self._pending = self._pending.lstrip(b"\0")  # padding after a member of a gzip file
            elif self._has_arrived and not self._pending:
                raise self._damaged()
            if not self._pending:
                return {"type": "http.request", "body": b"", "more_body": not self._has_arrived}
            is_raw = self._coding == "deflate" and self._pending[0] % 16 not in _FIRST_NIBBLES
            self._inflater = zlib.decompressobj(_RAW_DEFLATE if is_raw else _GZIP_OR_ZLIB)
        try:
            body = self._inflater.decompress(self._pending, _INFLATE_STEP)
        except zlib.error:
            raise self._damaged() from None
        self._pending = self._inflater.unconsumed_tail or self._inflater.unused_data
        more = not self._has_arrived or bool(self._pending) or len(body) == _INFLATE_STEP
        if not more and not self._inflater.eof:
            raise self._damaged()
        return {"type": "http.request", "body": body, "more_body": more}

    def _damaged(self) -> RefusedError:
        return RefusedError(
            problems.BAD_REQUEST,
            f"The body is not complete {self._coding} data. Compress it again, or send it without "
            "Content-Encoding.",
        )

    async def _raw(self) -> Message:
        """The next message as it was sent."""
        message = await self._receive()
        self._has_arrived = not message.get("more_body", False)
        return message

    async def _drain(self) -> None:
        seen, most = 0, self._settings.largest_body()
        # A service that ends cancels this; the answer has been sent.
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._has_arrived and seen <= most:
                    seen += len((await self._raw()).get("body", b""))


def _has_body(scope: Scope) -> bool:
    """Whether the headers of the request declare a body; in HTTP/2 a body needs no header."""
    if scope["http_version"] in _WITH_STREAMS:
        return scope["method"] not in ("GET", "HEAD")
    names = [name for name, value in scope["headers"] if value != b"0"]
    return b"content-length" in names or b"transfer-encoding" in names


def refusal_of_head(scope: Scope) -> tuple[ProblemType, str] | None:
    """Why the head of a request is refused, or None.

    A server may accept a larger head that arrives at once, and a body with two lengths, which a
    proxy in front of it could read as two requests.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["path"]) + len(scope["query_string"])
    if size + sum([len(name) + len(value) + 4 for name, value in headers]) > HEAD_BYTES:
        return (
            problems.HEAD_TOO_LARGE,
            f"The head of the request has more than {HEAD_BYTES // 2**10} KiB. Shorten it.",
        )
    version = scope["http_version"]
    if version not in _VERSIONS:
        return problems.BAD_REQUEST, f"HTTP/{version[:_SHOWN]} is not supported. Send HTTP/1.1."
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    lengths = [value for name, value in headers if name == b"content-length"]
    if codings and (lengths or codings != [b"chunked"] or version == "1.0"):
        text = "Transfer-Encoding must be chunked, without a length, in HTTP/1.1."
        return problems.BAD_REQUEST, text
    return None


def _coding(scope: Scope) -> str:
    """The Content-Encoding of a body; empty if it is sent as it is."""
    if not header(scope, b"content-encoding"):
        return ""
    sent = ",".join(Headers(scope=scope).getlist("content-encoding")).lower().split(",")
    codings = [{"identity": "", "x-gzip": "gzip"}.get(each, each) for each in map(str.strip, sent)]
    return ", ".join(filter(None, codings))


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header; empty without it."""
    for sent, value in scope["headers"]:
        if sent == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def media_type_of(scope: Scope) -> str:
    """The content type without its parameters, in lowercase."""
    return header(scope, b"content-type").partition(";")[0].strip().lower()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, for a request whose body was read; cancel it if the client disconnects.

    Raises: RefusedError, any error of `work`.
    """
    working = asyncio.current_task()
    assert working is not None
    watching: asyncio.Task[None] | None = None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        working.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    # A task costs more than most answers from the cache.
    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected and not working.uncancel():
            raise RefusedError(
                problems.CLIENT_DISCONNECTED, "The client disconnected before its answer."
            ) from None
        raise
    finally:
        timer.cancel()
        if watching is not None:
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


async def read_body(request: Request, *kinds: str) -> tuple[bytes, str]:
    """The body of a request and which of the content types `kinds` it has.

    Raises: HTTPException (415), RefusedError.
    """
    body, sent = await _whole_body(request), media_type_of(request.scope)
    kind = IMAGE if sent.startswith("image/") else sent
    if kind not in kinds:
        text = f"Content-Type = {sent[:_SHOWN]!r} is not supported here; send {', '.join(kinds)}."
        raise HTTPException(415, text)
    return body, kind


async def _whole_body(request: Request) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """Run `work`, the parsing of a body, in a thread.

    Raises: DeadlineExceededError, OverloadedError, any error of `work`.
    """
    runtime: Runtime = request.app.state.runtime
    return await runtime.read("the request", work, "body")


async def read_model(request: Request, model: type[M]) -> M:
    """The JSON body of a request as a model.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    body, _ = await read_body(request, JSON)

    def read() -> M:
        return checked(model, parse_object(body))

    return read() if len(body) <= INLINE_BYTES else await off_loop(request, read)


def checked(
    model: type[M],
    value: Any,
    named: Callable[[Sequence[str | int]], str] = path_of,
    *,
    strict: bool = False,
) -> M:
    """Validate `value` as a model; `strict` refuses texts for numbers and booleans, which JSON has.
    `named` is the name of a parameter for its location.

    Raises: RequestValidationError.
    """
    try:
        return model.model_validate(value, strict=strict)
    except ValidationError as error:
        faults = []
        for entry in error.errors(include_url=False)[:_MAX_FAULTS]:
            name = named(entry["loc"]) or "request"
            faults.append(_fault(name, fault_text(entry, name)))
        raise RequestValidationError(faults) from None


def fault(name: str, message: str) -> RequestValidationError:
    """The error for one invalid parameter; `message` includes what to do."""
    return RequestValidationError([_fault(name, message)])


def _fault(name: str, message: str) -> dict[str, Any]:
    return {"type": "out_of_range", "loc": (name,), "msg": message}
