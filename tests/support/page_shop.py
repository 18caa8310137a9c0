"""A shop that answers as the service promises, for tests of the page: 24 drawn items, no model."""

import asyncio
import hashlib
import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import FormData, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import service
from service.http.gate import SECURITY_HEADERS

UI = Path(service.__file__).parent / "ui"
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200)}
CLASSES = ("mug", "jar", "box", "bag")
CALIBRATION = {
    "slope": 20.0,
    "intercept": -16.0,
    "thresholds": [
        {"false_matches": 0.1, "search_score": 0.805, "probability": 0.52},
        {"false_matches": 0.01, "search_score": 0.95, "probability": 0.95},
    ],
}
INDEX = {"segment_items": 0, "delta": 24, "tombstones": 0, "compaction_due": ""} | (
    dict.fromkeys(("kind", "recall", "target_recall", "created_at")) | {"parameters": {}}
)
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """One product picture."""

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


@dataclass
class Wanted:
    """What one search asks for, from a form or a query string."""

    k: int = 20
    gallery: str = "shop"
    where: Mapping[str, Any] = field(default_factory=dict)
    group_by: str = ""
    group_size: int = 1
    crops: list[list[float]] = field(default_factory=list)
    positives: list[str] = field(default_factory=list)
    negatives: list[str] = field(default_factory=list)


def wanted_of(fields: FormData | QueryParams) -> Wanted:
    texts = {name: str(value) for name, value in fields.multi_items() if name != "image"}
    return Wanted(
        k=int(texts.get("k", 20)),
        gallery=texts.get("gallery", "shop"),
        where=json.loads(texts.get("filter", "{}")),
        group_by=texts.get("group_by", ""),
        group_size=int(texts.get("group_size", 1)),
        crops=[[float(p) for p in str(crop).split(",")] for crop in fields.getlist("crop")],
        positives=[str(key) for key in fields.getlist("positive")],
        negatives=[str(key) for key in fields.getlist("negative")],
    )


def problem(status: int, title: str, detail: str, **headers: str) -> JSONResponse:
    content = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    content["request_id"] = "r1"
    return JSONResponse(content, status, headers, "application/problem+json")


