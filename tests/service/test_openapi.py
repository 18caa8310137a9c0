"""The OpenAPI document: examples, every error answer, and limits that are true."""

import re
from typing import Any

import pytest

from service.schemas import SearchAnswer


@pytest.fixture
def document(running_service) -> dict[str, Any]:
    found: dict[str, Any] = running_service.client.get("/openapi.json").json()
    return found


def references(value: Any) -> set[str]:
    text = str(value)
    return set(re.findall(r"#/components/schemas/(\w+)", text))


def test_a_search_documents_every_error_answer_as_a_problem(document) -> None:
    responses = document["paths"]["/search"]["post"]["responses"]
    assert {"200", "400", "404", "413", "415", "422", "503"} <= set(responses)
    for status, response in responses.items():
        if status != "200":
            content = response["content"]["application/problem+json"]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            assert content["example"]["status"] == int(status)


def test_every_reference_points_to_a_schema(document) -> None:
    assert references(document) <= set(document["components"]["schemas"])


def test_the_examples_fit_their_schemas(document) -> None:
    (example,) = document["components"]["schemas"]["SearchAnswer"]["examples"]
    assert SearchAnswer.model_validate(example).model_dump() == example


def test_the_limits_in_the_document_are_those_of_the_settings(start_service) -> None:
    service = start_service(max_k=50, default_k=5)
    schemas = service.client.get("/openapi.json").json()["components"]["schemas"]
    (form,) = (schema for name, schema in schemas.items() if name.startswith("Body_"))
    k = form["properties"]["k"]
    assert (k["minimum"], k["maximum"], k["default"]) == (1, 50, 5)
    assert form["required"] == ["image"]


def test_a_smaller_max_k_is_enforced(start_service, pictures) -> None:
    service = start_service(max_k=50, default_k=5)
    assert service.search(pictures[0], k=50).status_code == 200
    refused = service.search(pictures[0], k=51)
    assert refused.status_code == 422
    assert "1 to 50" in refused.json()["detail"]
    assert service.search(pictures[0]).json()["k"] == 5
