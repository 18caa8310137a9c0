"""Where a hit matches: shares of the score by place in the image."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kinlens.client import Client
from kinlens.embedder.fake import FakeEmbedder
from tests.support.shops import Shop, assert_problem, make_gallery, publish_photos, start_shop
from tests.tiny import encoded, photo

SIDE = 32


class NoMap(FakeEmbedder):
    has_map = False


def noisy_half(data: bytes, seed: int, half: slice) -> bytes:
    """The same image with noise in these columns."""
    pixels = np.asarray(Image.open(io.BytesIO(data))).copy()
    noise = np.random.default_rng(seed).integers(0, 256, pixels[:, half].shape, dtype=np.uint8)
    pixels[:, half] = noise
    return encoded(Image.fromarray(pixels))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = start_shop(tmp_path_factory.mktemp("explain"), FakeEmbedder(dim=256, size_px=SIDE))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(shop: Shop) -> Iterator[Client]:
    with Client(shop.running.url) as client:
        yield client


@pytest.fixture(scope="module")
def photos(shop: Shop) -> dict[str, bytes]:
    data = {f"{n}.png": encoded(photo(n, (SIDE, SIDE))) for n in range(4)}
    shop.put(data)
    return data


def numbers(client: Client) -> dict[str, int]:
    return {item.key: item.id for item in client.each_item("shop")}


def test_the_shares_of_either_image_sum_to_the_score_of_the_search(client, photos) -> None:
    query = photos["1.png"]
    for hit in client.search(query, gallery="shop").hits:
        found = client.explain("shop", hit.id, query)
        assert found.key == hit.key
        [of_query] = found.query
        assert (of_query.image, of_query.crop, found.rest) == (1, None, 0.0)
        assert found.score == pytest.approx(hit.score, abs=1e-3)
        assert np.sum(found.hit) == pytest.approx(hit.score, abs=1e-3)
        assert np.sum(of_query.shares) == pytest.approx(hit.score, abs=1e-3)


def test_crops_likes_and_dislikes_share_the_score(client, photos) -> None:
    asked: dict[str, Any] = {
        "crops": [(0.0, 0.0, 0.5, 1.0), (0.5, 0.25, 0.5, 0.5)],
        "positives": ["2.png"],
        "negatives": ["3.png"],
    }
    hits = client.search(photos["1.png"], gallery="shop", **asked).hits
    for hit in hits:
        found = client.explain("shop", hit.id, photos["1.png"], **asked)
        assert found.score == pytest.approx(hit.score, abs=1e-3)
        assert [one.crop for one in found.query] == asked["crops"]
        of_crops = sum(np.sum(one.shares) for one in found.query)
        assert of_crops + found.rest == pytest.approx(found.score, abs=1e-5)
    assert abs(found.rest) > 0.01


def test_a_vector_of_the_query_is_a_part_of_the_rest(client, photos) -> None:
    embedder = FakeEmbedder(dim=256, size_px=SIDE)
    [vector] = embedder.embed(embedder.preprocess(photos["2.png"])[None])
    for weight in (1.0, 0.5, -0.5):
        asked: dict[str, Any] = {"vectors": [{"vector": vector, "weight": weight}]}
        hits = client.search(photos["1.png"], gallery="shop", **asked).hits
        for hit in hits:
            found = client.explain("shop", hit.id, photos["1.png"], **asked)
            assert found.score == pytest.approx(hit.score, abs=1e-3)
            of_image = float(np.sum(found.query[0].shares))
            assert of_image + found.rest == pytest.approx(found.score, abs=1e-5)
            [item] = embedder.embed(embedder.preprocess(photos[hit.key])[None])
            assert np.sign(found.rest) == np.sign(weight * float(vector @ item))


def part(shares: list[list[float]], half: slice) -> float:
    grid: NDArray[np.float64] = np.array(shares)
    return float(grid[:, half].sum() / grid.sum())


@pytest.mark.parametrize("left", [True, False])
def test_the_half_without_noise_matches(shop, client, photos, left: bool) -> None:
    query, key = photos["0.png"], f"half-{left}.png"
    noise = slice(0, SIDE // 2) if left else slice(SIDE // 2, SIDE)
    other = slice(2, 4) if left else slice(0, 2)  # of four columns
    shop.put({key: noisy_half(query, 0, noise)})
    found = client.explain("shop", numbers(client)[key], query)
    shop.remove(key)
    assert part(found.hit, other) > 0.75
    assert part(found.query[0].shares, other) > 0.6


def test_what_cannot_be_explained_is_refused_with_a_cure(shop, client, photos, tmp_path) -> None:
    url = f"{shop.url}/items/{numbers(client)['0.png']}/explain"
    send = {"image": ("x.png", photos["0.png"], "image/png")}
    refused = [
        (shop.client.post(url, json={"positives": ["0.png"]}), 422, "Send the query image"),
        (shop.client.post(url, files=send, data={"combine": "best"}), 422, "combine"),
        (shop.client.post(url, files={"image": ("x", b"GIF89a")}), 422, "damaged"),
        (shop.client.post(f"{shop.url}/items/999/explain", files=send), 404, "999"),
        (shop.client.post("/galleries/none/items/1/explain", files=send), 404, "none"),
    ]
    for answer, status, words in refused:
        assert answer.status_code == status, answer.text
        assert words in answer.json()["detail"]


def test_a_short_gallery_is_served_beside_a_whole_one(tmp_path, photos, closes) -> None:
    embedder = FakeEmbedder(dim=256, size_px=SIDE)
    short = embedder.first(16)
    folder = tmp_path / "short"
    publish_photos(folder, short, [*photos.values()])
    settings = {"galleries": (f"short={folder}",), "anonymous_scopes": ("admin",)}
    shop = closes(start_shop(tmp_path / "state", embedder, **settings))
    assert (shop.gallery("short")["dim"], shop.gallery()["dim"]) == (16, 256)
    pixels = [short.preprocess(data) for data in photos.values()]
    cosines = short.embed(np.stack(pixels)) @ short.embed(pixels[1][None])[0]
    shop.put({"a": photos["1.png"], "b": photos["2.png"]}, gallery="short")
    shop.put({"a": photos["1.png"], "b": photos["2.png"]})
    with Client(shop.running.url) as client:
        assert set(client.ready("short").checks.values()) == {"ok"}
        scores = {
            hit.key: hit.score for hit in client.search(photos["1.png"], gallery="short").hits
        }
        assert [scores[f"{n}.png"] for n in range(len(pixels))] == pytest.approx(cosines, abs=1e-5)
        for gallery in ("short", "shop"):
            hits = client.search(photos["1.png"], gallery=gallery).hits
            assert hits[0].score == pytest.approx(1, abs=1e-5)
            hit = next(one for one in hits if one.key == "b")
            found = client.explain(gallery, hit.id, photos["1.png"])
            assert np.sum(found.hit) == pytest.approx(found.score, abs=1e-4)
            assert found.score == pytest.approx(hit.score, abs=1e-4)


def test_an_item_without_image_or_map_cannot_be_explained(tmp_path, photos, closes) -> None:
    state = tmp_path / "state"
    make_gallery(state / "galleries" / "vectors", "v")
    send = {"image": ("x.png", photos["0.png"], "image/png")}
    shop = closes(start_shop(state, NoMap()))
    shop.put({"0.png": photos["0.png"]})
    assert shop.gallery()["has_map"] is False
    answer = shop.client.post(f"{shop.url}/items/by-key/0.png/explain", files=send)
    assert answer.status_code == 409
    assert "--map" in answer.json()["detail"]
    shop = closes(start_shop(tmp_path / "state"))
    answer = shop.client.post("/galleries/vectors/items/by-key/v-0/explain", files=send)
    assert "added as a vector" in assert_problem(answer, 404, "unknown-item")["detail"]
