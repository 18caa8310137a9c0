"""Bodies of requests: let in within limits, read as forms or JSON, and named where they are wrong.

socket ─► BodyLimit (bytes by route, seconds, UploadSlots) ─► parse_form, read_model ─► route
             └─ refuse: 413, 408, 503, while the rest of the body is thrown away
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedder.errors import InvalidParameterError
from service.access.rates import address_of
from service.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    CLIENT_GONE,
    OVERLOADED,
    plain,
    problem,
    request_id_of,
)

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


BodyKind = Literal["plain", "keys", "picture", "image", "batch"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

FORM_BYTES = 64 * 2**10
"""Room beside the images for the other parts of a form and its boundaries."""

JSON = "application/json"
MAX_MARKS = 100_000
"""Commas and opening brackets in one JSON text: what it can hold of values, at most."""

INLINE_BYTES = 4 * 2**10
"""So short a text is read in less than a millisecond; a longer one in a thread."""

_KEYS_BYTES = 2**20
_PLAIN_BYTES = 16 * 2**10  # read where it holds up all other requests
_DRAIN_S = 5.0
_DRAIN_FACTOR = 4
_MAX_PARTS = 1_000
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

    def slots(self, max_bytes: int) -> int:
        """How many single uploads a body of up to `max_bytes` counts as."""
        return max(1, -(-max_bytes // (self.image_bytes + FORM_BYTES)))


@dataclass(slots=True, eq=False)
class Upload:
    """A body that is arriving; `send_away` ends it when its slots go to somebody else."""

    address: str
    slots: int
    send_away: Callable[[], None]


class UploadSlots:
    """`count` slots. When they are taken, whoever holds the most gives some to who holds less.

    An address may take all slots while nobody else wants one; another address is then still let
    in, at the cost of the oldest upload of the address that holds the most.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._uploads: dict[Upload, None] = {}

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return sum(upload.slots for upload in self._uploads)

    def enter(self, upload: Upload) -> bool:
        """Take the slots of `upload`; False if there are none for it."""
        upload.slots = min(upload.slots, self.count)
        while self.taken + upload.slots > self.count:
            oldest = self._of_the_greediest(upload)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.send_away()
        self._uploads[upload] = None
        return True

    def leave(self, upload: Upload) -> None:
        """Give the slots of `upload` back."""
        self._uploads.pop(upload, None)

    def _of_the_greediest(self, newcomer: Upload) -> Upload | None:
        held: dict[str, int] = {}
        for upload in self._uploads:
            held[upload.address] = held.get(upload.address, 0) + upload.slots
        address = max(held, key=lambda name: held[name])
        after = held.get(newcomer.address, 0) + newcomer.slots
        if address == newcomer.address or held[address] <= after:
            return None
        return next(upload for upload in self._uploads if upload.address == address)


class _RefusedError(Exception):
    """Ends the reading of a body that was refused."""


class BodyLimit:
    """Refuses a body above the bound of its route (413), or not complete after `timeout_s` (408).

    While `max_concurrent` bodies are arriving, a further one is refused (503), or takes the slot
    of one whose address holds more of them. A body that may hold several images counts as several.
    """

    def __init__(
        self, app: ASGIApp, *, bounds: Bounds, timeout_s: float, max_concurrent: int
    ) -> None:
        self.app = app
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._slots = UploadSlots(max_concurrent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        max_bytes = self._bounds.of(scope["state"]["route"].rule.body, media_type_of(scope))
        claimed = _claimed_bytes(scope)
        body = _Body(receive, max_bytes, self._timeout_s, self._slots)
        expected = self._bounds.slots(max_bytes if claimed is None else claimed)
        body.upload = Upload(address_of(scope), expected, body.send_away)
        if claimed is not None and claimed > max_bytes:
            body.refusal = "large"
        elif not self._slots.enter(body.upload):
            body.refusal = "crowded"
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
            self._slots.leave(body.upload)
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
                f"{self._slots.count} uploads are arriving, which is the limit. Try again in a "
                "second, or raise KINLENS_MAX_CONCURRENT_UPLOADS.",
            ),
            "ending": (OVERLOADED, "The service is stopping. Try again in a second."),
            "gone": (CLIENT_GONE, "The client left before its body was complete."),
        }[body.refusal]
        return problem(kind, text, request_id=request_id_of(scope), instance=scope["path"])


