"""Feedback over HTTP: judgements of users about items of answers, and their export."""

import hashlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import Field

from kinlens.embedder import errors
from kinlens.models import Action, FeedbackCounts
from kinlens.service.api.fields import Strict, read_form
from kinlens.service.api.galleries import FAILURES, Service, item_of_key
from kinlens.service.galleries.feedback import (
    IMAGE_PX,
    ClickedWords,
    FeedbackStore,
    Pair,
    Question,
    as_csv,
)
from kinlens.service.http import bodies
from kinlens.service.http.bodies import FORM, JSON, checked, fault
from kinlens.service.http.openapi import body_docs, inlined, problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime

_MAX_ANSWER_ID = 8_192  # the key of an item has up to 1,024 characters of 4 bytes each
_MAX_KEY = 1_024
_CSV = "text/csv"
SUBJECT = "The feedback"
"""The part of the state folder with the feedback, as errors name it."""


class FeedbackModel(Strict):
    """The judgement of a user about an item of an answer."""

    answer_id: Annotated[
        str, Field(max_length=_MAX_ANSWER_ID, description="The answer_id of the answer, unchanged.")
    ]
    item: Annotated[str, Field(max_length=_MAX_KEY, description="The key of the item.")]
    action: Annotated[
        Action,
        Field(
            description="clicked, bought: the item is right. wrong: it should not have been found."
        ),
    ]


_IMAGE = {
    "type": "string",
    "format": "binary",
    "description": "The image of the search, byte for byte; only if the service stores images.",
}
router = APIRouter(route_class=Route)


def _docs() -> dict[str, Any]:
    schema = inlined(FeedbackModel)
    form = schema | {"properties": {**schema["properties"], "image": _IMAGE}}
    return body_docs({JSON: {"schema": schema}, FORM: {"schema": form}})


@router.post(
    "/feedback",
    status_code=204,
    responses=problems(*FAILURES, errors.ItemNotFoundError, errors.StateError),
    summary="Report whether an item was right",
)
@rule("search", "items", "form_image", stores=True, docs=_docs)
async def feedback(runtime: Service, request: Request) -> None:
    """Stores that an item was right or wrong for a query, without any data about the caller.

    Repeated feedback counts once.
    """
    store = store_of(runtime)
    sent, image = await _read(request)
    question = store.question(sent.answer_id)
    find = partial(item_of_key, key=sent.item)
    await runtime.read_in(question.gallery, "the item", find)  # it may have been removed since
    stored_image = b"" if image is None else await _stored_image(runtime, question, image)

    def add(store: FeedbackStore) -> bool:
        return store.add(question, sent.item, sent.action, stored_image)

    if await runtime.in_state(SUBJECT, store, add):
        runtime.metrics.feedback.labels(sent.action).inc()


@router.get(
    "/galleries/{name}/feedback",
    response_model=FeedbackCounts,
    responses={
        200: {
            "description": "The pairs as CSV, or their counts as JSON.",
            "content": {_CSV: {"schema": {"type": "string"}}},
        },
        **problems(*FAILURES, errors.StateError),
    },
    summary="Export the feedback on a gallery",
)
@rule("admin", "galleries")
async def gallery_feedback(
    runtime: Service,
    name: str,
    kind: Annotated[Literal["csv", "words", "json"], Query(alias="format")] = "csv",
) -> FeedbackCounts | Response:
    """CSV with the columns query, query_key, item and action for training, oldest first. With
    format=words, CSV with the columns text and item for kinlens-train teach-words. With
    format=json, the counts of each action and of the rows.
    """
    store = store_of(runtime)
    async with runtime.registry.find(name):
        pass  # raises for an unknown gallery
    if kind == "csv":
        rows = await runtime.in_state(SUBJECT, store, lambda store: store.pairs(name))
        return Response(as_csv(Pair._fields, rows), media_type=_CSV)
    if kind == "words":
        words = await runtime.in_state(SUBJECT, store, lambda store: store.words(name))
        return Response(as_csv(ClickedWords._fields, words), media_type=_CSV)

    def count(store: FeedbackStore) -> FeedbackCounts:
        pairs, words = len(store.pairs(name)), len(store.words(name))
        return FeedbackCounts(**store.counts(name), pairs=pairs, words=words)

    return await runtime.in_state(SUBJECT, store, count)


def store_of(runtime: Runtime) -> FeedbackStore:
    """The feedback. Raises: HTTPException (404) while it is off."""
    if runtime.feedback is None:
        raise HTTPException(
            404,
            "This service does not accept feedback. Start it with KINLENS_FEEDBACK=pairs, or with "
            "KINLENS_FEEDBACK=pictures to also store the query images.",
        )
    return runtime.feedback


async def _read(request: Request) -> tuple[FeedbackModel, bytes | None]:
    """The feedback and its image, if one was sent.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    body, kind = await bodies.read_body(request, JSON, FORM)

    def read() -> tuple[FeedbackModel, bytes | None]:
        if kind == JSON:
            return checked(FeedbackModel, bodies.parse_object(body)), None
        images, fields = read_form(request, body)
        if len(images) > 1:
            raise fault("image", f"image was sent {len(images)} times; send it once.")
        return checked(FeedbackModel, dict(fields)), images[0] if images else None

    return read() if len(body) <= bodies.INLINE_BYTES else await bodies.off_loop(request, read)


async def _stored_image(runtime: Runtime, question: Question, image: bytes) -> bytes:
    """The small JPEG to store for a query image.

    Raises: RequestValidationError, ItemNotFoundError, OverloadedError.
    """
    if runtime.settings.feedback != "pictures":
        raise fault("image", "image is not stored by this service; send the feedback without it.")
    digest = await runtime.read("the image", lambda: hashlib.sha256(image).hexdigest(), "body")
    if digest != question.image:
        raise fault(
            "image",
            "image is not the image of the search; send the same bytes as in the search, or none.",
        )

    async def given() -> bytes:
        return image

    return await runtime.renditions.get(f"feedback-{digest}", given, IMAGE_PX)
