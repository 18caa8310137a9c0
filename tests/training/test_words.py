"""Words of a catalogue: what they teach a bundle, what is proven, and what is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from typer.testing import CliRunner

from kinlens.commands.__main__ import app as index_app
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import DatasetError, ExportError
from kinlens.embedder.manifest import TextTower
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.views.text import TextEncoder
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.training.__main__ import app
from kinlens.training.words.catalogue import read_catalogue
from kinlens.training.words.graph import write_tower
from kinlens.training.words.heldout import average_precision, random_precision
from kinlens.training.words.teach import teach
from tests.support.words import COLOURS, SHAPES, write_encoder, write_tokenizer
from tests.tiny import TINY_DIM, encoded, photo

pytest.importorskip("tokenizers", reason="needs kinlens[text]")


@dataclass
class Thing:
    key: str
    vector: np.ndarray
    attributes: dict[str, Any] = field(default_factory=dict)


def unit(vector: np.ndarray) -> np.ndarray:
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def shop(noise: float = 0.1, photos: int = 4) -> Iterator[Thing]:
    """Products of a colour and a shape, whose vectors are the sum of both."""
    rng = np.random.default_rng(2)
    colours = rng.standard_normal((len(COLOURS), TINY_DIM))
    shapes = rng.standard_normal((len(SHAPES), TINY_DIM))
    for c, colour in enumerate(COLOURS):
        for s, shape in enumerate(SHAPES):
            for view in range(photos):
                vector = colours[c] + shapes[s] + noise * rng.standard_normal(TINY_DIM)
                given = {"product": f"{colour}_{shape}", "colour": colour, "price": 3.0}
                yield Thing(f"{colour}-{shape}-{view}", unit(vector), given | {"kind": shape})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_encoder(tmp_path / "encoder.onnx"), write_tokenizer(tmp_path / "words.json")


def test_the_texts_of_a_catalogue_are_its_values_and_the_words_they_share() -> None:
    things = [
        Thing("1", unit(np.ones(3)), {"title": "Red-Mug", "sold": True, "url": "https://x.y/z"}),
        Thing("2", unit(np.ones(3)), {"title": "red lamp", "sold": False, "tag": ("new", "n 7")}),
        Thing("3", unit(np.ones(3)), {"title": "red lamp", "price": 3, "code": "4711"}),
    ]
    found = read_catalogue(things)
    by_text = {
        text: members.tolist() for text, members in zip(found.texts, found.members, strict=True)
    }
    assert by_text == {
        "red mug": [0],
        "sold": [0],
        "red lamp": [1, 2],
        "new": [1],
        "n 7": [1],
        "red": [0, 1, 2],
        "lamp": [1, 2],
    }
    assert {t for t, is_own in zip(found.texts, found.written, strict=True) if not is_own} == {
        "red",
        "lamp",
    }
    assert read_catalogue(things, names=["title"]).texts == ("lamp", "red", "red lamp", "red mug")
    with pytest.raises(DatasetError, match=r"No item.*attribute 'name'.*They have: code, price"):
        read_catalogue(things, names=["name"])
    with pytest.raises(DatasetError, match="0 texts and 3 products"):
        read_catalogue([Thing(str(n), unit(np.ones(3)), {"price": n}) for n in range(3)])


def test_clicks_add_texts_to_the_items_that_were_clicked(tmp_path: Path) -> None:
    file = tmp_path / "clicks.csv"
    file.write_text("text,item\nCoffee Cup,1\ncoffee cup,2\nlight,9\n")
    things = [Thing(str(n), unit(np.ones(3)), {"title": f"red {w}"}) for n, w in enumerate("abc")]
    found = read_catalogue(things, clicks=file)
    assert found.members[found.texts.index("coffee cup")].tolist() == [1, 2]
    assert "light" not in found.texts
    file.write_text("words\nmug\n")
    with pytest.raises(DatasetError, match="must name the columns text, item"):
        read_catalogue(things, clicks=file)


def test_chance_is_the_mean_precision_of_random_orders() -> None:
    rng = np.random.default_rng(0)
    for relevant, total in ((1, 7), (3, 20), (5, 5)):
        ranking = np.arange(total) < relevant
        drawn = [average_precision(rng.permutation(ranking)) for _ in range(4000)]
        assert random_precision(relevant, total) == pytest.approx(np.mean(drawn), abs=0.01)
    assert average_precision(np.array([True, False, True])) == pytest.approx((1 + 2 / 3) / 2)


def test_taught_words_find_new_products_and_new_titles(
    tiny_bundle: Bundle, files: tuple[Path, Path], tmp_path: Path
) -> None:
    taught = teach(tiny_bundle, shop(), *files, tmp_path / "out", licence="MIT")
    tower = taught.bundle.manifest.text
    assert tower is not None
    assert (tower.kind, tower.licence, len(tower.mean)) == ("taught", "MIT", TINY_DIM)
    assert tower.held_out.keys() == {"photos", "products", "titles"}
    for kind in ("products", "titles"):
        assert tower.held_out[kind].gain_low > 20, tower.held_out
    assert "finds new products, by titles it was not taught" in "\n".join(taught.lines())
    things = list(shop())
    vectors = np.stack([thing.vector for thing in things])
    encoder = TextEncoder.open(taught.bundle)
    for text in ("white lamp", "green"):
        [query] = encoder.embed([text])
        best = things[int(np.argmax(vectors @ query))].attributes
        assert set(text.split()) <= {best["colour"], best["kind"]}


def test_words_without_relation_to_the_images_are_refused(
    tiny_bundle: Bundle, files: tuple[Path, Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    things = [Thing(t.key, unit(rng.standard_normal(TINY_DIM)), t.attributes) for t in shop()]
    with pytest.raises(ExportError, match=r"does NOT find new products, by words.*No bundle was"):
        teach(tiny_bundle, things, *files, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: write_encoder(path, kind=TensorProto.INT32), "input_ids: tensor.int32"),
        (lambda path: path.write_bytes(b"no onnx"), "cannot be loaded"),
    ],
)
def test_a_file_that_is_no_text_encoder_is_refused(
    change: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    change(tmp_path / "encoder.onnx")
    with pytest.raises(ExportError, match=reason):
        write_tower(tmp_path / "encoder.onnx", tmp_path / "out.onnx")


@pytest.mark.real_data
def test_a_real_encoder_places_phrases_as_measured_elsewhere(
    shared_data: Path, tmp_path: Path
) -> None:
    files = shared_data / "weights/minilm-l6-v2-int8"
    if not files.is_dir():
        pytest.skip("MiniLM is absent from KINLENS_SHARED")
    size = write_tower(files / "model.onnx", tmp_path / "text.onnx")
    tower = TextTower(kind="taught", context=128)
    encoder = TextEncoder(tmp_path / "text.onnx", files / "tokenizer.json", tower, size, "MiniLM")
    phrases = encoder.embed(["a red apple", "apples, red", "a parked car"])
    assert (phrases[0] @ phrases[1:].T).tolist() == pytest.approx([0.79, 0.16], abs=0.01)


@pytest.fixture
def taught(tiny_bundle: Bundle, files: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path, str]:
    """A gallery, a bundle that was taught its words by the command, and what that printed."""
    where, out = tmp_path / "shop", tmp_path / "out"
    gallery = Gallery.create(where, name="shop", bundle_id=tiny_bundle.bundle_id, dim=TINY_DIM)
    gallery.add(Entry(one.key, one.vector, attributes=one.attributes) for one in shop())
    gallery.close()
    words = ["teach-words", str(tiny_bundle.path), str(where), "--out", str(out), "--json"]
    words += ["--text-model", str(files[0]), "--tokenizer", str(files[1])]
    return where, out, CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_the_command_teaches_from_a_gallery_that_the_new_bundle_searches(
    taught: tuple[Path, Path, str], tiny_bundle: Bundle
) -> None:
    where, out, printed = taught
    assert json.loads(printed)["held_out"]["products"]["gain_low"] > 20
    embedder = OnnxEmbedder.open(out)
    assert embedder.bundle_id == tiny_bundle.bundle_id
    gallery = Gallery.open(where, expected_bundle_id=embedder.bundle_id)
    [hits] = gallery.search(embedder.embed_texts(["white lamp"]), 4)
    gallery.close()
    assert {(hit.attributes["colour"], hit.attributes["kind"]) for hit in hits} == {
        ("white", "lamp")
    }


def test_a_gallery_is_searched_with_words_on_the_command_line(
    taught: tuple[Path, Path, str], tmp_path: Path
) -> None:
    where, out, _ = taught

    def search(*words: str) -> list[dict[str, Any]]:
        command = ["search", str(where), "--bundle", str(out), "--json", *words]
        done = CliRunner().invoke(index_app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        assert answer.get("probabilities") is None  # they are calibrated with images
        return [hit["attributes"] for hit in answer["hits"][0]]

    assert {hit["colour"] for hit in search("--text", "green", "-k", "5")} == {"green"}
    first = search("--text", "mug", "-k", "1")[0]["colour"]
    others = search("--text", "mug", "--not-text", first, "-k", "5")
    assert first not in {hit["colour"] for hit in others}

    (tmp_path / "photo.png").write_bytes(encoded(photo(1)))
    image = ("--image", str(tmp_path / "photo.png"))
    alone, moved = (
        search(*image),
        search(*image, "--text", "green", "--text-weight", "9", "-k", "5"),
    )
    assert {hit["colour"] for hit in moved} == {"green"}
    assert search(*image, "--text", "green", "--text-weight", "0") == alone
    for wrong in (["--text", "red"], ["--bundle", str(out), "--text", "red", "--like", "x"]):
        done = CliRunner().invoke(index_app, ["search", str(where), *wrong])
        assert done.exit_code == 2, done.output