async def secured(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """The page gets the headers that it gets from the service."""
    response = await call_next(request)
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response


class Shop:
    """The galleries and what was asked of them."""

    def __init__(self) -> None:
        self._stock = {"shop": items(24), "depot": items(6)}
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """As new: full, calibrated, open to all, asked nothing."""
        self.galleries = dict(self._stock)
        self.calibration: dict[str, Any] | None = CALIBRATION
        self.asked: list[Wanted] = []
        self.paths: list[str] = []
        self.key: str | None = None
        self.delay_s = 0.0
        self.open_searches = 0
        self.most_searches = 0

    def app(self) -> Starlette:
        item = "/galleries/{name}/items/{number:int}"
        routes = [
            Route("/", lambda _: FileResponse(UI / "search" / "index.html")),
            Route("/favicon.ico", lambda _: Response()),  # of pages that are not the page
            Route("/live", lambda _: JSONResponse({"status": "live"})),
            Route("/samples", lambda _: JSONResponse({"samples": []})),
            Route("/search", self.search, methods=["POST"]),
            Route("/galleries", self.galleries_list),
            Route("/galleries/{name}", self.describe),
            Route("/galleries/{name}/items", self.page_of_items),
            Route(item, self.show),
            Route(f"{item}/image", self.picture),
            Route(f"{item}/similar", self.similar),
            Mount("/ui", StaticFiles(directory=UI)),
        ]
        return Starlette(
            routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=secured)]
        )

    def refusal(self, request: Request) -> Response | None:
        self.paths.append(request.url.path)
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return problem(401, "API key needed", "Send a key in the header Authorization.")

    async def galleries_list(self, request: Request) -> Response:
        galleries = [self.about(name) for name in self.galleries]
        return self.refusal(request) or JSONResponse(
            {"bundle_id": "b" * 64, "galleries": galleries}
        )

    def about(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "version": "1" * 64,
            "generation": "1" * 12,
            "bundle_id": "b" * 64,
            "size": len(self.galleries[name]),
            "dim": 48,
            "created_at": "2026-01-01T00:00:00+00:00",
        }

    async def describe(self, request: Request) -> Response:
        name = request.path_params["name"]
        attributes = [self.attribute(name, a) for a in ("class", "colour", "price", "sale")]
        content = {"attributes": attributes, "calibration": self.calibration}
        content |= {"index": INDEX, "provider": "CPUExecutionProvider", "image_root_missing": False}
        return self.refusal(request) or JSONResponse(self.about(name) | content)

    def attribute(self, gallery: str, name: str) -> dict[str, Any]:
        values = [item.attributes[name] for item in self.galleries[gallery]]
        if name == "price":
            limits = {"minimum": min(values), "maximum": max(values)}
            return {"name": name, "kind": "number", "values": None} | limits
        counts = [{"value": v, "count": values.count(v)} for v in sorted(set(values))]
        kind = "boolean" if name == "sale" else "text"
        return {"name": name, "kind": kind, "values": counts, "minimum": None, "maximum": None}

    def found(self, request: Request) -> Item | None:
        stock = self.galleries.get(request.path_params["name"], [])
        number = request.path_params["number"]
        return stock[number] if number < len(stock) else None

    async def show(self, request: Request) -> Response:
        item = self.found(request)
        if item is None:
            return problem(404, "Unknown item", "There is no such item.")
        return JSONResponse(self.entry(request.path_params["name"], item))

    async def picture(self, request: Request) -> Response:
        item = self.found(request)
        refusal = self.refusal(request)
        if item is None or refusal is not None:
            return refusal or problem(404, "Unknown item", "There is no such item.")
        return Response(item.data, media_type="image/png")

    async def page_of_items(self, request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        stock = [i for i in self.galleries[name] if i.key.startswith(query.get("key_prefix", ""))]
        shown = stock[: int(query.get("limit", 20))]
        entries = [self.entry(name, item) for item in shown]
        content = {"total": len(stock), "offset": 0, "items": entries, "generation": "1" * 12}
        return self.refusal(request) or JSONResponse(content)

    async def similar(self, request: Request) -> Response:
        item = self.found(request)
        refusal = self.refusal(request)
        if item is None or refusal is not None:
            return refusal or problem(404, "Unknown item", "There is no such item.")
        wanted = wanted_of(request.query_params)
        wanted.gallery = request.path_params["name"]
        return self.answer(wanted, [item.vector], without=item.key)

    async def search(self, request: Request) -> Response:
        if (refusal := self.refusal(request)) is not None:
            return refusal
        with self._lock:
            self.open_searches += 1
            self.most_searches = max(self.most_searches, self.open_searches)
        try:
            await asyncio.sleep(self.delay_s)
            async with request.form() as form:
                wanted = wanted_of(form)
                images = [await p.read() for p in form.getlist("image") if not isinstance(p, str)]
            vectors = [vector_of(d, c) for d in images for c in (wanted.crops or [None])]
            return self.answer(wanted, vectors)
        except OSError:
            return problem(415, "Unsupported image format", "The bytes are no image.")
        finally:
            with self._lock:
                self.open_searches -= 1

    def answer(self, wanted: Wanted, vectors: list[Vector], without: str = "") -> Response:
        self.asked.append(wanted)
        stock = self.galleries[wanted.gallery]
        by_key = {item.key: item.vector for item in stock}
        liked = vectors + [by_key[key] for key in wanted.positives]
        query = np.mean(liked, axis=0)
        for key in wanted.negatives:
            query = query - 0.7 * by_key[key]
        query = query / np.linalg.norm(query)
        ranked = sorted(stock, key=lambda item: -float(item.vector @ query))
        hits = [
            self.entry(wanted.gallery, item) | {"score": float(item.vector @ query)}
            for item in ranked
            if item.key != without and passes(item.attributes, wanted.where)
        ]
        return JSONResponse(self.content(wanted, [self.judged(hit) for hit in hits]))

    def judged(self, hit: dict[str, Any]) -> dict[str, Any]:
        if self.calibration is None:
            return hit | {"probability": None}
        slope, intercept = CALIBRATION["slope"], CALIBRATION["intercept"]
        assert isinstance(slope, float)
        assert isinstance(intercept, float)
        return hit | {"probability": float(1 / (1 + np.exp(-(slope * hit["score"] + intercept))))}

    def content(self, wanted: Wanted, hits: list[dict[str, Any]]) -> dict[str, Any]:
        groups = None
        if wanted.group_by:
            values: dict[Any, list[dict[str, Any]]] = {}
            for hit in hits:
                values.setdefault(hit["attributes"][wanted.group_by], []).append(hit)
            groups = [
                {"value": value, "hits": some[: wanted.group_size]}
                | {name: some[0][name] for name in ("score", "probability")}
                for value, some in values.items()
            ][: wanted.k]
        shown = [] if groups is not None else hits[: wanted.k]
        return {
            "bundle_id": "b" * 64,
            "gallery": wanted.gallery,
            "gallery_version": "1" * 64,
            "k": wanted.k,
            "offset": 0,
            "count": len(shown),
            "cached": False,
            "match": bool(hits),
            "min_score": None,
            "hits": shown,
            "groups": groups,
            "timings_ms": {"decode": 3.0, "embed": 11.5, "search": 0.5, "total": 16.0},
        }

    def entry(self, gallery: str, item: Item) -> dict[str, Any]:
        image = f"/galleries/{gallery}/items/{item.id}/image"
        attributes = dict(item.attributes)
        content = {"id": item.id, "key": item.key, "attributes": attributes, "image": image}
        return content | {"sha256": hashlib.sha256(item.data).hexdigest()}
