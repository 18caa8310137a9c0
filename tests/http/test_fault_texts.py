"""A wrong parameter is named with its value, the limit and the cure."""

from collections.abc import Iterator

import pytest

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
    (f"{JOBS}?limit=x", None, "limit = 'x' is not a whole number; use only digits."),
    (
        f"{JOBS}?limit={'9' * 5000}",
        *(None, f"limit = '{'9' * 40}' has too many digits; use a smaller number."),
    ),
    (
        "GET /galleries/shop/feedback?format=xml",
        *(None, "format = 'xml' is not a valid choice; use 'csv' or 'json'."),
    ),
    (SWAP, {"with": "../x"}, f"with = '../x' does not have the right form; use {NAME_FORM}."),
    (REBUILD, {"bundle_id": 5}, "bundle_id must be a string (got 5); use a string."),
    (REBUILD, {}, "bundle_id is missing; send it in the JSON body."),
    (
        *(TRAINING, {**TRAIN, "gate": {"max_recall_loss": -1, "min_queries": 2.5}}),
        "gate.max_recall_loss = -1 is too small; use 0.0 or more. gate.min_queries = 2.5 is "
        "not a whole number; use only digits.",
    ),
    (TRAINING, {**TRAIN, "more": 1}, "more is not a parameter here; /docs lists the parameters."),
    (DELETE, {"keys": []}, "keys has 0 entries; use 1 or more."),
    (DELETE, {"keys": ["a", 3]}, "keys[1] must be a string (got 3); use a string."),
]


@pytest.mark.parametrize(("operation", "body", "message"), WRONG)
def test_a_wrong_parameter_is_named_with_its_cure(running, operation, body, message: str) -> None:
    method, path = operation.split()
    answer = running.client.request(method, path, json=body)
    found = assert_problem(answer, 422, "invalid-parameter")
    assert found["detail"] == message
    assert found["errors"][0]["name"] == message.split()[0]
