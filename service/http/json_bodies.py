"""JSON from outside: how much of it there may be is checked before anything is made of it."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel
from pydantic_core import from_json

from embedder.errors import InvalidParameterError
from service.http.faults import checked

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

JSON = "application/json"
MAX_MARKS = 100_000
"""Commas and opening brackets in one JSON text: what it can hold of values, at most."""

INLINE_BYTES = 4 * 2**10
"""So short a text is read in less than a millisecond; a longer one in a thread."""

_MARKS = (b",", b"[", b"{")
_STEP = 2**20  # a look at so much holds up other threads for a millisecond or two
_SHOWN = 80


def media_type_of(request: Request) -> str:
    """The content type without its parameters, in small letters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


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
