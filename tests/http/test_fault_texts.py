"""A wrong parameter is named with its value, the limit and the cure."""

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


JOBS, TRAINING, DELETE = "GET /jobs", "POST /jobs/train", "POST /galleries/shop/items/delete"
REBUILD, SWAP = "POST /galleries/shop/rebuild", "POST /galleries/shop/swap"
WRONG: list[tuple[str, object, str]] = [
    ("GET /galleries/shop/items?limit=500", None, "limit = '500' is too large; use 200 or less."),
    (f"{JOBS}?limit=0", None, "limit = '0' is too small; use 1 or more."),
    (f"{JOBS}?limit=x", None, "limit = 'x' is not a whole number; use only digits."),
    (
        f"{JOBS}?limit={'9' * 5000}",
        *(None, f"limit = '{'9' * 40}' has too many digits; use a smaller number."),
    ),
    (
        "GET /galleries/shop/feedback?format=xml",
        *(None, "format = 'xml' is not a valid choice; use 'csv' or 'json'."),
    ),
    (f"{JOBS}/{'a' * 65}", None, "job_id has 65 characters; use 64 or fewer."),
    (
        *(REBUILD, {"bundle_id": "../x"}),
        "bundle_id = '../x' does not have the right form; use 12 to 64 of the characters 0-9 "
        "and a-f.",
    ),
    (REBUILD, {"bundle_id": 5}, "bundle_id must be a string (got 5); use a string."),
    (REBUILD, {}, "bundle_id is missing; send it in the JSON body."),
    (SWAP, {"with": "../x"}, f"with = '../x' does not have the right form; use {NAME_FORM}."),
    (
        *(TRAINING, {**TRAIN, "gate": {"max_recall_loss": -1, "min_queries": 2.5}}),
        "gate.max_recall_loss = -1 is too small; use 0.0 or more. gate.min_queries = 2.5 is "
        "not a whole number; use only digits.",
    ),
    (
        *(TRAINING, {**TRAIN, "feedback": "perhaps"}),
        "feedback = 'perhaps' is neither true nor false; use one of the two.",
    ),
    (
        *(TRAINING, {**TRAIN, "overrides": 3}),
        "overrides must be an object (got 3); use names with values, such as {...}.",
    ),
    (TRAINING, {**TRAIN, "more": 1}, "more is not a parameter here; /docs lists the parameters."),
    (DELETE, {"keys": []}, "keys has 0 entries; use 1 or more."),
    (DELETE, {"keys": "a"}, "keys must be a list (got 'a'); use a list."),
    (DELETE, {"keys": ["a", 3]}, "keys[1] must be a string (got 3); use a string."),
]


@pytest.mark.parametrize(("operation", "body", "message"), WRONG)
def test_a_wrong_parameter_is_named_with_its_cure(running, operation, body, message: str) -> None:
    method, path = operation.split()
    answer = running.client.request(method, path, json=body)
    found = assert_problem(answer, 422, "invalid-parameter")
    assert found["detail"] == message
    assert found["errors"][0]["name"] == message.split()[0]


def patterns(schema: Any) -> Iterator[str]:
    """Every `pattern` of a JSON schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from patterns(part)


def test_every_pattern_of_a_parameter_or_setting_is_described_in_words(running) -> None:
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
