"""A service that keeps things in a folder and lets everybody write, for tests of galleries."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from embedder.fake import FakeEmbedder
from embedder.session import Embedder
from service.app import create_app
from service.settings import Settings
from tests.support.servers import DEFAULTS, Running, run

PROBLEM = "application/problem+json"


class Shop:
    """A running service with a managed gallery `shop`."""

    def __init__(self, running: Running, state: Path) -> None:
        self.running = running
        self.client = running.client
        self.state = state

    def put(self, items: Mapping[str, bytes], gallery: str = "shop", **attributes: Any) -> Any:
        """Put items as a form, all with the same attributes; the checked answer."""
        response = self.put_form(items, [json.dumps(attributes)] * len(items), gallery)
        assert response.status_code == 200, response.text
        return response.json()

    def put_form(
        self, items: Mapping[str, bytes], attributes: Sequence[str] = (), gallery: str = "shop"
    ) -> httpx.Response:
        parts: list[Any] = [("image", ("x.png", data, "image/png")) for data in items.values()]
        parts += [("key", (None, key)) for key in items]
        parts += [("attributes", (None, text)) for text in attributes]
        return self.client.put(f"/galleries/{gallery}/items", files=parts)

    def put_json(self, items: Sequence[Mapping[str, Any]], gallery: str = "shop") -> httpx.Response:
        return self.client.put(f"/galleries/{gallery}/items", json={"items": items})

    def items(self, gallery: str = "shop", **query: Any) -> Any:
        response = self.client.get(f"/galleries/{gallery}/items", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def gallery(self, name: str = "shop") -> Any:
        response = self.client.get(f"/galleries/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    def pictures(self, gallery: str = "shop") -> set[str]:
        """The contents of the uploaded pictures that lie in a managed gallery."""
        files = (self.state / "galleries" / gallery / "pictures").glob("*/*")
        return {file.name for file in files if len(file.name) == 64}

    def close(self) -> None:
        self.running.close()


def start_shop(
    state: Path, embedder: Embedder | None = None, *, create: bool = True, **settings: Any
) -> Shop:
    """Serve the folder `state`; with a new gallery `shop` if there is none."""
    given = DEFAULTS | {"state": state, "anonymous_scopes": ("admin",)} | settings
    running = run(create_app(Settings(**given), embedder or FakeEmbedder()))
    shop = Shop(running, state)
    if create and shop.client.get("/galleries/shop").status_code == 404:
        shop.client.post("/galleries", json={"name": "shop"}).raise_for_status()
    return shop


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def assert_problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = response.json()
    assert problem["type"] == f"urn:kinlens:problem:{slug}"
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    return problem
