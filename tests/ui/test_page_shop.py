"""The shop that the tests of the page ask answers as the service promises."""

from typing import Any

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from service.api import models
from tests.support.page_shop import Shop

PICTURE = {"image": ("a.png", Shop().galleries["shop"][3].data)}
ITEM = "/galleries/shop/items/3"


@pytest.mark.parametrize(
    ("method", "path", "model", "sent"),
    [
        ("post", "/search", models.SearchAnswer, {"files": PICTURE}),
        ("post", "/search", models.SearchAnswer, {"files": PICTURE, "data": {"group_by": "class"}}),
        ("post", "/search", models.Problem, {"files": {"image": ("a.png", b"no picture")}}),
        ("get", "/galleries", models.Galleries, {}),
        ("get", "/galleries/shop", models.GalleryDetail, {}),
        ("get", "/galleries/shop/items", models.ItemPage, {}),
        ("get", ITEM, models.ItemModel, {}),
        ("get", f"{ITEM}/similar", models.SearchAnswer, {}),
        ("get", "/samples", models.SamplesAnswer, {}),
        ("get", "/live", models.Live, {}),
    ],
)
def test_each_answer_is_one_of_the_service(
    method: str, path: str, model: type[BaseModel], sent: dict[str, Any]
) -> None:
    with TestClient(Shop().app()) as client:
        answer = client.request(method, path, **sent)
    assert answer.is_success is (model is not models.Problem)
    content = answer.json()
    model.model_validate(content)
    assert content.keys() <= model.model_fields.keys()
