"""Vectors that leave the service: `POST /v1/embeddings` in OpenAI's form, and those of items."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import to_json

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.decoding.formats import format_of
from kinlens.embedder.errors import ImageError, InvalidParameterError
from kinlens.embedder.programs.faults import shown
from kinlens.embedder.types import SHORT, Embeddings, check_dims, first_numbers
from kinlens.indexer.types import no_item
from kinlens.service.access.rates import account_of
from kinlens.service.api.fields import Strict, base64_content, is_data_url, worded
from kinlens.service.api.galleries import (
    FAILURES,
    IMAGE_FAILURES,
    ITEM_PATHS,
    Generation,
    ItemRef,
    Service,
)
from kinlens.service.concurrency import within
from kinlens.service.encoding.cache import encode_vector
from kinlens.service.encoding.model import Model
from kinlens.service.encoding.workers import Vector
from kinlens.service.galleries.registry import Served
from kinlens.service.http import bodies
from kinlens.service.http.bodies import JSON, fault, read_model
from kinlens.service.http.openapi import model_docs, problems
from kinlens.service.http.rules import (
    Admission,
    Handler,
    RequestRoute,
    Route,
    rule,
    while_connected,
)
from kinlens.service.problems import MEDIA_TYPE, UNKNOWN_MODEL, RefusedError
from kinlens.service.runtime import Runtime
from kinlens.service.settings import Settings

_ENCODED = re.compile(r"[\w+/=-]{40,}", re.ASCII)  # no word, but a line of an encoded file
_FORMS = "Send the content of an image file as base64 or as a data: URL"
_INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": Settings.max_items_per_request,
        },
    ],
    "description": "Image files as base64 or as data: URLs; or texts, if the bundle has a text "
    "tower. Other URLs are never loaded.",
}


class OpenAIRoute(RequestRoute):
    """A route whose problem documents have in addition the member `error` of OpenAI's API."""

    async def _answer(self, admission: Admission, handler: Handler, request: Request) -> Response:
        answer = await super()._answer(admission, handler, request)
        if answer.media_type != MEDIA_TYPE:
            return answer
        problem = json.loads(bytes(answer.body))
        faults = problem.get("errors") or [{}]
        is_unknown_model = problem["type"] == UNKNOWN_MODEL.type
        problem["error"] = {
            "message": problem["detail"],
            "type": "invalid_request_error" if answer.status_code < 500 else "server_error",
            "param": faults[0].get("name"),
            "code": "model_not_found" if is_unknown_model else problem["type"].rpartition(":")[2],
        }
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name not in ("content-length", "content-type")
        }
        return Response(to_json(problem), answer.status_code, headers, MEDIA_TYPE)


def _inputs(value: Any) -> list[bytes | str]:
    """The image files, and the texts of inputs that are not images.

    Raises: InvalidParameterError.
    """
    sent = [value] if isinstance(value, str) else value
    if not isinstance(sent, list) or not all(isinstance(one, str) for one in sent):
        raise InvalidParameterError(f"input must be a text or a list of texts. {_FORMS}.")
    if not 1 <= len(sent) <= Settings.max_items_per_request:
        raise InvalidParameterError(
            f"input has {len(sent):,} entries; send from 1 to {Settings.max_items_per_request:,}."
        )
    return [_image_or_text(one) for one in sent]


def _image_or_text(text: str) -> bytes | str:
    """The image file in `text`; the text itself if that is neither a data: URL nor an image."""
    if is_data_url(text):
        return base64_content(text)
    lines = text.split()  # some programs break the lines of base64
    try:
        content = base64_content("".join(lines))
    except InvalidParameterError:
        content = b""
    if format_of(content):
        return content
    if "://" in text or any(map(_ENCODED.fullmatch, lines)):
        raise InvalidParameterError(f"input is a link, or a file but no image. {_FORMS}.")
    return text


