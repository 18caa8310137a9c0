"""Words as queries: alone, with an image, against an image, and where a bundle knows none."""

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kinlens.client import Client, Query
from kinlens.commands.__main__ import app as commands
from kinlens.embedder import session
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import first_numbers
from kinlens.embedder.views.text import TextEncoder
from kinlens.errors import NotFoundError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.settings import Settings
from tests.support.servers import DEFAULTS, Running, create_app, run, settings_of
from tests.support.shops import assert_problem
from tests.support.waiting import until
from tests.support.words import with_tower
from tests.tiny import TINY_DIM, encoded, photo

pytest.importorskip("tokenizers", reason="needs kinlens[text]")

COUNT = 8
PHOTO = encoded(photo(3))
PHOTO_URL = f"data:image/png;base64,{base64.b64encode(PHOTO).decode()}"
GREEN, RED = "green mug", "red lamp"


@pytest.fixture(scope="module")
def words(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle with a text tower, and with the mean of its texts."""
    folder = tmp_path_factory.mktemp("words")
    rng = np.random.default_rng(2)
    mean = tuple(rng.normal(0, 0.1, TINY_DIM))
    return with_tower(tiny_bundle, folder, folder / "bundle", mean=mean)


@pytest.fixture(scope="module")
def service(words: Bundle, tiny_settings: dict[str, Any]) -> Iterator[Running]:
    own = {"bundle": words.path, "anonymous_scopes": ("search", "embed")}
    settings = settings_of(**DEFAULTS | tiny_settings | own)
    with closing(run(create_app(settings))) as running:
        yield running


def found(service: Running, **query: Any) -> dict[str, float]:
    """The scores of all items, by their keys."""
    answer = service.client.post("/search", json={"k": COUNT, **query})
    assert answer.status_code == 200, answer.text
    hits = answer.json()["hits"]
    assert {hit["probability"] for hit in hits} == {None}
    assert answer.json()["no_match_probability"] is None
    return {hit["key"]: hit["score"] for hit in hits}


def expected(words: Bundle, gallery: Path, image: bytes | None, **texts: float) -> Any:
    """The scores of all items for the query that the text tower joins."""
    encoder, embedder = TextEncoder.open(words), OnnxEmbedder.open(words)
    images = None if image is None else embedder.embed(embedder.preprocess(image)[None])
    names = [name.replace("_", " ") for name in texts]
    query = encoder.joined(images, encoder.embed(names), list(texts.values()))
    with closing(Gallery.open(gallery)) as opened:
        [hits] = opened.search(query, COUNT)
    return pytest.approx({hit.key: hit.score for hit in hits}, abs=1e-4)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_words_alone_and_with_an_image_are_joined_by_the_tower(
    service: Running, words: Bundle, tiny_gallery: Path
) -> None:
    images = [{"data": base64_of(PHOTO)}]
    alone = expected(words, tiny_gallery, None, green_mug=1.0)
    assert found(service, texts=[GREEN]) == alone
    assert found(service, texts=[{"text": GREEN}]) == alone
    assert found(service, texts=[GREEN], combine="best") == alone
    both = expected(words, tiny_gallery, PHOTO, green_mug=0.5, red_lamp=-1.0)
    texts = [{"text": GREEN, "weight": 0.5}, {"text": RED, "weight": -1}]
    assert found(service, images=images, texts=texts) == both
    form = service.search(PHOTO, texts=json.dumps(texts), k=str(COUNT)).json()
    assert {hit["key"]: hit["score"] for hit in form["hits"]} == both
    [listed] = service.client.get("/galleries").json()["galleries"]
    assert listed["has_words"] is True


def test_the_client_sends_words_in_searches_and_batches(
    service: Running, words: Bundle, tiny_gallery: Path
) -> None:
    alone = expected(words, tiny_gallery, None, green_mug=1.0)
    against = expected(words, tiny_gallery, PHOTO, red_lamp=-0.5)
    with Client(service.url) as client:
        one = client.search(texts=[GREEN], k=COUNT)
        assert {hit.key: hit.score for hit in one.hits} == alone
        options = {"texts": [{"text": RED, "weight": -0.5}], "k": COUNT}
        [batched] = client.search_batch([Query([PHOTO], options)]).answers
    assert batched.answer is not None
    assert {hit.key: hit.score for hit in batched.answer.hits} == against


def test_words_alone_are_moved_away_from_disliked_items(service: Running) -> None:
    first, *_ = found(service, texts=[GREEN])
    moved = found(service, texts=[GREEN], negatives=[first])
    assert first not in moved
    assert len(moved) == COUNT - 1


def test_each_part_of_a_photo_is_joined_with_the_words(service: Running) -> None:
    images = [{"data": base64_of(PHOTO), "crops": [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]]}]
    answer = service.client.post(
        "/search", json={"images": images, "texts": [GREEN], "combine": "best"}
    ).json()
    crops = {tuple(hit["view"]["crop"]) for hit in answer["hits"]}
    assert crops <= {(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)}


def test_answers_with_other_words_are_not_taken_from_the_cache(service: Running) -> None:
    post = lambda *texts: service.client.post("/search", json={"texts": list(texts)}).json()
    first, again, other = post("white shoe"), post("white shoe"), post("black shoe")
    assert (first["cached"], again["cached"], other["cached"]) == (False, True, False)
    assert again["hits"] == first["hits"] != other["hits"]


def test_positives_and_words_are_joined(service: Running) -> None:
    liked = found(service, positives=["3.png"], texts=[{"text": GREEN, "weight": 0.01}])
    assert "3.png" not in liked
    assert list(liked) == list(found_like(service))


def found_like(service: Running) -> dict[str, float]:
    answer = service.client.post("/search", json={"positives": ["3.png"], "k": COUNT}).json()
    return {hit["key"]: hit["score"] for hit in answer["hits"]}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"texts": []}, "image and positives are missing"),
        ({"texts": [{"text": RED, "weight": -1}]}, "no weight above 0"),
        ({"texts": [GREEN], "min_probability": 0.5}, "Send min_score instead"),
        ({"texts": [" "]}, "is empty"),
        ({"texts": ["a" * 1001]}, "1,000 or fewer"),
        ({"texts": [GREEN] * (Settings.max_images + 1)}, "texts"),
        ({"texts": GREEN}, "list"),
        ({"texts": [{"text": GREEN, "weight": 1e9}]}, "weight"),
    ],
)
def test_words_that_cannot_be_used_are_named(
    service: Running, query: dict[str, Any], message: str
) -> None:
    answer = service.client.post("/search", json=query)
    assert_problem(answer, 422, "invalid-parameter")
    assert message in answer.text


def test_texts_and_images_are_embedded_in_one_request(service: Running, words: Bundle) -> None:
    inputs = [GREEN, base64_of(PHOTO)]
    response = service.client.post("/v1/embeddings", json={"input": inputs})
    assert response.status_code == 200, response.text
    answer = response.json()
    text, image = np.array([one["embedding"] for one in answer["data"]])
    embedder = OnnxEmbedder.open(words)
    assert text == pytest.approx(TextEncoder.open(words).embed([GREEN])[0], abs=1e-5)
    assert image == pytest.approx(embedder.embed(embedder.preprocess(PHOTO)[None])[0], abs=1e-3)
    broken = base64.encodebytes(PHOTO).decode()
    lines = service.client.post("/v1/embeddings", json={"input": broken}).json()
    assert lines["data"][0]["embedding"] == answer["data"][1]["embedding"]
    japanese = service.client.post("/v1/embeddings", json={"input": "\u7dd1" * 60})
    assert japanese.status_code == 200, japanese.text
    pdf = base64_of(b"%PDF-1.7 " + bytes(60))
    for wrong in (" ", "https://x.example/a.png", "file:///etc/passwd", pdf):
        refused = service.client.post("/v1/embeddings", json={"input": wrong})
        assert_problem(refused, 422, "invalid-parameter")


def test_texts_are_embedded_together_and_once(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, embed = [], TextEncoder.embed

    def counted(encoder: TextEncoder, texts: list[str]) -> Any:
        batches.append(list(texts))
        return embed(encoder, texts)

    monkeypatch.setattr(TextEncoder, "embed", counted)
    inputs = ["Blue  ball", base64_of(PHOTO), "yellow ball", "blue ball"]
    response = service.client.post("/v1/embeddings", json={"input": inputs})
    blue, _, yellow, again = [one["embedding"] for one in response.json()["data"]]
    assert blue == again != yellow
    found(service, texts=["yellow ball"])
    found(service, texts=["yellow ball", "blue lamp"])
    assert batches == [["blue ball", "yellow ball"], ["blue lamp"]]
    refused = service.client.post("/v1/embeddings", json={"input": ["red", PHOTO_URL, " "]})
    assert_problem(refused, 422, "invalid-parameter")
    assert "input[2]" in refused.text


@pytest.fixture
def shop(words: Bundle, tiny_gallery: Path, tmp_path: Path) -> Iterator[tuple[Running, Client]]:
    """A service that may be changed, with a copy of the gallery, and its client."""
    shutil.copytree(tiny_gallery, tmp_path / "shop")
    own = {"bundle": words.path, "galleries": f"shop={tmp_path / 'shop'}"}
    more = {"state": tmp_path / "state", "feedback": "pictures", "anonymous_scopes": ("admin",)}
    app = create_app(settings_of(**DEFAULTS | own | more))
    with closing(run(app)) as running, Client(running.url) as client:
        yield running, client


def test_golden_queries_have_words_and_parts_of_photos(
    shop: tuple[Running, Client], words: Bundle, tmp_path: Path
) -> None:
    service, client = shop
    against: Any = [{"text": RED, "weight": -0.5}]
    box = (0.0, 0.0, 0.5, 0.5)
    searches: list[dict[str, Any]] = [
        {"texts": [GREEN]},
        {"images": PHOTO, "texts": against},
        {"images": PHOTO, "crops": [box]},
        {"images": PHOTO, "crops": "auto"},
        {"images": PHOTO},
    ]
    made, best = [], []
    for search in searches:
        top = client.search(k=1, **search).hits[0]
        best.append((top.key, pytest.approx(top.score, abs=1e-4)))
        crops = search.get("crops")
        crop = crops[0] if isinstance(crops, list) else crops
        image, texts = search.get("images"), search.get("texts", ())
        made.append(client.add_golden("shop", image, keys=["7.png"], crop=crop, texts=texts))
    assert len({query.sha256 for query in made}) == len(searches)
    assert client.golden("shop").queries == made
    plain = service.client.get("/galleries/shop/golden").json()["queries"][-1]
    label = {"keys", "attribute", "value", "no_match"}
    assert plain.keys() == {*label, "sha256", "name", "added_at"}, "as earlier versions read it"
    assert made[0].image is None
    assert {query.image for query in made[1:]} == {hashlib.sha256(PHOTO).hexdigest()}
    assert client.golden_image("shop", made[2].sha256, 160).startswith(b"\xff\xd8")
    with pytest.raises(NotFoundError, match="no image"):
        client.golden_image("shop", made[0].sha256)
    report = client.run_golden("shop")
    assert (report.judged, report.left_out) == (len(searches), 0)
    found = {one.query.sha256: (one.best_key, one.best_score) for one in report.worst}
    assert len(found) == len(searches), "none has 7.png at its first place"
    assert [found[query.sha256] for query in made] == best

    run_command = ("golden", "run", str(tmp_path / "shop"), "--bundle", str(words.path), "--json")
    printed = CliRunner().invoke(commands, run_command)
    again = {one["query"]["sha256"]: one["best_key"] for one in json.loads(printed.stdout)["worst"]}
    assert again == {sha256: key for sha256, (key, _) in found.items()}
    service.client.delete(f"/galleries/shop/golden/{made[0].sha256}")
    assert len(client.golden("shop").queries) == len(searches) - 1


def test_a_golden_query_that_cannot_be_searched_is_refused(shop: tuple[Running, Client]) -> None:
    refusals: list[tuple[list[bytes], dict[str, str], str]] = [
        ([], {}, "send one, or texts"),
        ([], {"texts": '[{"text": "red", "weight": -1}]'}, "no weight above 0"),
        ([], {"texts": '["red"]', "crop": "auto"}, "without an image"),
        ([PHOTO], {"crop": "0,0,2,2"}, "crop"),
        ([PHOTO], {"texts": "red"}, "texts"),
        ([PHOTO], {"k": "3"}, "unknown"),
    ]
    for files, fields, message in refusals:
        sent: Any = [("image", ("a.png", data)) for data in files] + [
            (name, (None, text)) for name, text in {"label": '{"no_match": true}', **fields}.items()
        ]
        answer = shop[0].client.post("/galleries/shop/golden", files=sent)
        assert_problem(answer, 422, "invalid-parameter")
        assert message in answer.text
    assert shop[1].golden("shop").queries == []


def test_clicked_words_are_kept_for_a_teacher(shop: tuple[Running, Client]) -> None:
    service, client = shop
    first, second, *_ = client.search(texts=[GREEN], k=2).hits
    clicked = client.search(texts=[f" {GREEN}"])
    assert clicked.no_probabilities == "scores of words are not calibrated"
    assert clicked.answer_id is not None
    for action, hit in (("clicked", first), ("bought", first), ("wrong", second)):
        client.feedback(clicked.answer_id, hit.key, action)
    for more in ({"texts": [GREEN, RED]}, {"texts": [GREEN], "images": PHOTO}):
        assert client.search(**more).answer_id is None
    url = "/galleries/shop/feedback"
    counts = service.client.get(url, params={"format": "json"}).json()
    assert counts == {"clicked": 1, "bought": 1, "wrong": 1, "pairs": 0, "words": 1}
    listed = service.client.get(url, params={"format": "words"})
    assert listed.text == f"text,item\n{GREEN},{first.key}\n"
    path = "/galleries/shop/golden/unlabelled"
    drawn = service.client.get(path).json()
    assert (drawn["left"], drawn["text"]) == (1, GREEN)
    service.client.delete(f"{path}/{drawn['sha256']}").raise_for_status()
    assert service.client.get(path).json()["left"] == 0
    client.unskip_unlabelled("shop", drawn["sha256"])
    assert service.client.get(path).json() == drawn
    assert "no_probabilities" not in service.search(PHOTO).json()


def test_words_are_not_kept_where_photos_are_not(
    words: Bundle, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    own = {"bundle": words.path, "state": tmp_path, "feedback": "pairs"}
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings | own)))) as service:
        answer = service.client.post("/search", json={"texts": [GREEN]}).json()
        assert answer["answer_id"] is None


def test_a_gallery_of_short_vectors_is_searched_with_words_and_images(
    words: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(COUNT):
        (tmp_path / "photos" / f"{number}.png").write_bytes(encoded(photo(number)))
    short = OnnxEmbedder.open(words).first(4)
    build_gallery(folder_source(tmp_path / "photos"), short, tmp_path / "shop")
    galleries = f"shop={tmp_path / 'shop'}"
    settings = settings_of(**DEFAULTS | {"bundle": words.path, "galleries": galleries})
    with closing(run(create_app(settings))) as service:
        encoder, embedder = TextEncoder.open(words), OnnxEmbedder.open(words)
        images = embedder.embed(embedder.preprocess(PHOTO)[None])
        query = first_numbers(encoder.joined(images, encoder.embed([GREEN]), [1.0]), 4)
        with closing(Gallery.open(tmp_path / "shop")) as gallery:
            [hits] = gallery.search(query, COUNT)
        wanted = pytest.approx({hit.key: hit.score for hit in hits}, abs=1e-4)
        sent = [{"data": base64_of(PHOTO)}]
        assert found(service, images=sent, texts=[GREEN]) == wanted
        auto = {"images": [{"data": base64_of(PHOTO), "crops": "auto"}], "texts": [GREEN]}
        assert service.client.post("/search", json=auto).status_code == 200
        both = {"positives": ["1.png"], "texts": [GREEN]}
        refused = service.client.post("/search", json=both)
        assert_problem(refused, 422, "invalid-parameter")


def test_the_missing_package_is_named(
    words: Bundle, tiny_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "can_read_words", lambda: False)
    own = {"bundle": words.path, "anonymous_scopes": ("search", "embed")}
    settings = settings_of(**DEFAULTS | tiny_settings | own)
    with closing(run(create_app(settings))) as service:
        answer = service.client.post("/search", json={"texts": [GREEN]})
        assert_problem(answer, 503, "search-unavailable")
        assert "pip install 'kinlens[text]'" in answer.text
        answer = service.client.post("/v1/embeddings", json={"input": GREEN})
        assert_problem(answer, 503, "search-unavailable")
        assert "pip install 'kinlens[text]'" in answer.text
        assert service.client.get("/galleries/shop").json()["has_words"] is False


def test_a_gallery_answers_photos_while_the_text_tower_is_opened(
    words: Bundle, tiny_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, opens = threading.Event(), session.TextEncoder.open

    def waits(bundle: Bundle) -> TextEncoder:
        opened.wait()
        return opens(bundle)

    monkeypatch.setattr(session.TextEncoder, "open", waits)
    own = {"bundle": words.path, "request_timeout_ms": 500}
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings | own)))) as service:
        try:
            late = service.client.post("/search", json={"texts": [GREEN]})
            assert_problem(late, 503, "deadline-exceeded")
            until(lambda: service.search(PHOTO).status_code == 200)
        finally:
            opened.set()


def test_texts_count_in_the_limit_of_a_batch(service: Running) -> None:
    batch = {"queries": [{"texts": [GREEN] * 16}] * 17}
    assert_problem(service.client.post("/search/batch", json=batch), 422, "invalid-parameter")


def test_the_tower_is_opened_once(words: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, opened = OnnxEmbedder.open(words), []
    at_once = threading.Barrier(4)

    def counted(bundle: Bundle) -> object:
        opened.append(bundle)
        return object()

    monkeypatch.setattr(session.TextEncoder, "open", counted)

    def ask(facts: OnnxEmbedder) -> object:
        at_once.wait()
        return facts.words()

    with ThreadPoolExecutor(4) as pool:
        towers = set(pool.map(ask, [embedder, embedder, embedder.first(4), embedder.first(8)]))
    assert (len(towers), len(opened)) == (1, 1)


def test_a_bundle_without_a_text_tower_names_the_cure(tiny_settings: dict[str, Any]) -> None:
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings)))) as service:
        answer = service.client.post("/search", json={"texts": [GREEN]})
        assert_problem(answer, 422, "invalid-parameter")
        assert "kinlens-train teach-words" in answer.text
        assert service.client.get("/galleries/shop").json()["has_words"] is False
