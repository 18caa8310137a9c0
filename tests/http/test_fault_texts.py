"""What a client sends in the wrong form is named with its value, the limit and the cure."""

from collections.abc import Iterator
from typing import Any

import pytest

from kinlens.service.problems import fault_text
from kinlens.service.settings import Settings
from tests.support.market import start_market
from tests.support.servers import Running
from tests.support.shops import assert_problem

NAME_FORM = "1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit"
TRAIN = {"gallery": "shop", "job": "shop"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    shop = start_market(tmp_path_factory.mktemp("faults") / "state")
    yield shop.running
    shop.close()


@pytest.mark.parametrize(
    ("operation", "body", "name", "message"),
    [
        (
            "GET /galleries/shop/items?limit=500",
            None,
            "limit",
            "limit = '500' is too large; use 200 or less.",
        ),
        ("GET /jobs?limit=0", None, "limit", "limit = '0' is too small; use 1 or more."),
        (
            "GET /jobs?limit=x",
            None,
            "limit",
            "limit = 'x' is not a whole number; use only digits.",
        ),
        (
            f"GET /jobs?limit={'9' * 5000}",
            None,
            "limit",
            f"limit = '{'9' * 40}' has too many digits; use a smaller number.",
        ),
        (
            "GET /galleries/shop/feedback?format=xml",
            None,
            "format",
            "format = 'xml' is not a valid choice; use 'csv' or 'json'.",
        ),
        (
            f"GET /jobs/{'a' * 65}",
            None,
            "job_id",
            "job_id has 65 characters; use 64 or fewer.",
        ),
        (
            "POST /galleries/shop/rebuild",
            {"bundle_id": "../x"},
            "bundle_id",
            "bundle_id = '../x' does not have the right form; use 12 to 64 of the characters 0-9 "
            "and a-f.",
        ),
        (
            "POST /galleries/shop/rebuild",
            {"bundle_id": 5},
            "bundle_id",
            "bundle_id must be a string (got 5); use a string.",
        ),
        (
            "POST /galleries/shop/rebuild",
            {},
            "bundle_id",
            "bundle_id is missing; send it in the JSON body.",
        ),
        (
            "POST /galleries/shop/swap",
            {"with": "../x"},
            "with",
            f"with = '../x' does not have the right form; use {NAME_FORM}.",
        ),
        (
            "POST /jobs/train",
            {**TRAIN, "gate": {"max_recall_loss": -1, "min_queries": 2.5}},
            "gate.max_recall_loss",
            "gate.max_recall_loss = -1 is too small; use 0.0 or more. gate.min_queries = 2.5 is "
            "not a whole number; use only digits.",
        ),
        (
            "POST /jobs/train",
            {**TRAIN, "feedback": "perhaps"},
            "feedback",
            "feedback = 'perhaps' is neither true nor false; use one of the two.",
        ),
        (
            "POST /jobs/train",
            {**TRAIN, "overrides": 3},
            "overrides",
            "overrides must be an object (got 3); use names with values, such as {...}.",
        ),
        (
            "POST /jobs/train",
            {**TRAIN, "more": 1},
            "more",
            "more is not a parameter here; /docs lists the parameters.",
        ),
        (
            "POST /galleries/shop/items/delete",
            {"keys": []},
            "keys",
            "keys has 0 entries; use 1 or more.",
        ),
        (
            "POST /galleries/shop/items/delete",
            {"keys": "a"},
            "keys",
            "keys must be a list (got 'a'); use a list.",
        ),
        (
            "POST /galleries/shop/items/delete",
            {"keys": ["a", 3]},
            "keys[1]",
            "keys[1] must be a string (got 3); use a string.",
        ),
    ],
)
def test_a_wrong_parameter_is_named_with_value_limit_and_cure(
    running: Running, operation: str, body: object, name: str, message: str
) -> None:
    method, path = operation.split()
    answer = running.client.request(method, path, json=body)
    found = assert_problem(answer, 422, "invalid-parameter")
    assert found["detail"] == message
    assert found["errors"][0]["name"] == name


def patterns(schema: Any) -> Iterator[str]:
    """Every `pattern` of a JSON schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from patterns(part)


def test_every_pattern_of_a_parameter_or_setting_is_described_in_words(running: Running) -> None:
    document = running.client.get("/openapi.json").json()
    found = {*patterns(document), *patterns(Settings.model_json_schema())}
    assert len(found) > 3
    for pattern in found:
        fault = {"type": "string_pattern_mismatch", "input": "?", "ctx": {"pattern": pattern}}
        message = fault_text(fault, "name")
        assert message.startswith("name = '?' does not have the right form; use ")
        assert pattern not in message


def test_a_fault_of_an_unknown_type_keeps_its_own_text() -> None:
    fault = {"type": "new_in_pydantic", "msg": "Something is odd", "input": 1}
    assert fault_text(fault, "name") == "name: Something is odd."
