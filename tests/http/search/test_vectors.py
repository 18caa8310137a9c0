"""Vectors as views of a query: alone, with images, with weights, in every form of a request."""

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kinlens.client import Client, Query
from kinlens.embedder.fake import FakeEmbedder
from tests.support.market import COUNT, found, keys, photo, post, text_of
from tests.support.servers import GatedEmbedder
from tests.support.shops import assert_problem, publish_photos, start_shop

BATCH = "/search/batch"
Vectors = NDArray[np.float32]


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    embedder = FakeEmbedder()
    return embedder.embed(np.stack([embedder.preprocess(photo(n)) for n in range(COUNT)]))


def sent(vector: Any, **more: Any) -> dict[str, Any]:
    return {"vector": np.asarray(vector).tolist(), **more}


def base64_of(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def scores(answer: dict[str, Any]) -> dict[str, float]:
    return {hit["key"]: hit["score"] for hit in answer["hits"]}


def expected(vectors: Vectors, parts: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The score of each item for the weighted sum of the vectors of these items."""
    target = np.sum([weight * vectors[n] for n, weight in parts], axis=0)
    found = vectors @ (target / np.linalg.norm(target))
    return {f"{n:03d}.png": float(score) for n, score in enumerate(found)}


def test_a_vector_finds_what_its_image_finds(market, vectors) -> None:
    by_image = found(market, photo(3), k=COUNT)
    forms = [sent(vectors[3]), {"vector": base64_of(vectors[3])}]
    for form in forms:
        answer = found(market, k=COUNT, vectors=[form])
        assert keys(answer) == keys(by_image)
        assert scores(answer) == pytest.approx(scores(by_image), abs=1e-5)
        assert (answer["timings_ms"]["decode"], answer["timings_ms"]["embed"]) == (0, 0)
        assert answer["no_match_probability"] == pytest.approx(
            by_image["no_match_probability"], abs=1e-3
        )
    fields = {"k": (None, "2"), "vectors": (None, json.dumps(forms[:1]))}
    by_form = market.client.post("/search", files=fields)
    assert keys(by_form.json()) == keys(by_image)[:2]
    batch = post(market, {"queries": [{"vectors": forms[:1], "k": 2}]}, BATCH).json()
    assert keys(batch["answers"][0]["answer"]) == keys(by_image)[:2]


@pytest.mark.parametrize("weight", [1.0, 0.3, -0.5])
def test_images_and_vectors_are_summed_with_their_weights(market, vectors, weight: float) -> None:
    answer = found(market, photo(1), k=COUNT, vectors=[sent(vectors[2], weight=weight)])
    assert scores(answer) == pytest.approx(expected(vectors, [(1, 1.0), (2, weight)]), abs=1e-5)
    liked = found(market, k=COUNT, positives=["005.png"], vectors=[sent(vectors[2], weight=weight)])
    wanted = expected(vectors, [(5, 1.0), (2, weight)])
    del wanted["005.png"]
    assert scores(liked) == pytest.approx(wanted, abs=1e-5)


def test_images_of_a_batch_share_the_vectors_of_its_form(market, vectors) -> None:
    parts = [("image", ("a.png", photo(n), "image/png")) for n in (1, 4)]
    data = {"vectors": json.dumps([sent(vectors[2])]), "k": str(COUNT)}
    answers = market.client.post(BATCH, files=parts, data=data).json()["answers"]
    for n, outcome in zip((1, 4), answers, strict=True):
        wanted = expected(vectors, [(n, 1.0), (2, 1.0)])
        assert scores(outcome["answer"]) == pytest.approx(wanted, abs=1e-5)


def test_with_combine_best_an_answer_names_the_vector(market, vectors) -> None:
    both = [sent(vectors[2]), sent(vectors[5])]
    answer = found(market, photo(1), k=COUNT, combine="best", vectors=both)
    views = {hit["key"]: hit["view"] for hit in answer["hits"]}
    assert views["001.png"] == {"image": 1, "crop": None}
    assert views["002.png"] == {"image": None, "crop": None, "vector": 1}
    assert views["005.png"] == {"image": None, "crop": None, "vector": 2}
    assert all(scores(answer)[f"00{n}.png"] == pytest.approx(1, abs=1e-5) for n in (1, 2, 5))


def test_a_norm_within_the_tolerance_is_corrected(market, vectors) -> None:
    plain = found(market, k=3, vectors=[sent(vectors[3])])
    scaled = found(market, k=3, vectors=[sent(vectors[3].astype(np.float64) * 1.0009)])
    assert scores(scaled) == pytest.approx(scores(plain), abs=1e-6)


CROPS = [[0, 0, 0.5, 1]] * 16
UNIT = [1.0, *[0.0] * 31]
BAD: dict[str, tuple[Any, str]] = {
    "long": ([2.0, *[0.0] * 31], "the norm 2, not 1; divide it by its norm"),
    "just too long": ([1.002, *[0.0] * 31], "the norm 1.002, not 1"),
    "zero": ([0.0] * 32, "the norm 0, not 1"),
    "short": (UNIT[:16], "vector has the dimension 16, and the gallery 32"),
    "empty": ([], "0 numbers; send from 1 to 16,384"),
    "too many": ([0.0] * 20_000, "numbers; send from 1 to 16,384"),
    "words": (["a"] * 32, "vector has the entry a; send a list of numbers"),
    "booleans": ([True, *[False] * 31], "vector has the entry True"),
    "a great number": ([10**400], "beyond float64"),
    "an object": ({"x": 1}, "is not a vector"),
    "no base64": ("!!!", "is not base64 of float32 numbers"),
    "cut base64": (text_of(b"abcde"), "is not base64 of float32 numbers"),
    "no number": (base64_of(np.full(32, math.nan, np.float32)), "NaN or infinite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_vector_is_refused_with_the_cure(market, name: str) -> None:
    vector, message = BAD[name]
    refused = post(market, {"vectors": [{"vector": vector}]})
    assert message in assert_problem(refused, 422, "invalid-parameter")["detail"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"vectors": [{"vector": UNIT, "weight": 11}]}, "weight = 11"),
        ({"vectors": [{"vector": UNIT, "weight": 0}]}, "cancel out"),
        ({"vectors": [{"vector": UNIT, "weight": 0.5}], "combine": "best"}, "omit the weights"),
        ({"vectors": [{"vector": UNIT}] * 33}, "vectors has 33 entries; use 32 or fewer"),
        ({"vectors": "[1"}, "not valid JSON"),
        ({"vectors": [UNIT]}, "vectors[0]"),
        (
            {"vectors": [{"vector": UNIT}], "images": [{"data": "", "crops": CROPS}] * 16},
            "257 images, crops, vectors and texts in total; the limit is 256",
        ),
    ],
)
def test_wrong_lists_of_vectors_are_refused(market, body: dict[str, Any], message: str) -> None:
    detail = assert_problem(post(market, body), 422, "invalid-parameter")["detail"]
    assert message in detail


def test_the_client_sends_lists_and_arrays(market, vectors) -> None:
    with Client(market.url) as client:
        hits = client.search(vectors=[{"vector": vectors[3]}], k=2).hits
        assert hits[0].key == "003.png"
        both = client.search(photo(1), vectors=[{"vector": vectors[2].tolist()}], combine="best")
        assert both.hits[0].view is not None
        queries = [Query(options={"vectors": [{"vector": vectors[n]}], "k": 1}) for n in (2, 7)]
        answers = client.search_batch(queries).answers
        assert [one.answer and one.answer.hits[0].key for one in answers] == ["002.png", "007.png"]


def test_a_short_gallery_takes_whole_vectors_and_its_own(tmp_path, closes) -> None:
    embedder = FakeEmbedder()
    short = embedder.first(8)
    photos = [photo(n) for n in range(6)]
    publish_photos(tmp_path / "short", short, photos)
    settings = {"galleries": (f"short={tmp_path / 'short'}",)}
    shop = closes(start_shop(tmp_path / "state", embedder, **settings))
    pixels = [embedder.preprocess(data) for data in photos]
    for number in range(6):
        wanted = shop.running.search(photos[number], gallery="short").json()
        for vector in (embedder, short):
            [own] = vector.embed(pixels[number][None])
            answer = found(shop.running, gallery="short", vectors=[sent(own)])
            assert scores(answer) == pytest.approx(scores(wanted), abs=1e-5)
    refused = post(shop.running, {"gallery": "short", "vectors": [sent(UNIT[:16])]})
    assert "dimension 16, and the gallery 8. Send 8 or 32 numbers" in refused.json()["detail"]


def test_a_vector_waits_for_no_model(tmp_path, closes, vectors) -> None:
    model = GatedEmbedder()
    shop = closes(start_shop(tmp_path / "state", model))
    shop.put({"0": photo(0), "1": photo(1)})
    model.gate.clear()
    try:
        answer = found(shop.running, k=1, vectors=[sent(vectors[1])])
    finally:
        model.gate.set()
    assert keys(answer) == ["1"]


def test_each_vector_costs_a_unit(tmp_path, closes, vectors) -> None:
    shop = closes(start_shop(tmp_path / "state", rate_limit_per_address="6/minute"))
    many = {"vectors": [sent(vectors[n]) for n in range(6)]}
    assert post(shop.running, many).status_code == 200
    assert post(shop.running, many).status_code == 429
