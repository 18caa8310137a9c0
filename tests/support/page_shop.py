"""A shop that answers as the service promises, for tests of the page: 24 drawn items, no model.

FastAPI checks each answer against the models that the service documents in its OpenAPI.
"""

import asyncio
import hashlib
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, BeforeValidator, Json
from starlette.datastructures import FormData, QueryParams

from kinlens import models
from kinlens.embedder.preprocess import windows
from kinlens.service.http.edge import SECURITY_HEADERS
from tests.tiny import encoded

UI = Path(__file__).parents[2] / "service" / "ui"
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200)}
CLASSES = ("mug", "jar", "box", "bag")
CALIBRATION = {
    "source": "gallery",
    "product": "class",
    "products": 20,
    "views": 3.5,
    "searches": 120,
    "wrong_hits": 400,
    "error_best": 0.03,
    "error_ten": 0.02,
    "no_match_prior": 0.1,
    "reason": "The gallery has no golden set",
}
THRESHOLDS = [
    {"false_matches": 0.1, "search_score": 0.805},
    {"false_matches": 0.01, "search_score": 0.95},
]
INDEX = {
    "kind": None,
    "segment_items": 0,
    "delta": 24,
    "tombstones": 0,
    "compaction_due": None,
    "recall": None,
    "target_recall": None,
    "parameters": {},
    "created_at": None,
}
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """One product image."""

    id: int
    key: str
    attributes: Mapping[str, Any]
    data: bytes
    vector: Vector


