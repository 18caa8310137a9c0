"""kinlens.Gallery: every kind of query and its answer, and what cannot be asked."""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import (
    BundleError,
    BundleMismatchError,
    FilterError,
    GalleryNotFoundError,
    ImageError,
    InvalidParameterError,
    ItemNotFoundError,
    SourceError,
)
from kinlens.embedder.preprocess import WHOLE
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.types import SearchOptions
from kinlens.quality.calibration import GalleryCalibration
from kinlens.quality.calibrator import Calibrator
from tests.support.detectors import bright_photo, with_detector
from tests.support.market import CALIBRATION
from tests.support.words import with_tower
from tests.tiny import TINY_DIM, photo, write_photos_as

NAMES = ("cup/0.png", "cup/1.png", "hat/2.png", "hat/3.png", "hat/4.png", "loose.png")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_photos_as(tmp_path_factory.mktemp("shop"), NAMES)
    rows = [
        f"{name},{name},{10 * number},{'red' if number % 2 else 'blue'}"
        for number, name in enumerate(NAMES)
    ]
    lines = ["key,path,price:number,colour", *rows]
    (root / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def gallery(
    shop: Path, bundle: OnnxEmbedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kinlens.Gallery]:
    """A gallery that the tests only read."""
    out = tmp_path_factory.mktemp("made") / "gallery"
    with kinlens.build(shop / "list.csv", bundle, out=out) as built:
        yield built


def notebook(shown: Any) -> str:
    """What a notebook shows of a value."""
    page: str = getattr(shown, "_repr_html_")()  # noqa: B009 (the name is one of IPython)
    return page


QUERIES: dict[str, Callable[[Path, OnnxEmbedder], Any]] = {
    "text path": lambda shop, _: str(shop / NAMES[3]),
    "path": lambda shop, _: shop / NAMES[3],
    "bytes": lambda shop, _: (shop / NAMES[3]).read_bytes(),
    "open file": lambda shop, _: io.BytesIO((shop / NAMES[3]).read_bytes()),
    "Pillow": lambda *_: photo(3),
    "pixels": lambda *_: np.asarray(photo(3)),
    "vector": lambda shop, bundle: bundle.embed_files(shop / NAMES[3])[0],
    "list of numbers": lambda shop, bundle: bundle.embed_files(shop / NAMES[3])[0].tolist(),
}


@pytest.mark.parametrize("kind", QUERIES)
def test_each_kind_of_query_finds_its_image(
    kind: str, shop: Path, bundle: OnnxEmbedder, gallery: kinlens.Gallery
) -> None:
    hits = gallery.search(QUERIES[kind](shop, bundle), k=2)
    assert hits[0].key == NAMES[3]
    assert hits[0].score == pytest.approx(1, abs=1e-4)
    assert len(hits) == 2


def test_pixels_of_more_than_eight_bits_are_those_of_their_file(
    tmp_path: Path, gallery: kinlens.Gallery
) -> None:
    grey = Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64)
    grey.save(tmp_path / "grey.png")
    assert gallery.search(grey.convert("I")) == gallery.search(tmp_path / "grey.png")


def test_vectors_in_rows_are_searched_each_alone_as_lists(
    shop: Path, bundle: OnnxEmbedder, gallery: kinlens.Gallery
) -> None:
    vectors = bundle.embed_files([shop / NAMES[2], shop / NAMES[5]])
    found = gallery.search(vectors, 3)
    assert isinstance(found, list)
    assert [hits[0].key for hits in found] == [NAMES[2], NAMES[5]]
    [hits] = gallery.search(vectors[:1], 3, SearchOptions(where="price >= 30"))
    assert {hit.key for hit in hits} == {*NAMES[3:]}
    assert hits == sorted(hits, key=lambda hit: -hit.score)
    first, second = gallery.search(vectors.tolist(), 1)
    assert [first[0].key, second[0].key] == [NAMES[2], NAMES[5]]
    grouped = gallery.search(vectors, 2, group_by="colour", facets=["price"])
    assert [len(each.groups) for each in grouped] == [2, 2]
    assert {*grouped[0].facets} == {"price"}


