"""The OpenAPI document: examples, every error answer, and limits that are true."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.fake import FakeEmbedder
from kinlens.models import Problem
from kinlens.service import problems
from kinlens.service.app import create_app
from kinlens.service.problems import PROBLEM_TYPES, ProblemType
from kinlens.service.settings import Settings
from tests.golden.contract import CONTRACT, contract_now
from tests.support.servers import DEFAULTS, run

API = Path(__file__).parents[2] / "docs" / "api.md"
PROBLEM = "application/problem+json"
ALL_TYPES = {
    *PROBLEM_TYPES.values(),
    *(k for k in vars(problems).values() if isinstance(k, ProblemType)),
}


@pytest.fixture
def document(running_service) -> dict[str, Any]:
    found: dict[str, Any] = running_service.client.get("/openapi.json").json()
    return found


def test_the_contract_is_the_one_that_clients_rely_on() -> None:
    """If the change is meant: python -m tests.golden.contract, and commit it with its reason."""
    assert contract_now() == json.loads(CONTRACT.read_text(encoding="utf-8"))


Shown = dict[tuple[str, str, str], dict[str, Any]]


def shown_by(document: dict[str, Any]) -> Shown:
    """The problems that each operation shows, by method, path and status."""
    return {
        (method, path, status): response.get("content", {}).get(PROBLEM, {}).get("examples", {})
        for path, item in document["paths"].items()
        for method, operation in item.items()
        for status, response in operation["responses"].items()
    }


def test_every_error_answer_of_every_route_has_real_problems_as_examples(document) -> None:
    known = {kind.type: kind for kind in ALL_TYPES}
    statuses: dict[str, set[str]] = {}
    for (method, path, status), examples in shown_by(document).items():
        statuses.setdefault(f"{method} {path}", set()).add(status)
        if int(status) < 400 or (path in ("/ready", "/startup") and status == "503"):
            continue
        response = document["paths"][path][method]["responses"][status]
        assert response["content"][PROBLEM]["schema"] == {"$ref": "#/components/schemas/Problem"}
        assert examples, (method, path, status)
        for slug, example in examples.items():
            shown = Problem.model_validate(example["value"])
            kind = known[shown.type]
            assert (kind.slug, kind.status, kind.title) == (slug, int(status), shown.title)
            assert shown.status == int(status)
        assert ("Retry-After" in response.get("headers", {})) is (status in ("429", "503"))
    assert all({"400", "500"} <= found for found in statuses.values())


def test_routes_document_the_problems_they_can_return(document) -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for (method, path, _), examples in shown_by(document).items():
        found.setdefault((method, path), set()).update(examples)
    anywhere = {"unknown-host", "internal"}
    assert found["get", "/live"] == found["get", "/metrics"] == anywhere
    assert found["get", "/startup"] == anywhere
    assert found["get", "/ready"] == anywhere | {"unknown-gallery", "invalid-parameter"}
    anywhere |= {"key-needed", "not-allowed", "scope-needed", "rate-limited"}
    looked_up = {"overloaded", "deadline-exceeded", "gallery-unavailable"}
    assert found["get", "/galleries"] == anywhere | looked_up
    photo = anywhere | looked_up | {"unknown-gallery", "unknown-item", "invalid-parameter"}
    assert found["get", "/galleries/{name}/items/{item_id}/image"] == photo
    similar = photo | {"invalid-filter"}
    assert found["get", "/galleries/{name}/items/{item_id}/similar"] == similar
    body = {"bad-request", "body-too-slow", "body-too-large", "unsupported-media-type"}
    assert found["post", "/search"] == similar | body | {
        "empty-image", "image-too-many-bytes", "image-too-large", "image-too-costly",
        "unsupported-format", "corrupt-image", "search-unavailable", "model-unavailable",
    }  # fmt: skip
    refused = {"invalid-parameter", "overloaded"}
    assert found["post", "/search/batch"] == anywhere | body | refused


def test_the_api_page_lists_the_same_problems_under_the_same_status(document) -> None:
    rows = re.findall(r"^\| (\d{3}) \| ((?:`[a-z-]+`(?:, )?)+) \|", API.read_text("utf-8"), re.M)
    page = {(slug, status) for status, slugs in rows for slug in re.findall("[a-z-]+", slugs)}
    shown = {
        (slug, status)
        for (_, _, status), examples in shown_by(document).items()
        for slug in examples
    }
    assert page - shown == {("not-found", "404"), ("method-not-allowed", "405")}
    assert shown <= page


def test_every_reference_points_to_a_schema(document) -> None:
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= document["components"]["schemas"].keys()


def test_every_example_of_a_search_request_is_answered(document, running_service) -> None:
    for path in ("/search", "/search/batch"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        for shown in content["application/json"]["examples"].values():
            if {"filter", "facets"} & shown["value"].keys():
                continue  # the gallery of this service has no attributes
            response = running_service.client.post(path, json=shown["value"])
            expected = 404 if "positives" in shown["value"] else 200  # keys of another shop
            assert response.status_code == expected, response.text


class DocsPage(HTMLParser):
    """The texts of the row heads of each section, and the addresses that the page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[set[str]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self._is_head = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [text or "" for name, text in attrs if name in ("href", "src")]
        if tag == "section":
            self.rows.append(set())
        self._is_head = self._is_head or (tag == "th" and ("scope", "row") in attrs)
        assert not any(name == "style" for name, _ in attrs), "the policy allows no inline style"

    def handle_endtag(self, tag: str) -> None:
        self._is_head = self._is_head and tag != "th"

    def handle_data(self, data: str) -> None:
        if self._is_head:
            self.rows[-1].add(data)


def field_names(schema: Any, document: dict[str, Any]) -> Iterator[str]:
    """The name of every field of a body, at any depth."""
    if isinstance(schema, list):
        for one in schema:
            yield from field_names(one, document)
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield from field_names(
            document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document
        )
    for name, inner in schema.get("properties", {}).items():
        yield name
        yield from field_names(inner, document)
    for part in ("items", "anyOf", "oneOf", "allOf"):
        yield from field_names(schema.get(part), document)


def test_every_parameter_field_and_status_of_the_document_is_on_its_page(tmp_path) -> None:
    settings = Settings(state=tmp_path, feedback="pairs", **DEFAULTS)
    service = run(create_app(settings, FakeEmbedder(), {}))
    document = service.client.get("/openapi.json").json()
    page = DocsPage(service.client.get("/docs").text)
    service.close()
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len(operations) == len(page.rows)
    total = 0
    for operation, rows in zip(operations, page.rows, strict=True):
        contents = [*operation.get("requestBody", {}).get("content", {}).values()]
        for status, answer in operation["responses"].items():
            contents += answer.get("content", {}).values() if status < "3" else ()
        names = {parameter["name"] for parameter in operation.get("parameters", ())}
        names |= {name for one in contents for name in field_names(one.get("schema"), document)}
        last_words = {re.split(r"[.]", row)[-1] for row in rows}
        assert names | operation["responses"].keys() <= last_words
        total += len(names)
    assert total > 100


def test_the_docs_page_names_no_other_host_and_runs_no_script(running_service) -> None:
    page = DocsPage(running_service.client.get("/docs").text)
    assert not {"script", "style"} & page.tags
    for address in page.addresses:
        assert address[0] in "/#"
        assert not address.startswith("//")
        if address.startswith("/"):
            assert running_service.client.get(address).status_code == 200
