"""Problem details: one row for every class of the error tree, nothing internal in public."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import Response

from embedder import errors
from embedder.errors import KinlensError, OverloadedError
from service.problems import KINDS, from_kinlens, kind_of


def tree(root: type[KinlensError]) -> Iterator[type[KinlensError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


CLASSES = sorted(
    {cls for cls in tree(KinlensError) if cls.__module__ == errors.__name__},
    key=lambda cls: cls.__name__,
)


def test_every_class_of_the_tree_has_a_row_and_every_row_a_class() -> None:
    assert set(KINDS) == set(CLASSES)
    assert len(CLASSES) > 20


def answer(error: KinlensError) -> Response:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/search",
        "headers": [],
        "query_string": b"",
        "server": ("test", 80),
        "scheme": "http",
        "root_path": "",
        "state": {"request_id": "r1"},
    }
    return asyncio.run(from_kinlens(Request(scope), error))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_error_becomes_a_problem_that_shows_its_text_only_if_public(
    cls: type[KinlensError],
) -> None:
    response = answer(cls("the secret is /var/lib"))
    problem = json.loads(bytes(response.body))
    kind = kind_of(cls("x"))
    assert response.media_type == "application/problem+json"
    assert response.status_code == problem["status"] == kind.status
    assert problem["type"] == f"urn:kinlens:problem:{kind.slug}"
    assert problem["title"] == kind.title
    assert problem["request_id"] == "r1"
    assert problem["instance"] == "/search"
    assert ("secret" in problem["detail"]) is kind.public
    assert ("retry-after" in response.headers) is (kind.status in (429, 503))


def test_errors_of_the_model_or_of_a_gallerys_files_are_not_public() -> None:
    for cls in (errors.BundleError, errors.BundleCorruptError, errors.GalleryCorruptError):
        assert not kind_of(cls("x")).public


def test_an_overloaded_service_says_when_to_come_back() -> None:
    assert answer(OverloadedError("full", retry_after_s=7)).headers["retry-after"] == "7"


def test_a_class_without_a_row_takes_that_of_its_parent() -> None:
    class NewImageError(errors.CorruptImageError):
        pass

    assert kind_of(NewImageError("x")).status == 422
    assert kind_of(ValueError("x")).status == 500


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/search", 405), ("POST", "/live", 405)],
)
def test_unknown_addresses_and_wrong_methods_are_problems(
    running_service, method: str, path: str, status: int
) -> None:
    response = running_service.client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["instance"] == path
    assert problem["request_id"]
    if status == 405:
        assert response.headers["allow"] in problem["detail"]
