"""`POST /v1/embeddings`: vectors in the form of OpenAI, for its own client and for ours."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kinlens.client import Client
from kinlens.embedder.fake import FakeEmbedder
from kinlens.errors import InvalidError, NotAllowedError, NotFoundError
from tests.support.market import photo, text_of
from tests.support.seams import KeyStore, Limits
from tests.support.servers import DEFAULTS, GatedEmbedder, create_app, run, settings_of
from tests.support.shops import Shop, assert_problem, start_shop
from tests.tiny import encoded
from tests.tiny import photo as tiny_photo

PATH = "/v1/embeddings"
Vectors = NDArray[np.float32]


@pytest.fixture(scope="module")
def model() -> GatedEmbedder:
    return GatedEmbedder()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, model: GatedEmbedder) -> Iterator[Shop]:
    made = start_shop(tmp_path_factory.mktemp("embeddings") / "state", model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    embedder = FakeEmbedder()
    return embedder.embed(np.stack([embedder.preprocess(photo(n)) for n in range(4)]))


def post(shop: Shop, body: dict[str, Any]) -> httpx.Response:
    return shop.client.post(PATH, json=body)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{text_of(data)}"


def test_images_are_embedded_in_both_encodings_and_in_order(shop, vectors) -> None:
    inputs = [data_url(photo(0)), text_of(photo(1)), text_of(photo(2))]
    answer = post(shop, {"input": inputs, "model": "fake"}).json()
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    found = np.array([one["embedding"] for one in answer["data"]])
    assert found == pytest.approx(vectors[:3], abs=1e-6)
    assert post(shop, {"input": inputs, "encoding_format": None}).json()["data"] == answer["data"]
    response = post(shop, {"input": inputs, "encoding_format": "base64"})
    texts = [one["embedding"] for one in response.json()["data"]]
    packed = np.stack([np.frombuffer(base64.b64decode(text), "<f4") for text in texts])
    assert np.array_equal(packed, found.astype(np.float32))
    assert response.headers["x-kinlens-bundle"] == "fake"
    alone = post(shop, {"input": inputs[0]}).json()
    assert alone["data"][0]["embedding"] == found[0].tolist()


def test_vectors_are_shared_with_searches_through_the_cache(shop, model) -> None:
    data = encoded(tiny_photo(91))
    assert post(shop, {"input": data_url(data)}).status_code == 200
    batches = len(model.batches)
    assert shop.search(data).status_code == 200
    assert post(shop, {"input": [data_url(data)] * 2}).status_code == 200
    assert len(model.batches) == batches


def test_dimensions_are_the_first_numbers_with_norm_1(shop, vectors) -> None:
    answer = post(shop, {"input": data_url(photo(0)), "dimensions": 8}).json()
    cut = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
    assert answer["data"][0]["embedding"] == pytest.approx(cut, abs=1e-6)
    for dimensions, message in ((33, "not one of 1 to 32"), (0, "dimensions = 0")):
        refused = post(shop, {"input": data_url(photo(0)), "dimensions": dimensions})
        assert message in assert_problem(refused, 422, "invalid-parameter")["detail"]


def test_a_vector_of_an_answer_finds_its_item(shop) -> None:
    shop.put({f"{n}": photo(n) for n in range(4)})
    embedded = post(shop, {"input": data_url(photo(2))}).json()["data"][0]["embedding"]
    found = shop.client.post("/search", json={"vectors": [{"vector": embedded}], "k": 1}).json()
    assert found["hits"][0]["key"] == "2"


PNG = data_url(photo(0))
BAD: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "a text": ({"input": "a red shoe"}, 422, "invalid-parameter", "teach-words"),
    "a word": ({"input": [PNG, "shoe"]}, 422, "invalid-parameter", "input[1] = "),
    "an address": ({"input": "https://x.example/a.png"}, 422, "invalid-parameter", "data: URL"),
    "tokens": ({"input": [1, 2, 3]}, 422, "invalid-parameter", "a text or a list of texts"),
    "nothing": ({"input": []}, 422, "invalid-parameter", "input has 0 entries"),
    "no input": ({"model": "fake"}, 422, "invalid-parameter", "input"),
    "many": ({"input": ["a"] * 257}, 422, "invalid-parameter", "send from 1 to 256"),
    "cut": ({"input": [PNG, PNG[:-200]]}, 422, "corrupt-image", "input[1]"),
    "no image": ({"input": f"data:;base64,{text_of(b'x')}"}, 415, "unsupported-format", "input[0]"),
    "no base64": ({"input": "data:image/png;base64,!"}, 422, "invalid-parameter", "not base64"),
    "another model": ({"input": PNG, "model": "clip"}, 404, "unknown-model", "fake (fake)"),
    "another form": ({"input": PNG, "encoding_format": "x"}, 422, "invalid-parameter", "float"),
    "a field": ({"input": PNG, "size": 3}, 422, "invalid-parameter", "size is not a parameter"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_has_a_problem_and_the_error_of_openai(shop, name: str) -> None:
    body, status, slug, message = BAD[name]
    problem = assert_problem(post(shop, body), status, slug)
    assert message in problem["detail"]
    error = problem["error"]
    assert error["message"] == problem["detail"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == ("model_not_found" if status == 404 else slug)


def test_a_text_is_refused_before_any_image_is_embedded(shop, model) -> None:
    batches = len(model.batches)
    new = data_url(encoded(tiny_photo(92)))
    assert post(shop, {"input": [new, "a red shoe"]}).status_code == 422
    assert len(model.batches) == batches


def test_vectors_need_the_scope_embed(tmp_path, closes) -> None:
    state = tmp_path / "state"
    store = KeyStore(state / "keys.json")
    texts = {scope: store.create(scope, [scope]) for scope in ("search", "write", "embed")}
    shop = closes(start_shop(state, create=False, anonymous_scopes=("search",)))
    assert post(shop, {"input": PNG}).status_code == 401
    for scope, text in texts.items():
        headers = {"authorization": f"Bearer {text}"}
        response = shop.client.post(PATH, json={"input": PNG}, headers=headers)
        assert response.status_code == (200 if scope == "embed" else 403)
        assert response.is_success or response.json()["error"]["code"] == "scope-needed"
        allowed = shop.client.get("/galleries", headers=headers).status_code
        assert allowed == (403 if scope == "embed" else 200)


def test_a_bound_key_only_embeds_with_the_models_of_its_galleries(tmp_path, closes) -> None:
    state = tmp_path / "state"
    store = KeyStore(state / "keys.json")
    text = store.create("bound", ["embed"], limits=Limits(galleries=("shop",)))
    other = store.create("other", ["embed"], limits=Limits(galleries=("nowhere",)))
    shop = closes(start_shop(state))
    statuses = [
        shop.client.post(PATH, json={"input": PNG}, headers={"X-API-Key": key}).status_code
        for key in (text, other)
    ]
    assert statuses == [200, 404]


def test_each_input_costs_a_unit_and_the_limits_of_bodies_hold(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state", rate_limit_per_address="4/hour"))
    assert post(shop, {"input": [PNG] * 3}).status_code == 200
    refused = post(shop, {"input": [PNG] * 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate-limited")
    assert refused.headers["retry-after"]


def test_workers_of_a_bundle_give_the_vectors_that_its_gallery_stores(
    tiny_settings, tiny_bundle, closes
) -> None:
    settings = settings_of(**DEFAULTS | tiny_settings, anonymous_scopes=("admin",))
    service = closes(run(create_app(settings)))
    with Client(service.url) as client:
        images = [client.image("shop", f"{n}.png") for n in range(8)]
        stored = [client.vector("shop", f"{n}.png") for n in range(8)]
        for model in (tiny_bundle.bundle_id, tiny_bundle.bundle_id[:12], "tiny", None):
            found = client.embed(images, model=model)
            assert found.model == tiny_bundle.bundle_id == stored[0].bundle_id
            for one, item in zip(found.data, stored, strict=True):
                assert one.embedding == pytest.approx(item.vector, abs=1e-4)
        hits = client.search(vectors=[{"vector": found.data[3].embedding}], k=1).hits
        assert (hits[0].key, hits[0].score) == ("3.png", pytest.approx(1, abs=1e-4))
        with pytest.raises(NotFoundError, match="does not exist"):
            client.embed(images[0], model=tiny_bundle.bundle_id[:11])


def test_the_client_embeds_images(shop, vectors) -> None:
    with Client(shop.running.url) as client:
        found = client.embed([photo(0), photo(3)], model="fake", dimensions=32)
        assert [one.index for one in found.data] == [0, 1]
        assert found.data[1].embedding == pytest.approx(vectors[3], abs=1e-6)
        assert client.embed(photo(1)).data[0].embedding == pytest.approx(vectors[1], abs=1e-6)
        with pytest.raises(InvalidError, match="not one of 1 to 32"):
            client.embed(photo(1), dimensions=64)


def test_the_client_of_openai_is_answered(tmp_path, closes, vectors) -> None:
    openai = pytest.importorskip("openai")
    state = tmp_path / "state"
    key = KeyStore(state / "keys.json").create("provider", ["embed"])
    shop = closes(start_shop(state, create=False, anonymous_scopes=("search",)))
    made = {"base_url": f"{shop.running.url}/v1", "max_retries": 0}
    with openai.OpenAI(api_key=key, **made) as client:
        inputs = [data_url(photo(0)), data_url(photo(1))]
        for form in ("float", "base64", None):
            more = {} if form is None else {"encoding_format": form}
            answer = client.embeddings.create(model="fake", input=inputs, **more)
            assert answer.usage.total_tokens == 2
            for one, vector in zip(answer.data, vectors, strict=False):
                found: Any = one.embedding
                if isinstance(found, str):
                    found = np.frombuffer(base64.b64decode(found), "<f4")
                assert found == pytest.approx(vector, abs=1e-6)
        with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
            client.embeddings.create(model="text-embedding-3-small", input=inputs)
        assert (unknown.value.code, unknown.value.type) == (
            "model_not_found",
            "invalid_request_error",
        )
        with pytest.raises(openai.UnprocessableEntityError, match="teach-words") as refused:
            client.embeddings.create(model="fake", input="a red shoe")
        assert refused.value.param == "input"
    wrong = openai.OpenAI(api_key="kl_wrong", **made)
    with wrong, pytest.raises(openai.AuthenticationError, match="unknown"):
        wrong.embeddings.create(model="fake", input=inputs)
    text = KeyStore(state / "keys.json").create("till", ["search"])
    till = Client(shop.running.url, key=text)
    with till, pytest.raises(NotAllowedError, match="this needs embed"):
        till.embed(photo(0))