class EmbeddingRequest(Strict):
    """Images and texts to embed, as in OpenAI's API."""

    input: Annotated[Any, AfterValidator(worded(_inputs)), WithJsonSchema(_INPUT_SCHEMA)]
    model: Annotated[
        str | None,
        Field(description="Name or id of a bundle; default: that of the first gallery."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Field(description="base64: of little-endian float32 numbers."),
    ] = "float"
    dimensions: Annotated[
        int | None,
        Field(
            strict=True,
            ge=1,
            description="Only the first numbers of each vector, again with norm 1.",
        ),
    ] = None
    user: Annotated[str | None, Field(description="Ignored.")] = None


router = APIRouter(route_class=OpenAIRoute)


@router.post(
    "/v1/embeddings",
    response_model=models.Embeddings,
    responses={
        200: {"description": "A vector for each input, in order."},
        **problems(
            *IMAGE_FAILURES,
            UNKNOWN_MODEL,
            errors.InvalidParameterError,
            errors.OverloadedError,
            errors.DeadlineExceededError,
            errors.SearchError,
        ),
    },
    summary="Embed images and texts",
)
@rule("embed", "items", "batch", docs=partial(model_docs, EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """The vectors of images and texts, in the form of OpenAI's API: its clients work with the base
    URL `/v1`.

    All inputs succeed or the request fails. A problem document also has OpenAI's `error`.
    """
    runtime: Runtime = request.app.state.runtime
    sent = await read_model(request, EmbeddingRequest)
    model = _model_of(runtime, sent.model)
    if sent.dimensions is not None:
        check_dims(sent.dimensions, model.dim)
    if len(sent.input) > 1:
        await account_of(request.scope).owe(len(sent.input))
    since = bodies.read_at(request)
    vectors = await while_connected(request, _embedded(runtime, model, sent.input, since))
    rows = [first_numbers(vector, sent.dimensions or model.dim) for vector in vectors]

    def encoded() -> bytes:
        data = [
            models.EmbeddingModel(index=n, embedding=_encoded(row, sent.encoding_format))
            for n, row in enumerate(rows)
        ]
        usage = models.EmbeddingUsage(prompt_tokens=len(rows), total_tokens=len(rows))
        return to_json(models.Embeddings(data=data, model=model.bundle_id, usage=usage))

    body = encoded() if len(rows) == 1 else await bodies.off_loop(request, encoded)
    headers = {"Cache-Control": "no-store", "X-Kinlens-Bundle": model.bundle_id}
    return Response(body, headers=headers, media_type=JSON)


router.route_class = Route

for _path, _by, _item in ITEM_PATHS:

    @router.get(
        f"{_path}/vector",
        name="vector" if _by else "item_vector",  # part of the operation id
        responses=problems(*FAILURES, errors.ItemNotFoundError),
        summary=f"The vector of an item{_by}",
    )
    @rule("embed", "items")
    async def item_vector(
        runtime: Service, name: str, generation: Generation, ref: ItemRef = _item
    ) -> models.ItemVector:
        """The stored vector of an item; send it as a vector of a search or of another item."""

        def read(served: Served) -> models.ItemVector:
            served.check_generation(generation or ref.generation)
            items, vectors = served.gallery.items_at([ref.id])
            if not items:
                raise errors.ItemNotFoundError(no_item(ref.id))
            return models.ItemVector(
                id=items[0].id,
                key=items[0].key,
                sha256=items[0].sha256,
                bundle_id=served.model.bundle_id,
                vector=vectors[0].tolist(),
            )

        return await runtime.read_in(name, "the vector", read)


def _model_of(runtime: Runtime, named: str | None) -> Model:
    """The whole model with this name or id among those of the caller. Raises: RefusedError."""
    known = runtime.registry.models()
    if named is None and known:
        return runtime.registry.model
    for model in known:
        is_id = len(named or "") >= SHORT and model.bundle_id.startswith(named or "")
        if is_id or model.bundle_id == named or model.embedder.name == named:
            return model
    names = [f"{model.embedder.name} ({model.bundle_id[:SHORT]})" for model in known]
    raise RefusedError(
        UNKNOWN_MODEL,
        f"The model {shown(named)!r} does not exist. Send the name or the id of the bundle of a "
        f"gallery: {', '.join(names) or 'none'}.",
    )


async def _embedded(
    runtime: Runtime, model: Model, inputs: Sequence[bytes | str], since: float
) -> list[Vector]:
    """The vectors of image files and texts.

    Raises: ImageError or RequestValidationError naming the input; the errors of `encode` and
        `encode_texts`.
    """
    texts = {f"input[{n}]": data for n, data in enumerate(inputs) if isinstance(data, str)}

    async def embed(number: int, data: bytes) -> Vector:
        digest = hashlib.sha256(data).hexdigest()
        try:
            return await model.encode(data, digest, "embed")
        except ImageError as error:
            raise type(error)(f"input[{number}]: {error}") from error

    limit_s = runtime.settings.request_timeout_ms / 1e3
    cure = "Send fewer inputs, or try again in a second."
    tasks: list[asyncio.Task[Vector]] = []
    try:
        with runtime.search_threads.batch():
            async with within(limit_s, "Embedding the inputs", cure, since):
                words = iter(await _words(model, texts) if texts else ())  # may be refused
                tasks += [
                    asyncio.create_task(embed(n, data))
                    for n, data in enumerate(inputs)
                    if isinstance(data, bytes)
                ]
                images = iter([await task for task in tasks])
                return [next(words if isinstance(data, str) else images) for data in inputs]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _words(model: Model, texts: Mapping[str, str]) -> Embeddings:
    """The vectors of texts by their names in the request."""
    try:
        return await model.encode_texts(texts)
    except InvalidParameterError as error:
        reason = str(error)
        if model.embedder.text is None:
            name, text = next(iter(texts.items()))
            reason = f"{name} = {shown(text)!r} is not an image, and {reason}"
        raise fault("input", reason) from error


def _encoded(vector: Vector, form: Literal["float", "base64"] | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(encode_vector(vector)).decode()
    numbers: list[float] = np.asarray(vector).tolist()
    return numbers
