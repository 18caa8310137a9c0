"""Every operation of the OpenAPI document, called with what fits it and with what does not."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import strategies as st
from PIL import Image
from schemathesis.generation import GenerationMode

from embedder.bundle import Bundle
from embedder.fake import FakeEmbedder
from service.app import create_app
from service.security.keys import KeyStore
from service.settings import Settings
from tests.service.conftest import DEFAULTS, FakeGallery, Running, run
from tests.tiny import encoded, picture

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
EXAMPLES = 400 if LONG else 10
SEED = 5


class Target:
    """A service with a gallery of the settings (`shop`), one of its own (`live`), and a job."""

    def __init__(self, running: Running, key: str) -> None:
        self.running = running
        self.client = running.client
        self.key = f"Bearer {key}"
        self.client.headers["Authorization"] = self.key
        self.jobs: list[str] = []

    def refill(self) -> None:
        """Put back what the calls so far have removed."""
        if self.client.get("/galleries/live").status_code == 404:
            self.client.post("/galleries", json={"name": "live"}).raise_for_status()
        parts: list[Any] = []
        for number in range(4):
            parts += [
                ("image", ("x.png", encoded(picture(number)))),
                ("key", (None, f"{number}.png")),
                ("attributes", (None, json.dumps({"colour": "red", "price": number}))),
            ]
        self.client.put("/galleries/live/items", files=parts).raise_for_status()
        started = self.client.post("/galleries/live/compact")
        if started.status_code == 202:
            self.jobs.append(started.json()["id"])


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle, tiny_gallery: Path
) -> Iterator[Target]:
    state = tmp_path_factory.mktemp("state")
    key = KeyStore(state / "keys.json").create("fuzz", ["admin"])
    settings = DEFAULTS | {
        "bundle": tiny_bundle.path,
        "galleries": (f"shop={tiny_gallery}",),
        "state": state,
        "samples": tiny_gallery.parent / "pictures",
        "jobs": "elsewhere",
        "training_command": "true",
    }
    running = run(create_app(Settings(**settings)))
    target = Target(running, key)
    target.refill()
    yield target
    running.close()


def _schema() -> Any:
    """The document of a service with a folder for state, whose tests are made before it runs."""
    embedder = FakeEmbedder()
    galleries = {"shop": FakeGallery(embedder, [encoded(picture(0))])}
    app = create_app(Settings(**DEFAULTS), embedder, galleries)
    schema = schemathesis.openapi.from_dict(app.openapi())
    schema.config.seed = SEED
    schema.config.generation.update(max_examples=EXAMPLES, modes=list(GenerationMode))
    return schema


schema = _schema()


@schema.parametrize()
def test_every_operation_keeps_to_the_document(case: Any, target: Target) -> None:
    case.call_and_validate(base_url=target.running.url, headers={"Authorization": target.key})