def test_options_have_the_names_of_the_client(shop: Path, gallery: kinlens.Gallery) -> None:
    ask = shop / NAMES[0]
    few = gallery.search(ask, filter='colour = "blue" and price < 30', fields=["price"])
    assert {hit.key: dict(hit.attributes) for hit in few} == {
        NAMES[0]: {"price": 0},
        NAMES[2]: {"price": 20},
    }
    assert few == gallery.search(
        ask, filter={"colour": "blue", "price": {"<": 30}}, fields=["price"]
    )
    assert [hit.key for hit in gallery.search(ask, 2, offset=1)] == [
        hit.key for hit in gallery.search(ask, 3)
    ][1:]
    [first, *_] = gallery.search(ask, sort_by="price:desc")
    assert first.key == NAMES[5]
    assert all(hit.score >= 0.2 for hit in gallery.search(ask, min_score=0.2, exact=True))
    counted = gallery.search(ask, facets=["colour"]).facets["colour"]
    assert counted.values == (("blue", 3), ("red", 3))
    groups = gallery.search(ask, group_by="colour", group_size=2).groups
    assert [group.value for group in groups] == ["blue", "red"]
    assert [len(group.hits) for group in groups] == [2, 2]


def test_views_items_and_weights_are_combined(
    shop: Path, bundle: OnnxEmbedder, gallery: kinlens.Gallery
) -> None:
    one, other = bundle.embed_files([shop / NAMES[1], shop / NAMES[4]])
    mean = (one + 0.5 * other) / np.linalg.norm(one + 0.5 * other)
    [expected] = gallery.search(mean[None], 6)
    views = gallery.search(shop / NAMES[1], 6, vectors=[{"vector": other, "weight": 0.5}])
    assert [hit.key for hit in views] == [hit.key for hit in expected]
    assert [hit.score for hit in views] == pytest.approx([hit.score for hit in expected], abs=1e-5)
    both = gallery.search([shop / NAMES[1], shop / NAMES[4]], 2, combine="best")
    assert {hit.key: hit.view.image for hit in both} == {NAMES[1]: 1, NAMES[4]: 2}
    like = gallery.search(positives=[NAMES[1]], negatives=[NAMES[4]])
    assert not {NAMES[1], NAMES[4]} & {hit.key for hit in like}
    similar = gallery.similar(NAMES[1], k=3, filter="price > 0")
    assert similar == gallery.similar(gallery.item(NAMES[1]).id, k=3, filter="price > 0")
    assert NAMES[1] not in {hit.key for hit in similar}


