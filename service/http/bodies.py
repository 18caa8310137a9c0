"""Request bodies: limits of size and time, parsing as forms or JSON, and messages for faults.

server ─► BodyLimit (gzip, byte order mark; bytes per route, total bytes, seconds) ─► route
BodyLimit refuses with 413, 408, 415, 503, while the rest of the body is discarded. A body is in
memory as a whole before it is parsed.
"""

import asyncio
import codecs
import contextlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any, Literal, NoReturn, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.service import problems
from kinlens.service.problems import RefusedError
from kinlens.service.runtime import Runtime
from kinlens.service.settings import FORM_BYTES, Settings

BodyKind = Literal["plain", "keys", "form_image", "image", "batch"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

JSON = "application/json"
FORM, RAW, IMAGE = "multipart/form-data", "application/octet-stream", "image/*"

MAX_MARKS = 100_000
"""Maximum number of commas and opening brackets in a JSON text; it bounds the number of values."""

INLINE_BYTES = 4 * 2**10
"""Texts up to this length, except filters, are parsed on the event loop, longer ones in a thread.
"""

_WITH_STREAMS = frozenset({"2", "3"})  # versions whose requests do not end with a connection
_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # small, since it is parsed on the event loop
_DRAIN_S = 5.0
_CODINGS = ("gzip", "deflate")
_INFLATE_STEP = 2**18  # bytes inflated at once on the event loop; takes about 1 ms
_GZIP_OR_ZLIB, _RAW_DEFLATE = 47, -15
_FIRST_NIBBLES = (8, 15)  # of zlib and gzip; deflate without a header never begins so
_MARKS = (b",", b"[", b"{")
_STEP = 2**20  # bytes that are counted or searched at once; holds the GIL for a few milliseconds
_SHOWN = 80
_MAX_FAULTS = 20
_MAX_PARTS = 1_000  # of a form
_PART_HEAD_BYTES = 4 * 2**10
_MAX_FIELDS = 8  # header lines of a part, and parameters of one of them
_END = b"\r\n\r\n"
_FIELD = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
# Only quotes and backslashes are unescaped: Windows paths contain literal backslashes. A value
# without a closing quote extends to the end, so no part of the text is scanned twice.
_PARAMETER = re.compile(rb';[ \t]*([^\s;=]+)[ \t]*=[ \t]*(?:"((?:\\"|[^"])*+)(?:"|$)|([^;]*))')
_ESCAPED = re.compile(rb"\\([\"\\])")


def _limit_of(settings: Settings, kind: BodyKind, *, is_json: bool) -> int:
    """The limit in bytes of a body; a search with JSON can contain several images."""
    if kind == "batch" or (kind == "image" and is_json):
        return settings.largest_body()
    image_bytes = settings.max_upload_bytes + FORM_BYTES
    if kind == "image" or (kind == "form_image" and not is_json):
        return image_bytes
    return min(_KEYS_BYTES if kind == "keys" else _PLAIN_BYTES, image_bytes)


class BodyLimit:
    """Refuses a body that is too large for its route (413), that is incomplete after the body
    timeout (408), or that raises the total of all bodies above the limit (503).

    The route begins to read after it has admitted its caller, and answers with the refusal.

    Attributes:
        held: bytes of all bodies in memory. Only received bytes count, so a client cannot block
            others with a large Content-Length.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.held = 0
        self.max_held = settings.held_bytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        body = _Body(scope, receive, self)
        try:
            await self.app(scope, body.receive, body.draining(send))
        finally:
            body.release()


class _Body:
    """One body: read whole, inflated and without the byte order mark of a JSON text, within its
    limits. Its bytes count until `release`.

    `read_at` of `scope["state"]`, a time of the event loop, is set to its end.

    Inflated bytes come in small steps, so a small body that inflates to a large one blocks neither
    the event loop nor memory before a limit refuses it.
    """

    def __init__(self, scope: Scope, receive: Receive, limit: BodyLimit) -> None:
        self._scope = scope
        self._receive = receive
        self._settings = limit.settings
        self._limit = limit
        self._deadline = asyncio.get_running_loop().time() + limit.settings.body_timeout_ms / 1e3
        self._max_bytes = 0
        self._bytes = 0
        self._has_arrived = self._is_complete = False  # at this server, at the route
        self._coding = _coding(scope)
        self._inflater: Any = None  # zlib does not export its type
        media_type = media_type_of(scope)
        self._is_json = media_type == JSON or media_type.endswith("+json")

    async def receive(self) -> Message:
        """The whole body as one message, then the next message of the server.

        Raises: RefusedError.
        """
        if self._is_complete:
            return await self._raw()
        self._begin()
        try:
            async with asyncio.timeout_at(self._deadline):
                body = await self._whole()
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
        self._is_complete = True
        self._scope["state"]["read_at"] = asyncio.get_running_loop().time()
        if self._is_json:
            if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:2]:
                raise RefusedError(
                    problems.UNSUPPORTED_MEDIA,
                    "The JSON is encoded as UTF-16 or UTF-32. Send it as UTF-8.",
                )
            body = body.removeprefix(codecs.BOM_UTF8)
        return {"type": "http.request", "body": body, "more_body": False}

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
        self._limit.held -= self._bytes
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

    def _count(self, part: bytes, parts: list[bytes]) -> None:
        size = len(part)
        if self._bytes + size > self._max_bytes:
            after = " after decompression" if self._coding else ""
            self._refuse_size(f"more than {self._max_bytes:,} bytes{after}")
        if self._limit.held + size > self._limit.max_held:
            raise RefusedError(
                problems.OVERLOADED,
                f"The bodies of all requests use more than {self._limit.max_held:,} bytes, which "
                "is the limit. Try again in a second.",
            )
        self._bytes += size
        self._limit.held += size
        parts.append(part)

    def _refuse_size(self, size: str) -> NoReturn:
        cure = "Split the request" if self._is_json else "Resize or compress the image"
        raise RefusedError(
            problems.BODY_TOO_LARGE,
            f"The request body has {size}; the limit is {self._max_bytes:,}. {cure}.",
        )

    async def _whole(self) -> bytes:
        parts: list[bytes] = []
        while not self._has_arrived:
            message = await self._raw()
            if message["type"] == "http.disconnect":
                raise RefusedError(
                    problems.CLIENT_DISCONNECTED,
                    "The client disconnected before its body was complete.",
                )
            if self._coding:
                await self._inflate(message.get("body", b""), parts)
            else:
                self._count(message.get("body", b""), parts)
        if self._coding and (self._inflater is None or not self._inflater.eof):
            raise self._damaged()
        return b"".join(parts)

    async def _inflate(self, data: bytes, parts: list[bytes]) -> None:
        """Inflate the next part of the body, in small steps."""
        part = b""
        while data or len(part) == _INFLATE_STEP:  # zlib may have more without more data
            if self._inflater is None or self._inflater.eof:
                if self._inflater is not None:
                    data = data.lstrip(b"\0")  # padding after a member of a gzip file
                    if not data:
                        return
                is_raw = self._coding == "deflate" and data[0] % 16 not in _FIRST_NIBBLES
                self._inflater = zlib.decompressobj(_RAW_DEFLATE if is_raw else _GZIP_OR_ZLIB)
            try:
                part = self._inflater.decompress(data, _INFLATE_STEP)
            except zlib.error:
                raise self._damaged() from None
            self._count(part, parts)
            data = self._inflater.unconsumed_tail or self._inflater.unused_data
            await asyncio.sleep(0)  # lets other requests run

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


def _coding(scope: Scope) -> str:
    """The Content-Encoding of a body; empty if it is sent as it is."""
    sent = b",".join([value for name, value in scope["headers"] if name == b"content-encoding"])
    words = map(str.strip, sent.decode("latin-1").lower().split(","))
    return ", ".join(filter(None, ({"identity": "", "x-gzip": "gzip"}.get(w, w) for w in words)))


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
    body, sent = await request.body(), media_type_of(request.scope)
    kind = IMAGE if sent.startswith("image/") else sent
    if kind not in kinds:
        text = f"Content-Type = {sent[:_SHOWN]!r} is not supported here; send {', '.join(kinds)}."
        raise HTTPException(415, text)
    return body, kind


def read_at(request: Request) -> float:
    """When the body was read, or the request came without one: a time of the event loop."""
    since: float = request.scope["state"]["read_at"]
    return since


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """Run `work`, the parsing of a body, in a thread, within the limit that begins at `read_at`.

    Raises: DeadlineExceededError, OverloadedError, any error of `work`.
    """
    runtime: Runtime = request.app.state.runtime
    return await runtime.read("the request", work, "body", since=read_at(request))


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


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form; it is a file if it has a file name."""

    name: str
    is_file: bool
    data: bytes

    @property
    def text(self) -> str:
        """The content as text. Raises: HTTPException (400) if it is not UTF-8."""
        return _decoded(self.data, repr(self.name[:_SHOWN]))


def parse_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form (RFC 7578) in order.

    Clients choose a boundary that occurs in no part, so a boundary with any other continuation is
    an error. A hostile form of near-boundaries therefore fails at the first one.

    Raises: HTTPException (400) if the form cannot be read.
    """
    boundary = _parameters(content_type.encode("latin-1")).get(b"boundary")
    if not boundary:
        raise HTTPException(400, "Missing boundary in multipart.")
    delimiter = b"\r\n--" + boundary
    # The first boundary may start the body without a CRLF; anything before it is ignored.
    start = -2 if body.startswith(delimiter[2:]) else _find(body, delimiter, 0)
    parts: list[Part] = []
    while start != -1:
        after = start + len(delimiter)
        if body.startswith(b"--", after):
            return parts
        if not body.startswith(b"\r\n", after):
            raise _malformed(f"the boundary before byte {after:,} is not followed by a line break")
        if len(parts) == _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS:,} parts")
        end_of_head = body.find(_END, after, after + _PART_HEAD_BYTES)
        if end_of_head == -1:
            raise _malformed(f"the head of a part has no end within {_PART_HEAD_BYTES:,} bytes")
        content = end_of_head + len(_END)
        start = _find(body, delimiter, content)
        parts.append(_part(body[after + 2 : end_of_head], body[content : max(start, content)]))
    raise _malformed("its end is missing")


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Like `bytes.find`, in steps, so other threads can run in between."""
    for step in range(start, len(body), _STEP):
        found = body.find(delimiter, step, step + _STEP + len(delimiter) - 1)
        if found != -1:
            return found
    return -1


def _part(head: bytes, data: bytes) -> Part:
    disposition = b""
    lines = head.split(b"\r\n", _MAX_FIELDS)
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None or len(lines) > _MAX_FIELDS:
            raise _malformed(
                f"the head of a part must be up to {_MAX_FIELDS} lines of the form NAME: VALUE"
            )
        if field[1].lower() == b"content-disposition":
            disposition = field[2]
    given = _parameters(disposition)
    name = _decoded(given.get(b"name", b""), "a name")
    if not name:
        raise _malformed("a part has no name")
    return Part(name, b"filename" in given, data)


def _parameters(value: bytes) -> dict[bytes, bytes]:
    """The `name=value` pairs that follow the first semicolon of a header."""
    found: dict[bytes, bytes] = {}
    for match in islice(_PARAMETER.finditer(value), _MAX_FIELDS):
        name, quoted, token = match.groups()
        found[name.lower()] = token.rstrip() if quoted is None else _ESCAPED.sub(rb"\1", quoted)
    return found


def _decoded(text: bytes, what: str) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _malformed(f"{what} is not UTF-8 text") from None


def _malformed(what: str) -> HTTPException:
    return HTTPException(400, f"The form cannot be read: {what}. Send multipart/form-data.")
