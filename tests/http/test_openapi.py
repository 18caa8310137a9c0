"""The OpenAPI document: examples, every error answer, and limits that are true."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kinlens.models import Problem
from kinlens.service import problems
from kinlens.service.problems import PROBLEM_TYPES, ProblemType
from tests.golden.contract import CONTRACT, contract_now

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


def test_the_api_page_lists_the_same_problems_under_the_same_status(document) -> None:
    rows = re.findall(r"^\| (\d{3}) \| ((?:`[a-z-]+`(?:, )?)+) \|", API.read_text("utf-8"), re.M)
    page = {(slug, status) for status, slugs in rows for slug in re.findall("[a-z-]+", slugs)}
    shown = {
        (slug, status)
        for (_, _, status), examples in shown_by(document).items()
        for slug in examples
    }
    others = {("not-found", "404"), ("method-not-allowed", "405"), ("head-too-large", "431")}
    assert page - shown == others  # of requests that reach no operation
    assert shown <= page


def test_every_example_of_a_search_request_is_answered(document, running_service) -> None:
    for path in ("/search", "/search/batch"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        for shown in content["application/json"]["examples"].values():
            if {"filter", "facets"} & shown["value"].keys():
                continue  # the gallery of this service has no attributes
            response = running_service.client.post(path, json=shown["value"])
            expected = 404 if "positives" in shown["value"] else 200  # keys of another shop
            # Vectors of another model, and words without a text tower.
            expected = 422 if {"vectors", "texts"} & shown["value"].keys() else expected
            assert response.status_code == expected, response.text