def test_crops_name_the_part_that_found_a_hit(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, gallery: kinlens.Gallery
) -> None:
    wide = Image.new("RGB", (192, 144), "white")
    wide.paste(photo(4, (128, 96)), (0, 0))
    parts = gallery.search(wide, 3, crops="auto")
    assert (parts[0].key, parts[0].view.image) == (NAMES[4], 1)
    assert parts[0].view.crop == pytest.approx((0, 0, 2 / 3, 2 / 3))
    one = gallery.search(wide, 3, crops=[(0, 0, 2 / 3, 2 / 3)])
    assert (one[0].key, one[0].view) == (NAMES[4], None)
    assert gallery.search(photo(4), 1, crops=[WHOLE])[0].key == NAMES[4]
    made = kinlens.load_bundle(with_detector(tiny_bundle, tmp_path / "boxes").path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/bright.png").write_bytes(bright_photo((1, 1)))
    with kinlens.build(tmp_path / "shop", made, out=tmp_path / "gallery") as boxed:
        [hit] = boxed.search(bright_photo((1, 1)), 1, crops="auto")
        assert hit.view.crop is None or hit.view.crop[2] < 0.5


def test_words_need_a_tower(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, gallery: kinlens.Gallery
) -> None:
    with pytest.raises(BundleError, match="no text tower"):
        gallery.search(text="green mug")
    words = with_tower(tiny_bundle, tmp_path, tmp_path / "words")
    model = kinlens.load_bundle(words.path)
    with kinlens.open_gallery(gallery.store.path, model) as worded:
        [hits] = worded.search(model.words().joined(None, model.embed_texts(["green mug"]), [1]), 6)
        alone = worded.search(text="green mug", k=6)
        assert [hit.key for hit in alone] == [hit.key for hit in hits]
        moved = worded.search(
            shop / NAMES[0], 6, texts=[{"text": "green mug", "weight": 0.0}, "red"]
        )
        plain = worded.search(shop / NAMES[0], 6, texts="red")
        assert [hit.key for hit in moved] == [hit.key for hit in plain]
        assert moved.no_match_probability is None
        with pytest.raises(InvalidParameterError, match="weight above 0"):
            worded.search(texts=[{"text": "red", "weight": -1}])


def test_a_calibrated_gallery_has_probabilities(
    shop: Path, gallery: kinlens.Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidParameterError, match=r"min_probability = 0\.5 needs probabilities"):
        gallery.search(shop / NAMES[0], min_probability=0.5)
    curve = Calibrator(gallery.store)
    assert curve.stored() is None or curve.stored().product is None
    known = GalleryCalibration(
        items=6, last=6, product="colour", products=2, labelled=6, even=1, gallery="few"
    )
    monkeypatch.setattr(Calibrator, "stored", lambda _: known)
    table = CALIBRATION.curves[0].model_copy(update={"products": 2, "views": 3})
    monkeypatch.setattr(
        gallery.bundle, "calibration", CALIBRATION.model_copy(update={"curves": (table,)})
    )
    hits = gallery.search(shop / NAMES[0], k=6)
    assert all(0 <= hit.probability <= 1 for hit in hits)
    assert 0 <= hits.no_match_probability <= 1
    assert len(gallery.search(shop / NAMES[0], 6, min_probability=2 / 3)) <= 6
    twice = gallery.search(positives=[NAMES[0], NAMES[0]])
    assert twice == gallery.search(positives=[NAMES[0]])
    assert max(hit.probability for hit in twice) > 0
    for k in (0, -1):  # which the deeper search for probabilities does not see
        with pytest.raises(InvalidParameterError, match=f"k = {k} must be"):
            gallery.search(shop / NAMES[0], k)
    groups = gallery.search(shop / NAMES[0], group_by="colour").groups
    assert sum(group.probability for group in groups) <= 1 + 1e-6


def test_hits_show_their_images_and_escape_what_they_show(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    evil = "<script>alert('x')</script>"
    gallery = kinlens.create_gallery(tmp_path / "gallery", bundle=tiny_bundle.path)
    gallery.put(f'a"{evil}', photo(1), {"title<b>": evil, "sizes": ["S", evil]})
    gallery.put("plain", photo(2), {"sale": True})
    gallery.put("vector", vector=gallery.vector("plain"))
    hits = gallery.search(photo(1), k=3, group_by=None)
    page = notebook(hits)
    assert "<script" not in page
    assert "title<b>" not in page
    assert "&lt;script&gt;" in page
    assert page.count('src="data:image/jpeg;base64,') == 2
    assert set(re.findall(r"</?([a-z]+)", page)) == {
        *("p", "div", "figure", "img", "figcaption", "b", "br"),
    }
    grouped = notebook(gallery.search(photo(1), k=3, group_by="title<b>"))
    assert "<script" not in grouped
    assert "<script" not in notebook(gallery.items()) + notebook(gallery)
    assert repr(hits).splitlines()[0] == "3 hits"
    assert "sale=true" in repr(hits)
    assert "3 of 3 items" in repr(gallery.items())
    gallery.close()
    assert "<img" not in notebook(hits)


def test_a_missing_file_leaves_a_gap_in_the_notebook(
    bundle: OnnxEmbedder, shop: Path, tmp_path: Path
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes((shop / NAMES[0]).read_bytes() + name.encode())
    with kinlens.build([tmp_path / "a.png", tmp_path / "b.png"], bundle, out=tmp_path / "g") as g:
        (tmp_path / "a.png").unlink()
        assert notebook(g.search(photo(0))).count("<img") == 1


def test_tables_of_hits_and_items(shop: Path, gallery: kinlens.Gallery) -> None:
    hits = gallery.search(shop / NAMES[0], k=3)
    table = hits.to_pandas()
    assert [*table.columns] == ["id", "key", "score", "probability", "colour", "price"]
    assert table.key.tolist() == [hit.key for hit in hits]
    grouped = gallery.search(shop / NAMES[0], group_by="colour", group_size=2).to_arrow()
    assert grouped.column("group").to_pylist() == ["blue", "blue", "red", "red"]
    whole = gallery.to_arrow(vectors=True, filter="price < 20")
    assert whole.column("key").to_pylist() == [*NAMES[:2]]
    vectors = np.array(whole.column("vector").to_pylist(), np.float32)
    np.testing.assert_array_equal(vectors, gallery.vectors(NAMES[:2]))
    assert gallery.vectors().shape == (6, TINY_DIM)
    assert gallery.items(limit=2).to_pandas().price.tolist() == [0, 10]


def test_items_are_listed_counted_and_named(gallery: kinlens.Gallery) -> None:
    assert gallery.items(limit=2, sort_by="price:desc")[0].key == NAMES[5]
    page = gallery.items(limit=2, key_prefix="hat/")
    assert ([item.key for item in page], page.total) == ([*NAMES[2:4]], 3)
    assert [item.key for item in gallery.each_item(filter="price > 30")] == [*NAMES[4:]]
    assert gallery.count() == len(gallery) == 6
    assert gallery.count('colour = "red"') == 3
    assert NAMES[0] in gallery
    assert "nobody" not in gallery
    assert gallery.facets(["colour"])["colour"].values == (("blue", 3), ("red", 3))
    assert gallery.schema() == {"price": "number", "colour": "text"}
    assert Image.open(io.BytesIO(gallery.image(NAMES[0], 32))).size == (32, 24)
    assert gallery.image(NAMES[0])[1:4] == b"PNG"
    with pytest.raises(ItemNotFoundError, match="nobody"):
        gallery.item("nobody")


BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "no file": (lambda g, s: g.search(s / "nope.jpg"), SourceError, "nope.jpg does not exist"),
    "no image": (
        lambda g, s: g.search(s / "list.csv"),
        ImageError,
        "list.csv cannot be used: The file is not an image",
    ),
    "one of two": (
        lambda g, s: g.search([s / NAMES[0], b"text"]),
        ImageError,
        "The image 2 cannot be used",
    ),
    "nothing": (lambda g, s: g.search(), InvalidParameterError, "nothing to look for"),
    "object": (lambda g, s: g.search(object()), InvalidParameterError, "is not an image"),
    "floats": (
        lambda g, s: g.search(np.zeros((4, 4, 3))),
        InvalidParameterError,
        "is not an image",
    ),
    "dim": (lambda g, s: g.search([0.6, 0.8]), InvalidParameterError, "2 numbers.*takes 8"),
    "dims": (lambda g, s: g.search(np.zeros((1, 3), "f4")), InvalidParameterError, "8"),
    "vectors": (
        lambda g, s: g.search(vectors=[{"numbers": []}]),
        InvalidParameterError,
        "pass mappings with a vector",
    ),
    "ragged": (lambda g, s: g.search([[0.1], [0.2, 0.3]]), InvalidParameterError, "same length"),
    "filter": (lambda g, s: g.search(s / NAMES[0], filter="price <"), FilterError, "position"),
    "name": (
        lambda g, s: g.search(s / NAMES[0], fields=["weight"]),
        FilterError,
        "weight",
    ),
    "letters": (
        lambda g, s: g.search(positives=NAMES[0]),
        InvalidParameterError,
        "must be a list",
    ),
    "crops": (
        lambda g, s: g.search(s / NAMES[0], crops="all"),
        InvalidParameterError,
        'must be "auto", or a list',
    ),
    "crop": (
        lambda g, s: g.search(s / NAMES[0], crops=[(0, 0, 2, 1)]),
        InvalidParameterError,
        "crop",
    ),
    "crop of a vector": (
        lambda g, s: g.search(np.eye(8, dtype="f4")[0], crops="auto"),
        InvalidParameterError,
        "crops are parts of an image",
    ),
    "best": (
        lambda g, s: g.search(s / NAMES[0], crops="auto", sort_by="price"),
        InvalidParameterError,
        "omit positives",
    ),
    "rows and words": (
        lambda g, s: g.search(np.eye(8, dtype="f4"), text="red"),
        InvalidParameterError,
        "each alone",
    ),
    "options twice": (
        lambda g, s: g.search(s / NAMES[0], 3, SearchOptions(), filter="price < 3"),
        InvalidParameterError,
        "in place of filter",
    ),
    "k": (lambda g, s: g.search(s / NAMES[0], k=0), InvalidParameterError, "k = 0"),
    "probability": (
        lambda g, s: g.search(s / NAMES[0], min_probability=1.5),
        InvalidParameterError,
        "min_probability = 1.5; give a number, from 0 to 1",
    ),
    "probability and order": (
        lambda g, s: g.search(s / NAMES[0], min_probability=0.2, sort_by="price"),
        InvalidParameterError,
        "cannot be combined with sort_by",
    ),
    "combine": (
        lambda g, s: g.search(s / NAMES[0], combine="median"),
        InvalidParameterError,
        "combine = 'median' is not one of 'mean', 'best'",
    ),
    "distinct": (
        lambda g, s: g.search(s / NAMES[0], distinct="far"),
        InvalidParameterError,
        "distinct = 'far' is not one of False, True, 'near'",
    ),
    "mean of parts": (
        lambda g, s: g.search(s / NAMES[0], crops="auto", combine="mean"),
        InvalidParameterError,
        "searches with each part",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_named(name: str, gallery: kinlens.Gallery, shop: Path) -> None:
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=f"(?s){text}"):
        call(gallery, shop)


def test_a_gallery_of_another_bundle_is_refused(
    gallery: kinlens.Gallery, make_tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    other = make_tiny_bundle(seed=7)
    path = gallery.store.path
    with pytest.raises(BundleMismatchError, match="built with bundle"):
        kinlens.open_gallery(path, other.path)
    with pytest.raises(GalleryNotFoundError):
        kinlens.open_gallery(tmp_path)
    with kinlens.open_gallery(path) as opened:  # by the bundle that built it
        assert opened.search(photo(2), 1)[0].key == NAMES[2]
        assert opened.bundle.bundle_id == gallery.bundle_id