def vector_of(data: bytes, crop: Sequence[float] | None = None) -> Vector:
    """Mean colours of an 4 x 4 grid, of length 1."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if crop is not None:
        left, top, width, height = crop
        w, h = image.size
        image = image.crop(
            (int(left * w), int(top * h), int((left + width) * w), int((top + height) * h))
        )
    cells = np.asarray(image.resize((4, 4)), dtype=np.float64).reshape(-1) / 255
    centred = cells - cells.mean() + 1e-6
    return centred / np.linalg.norm(centred)  # type: ignore[no-any-return]


def words_of(text: str) -> Vector:
    """The vector of a colour."""
    pixel = Image.new("RGB", (4, 4), COLOURS[text])
    return vector_of(encoded(pixel))


def draw(colour: tuple[int, int, int], seed: int) -> bytes:
    """A PNG of one colour with a pattern of its own."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-60, 60, (4, 4, 1)).repeat(16, 0).repeat(16, 1)
    pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def items(count: int) -> list[Item]:
    made = []
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        kind = CLASSES[number // 3 % 4]
        attributes = {
            "class": kind,
            "colour": colour,
            "price": float(number + 1),
            "sale": number % 2 == 0,
        }
        data = draw(COLOURS[colour], number)
        key = f"{kind}/{number:03d}.png"
        made.append(Item(number, key, attributes, data, vector_of(data)))
    return made


def passes(attributes: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    for name, condition in where.items():
        value = attributes[name]
        if not isinstance(condition, dict):
            if value != condition:
                return False
        elif "in" in condition:
            if value not in condition["in"]:
                return False
        elif not condition.get(">=", value) <= value <= condition.get("<=", value):
            return False
    return True


def crop_of(text: str) -> Any:
    return text if text == "auto" else text.split(",")


Crop = Annotated[Literal["auto"] | list[float], BeforeValidator(crop_of)]


class Wanted(BaseModel):
    """What one search asks for, from a form or a query string."""

    k: int = 20
    gallery: str = "shop"
    filter: Json[dict[str, Any]] = {}
    group_by: str = ""
    group_size: int = 1
    diversity: float = 0
    combine: str = "mean"
    crop: list[Crop] = []
    positive: list[str] = []
    negative: list[str] = []
    texts: Json[list[str]] = []
    guarantee: float | None = None
    accept: float | None = None


def wanted_of(fields: FormData | QueryParams, **given: str) -> Wanted:
    several = {name: fields.getlist(name) for name in ("crop", "positive", "negative")}
    return Wanted.model_validate(dict(fields) | several | given)


def problem(status: int, title: str, detail: str) -> JSONResponse:
    body = models.Problem(
        type="about:blank", title=title, status=status, detail=detail, request_id="r1"
    )
    return JSONResponse(body.model_dump(), status, media_type="application/problem+json")


def no_image(_: Request, __: Exception) -> Response:
    return problem(415, "Unsupported image format", "The bytes are no image.")


def unknown(_: Request, __: Exception) -> Response:
    return problem(404, "Unknown item", "There is no such item.")


class Shop:
    """The galleries and what was asked of them."""

    def __init__(self) -> None:
        self._stock = {"shop": items(24), "depot": items(6)}
        self.reset()

    def reset(self) -> None:
        """As new: full, open to all, asked nothing."""
        self.galleries = dict(self._stock)
        self.no_match = 0.12
        self.asked: list[Wanted] = []
        self.feedback = "off"
        self.judged_items: list[dict[str, str]] = []
        self.key: str | None = None
        self.delay_s = 0.0
        self.has_map = True
        self.boxes: list[dict[str, Any]] | None = None  # of a detector, if there is one
        self.has_words = False  # of the gallery shop
        self.guarantee: dict[str, Any] | None = None  # of each answer that may have one
        self.accepted: bool | None = None
        self.withdrawn: str | None = None
        self.open_searches = 0
        self.most_searches = 0

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.middleware("http")(self.gate)
        app.add_exception_handler(UnidentifiedImageError, no_image)
        app.add_exception_handler(404, unknown)
        item = "/galleries/{name}/items/{number}"
        app.get("/live", response_model=models.Live)(lambda: {"status": "live"})
        app.get("/galleries", response_model=models.Galleries)(self.list_galleries)
        app.get("/galleries/{name}", response_model=models.GalleryDetail)(self.describe)
        app.get("/galleries/{name}/items", response_model=models.ItemPage)(self.page_of_items)
        app.get(item, response_model=models.ItemModel)(self.show)
        app.get(f"{item}/similar", response_model=models.SearchAnswer)(self.similar)
        app.post(f"{item}/explain", response_model=models.ExplainAnswer)(self.explain)
        app.post("/search", response_model=models.SearchAnswer)(self.search)
        app.post("/boxes", response_model=models.BoxesAnswer)(self.find_boxes)
        app.post("/feedback", status_code=204)(self.judge)
        app.get(f"{item}/image")(self.image)
        app.get("/favicon.ico")(lambda: Response())  # of pages that are not the page
        app.get("/")(lambda: FileResponse(UI / "search" / "index.html"))
        app.mount("/ui", StaticFiles(directory=UI))
        return app

    async def gate(
        self, request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Asks for the key where there is one, and gives the headers that the service gives."""
        closed = self.key and request.url.path.startswith(("/search", "/galleries"))
        if closed and request.headers.get("authorization") != f"Bearer {self.key}":
            response: Response = problem(401, "API key needed", "Send a key in Authorization.")
        else:
            response = await answer(request)
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def list_galleries(self) -> dict[str, Any]:
        return {"bundle_id": "b" * 64, "galleries": [self.about(name) for name in self.galleries]}

    def about(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "version": "1" * 64,
            "generation": "1" * 12,
            "bundle_id": "b" * 64,
            "size": len(self.galleries[name]),
            "dim": 48,
            "created_at": "2026-01-01T00:00:00+00:00",
            "has_map": self.has_map,
            "has_boxes": self.boxes is not None,
            "has_words": self.has_words and name == "shop",
        }

    async def describe(self, name: str) -> dict[str, Any]:
        return self.about(name) | {
            "attributes": [self.attribute(name, a) for a in self.attribute_names(name)],
            "calibration": CALIBRATION,
            "no_calibration": None,
            "thresholds": THRESHOLDS,
            "index": INDEX,
            "provider": "CPUExecutionProvider",
            "image_root_missing": False,
            "feedback": self.feedback,
            "guarantee": None if self.guarantee is None else 0.95,
            "accept": None if self.accepted is None else 0.99,
            "guarantee_withdrawn": self.withdrawn,
        }

    def attribute_names(self, gallery: str) -> list[str]:
        return [name for item in self.galleries[gallery][:1] for name in item.attributes]

    def attribute(self, gallery: str, name: str) -> dict[str, Any]:
        stock = self.galleries[gallery]
        values = [item.attributes[name] for item in stock if name in item.attributes]
        if name == "price":
            limits = {"minimum": min(values), "maximum": max(values)}
            return {"name": name, "kind": "number", "values": None} | limits
        counts = [{"value": v, "count": values.count(v)} for v in sorted(set(values))]
        kind = "boolean" if name == "sale" else "text"
        return {"name": name, "kind": kind, "values": counts, "minimum": None, "maximum": None}

    def found(self, name: str, number: int) -> Item:
        stock = self.galleries.get(name, [])
        if number >= len(stock):
            raise HTTPException(404)
        return stock[number]

    async def show(self, name: str, number: int) -> dict[str, Any]:
        return self.entry(name, self.found(name, number))

    async def image(self, name: str, number: int) -> Response:
        return Response(self.found(name, number).data, media_type="image/png")

    async def page_of_items(
        self, name: str, key_prefix: str = "", limit: int = 20
    ) -> dict[str, Any]:
        stock = [item for item in self.galleries[name] if item.key.startswith(key_prefix)]
        entries = [self.entry(name, item) for item in stock[:limit]]
        return {"total": len(stock), "offset": 0, "items": entries, "generation": "1" * 12}

    async def similar(self, name: str, number: int, request: Request) -> dict[str, Any]:
        item = self.found(name, number)
        wanted = wanted_of(request.query_params, gallery=name)
        return self.answer(wanted, [item.vector], without=item.key)

    async def search(self, request: Request) -> Any:
        self.open_searches += 1
        self.most_searches = max(self.most_searches, self.open_searches)
        try:
            await asyncio.sleep(self.delay_s)
            async with request.form() as form:
                wanted = wanted_of(form)
                images = [await p.read() for p in form.getlist("image") if not isinstance(p, str)]
            crops: Sequence[Any] = wanted.crop or [None]
            if wanted.crop == ["auto"]:
                crops = windows()
                wanted.combine = "best"
            parts = [(n, crop) for n in range(len(images)) for crop in crops]
            vectors = [vector_of(images[n], crop) for n, crop in parts]
            views = [{"image": n + 1, "crop": crop} for n, crop in parts]
            if wanted.guarantee is not None and self.guarantee is None:
                return problem(422, "Invalid parameter", "Nothing is guaranteed.")
            promised = {"guarantee": self.guarantee, "accepted": self.accepted}
            return self.answer(wanted, vectors, views) | (promised if wanted.guarantee else {})
        finally:
            self.open_searches -= 1

    async def find_boxes(self, request: Request) -> dict[str, Any]:
        async with request.form() as form:
            assert [name for name, _ in form.multi_items()] == ["image", "gallery"]
        await asyncio.sleep(self.delay_s)
        return {"bundle_id": "b" * 64, "gallery": "shop", "boxes": self.boxes}

    async def judge(self, request: Request) -> None:
        """Notes the fields of a feedback, and the size of its image."""
        async with request.form() as form:
            fields = {k: v if isinstance(v, str) else str(v.size) for k, v in form.items()}
        self.judged_items.append(fields)

    async def explain(self, name: str, number: int, request: Request) -> dict[str, Any]:
        """The lower right quarter of the item, the upper left of each part of the query."""
        async with request.form() as form:
            wanted = wanted_of(form)
        grid = np.zeros((4, 4))
        grid[2:, 2:] = 0.2
        crops = wanted.crop or [None]
        return {
            "bundle_id": "b" * 64,
            "gallery": name,
            "gallery_version": "1" * 64,
            "key": self.found(name, number).key,
            "score": 0.8,
            "rest": 0.0,
            "square": 0.8,
            "hit": grid.tolist(),
            "query": [
                {"image": 1, "crop": crop, "shares": (grid[::-1, ::-1] / len(crops)).tolist()}
                for crop in crops
            ],
        }

    def answer(
        self,
        wanted: Wanted,
        vectors: list[Vector],
        views: Sequence[dict[str, Any]] = (),
        without: str = "",
    ) -> dict[str, Any]:
        self.asked.append(wanted)
        stock = self.galleries[wanted.gallery]
        by_key = {item.key: item.vector for item in stock}
        liked = vectors + [by_key[key] for key in wanted.positive]
        words = [words_of(text) for text in wanted.texts]
        query = sum(words, np.mean(liked, axis=0) if liked else np.zeros(48))
        query = query - 0.7 * sum(by_key[key] for key in wanted.negative)
        queries = [query / np.linalg.norm(query)]
        if is_best := wanted.combine == "best":
            assert not any((wanted.positive, wanted.negative, wanted.diversity))
            queries = vectors
        scores = {item.key: [float(item.vector @ one) for one in queries] for item in stock}
        shares = self.shares({key: max(found) for key, found in scores.items()})
        hits = [
            self.entry(wanted.gallery, item)
            | {"score": max(found := scores[item.key]), "probability": shares[item.key]}
            | ({"view": views[int(np.argmax(found))]} if is_best else {})
            for item in sorted(stock, key=lambda item: -max(scores[item.key]))
            if item.key != without and passes(item.attributes, wanted.filter)
        ]
        groups = self.grouped(wanted, hits) if wanted.group_by else None
        shown = hits[: wanted.k] if groups is None else []
        likely = sum(shares[hit["key"]] for hit in (hits if groups else shown))
        for row in [*hits, *(groups or [])] if words else []:
            row["probability"] = None
        return {
            "bundle_id": "b" * 64,
            "gallery": wanted.gallery,
            "gallery_version": "1" * 64,
            "k": wanted.k,
            "offset": 0,
            "count": len(shown),
            "cached": False,
            "match": bool(hits),
            "no_match_probability": None if words else 1 - likely,
            "hits": shown,
            "groups": groups,
            "answer_id": None if self.feedback == "off" else f"answer-{len(self.asked)}",
            "timings_ms": {"decode": 3.0, "embed": 11.5, "search": 0.5, "total": 16.0},
        }

    def shares(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The probability of each item, by its key: they share the rest of `no_match`."""
        weights = {key: float(np.exp(20 * score)) for key, score in scores.items()}
        left = (1 - self.no_match) / sum(weights.values())
        return {key: left * weight for key, weight in weights.items()}

    def grouped(self, wanted: Wanted, hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
        values: dict[Any, list[dict[str, Any]]] = {}
        for hit in hits:
            values.setdefault(hit["attributes"].get(wanted.group_by), []).append(hit)
        return [
            {"value": value, "hits": some[: wanted.group_size]}
            | {name: some[0].get(name) for name in ("score", "view")}
            | {"probability": sum(hit["probability"] for hit in some)}
            for value, some in values.items()
        ][: wanted.k]

    def entry(self, gallery: str, item: Item) -> dict[str, Any]:
        image = f"/galleries/{gallery}/items/{item.id}/image"
        digest = hashlib.sha256(item.data).hexdigest()
        attributes = dict(item.attributes)
        return {
            "id": item.id,
            "key": item.key,
            "attributes": attributes,
            "image": image,
            "sha256": digest,
        }
