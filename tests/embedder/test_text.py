"""The text tower of a bundle: what it reads, what it refuses, and what it costs others."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.bundle import GOLDEN, GOLDEN_TEXTS, MANIFEST, TEXT, TOKENIZER, Bundle
from kinlens.embedder.errors import (
    BundleCorruptError,
    BundleError,
    GoldenMismatchError,
    InvalidParameterError,
    ProviderError,
)
from kinlens.embedder.views.text import MAX_CHARACTERS, TextEncoder
from tests.support.words import CONTEXT, with_tower
from tests.tiny import TINY_DIM

pytest.importorskip("tokenizers", reason="needs kinlens[text]")


@pytest.fixture
def make_tower(tiny_bundle: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    def make(out: Path | None = None, **changes: object) -> Bundle:
        return with_tower(tiny_bundle, tmp_path, out or tmp_path / "words", **changes)

    return make


def test_texts_become_unit_vectors_whatever_their_batch(make_tower: Callable[..., Bundle]) -> None:
    encoder = TextEncoder.open(make_tower())
    texts = ["red mug", "a green glass bottle with laces", "  RED   Mug ", "blue"]
    vectors = encoder.embed(texts)
    assert vectors.shape == (4, TINY_DIM)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[2], vectors[0], atol=1e-6)  # case and spaces do not count
    alone = np.concatenate([encoder.embed([text]) for text in texts])
    np.testing.assert_allclose(alone, vectors, atol=1e-6)
    many = encoder.embed(texts * 40)  # several batches
    np.testing.assert_allclose(many, np.tile(vectors, (40, 1)), atol=1e-6)
    assert encoder.embed([]).shape == (0, TINY_DIM)


def test_a_tower_reads_no_more_than_its_context(make_tower: Callable[..., Bundle]) -> None:
    encoder = TextEncoder.open(make_tower())
    fits = " ".join(["red"] * CONTEXT)
    vectors = encoder.embed([fits, f"{fits} mug mug mug"])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


def test_punctuation_counts_only_if_the_tower_reads_it(
    make_tower: Callable[..., Bundle], tmp_path: Path
) -> None:
    by_letter = TextEncoder.open(make_tower())
    canonical = TextEncoder.open(make_tower(tmp_path / "canonical", cleaning="canonical"))
    for encoder, is_equal in ((by_letter, False), (canonical, True)):
        plain, marked = encoder.embed(["red mug", "red_mug!"])
        assert np.allclose(plain, marked, atol=1e-5) == is_equal


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is empty"), (" \n ", "is empty"), ("a" * (MAX_CHARACTERS + 1), "1,001 characters")],
)
def test_an_empty_or_long_text_is_named(
    make_tower: Callable[..., Bundle], text: str, reason: str
) -> None:
    encoder = TextEncoder.open(make_tower())
    with pytest.raises(InvalidParameterError, match=rf"texts\[1\].*{reason}"):
        encoder.embed(["red", text])


def test_a_bundle_without_a_tower_names_the_cure(tiny_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"no text tower.*teach-words"):
        TextEncoder.open(tiny_bundle)


def test_the_missing_package_is_named_at_the_first_text(
    make_tower: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_tower()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert Bundle.open(bundle.path).manifest.text is not None  # images need no such package
    with pytest.raises(ProviderError, match=r"pip install 'kinlens\[text\]'"):
        TextEncoder.open(bundle)


def test_a_tower_changes_neither_vectors_nor_the_bundle_without_it(
    make_tower: Callable[..., Bundle], tiny_bundle: Bundle
) -> None:
    before = (tiny_bundle.path / MANIFEST).read_bytes()
    bundle = make_tower()
    assert bundle.manifest.bundle_id != tiny_bundle.manifest.bundle_id
    assert bundle.bundle_id == tiny_bundle.bundle_id  # galleries of one are searched with the other
    assert bundle.manifest.text is not None
    assert bundle.manifest.text.parity is not None
    assert bundle.manifest.text.licence == "MIT"
    assert (tiny_bundle.path / MANIFEST).read_bytes() == before
    assert b'"text"' not in before


@pytest.mark.parametrize("name", [TEXT, TOKENIZER, f"{GOLDEN}/{GOLDEN_TEXTS}"])
def test_a_changed_or_missing_file_is_found(make_tower: Callable[..., Bundle], name: str) -> None:
    file = make_tower().path / name
    content = file.read_bytes()
    file.write_bytes(content + b" ")
    with pytest.raises(BundleCorruptError, match=f"{name} has sha256"):
        Bundle.open(file.parents[name.count("/")])
    file.unlink()
    with pytest.raises(BundleCorruptError, match="is missing"):
        Bundle.open(file.parents[name.count("/")])


def test_a_machine_that_computes_other_vectors_is_refused(
    make_tower: Callable[..., Bundle],
) -> None:
    bundle = make_tower()
    golden = bundle.path / GOLDEN / GOLDEN_TEXTS
    rows = json.loads(golden.read_bytes())
    golden.write_text(json.dumps({text: [-x for x in row] for text, row in rows.items()}))
    with pytest.raises(GoldenMismatchError, match=r"cosine -1\.0000"):
        TextEncoder.open(bundle)


def test_texts_move_the_query_of_an_image_by_their_weights(
    make_tower: Callable[..., Bundle],
) -> None:
    mean = np.random.default_rng(0).normal(0, 0.1, TINY_DIM)
    encoder = TextEncoder.open(make_tower(mean=tuple(mean)))
    texts, images = encoder.embed(["red mug", "green"]), encoder.embed(["blue", "yellow shoe"])

    wanted = images + 0.5 * (texts[0] - mean) - (texts[1] - mean)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.joined(images, texts, [0.5, -1]), wanted, atol=1e-5)
    np.testing.assert_allclose(encoder.joined(images, texts, [0, 0]), images, atol=1e-6)
    alone = (texts[0] - mean) / np.linalg.norm(texts[0] - mean)
    np.testing.assert_allclose(encoder.joined(None, texts[:1], [2]), alone[None], atol=1e-5)
    with pytest.raises(InvalidParameterError, match="weight above 0, and there is no image"):
        encoder.joined(None, texts, [-1, 0])
    with pytest.raises(InvalidParameterError, match="cancel out"):
        encoder.joined(None, texts[[0, 0]], [1, -1])