class _Body:
    """Counts and times what is received; it holds its slots until it is complete.

    `refusal` is why it is refused: large, slow, crowded, ending or gone; empty while it is not.
    """

    upload: Upload

    def __init__(
        self, receive: Receive, max_bytes: int, timeout_s: float, slots: UploadSlots
    ) -> None:
        self.refusal = ""
        self.complete = False
        self.max_bytes = max_bytes
        self._slots = slots
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout: asyncio.Timeout | None = None
        self._bytes = 0

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        if self.refusal:
            raise _RefusedError
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            if not self.refusal:  # it may have been sent away
                self.refusal = "slow"
            raise _RefusedError from None
        finally:
            self._timeout = None
        if message["type"] == "http.disconnect":
            self.refusal = "gone"
            raise _RefusedError
        self._count(message)
        if self._bytes > self.max_bytes:
            self.refusal = "large"
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
        """End the reading now."""
        if not self.complete:
            self.refusal = "crowded"
            if self._timeout is not None:
                self._timeout.reschedule(asyncio.get_running_loop().time())

    def _count(self, message: Message) -> None:
        self._bytes += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self.complete:
            self._slots.leave(self.upload)


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


@dataclass(slots=True)
class Part:
    """One part of a form: a file if it came with a file name."""

    name: str = ""
    is_file: bool = False
    chunks: list[bytes] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        """The content."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    @property
    def text(self) -> str:
        """The content as text. Raises: HTTPException (400) if it is none."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise _malformed(f"{self.name[:40]!r} is not UTF-8 text") from None


def parse_form(body: bytes, content_type: str) -> list[Part]:
    """The parts in their order. Raises: HTTPException (400) for a form that cannot be read."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise HTTPException(400, "Missing boundary in multipart.")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeDecodeError, ValueError) as error:
        raise _malformed(str(error)) from error
    if not reader.is_complete:
        raise _malformed("its end is missing")
    return reader.parts


class _Reader:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_complete = False
        self._name = b""
        self._value = b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._take_data,
            "on_header_field": self._take_name,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_name,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= _MAX_PARTS:
            raise _malformed(f"it has more than {_MAX_PARTS:,} parts")
        self.parts.append(Part())

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].chunks.append(data[start:end])

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self.parts[-1].name = options.get(b"name", b"").decode()
            self.parts[-1].is_file = b"filename" in options
        self._name = self._value = b""

    def _check_name(self) -> None:
        if not self.parts[-1].name:
            raise _malformed("a part has no name")

    def _end(self) -> None:
        self.is_complete = True


def _malformed(what: str) -> HTTPException:
    return HTTPException(400, f"The form cannot be read: {what}. Send multipart/form-data.")


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


async def off_loop(work: Callable[[], T], *, short: bool) -> T:
    """What `work` returns, which runs in a thread unless it is `short`."""
    return work() if short else await asyncio.to_thread(work)


async def read_model(request: Request, model: type[M]) -> M:
    """The body of a request as a model.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    kind = media_type_of(request)
    if kind != JSON:
        raise HTTPException(415, f"Content-Type = {kind[:_SHOWN]!r} is not read here; send {JSON}.")
    body = await request.body()
    return await off_loop(
        lambda: checked(model, parse_object(body), None), short=len(body) <= INLINE_BYTES
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
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return RequestValidationError([_readable(each, name) for each in found[:_MAX_FAULTS]])


def _readable(fault: ErrorDetails, name: str) -> dict[str, Any]:
    for part in () if name else fault["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name else ''}{part[:_SHOWN]}"
    name = name or "request"
    message = fault["msg"]
    if fault["type"] == "missing":
        message = f"{name} is missing."
    elif fault["type"] == "extra_forbidden":
        message = f"{name} is no parameter here; /docs lists them."
    elif fault["type"] != "out_of_range":
        message = f"{name}: {plain(message)}."
    return {"type": "out_of_range", "loc": (name,), "msg": message}


def fault(name: str, message: str) -> RequestValidationError:
    """One parameter that does not fit, and what to do."""
    return RequestValidationError([{"type": "out_of_range", "loc": (name,), "msg": message}])
